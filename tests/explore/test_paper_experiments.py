"""The paper's experiments on a small model: four ways to a chip and a placement, and baselines beside them."""

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from designs import SMALL, tiny_model

import phaze
from phaze.explore.experiment_rows import ModelExperiment, convergence_csv, experiments_csv, network_notes
from phaze.explore.paper_experiments import EXPERT_STRATEGIES, ExperimentSettings, run_experiment, run_one_chip
from phaze.explore.sampled_search import SAMPLED_METHODS, SearchMethod
from phaze.hardware import preset
from phaze.verify.search_checks import check_search

POINTS = phaze.space.grid(
    tensor_cores=(1, 8), tensor_rows=(128,), tensor_cols=(64, 128), vector_cores=(1, 4), buffer_mib=(8,)
)
EXPERTS = {"dp": 2, "pp": 2, "tp": 1, "schedule": "1f1b"}


@pytest.fixture(scope="module")
def experiment() -> ModelExperiment:
    options = {**SMALL, "space": POINTS, "gap": 0.0, "hbm_gib": (1,), "micro_batch_size": (2,)}
    settings = ExperimentSettings(methods=SAMPLED_METHODS, seeds=2, evaluations=4, options=options)  # type: ignore[typeddict-item]
    return run_experiment(tiny_model(), EXPERTS, "paper", settings)


def test_choosing_more_never_gives_less(experiment: ModelExperiment) -> None:
    experts, both = experiment.experts.samples_per_s, experiment.both.samples_per_s
    assert experiment.placement_only.samples_per_s >= experts * (1 - 1e-9)
    assert both >= experiment.hardware_only.samples_per_s * (1 - 1e-9)
    assert experiment.hardware_only.plan.startswith("dp 2, tp 1, pp 2")


def test_no_baseline_beats_the_exact_search(experiment: ModelExperiment) -> None:
    assert [row.method for row in experiment.baselines] == list(SAMPLED_METHODS)
    for row in experiment.baselines:
        assert row.least <= row.median <= row.most <= experiment.both.samples_per_s * (1 + 1e-9)
        assert (row.seeds, row.evaluations, len(row.convergence)) == (2, 4, 4)
        assert (row.with_experts_median is None) == (row.method != "spotlight-delay")


def test_a_better_design_that_a_baseline_found_within_the_gap_is_the_answer_and_is_told() -> None:
    space = phaze.space.grid(
        tensor_cores=(1, 2, 4, 8),
        tensor_rows=(8, 16, 32, 64, 128),
        tensor_cols=(8, 16, 32, 64, 128),
        vector_cores=(1, 2, 4),
        buffer_mib=(4, 8),
        where=lambda points: points.tensor_cores * points.tensor_rows * points.tensor_cols <= 2 * 64 * 64,
    )
    # A few designs that are no neighbours, searched to a wide gap: the search ends before it has seen the best of them.
    few = space.take(np.sort(np.random.default_rng(7).choice(len(space), 12, replace=False)))
    options = {**SMALL, "space": few, "gap": 0.3, "hbm_gib": (1,), "micro_batch_size": (2,)}
    settings = ExperimentSettings(methods=(SearchMethod.RANDOM,), seeds=1, evaluations=12, options=options)  # type: ignore[arg-type]
    found = run_experiment(tiny_model(), EXPERTS, "paper", settings)
    both, (drawn,) = found.both, found.baselines
    assert both.search_samples_per_s is not None
    assert both.bound is not None
    assert both.search_samples_per_s < drawn.most == both.samples_per_s <= both.bound
    assert both.found_by == "random"
    assert both.bound <= both.search_samples_per_s * 1.3
    assert "random found, 8.8" in network_notes([found])[1]


