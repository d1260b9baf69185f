"""Searches that draw designs instead of proving them, the baselines of the exact search, and what comes out of them.

A run is one method with one seed: it proposes designs (`design_samplers`) and is told what they are worth
(`sampled_evaluation`), until it has spent its evaluations. The best design of each run is then evaluated as the exact
search evaluates designs. Runs of several seeds tell how much is luck: the result (`SampledSearch`) holds the best of
each seed, their median and spread, and what they spent. Nothing that a run finds exceeds the bound of the exact search
over the same question.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from bisect import insort
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from phaze.errors import PlanError
from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.design_bounds import SweptSlicing
from phaze.explore.design_samplers import DesignLattice, DesignSampler, RandomSampler, SpotlightSampler, TpeSampler
from phaze.explore.objectives import Objective
from phaze.explore.reported_designs import reported_design
from phaze.explore.sampled_evaluation import DelayEvaluator, DesignEvaluator, Strategies, can_estimate, rehearsal_points
from phaze.explore.search_question import SearchQuestion
from phaze.explore.search_result import Design, model_line, value_text
from phaze.explore.worker_tasks import Evaluation
from phaze.file_access import write_whole
from phaze.json_documents import to_document, with_digest
from phaze.parallelism import Parallelism
from phaze.planner.progress import TimeLimitError
from phaze.printable_text import printable
from phaze.report.plan_text import csv_text, seconds_text

__all__ = [
    "DEFAULT_EVALUATIONS",
    "SAMPLED_METHODS",
    "Rehearsal",
    "SampledRun",
    "SampledSearch",
    "SearchMethod",
    "rehearse",
    "run_sampled_search",
    "sample_designs",
]

FORMAT = "phaze-sampled-search"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRun:
    """What a method found with one seed.

    Attributes:
        seed: of everything that was drawn.
        value: the search's objective on the best design; 0 where no design fitted.
        design: the best design with its plans; None where none fitted.
        history: the best value after each evaluation, by the method's own objective.
        processor_s: processor seconds that the run took.
    """

    seed: int
    value: float
    design: Design | None
    history: tuple[float, ...]
    processor_s: float

    @property
    def evaluations(self) -> int:
        """Designs that were evaluated."""
        return len(self.history)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSearch:
    """What a method that draws designs found, and how much of it was luck. Nothing is proven.

    Attributes:
        question: what was asked, but for models and space.
        objective: what was made large; "ratio" for several models.
        method: how designs were drawn.
        runs: one for each seed that was finished.
        asked_seeds: how many seeds were asked for.
        sweep_seconds: seconds of the bounds that all evaluations share.
        seconds: how long everything took.
    """

    question: Mapping[str, object]
    objective: str
    method: str
    runs: tuple[SampledRun, ...]
    asked_seeds: int
    sweep_seconds: float
    seconds: float

    @property
    def best(self) -> SampledRun:
        """The run with the highest value, the first of them where several have it."""
        return max(self.runs, key=lambda run: run.value)

    @property
    def median(self) -> float:
        """The median of the runs' values."""
        return statistics.median(run.value for run in self.runs)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest value of a run."""
        values = [run.value for run in self.runs]
        return min(values), max(values)

    def to_json(self) -> str:
        """Everything as a JSON document."""
        return json.dumps(
            with_digest({"format": FORMAT, "version": VERSION, **to_document(self)}), indent=2, allow_nan=False
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document."""
        write_whole(path, self.to_json())

    def convergence_csv(self) -> str:
        """The best value after each evaluation: a line for each seed and evaluation."""
        rows = [
            (self.method, run.seed, index + 1, value) for run in self.runs for index, value in enumerate(run.history)
        ]
        return csv_text(("method", "seed", "evaluations", "best_value"), rows)

    def __str__(self) -> str:
        best, (least, most) = self.best, self.spread
        seeds = f"{len(self.runs)} seeds" if len(self.runs) > 1 else "one seed"
        unfinished = f" of {self.asked_seeds} asked for" if len(self.runs) < self.asked_seeds else ""
        spent = sum(run.processor_s for run in self.runs)
        lines = [
            f"{self.method}, {seeds}{unfinished}: median {value_text(self.objective, self.median)}, from "
            f"{value_text(self.objective, least)} to {value_text(self.objective, most)}",
        ]
        if best.design is None:
            lines.append("no design that was drawn has a plan that fits")
        else:
            lines.append(f"best      {best.design.name}, {best.design.hbm_gib:g} GiB of HBM, seed {best.seed}")
            lines += [model_line(row) for row in best.design.models]
        lines += [
            "proof     none: designs were drawn, and better ones may exist; --method exact proves its answer",
            f"work      {sum(run.evaluations for run in self.runs):,} evaluations, {spent:.0f} s of processor time, "
            f"{self.sweep_seconds:.0f} s for the bounds that they share; {seconds_text(self.seconds)}",
        ]
        return "\n".join(map(printable, lines))


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


