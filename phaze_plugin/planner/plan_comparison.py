"""`phaze.compare`: what differs between two plans, side by side."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields

from phaze.errors import shown
from phaze.file_writing import write_whole
from phaze.parallelism import Parallelism
from phaze.plan.plan import Plan
from phaze.printable_text import with_printable_text
from phaze.report.comparison_page import comparison_page
from phaze.report.notebook_views import comparison_view
from phaze.report.plan_text import TOO_NEAR, certainty_text, is_too_near, reached_text, seconds_text

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both plans, as text; the third text says how the second differs."""

    name: str
    first: str
    second: str
    difference: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between two plans, and how much faster the second is."""

    first: Plan
    second: Plan
    rows: tuple[Row, ...]

    @property
    def speedup(self) -> float:
        """Samples per second of the second plan over those of the first."""
        return self.second.samples_per_s / self.first.samples_per_s

    def to_html(self) -> str:
        """The comparison's page: one self-contained HTML document."""
        return comparison_page(self.first, self.second, [astuple(row) for row in self.rows], self.speedup)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the comparison's page: whole or not at all."""
        write_whole(path, self.to_html())

    def _repr_html_(self) -> str:
        return comparison_view([astuple(row) for row in self.rows], self.speedup)

    def __str__(self) -> str:
        cells = [("", "first", "second", "second against first")]
        cells += [(row.name, row.first, row.second, row.difference) for row in with_printable_text(self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        return "\n".join([*lines, f"the second plan's throughput is {self.speedup:.4g} times the first one's"])


def compare(first: Plan, second: Plan) -> Comparison:
    """What differs between two plans: the question, the strategy, where time goes and how full devices get.

    Raises TypeError for anything but plans.
    """
    for plan in (first, second):
        if not isinstance(plan, Plan):
            raise TypeError(f"compare got {shown(plan)}; expected two plans, such as phaze.load_plan gives.")
    rows = [Row(name, read(first), read(second), "") for name, read in _FACTS.items() if read(first) != read(second)]
    for name in (field.name for field in fields(Parallelism)):
        before, after = (_words(getattr(plan.strategy, name)) for plan in (first, second))
        if before != after:
            rows.append(Row(name, before, after, ""))
    rows += [_seconds_row(name, read(first), read(second)) for name, read in _SECONDS.items()]
    rows.append(Row("certainty of steps", certainty_text(first), certainty_text(second), _certainty(first, second)))
    rows.append(_figure("tokens/s", first.tokens_per_s, second.tokens_per_s, "{:,.0f}"))
    rows.append(_figure("MFU", first.mfu, second.mfu, "{:.1%}"))
    rows.append(_figure("J per token", first.energy["per_token_j"], second.energy["per_token_j"], "{:.4g}"))
    rows.append(_figure("fullest device, GiB", _fullest(first), _fullest(second), "{:.1f}"))
    return Comparison(first, second, tuple(rows))


_FACTS: dict[str, Callable[[Plan], str]] = {
    "model": lambda plan: plan.model.name,
    "devices": lambda plan: f"{plan.cluster.device_count} x {plan.cluster.accelerator.name}",
    "global batch": lambda plan: str(plan.question.global_batch_size),
    "precision": lambda plan: plan.question.precision.name,
    "status": lambda plan: plan.status.value,
    "objective": lambda plan: f"{plan.question.objective.kind.value}: {reached_text(plan)}",
}

_SECONDS: dict[str, Callable[[Plan], float]] = {
    "step": lambda plan: plan.step_time_s,
    "compute": lambda plan: plan.step_time_parts.compute_s,
    "exposed communication": lambda plan: plan.step_time_parts.exposed_communication_s,
    "bubble": lambda plan: plan.step_time_parts.bubble_s,
    "update": lambda plan: plan.step_time_parts.update_s,
    "bound": lambda plan: plan.bound_s,
}


def _certainty(first: Plan, second: Plan) -> str:
    """Whether the order of two steps is less certain than predictions are."""
    is_near = is_too_near(first, second.step_time_s) or is_too_near(second, first.step_time_s)
    return TOO_NEAR if is_near else ""


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{item} x{value.count(item)}" for item in dict.fromkeys(value))
    return str(value)


def _seconds_row(name: str, first_s: float, second_s: float) -> Row:
    return Row(name, seconds_text(first_s), seconds_text(second_s), _change(first_s, second_s))


def _figure(name: str, first: float, second: float, form: str) -> Row:
    return Row(name, form.format(first), form.format(second), _change(first, second))


def _change(first: float, second: float) -> str:
    """The change from the first figure to the second, in percent."""
    return f"{second / first - 1:+.2%}" if first > 0 else ""


def _fullest(plan: Plan) -> float:
    return max(stage.memory_bytes["total"] for stage in plan.stages) / 2**30
