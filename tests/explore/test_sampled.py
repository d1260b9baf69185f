"""A sampled search beside the proven one: same space, same evaluations."""

from designs import searched, small_question, tiny_model

import phaze
from phaze.explore.engine import Engine
from phaze.explore.sampled import Sampled, sample_designs

POINTS = phaze.space.grid(
    tensor_cores=(1, 4), tensor_rows=(32, 64), tensor_cols=(64,), vector_cores=(1, 2), buffer_mib=(8,)
)


def engine_of(**changes: object) -> Engine:
    return searched(small_question([tiny_model()], POINTS, micro_batch_sizes=(2,), **changes))


def sampled(engine: Engine, *evaluations: int, seed: int = 0) -> list[Sampled]:
    return sample_designs(engine.question, engine.know.cells, evaluations, seed)


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


def test_sampling_ends_where_nothing_new_is_proposed() -> None:
    (found,) = sampled(engine_of(hbm_gib=(1,)), 9)
    assert found.evaluations == 8
