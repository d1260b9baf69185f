"""The paper's experiments: what a chip, a placement and both are worth beside the baselines; one chip for all models.

For each model and network (Wang et al., ICML 2024, section 5) `run_experiment` finds

    experts           tpuv4-paper with the degrees of the paper's experts, everything else the best for these
    placement only    tpuv4-paper with the best placement
    hardware only     the best chip of the space for the experts' degrees
    both              the best chip with the best placement, proven

and what Spotlight, TPE and chance find in the same space. The network `paper` has the 4 GiB/s that the paper states.
The authors' artifact divides cycles by 1.05e6, which gives milliseconds, and bytes by 4 GiB per second, and adds the
two: its links are effectively 1,000 times faster. That reading is the network `paper-artifact`.

`run_one_chip` looks for one chip for several models, and tells what each does on it, beside the chip of its own and the
experts' TPU v4. Models count by their ratios to the reference accelerator's own best plans; the average of the ratios
is made large, or the worst of them (`combine`). The chip comes with the certificate of the search over all models at
once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from phaze.errors import PlanError
from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.design_search import run_search
from phaze.explore.executors import Workers
from phaze.explore.experiment_rows import Baseline, Contender, ModelExperiment
from phaze.explore.journal import Journal
from phaze.explore.sampled_search import Rehearsal, SampledRun, SearchMethod, rehearse, sample_designs
from phaze.explore.search_question import REFERENCE, SearchOptions, SearchQuestion, ask_search
from phaze.hardware import AcceleratorArray, preset
from phaze.installed import installed_plugins
from phaze.planner.planning import evaluate
from phaze.report.plan_text import csv_text

__all__ = [
    "EXPERT_STRATEGIES",
    "ONE_CHIP_HEADINGS",
    "ExperimentSettings",
    "OneChip",
    "OneChipModel",
    "one_chip_csv",
    "run_experiment",
    "run_one_chip",
]

EXPERT_STRATEGIES: Mapping[str, Mapping[str, object]] = {
    model: {"pp": pp, "dp": dp, "tp": tp, "schedule": "1f1b"}
    for model, (pp, dp, tp) in {
        "bert-large": (8, 128, 1),
        "gpt2-xl": (32, 32, 1),
        "opt-350m": (12, 85, 1),
        "llama2-7b": (8, 128, 1),
        "megatron-bert": (8, 128, 1),
        "megatron-gpt2-xl": (8, 128, 1),
        "megatron-gpt2-54": (8, 32, 4),
        "megatron-gpt2-72": (8, 16, 8),
        "gpt3-175b": (32, 8, 4),
    }.items()
}
"""The experts' placements of the paper's nine models on 1,024 devices."""

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExperimentSettings:
    """What all rows of a table share.

    Attributes:
        methods: baselines to run.
        seeds: runs of each.
        evaluations: designs of a run.
        options: how the space is searched, as `phaze.search` takes it, but for network and strategy.
        journals: the folder that keeps a journal of each exact search; None for none.
    """

    methods: tuple[SearchMethod, ...]
    seeds: int
    evaluations: int
    options: SearchOptions
    journals: Path | None = None


def run_experiment(
    model: object,
    experts: Mapping[str, object],
    network: str,
    settings: ExperimentSettings,
    *,
    workers: Workers | None = None,
    report: Callable[[str], object] = lambda doing: None,
) -> ModelExperiment:
    """All contenders of one model on one network; baselines run on `workers`, everything else in this process."""
    options: SearchOptions = {**settings.options, "network": network}
    report("tpuv4-paper, experts' placement")
    experts_row = _experts(model, experts, options)
    report("tpuv4-paper, our placement")
    placement_only, _ = _searched(model, _on_reference(options))
    report("our chip, experts' placement")
    hardware_only, of_experts = _searched(model, {**options, "strategy": experts}, settings.journals, "experts")
    report("our chip, our placement")
    both, best_first = _searched(model, options, settings.journals, "both")
    assert best_first is not None
    best_first.workers = workers or Workers()
    rehearsal = rehearse(best_first) if settings.methods else Rehearsal(strategies=())
    runs: dict[SearchMethod, list[SampledRun]] = {}
    for method in settings.methods:
        report(f"{method}, {settings.seeds} seeds")
        runs[method] = sample_designs(best_first, method, range(settings.seeds), settings.evaluations, rehearsal)
    return ModelExperiment(
        model=best_first.question.names[0],
        network=network,
        experts=experts_row,
        placement_only=placement_only,
        hardware_only=hardware_only,
        both=_best_of_all(both, runs),
        baselines=tuple(_baseline(method, drawn, of_experts) for method, drawn in runs.items()),
    )


def _best_of_all(both: Contender, runs: Mapping[SearchMethod, Sequence[SampledRun]]) -> Contender:
    """The best design that anybody found, with the bound of the exact search.

    The search ends within its gap, and a baseline may find something better there: a real plan, which then counts.
    """
    alone = both.samples_per_s
    for method, drawn in runs.items():
        for run in drawn:
            if run.design is not None and run.value > both.samples_per_s:
                both = replace(
                    both,
                    chip=run.design.name,
                    hbm_gib=run.design.hbm_gib,
                    samples_per_s=run.value,
                    plan=_plan_text(run.design.models[0].strategy),
                    found_by=method.value,
                    search_samples_per_s=alone,
                )
    return both


def _on_reference(options: SearchOptions) -> SearchOptions:
    """The same question on the reference accelerator alone."""
    chip = preset(REFERENCE).accelerator
    return {**options, "space": AcceleratorArray.of([chip]), "hbm_gib": chip.hbm_bytes / _GIB}


def _question(model: object, options: SearchOptions) -> SearchQuestion:
    return ask_search(model, None, options, installed_plugins())


def _experts(model: object, experts: Mapping[str, object], options: SearchOptions) -> Contender:
    """The reference with the experts' degrees: priced even where it does not fit, and then marked."""
    question = _question(model, _on_reference(options)).questions[0]
    started_s = time.process_time()
    plan = evaluate(
        model,
        strategy=dict(experts),
        cluster=question.cluster,
        global_batch_size=question.global_batch_size,
        micro_batch_size=question.micro_batch_sizes,
        target=None,
        compares=False,
    ).plan
    return Contender(
        chip=REFERENCE,
        hbm_gib=question.cluster.accelerator.hbm_bytes / _GIB,
        samples_per_s=question.global_batch_size / plan.step_time_s,
        fits=plan.is_feasible,
        plan=_plan_text({name: getattr(plan.strategy, name) for name in _SHOWN}),
        bound=None,
        processor_s=time.process_time() - started_s,
    )


