"""Searches that draw designs beside the proven one: same space, same evaluations."""

import csv
import functools
import io
import json
from typing import Any

import numpy as np
import pytest
from designs import SMALL, searched, small_question, some_points, tiny_model
from plans import small_graph

import phaze
from phaze.errors import QuestionError
from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.design_samplers import DesignLattice, SpotlightSampler
from phaze.explore.executors import Workers
from phaze.explore.journal import Journal
from phaze.explore.sampled_evaluation import DelayEvaluator, DesignEvaluator
from phaze.explore.sampled_search import SAMPLED_METHODS, SampledRun, SearchMethod, rehearse, sample_designs
from phaze.hardware.accelerator import area_mm2
from phaze.parallelism import Parallelism, PipelineSchedule

POINTS = phaze.space.grid(
    tensor_cores=(1, 4), tensor_rows=(32, 64), tensor_cols=(64,), vector_cores=(1, 2), buffer_mib=(8,)
)


@functools.cache
def small_search(**changes: object) -> BestFirstSearch:
    """A search of the small space to its end; tests only read from it what designs are worth."""
    return searched(small_question([tiny_model()], POINTS, micro_batch_size=(2,), **changes))


def sampled(best_first: BestFirstSearch, method: SearchMethod, evaluations: int, seed: int = 0) -> SampledRun:
    (run,) = sample_designs(best_first, method, [seed], evaluations)
    return run


@pytest.mark.parametrize("method", SAMPLED_METHODS)
def test_sampling_never_beats_what_is_proven_and_reaches_it_when_it_saw_everything(method: SearchMethod) -> None:
    best_first = small_search(hbm_gib=(1,))
    few, whole = sampled(best_first, method, 3), sampled(best_first, method, 50)
    best = best_first.state.best
    assert best is not None
    assert (few.evaluations, whole.evaluations) == (3, 8)
    assert max(few.value, whole.value) <= best.value * (1 + 1e-9)
    if method is not SearchMethod.SPOTLIGHT_DELAY:  # which looks for the quickest single device
        assert few.value <= whole.value
        assert whole.value == pytest.approx(best.value, rel=1e-9)
        assert list(whole.history) == sorted(whole.history)


@pytest.mark.parametrize("options", [{"objective": "throughput-per-area"}, {"objective": "throughput-per-energy"}])
def test_sampling_never_beats_what_is_proven_by_other_objectives(options: dict[str, Any]) -> None:
    best_first = searched(small_question([tiny_model()], POINTS, micro_batch_size=(2,), **options))
    best = best_first.state.best
    assert best is not None
    assert sampled(best_first, SearchMethod.SPOTLIGHT, 6).value <= best.value * (1 + 1e-9)


def test_sampling_for_several_models_never_beats_the_proven_ratio() -> None:
    models = [tiny_model(), tiny_model(4, name="other")]
    best_first = searched(small_question(models, POINTS, micro_batch_size=(2,), hbm_gib=(1,)))
    best = best_first.state.best
    assert best is not None
    assert sampled(best_first, SearchMethod.RANDOM, 8).value == pytest.approx(best.value, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("method", SAMPLED_METHODS)
def test_the_same_seed_samples_the_same_designs(method: SearchMethod) -> None:
    best_first = small_search()
    first, second = (sampled(best_first, method, 12, seed=1) for _ in range(2))
    assert (first.history, first.design) == (second.history, second.design)


def test_a_search_by_sampling_tells_median_spread_and_work() -> None:
    result = phaze.search(
        tiny_model(), space=POINTS, method="random", seeds=3, evaluations=2, executor="serial", **SMALL
    )
    values = [run.value for run in result.runs]
    assert [run.seed for run in result.runs] == [0, 1, 2]
    assert result.median == sorted(values)[1]
    assert result.spread == (min(values), max(values))
    assert "6 evaluations" in str(result)
    assert "proof     none" in str(result)
    assert json.loads(result.to_json())["method"] == "random"
    rows = list(csv.DictReader(io.StringIO(result.convergence_csv())))
    assert [int(row["evaluations"]) for row in rows] == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"method": "annealing"}, "method is 'annealing'"),
        ({"method": "tpe", "seeds": 0}, "seeds is 0"),
        ({"method": "tpe", "evaluations": 1.5}, "evaluations is 1.5"),
        ({"method": "tpe", "journal": "kept"}, "keeps no journal"),
        ({"method": "random", "front": True}, "proves no front"),
    ],
)
def test_what_a_method_cannot_do_is_refused_by_name(change: dict[str, Any], told: str) -> None:
    with pytest.raises(QuestionError, match=told):
        phaze.search(tiny_model(), space=POINTS, **{**SMALL, **change})


