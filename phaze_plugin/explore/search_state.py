"""What a search knows: evaluated accelerators, the best of them, boxes, and what follows for everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from phaze.explore.design_bounds import FloatArray
from phaze.explore.design_boxes import Box, Swept
from phaze.explore.objectives import TIE, Facts, Goal, least_cutoff_s
from phaze.explore.search_question import SearchQuestion
from phaze.explore.worker_tasks import Outcome
from phaze.hardware.area_energy import areas_mm2, energy_model

__all__ = ["Evaluated", "Knowledge"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluated:
    """One accelerator with an outcome per model.

    `facts` is None where some model has no plan that is faster than its cutoff; `value` is then 0. `most` is an upper
    bound on its value, whatever its schedules and placement leave unproven.
    """

    point: int
    outcomes: tuple[Outcome, ...]
    facts: Facts | None
    value: float
    most: float


@dataclass(slots=True, kw_only=True, eq=False)
class Knowledge:
    """Everything that was found so far, and the questions that the engine asks about it."""

    question: SearchQuestion
    goal: Goal
    cells: list[Swept]
    areas_mm2: FloatArray
    static_w: FloatArray  # of all devices together, by accelerator
    evaluated: dict[int, Evaluated] = field(default_factory=dict)
    best: Evaluated | None = None
    closed: list[tuple[Box, float]] = field(default_factory=list)
    bounds: int = 0

    @classmethod
    def of(cls, question: SearchQuestion, goal: Goal, cells: list[Swept]) -> Knowledge:
        """Nothing known but the rows."""
        power = energy_model().static_power_w(question.points) * question.device_count
        return cls(
            question=question, goal=goal, cells=cells, areas_mm2=areas_mm2(question.points), static_w=np.asarray(power)
        )

    def cells_of(self, model: int) -> list[int]:
        """Positions of a model's cells."""
        return [at for at, swept in enumerate(self.cells) if swept.cell.model == model]

    def facts(self, box: Box, seconds: FloatArray | None = None) -> Facts:
        """The least of everything over a box; `seconds` by cell, instead of the box's own."""
        bounds = box.bounds_s if seconds is None else seconds
        joules = np.array([swept.rows.least_j[box.points].min() for swept in self.cells])
        models = [self.cells_of(model) for model in range(len(self.question.questions))]
        return Facts(
            seconds=tuple(bounds[cells] for cells in models),
            joules=tuple(joules[cells] for cells in models),
            static_w=float(self.static_w[box.points].min()),
            area_mm2=float(self.areas_mm2[box.points].min()),
        )

    def most(self, box: Box) -> float:
        """An upper bound on the value of each accelerator of a box."""
        return self.goal.value(self.facts(box))

    @property
    def target(self) -> float:
        """A box with no more than this is closed; ties with the best are looked at if the optimum is asked for."""
        if self.best is None:
            return 0.0
        gap = self.question.gap * (1 - 1e-9)  # so that what is proven in the end is not a last digit above it
        return self.best.value * (1 + gap if gap else 1 - TIE)

    def is_closed(self, facts: Facts) -> bool:
        """Whether nothing in a box needs to be looked at."""
        if self.question.wants_front:
            return self._is_beaten(facts)
        return self.best is not None and self.goal.value(facts) <= self.target * (1 + 1e-12)

    def _is_beaten(self, facts: Facts) -> bool:
        """Whether some evaluated accelerator is as good in all three, up to the gap."""
        slack = 1 + self.question.gap
        rate, area, energy = self.goal.coordinates(facts)
        if rate == 0.0:
            return True
        for one in self.evaluated.values():
            if one.facts is not None:
                theirs = self.goal.coordinates(one.facts)
                if theirs[0] * slack >= rate and theirs[1] <= area and theirs[2] <= energy * slack:
                    return True
        return False

    def closing_s(self, box: Box, model: int) -> float:
        """From which seconds of a model on a box would be closed; infinite if other models leave it open."""
        own = self.cells_of(model)

        def is_enough(seconds: float) -> bool:
            raised = box.bounds_s.copy()
            raised[own] = np.maximum(raised[own], seconds)
            return self.is_closed(self.facts(box, raised))

        return least_cutoff_s(is_enough, max(float(box.bounds_s[own].min()), 1e-12))

    def useful_s(self, box: Box, model: int) -> float:
        """From which seconds of a model on an accelerator cannot become the best."""
        if self.question.wants_front or self.best is None:
            return math.inf
        own, best = self.cells_of(model), self.best.value * (1 if self.question.gap else 1 - TIE)

        def is_enough(seconds: float) -> bool:
            raised = box.bounds_s.copy()
            raised[own] = np.maximum(raised[own], seconds)
            return self.goal.value(self.facts(box, raised)) <= best

        return least_cutoff_s(is_enough, max(float(box.bounds_s[own].min()), 1e-12))

    def judge(self, box: Box, outcomes: Sequence[Outcome]) -> Evaluated:
        """An evaluated accelerator, given as a box of its own."""
        point = int(box.points[0])
        raised = box.bounds_s.copy()
        for model, outcome in enumerate(outcomes):
            own = self.cells_of(model)
            raised[own] = np.maximum(raised[own], math.inf if outcome.bound_s is None else outcome.bound_s)
        facts = None
        if all(outcome.time_s is not None for outcome in outcomes):
            facts = Facts(
                seconds=tuple(np.array([outcome.time_s]) for outcome in outcomes),
                joules=tuple(np.array([outcome.energy_j or 0.0]) for outcome in outcomes),
                static_w=0.0,
                area_mm2=float(self.areas_mm2[point]),
            )
        value = 0.0 if facts is None else self.goal.value(facts)
        most = self.goal.value(self.facts(box, raised))
        if facts is not None and all(_is_fastest(outcome) for outcome in outcomes):
            most = value  # and their energy is that of these very plans
        return Evaluated(point=point, outcomes=tuple(outcomes), facts=facts, value=value, most=max(value, most))

    def keep(self, found: Evaluated) -> None:
        """Remember an accelerator; the best is the one with the most value, then least area, then first in order."""
        if found.facts is None:
            return
        best = self.best
        if best is None or found.value > best.value * (1 + TIE):
            self.best = found
        elif found.value >= best.value * (1 - TIE):
            mine, theirs = ((self.areas_mm2[one.point], one.point) for one in (found, best))
            self.best = found if mine < theirs else best


def _is_fastest(outcome: Outcome) -> bool:
    """Whether no plan is faster than the one that was found."""
    return outcome.time_s is not None and (outcome.bound_s is None or outcome.bound_s >= outcome.time_s * (1 - 1e-9))