def _searched(
    model: object, options: SearchOptions, journals: Path | None = None, who: str = ""
) -> tuple[Contender, BestFirstSearch | None]:
    """The best chip for a question, with the bound of the proof; nothing where no chip of the space fits."""
    started_s, question = time.process_time(), _question(model, options)
    with ExitStack() as stack:
        journal = Journal()
        if journals is not None:
            name = f"{question.names[0]}-{options['network']}-{who}.jsonl"
            journal = Journal.open(journals / name, question.journal_header())
            stack.callback(journal.close)
        best_first = BestFirstSearch(question=question, workers=Workers(), journal=journal)
        try:
            result = run_search(best_first, time.monotonic())
        except PlanError:
            spent_s = time.process_time() - started_s
            return Contender(chip="none fits", hbm_gib=0.0, samples_per_s=0.0, fits=False, processor_s=spent_s), None
    contender = Contender(
        chip=result.best.name,
        hbm_gib=result.best.hbm_gib,
        samples_per_s=result.best.value,
        fits=True,
        plan=_plan_text(result.best.models[0].strategy),
        bound=result.certificate.bound,
        processor_s=time.process_time() - started_s,
    )
    return contender, replace(best_first, journal=Journal())


def _baseline(method: SearchMethod, runs: Sequence[SampledRun], of_experts: BestFirstSearch | None) -> Baseline:
    """What a method found with every seed, and what its chips reach with the experts' placement."""
    values = [run.value for run in runs]
    with_experts = [_with_experts(run, of_experts) for run in runs] if method is SearchMethod.SPOTLIGHT_DELAY else []
    lengths = {run.evaluations for run in runs}
    return Baseline(
        method=method.value,
        seeds=len(runs),
        median=statistics.median(values),
        least=min(values),
        most=max(values),
        with_experts_median=statistics.median(with_experts) if with_experts else None,
        evaluations=max(lengths),
        processor_s=statistics.median(run.processor_s for run in runs),
        chip=_most_common([run.design.name for run in runs if run.design is not None]),
        convergence=tuple(statistics.median(run.history[index] for run in runs) for index in range(min(lengths))),
    )


def _with_experts(run: SampledRun, of_experts: BestFirstSearch | None) -> float:
    """The value of a run's chip with the experts' placement; 0 where it does not fit."""
    if run.design is None or of_experts is None:
        return 0.0
    return of_experts.tasks.value_of(of_experts.question.points.names.index(run.design.name))


def _most_common(names: Sequence[str]) -> str:
    return statistics.mode(names) if names else "none fits"


_SHOWN = ("dp", "tp", "pp", "micro_batch_size", "zero", "schedule")


def _plan_text(strategy: Mapping[str, object]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {strategy[name]}" for name in _SHOWN)


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
