"""The laws of the cost model, on the priced result of random ops on random accelerators."""

import math
from dataclasses import replace

import numpy as np
from graphs import tiny_graph
from hardware_strategies import accelerators
from hypothesis import given
from hypothesis import strategies as st
from op_strategies import SampleOp, sample_ops
from property_examples import examples

from phaze.cost import (
    BINDINGS,
    PERFECT_STACK,
    Binding,
    Calibration,
    Estimate,
    OpGroup,
    Work,
    fuse_epilogues,
    group_work,
    op_work,
    price_works,
    update_work,
)
from phaze.hardware import Accelerator, AcceleratorArray, precision_recipe, precision_recipe_names
from phaze.ir import Graph, OpKind

MANY = examples(300)
EXACT = 1 + 1e-12
GROWTH = st.sampled_from([1.001, 1.37, 2.0, 2.5, 64.0])


def priced(work: Work, chip: Accelerator) -> tuple[float, float]:
    estimate = price_works([work], chip)
    return float(estimate.core_s[0, 0]), float(estimate.spread_s[0, 0])


def peak_vector_ops_per_s(chip: Accelerator) -> float:
    return float(chip.vector_cores * chip.vector_lanes) * chip.clock_hz


@MANY
@given(sample_ops(), accelerators(), GROWTH, st.sampled_from(["hbm_bandwidth_bytes_per_s", "clock_hz"]))
def test_more_bandwidth_or_clock_never_costs_time(
    sample: SampleOp, chip: Accelerator, growth: float, field: str
) -> None:
    work = op_work(sample.op, sample.tensors)
    better = replace(chip, **{field: getattr(chip, field) * growth})
    for less, more in zip(priced(work, chip), priced(work, better), strict=True):
        assert more <= less


@MANY
@given(sample_ops(), accelerators(), st.integers(1, 5000), st.sampled_from(["buffer_bytes", "vector_lanes"]))
def test_more_buffer_or_lanes_never_cost_time(sample: SampleOp, chip: Accelerator, extra: int, field: str) -> None:
    work = op_work(sample.op, sample.tensors)
    scale = 1000 if field == "buffer_bytes" else 1
    better = replace(chip, **{field: getattr(chip, field) + scale * extra})
    for less, more in zip(priced(work, chip), priced(work, better), strict=True):
        assert more <= less


@MANY
@given(sample_ops(), accelerators(), st.integers(1, 700), st.sampled_from(["tensor_cores", "vector_cores"]))
def test_more_cores_never_cost_time(sample: SampleOp, chip: Accelerator, extra: int, field: str) -> None:
    work = op_work(sample.op, sample.tensors)
    better = replace(chip, **{field: getattr(chip, field) + extra})
    assert priced(work, better)[1] <= priced(work, chip)[1]


