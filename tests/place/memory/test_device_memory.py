"""Memory of a device, item by item, and whether it holds its stage: it fits, it is marginal, or it is over."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_problems import chain_problem, random_problem, with_memory
from property_examples import examples

from phaze.parallelism import Parallelism
from phaze.place import Fit, find_placement
from phaze.place.memory.device_memory import DeviceMemory, build_memory_table
from phaze.place.model.stage_space import build_stage_space
from phaze.place.model.stage_sums import build_stage_sums
from phaze.place.model.zero_sharding import ZeroSharding

ITEMS = [item.name for item in fields(DeviceMemory)][:6]


def test_a_stage_within_the_margin_is_marginal() -> None:
    problem = replace(chain_problem(), memory_margin=0.2, allows_marginal=True)
    best = find_placement(problem).best
    assert best is not None
    peak = max(memory.total_bytes for memory in best.memory)
    tight = find_placement(with_memory(problem, int(peak / 0.9))).best
    assert tight is not None
    assert tight.fit is Fit.MARGINAL


@pytest.mark.parametrize(
    ("item_bytes", "reserve", "expected"),
    [
        (15.0, 0.0, Fit.FITS),  # 90 of 100 bytes, and a margin of a tenth
        (15.1, 0.0, Fit.MARGINAL),
        (16.5, 0.0, Fit.MARGINAL),
        (16.7, 0.0, Fit.OVER),
        (14.0, 0.05, Fit.FITS),  # 84 bytes and 4.2 that the allocator holds
        (14.5, 0.05, Fit.MARGINAL),  # 87 bytes and 4.35
        (16.6, 1.0, Fit.MARGINAL),  # what is reserved alone puts no device over
    ],
)
def test_margin_and_reserve_decide_what_fits_and_the_items_alone_what_is_over(
    item_bytes: float, reserve: float, expected: Fit
) -> None:
    items = dict.fromkeys(ITEMS, item_bytes)
    assert DeviceMemory(**items, capacity_bytes=100, margin=0.1, reserve=reserve).fit is expected


@examples(60)
@given(st.integers(0, 2**32 - 1), st.sampled_from(range(4)), st.sampled_from([1, 2, 4]))
def test_zero_divides_what_its_stage_names_and_leaves_the_rest_whole(seed: int, zero: int, shard: int) -> None:
    problem = random_problem(seed)
    sums = build_stage_sums(problem, build_stage_space(problem.graph), problem.tp_degrees[0], use_bounds=False)
    table = build_memory_table(problem, sums, ZeroSharding(problem.recipe, zero, shard), 0.0, Parallelism())
    recipe, frozen = problem.recipe, sums.frozen[0].parameters
    held = {
        "optimizer_bytes": recipe.optimizer_bytes * sums.parameters / (shard if zero >= 1 else 1),
        "gradients_bytes": recipe.gradient_bytes * sums.parameters / (shard if zero >= 2 else 1),
        "parameters_bytes": recipe.parameter_bytes * (sums.parameters + frozen) / (shard if zero >= 3 else 1)
        + sums.table_bytes,
    }
    for name, expected in held.items():
        assert getattr(table, name) == pytest.approx(expected)


@examples(60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_chunks_of_a_device_add_up_what_they_keep_and_share_what_they_work_in(seed: int, in_flight: int) -> None:
    problem = random_problem(seed)
    sums = build_stage_sums(problem, build_stage_space(problem.graph), problem.tp_degrees[0], use_bounds=False)
    table = build_memory_table(problem, sums, ZeroSharding(problem.recipe, 0, 1), 0.0, Parallelism())
    chunks = [(0, stage) for stage in range(min(2, len(sums.parameters)))]
    together = table.of_device(problem, chunks, [in_flight] * len(chunks))
    alone = [table.of_device(problem, [chunk], [in_flight]) for chunk in chunks]
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes"):
        assert getattr(together, name) == pytest.approx(sum(getattr(memory, name) for memory in alone))
    shared = max(memory.working_bytes + memory.buffers_bytes for memory in alone)
    assert together.working_bytes + together.buffers_bytes == pytest.approx(shared)