_Place = tuple[int, int]
"""A design: its accelerator's position in the space, and its memory in bytes."""

EvaluatedPlaces = dict[_Place, tuple[tuple[Evaluation, ...], float]]
"""Designs that were evaluated to the end, each with the processor seconds that it took."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rehearsal:
    """What all runs over a space share: strategies for estimates, and designs that were evaluated.

    Attributes:
        strategies: of each model, those that were the best on some designs; none where nothing is estimated.
        evaluated: designs that were evaluated to the end; runs in this process add theirs.
    """

    strategies: Strategies
    evaluated: EvaluatedPlaces = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluatingTask:
    """Designs to evaluate to the end, or what a run needs to know of them.

    Attributes:
        question: what is searched.
        slicings: the slicings of all models with their bounds.
        objective: what is made large.
        strategies: strategies for estimates.
    """

    question: SearchQuestion
    slicings: Sequence[SweptSlicing]
    objective: Objective
    strategies: Strategies

    def evaluator(self) -> DesignEvaluator:
        """Evaluates designs."""
        return DesignEvaluator(self.question, self.slicings, self.objective, self.strategies)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaceTask(EvaluatingTask):
    """One design to evaluate to the end."""

    place: _Place


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingTask(EvaluatingTask):
    """One run.

    Attributes:
        method: how designs are drawn.
        seed: of everything that is drawn.
        evaluations: designs to evaluate.
        evaluated: designs that are known already, and where the run keeps its best.
    """

    method: SearchMethod
    seed: int
    evaluations: int
    evaluated: EvaluatedPlaces


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnDesign:
    """What one run found.

    Attributes:
        place: the best design; None where nothing fitted.
        evaluations: its best plans.
        history: the best value after each evaluation, by the objective of the method.
        processor_s: processor seconds of the run.
    """

    place: _Place | None
    evaluations: tuple[Evaluation, ...]
    history: tuple[float, ...]
    processor_s: float


def run_sampled_search(
    best_first: BestFirstSearch, method: SearchMethod, seeds: int, evaluations: int, started_s: float
) -> SampledSearch:
    """Sweep, then run a method with seeds 0 to `seeds` - 1; a time limit keeps the runs that are finished."""
    runs: list[SampledRun] = []
    with suppress(TimeLimitError):
        best_first.sweep()
        rehearsal = rehearse(best_first)
        shared_s = time.monotonic() - started_s
        runs = sample_designs(best_first, method, range(seeds), evaluations, rehearsal)
    if not runs:
        raise PlanError("no run was finished before the time was over; allow more time, or fewer evaluations.")
    return SampledSearch(
        question=best_first.question.asked(),
        objective=best_first.question.objective_name,
        method=method.value,
        runs=tuple(runs),
        asked_seeds=seeds,
        sweep_seconds=shared_s,
        seconds=time.monotonic() - started_s,
    )


def rehearse(best_first: BestFirstSearch) -> Rehearsal:
    """Evaluate a few designs of a space that is swept, for the strategies that they need."""
    question, state = best_first.question, best_first.state
    if not can_estimate(question):
        return Rehearsal(strategies=())
    # Small and large memories take turns, because what fits decides about strategies, too.
    places = [
        (point, question.hbm_bytes[-1 - index % len(question.hbm_bytes)])
        for index, point in enumerate(rehearsal_points(state.slicings))
    ]
    evaluated = _rehearsed(best_first, places)
    strategies: list[list[Parallelism]] = [[] for _ in question.names]
    for evaluations, _ in evaluated.values():
        for known, evaluation in zip(strategies, evaluations, strict=True):
            if evaluation.parallelism is not None:
                known.append(evaluation.parallelism)
    return Rehearsal(strategies=strategies, evaluated=evaluated)


def sample_designs(
    best_first: BestFirstSearch,
    method: SearchMethod,
    seeds: Sequence[int],
    evaluations: int,
    rehearsal: Rehearsal | None = None,
) -> list[SampledRun]:
    """Runs of a method, one for each seed, over a space that is swept; the finished ones where the time was over."""
    state = best_first.state
    rehearsal = rehearse(best_first) if rehearsal is None else rehearsal
    tasks = [
        SamplingTask(
            question=best_first.question,
            slicings=state.slicings,
            objective=state.objective,
            strategies=rehearsal.strategies,
            method=method,
            seed=seed,
            evaluations=evaluations,
            evaluated=rehearsal.evaluated,
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


def _rehearsed(best_first: BestFirstSearch, places: Sequence[_Place]) -> EvaluatedPlaces:
    """Designs, evaluated to the end."""
    state, evaluated = best_first.state, EvaluatedPlaces()
    tasks = [
        PlaceTask(
            question=best_first.question,
            slicings=state.slicings,
            objective=state.objective,
            strategies=(),
            place=place,
        )
        for place in places
    ]

    def done(index: int, result: tuple[tuple[Evaluation, ...], float]) -> None:
        evaluated[places[index]] = result
        best_first.report(f"evaluated {best_first.question.points.names[places[index][0]]}")

    best_first.workers.run(evaluate_place, tasks, done)
    return {place: evaluated[place] for place in places}


def evaluate_place(task: PlaceTask) -> tuple[tuple[Evaluation, ...], float]:
    """The best plans of a design, and the processor seconds that they took."""
    return _evaluated(task.evaluator(), task.place)


def _evaluated(evaluator: DesignEvaluator, place: _Place) -> tuple[tuple[Evaluation, ...], float]:
    started_s = time.process_time()
    return evaluator.evaluate(*place), time.process_time() - started_s


def _told(best_first: BestFirstSearch, seed: int, drawn: DrawnDesign) -> SampledRun:
    """A run as results tell it."""
    design = None
    if drawn.place is not None and all(evaluation.time_s is not None for evaluation in drawn.evaluations):
        point, hbm_bytes = drawn.place
        design = reported_design(best_first.state, point, drawn.evaluations, hbm_bytes)
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
    evaluator = DelayEvaluator(task.question, task.slicings) if is_delay else task.evaluator()
    sampler = _sampler(task.method, lattice, task.seed)
    history: list[float] = []
    best_row, best = None, 0.0
    useful: list[float] = []  # values of designs that fit, ascending
    while len(history) < task.evaluations and (rows := sampler.propose()):
        rows = rows[: task.evaluations - len(history)]
        values = []
        for row in rows:
            value = evaluator.value(*lattice.design(row), sampler.least_useful(useful))
            values.append(value)
            if value > 0:
                insort(useful, value)
            if value > best:
                best_row, best = row, value
            history.append(best)
        sampler.tell(rows, values)
    drawn_s = time.process_time() - started_s
    place = None if best_row is None else lattice.design(best_row)
    if place is not None and place not in task.evaluated:
        task.evaluated[place] = _evaluated(task.evaluator(), place)
    evaluations, evaluated_s = ((), 0.0) if place is None else task.evaluated[place]
    return DrawnDesign(place=place, evaluations=evaluations, history=tuple(history), processor_s=drawn_s + evaluated_s)


def _sampler(method: SearchMethod, lattice: DesignLattice, seed: int) -> DesignSampler:
    if method is SearchMethod.RANDOM:
        return RandomSampler(lattice, seed)
    return TpeSampler(lattice, seed) if method is SearchMethod.TPE else SpotlightSampler(lattice, seed)
