"""The sweeps of a search: a task a cell, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phaze.errors import ShardError
from phaze.explore.design_bounds import sweep_cell
from phaze.explore.design_boxes import Swept
from phaze.explore.executors import Workers
from phaze.explore.search_question import SearchQuestion

__all__ = ["Sweep", "sweep_all", "sweeps_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sweep:
    """One cell to sweep; `question` has the request of its model only."""

    question: SearchQuestion
    model: int
    micro_batch_size: int
    tp: int
    is_tight: bool = False

    @property
    def cell_name(self) -> str:
        """As `Cell.name`."""
        return f"{self.model}:b{self.micro_batch_size}t{self.tp}"


def _sweep(task: Sweep) -> Swept | str:
    question = task.question
    try:
        cell, rows = sweep_cell(
            question.questions[0],
            task.model,
            task.micro_batch_size,
            task.tp,
            question.points,
            question.schedules,
            is_paper=question.is_paper,
            is_tight=task.is_tight,
        )
    except ShardError as error:
        return str(error)
    return Swept(cell, rows)


def sweeps_of(question: SearchQuestion) -> list[Sweep]:
    """A task a cell, wide ones first: they take longest."""
    return [
        Sweep(
            question=replace(question, names=(question.names[model],), questions=(model_question,)),
            model=model,
            micro_batch_size=size,
            tp=tp,
        )
        for model, model_question in enumerate(question.questions)
        for tp in sorted(model_question.tp_degrees, reverse=True)
        for size in model_question.micro_batch_sizes
    ]


def sweep_all(
    tasks: Sequence[Sweep], workers: Workers, report: Callable[[str], object] = lambda doing: None
) -> tuple[list[Swept], dict[str, str]]:
    """Cells over the whole space, and why cells are impossible, by their names."""
    names = [f"{task.question.names[0]}, microbatch {task.micro_batch_size}, width {task.tp}" for task in tasks]
    found = workers.run(_sweep, tasks, lambda index, _: report(f"sweep {names[index]}"))
    refused = {name: one for name, one in zip(names, found, strict=True) if isinstance(one, str)}
    return [one for one in found if isinstance(one, Swept)], refused
