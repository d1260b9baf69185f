"""Searches that draw designs instead of proving them: the baselines that the exact search is compared with.

A run is one method with one seed: it proposes designs (`design_samplers`), which are evaluated as the exact search
evaluates them (`sampled_evaluation`), until it has spent its evaluations. Runs of several seeds tell how much is luck.
Nothing that a run finds exceeds the bound of the exact search over the same question.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from phaze.errors import PlanError
from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.design_bounds import SweptSlicing
from phaze.explore.design_lattice import DesignLattice
from phaze.explore.design_samplers import DesignSampler, RandomSampler, SpotlightSampler, TpeSampler
from phaze.explore.objectives import Objective
from phaze.explore.reported_designs import reported_design
from phaze.explore.sampled_evaluation import DelayEvaluator, DesignEvaluator, Outcome
from phaze.explore.sampled_result import SampledRun, SampledSearch
from phaze.explore.search_question import SearchQuestion
from phaze.planner.progress import TimeLimitError

__all__ = ["DEFAULT_EVALUATIONS", "SAMPLED_METHODS", "SearchMethod", "run_sampled_search", "sample_designs"]

DEFAULT_EVALUATIONS = 100
"""Designs that a run evaluates unless told: Spotlight's number."""


class SearchMethod(StrEnum):
    """How an accelerator is looked for."""

    EXACT = "exact"
    SPOTLIGHT = "spotlight"
    SPOTLIGHT_DELAY = "spotlight-delay"
    TPE = "tpe"
    RANDOM = "random"


SAMPLED_METHODS = tuple(method for method in SearchMethod if method is not SearchMethod.EXACT)
"""The methods that draw designs. `spotlight-delay` is Spotlight with its own objective, the delay of one device's
layers; its chip is then planned like any other."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingTask:
    """One run.

    Attributes:
        question: what is searched.
        slicings: the slicings of all models with their bounds.
        objective: what is made large.
        method: how designs are drawn.
        seed: of everything that is drawn.
        evaluations: designs to evaluate.
    """

    question: SearchQuestion
    slicings: Sequence[SweptSlicing]
    objective: Objective
    method: SearchMethod
    seed: int
    evaluations: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnDesign:
    """What one run found.

    Attributes:
        point: the best accelerator's position in the space; None where nothing fitted.
        hbm_bytes: its memory.
        outcome: how good it is by the search's objective.
        history: the best value after each evaluation, by the objective of the method.
        processor_s: processor seconds of the run.
    """

    point: int | None
    hbm_bytes: int
    outcome: Outcome
    history: tuple[float, ...]
    processor_s: float


def run_sampled_search(
    best_first: BestFirstSearch, method: SearchMethod, seeds: int, evaluations: int, started_s: float
) -> SampledSearch:
    """Sweep, then run a method with seeds 0 to `seeds` - 1; a time limit keeps the runs that are finished."""
    best_first.sweep()
    sweep_s = time.monotonic() - started_s
    runs = sample_designs(best_first, method, range(seeds), evaluations)
    if not runs:
        raise PlanError("no run was finished before the time was over; allow more time, or fewer evaluations.")
    return SampledSearch(
        question=best_first.question.asked(),
        objective=best_first.question.objective_name,
        method=method.value,
        runs=tuple(runs),
        asked_seeds=seeds,
        sweep_seconds=sweep_s,
        seconds=time.monotonic() - started_s,
    )


def sample_designs(
    best_first: BestFirstSearch, method: SearchMethod, seeds: Sequence[int], evaluations: int
) -> list[SampledRun]:
    """Runs of a method, one for each seed, over a space that is swept; the finished ones where the time was over."""
    state = best_first.state
    tasks = [
        SamplingTask(
            question=best_first.question,
            slicings=state.slicings,
            objective=state.objective,
            method=method,
            seed=seed,
            evaluations=evaluations,
        )
        for seed in seeds
    ]
    drawn: dict[int, DrawnDesign] = {}

    def done(index: int, design: DrawnDesign) -> None:
        drawn[index] = design
        best_first.report(f"{method} with seed {seeds[index]}")

    with suppress(TimeLimitError):
        best_first.workers.run(draw_designs, tasks, done)
    return [_told(best_first, seeds[index], drawn[index]) for index in sorted(drawn)]


def _told(best_first: BestFirstSearch, seed: int, drawn: DrawnDesign) -> SampledRun:
    """A run as results tell it."""
    design = None
    if drawn.point is not None:
        design = reported_design(best_first.state, drawn.point, drawn.outcome.evaluations, drawn.hbm_bytes)
    return SampledRun(
        seed=seed,
        value=0.0 if design is None else design.value,
        design=design,
        history=drawn.history,
        processor_s=drawn.processor_s,
    )


def draw_designs(task: SamplingTask) -> DrawnDesign:
    """Run one method with one seed."""
    started_s = time.process_time()
    is_delay = task.method is SearchMethod.SPOTLIGHT_DELAY
    sizes = task.question.hbm_bytes[-1:] if is_delay else task.question.hbm_bytes  # memory does not change a delay
    lattice = DesignLattice(task.question.points, sizes)
    end_to_end = DesignEvaluator(task.question, task.slicings, task.objective)
    evaluator = DelayEvaluator(task.question, task.slicings) if is_delay else end_to_end
    sampler = _sampler(task.method, lattice, task.seed)
    history: list[float] = []
    best_row, best = None, Outcome(value=0.0, is_evaluated=True)
    useful: list[float] = []  # values of plans, ascending
    while len(history) < task.evaluations and (rows := sampler.propose()):
        rows = rows[: task.evaluations - len(history)]
        values = []
        for row in rows:
            least = sampler.least_useful(useful)
            outcome = evaluator.evaluate(*lattice.design(row), least, needs_bound=sampler.needs_bounds)
            values.append(outcome.value)
            if outcome.is_evaluated and outcome.value > 0:
                useful = sorted([*useful, outcome.value])
                if outcome.value > best.value:
                    best_row, best = row, outcome
            history.append(best.value)
        sampler.tell(rows, values)
    point, hbm_bytes = (None, sizes[-1]) if best_row is None else lattice.design(best_row)
    if is_delay and point is not None:
        best = end_to_end.evaluate(point, hbm_bytes)
        point = point if best.value > 0 else None
    return DrawnDesign(
        point=point,
        hbm_bytes=hbm_bytes,
        outcome=best,
        history=tuple(history),
        processor_s=time.process_time() - started_s,
    )


def _sampler(method: SearchMethod, lattice: DesignLattice, seed: int) -> DesignSampler:
    if method is SearchMethod.RANDOM:
        return RandomSampler(lattice, seed)
    return TpeSampler(lattice, seed) if method is SearchMethod.TPE else SpotlightSampler(lattice, seed)
