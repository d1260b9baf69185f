"""A sampled search beside the proven one: same space, same evaluations."""

from designs import searched, small_question, tiny_model

import phaze
from phaze.explore.engine import Engine
from phaze.explore.sampled import Sampled, _Lattice, sample_designs

POINTS = phaze.space.grid(
    tensor_cores=(1, 4), tensor_rows=(32, 64), tensor_cols=(64,), vector_cores=(1, 2), buffer_mib=(8,)
)


def engine_of(**changes: object) -> Engine:
    return searched(small_question([tiny_model()], POINTS, micro_batch_sizes=(2,), **changes))


def sampled(engine: Engine, *evaluations: int, seed: int = 0) -> list[Sampled]:
    return list(sample_designs(engine.question, engine.know.cells, evaluations, seed))


def test_sampling_never_beats_what_is_proven_and_reaches_it_when_it_saw_everything() -> None:
    engine = engine_of(hbm_gib=(1,))
    few, all_ = sampled(engine, 3, 8)
    best = engine.know.best
    assert best is not None
    assert (few.evaluations, all_.evaluations) == (3, 8)
    assert few.samples_per_s <= all_.samples_per_s <= best.value * (1 + 1e-9)
    assert all_.samples_per_s >= best.value * (1 - 1e-9)


def test_the_same_seed_samples_the_same_designs() -> None:
    engine = engine_of()
    assert sampled(engine, 4, seed=1) == sampled(engine, 4, seed=1)


def test_every_evaluation_is_of_a_point_not_seen_before_until_none_is_left() -> None:
    engine = engine_of(hbm_gib=(1,))
    assert [one.evaluations for one in sampled(engine, 5, 9)] == [5, 8]
    seen = []
    lattice = _Lattice(engine.question)
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
        where=lambda every: every.vector_cores <= every.tensor_cores,
    )
    lattice = _Lattice(small_question([tiny_model()], points, micro_batch_sizes=(2,), hbm_gib=(1,)))
    place, point, _ = lattice.take({"tensor_cores": 2, "vector_cores": 3})
    assert place == {"tensor_cores": 2, "vector_cores": 2}
    assert points.tensor_cores[point] == points.vector_cores[point] == 4
