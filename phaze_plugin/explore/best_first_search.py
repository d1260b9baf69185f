"""The best-first search over boxes of accelerators, until no bound that is left exceeds the best value by the gap.

    0. A large space loses what provably is not the best (`space_screening`).
    1. Every slicing is swept over the space (`design_bounds`), quickly. The most promising accelerator is tried
       (`_try_first`). Slicings that cannot beat it anywhere are done; the others are swept again, tightly
       (`_sweep_tightly`).
    2. The box with the best bound is opened (`_open`): it is cut in two, and the best cases of both parts are bounded,
       as far as it takes to close them. The layers of a box of few accelerators are scheduled, and what this proves
       replaces the sweep's bounds. Where a best case is nearly a real accelerator, that one is evaluated.
    3. A box is closed when its bound exceeds the best value by no more than the gap (`SearchState.is_closed`).
    4. Where all boxes are closed at a gap above 0, designs that were never evaluated may still be better, by less than
       the gap. The neighbours of the best (`neighbours`) are evaluated, until none of them is better
       (`_try_neighbours`). The proof stays as it is.

Where pipelines with loose bounds (interleaved, gpipe) are asked for beside others, the same search is first done
without them (`_search_tight_schedules`), and its answer is the first best: more schedules to choose from never give
less.

An evaluated accelerator keeps the bound of its own plans, so that what its schedules and placement leave unproven
counts, too. Boxes are opened in rounds of a fixed size, and the best value changes between rounds only: the answer does
not depend on how many workers there are or which of them is faster.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from phaze.errors import PlanError
from phaze.explore.box_tasks import BoxTasks
from phaze.explore.design_bounds import IntArray, SweptSlicing, run_sweeps, sweep_tasks
from phaze.explore.executors import Workers
from phaze.explore.journal import Journal
from phaze.explore.objectives import Metric, Objective
from phaze.explore.search_question import PROVABLE_SCHEDULES, SearchQuestion
from phaze.explore.search_state import DesignBox, EvaluatedDesign, SearchState, best_case_distance, cut_box, neighbours
from phaze.explore.space_screening import SCREENED_FROM, ScreenedSpace, can_screen, screen_space
from phaze.hardware.accelerator import area_mm2
from phaze.planner.progress import TimeLimitError
from phaze.planner.strategy_search import nearest_tp
from phaze.tolerances import EQUAL_DESIGNS, NEARLY_EQUAL_RATES

__all__ = ["BestFirstSearch"]

_BOXES_PER_ROUND = 2
"""Boxes that are opened at once. More would keep more workers busy, but open boxes that a better design, found in the
same round, might have closed."""

_TRIED_SLICINGS = 2
"""Slicings of each model on which the first accelerator is tried: the best plan mostly is of one of them, and it only
needs to be good enough to beat others."""

_NEAR_SHARE_OF_GAP = 1 / 8
_NEAR = 1e-4
"""An accelerator is evaluated when its box's best case is within this share below it (an eighth of the gap, or 1e-4 if
that is more). A larger share evaluates more, a smaller one cuts more."""

_MOST_SWEPT = 500_000
"""The most accelerators that are swept: some 150 bytes for each of them, microbatch size and tp, which makes about a
gigabyte."""

_WHOLE_SPACE = "all"
"""The name of the box that holds the whole space; names of its parts begin with it."""


@dataclass(slots=True, kw_only=True, eq=False)
class BestFirstSearch:
    """One search.

    Attributes:
        question: what is searched.
        workers: where tasks run.
        journal: where results are kept.
        report: hears of every finished task, and may end the search by raising TimeLimitError.
        prefix: begins the names of all tasks.
        state_so_far: what is known; None before the sweep has ended.
        open_boxes: a heap of boxes that are open, by their upper bounds with a minus, and their names.
        opening: boxes that are just being opened.
        root: the whole space, while it is neither open nor closed.
        is_interrupted: whether the search was ended before everything was closed.
        is_settled: whether nothing is left to do: everything is closed, and no neighbour of the best is better.
        tight_state: what the search over schedules with tight bounds found, where there was one.
        screened: what left a large space before it was swept; `question` then has what is left of it.
        first_point: an accelerator that is known to be good, to begin with; None for the most promising one.
        screened_from: how many accelerators make a space large.
        floor: a value that was found on another network, to be beaten; 0 where there is none.
    """

    question: SearchQuestion
    workers: Workers
    journal: Journal
    report: Callable[[str], object] = lambda doing: None
    prefix: str = ""
    state_so_far: SearchState | None = None
    open_boxes: list[tuple[float, str, DesignBox]] = field(default_factory=list)
    opening: list[DesignBox] = field(default_factory=list)
    root: DesignBox | None = None
    is_interrupted: bool = False
    is_settled: bool = False
    tight_state: SearchState | None = None
    screened: ScreenedSpace | None = None
    first_point: int | None = None
    screened_from: int = SCREENED_FROM
    floor: float = 0.0

    @property
    def state(self) -> SearchState:
        """What is known; to be asked for after the sweep."""
        assert self.state_so_far is not None
        return self.state_so_far

    @property
    def tasks(self) -> BoxTasks:
        """The tasks of this search; to be asked for after the sweep."""
        return BoxTasks(
            state=self.state, workers=self.workers, journal=self.journal, report=self.report, prefix=self.prefix
        )

    @property
    def boxes_left(self) -> list[DesignBox]:
        """Boxes that are open, those that are just being opened included."""
        return [*self.opening, *(box for _, _, box in self.open_boxes)]

    def proven_bound(self) -> float:
        """The largest bound that is left: no accelerator's value exceeds it."""
        state = self.state
        assert state.best is not None
        return max(
            state.best.value,
            *(upper_bound for _, upper_bound in state.closed),
            *(design.upper_bound for design in state.evaluated.values()),
            *(state.upper_bound(box) for box in self.boxes_left),
            0.0 if self.screened is None else self.screened.bound,
        )

    def run(self) -> SearchState:
        """Search to the end, or until interrupted; raises PlanError where nothing fits or nothing was found."""
        try:
            self._screen()
            self._search_tight_schedules()
            self._start()
            while self.open_boxes:
                self._open_round()
        except (TimeLimitError, KeyboardInterrupt) as error:
            self._fall_back()
            if self.state_so_far is None or self.state_so_far.best is None:
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise PlanError(
                    f"nothing was found before the time was over; allow more time. {self.journal.kept_text()}"
                ) from error
            self.is_interrupted = True
            if self.root is not None:
                self._settle([self.root])
        if self.state.best is None:
            raise PlanError("no accelerator of the space has a plan that fits; add larger memories (hbm_gib).")
        if not self.is_interrupted:
            with suppress(TimeLimitError, KeyboardInterrupt):
                self._try_neighbours()
                self.is_settled = True
        return self.state

    def _screen(self) -> None:
        """Leave what provably is not the best out of a large space, before it is swept."""
        if len(self.question.points) < self.screened_from or not can_screen(self.question):
            return
        screened = screen_space(self.question, self.workers, self._search_few, self.report)
        if screened is not None:
            self.screened = screened
            self.first_point = int(np.searchsorted(screened.kept, screened.first))
            self.question = replace(self.question, points=self.question.points.take(screened.kept))

    def _search_few(self, points: IntArray) -> tuple[float, int]:
        """The best value of a few accelerators, and where it is; 0 and the first of them where nothing fits."""
        inner = BestFirstSearch(
            question=replace(self.question, points=self.question.points.take(points)),
            workers=self.workers,
            journal=self.journal,
            report=self.report,
            prefix="few/",
            screened_from=len(self.question.points) + 1,
        )
        try:
            best = inner.run().best
        except PlanError:
            return 0.0, int(points[0])
        if inner.is_interrupted:
            raise TimeLimitError
        assert best is not None
        return max(best.value, self.floor), int(points[best.point])

    def _search_tight_schedules(self) -> None:
        """Find something to beat among the schedules whose bounds are tight, if there are others as well."""
        tight = tuple(kind for kind in self.question.schedules if kind in PROVABLE_SCHEDULES)
        if not tight or tight == self.question.schedules or self.question.is_paper:
            return
        inner = BestFirstSearch(
            question=replace(self.question, schedules=tight),
            workers=self.workers,
            journal=self.journal,
            report=self.report,
            prefix="tight/",
        )
        try:
            self.tight_state = inner.run()
        except PlanError:  # a model that fits with none of these schedules may fit with others
            return
        if inner.is_interrupted:
            raise TimeLimitError

    def _fall_back(self) -> None:
        """Take the answer for tight schedules where there is no other; the sweep's bounds hold for all schedules."""
        tight, state = self.tight_state, self.state_so_far
        if tight is not None and (state is None or state.best is None):
            refused = () if state is None else state.refused
            self.state_so_far = SearchState.after_sweep(self.question, tight.objective, tight.slicings, refused)
            self.state_so_far.best = tight.best
            self.root = self._whole_space(_WHOLE_SPACE, tight.slicings)

    def _whole_space(self, name: str, slicings: Sequence[SweptSlicing]) -> DesignBox:
        """A box of the whole space with the bounds of its sweep."""
        bounds_s = np.array([float(swept.bounds.step_s.min()) for swept in slicings])
        return DesignBox(name=name, points=np.arange(len(self.question.points)), bounds_s=bounds_s)

    def sweep(self) -> DesignBox:
        """Bound every slicing on every accelerator, quickly, and settle the objective: what any method begins with.

        Returns the whole space as a box; raises PlanError where some model cannot be sliced or fits nowhere.
        """
        question = self.question
        if len(question.points) > _MOST_SWEPT:
            raise PlanError(
                f"{len(question.points):,} accelerators are left to sweep; at most {_MOST_SWEPT:,} fit in memory. "
                "Search the space in parts, or one model by throughput or by area, which leaves most of it out first."
            )
        slicings, refused = run_sweeps(sweep_tasks(question), self.workers, self.report)
        objective = Objective(
            metric=question.metric,
            samples=tuple(model_question.global_batch_size for model_question in question.questions),
            weights=question.weights,
            takes_worst=question.takes_worst,
        )
        self.state_so_far = SearchState.after_sweep(question, objective, slicings, refused)
        self.state_so_far.floor = self.floor
        self._check_slicings()
        (root,) = self.tasks.bound_boxes([self._whole_space("coarse", slicings)], is_quick=True)
        self._check_memory(root)
        if len(question.questions) > 1:
            self.state.objective = self._relative_objective(root)
        return root

    def _start(self) -> None:
        """Sweep, try a promising accelerator, and bound the whole space."""
        root = self.sweep()
        if self.tight_state is not None and self.tight_state.best is not None:
            self._take_first(root, self.tight_state.best)
        else:
            self._try_first(root)
        self.root = root
        (self.root,) = self.tasks.bound_boxes([root])
        self._sweep_tightly(self.root)
        (root,) = self.tasks.bound_boxes([replace(self.root, name=_WHOLE_SPACE)])
        self._settle([root])
        self.root = None

    def _sweep_tightly(self, root: DesignBox) -> None:
        """Replace the bounds of the slicings that are open by tight ones."""
        is_open = self.tasks.open_slicings(root)
        wanted = {self.state.slicings[index].slicing.name for index in np.flatnonzero(is_open)}
        tasks = [replace(task, is_tight=True) for task in sweep_tasks(self.question) if task.slicing_name in wanted]
        tight, _ = run_sweeps(tasks, self.workers, self.report)
        by_name = {swept.slicing.name: swept for swept in tight}
        self.state.slicings = [by_name.get(swept.slicing.name, swept) for swept in self.state.slicings]

    def _check_slicings(self) -> None:
        """Raise PlanError for a model that cannot be sliced in any way that was asked for."""
        for model, (name, model_question) in enumerate(zip(self.question.names, self.question.questions, strict=True)):
            if not self.state.slicings_of(model):
                reasons = dict.fromkeys(refused.reason for refused in self.state.refused if refused.model == model)
                size, tp = model_question.micro_batch_sizes[0], max(model_question.tp_degrees)
                offer = nearest_tp(model_question, size, tp)
                raise PlanError(f"{name} cannot be sliced as asked. {' '.join(reasons)}{offer}")

    def _check_memory(self, root: DesignBox) -> None:
        """Raise PlanError for a model that fits on no accelerator."""
        for model, name in enumerate(self.question.names):
            if np.isinf(root.bounds_s[self.state.slicings_of(model)]).all():
                raise PlanError(
                    f"{name} fits on no accelerator of the space: no plan on {self.question.device_count} devices "
                    f"keeps within {self.question.hbm_bytes[-1] / 2**30:g} GiB each. Add larger memories (hbm_gib) or "
                    "devices."
                )

    def _relative_objective(self, root: DesignBox) -> Objective:
        """The objective with what each model reaches on the reference accelerator."""
        objective, models = self.state.objective, range(len(self.question.names))
        chip = self.question.questions[0].cluster.accelerator
        tasks = [self.tasks.evaluate_task(root, model, chip, math.inf, is_inside=False) for model in models]
        evaluations = self.tasks.evaluate([f"base/{model}" for model in models], tasks)
        for name, evaluation in zip(self.question.names, evaluations, strict=True):
            if evaluation.time_s is None:
                raise PlanError(f"{name} does not fit on the reference accelerator, so there are no ratios to it.")
        # Any point may stand for the reference, which need not be in the space: its area is replaced.
        judged = self.state.judge(DesignBox(name="", points=root.points[:1], bounds_s=root.bounds_s), evaluations)
        assert judged.costs is not None
        costs = replace(judged.costs, area_mm2=area_mm2(chip))
        throughput = replace(objective, metric=Metric.THROUGHPUT)
        return replace(
            objective,
            reference_values=tuple(objective.of_model(costs, model) for model in models),
            reference_rates=tuple(throughput.of_model(costs, model) for model in models),
        )

    def _try_first(self, root: DesignBox) -> None:
        """Evaluate a promising accelerator on the few slicings with the lowest bounds, to have something to beat.

        One that is known to be good is evaluated on all of them, so that no less is beaten than is known.
        """
        is_known = self.first_point is not None
        point = self._most_promising(root.points) if self.first_point is None else self.first_point
        box = self.tasks.single_box(root, point)
        tasks = []
        for model in range(len(self.question.names)):
            task = self.tasks.evaluate_task(box, model, self.question.points.at(point), math.inf)
            lowest = sorted(task.slicings, key=lambda pair: (pair[0], pair[1].name))
            lowest = lowest if is_known else lowest[:_TRIED_SLICINGS]
            tasks.append(replace(task, slicings=tuple(lowest)))
        names = [f"try/{point}/{model}" for model in range(len(tasks))]
        (design,) = self.tasks.evaluate_models(names, tasks, [box])
        self.state.tried[point] = design
        self.state.keep_if_best(design)

    def _take_first(self, root: DesignBox, first: EvaluatedDesign) -> None:
        """Begin with the best design for fewer schedules; what was proven of it says nothing about the others."""
        box = self.tasks.single_box(root, first.point)
        evaluations = [
            replace(evaluation, bound_s=float(box.bounds_s[self.state.slicings_of(model)].min()))
            for model, evaluation in enumerate(first.evaluations)
        ]
        design = self.state.judge(box, evaluations)
        self.state.tried[first.point] = design
        self.state.keep_if_best(design)

    def _most_promising(self, points: IntArray) -> int:
        """The accelerator that the sweep promises most; of about equal ones the smallest, then the first in order."""
        rates, areas_mm2 = np.zeros(len(points)), self.state.areas_mm2[points]
        for model in range(len(self.question.names)):
            slicings = [self.state.slicings[index] for index in self.state.slicings_of(model)]
            step_s = np.min([swept.bounds.step_s[points] for swept in slicings], axis=0)
            rates += (1 / step_s) / (1 / step_s).max()
        if self.question.metric is not Metric.THROUGHPUT:
            rates = rates / areas_mm2
        best = np.flatnonzero(rates >= rates.max() * (1 - NEARLY_EQUAL_RATES))
        order = np.lexsort((points[best], areas_mm2[best]))
        return int(points[best[order[0]]])

    def _open_round(self) -> None:
        """Open the boxes with the best bounds; wherever this is interrupted, no box is lost."""
        closed_before: int | None = None
        try:
            while self.open_boxes and len(self.opening) < _BOXES_PER_ROUND:
                box = self.open_boxes[0][2]
                if self.state.is_closed(box):
                    self.state.closed.append((box, self.state.upper_bound(box)))
                else:
                    self.opening.append(box)
                heapq.heappop(self.open_boxes)
            closed_before = len(self.state.closed)
            self._open(self.opening)
        except BaseException:
            if closed_before is not None:
                del self.state.closed[closed_before:]
            waiting = {box.name for _, _, box in self.open_boxes}
            for box in self.opening:
                if box.name not in waiting:
                    heapq.heappush(self.open_boxes, (-self.state.upper_bound(box), box.name, box))
            raise
        finally:
            self.opening = []

    def _open(self, boxes: Sequence[DesignBox]) -> None:
        """Cut boxes in two and bound the parts; evaluate an accelerator that is nearly the best case of its box."""
        singles, parts, names, tasks = [], [], [], []
        for box in self._still_open_when_scheduled(boxes):
            point, is_open = self._most_promising(box.points), self.tasks.open_slicings(box)
            rest = box
            if self._is_evaluated_now(box, point, is_open):
                rest = replace(box, points=box.points[box.points != point])
                single = self.tasks.single_box(box, point)
                singles.append(single)
                for model in range(len(self.question.names)):
                    cutoff_s = self.state.useful_time_s(single, model)
                    names.append(f"evaluate/{point}/{model}")
                    tasks.append(self.tasks.evaluate_task(single, model, self.question.points.at(point), cutoff_s))
            parts += self._cut(rest, point, is_open)
        designs = self.tasks.evaluate_models(names, tasks, singles)
        bounded = self.tasks.bound_boxes(parts)  # with the cutoffs of this round, whatever was just found
        for design in designs:
            self.state.evaluated[design.point] = design
            self.state.keep_if_best(design)
        self._settle(bounded)

    def _try_neighbours(self) -> None:
        """Evaluate the neighbours of the best, until none is better: boxes were closed for being better by the gap."""
        question, state = self.question, self.state
        if question.gap == 0 or question.wants_front or self.prefix:
            return
        seen: set[int] = set()
        while True:
            assert state.best is not None
            near = [point for point in neighbours(question.points, state.best.point) if point not in seen]
            seen.update(near)
            boxes = [box for point in near if self._may_be_better(box := self._box_of(point))]
            if not boxes:
                return
            names, tasks = [], []
            for box in boxes:
                point = int(box.points[0])
                for model, known in enumerate(state.best.evaluations):
                    task = self.tasks.evaluate_task(box, model, question.points.at(point), math.inf)
                    names.append(f"neighbour/{point}/{model}")
                    tasks.append(task.with_slicing_of(known))
            for design in self.tasks.evaluate_models(names, tasks, boxes):
                state.tried[design.point] = design
                state.keep_if_best(design)

    def _box_of(self, point: int) -> DesignBox:
        """One accelerator by itself, with what the sweep knows of it."""
        return self.tasks.single_box(self.state.unbounded_box(point), point)

    def _may_be_better(self, box: DesignBox) -> bool:
        """Whether an accelerator by itself may have a higher value than the best, or the same with less area."""
        point, best, upper_bound = int(box.points[0]), self.state.best, self.state.upper_bound(box)
        assert best is not None
        if point in self.state.evaluated:
            upper_bound = min(upper_bound, self.state.evaluated[point].upper_bound)
        is_smaller = self.state.areas_mm2[point] < self.state.areas_mm2[best.point]
        return upper_bound > best.value * (1 - EQUAL_DESIGNS if is_smaller else 1 + EQUAL_DESIGNS)

    def _is_evaluated_now(self, box: DesignBox, point: int, is_open: Sequence[bool]) -> bool:
        """Whether an accelerator is alone in its box, or nearly its best case."""
        near = max(self.question.gap * _NEAR_SHARE_OF_GAP, _NEAR)
        return len(box) == 1 or best_case_distance(box, point, self.state.slicings, is_open) <= near

    def _still_open_when_scheduled(self, boxes: Sequence[DesignBox]) -> list[DesignBox]:
        """The boxes that are still open after the layers of small ones were scheduled."""
        small = self.tasks.boxes_to_schedule(boxes)
        scheduled = self.tasks.schedule_boxes(small)
        is_closed = [self.state.is_closed(box) for box in scheduled]
        self._settle([box for box, closed in zip(scheduled, is_closed, strict=True) if closed])
        small_names = {box.name for box in small}
        return [
            *(box for box in boxes if box.name not in small_names),
            *(box for box, closed in zip(scheduled, is_closed, strict=True) if not closed),
        ]

    def _cut(self, box: DesignBox, point: int, is_open: Sequence[bool]) -> list[DesignBox]:
        if len(box) < 2:
            return [replace(box, name=f"{box.name}0")] if len(box) else []
        return [
            replace(box, name=f"{box.name}{side}", points=points)
            for side, points in enumerate(cut_box(box, point, self.state.slicings, is_open))
        ]

    def _settle(self, boxes: Sequence[DesignBox]) -> None:
        """Close boxes, or keep them open."""
        for box in boxes:
            upper_bound = self.state.upper_bound(box)
            if self.state.is_closed(box):
                self.state.closed.append((box, upper_bound))
            else:
                heapq.heappush(self.open_boxes, (-upper_bound, box.name, box))
