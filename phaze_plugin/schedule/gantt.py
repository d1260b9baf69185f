"""A schedule as text: one line per lane, time from left to right, and a line per op below."""

from __future__ import annotations

from collections.abc import Iterator

from phaze.schedule.problem import OpKind
from phaze.schedule.result import Schedule, ScheduledOp
from phaze.schedule.utilization import utilization

__all__ = ["format_gantt", "lanes_of"]

_MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def format_gantt(schedule: Schedule, width: int = 72) -> str:
    """The chart; `width` is that of the time axis in characters. Marks repeat after 62 ops."""
    lines = [_headline(schedule)]
    if not schedule.is_feasible:
        return f"{lines[0]}\n"
    shown = [entry for entry in schedule.ops if entry.end_s > entry.start_s]
    marks = {entry.op: _MARKS[number % len(_MARKS)] for number, entry in enumerate(shown)}
    lanes: dict[str, list[ScheduledOp]] = {}
    for entry in shown:
        for lane in lanes_of(schedule, entry):
            lanes.setdefault(lane, []).append(entry)
    label = max((len(lane) for lane in lanes), default=0)
    for lane in sorted(lanes, key=_lane_order):
        lines.append(f"{lane:>{label}} |{_bar(lanes[lane], marks, schedule.makespan_s, width)}|")
    lines += _legend(schedule, shown, marks)
    for kind, share in utilization(schedule).items():
        if share.peak:
            lines.append(f"{kind}: peak {share.peak:.0%}, average {share.average:.1%}")
    return "\n".join(lines) + "\n"


def lanes_of(schedule: Schedule, entry: ScheduledOp) -> tuple[str, ...]:
    """The lanes that an op is drawn on: its cores, all cores of its kind, the link, or none."""
    kind = schedule.problem.kinds[entry.op]
    if kind in (OpKind.LINK, OpKind.NONE):
        return (kind.value,)
    lanes = []
    for uses, what, core in (
        (kind.uses_tensor, "tensor", entry.tensor_core),
        (kind.uses_vector, "vector", entry.vector_core),
    ):
        if uses:
            lanes.append(f"{what} all" if entry.is_spread else f"{what} {core}")
    return tuple(lanes)


def _lane_order(lane: str) -> tuple[int, int]:
    what, _, core = lane.partition(" ")
    return ("tensor", "vector", "link", "none").index(what), -1 if core in ("", "all") else int(core)


def _headline(schedule: Schedule) -> str:
    problem = schedule.problem
    cores = f"{problem.tensor_cores} tensor and {problem.vector_cores} vector cores"
    if not schedule.is_feasible:
        return f"{problem.name} on {cores}: infeasible, {schedule.report}"
    proof = "optimal" if schedule.gap == 0.0 else f"within {schedule.gap:.2%} of the bound"
    floor = f", memory needs {_seconds(problem.floor_s)}" if problem.floor_s > schedule.makespan_s else ""
    return f"{problem.name} on {cores}: {_seconds(schedule.makespan_s)}, {proof} ({schedule.method}){floor}"


def _bar(entries: list[ScheduledOp], marks: dict[int, str], span_s: float, width: int) -> str:
    """Every op gets at least one character; short ones may hide each other."""
    cells = ["."] * width
    for entry in sorted(entries, key=lambda entry: -(entry.end_s - entry.start_s)):
        first = min(width - 1, int(entry.start_s / span_s * width))
        last = max(first + 1, min(width, round(entry.end_s / span_s * width)))
        cells[first:last] = marks[entry.op] * (last - first)
    return "".join(cells)


def _legend(schedule: Schedule, shown: list[ScheduledOp], marks: dict[int, str]) -> Iterator[str]:
    for entry in sorted(shown, key=lambda entry: (entry.start_s, entry.op)):
        where = ", ".join(lanes_of(schedule, entry))
        name = schedule.problem.ops[entry.op].name
        times = f"{_seconds(entry.start_s):>9} {_seconds(entry.end_s - entry.start_s):>9}"
        yield f"{marks[entry.op]} {times}  {where:<20} {name}"


def _seconds(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1.0 or unit == "us":
            return f"{seconds * factor:.4g} {unit}"
    raise AssertionError("unreachable")
