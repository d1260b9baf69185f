"""What real stacks cost beyond the ideal: chains, memory that nothing hides, unaligned products, outer networks."""

import math
from dataclasses import replace

import pytest
from graphs import tiny_graph

from phaze import import_graph
from phaze.cost import (
    IDEAL,
    LIBRARY_STACK,
    PERFECT_STACK,
    Calibration,
    Fusion,
    Stack,
    calibration_of,
    fuse_epilogues,
    group_work,
    matmul_work,
    op_work,
    price_collective,
    price_works,
)
from phaze.cost.calibration import TERMS, fitted_families, why_ideal
from phaze.cost.measured_kernels import linked_chips, measured_chips
from phaze.cost.operator_work import Product
from phaze.cost.work_prices import UNALIGNED_SHARE
from phaze.errors import HardwareError
from phaze.hardware import parse_cluster, preset, presets
from phaze.ir import OpKind, Phase
from phaze.profile.layer_jobs import price_pass
from phaze.schedule import Resource

MEASURED = {*measured_chips(), *linked_chips()}
FITTED = {chip for family in fitted_families().values() for chip in family["chips"]}


def test_chips_that_were_fitted_or_measured_say_so_and_all_others_are_ideal() -> None:
    assert {"a100-40gb", "a100-80gb"} <= FITTED
    assert not {"tpuv4-paper", "cpu"} & (FITTED | MEASURED)
    for chip in (entry.accelerator for entry in presets()):
        calibration = calibration_of(chip)
        assert calibration.is_ideal == (chip.name not in FITTED | MEASURED)
        assert ("fitted to published runs" in calibration.name) == (chip.name in FITTED)
        assert ("all else ideal" in calibration.name) == (chip.name in MEASURED - FITTED)
        assert (calibration.products is not None) == (chip.name in measured_chips())
        assert (calibration.links is not None) == (chip.name in linked_chips())
    assert (IDEAL.name, IDEAL.matrix, IDEAL.overhead_s, IDEAL.overlap) == ("ideal", 1.0, 0.0, 1.0)


@pytest.mark.parametrize("name", fitted_families())
def test_a_family_has_at_most_six_fitted_terms_their_origin_and_their_errors(name: str) -> None:
    family = fitted_families()[name]
    assert 1 <= len(family["fitted"]) <= 6
    assert set(family["fitted"]) <= {*TERMS, "reserve", "margin"}
    assert family["origin"]
    for errors in family["errors"].values():
        assert errors["rows"] > 0
        assert 0 < errors["in_sample"] < 0.25
        assert errors.get("group_left_out", errors.get("row_left_out")) > 0


def test_another_chip_under_a_fitted_name_is_ideal() -> None:
    from dataclasses import replace

    chip = preset("a100-80gb").accelerator
    quicker = replace(chip, clock_hz=2e9, hbm_bandwidth_bytes_per_s=3e12)
    assert calibration_of(quicker) == IDEAL
    assert "another hbm_bandwidth_bytes_per_s and clock_hz than the chip of that name" in str(why_ideal(quicker))
    assert why_ideal(chip) is why_ideal(replace(chip, name="mine")) is None


def test_a_fitted_chip_with_another_memory_keeps_its_calibration() -> None:
    from dataclasses import replace

    chip = preset("a100-80gb").accelerator
    assert calibration_of(replace(chip, hbm_bytes=chip.hbm_bytes // 4)) == calibration_of(chip) != IDEAL


@pytest.mark.parametrize("field", ["matrix", "vector", "memory", "link", "network", "overlap", "margin"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_an_efficiency_outside_zero_to_one_is_refused(field: str, value: float) -> None:
    with pytest.raises(HardwareError, match=field):
        Calibration(**{field: value})


@pytest.mark.parametrize("field", ["overhead_s", "reserve"])
def test_overhead_and_reserve_are_not_negative(field: str) -> None:
    with pytest.raises(HardwareError, match=field):
        Calibration(**{field: -1e-6})


def test_nothing_overlaps_only_by_choice() -> None:
    assert Calibration(overlap=0.0).together_s(3.0, 2.0) == 5.0
    assert IDEAL.together_s(3.0, 2.0) == 3.0
    assert Calibration(overlap=0.5).together_s(3.0, 2.0) == 4.0


def test_a_stack_knows_fusions_by_name_only() -> None:
    assert Stack(fusion="chains").fusion == LIBRARY_STACK.fusion
    with pytest.raises(ValueError, match="everything"):
        Stack(fusion="everything")


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
def test_unaligned_batched_products_run_at_a_third_of_their_rate(batch: int, side: int, is_slow: bool) -> None:
    work = matmul_work(batch, 2048, 2048, side)
    stacks = (replace(LIBRARY_STACK, alignment_bytes=1, hides_memory=True), replace(LIBRARY_STACK, hides_memory=True))
    aligned, real = (seconds(work, Calibration(matrix=0.01, stack=stack)) for stack in stacks)
    assert real == pytest.approx(aligned / UNALIGNED_SHARE if is_slow else aligned)


def test_a_gpu_runs_all_products_of_an_unaligned_head_at_a_third_of_their_rate() -> None:
    chip = preset("a100-80gb").accelerator
    fitted = replace(calibration_of(chip), overhead_s=0.0)
    heads = []
    for vocabulary in (50257, 50304):
        config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 2, "n_positions": 1024}
        config |= {"vocab_size": vocabulary}
        graph = import_graph(config, sequence_length=1024)
        products = [op for op in graph.ops if op.kind is OpKind.CONTRACTION]
        seconds = price_works([op_work(op, graph.tensors) for op in products], chip, calibration=fitted).spread_s[:, 0]
        heads.append(
            [
                float(each)
                for op, each in zip(products, seconds, strict=True)
                if vocabulary in {factor.size for factor in op.rule.factors}
            ]
        )
    assert len(heads[0]) == 3
    for unaligned, aligned in zip(*heads, strict=True):
        assert unaligned == pytest.approx(aligned / UNALIGNED_SHARE, rel=0.02)
    odd, even = (Product(batch=1, m=count, n=4096, k=1024, dtype="bfloat16", row=1024) for count in (2047, 2048))
    seconds_of = [
        float(
            price_works(
                [replace(matmul_work(1, each.m, 4096, 1024), products=(each,))], chip, calibration=fitted
            ).spread_s[0, 0]
        )
        for each in (odd, even)
    ]
    assert seconds_of[0] == pytest.approx(seconds_of[1], rel=0.01)


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
            float(price_collective("all_gather", 2**40, cluster, size, stride, calibration=chosen).seconds)
            for chosen in (calibration, IDEAL)
        )
        assert real == pytest.approx(factor * ideal, rel=1e-3)
