"""The result of a search that draws designs: the best of each seed, their median and spread, and what they spent."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from phaze.digests import with_digest
from phaze.explore.search_result import Design, model_line, value_text
from phaze.file_writing import write_whole
from phaze.json_records import to_document
from phaze.printable_text import printable
from phaze.report.csv_text import csv_text
from phaze.report.plan_text import seconds_text

__all__ = ["SampledRun", "SampledSearch"]

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
