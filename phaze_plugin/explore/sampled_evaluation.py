"""How good a drawn design is: the planner's own evaluation, as far as the method that drew it can use it.

The value of a design is what the exact search would find for it: the same slices, schedules, placement and objective.
A method says which values it can tell from others (`DesignSampler.least_useful`). A design whose value provably is
below that is not scheduled and placed to the end: its value is then an upper bound, from closed forms, and `Outcome`
says so. What is called best was evaluated.

`DelayEvaluator` is the objective that Spotlight has of its own: the time that one device takes for all layers of the
models, forward and backward, one layer after another. It knows no network, no memory and no parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phaze.explore.design_bounds import FloatArray, SweptSlicing
from phaze.explore.objectives import DesignCosts, Metric, Objective
from phaze.explore.search_question import SearchQuestion
from phaze.explore.worker_tasks import (
    BoundTask,
    EvaluateTask,
    Evaluation,
    bound_step_time,
    evaluate_design,
    one_device_delay_s,
    schedule_options,
)
from phaze.hardware import Accelerator
from phaze.hardware.area_energy import area_mm2
from phaze.parallelism import Parallelism
from phaze.place import is_beaten
from phaze.place.model.stage_costs import update_s_per_parameter

__all__ = ["DelayEvaluator", "DesignEvaluator", "Outcome"]

_NOTHING_KNOWN = 256
"""Rows that are made room for at first; the table doubles when it is full."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """How good a design is.

    Attributes:
        value: the objective's value, 0 where some model does not fit; where it is not evaluated, an upper bound that
            was low enough, or 0 if no bound was asked for.
        is_evaluated: whether the value is that of plans.
        evaluations: the best plan of each model, where it is evaluated.
    """

    value: float
    is_evaluated: bool
    evaluations: tuple[Evaluation, ...] = ()


class DesignEvaluator:
    """Evaluates designs by the objective of the search."""

    def __init__(self, question: SearchQuestion, slicings: Sequence[SweptSlicing], objective: Objective) -> None:
        self._question, self._objective = question, objective
        self._by_model = [
            [swept for swept in slicings if swept.slicing.model == model] for model in range(len(question.names))
        ]
        self._likely: dict[str, Parallelism | None] = {}  # by slicing: what was best the last time
        self._beaten = {swept.slicing.name: _BeatenRows(len(swept.slicing.columns) + 2) for swept in slicings}

    def evaluate(self, point: int, hbm_bytes: int, least_useful: float = 0.0, *, needs_bound: bool = False) -> Outcome:
        """The value of an accelerator of the space with some memory; see `Outcome`.

        What provably is not useful has the value 0, or with `needs_bound` an upper bound on its value.
        """
        chip = replace(self._question.points.at(point), hbm_bytes=hbm_bytes)
        area = area_mm2(chip)
        cutoff_s = self._cutoff_s(area, least_useful) if least_useful > 0 else math.inf
        if cutoff_s < math.inf and self._is_slower(point, chip, cutoff_s):
            bound = self._upper_bound(point, chip, area, least_useful) if needs_bound else 0.0
            return Outcome(value=bound, is_evaluated=False)
        evaluations = tuple(self._best_plan(model, point, chip) for model in range(len(self._by_model)))
        return Outcome(value=self.value_of(evaluations, area), is_evaluated=True, evaluations=evaluations)

    def value_of(self, evaluations: Sequence[Evaluation], area: float) -> float:
        """The objective's value of one plan for each model; 0 where some model has none."""
        if any(evaluation.time_s is None for evaluation in evaluations):
            return 0.0
        costs = DesignCosts(
            seconds=tuple(np.array([evaluation.time_s]) for evaluation in evaluations),
            joules=tuple(np.array([evaluation.energy_j or 0.0]) for evaluation in evaluations),
            static_w=0.0,
            area_mm2=area,
        )
        return self._objective.value(costs)

    def _cutoff_s(self, area: float, least_useful: float) -> float:
        """The step time at which a single model has some value; infinite where several models or energy count."""
        if len(self._by_model) > 1 or self._objective.metric is Metric.PER_ENERGY:
            return math.inf
        per_area = area if self._objective.metric is Metric.PER_AREA else 1.0
        return self._objective.samples[0] / (least_useful * per_area)

    def _is_slower(self, point: int, chip: Accelerator, cutoff_s: float) -> bool:
        """Whether no plan of the single model takes less than some time, as far as it can be told quickly."""
        return all(
            float(swept.bounds.step_s[point]) >= cutoff_s or self._is_beaten(swept, point, chip, cutoff_s)
            for swept in self._promising(0, point)
        )

    def _is_beaten(self, swept: SweptSlicing, point: int, chip: Accelerator, time_s: float) -> bool:
        """Whether no plan of a slicing takes less than some time, by what is known or by a quick proof."""
        if swept.slicing.is_paper:
            return False
        problem = swept.slicing.problem_with(swept.bounds.pass_s[point], chip)
        row = np.array([*swept.bounds.pass_s[point], update_s_per_parameter(problem), -float(chip.hbm_bytes)])
        known = self._beaten[swept.slicing.name]
        if known.covers(row, time_s):
            return True
        if is_beaten(problem, time_s, swept.slicing.network):
            known.add(row, time_s)
            return True
        return False

    def _upper_bound(self, point: int, chip: Accelerator, area: float, least_useful: float) -> float:
        """A value that a design which is not useful does not exceed."""
        least_s = math.inf
        for swept in self._promising(0, point):
            if float(swept.bounds.step_s[point]) < least_s:
                problem = swept.slicing.problem_with(swept.bounds.pass_s[point], chip)
                task = BoundTask(problem=problem, cutoff_s=math.inf, is_paper=swept.slicing.is_paper)
                least_s = min(least_s, max(bound_step_time(task), float(swept.bounds.step_s[point])))
        if math.isinf(least_s):
            return 0.0
        bound = Evaluation(time_s=least_s, bound_s=least_s, parallelism=Parallelism())
        return min(least_useful, self.value_of((bound,), area))

    def _best_plan(self, model: int, point: int, chip: Accelerator) -> Evaluation:
        """The best plan of a model, slicing by slicing, each with what the last one reached as its cutoff."""
        model_question = self._question.questions[model]
        best, cutoff_s = Evaluation(time_s=None, bound_s=None), math.inf
        for swept in self._promising(model, point):
            slicing, least_s = swept.slicing, float(swept.bounds.step_s[point])
            if least_s >= cutoff_s or (cutoff_s < math.inf and self._is_beaten(swept, point, chip, cutoff_s)):
                continue
            evaluation = evaluate_design(
                EvaluateTask(
                    model_question=model_question,
                    accelerator=chip,
                    slicings=((least_s, slicing),),
                    cutoff_s=cutoff_s / (1 - model_question.gap / 2),  # what is nearer to it is not looked for
                    likely=self._likely.get(slicing.name),
                )
            )
            if evaluation.time_s is not None and evaluation.time_s < cutoff_s:
                best, cutoff_s = evaluation, evaluation.time_s
                self._likely[slicing.name] = evaluation.parallelism
        return best

    def _promising(self, model: int, point: int) -> list[SweptSlicing]:
        """The quickest slicings first; of about equal ones the smallest microbatches, which are mostly the best."""
        return sorted(
            self._by_model[model],
            key=lambda swept: (
                round(20 * math.log(float(swept.bounds.step_s[point]))),
                swept.slicing.micro_batch_size,
                swept.slicing.name,
            ),
        )


