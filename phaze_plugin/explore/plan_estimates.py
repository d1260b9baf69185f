"""What a model takes on a design, quickly: the time of a real plan whose strategy was the best on some other design.

A full evaluation (`worker_tasks.evaluate_design`) spends most of its time on proving that no other strategy is faster.
Which strategies may be the fastest differs little between designs, so a few designs are evaluated first, from the
quickest to the slowest of the space (`rehearsal_points`), and their strategies serve for all others, with every
microbatch size. The estimate is the time of the best of these plans, with layers scheduled by lists: what a design can
do for certain, and nothing is proven of how much faster it may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from phaze.explore.design_bounds import FloatArray, Slicing, SweptSlicing
from phaze.explore.worker_tasks import on_accelerator, schedule_options
from phaze.hardware import Accelerator
from phaze.parallelism import Parallelism
from phaze.place import PlacementProblem, PreparedProblem
from phaze.place.search.stage_search import best_stages
from phaze.profile.layer_passes import ProfileOptions
from phaze.profile.model_profiles import profile_model
from phaze.question import Question

__all__ = ["PlanEstimate", "PlanEstimator", "listed_problem", "promise", "rehearsal_points"]

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
        self._options = schedule_options(question)
        self._slicings = slicings
        by_tp: dict[int, dict[Parallelism, None]] = {}
        for strategy in strategies:
            if strategy.chunks == 1:  # interleaved pipelines have searches of their own, which are slow
                by_tp.setdefault(strategy.tp, {})[_degrees(strategy)] = None
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


def _degrees(strategy: Parallelism) -> Parallelism:
    """What a placement decides of a strategy."""
    return Parallelism(
        dp=strategy.dp,
        shard=strategy.shard,
        tp=strategy.tp,
        pp=strategy.pp,
        chunks=strategy.chunks,
        zero=strategy.zero,
        schedule=strategy.schedule,
    )