def test_every_design_is_taken_once_until_none_is_left() -> None:
    lattice = DesignLattice(POINTS, (2**30, 2**31))
    rows = [lattice.take_nearest(dict.fromkeys(lattice.highest, 0)) for _ in range(lattice.size)]
    assert sorted(map(lattice.design, rows)) == [(point, size) for point in range(8) for size in (2**30, 2**31)]
    assert lattice.left == 0
    assert lattice.draw(3, np.random.default_rng(0)) == []


def test_a_proposal_outside_the_space_becomes_the_nearest_point_of_it() -> None:
    points = phaze.space.grid(
        tensor_cores=(1, 2, 4, 8),
        tensor_rows=(32,),
        tensor_cols=(32,),
        vector_cores=(1, 2, 4, 8),
        buffer_mib=(8,),
        where=lambda points: points.vector_cores <= points.tensor_cores,
    )
    lattice = DesignLattice(points, (2**30,))
    row = lattice.take_nearest({"tensor_cores": 2, "vector_cores": 3})
    assert lattice.place(row) == {"tensor_cores": 2, "vector_cores": 2}
    point, _ = lattice.design(row)
    assert points.tensor_cores[point] == points.vector_cores[point] == 4


def test_spotlight_finds_the_design_that_its_features_point_to() -> None:
    points = phaze.space.paper()
    lattice = DesignLattice(points, (2**30,))
    sampler = SpotlightSampler(lattice, seed=0)
    # A cost that is linear in the logarithm of one feature: all multiply-accumulate units.
    units = (points.tensor_cores * points.tensor_rows * points.tensor_cols).astype(float)
    drawn: list[float] = []
    for _ in range(4):
        rows = sampler.propose()
        values = [float(units[lattice.design(row)[0]]) for row in rows]
        sampler.tell(rows, values)
        drawn.append(float(np.median(values)))
    assert drawn[-1] > 10 * drawn[0]
    assert max(drawn) >= np.quantile(units, 0.95)


def test_the_delay_of_one_device_is_that_of_its_layers() -> None:
    best_first = small_search(hbm_gib=(1,), devices=1, global_batch_size=2000)
    evaluator = DelayEvaluator(best_first.question, best_first.state.slicings)
    value = evaluator.value(0, 2**30)
    exact = DesignEvaluator(best_first.question, best_first.state.slicings, best_first.state.objective)
    whole = exact.value(0, 2**30)
    assert whole < value < 1.01 * whole  # beside a thousand microbatches, a step has one update


@pytest.mark.parametrize("gap", [0.0, 0.01])
def test_a_value_is_that_of_a_plan_or_nothing_where_it_provably_is_useless(gap: float) -> None:
    question = small_question([small_graph(num_layers=1)], some_points(4, seed=3), gap=gap, micro_batch_size=(1,))
    best_first = BestFirstSearch(question=question, workers=Workers(), journal=Journal())
    best_first.sweep()
    state, strategies = best_first.state, rehearse(best_first).strategies
    assert bool(strategies) == (gap > 0)  # where the optimum is asked for, nothing is estimated
    evaluator = DesignEvaluator(question, state.slicings, state.objective, strategies)
    useless, most = 0, 0.0
    for point in range(len(question.points)):
        for size in question.hbm_bytes:
            area = area_mm2(question.points.at(point))
            told = evaluator.value(point, size, most)
            best = evaluator.value_of(evaluator.evaluate(point, size), area)
            if told:
                assert told == pytest.approx(best, rel=0.05 if gap else 1e-9)
                assert told <= best * (1 + gap)
            else:
                useless += 1
                assert best <= most * (1 + 1e-9)
            most = max(most, told)
    assert useless


def test_a_design_that_no_known_strategy_fits_is_evaluated() -> None:
    question = small_question([tiny_model()], POINTS, gap=0.01, micro_batch_size=(2,))
    best_first = BestFirstSearch(question=question, workers=Workers(), journal=Journal())
    best_first.sweep()
    state = best_first.state
    lost = Parallelism(dp=1, pp=2, schedule=PipelineSchedule.ONE_F_ONE_B, zero=3)  # too few devices to be quick
    values = [
        DesignEvaluator(question, state.slicings, state.objective, strategies).value(0, question.hbm_bytes[-1])
        for strategies in ([[]], [[lost]], ())
    ]
    assert values[0] == values[2]
    assert 0 < values[1] <= values[2]
