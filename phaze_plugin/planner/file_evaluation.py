"""What a tool's own file costs, and what to change in it: the file is read, priced, and held against the best plan.

The best plan stays within what the tool runs, so that it can be said in the file's own words: as a diff of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from phaze.errors import PlanError, QuestionError
from phaze.hardware import Cluster, parse_cluster
from phaze.ir import RecomputeMode
from phaze.parallelism import read_strategy
from phaze.planner.planning import Evaluation, evaluate, optimize
from phaze.strategy_files import SourceFile, StrategyFile, suggested_diff, unsaid_keys

if TYPE_CHECKING:
    from phaze.planner.progress import Progress
    from phaze.question import QuestionOptions

__all__ = ["FileEvaluation", "evaluate_file"]

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
