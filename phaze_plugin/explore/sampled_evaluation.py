"""How good a drawn design is: what one of its plans takes for certain, and in the end what its best plan does.

*Estimates.* A full evaluation (`worker_tasks.evaluate_design`) spends most of its time on proving that no other
strategy is faster. Which strategies may be the fastest differs little between designs, so a few designs are evaluated
first, from the quickest to the slowest of the space (`rehearsal_points`), and their strategies serve for all others,
with every microbatch size. The estimate (`PlanEstimator`) is the time of the best of these plans, with layers scheduled
by lists: what a design can do for certain, and nothing is proven of how much faster it may be.

*Evaluations.* While a method draws, a design is worth what such a real plan of it takes, or nothing where the sweep's
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
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from phaze.explore.design_bounds import FloatArray, Slicing, SweptSlicing
from phaze.explore.objectives import DesignCosts, Metric, Objective
from phaze.explore.search_question import SearchQuestion
from phaze.explore.worker_tasks import (
    EvaluateTask,
    Evaluation,
    evaluate_design,
    on_accelerator,
    one_device_delay_s,
    placement_degrees,
)
from phaze.hardware import Accelerator
from phaze.hardware.accelerator import area_mm2
from phaze.parallelism import Parallelism
from phaze.place import PlacementProblem, PreparedProblem, is_beaten
from phaze.place.search.stage_search import best_stages
from phaze.profile.layer_passes import ProfileOptions
from phaze.profile.model_profiles import profile_model, profile_options
from phaze.question import Question

__all__ = [
    "DelayEvaluator",
    "DesignEvaluator",
    "PlanEstimate",
    "PlanEstimator",
    "Strategies",
    "can_estimate",
    "listed_problem",
    "promise",
    "rehearsal_points",
]

_REHEARSED_RANKS = (0.0, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.9)
"""Which designs are evaluated first, by their ranks from the quickest (0) to the slowest (1). How quick a chip is
beside its links decides most about its strategy; the best designs, which methods look for, are among the quick."""

_PRICED_SLICINGS = 3
"""Microbatch sizes and tp whose layers are scheduled for an estimate: those that the bounds of the sweep rank first.
One alone was up to 5 % off where these bounds are loose; each costs some 20 ms."""

_NEARLY_AS_GOOD = 1.1
"""Plans that take up to so many times the best by the sweep's bounds are priced again with scheduled layers."""

_NODES = 400
"""Nodes of branch and bound for the stages of one strategy: some dives to the end of the longest pipelines. More would
improve a plan by parts of a percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """A plan of a design.

    Attributes:
        time_s: seconds of a step; infinite where no strategy that is known fits.
        parallelism: its strategy; None where none fits.
    """

    time_s: float
    parallelism: Parallelism | None


class PlanEstimator:
    """Estimates one model on designs of a swept space."""

    def __init__(self, question: Question, slicings: Sequence[SweptSlicing], strategies: Sequence[Parallelism]) -> None:
        """`strategies` were the best on other designs; what they say of microbatches and recompute is left out."""
        self._options = profile_options(question)
        self._slicings = slicings
        by_tp: dict[int, dict[Parallelism, None]] = {}
        for strategy in strategies:
            if strategy.chunks == 1:  # interleaved pipelines have searches of their own, which are slow
                by_tp.setdefault(strategy.tp, {})[placement_degrees(strategy)] = None
        self._strategies = by_tp

    def estimate(self, point: int, chip: Accelerator) -> PlanEstimate:
        """The best plan of an accelerator of the space, whose memory is that of `chip`."""
        best = PlanEstimate(time_s=math.inf, parallelism=None)
        for slicing, strategies in self._ranked(point, chip):
            prepared = PreparedProblem.of(listed_problem(slicing, chip, self._options), network=slicing.network)
            for strategy in strategies:
                time_s = self._time_s(prepared, strategy, best.time_s)
                if time_s < best.time_s:
                    parallelism = replace(strategy, micro_batch_size=slicing.micro_batch_size)
                    best = PlanEstimate(time_s=time_s, parallelism=parallelism)
        return best

    def _ranked(self, point: int, chip: Accelerator) -> list[tuple[Slicing, list[Parallelism]]]:
        """The few slicings with the quickest plans by the sweep's bounds, with the strategies that come near these."""
        least_s, times = math.inf, list[tuple[float, Slicing, Parallelism]]()
        for swept in sorted(self._slicings, key=partial(promise, point)):
            if swept.slicing.tp not in self._strategies or swept.bounds.step_s[point] >= least_s * _NEARLY_AS_GOOD:
                continue
            problem = swept.slicing.problem_with(swept.bounds.pass_s[point], chip)
            prepared = PreparedProblem.of(problem, network=swept.slicing.network)
            for strategy in self._strategies[swept.slicing.tp]:
                if strategy.dp <= problem.micro_batches:  # of larger microbatches there are fewer
                    time_s = self._time_s(prepared, strategy, least_s * _NEARLY_AS_GOOD)
                    times.append((time_s, swept.slicing, strategy))
                    least_s = min(least_s, time_s)
        ranked: dict[str, tuple[Slicing, list[Parallelism]]] = {}
        for time_s, slicing, strategy in sorted(times, key=lambda entry: entry[0]):
            if time_s < math.inf and time_s <= least_s * _NEARLY_AS_GOOD:
                ranked.setdefault(slicing.name, (slicing, []))[1].append(strategy)
        return list(ranked.values())[:_PRICED_SLICINGS]

    def _time_s(self, prepared: PreparedProblem, strategy: Parallelism, cutoff_s: float) -> float:
        """Seconds of a plan with a strategy; infinite where none was found that fits and beats the cutoff."""
        search = prepared.stage_search_below(strategy, cutoff_s)
        if search is None:
            return math.inf
        time_s = best_stages(search, cutoff_s, _NODES, gap=self._options.gap).time_s
        return time_s if time_s < cutoff_s else math.inf


def promise(point: int, swept: SweptSlicing) -> tuple[int, int, str]:
    """The quickest slicings of a design first; of about equal ones the smallest microbatches, which are mostly best."""
    slicing = swept.slicing
    return round(20 * math.log(float(swept.bounds.step_s[point]))), slicing.micro_batch_size, slicing.name


def listed_problem(slicing: Slicing, chip: Accelerator, options: ProfileOptions) -> PlacementProblem:
    """The placement problem of a slicing on an accelerator, with layers scheduled by lists and closed-form bounds."""
    sharded = on_accelerator(slicing.sharded, chip)
    profiles = profile_model(sharded, replace(options, is_quick=True)).profiles
    return replace(slicing.problem, profiles=profiles, cluster=replace(slicing.problem.cluster, accelerator=chip))


def rehearsal_points(slicings: Sequence[SweptSlicing]) -> list[int]:
    """The designs whose strategies serve for all others, from quick to slow by the sweep's bounds, each once."""
    least_s: FloatArray = np.min([swept.bounds.step_s for swept in slicings], axis=0)
    order = np.argsort(least_s, kind="stable")
    places = [round(rank * (len(order) - 1)) for rank in _REHEARSED_RANKS]
    return [int(order[place]) for place in dict.fromkeys(places)]


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
        problem = listed_problem(swept.slicing, chip, profile_options(model_question))
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
        options = replace(profile_options(question), is_quick=question.gap > 0)
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
