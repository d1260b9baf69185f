"""A user's own strategy as limits of the search: what is given is kept, what is left out is searched.

Keys are those of `phaze.plan.plan.Strategy`, and `stages` (layers per stage) for one that also fixes the cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from phaze.capabilities import ZERO_STAGES, PipelineSchedule
from phaze.errors import QuestionError, near_names, shown
from phaze.ir import SEARCHED_MODES, RecomputeMode
from phaze.place import Degrees, PlacementProblem
from phaze.plan.plan import Plan, Strategy
from phaze.shard import SequenceParallel

__all__ = ["KEYS", "Limits", "limits_of", "read_limits"]

KEYS = (*(field.name for field in fields(Strategy)), "stages")
NO_SCHEDULE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is fixed; None is free. `recompute` is one mode for all stages, or one per stage where stages are fixed."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    zero: int | None = None
    sequence_parallel: bool | None = None
    recompute: tuple[RecomputeMode, ...] | None = None
    stages: tuple[int, ...] | None = None

    @property
    def sequence(self) -> SequenceParallel:
        """As sharding reads it."""
        if self.sequence_parallel is None:
            return SequenceParallel.FREE
        return SequenceParallel.ON if self.sequence_parallel else SequenceParallel.OFF

    @property
    def modes(self) -> tuple[RecomputeMode, ...]:
        """Recompute modes to profile: what is searched anyway, and what is asked for."""
        return tuple(mode for mode in RecomputeMode if mode in SEARCHED_MODES or mode in (self.recompute or ()))

    def sizes(self, offered: Sequence[int], global_batch_size: int) -> tuple[int, ...]:
        """Microbatch sizes that leave every pipeline at least one; raises QuestionError where none does."""
        wanted = tuple(offered) if self.micro_batch_size is None else (self.micro_batch_size,)
        found = tuple(size for size in wanted if global_batch_size // size >= (self.dp or 1))
        if not found:
            raise QuestionError(
                f"strategy has dp {self.dp}, but {global_batch_size} samples are only "
                f"{global_batch_size // min(wanted)} microbatches of {min(wanted)}; expected one per pipeline or more. "
                "Use a smaller dp, a larger batch or smaller microbatches."
            )
        return found

    def narrow(self, problem: PlacementProblem) -> PlacementProblem:
        """The problem within these limits. A fixed tensor width is that of every stage, and devices may idle."""
        changes: dict[str, object] = {}
        capabilities = problem.capabilities
        if self.dp is not None:
            changes["pipelines"] = (self.dp,)
        if self.tp is not None:
            changes["tensor_widths"] = (self.tp,)
            capabilities = replace(capabilities, allows_mixed_widths=False)
        if self.pp is not None:
            changes["stage_counts"] = (self.pp,)
        if self.zero is not None:
            changes["zero_stages"] = (self.zero,) if self.dp != 1 else (0,)
        if self.recompute is not None:
            changes["recompute_modes"] = tuple(mode for mode in RecomputeMode if mode in self.recompute)
        if self.schedule == NO_SCHEDULE:
            changes["stage_counts"] = (1,)
        elif self.schedule is not None:
            changes["schedules"] = (PipelineSchedule(self.schedule),)
        if self.chunks == 1:
            kinds = changes.get("schedules", problem.schedules)
            assert isinstance(kinds, tuple)
            changes["schedules"] = tuple(kind for kind in kinds if kind is not PipelineSchedule.INTERLEAVED)
        elif self.chunks is not None:
            changes["schedules"] = (PipelineSchedule.INTERLEAVED,)
            changes["chunk_counts"] = (self.chunks,)
        if self.dp is not None or self.tp is not None or self.pp is not None:
            capabilities = replace(capabilities, allows_idle_devices=True)
        return replace(problem, capabilities=capabilities, **changes)  # type: ignore[arg-type]


def read_limits(strategy: Mapping[str, object] | None) -> Limits:
    """Check a strategy as users write it; raises QuestionError naming the key and what it may be."""
    if strategy is None:
        return Limits()
    if not isinstance(strategy, Mapping):
        raise QuestionError(f"strategy is {shown(strategy)}; expected a mapping with some of {', '.join(KEYS)}.")
    for key in strategy:
        if key not in KEYS:
            near = near_names(str(key), KEYS)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise QuestionError(f"strategy has the key {shown(key)}.{hint} Expected some of {', '.join(KEYS)}.")
    given = {key: value for key, value in strategy.items() if value is not None}
    limits = Limits(
        **{key: _count(key, given[key]) for key in ("dp", "tp", "pp", "micro_batch_size", "chunks") if key in given},
        schedule=_schedule(given.get("schedule")),
        zero=_zero(given.get("zero")),
        sequence_parallel=_flag(given.get("sequence_parallel")),
        recompute=_recompute(given.get("recompute")),
        stages=_stages(given.get("stages")),
    )
    return _checked(limits)


def limits_of(plan: Plan) -> Limits:
    """Limits that leave nothing but this plan; whether sequences are split is as open as it was when it was made."""
    strategy = plan.strategy
    return Limits(
        dp=strategy.dp,
        tp=strategy.tp,
        pp=strategy.pp,
        micro_batch_size=strategy.micro_batch_size,
        schedule=strategy.schedule,
        chunks=strategy.chunks,
        zero=strategy.zero,
        sequence_parallel=_flag(plan.question.strategy.get("sequence_parallel")),
        recompute=tuple(RecomputeMode(mode) for mode in strategy.recompute),
        stages=tuple(len(stage.layers) for stage in plan.stages),
    )


def _checked(limits: Limits) -> Limits:
    has_pipeline = limits.schedule not in (None, NO_SCHEDULE)
    if limits.pp == 1 and (has_pipeline or (limits.chunks or 1) > 1):
        raise QuestionError(
            f"strategy has pp 1 and schedule {limits.schedule!r} with chunks {limits.chunks}; a single stage has "
            "schedule 'none' and 1 chunk."
        )
    if limits.schedule == NO_SCHEDULE and (limits.pp or 1) > 1:
        raise QuestionError(f"strategy has schedule 'none' and pp {limits.pp}; several stages need a schedule.")
    if (limits.chunks or 1) > 1 and limits.schedule not in (None, PipelineSchedule.INTERLEAVED):
        raise QuestionError(
            f"strategy has chunks {limits.chunks} with schedule {limits.schedule!r}; expected interleaved."
        )
    count = None if limits.stages is None else len(limits.stages)
    if count is not None and limits.pp is not None and limits.pp * (limits.chunks or 1) != count:
        raise QuestionError(f"strategy has {count} stages; expected pp x chunks, {limits.pp} x {limits.chunks or 1}.")
    modes = len(limits.recompute or ())
    if modes > 1 and count is None and len(set(limits.recompute or ())) > 1:
        raise QuestionError(
            "strategy has a recompute mode per stage; say with `stages` how many layers each stage has."
        )
    if count is not None and modes not in (0, 1, count):
        raise QuestionError(
            f"strategy has {modes} recompute modes for {count} stages; expected one each, or one for all."
        )
    return limits


def _count(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise QuestionError(f"strategy has {key} {shown(value)}; expected a whole number of at least 1.")
    return value


def _schedule(value: object) -> str | None:
    allowed = (NO_SCHEDULE, *PipelineSchedule)
    if value is not None and value not in allowed:
        raise QuestionError(f"strategy has schedule {shown(value)}; expected one of {', '.join(allowed)}.")
    return None if value is None else str(value)


def _zero(value: object) -> int | None:
    if value is not None and (isinstance(value, bool) or value not in ZERO_STAGES):
        raise QuestionError(f"strategy has zero {shown(value)}; expected one of {ZERO_STAGES}.")
    return None if value is None else int(str(value))


def _flag(value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise QuestionError(f"strategy has sequence_parallel {shown(value)}; expected True or False.")
    return value


def _recompute(value: object) -> tuple[RecomputeMode, ...] | None:
    if value is None:
        return None
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, Iterable) or not all(mode in list(RecomputeMode) for mode in values) or not values:
        raise QuestionError(
            f"strategy has recompute {shown(value)}; expected one of {', '.join(RecomputeMode)}, or one per stage."
        )
    return tuple(RecomputeMode(str(mode)) for mode in values)


def _stages(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise QuestionError(f"strategy has stages {shown(value)}; expected how many layers each stage has.")
    return tuple(_count("stages", count) for count in value)


def degrees_of(limits: Limits) -> Degrees:
    """The degrees of limits that leave nothing open."""
    fixed = (limits.dp, limits.tp, limits.pp, limits.chunks, limits.zero)
    assert None not in fixed
    assert limits.schedule is not None
    dp, tp, pp, chunks, zero = (int(str(value)) for value in fixed)
    schedule = None if limits.schedule == NO_SCHEDULE else PipelineSchedule(limits.schedule)
    return Degrees(width=tp, pipelines=dp, devices=pp, chunks=chunks, schedule=schedule, zero_stage=zero)
