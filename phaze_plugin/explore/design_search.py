"""The search's front door: one call from models and a space to the accelerator to build, with proof."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from phaze.errors import QuestionError, shown
from phaze.explore.best_first_search import Engine
from phaze.explore.design_boxes import Box
from phaze.explore.executors import open_workers
from phaze.explore.journal import Journal
from phaze.explore.objectives import TIE, front_of
from phaze.explore.search_question import SearchOptions, SearchQuestion, ask_search
from phaze.explore.search_result import (
    Certificate,
    Design,
    Explored,
    MemoryRow,
    ModelRow,
    PrunedBox,
    SearchProgress,
    SearchResult,
)
from phaze.explore.search_state import Evaluated, Knowledge
from phaze.explore.worker_tasks import Outcome
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS
from phaze.installed import installed_plugins
from phaze.plan.plan import Plan
from phaze.planner.planning import plan_for
from phaze.planner.progress import TimeLimitError, Watch

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["search"]

_GIB = 2**30


def search(
    models: object,
    inputs: object = None,
    *,
    executor: Executor | str | None = None,
    journal: str | os.PathLike[str] | None = None,
    time_limit_s: float | None = None,
    progress: Callable[[SearchProgress], object] | None = None,
    plugins: PluginManager | None = None,
    **options: Unpack[SearchOptions],
) -> SearchResult:
    """The best accelerator of a space for one model or several, each with its best plan, and a proof.

    Every accelerator of `space` is tried with every memory of `hbm_gib` on `devices` of it, joined by `network`. What
    is made large is the `objective`: "throughput", "throughput-per-area" or "throughput-per-energy"; several models
    count by their ratios to tpuv4-paper, averaged (with `weights`) or the worst of them (`combine`). With `front` the
    whole front of throughput, area and energy is found. `compatibility="paper"` counts as the paper does.

    `executor` is a concurrent.futures.Executor, "processes:4", "serial" or "dask://host:port"; the answer does not
    depend on it. A `journal` file lets a killed search go on. `time_limit_s` and Ctrl-C end it with the best so far.

    Raises QuestionError (a ValueError) naming a wrong argument, and other PhazeErrors where nothing fits.
    """
    if time_limit_s is not None and not (isinstance(time_limit_s, int | float) and time_limit_s > 0):
        raise QuestionError(f"time_limit_s is {shown(time_limit_s)}; expected a positive number of seconds, or None.")
    if progress is not None and not callable(progress):
        raise QuestionError(f"progress is {shown(progress)}; expected a function of one SearchProgress.")
    question = ask_search(models, inputs, options, plugins or installed_plugins())
    started_s = time.monotonic()
    with ExitStack() as stack:
        workers = stack.enter_context(open_workers(executor))
        kept = Journal() if journal is None else Journal.open(journal, question.header())
        stack.callback(kept.close)
        engine = Engine(question=question, workers=workers, journal=kept)
        engine.report = _Reporter(engine, progress, time_limit_s, started_s).report
        return answer(engine, started_s)


@dataclass(frozen=True, slots=True, eq=False)
class _Reporter:
    """Tells the listener where a search stands, and ends it when its time is over."""

    engine: Engine
    listener: Callable[[SearchProgress], object] | None
    time_limit_s: float | None
    started_s: float

    def report(self, doing: str) -> None:
        """Called after every task."""
        elapsed_s = time.monotonic() - self.started_s
        if self.listener is not None:
            self.listener(self._progress(doing, elapsed_s))
        if self.time_limit_s is not None and elapsed_s > self.time_limit_s:
            raise TimeLimitError

    def _progress(self, doing: str, elapsed_s: float) -> SearchProgress:
        know, points = self.engine.knowledge, len(self.engine.question.points)
        is_started = know is not None and (know.closed or self.engine.left)
        left = self.engine.left if is_started else points
        done = points - left
        return SearchProgress(
            doing=doing,
            points=points,
            left=left,
            evaluated=0 if know is None else len(know.evaluated),
            best=None if know is None or know.best is None else know.best.value,
            bound=None if know is None or know.best is None or not is_started else proven_bound(self.engine),
            elapsed_s=elapsed_s,
            remaining_s=elapsed_s * left / done if done else None,
        )


def proven_bound(engine: Engine) -> float:
    """What no accelerator's value exceeds."""
    know = engine.know
    assert know.best is not None
    found = [know.best.value, *(most for _, most in know.closed), *(one.most for one in know.evaluated.values())]
    still_open = (*engine.opening, *(box for _, _, box in engine.open_boxes))
    return max(*found, *(know.most(box) for box in still_open), 0.0)


