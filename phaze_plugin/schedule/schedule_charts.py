"""A schedule for people to look at: a Gantt chart as text, and a Chrome trace for a trace viewer.

Both draw lanes: one for each core that runs jobs alone, one for the jobs that are spread over all cores of a resource,
one for the link, and one for jobs that hold nothing.

The trace follows the Trace Event Format, which chrome://tracing and Perfetto read: complete events ("ph": "X") with
times in microseconds, and one thread per lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from phaze.schedule.proven_schedule import Schedule, ScheduledJob, utilization
from phaze.schedule.scheduling_problem import Resource
from phaze.trace_events import complete_event

__all__ = ["chrome_trace", "format_gantt", "format_seconds"]

_MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
"""The characters that stand for jobs in a Gantt chart; after 62 jobs they repeat."""

_MICROSECONDS = 1e6
"""Microseconds in a second: what lengths are told in."""

_LANE_ORDER = (Resource.TENSOR, Resource.VECTOR, Resource.LINK, Resource.NONE)
"""The order of a chart's lanes from top to bottom."""


@dataclass(frozen=True, slots=True)
class _Lane:
    """One line of a chart: a core, all cores of a resource (`is_all`), the link, or nothing."""

    resource: Resource
    core: int | None = None
    is_all: bool = False

    def __str__(self) -> str:
        if self.is_all:
            return f"{self.resource} all"
        return self.resource.value if self.core is None else f"{self.resource} {self.core}"

    @property
    def position(self) -> tuple[int, int]:
        """Lanes are drawn in ascending order of this: by resource, all cores first, then core by core."""
        return _LANE_ORDER.index(self.resource), -1 if self.core is None else self.core


def format_gantt(schedule: Schedule, width: int = 72) -> str:
    """The Gantt chart with a legend and the utilisation; `width` is that of the time axis in characters."""
    lines = [_headline(schedule)]
    if not schedule.is_feasible:
        return f"{lines[0]}\n"
    shown = [entry for entry in schedule.jobs if entry.end_s > entry.start_s]
    marks = {entry.job: _MARKS[number % len(_MARKS)] for number, entry in enumerate(shown)}
    lanes: dict[_Lane, list[ScheduledJob]] = {}
    for entry in shown:
        for lane in _lanes_of(schedule, entry):
            lanes.setdefault(lane, []).append(entry)
    label_width = max((len(str(lane)) for lane in lanes), default=0)
    for lane in sorted(lanes, key=lambda lane: lane.position):
        lines.append(f"{lane!s:>{label_width}} |{_bar(lanes[lane], marks, schedule.makespan_s, width)}|")
    lines += _legend(schedule, shown, marks)
    for resource, share in utilization(schedule).items():
        if share.peak:
            lines.append(f"{resource}: peak {share.peak:.0%}, average {share.average:.1%}")
    return "\n".join(lines) + "\n"


def chrome_trace(schedule: Schedule) -> dict[str, object]:
    """The trace, ready for `json.dump`; it has no events if there is no schedule."""
    threads: dict[_Lane, int] = {}
    events: list[dict[str, object]] = []
    for entry in schedule.jobs:
        for lane in _lanes_of(schedule, entry):
            events.append(_event(schedule, entry, threads.setdefault(lane, len(threads) + 1)))
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": str(lane)}}
        for lane, thread in threads.items()
    ]
    about = {
        "layer": schedule.problem.name,
        "makespan_s": schedule.makespan_s if schedule.is_feasible else None,
        "bound_s": schedule.bound_s if schedule.is_feasible else None,
        "status": schedule.status.value,
        "method": schedule.method,
    }
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ns", "otherData": about}


def _event(schedule: Schedule, entry: ScheduledJob, thread: int) -> dict[str, object]:
    """One job on one lane of the trace."""
    job = schedule.problem.jobs[entry.job]
    about = {"is_spread": entry.is_spread, "latency_s": job.latency_s, "energy_j": job.energy_j}
    category = schedule.problem.resources[entry.job].value
    return complete_event(job.name, category, (entry.start_s, entry.end_s), (1, thread), about)


def _lanes_of(schedule: Schedule, entry: ScheduledJob) -> tuple[_Lane, ...]:
    """The lanes that a job is drawn on: its cores, all cores of its resource, the link, or none."""
    resource = schedule.problem.resources[entry.job]
    if resource in (Resource.LINK, Resource.NONE):
        return (_Lane(resource),)
    lanes = []
    if resource.uses_tensor:
        lanes.append(_Lane(Resource.TENSOR, entry.tensor_core, entry.is_spread))
    if resource.uses_vector:
        lanes.append(_Lane(Resource.VECTOR, entry.vector_core, entry.is_spread))
    return tuple(lanes)


def _headline(schedule: Schedule) -> str:
    problem = schedule.problem
    cores = f"{problem.tensor_cores} tensor and {problem.vector_cores} vector cores"
    if not schedule.is_feasible:
        return f"{problem.name} on {cores}: infeasible, {schedule.report}"
    proof = "optimal" if schedule.gap == 0.0 else f"within {schedule.gap:.2%} of the bound"
    floor = f", memory needs {format_seconds(problem.floor_s)}" if problem.floor_s > schedule.makespan_s else ""
    return f"{problem.name} on {cores}: {format_seconds(schedule.makespan_s)}, {proof} ({schedule.method}){floor}"


def _bar(entries: Sequence[ScheduledJob], marks: Mapping[int, str], span_s: float, width: int) -> str:
    """One lane of the chart; every job gets at least one character, so that short jobs may hide each other."""
    cells = ["."] * width
    for entry in sorted(entries, key=lambda entry: -(entry.end_s - entry.start_s)):
        first = min(width - 1, int(entry.start_s / span_s * width))
        last = max(first + 1, min(width, round(entry.end_s / span_s * width)))
        cells[first:last] = marks[entry.job] * (last - first)
    return "".join(cells)


def _legend(schedule: Schedule, shown: Sequence[ScheduledJob], marks: Mapping[int, str]) -> Iterator[str]:
    """One line per job in the order of starts: its mark, start, duration, lanes and name."""
    for entry in sorted(shown, key=lambda entry: (entry.start_s, entry.job)):
        lanes = ", ".join(str(lane) for lane in _lanes_of(schedule, entry))
        name = schedule.problem.jobs[entry.job].name
        times = f"{format_seconds(entry.start_s):>9} {format_seconds(entry.end_s - entry.start_s):>9}"
        yield f"{marks[entry.job]} {times}  {lanes:<20} {name}"


def format_seconds(seconds: float) -> str:
    """Seconds for people: four digits, in s, ms or us, whichever is the largest unit of which there is at least one."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * _MICROSECONDS:.4g} us"
