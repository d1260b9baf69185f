"""What is known about a plan, in one word, and how that word follows from its gap."""

from __future__ import annotations

from enum import StrEnum

from phaze.objective import Objective, ObjectiveKind, ObjectiveValue
from phaze.tolerances import EQUAL_RESULTS

__all__ = ["PlanStatus", "objective_gap", "proven_status"]


class PlanStatus(StrEnum):
    """What is known about a plan; one above the gap is less well proven than was asked."""

    OPTIMAL = "optimal"
    WITHIN_GAP = "within the gap"
    ABOVE_GAP = "above the gap"
    INTERRUPTED = "interrupted"
    DOES_NOT_FIT = "does not fit"


def proven_status(gap: float, asked_gap: float) -> PlanStatus:
    """The status of a plan that fits and whose search ran to its end."""
    if gap <= EQUAL_RESULTS:
        return PlanStatus.OPTIMAL
    return PlanStatus.WITHIN_GAP if gap <= asked_gap + EQUAL_RESULTS else PlanStatus.ABOVE_GAP


def objective_gap(objective: Objective, value: ObjectiveValue, step_gap: float) -> float:
    """How much better another plan could be, as a part of what the plan reaches.

    Of the fewest devices the plan is to be the fastest one, too: the larger of both gaps counts.
    """
    gap = (value.reached - value.bound) / value.reached
    return max(gap, step_gap) if objective.kind is ObjectiveKind.DEVICES else gap
