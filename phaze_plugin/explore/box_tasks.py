"""The tasks that a search hands to its workers: bounding boxes, scheduling layers, evaluating designs.

Every task has a name. Where the journal has a result under that name, the task is not run again (`_JournaledWorkers`),
so that a resumed search repeats only the sweep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from phaze.errors import FormatError
from phaze.explore.design_bounds import FloatArray, best_case_accelerator
from phaze.explore.executors import Workers
from phaze.explore.journal import Journal, seconds_or_none
from phaze.explore.search_question import SearchQuestion
from phaze.explore.search_state import DesignBox, EvaluatedDesign, SearchState
from phaze.explore.worker_tasks import (
    BoundTask,
    EvaluateTask,
    Evaluation,
    ScheduleTask,
    bound_step_time,
    evaluate_design,
    schedule_pass_bounds,
)
from phaze.hardware import Accelerator
from phaze.json_documents import from_document, to_document
from phaze.profile.model_profiles import profile_options
from phaze.tolerances import EQUAL_RESULTS

__all__ = ["BoxTasks"]

_SCHEDULED_BOX_SIZE = 16
"""A box of at most so many accelerators has its layers scheduled before it is cut further. Schedules are dearer than
the sweep's bounds and tighter; in larger boxes the least over all accelerators would lose what they gain."""


class _Task(Protocol):
    @property
    def cutoff_s(self) -> float: ...


_TaskType = TypeVar("_TaskType", bound=_Task)
_Result = TypeVar("_Result")
_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class _BoundRecord:
    """A bound as the journal keeps it; None where nothing fits."""

    bound_s: float | None

    def __post_init__(self) -> None:
        """Check that it is a time."""
        if self.bound_s is not None and self.bound_s < 0:
            raise ValueError(f"bound_s is {self.bound_s}; expected at least 0")


