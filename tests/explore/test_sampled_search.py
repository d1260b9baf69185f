"""A sampled search beside the proven one: same space, same evaluations."""

import numpy as np
import pytest
from designs import searched, small_question, some_points, tiny_model
from oracles.sampled_search import Sampled, _Beaten, _Evaluator, _Lattice, sample_designs
from plans import small_graph

import phaze
from phaze.explore.best_first_search import BestFirstSearch

POINTS = phaze.space.grid(
    tensor_cores=(1, 4), tensor_rows=(32, 64), tensor_cols=(64,), vector_cores=(1, 2), buffer_mib=(8,)
)


def small_search(**changes: object) -> BestFirstSearch:
    return searched(small_question([tiny_model()], POINTS, micro_batch_size=(2,), **changes))


def sampled(best_first: BestFirstSearch, *evaluations: int, seed: int = 0) -> list[Sampled]:
    return list(sample_designs(best_first.question, evaluations, seed=seed))


def test_sampling_never_beats_what_is_proven_and_reaches_it_when_it_saw_everything() -> None:
    best_first = small_search(hbm_gib=(1,))
    few, all_ = sampled(best_first, 3, 8)
    best = best_first.state.best
    assert best is not None
    assert (few.evaluations, all_.evaluations) == (3, 8)
    assert few.samples_per_s <= all_.samples_per_s <= best.value * (1 + 1e-9)
    assert all_.samples_per_s >= best.value * (1 - 1e-9)


def test_the_same_seed_samples_the_same_designs() -> None:
    best_first = small_search()
    assert sampled(best_first, 4, seed=1) == sampled(best_first, 4, seed=1)


def test_every_evaluation_is_of_a_point_not_seen_before_until_none_is_left() -> None:
    best_first = small_search(hbm_gib=(1,))
    assert [best.evaluations for best in sampled(best_first, 5, 9)] == [5, 8]
    seen = []
    lattice = _Lattice(best_first.question)
    for _ in range(lattice.size):
        seen.append(lattice.take(dict.fromkeys(lattice.highest, 0))[1:])
    assert sorted(seen) == [(point, 2**30) for point in range(8)]


def test_a_proposal_outside_the_space_becomes_the_nearest_point_of_it() -> None:
    points = phaze.space.grid(
        tensor_cores=(1, 2, 4, 8),
        tensor_rows=(32,),
        tensor_cols=(32,),
        vector_cores=(1, 2, 4, 8),
        buffer_mib=(8,),
        where=lambda points: points.vector_cores <= points.tensor_cores,
    )
    lattice = _Lattice(small_question([tiny_model()], points, micro_batch_size=(2,), hbm_gib=(1,)))
    place, point, _ = lattice.take({"tensor_cores": 2, "vector_cores": 3})
    assert place == {"tensor_cores": 2, "vector_cores": 2}
    assert points.tensor_cores[point] == points.vector_cores[point] == 4


def test_sampling_ends_when_it_has_found_enough() -> None:
    best_first = small_search(hbm_gib=(1,))
    best = best_first.state.best
    assert best is not None
    (enough,) = sample_designs(best_first.question, [8], enough_samples_per_s=0.5 * best.value)
    assert enough.evaluations < 8
    assert enough.samples_per_s >= 0.5 * best.value


@pytest.mark.parametrize("gap", [0.0, 0.01])
def test_a_trial_is_told_its_throughput_or_is_not_among_the_best_few(gap: float) -> None:
    question = small_question([small_graph(num_layers=1)], some_points(8, seed=3), gap=gap, micro_batch_size=(1,))
    few, whole = (_Evaluator.of(question, few=count) for count in (3, 10**9))
    known: list[float] = []
    skipped = 0
    for point in range(len(question.points)):
        for size in question.hbm_bytes:
            told, true = few.evaluate(point, size), whole.evaluate(point, size)
            if told == 0.0 and true > 0.0:
                skipped += 1
                assert len(known) >= 3
                assert true <= sorted(known)[-3] * (1 + gap)
            else:
                assert told == pytest.approx(true, rel=max(gap, 1e-9))
            known.append(true)
    assert skipped
    assert few.best.samples_per_s == pytest.approx(whole.best.samples_per_s, rel=max(gap, 1e-9))


def test_what_is_no_better_in_any_number_is_no_quicker() -> None:
    known = _Beaten(2)
    assert not known.covers(np.array([1.0, 1.0]), 5.0)
    for index in range(600):  # more than there is room for at first
        known.add(np.array([1.0 + index, 600.0 - index]), 5.0)
    assert known.covers(np.array([1.0, 600.0]), 5.0)
    assert known.covers(np.array([300.0, 302.0]), 4.0)
    assert not known.covers(np.array([300.0, 302.0]), 5.1)
    assert not known.covers(np.array([300.0, 300.0]), 5.0)