@pytest.mark.slow
def test_the_journals_of_a_row_verify(tmp_path: Path) -> None:
    options = {**SMALL, "space": POINTS, "gap": 0.01, "micro_batch_size": (2,)}
    settings = ExperimentSettings(methods=(), seeds=1, evaluations=1, options=options, journals=tmp_path)  # type: ignore[arg-type]
    row = run_experiment(tiny_model(), EXPERTS, "paper", settings)
    names = ["tiny-paper-both.jsonl", "tiny-paper-experts.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert all(finding.holds for finding in check_search(tmp_path / name, tiny_model(), points=2))
    again = run_experiment(tiny_model(), EXPERTS, "paper", settings)
    assert again.both.samples_per_s == row.both.samples_per_s


def test_hardware_only_is_what_a_search_with_the_same_strategy_finds(experiment: ModelExperiment) -> None:
    result = phaze.search(
        tiny_model(),
        executor="serial",
        **{**SMALL, "space": POINTS, "gap": 0.0, "hbm_gib": (1,), "micro_batch_size": (2,), "strategy": EXPERTS},
    )
    assert result.best.value == pytest.approx(experiment.hardware_only.samples_per_s, rel=1e-12)
    assert result.certificate.scope.startswith("with dp 2, pp 2, tp 1")
    strategy = result.best.models[0].strategy
    assert (strategy["dp"], strategy["pp"], strategy["tp"], strategy["schedule"]) == (2, 2, 1, "1f1b")


def test_tables_have_a_line_for_every_contender(experiment: ModelExperiment) -> None:
    rows = list(csv.DictReader(io.StringIO(experiments_csv([experiment]))))
    ways = ["experts", "placement-only", "hardware-only", "both"]
    assert [row["who"] for row in rows] == [*ways, *SAMPLED_METHODS]
    assert float(rows[0]["ratio_to_experts"]) == 1
    assert len(convergence_csv([experiment]).splitlines()) == 1 + 4 * 4


def test_the_chip_for_several_models_is_that_of_a_search_over_all_of_them() -> None:
    models = [tiny_model(), tiny_model(4, name="other")]
    options = {**SMALL, "space": POINTS, "hbm_gib": (1,), "micro_batch_size": (2,)}
    shared = run_one_chip(models, "paper", "worst", options)  # type: ignore[arg-type]
    best = phaze.search(models, executor="serial", combine="worst", **options).best
    assert (shared.chip, shared.value) == (best.name, pytest.approx(best.value, rel=1e-9))
    assert min(model.ratio for model in shared.models) == pytest.approx(shared.value, rel=1e-9)
    assert [model.samples_per_s for model in shared.models] == pytest.approx([row.samples_per_s for row in best.models])
    assert shared.bound >= shared.value


def test_a_ratio_that_is_mostly_the_network_reading_says_so(experiment: ModelExperiment) -> None:
    def scaled(network: str, factor: float) -> ModelExperiment:
        found = experiment.experts.samples_per_s * factor
        return replace(experiment, network=network, both=replace(experiment.both, samples_per_s=found))

    on_paper, as_run, near = scaled("paper", 18.8), scaled("paper-artifact", 4.0), scaled("paper-artifact", 12.0)
    assert "18.80 on paper is 4.00 on paper-artifact; most of it is the network reading" in network_notes(
        [on_paper, as_run]
    )[1].removeprefix("tiny: ")
    assert len(network_notes([on_paper, near])) == 1
    assert "may be the network reading" in network_notes([on_paper])[1]


def test_the_nine_models_have_experts_whose_degrees_fill_the_cluster_or_nearly() -> None:
    assert len(EXPERT_STRATEGIES) == 9
    for strategy in EXPERT_STRATEGIES.values():
        devices = int(str(strategy["pp"])) * int(str(strategy["dp"])) * int(str(strategy["tp"]))
        assert 1020 <= devices <= 1024


def test_the_bandwidth_of_the_papers_chip_says_where_it_is_from() -> None:
    assert "names no HBM bandwidth" in preset("tpuv4-paper").facts["hbm_bandwidth_bytes_per_s"].source