@dataclass(frozen=True, slots=True)
class _ScheduleRecord:
    """Bounds of scheduled passes as the journal keeps them, by accelerator and column."""

    pass_s: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        """Check that these are times, as many of each accelerator."""
        if len({len(row) for row in self.pass_s}) != 1 or min(map(min, filter(None, self.pass_s)), default=0) < 0:
            raise ValueError("pass_s has rows of different lengths, or negative times")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _JournaledWorkers:
    """Workers that run only the tasks which the journal lacks, and write their results down."""

    workers: Workers
    journal: Journal
    report: Callable[[str], object]
    prefix: str

    def run(
        self,
        names: Sequence[str],
        tasks: Sequence[_TaskType],
        function: Callable[[_TaskType], _Result],
        record_of: Callable[[_Result], _Record],
        kind: type[_Record],
    ) -> list[_Record]:
        """The records of all tasks, in their order, as the journal has them afterwards."""
        names = [f"{self.prefix}{name}" for name in names]
        missing = [
            index
            for index, (name, task) in enumerate(zip(names, tasks, strict=True))
            if self.journal.find(name, task.cutoff_s) is None
        ]

        def done(position: int, result: _Result) -> None:
            index = missing[position]
            self.journal.add(names[index], tasks[index].cutoff_s, to_document(record_of(result)))
            self.report(names[index])

        self.workers.run(function, [tasks[index] for index in missing], done)
        return [from_document(kind, self.journal.records[name]["result"], name) for name in names]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxTasks:
    """Makes the tasks of a search from boxes and from what is known, runs them, and puts their results to use.

    Attributes:
        state: what is known; bounds of scheduled layers and counts are written there.
        workers: where tasks run.
        journal: where their results are kept.
        report: hears the name of every finished task.
        prefix: begins the names of all tasks, so that a search inside another one has names of its own.
    """

    state: SearchState
    workers: Workers
    journal: Journal
    report: Callable[[str], object]
    prefix: str

    @property
    def _question(self) -> SearchQuestion:
        return self.state.question

    @property
    def _journaled(self) -> _JournaledWorkers:
        return _JournaledWorkers(workers=self.workers, journal=self.journal, report=self.report, prefix=self.prefix)

    def open_slicings(self, box: DesignBox) -> list[bool]:
        """Which slicings keep a box from being closed."""
        closing_s = [self.state.closing_time_s(box, model) for model in range(len(self._question.names))]
        return [
            bool(bound_s < closing_s[swept.slicing.model] * (1 - EQUAL_RESULTS))
            for bound_s, swept in zip(box.bounds_s, self.state.slicings, strict=True)
        ]

    def bound_boxes(self, boxes: Sequence[DesignBox], is_quick: bool = False) -> list[DesignBox]:
        """Boxes with the bounds of their best cases, slicing by slicing, as far as it takes to close them.

        With `is_quick`, bounds are computed without a cutoff and with little effort.
        """
        names, tasks, bounded_entries = [], [], []
        bounded = [self._with_swept_bounds(box) for box in boxes]
        for box in bounded:
            closing_s = [self.state.closing_time_s(box, model) for model in range(len(self._question.names))]
            if self.state.is_closed(box):
                continue
            chip = best_case_accelerator(self._question.points, box.points)
            for index, swept in enumerate(self.state.slicings):
                slicing = swept.slicing
                cutoff_s = math.inf if is_quick else closing_s[slicing.model]
                if box.bounds_s[index] >= cutoff_s * (1 - EQUAL_RESULTS) or math.isinf(box.bounds_s[index]):
                    continue
                problem = slicing.problem_with(swept.bounds.pass_s[box.points].min(axis=0), chip)
                tasks.append(BoundTask(problem=problem, cutoff_s=cutoff_s, is_paper=slicing.is_paper))
                names.append(f"{'quick' if is_quick else 'bound'}/{box.name}/{slicing.name}")
                bounded_entries.append((box, index))
        self.state.bound_count += len(tasks)
        records = self._journaled.run(
            names, tasks, bound_step_time, lambda bound_s: _BoundRecord(seconds_or_none(bound_s)), _BoundRecord
        )
        for (box, index), record in zip(bounded_entries, records, strict=True):
            bound_s = math.inf if record.bound_s is None else record.bound_s
            box.bounds_s[index] = max(float(box.bounds_s[index]), bound_s)
        return bounded

    def _with_swept_bounds(self, box: DesignBox) -> DesignBox:
        """A copy whose bounds are at least the sweep's."""
        swept_s = [float(swept.bounds.step_s[box.points].min()) for swept in self.state.slicings]
        return replace(box, bounds_s=np.maximum(box.bounds_s, swept_s))

    def boxes_to_schedule(self, boxes: Sequence[DesignBox]) -> list[DesignBox]:
        """The boxes that are small enough to have their layers scheduled, and have some that were not."""
        return [
            box
            for box in boxes
            if len(box) <= _SCHEDULED_BOX_SIZE and not self.state.scheduled.issuperset(box.points.tolist())
        ]

    def schedule_boxes(self, boxes: Sequence[DesignBox]) -> list[DesignBox]:
        """Schedule the layers of boxes where slicings are open, and bound the boxes again with what this proves."""
        names, tasks, scheduled_parts = [], [], []
        for box in boxes:
            chips = tuple(self._question.points.at(point) for point in box.points.tolist())
            for swept, is_open in zip(self.state.slicings, self.open_slicings(box), strict=True):
                if is_open:
                    slicing = swept.slicing
                    options = profile_options(self._question.questions[slicing.model])
                    tasks.append(ScheduleTask(slicing=slicing, accelerators=chips, options=options))
                    names.append(f"schedule/{box.name}/{slicing.name}")
                    scheduled_parts.append((box, swept))
        records = self._journaled.run(
            names,
            tasks,
            schedule_pass_bounds,
            lambda rows: _ScheduleRecord(tuple(tuple(row) for row in rows)),
            _ScheduleRecord,
        )
        for (box, swept), record in zip(scheduled_parts, records, strict=True):
            pass_s: FloatArray = swept.bounds.pass_s
            if np.shape(record.pass_s) != pass_s[box.points].shape:
                raise FormatError(f"the journal's bounds of {box.name} are of other layers; begin a new journal.")
            pass_s[box.points] = np.maximum(pass_s[box.points], np.array(record.pass_s))
        for box in boxes:
            self.state.scheduled.update(box.points.tolist())
        return self.bound_boxes([replace(box, name=f"{box.name}s") for box in boxes])

    def single_box(self, box: DesignBox, point: int) -> DesignBox:
        """One accelerator of a box by itself, with what the sweep and the box know of it."""
        swept_s = np.array([swept.bounds.step_s[point] for swept in self.state.slicings])
        return DesignBox(name=f"{point}", points=np.array([point]), bounds_s=np.maximum(box.bounds_s, swept_s))

    def evaluate_task(
        self, box: DesignBox, model: int, chip: Accelerator, cutoff_s: float, *, is_inside: bool = True
    ) -> EvaluateTask:
        """One model on an accelerator, with the slicings that may beat the cutoff.

        The box's bounds hold for the accelerator if it `is_inside`; else nothing is known.
        """
        known = [(float(box.bounds_s[index]) if is_inside else 0.0, index) for index in self.state.slicings_of(model)]
        slicings = tuple(
            (bound_s, self.state.slicings[index].slicing) for bound_s, index in known if bound_s < cutoff_s
        )
        model_question = self._question.questions[model]
        return EvaluateTask(model_question=model_question, accelerator=chip, slicings=slicings, cutoff_s=cutoff_s)

    def evaluate(self, names: Sequence[str], tasks: Sequence[EvaluateTask]) -> list[Evaluation]:
        """The evaluations of tasks."""
        return self._journaled.run(names, tasks, evaluate_design, lambda evaluation: evaluation, Evaluation)

    def evaluate_models(
        self, names: Sequence[str], tasks: Sequence[EvaluateTask], boxes: Sequence[DesignBox]
    ) -> list[EvaluatedDesign]:
        """Single accelerators, judged by a task for each of their models; `boxes` holds a box for each accelerator.

        The bound of an evaluation is lowered to the known bounds of slicings that were left out of its task.
        """
        model_count = len(self._question.names)
        evaluations = [
            self._with_left_out(evaluation, task, boxes[index // model_count], index % model_count)
            for index, (evaluation, task) in enumerate(zip(self.evaluate(names, tasks), tasks, strict=True))
        ]
        return [
            self.state.judge(box, evaluations[index * model_count : (index + 1) * model_count])
            for index, box in enumerate(boxes)
        ]

    def _with_left_out(self, evaluation: Evaluation, task: EvaluateTask, box: DesignBox, model: int) -> Evaluation:
        given = {slicing.name for _, slicing in task.slicings}
        left_out_s = [
            float(box.bounds_s[index])
            for index in self.state.slicings_of(model)
            if self.state.slicings[index].slicing.name not in given
        ]
        bound_s = min([math.inf if evaluation.bound_s is None else evaluation.bound_s, *left_out_s])
        return replace(evaluation, bound_s=seconds_or_none(bound_s))

    def evaluate_with_memory(self, point: int, hbm_bytes: int) -> list[Evaluation]:
        """The evaluations of an accelerator with some memory, with nothing known but what the sweep tells."""
        chip = replace(self._question.points.at(point), hbm_bytes=hbm_bytes)
        unbounded = replace(self.state.unbounded_box(point), bounds_s=np.zeros(len(self.state.slicings)))
        box = self.single_box(unbounded, point)
        tasks = [self.evaluate_task(box, model, chip, math.inf) for model in range(len(self._question.names))]
        return self.evaluate([f"evaluate/{point}@{hbm_bytes}/{model}" for model in range(len(tasks))], tasks)

    def value_of(self, point: int) -> float:
        """The value of an accelerator with the largest memory, 0 where some model does not fit; it is not kept."""
        return self.state.judge_alone(point, self.evaluate_with_memory(point, self._question.hbm_bytes[-1])).value
