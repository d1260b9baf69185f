"""One chip for several models: what each model does on it, beside the chip of its own and the experts' TPU v4.

Models count by their ratios to the reference accelerator's own best plans; the average of the ratios is made large, or
the worst of them (`combine`). The chip comes with the certificate of the search over all models at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.executors import Workers
from phaze.explore.experiment_rows import ModelExperiment
from phaze.explore.journal import Journal
from phaze.explore.search_question import SearchOptions, ask_search
from phaze.installed import installed_plugins
from phaze.report.csv_text import csv_text

__all__ = ["ONE_CHIP_HEADINGS", "OneChip", "OneChipModel", "one_chip_csv", "run_one_chip"]

ONE_CHIP_HEADINGS = (
    "one chip by",
    "network",
    "model",
    ">samples/s",
    ">of tpuv4-paper with our placement",
    ">of its own chip",
    "chip",
    ">gap",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneChipModel:
    """A model on the chip that all share.

    Attributes:
        model: its name.
        samples_per_s: its throughput.
        ratio: this over the throughput of its best plan on the reference accelerator.
    """

    model: str
    samples_per_s: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OneChip:
    """The chip for several models.

    Attributes:
        network: how its devices are joined.
        combine: "average" or "worst": how the ratios of the models are joined.
        models: each of them.
        chip: the name of the accelerator.
        hbm_gib: its memory.
        value: the joined ratio.
        bound: no accelerator's joined ratio exceeds it.
        processor_s: processor seconds that it took to find.
    """

    network: str
    combine: str
    models: tuple[OneChipModel, ...]
    chip: str
    hbm_gib: float
    value: float
    bound: float
    processor_s: float

    def cells(self, rows: Sequence[ModelExperiment]) -> list[list[str]]:
        """A line for each model and one for the joined ratio; `rows` know the chip of each model's own."""
        own = {row.model: row.both.samples_per_s for row in rows if row.network == self.network}
        lines = [
            [
                self.combine,
                self.network,
                model.model,
                f"{model.samples_per_s:,.5g}",
                f"{model.ratio:.2f}",
                f"{model.samples_per_s / own[model.model]:.1%}" if model.model in own else "",
                "",
                "",
            ]
            for model in self.models
        ]
        chip, gap = f"{self.chip}, {self.hbm_gib:g} GiB", f"{self.bound / self.value - 1:.2%}"
        return [*lines, [self.combine, self.network, "all", "", f"{self.value:.2f}", "", chip, gap]]


def run_one_chip(models: Sequence[object], network: str, combine: str, options: SearchOptions) -> OneChip:
    """Search for the chip of several models, in this process; raises PlanError where one of them fits nowhere."""
    started_s = time.process_time()
    asked: SearchOptions = {**options, "network": network, "combine": combine}
    question = ask_search(list(models), None, asked, installed_plugins())
    best_first = BestFirstSearch(question=question, workers=Workers(), journal=Journal())
    state = best_first.run()
    assert state.best is not None
    found = []
    for model, (name, evaluation) in enumerate(zip(question.names, state.best.evaluations, strict=True)):
        assert evaluation.time_s is not None
        rate = question.questions[model].global_batch_size / evaluation.time_s
        ratio = rate / state.objective.reference_rates[model]
        found.append(OneChipModel(model=name, samples_per_s=rate, ratio=ratio))
    return OneChip(
        network=network,
        combine=combine,
        models=tuple(found),
        chip=question.points.names[state.best.point],
        hbm_gib=question.hbm_bytes[-1] / 2**30,
        value=state.best.value,
        bound=best_first.proven_bound(),
        processor_s=time.process_time() - started_s,
    )


def one_chip_csv(chips: Sequence[OneChip]) -> str:
    """A line for each model on each chip that all share."""
    names = (
        "combine",
        "network",
        "model",
        "samples_per_s",
        "ratio",
        "chip",
        "hbm_gib",
        "value",
        "bound",
        "processor_s",
    )
    return csv_text(
        names,
        (
            (
                *(chip.combine, chip.network, model.model, model.samples_per_s, model.ratio),
                *(chip.chip, chip.hbm_gib, chip.value, chip.bound, chip.processor_s),
            )
            for chip in chips
            for model in chip.models
        ),
    )
