"""Plans that a search simulated, and the kinds of plans that people compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.profile.layer_profile import RecomputeMode

__all__ = ["FoundPlan", "PlanKind", "best_by_kind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """A simulated pipeline: its strategy, and the (index in the stage space, mode) of each of its stages."""

    time_s: float
    parallelism: Parallelism
    stages: tuple[tuple[int, int], ...]


class PlanKind(StrEnum):
    """Kinds of plans that people compare; a plan is of several kinds."""

    NO_PIPELINE = "no pipeline"
    PIPELINE = "a pipeline"
    GPIPE = "schedule gpipe"
    ONE_F_ONE_B = "schedule 1f1b"
    INTERLEAVED = "schedule interleaved-1f1b"
    ZERO_BUBBLE = "schedule zero-bubble"
    EAGER = "schedule eager-1f1b"
    ZERO_BUBBLE_V = "schedule zb-v"
    DUAL_PIPE_V = "schedule dualpipe-v"
    NO_ZERO = "no ZeRO"
    ZERO = "ZeRO"
    ZERO_OVER_ALL = "ZeRO over all devices"
    NO_RECOMPUTE = "no recompute"
    FULL_RECOMPUTE = "full recompute"


def best_by_kind(plans: Iterable[FoundPlan], modes: Sequence[RecomputeMode]) -> dict[PlanKind, FoundPlan]:
    """Of plans in order of their time, the first of each kind."""
    best: dict[PlanKind, FoundPlan] = {}
    for plan in plans:
        for kind in _kinds(plan, modes):
            best.setdefault(kind, plan)
    return best


def _kinds(plan: FoundPlan, modes: Sequence[RecomputeMode]) -> list[PlanKind]:
    """What kinds a plan is of; ``modes`` are those that its stages index."""
    schedule = plan.parallelism.schedule
    kinds = [PlanKind.ZERO if plan.parallelism.zero else PlanKind.NO_ZERO]
    if plan.parallelism.zero and plan.parallelism.shard_groups == 1:
        kinds.append(PlanKind.ZERO_OVER_ALL)
    if schedule is PipelineSchedule.NONE:
        kinds.append(PlanKind.NO_PIPELINE)
    else:
        kinds += [PlanKind.PIPELINE, PlanKind(f"schedule {schedule}")]
    used = {modes[mode] for _, mode in plan.stages}
    if used == {RecomputeMode.NONE}:
        kinds.append(PlanKind.NO_RECOMPUTE)
    elif used == {RecomputeMode.FULL}:
        kinds.append(PlanKind.FULL_RECOMPUTE)
    return kinds
