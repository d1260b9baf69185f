"""What real stacks cost beyond the ideal: chains, memory that nothing hides, unaligned products, outer networks."""

from dataclasses import replace

import pytest
from graphs import tiny_graph

from phaze.cost import (
    IDEAL,
    LIBRARY_STACK,
    PERFECT_STACK,
    Calibration,
    Fusion,
    fuse_epilogues,
    group_work,
    matmul_work,
    op_work,
    price_collective,
    price_works,
)
from phaze.hardware import parse_cluster, preset
from phaze.ir import OpKind, Phase
from phaze.profile.layer_jobs import price_pass
from phaze.schedule import Resource

CHIP = preset("a100-80gb").accelerator
GRAPH = tiny_graph("megatron-gpt", 2).with_backward()


def seconds(work: object, calibration: Calibration) -> float:
    return float(price_works([work], CHIP, calibration=calibration).spread_s[0, 0])  # type: ignore[list-item]


def test_chains_begin_with_elementwise_ops_and_leave_matrix_ops_alone() -> None:
    groups = fuse_epilogues(GRAPH, fusion=Fusion.CHAINS)
    assert any(group.epilogue for group in groups)
    for group in groups:
        if group.epilogue:
            assert group.head.kind in (OpKind.ELEMENTWISE, OpKind.DROPOUT)
            work = group_work(group, GRAPH.tensors)
            apart = sum(op_work(op, GRAPH.tensors).compulsory_bytes for op in group.ops)
            assert 0 < work.compulsory_bytes < apart
            assert not work.products
    assert sorted(op.id for group in groups for op in group.ops) == sorted(op.id for op in GRAPH.ops)


def test_without_fusion_every_op_is_alone() -> None:
    assert all(not group.epilogue for group in fuse_epilogues(GRAPH, fusion=Fusion.NONE))


def test_memory_that_nothing_hides_is_added_to_a_product() -> None:
    work = matmul_work(1, 4096, 4096, 64)
    hidden = Calibration(stack=replace(PERFECT_STACK, hides_memory=True))
    added = Calibration(stack=replace(PERFECT_STACK, hides_memory=False))
    moved_s = float(price_works([work], CHIP).spread_bytes[0, 0]) / CHIP.hbm_bandwidth_bytes_per_s
    assert seconds(work, hidden) < seconds(work, added) <= seconds(work, hidden) + moved_s * (1 + 1e-9)


@pytest.mark.parametrize(("batch", "side", "is_slow"), [(32, 108, True), (32, 112, False), (1, 108, False)])
def test_unaligned_batched_products_run_at_the_rate_of_float32(batch: int, side: int, is_slow: bool) -> None:
    work = matmul_work(batch, 2048, 2048, side)
    stacks = (replace(LIBRARY_STACK, alignment_bytes=1), LIBRARY_STACK)
    aligned, real = (seconds(work, Calibration(stack=stack)) for stack in stacks)
    assert (real > 4 * aligned) == is_slow
    assert is_slow or real == aligned


def test_a_host_that_launches_ahead_is_a_floor_under_a_pass_and_no_part_of_an_op() -> None:
    work = matmul_work(1, 64, 64, 64)
    blocking, ahead = (
        Calibration(overhead_s=1e-3, stack=replace(LIBRARY_STACK, launches_ahead=is_ahead))
        for is_ahead in (False, True)
    )
    assert seconds(work, blocking) == pytest.approx(seconds(work, ahead) + 1e-3)
    assert seconds(work, ahead) == seconds(work, replace(ahead, overhead_s=0.0))
    ops = [op for op in GRAPH.ops if op.phase is Phase.FORWARD]
    waiting = price_pass(GRAPH, ops, CHIP, calibration=ahead)
    launched = sum(resource is not Resource.NONE for resource in waiting.resources)
    assert waiting.memory_s.tolist() == [pytest.approx(launched * 1e-3)]
    assert waiting.lower_bounds().tolist() == waiting.memory_s.tolist()


def test_the_network_efficiency_belongs_to_all_but_the_innermost_links() -> None:
    cluster = parse_cluster("a100-80gb:64")
    calibration = Calibration(network=0.5)
    inside, across = ((size, stride) for size, stride in ((8, 1), (8, 8)))
    for (size, stride), factor in ((inside, 1.0), (across, 2.0)):
        real, ideal = (
            float(price_collective("all_gather", 2**40, cluster, size, stride, calibration=one).seconds)
            for one in (calibration, IDEAL)
        )
        assert real == pytest.approx(factor * ideal, rel=1e-3)
