"""Tasks whose results are written down: every task has a name, so that a journal can stand in for its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from phaze.explore.executors import Workers
from phaze.explore.journal import Journal, number
from phaze.explore.worker_tasks import (
    BoundTask,
    EvaluateTask,
    Outcome,
    ScheduleTask,
    bound_corner,
    evaluate_point,
    schedule_rows,
)
from phaze.json_records import from_document, to_document
from phaze.place.model.stage_space import FloatArray

__all__ = ["Recorded"]

_Task = TypeVar("_Task", BoundTask, EvaluateTask, ScheduleTask)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """Workers with a journal; `report` hears of every task that they finish. The prefix is that of all names."""

    workers: Workers
    journal: Journal
    report: Callable[[str], object]
    prefix: str

    def bounds(self, names: Sequence[str], tasks: Sequence[BoundTask]) -> list[float]:
        """The least seconds of corners; infinite where nothing fits."""
        found = self._run(names, bound_corner, tasks, lambda bound: {"bound_s": number(bound)})
        return [math.inf if one["bound_s"] is None else float(one["bound_s"]) for one in found]

    def evaluations(self, names: Sequence[str], tasks: Sequence[EvaluateTask]) -> list[Outcome]:
        """What accelerators reach."""
        found = self._run(names, evaluate_point, tasks, to_document)
        return [from_document(Outcome, one, name) for name, one in zip(names, found, strict=True)]

    def schedules(self, names: Sequence[str], tasks: Sequence[ScheduleTask]) -> list[FloatArray]:
        """The least seconds of layers by accelerator, as scheduled."""
        found = self._run(names, schedule_rows, tasks, lambda rows: {"rows": rows})
        return [np.array(one["rows"]) for one in found]

    def _run(
        self,
        names: Sequence[str],
        function: Callable[[_Task], Any],
        tasks: Sequence[_Task],
        write: Callable[[Any], dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """Results as the journal keeps them; what it lacks is computed and written."""
        names = [f"{self.prefix}{name}" for name in names]
        found = [self.journal.find(name, task.cutoff_s) for name, task in zip(names, tasks, strict=True)]
        missing = [at for at, one in enumerate(found) if one is None]

        def done(index: int, result: Any) -> None:
            at = missing[index]
            self.journal.add(names[at], tasks[at].cutoff_s, write(result))
            self.report(names[at])

        self.workers.run(function, [tasks[at] for at in missing], done)
        return [self.journal.records[name]["result"] for name in names]