def answer(engine: Engine, started_s: float) -> SearchResult:
    """Search, then settle memory and plans of what was found."""
    know = engine.run()
    assert know.best is not None
    best, question = know.best, engine.question
    outcomes = {question.hbm_bytes[-1]: best.outcomes, **_with_less_memory(engine, best)}
    values = {size: _value(know, best.point, found) for size, found in outcomes.items()}
    chosen = min(size for size, value in values.items() if value is not None and value >= best.value * (1 - TIE))
    design = _design(engine, best.point, outcomes[chosen], chosen)
    listed = [one for one in know.evaluated.values() if one.facts is not None]
    if best.point not in know.evaluated:
        listed.append(best)
    listed.sort(key=lambda one: one.point)
    kept = [] if question.is_paper else front_of([know.goal.coordinates(one.facts) for one in listed if one.facts])
    plans = {} if question.is_paper else _plans(question, design)
    return SearchResult(
        question=engine.question.header()["question"],  # type: ignore[arg-type]
        objective=question.metric.value if len(question.questions) == 1 else "ratio",
        best=design,
        memories=tuple(MemoryRow(hbm_gib=size / _GIB, value=values[size]) for size in sorted(values)),
        front=tuple(_front_design(engine, listed[at]) for at in kept),
        is_front_proven=question.wants_front and not engine.is_interrupted,
        certificate=_certificate(engine),
        plans=plans,
        refused=dict(engine.refused),
        seconds=time.monotonic() - started_s,
        explored=_explored(engine),
    )


def _with_less_memory(engine: Engine, best: Evaluated) -> dict[int, tuple[Outcome, ...]]:
    """By size: the same plans where they fit, else others. Not looked at are others where energy counts, as plans of
    less memory may draw less, and what an interruption leaves out.
    """
    found: dict[int, tuple[Outcome, ...]] = {}
    if engine.is_interrupted:
        return found
    with suppress(TimeLimitError, KeyboardInterrupt):
        for size in engine.question.hbm_bytes[:-1]:
            if not engine.question.is_paper and _fits(engine, best, size):
                found[size] = best.outcomes
            elif not engine.question.counts_energy:
                found[size] = tuple(engine.evaluate_at(best.point, size))
    return found


def _fits(engine: Engine, found: Evaluated, hbm_bytes: int) -> bool:
    """Whether the very plans of an accelerator fit into less memory."""
    problem = engine.know.cells[0].cell.problem
    cluster = replace(problem.cluster, accelerator=replace(problem.cluster.accelerator, hbm_bytes=hbm_bytes))
    usable_bytes = replace(problem, cluster=cluster).usable_bytes
    return all(outcome.needed_bytes <= usable_bytes for outcome in found.outcomes)


def _value(know: Knowledge, point: int, outcomes: Sequence[Outcome]) -> float | None:
    found = _judged(know, point, outcomes)
    return None if found.facts is None else found.value


def _judged(know: Knowledge, point: int, outcomes: Sequence[Outcome]) -> Evaluated:
    return know.judge(Box(name="", points=np.array([point]), bounds_s=np.full(len(know.cells), 1e-12)), outcomes)


def _design(engine: Engine, point: int, outcomes: Sequence[Outcome], hbm_bytes: int) -> Design:
    question, know = engine.question, engine.know
    chip = replace(question.points.at(point), hbm_bytes=hbm_bytes)
    judged = _judged(know, point, outcomes)
    rows = []
    for model, (name, model_question, outcome) in enumerate(
        zip(question.names, question.questions, outcomes, strict=True)
    ):
        assert outcome.time_s is not None
        assert judged.facts is not None
        samples = model_question.global_batch_size
        rows.append(
            ModelRow(
                model=name,
                samples_per_s=samples / outcome.time_s,
                step_time_s=outcome.time_s,
                bound_s=outcome.time_s if outcome.bound_s is None else min(outcome.bound_s, outcome.time_s),
                joules_per_sample=None if outcome.energy_j is None else outcome.energy_j / samples,
                strategy=outcome.strategy,
                needed_bytes=outcome.needed_bytes,
                ratio=know.goal.of_model(judged.facts, model) / know.goal.bases[model] if know.goal.bases else None,
            )
        )
    return Design(
        name=chip.name,
        hbm_gib=hbm_bytes / _GIB,
        area_mm2=float(know.areas_mm2[point]),
        value=judged.value,
        fields={name: getattr(chip, name) for name in (*INTEGER_FIELDS, *REAL_FIELDS)},
        models=tuple(rows),
    )