@given(sample_ops(), accelerators(), st.integers(1, 700))
def test_one_core_with_an_equal_share_of_the_buffer_is_as_fast_among_more(
    sample: SampleOp, chip: Accelerator, extra: int
) -> None:
    work = op_work(sample.op, sample.tensors)
    share = max(1, chip.buffer_bytes // chip.tensor_cores)
    few = replace(chip, buffer_bytes=share * chip.tensor_cores)
    many = replace(chip, tensor_cores=chip.tensor_cores + extra, buffer_bytes=share * (chip.tensor_cores + extra))
    assert priced(work, many)[0] == priced(work, few)[0]


@MANY
@given(sample_ops(), accelerators())
def test_a_bigger_shape_never_costs_less(sample: SampleOp, chip: Accelerator) -> None:
    small, large = op_work(sample.op, sample.tensors), op_work(sample.larger, sample.tensors)
    for less, more in zip(priced(small, chip), priced(large, chip), strict=True):
        assert less <= more


@MANY
@given(sample_ops(), accelerators())
def test_no_op_is_faster_than_its_flops_at_peak_or_its_bytes_at_full_bandwidth(
    sample: SampleOp, chip: Accelerator
) -> None:
    op, tensors = sample.op, sample.tensors
    core_s, spread_s = priced(op_work(op, tensors), chip)
    dtype = tensors[op.inputs[0]].dtype
    moved = least_bytes(sample)
    assert spread_s * EXACT >= op.matmul_flops / chip.peak_flops_per_s(dtype)
    assert core_s * EXACT >= op.matmul_flops / chip.peak_flops_per_s(dtype) * chip.tensor_cores
    assert spread_s * EXACT >= moved / chip.hbm_bandwidth_bytes_per_s
    if not op.kind.is_matrix:
        assert spread_s * EXACT >= max(op.elements_written) / peak_vector_ops_per_s(chip)


def least_bytes(sample: SampleOp) -> float:
    """Every tensor once, by its shape; of a table that is looked up in, no more than what is picked."""
    op, tensors = sample.op, sample.tensors
    elements = {name: math.prod(tensors[name].shape) for name in (*op.inputs, *op.outputs)}
    if op.kind is OpKind.LOOKUP:
        table, picked = op.inputs[0], op.outputs[0]
        elements[table] = min(elements[table], elements[picked])
    return float(sum(count * tensors[name].dtype.size_bytes for name, count in elements.items()))


GRAPHS = [tiny_graph(name).with_backward() for name in ("gpt2", "llama", "mixtral")]
GROUPS = [(graph, group) for graph in GRAPHS for group in fuse_epilogues(graph) if group.epilogue]


@given(st.sampled_from(GROUPS), accelerators(), GROWTH)
def test_the_laws_hold_for_fused_groups(pair: tuple[Graph, OpGroup], chip: Accelerator, growth: float) -> None:
    graph, group = pair
    work = group_work(group, graph.tensors)
    core_s, spread_s = priced(work, chip)
    moved = sum(math.prod(graph.tensors[name].shape) * size_of(graph, name) for name in (*group.reads, *group.writes))
    flops = sum(op.matmul_flops for op in group.ops)
    least_s = flops / chip.peak_flops_per_s(graph.tensors[group.head.inputs[0]].dtype)
    assert core_s >= spread_s
    assert spread_s * EXACT >= max(least_s, moved / chip.hbm_bandwidth_bytes_per_s)
    assert core_s * EXACT >= least_s * chip.tensor_cores
    touched = sum(max(op.elements_written) for op in group.epilogue)
    assert spread_s * EXACT >= touched / peak_vector_ops_per_s(chip)
    for field in ("hbm_bandwidth_bytes_per_s", "clock_hz"):
        better = replace(chip, **{field: getattr(chip, field) * growth})
        assert all(more <= less for less, more in zip((core_s, spread_s), priced(work, better), strict=True))
    for field in ("tensor_cores", "vector_cores", "vector_lanes", "buffer_bytes"):
        better = replace(chip, **{field: math.ceil(getattr(chip, field) * growth)})
        assert priced(work, better)[1] <= spread_s


def size_of(graph: Graph, name: str) -> int:
    return graph.tensors[name].dtype.size_bytes


TRAINING_RECIPES = [name for name in precision_recipe_names() if precision_recipe(name).trains]


@given(st.sampled_from(TRAINING_RECIPES), st.integers(1, 10**12), st.integers(1, 10**10), accelerators(), GROWTH)
def test_the_laws_hold_for_the_update(name: str, few: int, extra: int, chip: Accelerator, growth: float) -> None:
    recipe = precision_recipe(name)
    work = update_work(recipe, few)
    core_s, spread_s = priced(work, chip)
    read_and_written = recipe.bytes_per_parameter * few
    assert core_s >= spread_s
    assert spread_s * EXACT >= read_and_written / chip.hbm_bandwidth_bytes_per_s
    assert spread_s * EXACT >= few / peak_vector_ops_per_s(chip)
    for less, more in zip((core_s, spread_s), priced(update_work(recipe, few + extra), chip), strict=True):
        assert less <= more
    for field in ("hbm_bandwidth_bytes_per_s", "clock_hz"):
        better = replace(chip, **{field: getattr(chip, field) * growth})
        assert all(more <= less for less, more in zip((core_s, spread_s), priced(work, better), strict=True))


@given(sample_ops(), accelerators())
def test_spreading_never_costs_time_and_nothing_is_free(sample: SampleOp, chip: Accelerator) -> None:
    core_s, spread_s = priced(op_work(sample.op, sample.tensors), chip)
    assert 0 < spread_s <= core_s < np.inf


@given(sample_ops(), accelerators())
def test_the_binding_term_is_the_one_that_decides(sample: SampleOp, chip: Accelerator) -> None:
    estimate = price_works([op_work(sample.op, sample.tensors)], chip)
    for seconds, moved, code in (
        (estimate.core_s, estimate.core_bytes, estimate.core_binding),
        (estimate.spread_s, estimate.spread_bytes, estimate.spread_binding),
    ):
        memory_s = moved[0, 0] / chip.hbm_bandwidth_bytes_per_s
        if BINDINGS[code[0, 0]] is Binding.MEMORY:
            assert seconds[0, 0] == memory_s
        else:
            assert seconds[0, 0] >= memory_s


@given(st.lists(sample_ops(), min_size=1, max_size=4), st.lists(accelerators(), min_size=1, max_size=6))
def test_many_ops_on_many_accelerators_cost_what_each_costs_alone(
    samples: list[SampleOp], chips: list[Accelerator]
) -> None:
    works = [op_work(sample.op, sample.tensors) for sample in samples]
    together = price_works(works, AcceleratorArray.of(chips))
    for row, work in enumerate(works):
        for column, chip in enumerate(chips):
            alone = price_works([work], chip)
            for name in fields_of(alone):
                assert getattr(together, name)[row, column] == getattr(alone, name)[0, 0]


def fields_of(estimate: Estimate) -> list[str]:
    return [name for name in estimate.__slots__ if name != "kinds"]


@given(
    sample_ops(),
    accelerators(),
    st.builds(
        Calibration,
        name=st.just("random"),
        matrix=st.floats(0.1, 1),
        vector=st.floats(0.1, 1),
        memory=st.floats(0.1, 1),
        overhead_s=st.floats(0, 1e-3),
        stack=st.sampled_from([PERFECT_STACK, replace(PERFECT_STACK, launches_ahead=False)]),
    ),
)
def test_a_real_chip_is_never_faster_than_the_ideal_one(
    sample: SampleOp, chip: Accelerator, calibration: Calibration
) -> None:
    work = op_work(sample.op, sample.tensors)
    real = price_works([work], chip, calibration=calibration)
    core_s, spread_s = priced(work, chip)
    assert real.core_s[0, 0] * EXACT >= core_s + calibration.op_overhead_s
    assert real.spread_s[0, 0] * EXACT >= spread_s + calibration.op_overhead_s
