"""How good a drawn design is: what one of its plans takes for certain, and in the end what its best plan does.

While a method draws, a design is worth what a real plan of it takes (`plan_estimates.py`), or nothing where the sweep's
bounds prove that the method cannot use it (`DesignSampler.least_useful`). The best design of a run is then evaluated as
the exact search evaluates designs: the same slices, schedules, placement and objective (`DesignEvaluator.evaluate`).
Where the optimum is asked for (gap 0), where energy counts, and where everything is counted as the paper does, designs
are evaluated so from the beginning.

`DelayEvaluator` is the objective that Spotlight has of its own: the time that one device takes for all layers of the
models, forward and backward, one layer after another. It knows no network, no memory and no parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from phaze.explore.design_bounds import SweptSlicing
from phaze.explore.objectives import DesignCosts, Metric, Objective
from phaze.explore.plan_estimates import PlanEstimate, PlanEstimator, listed_problem, promise
from phaze.explore.search_question import SearchQuestion
from phaze.explore.worker_tasks import (
    EvaluateTask,
    Evaluation,
    evaluate_design,
    one_device_delay_s,
    schedule_options,
)
from phaze.hardware import Accelerator
from phaze.hardware.area_energy import area_mm2
from phaze.parallelism import Parallelism
from phaze.place import is_beaten

__all__ = ["DelayEvaluator", "DesignEvaluator", "Strategies", "can_estimate"]

Strategies = Sequence[Sequence[Parallelism]]
"""For each model the strategies that were the best on some designs."""

_NO_ESTIMATE = PlanEstimate(time_s=math.inf, parallelism=None)


def can_estimate(question: SearchQuestion) -> bool:
    """Whether the time of a plan that is nearly the best says enough of a design."""
    return question.gap > 0 and not question.is_paper and question.metric is not Metric.PER_ENERGY


class DesignEvaluator:
    """Evaluates designs by the objective of the search; without strategies nothing is estimated."""

    def __init__(
        self,
        question: SearchQuestion,
        slicings: Sequence[SweptSlicing],
        objective: Objective,
        strategies: Strategies = (),
    ) -> None:
        self._question, self._objective = question, objective
        self._by_model = [
            [swept for swept in slicings if swept.slicing.model == model] for model in range(len(question.names))
        ]
        self._estimators = [
            PlanEstimator(model_question, by_model, known)
            for model_question, by_model, known in zip(question.questions, self._by_model, strategies, strict=False)
        ]

    def value(self, point: int, hbm_bytes: int, least_useful: float = 0.0) -> float:
        """The value of some plans of an accelerator of the space with some memory: of the best, but for estimates.

        It is 0 where nothing fits, and where the value provably is below what is useful.
        """
        chip = self._chip(point, hbm_bytes)
        area = area_mm2(chip)
        if least_useful > 0 and self._is_useless(point, area, least_useful):
            return 0.0
        times_s = [estimator.estimate(point, chip).time_s for estimator in self._estimators]
        if not times_s or math.isinf(max(times_s)):
            return self.value_of(self.evaluate(point, hbm_bytes), area)
        return self.value_of([_estimated(time_s) for time_s in times_s], area)

    def evaluate(self, point: int, hbm_bytes: int) -> tuple[Evaluation, ...]:
        """The best plan of each model, up to the gap of the search."""
        chip = self._chip(point, hbm_bytes)
        return tuple(self._best_plan(model, point, chip) for model in range(len(self._by_model)))

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

    def _chip(self, point: int, hbm_bytes: int) -> Accelerator:
        return replace(self._question.points.at(point), hbm_bytes=hbm_bytes)

    def _is_useless(self, point: int, area: float, least_useful: float) -> bool:
        """Whether the sweep proves a value below some; energy is not looked at, its bounds are of no use here."""
        if self._objective.metric is Metric.PER_ENERGY:
            return False
        least_s = [min(float(swept.bounds.step_s[point]) for swept in by_model) for by_model in self._by_model]
        return self.value_of([_estimated(seconds) for seconds in least_s], area) < least_useful

    def _best_plan(self, model: int, point: int, chip: Accelerator) -> Evaluation:
        """The best plan of a model, slicing by slicing, each with what the last one reached as its cutoff."""
        model_question = self._question.questions[model]
        estimate = self._estimators[model].estimate(point, chip) if self._estimators else _NO_ESTIMATE
        best, cutoff_s = Evaluation(time_s=None, bound_s=None), math.inf
        for swept in self._promising(model, point, estimate.parallelism):
            slicing, least_s = swept.slicing, float(swept.bounds.step_s[point])
            if least_s >= cutoff_s or self._is_beaten(model, swept, chip, cutoff_s):
                continue
            task = EvaluateTask(
                model_question=model_question,
                accelerator=chip,
                slicings=((least_s, slicing),),
                cutoff_s=cutoff_s,
                likely=estimate.parallelism,
            )
            evaluation = evaluate_design(task)
            if evaluation.time_s is not None and evaluation.time_s < cutoff_s:
                best, cutoff_s = evaluation, evaluation.time_s
        return best

    def _is_beaten(self, model: int, swept: SweptSlicing, chip: Accelerator, time_s: float) -> bool:
        """Whether a quick proof tells that no plan of a slicing beats some time by more than the gap."""
        if swept.slicing.is_paper or math.isinf(time_s):
            return False
        model_question = self._question.questions[model]
        problem = listed_problem(swept.slicing, chip, schedule_options(model_question))
        return is_beaten(problem, time_s * (1 - model_question.gap / 2), swept.slicing.network)

    def _promising(self, model: int, point: int, likely: Parallelism | None) -> list[SweptSlicing]:
        """The likely slicing first, then the quickest; of about equal ones the smallest microbatches."""
        wanted = (None, None) if likely is None else (likely.micro_batch_size, likely.tp)
        return sorted(
            self._by_model[model],
            key=lambda swept: (
                (swept.slicing.micro_batch_size, swept.slicing.tp) != wanted,
                *promise(point, swept),
            ),
        )


class DelayEvaluator:
    """Evaluates designs by the delay of one device's layers: the value is samples of every model per second of it."""

    def __init__(self, question: SearchQuestion, slicings: Sequence[SweptSlicing]) -> None:
        self._question = question
        self._slicings = [swept for swept in slicings if swept.slicing.tp == 1]

    def value(self, point: int, hbm_bytes: int, least_useful: float = 0.0) -> float:
        """The value of an accelerator; memory counts for nothing, and nothing is left out for being useless."""
        chip = replace(self._question.points.at(point), hbm_bytes=hbm_bytes)
        delay_s = sum(self._delay_s(model, point, chip) for model in range(len(self._question.names)))
        return 0.0 if math.isinf(delay_s) else 1 / delay_s

    def _delay_s(self, model: int, point: int, chip: Accelerator) -> float:
        """Seconds of one sample through all layers and back, at the microbatch size that suits the chip best.

        Layers are scheduled by lists; a size that is no quicker by the sweep's bounds is not scheduled.
        """
        question = self._question.questions[model]
        options = replace(schedule_options(question), is_quick=question.gap > 0)
        per_sample_s = question.cluster.device_count / question.global_batch_size
        known = [swept for swept in self._slicings if swept.slicing.model == model]
        least_s = math.inf
        for swept in sorted(known, key=lambda swept: float(swept.bounds.step_s[point])):
            if float(swept.bounds.step_s[point]) * per_sample_s < least_s:
                slicing = swept.slicing
                least_s = min(least_s, one_device_delay_s(slicing, chip, options) / slicing.micro_batch_size)
        return least_s


def _estimated(time_s: float) -> Evaluation:
    return Evaluation(time_s=time_s, bound_s=time_s, parallelism=Parallelism())
