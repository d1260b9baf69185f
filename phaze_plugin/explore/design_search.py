"""`phaze.search`: one call from models and a space to the accelerator to build, its plans and a certificate.

`run_search` runs the best-first search, then settles what it leaves open about the best design: the least memory that
costs nothing, the plans as the planner tells them, and what is proven about everything else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Unpack, overload

from phaze.errors import QuestionError, explained_by, shown
from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.executors import Workers, open_workers
from phaze.explore.journal import Journal
from phaze.explore.network_search import search_networks
from phaze.explore.objectives import pareto_front
from phaze.explore.reported_designs import plans_fit, reported_design, sensitivity_rows, with_plans
from phaze.explore.sampled_search import DEFAULT_EVALUATIONS, SampledSearch, SearchMethod, run_sampled_search
from phaze.explore.search_question import SearchOptions, SearchQuestion, ask_search
from phaze.explore.search_result import (
    Certificate,
    Design,
    Explored,
    MemoryRow,
    PrunedBox,
    SearchProgress,
    SearchResult,
    SensitivityRow,
)
from phaze.explore.search_state import EvaluatedDesign, SearchState
from phaze.explore.worker_tasks import Evaluation
from phaze.installed import installed_plugins
from phaze.plan.plan import Plan
from phaze.planner.planning import plan_for
from phaze.planner.progress import TimeLimitError, Watch
from phaze.tolerances import EQUAL_DESIGNS

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["run_search", "search"]

_GIB = 2**30

_UNNOTICED_S = 1.0
"""A time limit that is exceeded by no more than this is not explained."""


@overload
def search(
    models: object,
    inputs: object = None,
    *,
    method: Literal["exact"] = "exact",
    executor: Executor | str | None = None,
    trust_scheduler: bool = False,
    journal: str | os.PathLike[str] | None = None,
    time_limit_s: float | None = None,
    sensitivity: bool = False,
    progress: Callable[[SearchProgress], object] | None = None,
    plugins: PluginManager | None = None,
    **options: Unpack[SearchOptions],
) -> SearchResult: ...


@overload
def search(
    models: object,
    inputs: object = None,
    *,
    method: Literal["spotlight", "spotlight-delay", "tpe", "random"],
    seeds: int = 1,
    evaluations: int = DEFAULT_EVALUATIONS,
    executor: Executor | str | None = None,
    trust_scheduler: bool = False,
    time_limit_s: float | None = None,
    progress: Callable[[SearchProgress], object] | None = None,
    plugins: PluginManager | None = None,
    **options: Unpack[SearchOptions],
) -> SampledSearch: ...


@explained_by("search")
def search(
    models: object,
    inputs: object = None,
    *,
    method: str = "exact",
    seeds: int = 1,
    evaluations: int = DEFAULT_EVALUATIONS,
    executor: Executor | str | None = None,
    trust_scheduler: bool = False,
    journal: str | os.PathLike[str] | None = None,
    time_limit_s: float | None = None,
    sensitivity: bool = False,
    progress: Callable[[SearchProgress], object] | None = None,
    plugins: PluginManager | None = None,
    **options: Unpack[SearchOptions],
) -> SearchResult | SampledSearch:
    """The best accelerator of a space for one model or several, each with its best plan, and a proof.

    A design is an accelerator of `space` with one of the memories of `hbm_gib`. The model trains on `devices` of them,
    joined by `network`. `objective` says what is best: "throughput", "throughput-per-area" or "throughput-per-energy".
    For several models, each model's value is divided by that of tpuv4-paper; the ratios are averaged with `weights`, or
    the worst of them counts (`combine`). With `front`, all designs are found that no other beats in throughput, area
    and energy. `SearchOptions` explains every option. The same question has the same answer.

    The other methods are baselines, which draw designs at random and prove nothing: "spotlight" and "tpe" (with the
    extra `baselines`), "random", and "spotlight-delay", which looks at the layers of one device only. Each runs with
    the seeds 0 to `seeds` - 1 and evaluates `evaluations` designs; the answer is a `SampledSearch`.

    `executor` is a concurrent.futures.Executor, "processes:4", "serial" or "dask://host:port"; the answer does not
    depend on it. A Dask scheduler on another machine needs `trust_scheduler`. With a `journal` file, a search that was
    killed goes on where it was. `time_limit_s` and Ctrl-C end it with the best so far. With `top`, the answer has the
    best few designs; with `sensitivity`, it has the best design with each size one step larger and smaller. For one
    model, `network` may be several networks.

    Raises QuestionError (a ValueError) for a wrong argument, and other errors of `phaze.errors` if nothing fits.
    """
    chosen = _checked_method(method, seeds, evaluations, journal, is_front=bool(options.get("front")))
    if time_limit_s is not None and not (isinstance(time_limit_s, int | float) and time_limit_s > 0):
        raise QuestionError(f"time_limit_s is {shown(time_limit_s)}; expected a positive number of seconds, or None.")
    if progress is not None and not callable(progress):
        raise QuestionError(f"progress is {shown(progress)}; expected a function of one SearchProgress.")
    networks = _networks(options, chosen, models, journal)
    found_plugins, started_s = plugins or installed_plugins(), time.monotonic()
    questions = [ask_search(models, inputs, {**options, "network": name}, found_plugins) for name in networks]
    with ExitStack() as stack:
        workers = stack.enter_context(open_workers(executor, trust_scheduler=trust_scheduler))
        kept = Journal() if journal is None else Journal.open(journal, questions[0].journal_header())
        stack.callback(kept.close)
        workers.ends_at_s = None if time_limit_s is None else started_s + time_limit_s
        watch = _Watched(workers, kept, progress, time_limit_s, started_s)
        if chosen is not SearchMethod.EXACT:
            return run_sampled_search(watch.prepare(questions[0], 0.0), chosen, seeds, evaluations, started_s)
        settle = partial(run_search, has_sensitivity=sensitivity)
        if len(questions) > 1:  # without a journal's file: results on one network are no use to another
            result = search_networks(questions, replace(watch, journal=None).prepare, settle)
        else:
            result = settle(watch.prepare(questions[0], 0.0), started_s)
        return replace(result, overtime=watch.overtime())


@dataclass(frozen=True, slots=True, eq=False)
class _Watched:
    """Makes searches that run on the same workers, tell the same listener and end at the same time."""

    workers: Workers
    journal: Journal | None
    listener: Callable[[SearchProgress], object] | None
    time_limit_s: float | None
    started_s: float
    late: list[tuple[float, str]] = field(default_factory=list)

    def overtime(self) -> str:
        """Why a search took longer than its time limit; nothing where it did not, by more than what nobody notices."""
        over_s = 0.0 if self.time_limit_s is None else time.monotonic() - self.started_s - self.time_limit_s
        if over_s <= _UNNOTICED_S:
            return ""
        noticed_s, doing = self.late[0] if self.late else (0.0, "")
        parts = [f"{noticed_s:.1f} s until {doing} was done, which is not ended half-way"] if self.late else []
        parts.append(f"{over_s - noticed_s:.1f} s for the plans of the answer")
        return f"{over_s:.1f} s longer than the limit of {self.time_limit_s:g} s: {', '.join(parts)}"

    def prepare(self, question: SearchQuestion, floor: float) -> BestFirstSearch:
        """The search of a question, with a value to beat."""
        journal = Journal() if self.journal is None else self.journal
        best_first = BestFirstSearch(question=question, workers=self.workers, journal=journal, floor=floor)
        reporter = _ProgressReporter(best_first, self.listener, self.time_limit_s, self.started_s, self.late)
        best_first.report = reporter.report
        return best_first


def _networks(options: SearchOptions, method: SearchMethod, models: object, journal: object) -> tuple[str, ...]:
    """The networks to search; raises QuestionError where several of them cannot be."""
    network = options.get("network", "paper")
    names = (network,) if isinstance(network, str) else tuple(network)
    if not names or len(set(names)) < len(names):
        raise QuestionError(f"network is {shown(network)}; expected the text of one, or several different ones.")
    if len(names) > 1:
        unable = {
            "several models (their ratios are to each network's own)": isinstance(models, list | tuple)
            and len(models) > 1,
            "a front": bool(options.get("front")),
            "a journal": journal is not None,
            f"method {method.value!r}": method is not SearchMethod.EXACT,
        }
        for what, is_asked in unable.items():
            if is_asked:
                raise QuestionError(f"several networks are not searched with {what}; search them one by one.")
    return names


def _checked_method(
    method: object, seeds: object, evaluations: object, journal: object, *, is_front: bool
) -> SearchMethod:
    """The method; raises QuestionError for one that is unknown, or what it cannot do."""
    if method not in list(SearchMethod):
        raise QuestionError(f"method is {shown(method)}; expected one of {', '.join(SearchMethod)}.")
    for name, count in (("seeds", seeds), ("evaluations", evaluations)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise QuestionError(f"{name} is {shown(count)}; expected a whole number of at least 1.")
    chosen = SearchMethod(str(method))
    if chosen is not SearchMethod.EXACT and (journal is not None or is_front):
        what = "keeps no journal" if journal is not None else "proves no front"
        raise QuestionError(f"method {chosen.value!r} draws designs and {what}; leave it out, or search exactly.")
    return chosen


@dataclass(frozen=True, slots=True, eq=False)
class _ProgressReporter:
    """Tells a listener where a search stands, and ends the search when its time is over; `late` hears by how much."""

    best_first: BestFirstSearch
    listener: Callable[[SearchProgress], object] | None
    time_limit_s: float | None
    started_s: float
    late: list[tuple[float, str]]

    def report(self, doing: str) -> None:
        """Called after every task."""
        elapsed_s = time.monotonic() - self.started_s
        if self.listener is not None:
            self.listener(self._progress(doing, elapsed_s))
        if self.time_limit_s is not None and elapsed_s > self.time_limit_s:
            self.late.append((elapsed_s - self.time_limit_s, doing))
            raise TimeLimitError

    def _progress(self, doing: str, elapsed_s: float) -> SearchProgress:
        state, points = self.best_first.state_so_far, len(self.best_first.question.points)
        open_points = sum(len(box) for box in self.best_first.boxes_left)
        is_started = state is not None and (bool(state.closed) or open_points > 0)
        left = open_points if is_started else points
        done = points - left
        best = None if state is None else state.best
        return SearchProgress(
            doing=doing,
            points=points,
            left=left,
            evaluated=0 if state is None else len(state.evaluated),
            best=None if best is None else best.value,
            bound=None if best is None or not is_started else self.best_first.proven_bound(),
            elapsed_s=elapsed_s,
            remaining_s=elapsed_s * left / done if done else None,
        )


def run_search(best_first: BestFirstSearch, started_s: float, *, has_sensitivity: bool = False) -> SearchResult:
    """Search, then settle memory and plans of the best design, and what else is asked about it."""
    state = best_first.run()
    assert state.best is not None
    best, question = state.best, best_first.question
    evaluations = {question.hbm_bytes[-1]: best.evaluations, **_with_less_memory(best_first, best)}
    values = {size: _value(state, best.point, by_model) for size, by_model in evaluations.items()}
    least = best.value * (1 - EQUAL_DESIGNS)
    hbm_bytes = min(size for size, value in values.items() if value is not None and value >= least)
    return SearchResult(
        question=question.asked(),
        objective=question.objective_name,
        best=reported_design(state, best.point, evaluations[hbm_bytes], hbm_bytes),
        memories=tuple(MemoryRow(hbm_gib=size / _GIB, value=values[size]) for size in sorted(values)),
        front=() if question.is_paper else tuple(_front(state)),
        is_front_proven=question.wants_front and not best_first.is_interrupted,
        certificate=_certificate(best_first),
        plans={} if question.is_paper else _plans(question, best.point, evaluations[hbm_bytes], hbm_bytes),
        refused={
            f"{question.names[refused.model]}, microbatch {refused.micro_batch_size}, tp {refused.tp}": refused.reason
            for refused in state.refused
        },
        seconds=time.monotonic() - started_s,
        explored=_explored(best_first),
        top=_top(best_first),
        sensitivity=_sensitivity(best_first) if has_sensitivity else (),
    )


def _top(best_first: BestFirstSearch) -> tuple[Design, ...]:
    """The best few designs with the largest memory, where they were asked for."""
    state, question = best_first.state, best_first.question
    if question.top == 1:
        return ()
    return tuple(
        reported_design(state, design.point, design.evaluations, question.hbm_bytes[-1])
        for design in state.best_designs(question.top)
    )


def _sensitivity(best_first: BestFirstSearch) -> tuple[SensitivityRow, ...]:
    """The steps along all axes, as far as the time allows."""
    rows: list[SensitivityRow] = []
    if not best_first.is_interrupted:
        with suppress(TimeLimitError, KeyboardInterrupt):
            rows.extend(sensitivity_rows(best_first))
    return tuple(rows)


def _with_less_memory(best_first: BestFirstSearch, best: EvaluatedDesign) -> dict[int, tuple[Evaluation, ...]]:
    """The best design with each smaller memory: the same plans where they fit, else the best that do.

    Where energy counts, other plans are not looked for, because plans for less memory may draw less. An interruption
    leaves out the sizes that are not done.
    """
    question, evaluations = best_first.question, dict[int, tuple[Evaluation, ...]]()
    if best_first.is_interrupted:
        return evaluations
    with suppress(TimeLimitError, KeyboardInterrupt):
        for size in question.hbm_bytes[:-1]:
            if not question.is_paper and plans_fit(best_first.state, best, size):
                evaluations[size] = best.evaluations
            elif not question.counts_energy:
                evaluations[size] = tuple(best_first.tasks.evaluate_with_memory(best.point, size))
    return evaluations


def _value(state: SearchState, point: int, evaluations: Sequence[Evaluation]) -> float | None:
    """The value of a design; None where some model does not fit."""
    judged = state.judge_alone(point, evaluations)
    return None if judged.costs is None else judged.value


def _front(state: SearchState) -> Iterator[Design]:
    """The designs of the front, each with the least memory in which its plans fit."""
    assert state.best is not None
    designs = {state.best.point: state.best, **state.evaluated}
    fitting = [(designs[point], costs) for point in sorted(designs) if (costs := designs[point].costs) is not None]
    for index in pareto_front([state.objective.coordinates(costs) for _, costs in fitting]):
        design, _ = fitting[index]
        sizes = [size for size in state.question.hbm_bytes if plans_fit(state, design, size)]
        yield reported_design(state, design.point, design.evaluations, (sizes or [state.question.hbm_bytes[-1]])[0])


def _plans(question: SearchQuestion, point: int, evaluations: Sequence[Evaluation], hbm_bytes: int) -> dict[str, Plan]:
    """The plans of a design by model: each is priced again by the planner, and `phaze verify` takes it."""
    chip = replace(question.points.at(point), hbm_bytes=hbm_bytes)
    plans = {}
    for name, model_question, evaluation in zip(question.names, question.questions, evaluations, strict=True):
        on_chip = replace(
            model_question,
            cluster=replace(model_question.cluster, accelerator=chip),
            gap=model_question.gap / 2,  # as it was scheduled in the search
        )
        plans[name] = plan_for(on_chip.with_strategy(evaluation.strategy()), Watch())
    return plans


def _certificate(best_first: BestFirstSearch) -> Certificate:
    state, question = best_first.state, best_first.question
    assert state.best is not None
    bound = best_first.proven_bound()
    designs = {**state.tried, **state.evaluated}.values()
    screened = () if best_first.screened is None else best_first.screened.closed
    scheduled = {design.point for design in designs if any(plan.scheduled for plan in design.evaluations)}
    placed = {design.point for design in designs if any(plan.placed for plan in design.evaluations)}
    return Certificate(
        value=state.best.value,
        bound=bound,
        gap=bound / state.best.value - 1,
        points=(len(question.points) + sum(cells.points for cells in screened))
        * (1 if question.counts_energy else len(question.hbm_bytes)),
        scheduled=len(scheduled | state.scheduled),
        placed=len(placed),
        bounds=state.bound_count,
        is_finished=not best_first.is_interrupted,
        scope=_scope(question),
        pruned=tuple(
            PrunedBox(
                name=box.name,
                points=len(box),
                bound=upper_bound,
                least_area_mm2=float(state.areas_mm2[box.points].min()),
                most_area_mm2=float(state.areas_mm2[box.points].max()),
            )
            for box, upper_bound in state.closed
        )
        + tuple(
            PrunedBox(
                name=f"screened{cells.level}",
                points=cells.points,
                bound=cells.bound,
                least_area_mm2=cells.least_area_mm2,
                most_area_mm2=cells.most_area_mm2,
            )
            for cells in screened
        ),
    )


def _scope(question: SearchQuestion) -> str:
    """What the certificate speaks about: the choices among which nothing better was left."""
    if question.is_paper:
        return "as the paper counts: its schedules, placements and memory; slices as on tpuv4-paper"
    kinds = (
        f"{' and '.join(kind.value for kind in question.schedules)} pipelines" if question.schedules else "one stage"
    )
    first = question.questions[0]
    energy = "; energy is that of the fastest plans with the largest memory" if question.counts_energy else ""
    sizes, degrees = (", ".join(map(str, counts)) for counts in (first.micro_batch_sizes, first.tp_degrees))
    fixed = [f"{key} {value}" for key, value in first.fixed.items()]
    given = f"with {', '.join(fixed)} given, " if fixed else ""
    return (
        f"{given}for {kinds}, microbatches of {sizes}, tp {degrees}, all other degrees, ZeRO stages and recompute "
        f"modes; slices as on tpuv4-paper{energy}"
    )


def _explored(best_first: BestFirstSearch) -> tuple[Explored, ...]:
    """Every accelerator of the space, in its order, and how it was dealt with."""
    state, names = best_first.state, best_first.question.points.names
    still_open = [(box, -negative_bound) for negative_bound, _, box in best_first.open_boxes]
    explored: dict[int, Explored] = {}

    def add(point: int, status: str, bound: float, value: float | None = None, box: str = "") -> None:
        area_mm2 = float(state.areas_mm2[point])
        explored[point] = Explored(
            name=names[point], area_mm2=area_mm2, state=status, bound=bound, value=value, box=box
        )

    for status, boxes in (("pruned", state.closed), ("open", still_open)):
        for box, upper_bound in boxes:
            for point in box.points.tolist():
                add(point, status, upper_bound, box=box.name)
    for point, design in state.evaluated.items():
        add(point, "evaluated", design.upper_bound, design.value or None)
    best = state.best
    assert best is not None
    # The best may have been tried only, and its box closed since: its bound is then that of the box.
    explored[best.point] = replace(explored[best.point], state="evaluated", value=best.value)
    for point, row in explored.items():
        if row.state == "evaluated":
            explored[point] = with_plans(state, best if point == best.point else state.evaluated[point], row)
    return tuple(explored[point] for point in range(len(names)))
