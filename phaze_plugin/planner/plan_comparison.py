"""What differs between two plans (`phaze.compare`), and between a tool's own file and the best plan.

A tool's own file (`evaluate_file`) is read, priced, and held against the best plan within what the tool runs, so that
what to change can be said in the file's own words: as a diff of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields, replace
from typing import TYPE_CHECKING, Unpack

from phaze.errors import PlanError, QuestionError, shown
from phaze.file_access import write_whole
from phaze.hardware import Cluster, parse_cluster
from phaze.ir import RecomputeMode
from phaze.parallelism import Parallelism, read_strategy
from phaze.plan.plan import Plan
from phaze.planner.planning import Evaluation, evaluate, optimize
from phaze.printable_text import with_printable_text
from phaze.report.html_views import comparison_page, comparison_view
from phaze.report.plan_text import TOO_NEAR, certainty_text, is_too_near, reached_text, seconds_text
from phaze.strategy_files import SourceFile, StrategyFile, suggested_diff, unsaid_keys

if TYPE_CHECKING:
    from phaze.planner.progress import Progress
    from phaze.question import QuestionOptions

__all__ = ["Comparison", "FileEvaluation", "compare", "evaluate_file"]


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


_WORTH_A_CHANGE = 0.005
"""A plan that is faster by less than this part is no reason to change a file: prices are less exact than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEvaluation:
    """A file, priced: what it says, its evaluation, the change as a diff, and remarks in whole sentences."""

    name: str
    file: StrategyFile
    evaluation: Evaluation
    diff: str
    remarks: tuple[str, ...]

    def __str__(self) -> str:
        told = ", ".join(f"{key}={_told(value)}" for key, value in self.file.strategy.items())
        lines = [f"{self.name}, read as {self.file.tool}: {told}"]
        if self.file.ignored:
            lines.append(f"passed over (nothing about how a batch is divided): {', '.join(self.file.ignored)}")
        if self.file.unknown:
            lines.append(f"unknown (of another version, or misspelt) and not priced: {', '.join(self.file.unknown)}")
        lines += [f"note: {remark}" for remark in self.remarks]
        lines += ["", str(self.evaluation)]
        if self.diff:
            lines += ["", f"what to change, for {self.file.tool}:", self.diff]
        return "\n".join(lines)


def _told(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def evaluate_file(
    source: SourceFile,
    model: object = None,
    inputs: object = None,
    *,
    strategy: Mapping[str, object] | None = None,
    compares: bool = True,
    time_limit_s: float | None = None,
    progress: Callable[[Progress], object] | None = None,
    **options: Unpack[QuestionOptions],
) -> FileEvaluation:
    """Price the strategy of a tool's file on a model, and say what to change in it.

    The batch, the sequence length and the precision are the file's where the options name none; `strategy` adds keys to
    the file's or replaces them. Without a model the file must name its sizes. All else is as in `phaze.evaluate`.
    """
    cluster = options["cluster"]
    devices = (cluster if isinstance(cluster, Cluster) else parse_cluster(str(cluster))).device_count
    file = source.read(devices, options.get("global_batch_size"))
    keys, remarks = _priced_keys({**file.strategy, **(strategy or {})})
    file = replace(file, strategy=keys)
    model = file.config if model is None else model
    if model is None:
        raise QuestionError(f"{source.name} does not say the sizes of its model; name the model too.")
    options = _completed(options, file)
    remarks += file.notes

    def price(keys: Mapping[str, object], *, compares: bool) -> Evaluation:
        return evaluate(
            model, inputs, strategy=keys, compares=compares, time_limit_s=time_limit_s, progress=progress, **options
        )

    options["target"] = file.tool
    try:
        try:
            evaluation = price(file.strategy, compares=compares)
        except PlanError as error:
            if "stages" not in file.strategy:
                raise
            # A file for another model, or with layers counted otherwise: all else of it is priced.
            remarks.append(f"the stages of the file are left to the search: {error}")
            file = replace(file, strategy=_without_stages(file.strategy))
            evaluation = price(file.strategy, compares=compares)
    except QuestionError as error:
        # What the file says is priced whatever the target declares; only the best plan must be one that the tool runs.
        remarks.append(str(error))
        options["target"] = None
        evaluation = price(_without_stages(file.strategy), compares=False)
        options["target"] = file.tool
        if compares:
            best = optimize(model, inputs, time_limit_s=time_limit_s, progress=progress, **options)
            evaluation = replace(evaluation, best=best)
    diff, more = _diff(source, evaluation)
    return FileEvaluation(name=source.name, file=file, evaluation=evaluation, diff=diff, remarks=tuple(remarks + more))


def _without_stages(strategy: Mapping[str, object]) -> dict[str, object]:
    """A strategy whose stages are left open: one recompute mode for all of them, the one that computes most again."""
    keys = {key: value for key, value in strategy.items() if key != "stages"}
    modes = keys.get("recompute")
    if isinstance(modes, list | tuple):
        keys["recompute"] = max((RecomputeMode(str(mode)) for mode in modes), key=list(RecomputeMode).index)
    return keys


def _priced_keys(strategy: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The keys of a strategy that can be priced, and what becomes of the others."""
    keys, remarks = dict(strategy), []
    for key, value in strategy.items():
        # A recompute mode per stage says nothing without the stages.
        beside = {"stages": strategy["stages"]} if key == "recompute" and "stages" in strategy else {}
        try:
            read_strategy({key: value, **beside})
        except QuestionError as error:
            del keys[key]
            remarks.append(f"{key} {value} of the file is left out: {error}")
            if key == "cp" and isinstance(value, int) and isinstance(keys.get("dp"), int):
                keys["dp"] = int(str(keys["dp"])) * value  # as many devices, each with whole sequences
                remarks.append(f"the cp devices are priced as dp {keys['dp']}")
    return keys, remarks


def _completed(options: QuestionOptions, file: StrategyFile) -> QuestionOptions:
    """The options, with what the file names where they name nothing."""
    completed = options.copy()
    if completed.get("global_batch_size") is None:
        completed["global_batch_size"] = file.global_batch_size
    if completed.get("sequence_length") is None and file.sequence_length is not None:
        completed["sequence_length"] = file.sequence_length
    if completed.get("precision") in (None, "bf16") and file.precision is not None:
        completed["precision"] = file.precision
    return completed


def _diff(source: SourceFile, evaluation: Evaluation) -> tuple[str, list[str]]:
    """The change that makes the file say the best plan, and why there is none."""
    best, plan = evaluation.best, evaluation.plan
    if best is None:
        return "", []
    if not best.is_feasible:
        return "", ["no plan that this tool runs fits these devices"]
    slower = evaluation.slower_than_best
    if plan.is_feasible and slower is not None and slower < _WORTH_A_CHANGE:
        return "", ["nothing to change: no plan that this tool runs is faster by half a percent"]
    try:
        unsaid = [f"{name} {getattr(best.strategy, name)}" for name in unsaid_keys(source, best)]
        remark = f"the file has no place for {', '.join(unsaid)}: set it where the rest of your job is set"
        return suggested_diff(source, best), [remark] if unsaid else []
    except PlanError as error:
        return "", [f"the best plan cannot be written into this file: {error}"]