class DelayEvaluator:
    """Evaluates designs by the delay of one device's layers: the value is samples of every model per second of it."""

    def __init__(self, question: SearchQuestion, slicings: Sequence[SweptSlicing]) -> None:
        self._question = question
        self._slicings = [swept.slicing for swept in slicings if swept.slicing.tp == 1]

    def evaluate(self, point: int, hbm_bytes: int, least_useful: float = 0.0, *, needs_bound: bool = False) -> Outcome:
        """The value of an accelerator; memory counts for nothing, and nothing is left out for being useless."""
        chip = replace(self._question.points.at(point), hbm_bytes=hbm_bytes)
        delay_s = sum(self._delay_s(model, chip) for model in range(len(self._question.names)))
        return Outcome(value=0.0 if math.isinf(delay_s) else 1 / delay_s, is_evaluated=True)

    def _delay_s(self, model: int, chip: Accelerator) -> float:
        """Seconds of one sample through all layers and back, at the microbatch size that suits the chip best."""
        options = schedule_options(self._question.questions[model])
        least_s = math.inf
        for slicing in (slicing for slicing in self._slicings if slicing.model == model):
            least_s = min(least_s, one_device_delay_s(slicing, chip, options) / slicing.micro_batch_size)
        return least_s


class _BeatenRows:
    """Accelerators that take at least some time on a slicing: so does one that is no better in any number.

    The numbers are those of its row, the seconds of its update and its memory, with a minus.
    """

    def __init__(self, numbers: int) -> None:
        self._rows, self._times = np.empty((_NOTHING_KNOWN, numbers)), np.empty(_NOTHING_KNOWN)
        self._count = 0

    def covers(self, row: FloatArray, time_s: float) -> bool:
        """Whether this follows from something known."""
        known, times = self._rows[: self._count], self._times[: self._count]
        return bool(((times >= time_s) & (known <= row).all(axis=1)).any())

    def add(self, row: FloatArray, time_s: float) -> None:
        """Remember one."""
        if self._count == len(self._times):
            self._rows, self._times = (np.concatenate((table, table)) for table in (self._rows, self._times))
        self._rows[self._count], self._times[self._count] = row, time_s
        self._count += 1