def _front_design(engine: Engine, found: Evaluated) -> Design:
    """An accelerator of the front with the least memory in which its plans fit."""
    fitting = [size for size in engine.question.hbm_bytes if _fits(engine, found, size)]
    return _design(engine, found.point, found.outcomes, (fitting or [engine.question.hbm_bytes[-1]])[0])


def _plans(question: SearchQuestion, design: Design) -> dict[str, Plan]:
    """The plans that were found, as the planner tells them: each is priced again, and `phaze verify` takes it."""
    found = {}
    for row, model_question in zip(design.models, question.questions, strict=True):
        fields: dict[str, Any] = dict(design.fields)
        chip = replace(model_question.cluster.accelerator, name=design.name, **fields)
        strategy = dict(row.strategy)
        settled = replace(
            model_question,
            cluster=replace(model_question.cluster, accelerator=chip),
            gap=model_question.gap / 2,  # as it was scheduled in the search
        )
        found[row.model] = plan_for(settled.with_strategy(strategy), Watch())
    return found


def _certificate(engine: Engine) -> Certificate:
    know, question = engine.know, engine.question
    assert know.best is not None
    bound = proven_bound(engine)
    looked = [*know.evaluated.values(), *(one for one in engine.tried.values() if one.point not in know.evaluated)]
    scheduled = {one.point for one in looked if any(outcome.scheduled for outcome in one.outcomes)}
    placed = {one.point for one in looked if any(outcome.placed for outcome in one.outcomes)}
    return Certificate(
        value=know.best.value,
        bound=bound,
        gap=bound / know.best.value - 1,
        points=len(question.points) * (1 if question.counts_energy else len(question.hbm_bytes)),
        scheduled=len(scheduled | engine.scheduled),
        placed=len(placed),
        bounds=know.bounds,
        is_finished=not engine.is_interrupted,
        scope=_scope(question),
        pruned=tuple(PrunedBox(name=box.name, points=len(box), bound=most) for box, most in know.closed),
    )


def _scope(question: SearchQuestion) -> str:
    if question.is_paper:
        return "as the paper counts: its schedules, placements and memory; slices as on tpuv4-paper"
    kinds = (
        f"{' and '.join(kind.value for kind in question.schedules)} pipelines" if question.schedules else "one stage"
    )
    first = question.questions[0]
    energy = "; energy is that of the fastest plans with the largest memory" if question.counts_energy else ""
    sizes, widths = (", ".join(map(str, some)) for some in (first.micro_batch_sizes, first.tp_degrees))
    return (
        f"for {kinds}, microbatches of {sizes}, tp {widths}, all other degrees, ZeRO stages and recompute "
        f"modes; slices as on tpuv4-paper{energy}"
    )


def _explored(engine: Engine) -> tuple[Explored, ...]:
    know, question = engine.know, engine.question
    found: dict[int, tuple[str, float, float | None, str]] = {}
    for state, boxes in (
        ("pruned", know.closed),
        ("open", [(box, -negative) for negative, _, box in engine.open_boxes]),
    ):
        for box, most in boxes:
            for point in box.points.tolist():
                found[point] = (state, most, None, box.name)
    for point, one in know.evaluated.items():
        found[point] = ("evaluated", one.most, one.value or None, "")
    best = know.best
    assert best is not None
    _, most, _, name = found[best.point]
    found[best.point] = ("evaluated", most, best.value, name)
    return tuple(
        Explored(
            name=name,
            area_mm2=float(know.areas_mm2[point]),
            state=found[point][0],
            bound=found[point][1],
            value=found[point][2],
            box=found[point][3],
        )
        for point, name in enumerate(question.points.names)
    )
