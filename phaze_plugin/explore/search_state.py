"""What a search knows so far: boxes of designs and which of them are closed, evaluated designs, and neighbours.

*Boxes* (`DesignBox`) are sets of accelerators that a search bounds together by their best case, which has the least
seconds of every pass over the accelerators (see `design_bounds`). A box is cut in two (`cut_box`) so that the best
cases of the two parts come closer to real accelerators.

*Neighbours* of an accelerator are those that are a step away in its space along one axis, or along two (`neighbours`).
A step leads to the next value of one field and leaves all others as they are. In spaces whose vector lanes follow the
rows of an array, as in the paper's, a step along the rows moves the lanes, too, and lanes have no steps of their own.

*State.* A box is closed when the upper bound on its value (`SearchState.upper_bound`) exceeds the best value by no more
than the gap; in a search for the front, when an evaluated design is as good in throughput, area and energy, up to the
gap (`SearchState.is_closed`). From this follow the cutoffs of tasks: how high a bound must be to close a box
(`closing_time_s`), and how fast a design must be to become the best (`useful_time_s`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from phaze.explore.design_bounds import (
    FORWARD,
    TO_INPUTS,
    TO_WEIGHTS,
    FloatArray,
    IntArray,
    RefusedSlicing,
    SweptSlicing,
)
from phaze.explore.objectives import DesignCosts, Objective, least_sufficient_s
from phaze.explore.search_question import SearchQuestion
from phaze.explore.worker_tasks import Evaluation
from phaze.hardware import AcceleratorArray
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS, areas_mm2, energy_model
from phaze.tolerances import CLAIM_MARGIN, CLOSING_MARGIN, EQUAL_DESIGNS, EQUAL_RESULTS, NO_SECONDS

__all__ = [
    "DIRECTIONS",
    "DesignBox",
    "EvaluatedDesign",
    "SearchState",
    "axes",
    "best_case_distance",
    "cut_box",
    "neighbour",
    "neighbours",
]

_RECOMPUTE_WEIGHT = 0.05
"""How much a second of recomputation counts beside one of a pass when a box is cut. Few plans compute much again, so it
counts little; it only chooses where to cut."""

_ANY_SECONDS = 1e-300
"""A least total of seconds that keeps shares of it finite."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DesignBox:
    """Some accelerators of the space.

    Attributes:
        name: how the box was cut out of the space: a 0 for the lower part, a 1 for the upper one.
        points: positions of the accelerators in the space, ascending.
        bounds_s: lower bounds on the step time of each of them, by slicing.
    """

    name: str
    points: IntArray
    bounds_s: FloatArray

    def __len__(self) -> int:
        """How many accelerators."""
        return len(self.points)


def best_case_distance(box: DesignBox, point: int, slicings: Sequence[SweptSlicing], is_open: Sequence[bool]) -> float:
    """How far the best case of a box lies below one of its accelerators, as a share of that one's seconds.

    The slicing with the largest distance counts, of those that are open.
    """
    distances = [0.0]
    for swept, is_wanted in zip(slicings, is_open, strict=True):
        if is_wanted:
            pass_s, weights = swept.bounds.pass_s, _column_weights(swept)
            point_s = float((pass_s[point] * weights).sum())
            distances.append(1 - float((pass_s[box.points].min(axis=0) * weights).sum()) / point_s)
    return max(distances)


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """A column along which a box may be cut: what the cut is worth, the column, and the level between the parts."""

    worth: float
    column_s: FloatArray
    level_s: float


def cut_box(
    box: DesignBox, point: int, slicings: Sequence[SweptSlicing], is_open: Sequence[bool]
) -> tuple[IntArray, IntArray]:
    """Two parts: accelerators that pull one column of the best case far below that of `point`, and the others.

    The column is the one of an open slicing whose distance costs most seconds, so that one of the parts gets a higher
    best case there, and the other one elsewhere. Where the best case is that accelerator's own row, the column with the
    widest spread is cut. Each part has at least one accelerator; those with equal rows are cut by their order.
    """
    best: _Cut | None = None
    for swept, is_wanted in zip(slicings, is_open, strict=True):
        if is_wanted:
            cut = _cut_of_slicing(box, point, swept)
            if cut.worth > 0 and (best is None or cut.worth > best.worth):
                best = cut
    if best is not None:
        is_low = best.column_s <= best.level_s
        if is_low.all() or not is_low.any():
            is_low = best.column_s < best.column_s.max()
        if is_low.any() and not is_low.all():
            return box.points[is_low], box.points[~is_low]
    half = len(box) // 2
    return box.points[:half], box.points[half:]


