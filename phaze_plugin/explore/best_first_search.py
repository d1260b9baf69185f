"""Best first over boxes of accelerators, until no bound left exceeds the best found by more than the gap.

    1. every cell is swept over the space (`bounds.py`), quickly; the most promising accelerator is tried, and cells
       that cannot beat it anywhere are done; the others are swept again, tightly
    2. the box whose bound is best is opened: it is cut in two, and the corners of both parts are bounded, as far as it
       takes to close them. The layers of a box of few accelerators are scheduled, and their bounds replace the
       sweep's; where the corner is nearly a real accelerator, that one is evaluated
    3. a box is closed when its bound exceeds the best value by no more than the gap (in a search for the front: when an
       evaluated accelerator is as good in all three, up to the gap)

Where pipelines with loose bounds (interleaved, gpipe) are asked for beside others, the same is first done without them,
and what is found is the first best: more schedules to choose from never give less.

An evaluated accelerator keeps the bound of its own plan, so what its schedules and placement leave unproven counts,
too. Boxes are opened in rounds of a fixed size and the best value changes between rounds only: the answer does not
depend on how many workers there are or which of them is faster.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from phaze.errors import PlanError
from phaze.explore.bound_sweeps import sweep_all, sweeps_of
from phaze.explore.design_bounds import IntArray, corner_accelerator
from phaze.explore.design_boxes import Box, cut_box, pollution
from phaze.explore.executors import Workers
from phaze.explore.journal import Journal
from phaze.explore.journaled_tasks import Recorded
from phaze.explore.objectives import Goal, Metric
from phaze.explore.search_question import PROVABLE_SCHEDULES, SearchQuestion
from phaze.explore.search_state import Evaluated, Knowledge
from phaze.explore.worker_tasks import (
    BoundTask,
    EvaluateTask,
    Outcome,
    ScheduleTask,
    schedule_options,
)
from phaze.hardware import Accelerator
from phaze.hardware.area_energy import area_mm2
from phaze.planner.progress import TimeLimitError
from phaze.planner.strategy_search import nearest_tp

__all__ = ["Engine"]

_ROUND = 2
_TRIED_CELLS = 2
_ROOT = "all"
_NEAR = 1e-4
_EQUAL = 1e-9
_FEW = 16


@dataclass(slots=True, kw_only=True, eq=False)
class Engine:
    """One search. `report` hears of every finished task and may end the search by raising TimeLimitError."""

    question: SearchQuestion
    workers: Workers
    journal: Journal
    report: Callable[[str], object] = lambda doing: None
    refused: dict[str, str] = field(default_factory=dict)
    knowledge: Knowledge | None = None
    open_boxes: list[tuple[float, str, Box]] = field(default_factory=list)
    tried: dict[int, Evaluated] = field(default_factory=dict)
    root: Box | None = None
    opening: list[Box] = field(default_factory=list)
    scheduled: set[int] = field(default_factory=set)
    is_interrupted: bool = False
    prefix: str = ""
    first: Evaluated | None = None
    narrow: Knowledge | None = None

    def run(self) -> Knowledge:
        """Search to the end, or until interrupted; raises PlanError where nothing fits or nothing was found."""
        try:
            self._search_narrowly()
            self._start()
            while self.open_boxes:
                self._open_round()
        except (TimeLimitError, KeyboardInterrupt) as error:
            self._fall_back()
            if self.knowledge is None or self.knowledge.best is None:
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise PlanError(
                    "nothing was found before the time was over; allow more time. A journal keeps what was done."
                ) from error
            self.is_interrupted = True
            if self.root is not None:
                self._settle([self.root])
        assert self.knowledge is not None
        if self.knowledge.best is None:
            raise PlanError("no accelerator of the space has a plan that fits; add larger memories (hbm_gib).")
        return self.knowledge

    def _search_narrowly(self) -> None:
        """Find something to beat among the schedules whose bounds are tight."""
        tight = tuple(kind for kind in self.question.schedules if kind in PROVABLE_SCHEDULES)
        if not tight or tight == self.question.schedules or self.question.is_paper:
            return
        question = replace(self.question, schedules=tight)
        inner = Engine(
            question=question, workers=self.workers, journal=self.journal, report=self.report, prefix="tight/"
        )
        try:
            self.narrow = inner.run()
        except PlanError:  # what fits in no such way may fit in others
            return
        self.first = self.narrow.best
        if inner.is_interrupted:
            raise TimeLimitError

    def _fall_back(self) -> None:
        """Take the answer of the narrow search where there is no other; the sweep's bounds hold for all schedules."""
        narrow = self.narrow
        if narrow is not None and (self.knowledge is None or self.knowledge.best is None):
            self.knowledge = Knowledge.of(self.question, narrow.goal, narrow.cells)
            self.knowledge.best = narrow.best
            bounds = np.array([float(swept.rows.least_s.min()) for swept in narrow.cells])
            self.root = Box(name=_ROOT, points=np.arange(len(self.question.points)), bounds_s=bounds)

    @property
    def know(self) -> Knowledge:
        """What is known; after the sweep."""
        assert self.knowledge is not None
        return self.knowledge

    @property
    def left(self) -> int:
        """Accelerators in boxes that are open, those that are just being opened included."""
        return sum(len(box) for box in (*self.opening, *(box for _, _, box in self.open_boxes)))

    def _start(self) -> None:
        """Sweep, try promising accelerators, and bound the whole space."""
        question = self.question
        tasks = sweeps_of(question)
        cells, self.refused = sweep_all(tasks, self.workers, self.report)
        goal = Goal(
            metric=question.metric,
            samples=tuple(model_question.global_batch_size for model_question in question.questions),
            weights=question.weights,
            takes_worst=question.takes_worst,
        )
        self.knowledge = Knowledge.of(question, goal, cells)
        self._check_slices()
        everything = np.arange(len(question.points))
        bounds = np.array([float(swept.rows.least_s.min()) for swept in cells])
        root = Box(name="coarse", points=everything, bounds_s=bounds)
        (root,) = self._bounded([root], is_quick=True)
        self._check_memory(root)
        if len(question.questions) > 1:
            self.know.goal = self._relative(goal, root)
        if self.first is not None:
            self._take_first(root, self.first)
        else:
            self._try_first(root)
        self.root = root
        (self.root,) = self._bounded([root])
        self._sweep_again(self.root)
        (root,) = self._bounded([replace(self.root, name=_ROOT)])
        self._settle([root])
        self.root = None

    def _sweep_again(self, root: Box) -> None:
        """Tight rows for the cells that are open."""
        is_open = self._open_cells(root)
        wanted = {self.know.cells[at].cell.name for at, one in enumerate(is_open) if one}
        tasks = [replace(task, is_tight=True) for task in sweeps_of(self.question) if task.cell_name in wanted]
        tight, _ = sweep_all(tasks, self.workers, self.report)
        by_name = {swept.cell.name: swept for swept in tight}
        self.know.cells = [by_name.get(swept.cell.name, swept) for swept in self.know.cells]

    def _open_cells(self, box: Box) -> list[bool]:
        """Which cells keep a box from being closed."""
        closing = {model: self.know.closing_s(box, model) for model in range(len(self.question.names))}
        return [
            bool(bound < closing[swept.cell.model] * (1 - _EQUAL))
            for bound, swept in zip(box.bounds_s, self.know.cells, strict=True)
        ]

    def _check_slices(self) -> None:
        for model, (name, model_question) in enumerate(zip(self.question.names, self.question.questions, strict=True)):
            if not self.know.cells_of(model):
                reasons = dict.fromkeys(why for cell, why in self.refused.items() if cell.startswith(f"{name}, "))
                size, tp = model_question.micro_batch_sizes[0], max(model_question.tp_degrees)
                offer = nearest_tp(model_question, size, tp)
                raise PlanError(f"{name} cannot be sliced as asked. {' '.join(reasons)}{offer}")

    def _check_memory(self, root: Box) -> None:
        for model, name in enumerate(self.question.names):
            if np.isinf(root.bounds_s[self.know.cells_of(model)]).all():
                raise PlanError(
                    f"{name} fits on no accelerator of the space: no plan on {self.question.device_count} devices "
                    f"keeps within {self.question.hbm_bytes[-1] / 2**30:g} GiB each. Add larger memories (hbm_gib) or "
                    "devices."
                )

    def _relative(self, goal: Goal, root: Box) -> Goal:
        """The goal with what each model reaches on the reference accelerator."""
        chip = self.question.questions[0].cluster.accelerator
        tasks = [self._task(root, model, chip, math.inf, is_inside=False) for model in range(len(self.question.names))]
        names = [f"base/{model}" for model in range(len(tasks))]
        outcomes = self._evaluations(names, tasks)
        missing = [name for name, one in zip(self.question.names, outcomes, strict=True) if one.time_s is None]
        if missing:
            raise PlanError(f"{missing[0]} does not fit on the reference accelerator, so there are no ratios to it.")
        base = self.know.judge(Box(name="", points=root.points[:1], bounds_s=root.bounds_s), outcomes)
        assert base.facts is not None
        facts = replace(base.facts, area_mm2=area_mm2(chip))
        rates = replace(goal, metric=Metric.THROUGHPUT)
        bases, base_rates = (
            tuple(one.of_model(facts, model) for model in range(len(outcomes))) for one in (goal, rates)
        )
        return replace(goal, bases=bases, base_rates=base_rates)

    def _try_first(self, root: Box) -> None:
        """Evaluate a promising accelerator on the few cells with the lowest bounds, to have something to beat."""
        point = self._most_promising(root.points)
        box = self._single(root, point)
        tasks = []
        for model in range(len(self.question.names)):
            task = self._task(box, model, self.question.points.at(point), math.inf)
            few = tuple(sorted(task.cells, key=lambda pair: (pair[0], pair[1].name))[:_TRIED_CELLS])
            tasks.append(replace(task, cells=few))
        outcomes = self._evaluations([f"try/{point}/{model}" for model in range(len(tasks))], tasks)
        found = self.know.judge(box, self._completed(outcomes, tasks, [box]))
        self.tried[point] = found
        self.know.keep(found)

    def _take_first(self, root: Box, first: Evaluated) -> None:
        """Begin with what fewer schedules gave; what they proved of it says nothing about the others."""
        box = self._single(root, first.point)
        known = [float(box.bounds_s[self.know.cells_of(model)].min()) for model in range(len(first.outcomes))]
        outcomes = [replace(one, bound_s=bound_s) for one, bound_s in zip(first.outcomes, known, strict=True)]
        found = self.know.judge(box, outcomes)
        self.tried[first.point] = found
        self.know.keep(found)

    def _most_promising(self, points: IntArray) -> int:
        """The accelerator that the sweep promises most; then least area, then first in order."""
        rates = np.zeros(len(points))
        know = self.know
        for model in range(len(self.question.names)):
            least = np.min([know.cells[at].rows.least_s[points] for at in know.cells_of(model)], axis=0)
            rates += (1 / least) / (1 / least).max()
        if self.question.metric is not Metric.THROUGHPUT:
            rates = rates / know.areas_mm2[points]
        best = np.flatnonzero(rates >= rates.max() * (1 - 1e-6))
        order = np.lexsort((points[best], know.areas_mm2[points[best]]))
        return int(points[best[order[0]]])

    def _single(self, box: Box, point: int) -> Box:
        """One accelerator of a box by itself, with what the sweep knows of it."""
        least = np.array([swept.rows.least_s[point] for swept in self.know.cells])
        return Box(name=f"{point}", points=np.array([point]), bounds_s=np.maximum(box.bounds_s, least))

    def _open_round(self) -> None:
        """Open the boxes with the best bounds; wherever this is interrupted, no box is lost."""
        closed: int | None = None
        try:
            while self.open_boxes and len(self.opening) < _ROUND:
                box = self.open_boxes[0][2]
                if self.know.is_closed(self.know.facts(box)):
                    self.know.closed.append((box, self.know.most(box)))
                else:
                    self.opening.append(box)
                heapq.heappop(self.open_boxes)
            closed = len(self.know.closed)
            self._open(self.opening)
        except BaseException:
            if closed is not None:
                del self.know.closed[closed:]
            waiting = {box.name for _, _, box in self.open_boxes}
            for box in self.opening:
                if box.name not in waiting:
                    heapq.heappush(self.open_boxes, (-self.know.most(box), box.name, box))
            raise
        finally:
            self.opening = []

    def _open(self, boxes: Sequence[Box]) -> None:
        """Cut boxes in two and bound the parts; evaluate an accelerator that is nearly the corner of its box."""
        boxes = self._scheduled(boxes)
        singles, parts, names, tasks = [], [], [], []
        for box in boxes:
            point, is_open = self._most_promising(box.points), self._open_cells(box)
            rest = box
            if len(box) == 1 or pollution(box, point, self.know.cells, is_open) <= max(self.question.gap / 8, _NEAR):
                rest = replace(box, points=box.points[box.points != point])
                singles.append(self._single(box, point))
                for model in range(len(self.question.names)):
                    cutoff_s = self.know.useful_s(singles[-1], model)
                    names.append(f"evaluate/{point}/{model}")
                    tasks.append(self._task(singles[-1], model, self.question.points.at(point), cutoff_s))
            parts += self._cut(rest, point, is_open)
        models = len(self.question.names)
        each = [single for single in singles for _ in range(models)]
        outcomes = self._completed(self._evaluations(names, tasks), tasks, each)
        bounded = self._bounded(parts)
        for at, single in enumerate(singles):
            found = self.know.judge(single, outcomes[at * models : (at + 1) * models])
            self.know.evaluated[found.point] = found
            self.know.keep(found)
        self._settle(bounded)

    def _scheduled(self, boxes: Sequence[Box]) -> list[Box]:
        """Boxes that are still open after the layers of small ones were scheduled."""
        small = [box for box in boxes if len(box) <= _FEW and not self.scheduled.issuperset(box.points.tolist())]
        names, tasks, where = [], [], []
        for box in small:
            chips = tuple(self.question.points.at(point) for point in box.points.tolist())
            for at, is_open in enumerate(self._open_cells(box)):
                if is_open:
                    cell = self.know.cells[at].cell
                    options = schedule_options(self.question.questions[cell.model])
                    tasks.append(ScheduleTask(cell=cell, accelerators=chips, options=options))
                    names.append(f"schedule/{box.name}/{cell.name}")
                    where.append((box, at))
        for (box, at), found in zip(where, self._recorded.schedules(names, tasks), strict=True):
            rows = self.know.cells[at].rows.seconds
            rows[box.points] = np.maximum(rows[box.points], found)
        for box in small:
            self.scheduled.update(box.points.tolist())
        again = self._bounded([replace(box, name=f"{box.name}s") for box in small])
        is_small = {box.name for box in small}
        self._settle([box for box in again if self.know.is_closed(self.know.facts(box))])
        still = [box for box in again if not self.know.is_closed(self.know.facts(box))]
        return [box for box in boxes if box.name not in is_small] + still

    def _cut(self, rest: Box, point: int, is_open: list[bool]) -> list[Box]:
        if len(rest) < 2:
            return [replace(rest, name=f"{rest.name}0")] if len(rest) else []
        return [
            replace(rest, name=f"{rest.name}{side}", points=points)
            for side, points in enumerate(cut_box(rest, point, self.know.cells, is_open))
        ]

    def _settle(self, boxes: Sequence[Box]) -> None:
        """Close boxes or keep them open."""
        for box in boxes:
            most = self.know.most(box)
            if self.know.is_closed(self.know.facts(box)):
                self.know.closed.append((box, most))
            else:
                heapq.heappush(self.open_boxes, (-most, box.name, box))

    def _bounded(self, boxes: Sequence[Box], is_quick: bool = False) -> list[Box]:
        """Boxes with the bounds of their corners, cell by cell, as far as it takes to close them."""
        names, tasks, where = [], [], []
        raised = [self._swept_bounds(box) for box in boxes]
        for at, box in enumerate(raised):
            closing = {model: self.know.closing_s(box, model) for model in range(len(self.question.names))}
            if self.know.is_closed(self.know.facts(box)):
                continue
            chip = corner_accelerator(self.question.points, box.points)
            for index, swept in enumerate(self.know.cells):
                cutoff_s = math.inf if is_quick else closing[swept.cell.model]
                if box.bounds_s[index] >= cutoff_s * (1 - _EQUAL) or math.isinf(box.bounds_s[index]):
                    continue
                row = swept.rows.seconds[box.points].min(axis=0)
                problem = swept.cell.problem_at(row, chip)
                tasks.append(BoundTask(problem=problem, cutoff_s=cutoff_s, is_paper=swept.cell.is_paper))
                names.append(f"{'quick' if is_quick else 'bound'}/{box.name}/{swept.cell.name}")
                where.append((at, index))
        for (at, index), found in zip(where, self._bounds(names, tasks), strict=True):
            raised[at].bounds_s[index] = max(float(raised[at].bounds_s[index]), found)
        return raised

    def _swept_bounds(self, box: Box) -> Box:
        """A copy whose bounds are at least the sweep's."""
        least = [float(swept.rows.least_s[box.points].min()) for swept in self.know.cells]
        return replace(box, bounds_s=np.maximum(box.bounds_s, least))

    def _task(
        self, box: Box, model: int, chip: Accelerator, cutoff_s: float, *, is_inside: bool = True
    ) -> EvaluateTask:
        model_question = self.question.questions[model]
        known = [(float(box.bounds_s[at]) if is_inside else 0.0, at) for at in self.know.cells_of(model)]
        cells = tuple((bound, self.know.cells[at].cell) for bound, at in known if bound < cutoff_s)
        return EvaluateTask(model_question=model_question, accelerator=chip, cells=cells, cutoff_s=cutoff_s)

    def _completed(
        self, outcomes: Sequence[Outcome], tasks: Sequence[EvaluateTask], boxes: Sequence[Box]
    ) -> list[Outcome]:
        """Outcomes whose bounds are under the cells that were left out of their tasks, too; a box for each, or one."""
        found = []
        for at, (outcome, task) in enumerate(zip(outcomes, tasks, strict=True)):
            given = {cell.name for _, cell in task.cells}
            box, model = boxes[at % len(boxes)], at % len(self.question.names)
            left = [
                float(box.bounds_s[index])
                for index in self.know.cells_of(model)
                if self.know.cells[index].cell.name not in given
            ]
            bound_s = min([math.inf if outcome.bound_s is None else outcome.bound_s, *left])
            found.append(replace(outcome, bound_s=None if math.isinf(bound_s) else bound_s))
        return found

    def evaluate_at(self, point: int, hbm_bytes: int) -> list[Outcome]:
        """An accelerator of the space with some memory, with nothing known but what the sweep tells."""
        chip = replace(self.question.points.at(point), hbm_bytes=hbm_bytes)
        nothing = Box(name="", points=np.array([point]), bounds_s=np.zeros(len(self.know.cells)))
        box = self._single(nothing, point)
        tasks = [self._task(box, model, chip, math.inf) for model in range(len(self.question.names))]
        names = [f"evaluate/{point}@{hbm_bytes}/{model}" for model in range(len(tasks))]
        return self._evaluations(names, tasks)

    def value_at(self, point: int) -> float:
        """The value of an accelerator of the space, 0 where some model does not fit; nothing is remembered of it."""
        outcomes = self.evaluate_at(point, self.question.hbm_bytes[-1])
        nothing = Box(name="", points=np.array([point]), bounds_s=np.full(len(self.know.cells), 1e-12))
        return self.know.judge(nothing, outcomes).value

    def _bounds(self, names: Sequence[str], tasks: Sequence[BoundTask]) -> list[float]:
        self.know.bounds += len(tasks)
        return self._recorded.bounds(names, tasks)

    def _evaluations(self, names: Sequence[str], tasks: Sequence[EvaluateTask]) -> list[Outcome]:
        return self._recorded.evaluations(names, tasks)

    @property
    def _recorded(self) -> Recorded:
        return Recorded(workers=self.workers, journal=self.journal, report=self.report, prefix=self.prefix)