def _cut_of_slicing(box: DesignBox, point: int, swept: SweptSlicing) -> _Cut:
    """The column of one slicing at which a cut gains most."""
    box_s, weights = swept.bounds.pass_s[box.points], _column_weights(swept)
    point_s = swept.bounds.pass_s[point]
    total_s = max(float((point_s * weights).sum()), _ANY_SECONDS)
    lost = (point_s - box_s.min(axis=0)) * weights / total_s
    column = int(lost.argmax())
    if lost[column] > CLAIM_MARGIN:
        level_s = 0.5 * float(point_s[column] + box_s[:, column].min())
        return _Cut(float(lost[column]), box_s[:, column], level_s)
    spread = (box_s.max(axis=0) - box_s.min(axis=0)) * weights / total_s
    column = int(spread.argmax())
    level_s = float(np.sqrt(max(float(box_s[:, column].min()), NO_SECONDS) * float(box_s[:, column].max())))
    return _Cut(CLAIM_MARGIN * min(float(spread[column]), 1.0), box_s[:, column], level_s)


def _column_weights(swept: SweptSlicing) -> FloatArray:
    """How many layers each column counts for."""
    layers = [layer.key for layer in swept.slicing.problem.graph.layers]
    passes = (FORWARD, TO_INPUTS, TO_WEIGHTS)
    return np.array(
        [
            layers.count(column.layer_key) * (1.0 if column.pass_name in passes else _RECOMPUTE_WEIGHT)
            for column in swept.slicing.columns
        ]
    )


DIRECTIONS = ("up", "down")

_FIELDS = tuple(name for name in (*INTEGER_FIELDS, *REAL_FIELDS) if name != "hbm_bytes")


def axes(points: AcceleratorArray) -> list[str]:
    """The fields along which a space has steps."""
    return [
        name
        for name in _FIELDS
        if len(np.unique(getattr(points, name))) > 1 and not (name == "vector_lanes" and _lanes_follow_rows(points))
    ]


def neighbour(points: AcceleratorArray, point: int, field: str, direction: str) -> int | None:
    """The accelerator one step along a field; None where the space has none."""
    return _moved(points, point, {field: direction})


def neighbours(points: AcceleratorArray, point: int) -> list[int]:
    """Accelerators one step away along one axis, or up one axis and down another, as where fewer cores are larger."""
    fields = axes(points)
    single = [{field: direction} for field in fields for direction in DIRECTIONS]
    exchanges = [{grown: "up", shrunk: "down"} for grown, shrunk in permutations(fields, 2)]
    found = (_moved(points, point, steps) for steps in (*single, *exchanges))
    return [position for position in found if position is not None]


def _moved(points: AcceleratorArray, point: int, steps: Mapping[str, str]) -> int | None:
    """The accelerator some steps away, with equal values of all other fields; None where the space has none."""
    is_there = np.ones(len(points), dtype=np.bool_)
    follows = "tensor_rows" in steps and _lanes_follow_rows(points)
    for name in _FIELDS:
        column = getattr(points, name)
        if name in steps:
            values = np.unique(column)
            place = int(np.searchsorted(values, column[point])) + (1 if steps[name] == "up" else -1)
            if not 0 <= place < len(values):
                return None
            is_there &= column == values[place]
        elif not (follows and name == "vector_lanes"):
            is_there &= column == column[point]
    matching = np.flatnonzero(is_there)
    return int(matching[0]) if len(matching) else None


def _lanes_follow_rows(points: AcceleratorArray) -> bool:
    """Whether lanes are no axis of their own, because there are as many as an array has rows."""
    return bool((points.vector_lanes == points.tensor_rows).all())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluatedDesign:
    """One accelerator with an evaluation for each model.

    Attributes:
        point: the accelerator's position in the space.
        evaluations: the best plan of each model.
        costs: what the plans take; None where some model has no plan that is faster than its cutoff.
        value: the objective's value; 0 without costs.
        upper_bound: no plans of this accelerator have a higher value, whatever schedules and placement leave unproven.
    """

    point: int
    evaluations: tuple[Evaluation, ...]
    costs: DesignCosts | None
    value: float
    upper_bound: float


@dataclass(slots=True, kw_only=True, eq=False)
class SearchState:
    """Everything that a search has found, and the questions that it asks about it.

    Attributes:
        question: what is searched.
        objective: what is made large.
        slicings: the slicings of all models with their bounds.
        refused: slicings that are impossible.
        areas_mm2: area of each accelerator of the space.
        static_w: leakage power of all devices together, for each accelerator of the space.
        evaluated: evaluated designs by their position in the space.
        tried: designs that were evaluated on a few slicings only, to have something to beat.
        scheduled: positions of accelerators whose layers were scheduled to bound them.
        best: the best design so far.
        closed: closed boxes, each with the upper bound on its value.
        bound_count: bounds that were computed by placement.
        floor: a value that was found elsewhere, to be beaten; 0 where there is none.
    """

    question: SearchQuestion
    objective: Objective
    slicings: list[SweptSlicing]
    refused: Sequence[RefusedSlicing]
    areas_mm2: FloatArray
    static_w: FloatArray
    evaluated: dict[int, EvaluatedDesign] = field(default_factory=dict)
    tried: dict[int, EvaluatedDesign] = field(default_factory=dict)
    scheduled: set[int] = field(default_factory=set)
    best: EvaluatedDesign | None = None
    closed: list[tuple[DesignBox, float]] = field(default_factory=list)
    bound_count: int = 0
    floor: float = 0.0

    @classmethod
    def after_sweep(
        cls,
        question: SearchQuestion,
        objective: Objective,
        slicings: list[SweptSlicing],
        refused: Sequence[RefusedSlicing],
    ) -> SearchState:
        """The state in which nothing is known but the sweep's bounds."""
        power_w = energy_model().static_power_w(question.points) * question.device_count
        return cls(
            question=question,
            objective=objective,
            slicings=slicings,
            refused=refused,
            areas_mm2=areas_mm2(question.points),
            static_w=np.asarray(power_w),
        )

    def slicings_of(self, model: int) -> list[int]:
        """Positions of a model's slicings."""
        return [index for index, swept in enumerate(self.slicings) if swept.slicing.model == model]

    def least_costs(self, box: DesignBox, bounds_s: FloatArray | None = None) -> DesignCosts:
        """The least of every cost over a box; `bounds_s`, by slicing, replaces the box's own bounds on step times."""
        seconds = box.bounds_s if bounds_s is None else bounds_s
        joules = np.array([swept.bounds.step_j[box.points].min() for swept in self.slicings])
        by_model = [self.slicings_of(model) for model in range(len(self.question.questions))]
        return DesignCosts(
            seconds=tuple(seconds[slicings] for slicings in by_model),
            joules=tuple(joules[slicings] for slicings in by_model),
            static_w=float(self.static_w[box.points].min()),
            area_mm2=float(self.areas_mm2[box.points].min()),
        )

    def upper_bound(self, box: DesignBox) -> float:
        """No accelerator of the box has a higher value."""
        return self.objective.value(self.least_costs(box))

    @property
    def closing_value(self) -> float:
        """A box whose upper bound is no higher than this is closed.

        Where the optimum is asked for (gap 0), boxes that may tie with the best are still looked at.
        """
        gap = self.question.gap * (1 - EQUAL_RESULTS)  # so that what is proven in the end is not a last digit above it
        return self._value_to_beat * (1 + gap if gap else 1 - EQUAL_DESIGNS)

    @property
    def _value_to_beat(self) -> float:
        """The value that a design must exceed to count: the best so far, here or elsewhere; 0 where there is none.

        Where the best few are wanted, it is the last of them.
        """
        if self.question.top == 1:
            return self.floor if self.best is None else max(self.floor, self.best.value)
        best_few = self.best_designs(self.question.top)
        return max(self.floor, best_few[-1].value) if len(best_few) == self.question.top else self.floor

    def best_designs(self, count: int) -> list[EvaluatedDesign]:
        """The best designs so far, best first; of equal ones the smallest."""
        designs = dict(self.tried)
        for point, design in self.evaluated.items():
            if point not in designs or design.value >= designs[point].value:
                designs[point] = design
        fitting = [design for design in designs.values() if design.costs is not None]
        return sorted(fitting, key=lambda design: (-design.value, self.areas_mm2[design.point], design.point))[:count]

    def is_closed(self, box: DesignBox, bounds_s: FloatArray | None = None) -> bool:
        """Whether nothing in a box needs to be looked at; `bounds_s` as for `least_costs`."""
        costs = self.least_costs(box, bounds_s)
        if self.question.wants_front:
            return self._is_beaten(costs)
        is_beatable = self._value_to_beat > 0
        return is_beatable and self.objective.value(costs) <= self.closing_value * (1 + CLOSING_MARGIN)

    def _is_beaten(self, costs: DesignCosts) -> bool:
        """Whether some evaluated design is as good in throughput, area and energy, up to the gap."""
        slack = 1 + self.question.gap
        rate, area, energy = self.objective.coordinates(costs)
        if rate == 0.0:
            return True
        for design in self.evaluated.values():
            if design.costs is not None:
                design_rate, design_area, design_energy = self.objective.coordinates(design.costs)
                if design_rate * slack >= rate and design_area <= area and design_energy <= energy * slack:
                    return True
        return False

    def closing_time_s(self, box: DesignBox, model: int) -> float:
        """From which step time of one model on a box would be closed; infinite if other models keep it open."""
        return self._least_time_s(box, model, lambda bounds_s: self.is_closed(box, bounds_s))

    def useful_time_s(self, box: DesignBox, model: int) -> float:
        """From which step time of one model on a design cannot become the best."""
        if self.question.wants_front or self._value_to_beat == 0:
            return math.inf
        best = self._value_to_beat * (1 if self.question.gap else 1 - EQUAL_DESIGNS)
        return self._least_time_s(
            box, model, lambda bounds_s: self.objective.value(self.least_costs(box, bounds_s)) <= best
        )

    def _least_time_s(self, box: DesignBox, model: int, suffices: Callable[[FloatArray], bool]) -> float:
        """The least step time of a model for which the box's bounds, raised to it, suffice."""
        slicings = self.slicings_of(model)

        def is_enough(seconds: float) -> bool:
            raised_s = box.bounds_s.copy()
            raised_s[slicings] = np.maximum(raised_s[slicings], seconds)
            return suffices(raised_s)

        return least_sufficient_s(is_enough, max(float(box.bounds_s[slicings].min()), NO_SECONDS))

    def judge(self, box: DesignBox, evaluations: Sequence[Evaluation]) -> EvaluatedDesign:
        """The value of an accelerator, given as a box of its own, from the evaluations of all models."""
        point = int(box.points[0])
        raised_s = box.bounds_s.copy()
        for model, evaluation in enumerate(evaluations):
            slicings = self.slicings_of(model)
            bound_s = math.inf if evaluation.bound_s is None else evaluation.bound_s
            raised_s[slicings] = np.maximum(raised_s[slicings], bound_s)
        costs = None
        if all(evaluation.time_s is not None for evaluation in evaluations):
            costs = DesignCosts(
                seconds=tuple(np.array([evaluation.time_s]) for evaluation in evaluations),
                joules=tuple(np.array([evaluation.energy_j or 0.0]) for evaluation in evaluations),
                static_w=0.0,
                area_mm2=float(self.areas_mm2[point]),
            )
        value = 0.0 if costs is None else self.objective.value(costs)
        upper_bound = self.objective.value(self.least_costs(box, raised_s))
        if costs is not None and all(_is_fastest(evaluation) for evaluation in evaluations):
            upper_bound = value  # and the energy that counts is that of these very plans
        return EvaluatedDesign(
            point=point,
            evaluations=tuple(evaluations),
            costs=costs,
            value=value,
            upper_bound=max(value, upper_bound),
        )

    def judge_alone(self, point: int, evaluations: Sequence[Evaluation]) -> EvaluatedDesign:
        """As `judge`, for an accelerator of which nothing else is known."""
        return self.judge(self.unbounded_box(point), evaluations)

    def unbounded_box(self, point: int) -> DesignBox:
        """A box of one accelerator with bounds that say nothing."""
        return DesignBox(name="", points=np.array([point]), bounds_s=np.full(len(self.slicings), NO_SECONDS))

    def keep_if_best(self, design: EvaluatedDesign) -> None:
        """Make a design the best if it has the most value, then the least area, then the first place in the space."""
        if design.costs is None:
            return
        best = self.best
        if best is None or design.value > best.value * (1 + EQUAL_DESIGNS):
            self.best = design
        elif design.value >= best.value * (1 - EQUAL_DESIGNS):
            self.best = min(best, design, key=lambda tied: (self.areas_mm2[tied.point], tied.point))


def _is_fastest(evaluation: Evaluation) -> bool:
    """Whether no plan is faster than the one that was found."""
    if evaluation.time_s is None:
        return False
    return evaluation.bound_s is None or evaluation.bound_s >= evaluation.time_s * (1 - CLAIM_MARGIN)
