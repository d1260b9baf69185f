"""A GPU's products as tiles in waves: the formula against plain loops, its laws, and where prices use it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from graphs import tiny_graph
from hypothesis import given
from hypothesis import strategies as st

from phaze.cost import IDEAL, LIBRARY_STACK, Calibration, Stack, calibration_of, matmul_work, op_work, price_works
from phaze.cost.calibration import SOFTMAX_OVERLAP_GAIN
from phaze.cost.measured_kernels import (
    BURST_S,
    ProductKernel,
    ProductKernels,
    kernel_seconds,
    measured_chips,
    product_kernels_of,
)
from phaze.cost.off_chip_traffic import AttentionTiling
from phaze.cost.operator_work import Work, in_pieces
from phaze.errors import HardwareError
from phaze.hardware import Accelerator, AcceleratorArray, preset
from phaze.hardware.hardware_numbers import packaged_table
from phaze.hardware.precision import dtype_bytes
from phaze.ir import OpKind
from phaze.shard import Axis
from phaze.shard.model_sharding import least_model_seconds

A100 = preset("a100-80gb").accelerator
TILES = [(32, 64), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (256, 64)]
TILES += [(128, 192), (192, 128), (128, 256), (256, 128), (256, 256)]
SIZES = st.integers(1, 20_000)
DTYPES = st.sampled_from(["bfloat16", "float8", "float32"])
CHIPS = st.sampled_from(measured_chips())


def kernels_of(chip: Accelerator) -> ProductKernels:
    kernels = product_kernels_of(chip)
    assert kernels is not None
    return kernels


def seconds(chip: Accelerator, dtype: str, batch: int, m: int, n: int, k: int) -> float:
    """The priced product, results in its own type."""
    moved = dtype_bytes(dtype) * batch * (m * k + k * n + m * n)
    sizes = [np.array([[float(size)]]) for size in (batch, m, n, k)]
    chips = AcceleratorArray.of([chip])
    return float(kernel_seconds(kernels_of(chip), dtype, sizes, np.array([[float(moved)]]), chips)[0, 0])


def by_plain_loops(chip: Accelerator, dtype: str, batch: int, m: int, n: int, k: int) -> float:
    """The module's formula, one candidate after the other."""
    kernels = kernels_of(chip)
    kernel, count = kernels.of(dtype), kernels.multiprocessors
    flops_per_s = chip.peak_flops_per_s(dtype) * kernel.arithmetic / count
    drawn_per_s = kernel.cache * chip.hbm_bandwidth_bytes_per_s / count
    least = math.inf
    for rows, cols in TILES:
        for parts in (1, 2, 3, 4):
            waves = math.ceil(batch * math.ceil(m / rows) * math.ceil(n / cols) * parts / count)
            deep = 64 * math.ceil(k / (64 * parts))
            step = max(2 * rows * cols / flops_per_s, (rows + cols) * dtype_bytes(dtype) / drawn_per_s)
            least = min(least, waves * (kernel.tile_s + deep * step))
    lasting = least if least < BURST_S else BURST_S + (least - BURST_S) / kernel.sustained
    size = dtype_bytes(dtype) * batch * (m * k + k * n + m * n)
    moved = size / (chip.hbm_bandwidth_bytes_per_s * kernel.memory)
    return kernel.launch_s + max(lasting, moved) + (1 - kernel.hidden) * min(lasting, moved)


@given(CHIPS, DTYPES, st.integers(1, 64), SIZES, SIZES, SIZES)
def test_the_arrays_give_what_plain_loops_over_tiles_and_parts_give(
    name: str, dtype: str, batch: int, m: int, n: int, k: int
) -> None:
    chip = preset(name).accelerator
    assert seconds(chip, dtype, batch, m, n, k) == pytest.approx(by_plain_loops(chip, dtype, batch, m, n, k), rel=1e-9)


@given(CHIPS, DTYPES, st.tuples(st.integers(1, 64), SIZES, SIZES, SIZES), st.integers(0, 3), st.integers(1, 5000))
def test_a_bigger_product_never_costs_less(
    name: str, dtype: str, sizes: tuple[int, int, int, int], grown: int, more: int
) -> None:
    chip = preset(name).accelerator
    bigger = [size + more * (place == grown) for place, size in enumerate(sizes)]
    assert seconds(chip, dtype, *bigger) >= seconds(chip, dtype, *sizes)


@given(CHIPS, DTYPES, st.integers(1, 64), SIZES, SIZES, SIZES)
def test_no_product_is_faster_than_flops_over_peak_or_bytes_over_bandwidth(
    name: str, dtype: str, batch: int, m: int, n: int, k: int
) -> None:
    chip = preset(name).accelerator
    flops_s = 2 * batch * m * n * k / chip.peak_flops_per_s(dtype)
    moved_s = dtype_bytes(dtype) * batch * (m * k + k * n + m * n) / chip.hbm_bandwidth_bytes_per_s
    assert seconds(chip, dtype, batch, m, n, k) >= max(flops_s, moved_s)


def test_a_tile_beyond_a_full_wave_costs_a_step_and_the_tiles_behind_it_cost_nothing_but_their_bytes() -> None:
    """Without launch, memory and other tiles than whole ones, 108 multiprocessors take 108 tiles in one wave."""
    kernel = ProductKernel(launch_s=0, arithmetic=1, sustained=1, tile_s=0, cache=1e9, memory=1, hidden=1)
    kernels = ProductKernels(multiprocessors=108, bf16=kernel, fp8=None, attention=1)
    chips = AcceleratorArray.of([A100])

    def busy(rows: int) -> float:
        sizes = [np.array([[float(size)]]) for size in (1, rows, 256, 4096)]
        return float(kernel_seconds(kernels, "bfloat16", sizes, np.zeros((1, 1)), chips)[0, 0])

    full = 108 * 256
    assert busy(full) == pytest.approx(2 * full * 256 * 4096 / A100.peak_flops_per_s("bf16"))
    assert busy(full + 1) > busy(full)
    assert busy(full + 1) == busy(full + 32)


def test_products_of_a_measured_chip_are_priced_by_its_kernels_and_ideal_prices_are_not() -> None:
    work, calibration = matmul_work(1, 4096, 4096, 4096), calibration_of(A100)
    expected = seconds(A100, "bfloat16", 1, 4096, 4096, 4096)
    priced = price_works([work], A100, calibration=calibration)
    assert priced.spread_s[0, 0] == pytest.approx(expected / calibration.matrix)
    assert priced.core_s[0, 0] == pytest.approx(priced.spread_s[0, 0] * A100.tensor_cores)
    assert price_works([work], A100, calibration=IDEAL).spread_s[0, 0] < expected


def test_8_bit_products_alone_have_a_share_of_their_own() -> None:
    h100 = preset("h100").accelerator
    works = [matmul_work(1, 4096, 4096, 4096, dtype=dtype) for dtype in ("bfloat16", "float8")]
    plain, scaled = (
        price_works(works, h100, calibration=Calibration(products=kernels_of(h100), narrow_matrix=share)).spread_s[:, 0]
        for share in (1.0, 1.25)
    )
    assert (plain / scaled).tolist() == pytest.approx([1.0, 1.25])


def test_what_streams_beside_a_product_is_added_where_the_stack_hides_no_memory() -> None:
    calibration = Calibration(memory=0.5, stack=LIBRARY_STACK, products=kernels_of(A100))
    bare = matmul_work(1, 4096, 4096, 4096)
    streaming = replace(bare, streamed_bytes=1e9)
    apart, together = price_works([bare, streaming], A100, calibration=calibration).spread_s[:, 0]
    assert together - apart == pytest.approx(1e9 / (0.5 * A100.hbm_bandwidth_bytes_per_s))


def test_products_inside_of_fused_attention_run_on_the_arrays_at_their_share() -> None:
    kernels = kernels_of(A100)
    product = matmul_work(32, 2048, 2048, 128).products[0]
    tiling = AttentionTiling(
        heads=32,
        queries=2048,
        keys=2048,
        query_width=256,
        key_width=256,
        query_bytes=1e6,
        key_bytes=1e6,
        element_bytes=2,
    )
    attention = Work(products=(product, product), tilings=(tiling,))
    ideal, real = (
        price_works([attention], A100, calibration=Calibration(products=products)).spread_s[0, 0]
        for products in (None, kernels)
    )
    assert real == pytest.approx(ideal / kernels.attention)
    stack, shares = Stack(overlaps_softmax=True), []
    for share in (0.4, 0.9):
        calibration = Calibration(products=kernels, attention=share, stack=stack)
        shares.append(real / price_works([attention], A100, calibration=calibration).spread_s[0, 0])
    assert shares == pytest.approx([0.4 * SOFTMAX_OVERLAP_GAIN, 1.0])


@pytest.mark.parametrize("chip", ["a100-80gb", "b200"])
def test_the_least_time_of_a_model_is_below_that_of_its_products(chip: str) -> None:
    from phaze.hardware import parse_cluster
    from phaze.hooks import PluginManager

    cluster = parse_cluster(f"{chip}:1", PluginManager.load())
    calibration = replace(calibration_of(cluster.accelerator), narrow_matrix=1.25)
    graph = tiny_graph("gpt2").with_backward()
    works = [op_work(op, graph.tensors) for op in graph.ops if op.kind.is_matrix]
    priced = price_works(works, cluster.accelerator, calibration=calibration).spread_s.sum()
    assert 0 < least_model_seconds(graph, Axis(cluster, 1, calibration)) <= priced
    assert any(op.kind is OpKind.CONTRACTION for op in graph.ops)


@given(SIZES, SIZES, SIZES, st.integers(1, 16), DTYPES, CHIPS)
def test_a_product_in_pieces_takes_as_long_as_whole_ones_of_its_rows_that_are_queued_at_once(
    m: int, n: int, k: int, pieces: int, dtype: str, name: str
) -> None:
    chip = preset(name).accelerator
    calibration = Calibration(stack=LIBRARY_STACK, products=product_kernels_of(chip))
    whole = matmul_work(1, m * pieces, n, k, dtype=dtype)
    cut, uncut, part = price_works(
        [in_pieces(whole, pieces), whole, matmul_work(1, m, n, k, dtype=dtype)], chip, calibration=calibration
    ).spread_s[:, 0]
    assert uncut <= cut * (1 + 1e-12)
    assert in_pieces(whole, 1) == whole
    assert part <= cut * (1 + 1e-12)


def test_more_power_makes_the_arithmetic_of_a_chip_quicker_in_proportion() -> None:
    slow, quick = (kernels_of(preset(name).accelerator) for name in ("gb200", "gb300"))
    assert quick.bf16.arithmetic == pytest.approx(1400 / 1200 * slow.bf16.arithmetic, rel=1e-3)
    assert quick.bf16.memory == slow.bf16.memory


@pytest.mark.parametrize("name", packaged_table("kernels")["products"])
def test_shipped_kernels_miss_products_that_were_left_out_by_at_most_ten_percent(name: str) -> None:
    entry = packaged_table("kernels")["products"][name]
    for dtype in ("bf16", "fp8"):
        if dtype in entry:
            assert entry[dtype]["rows"] > 1000
            assert 0 < entry[dtype]["mean_error"] <= entry[dtype]["left_out"] + 0.01
            assert entry[dtype]["left_out"] <= 0.10


def test_types_that_were_not_measured_take_the_nearest_one() -> None:
    measured, other = kernels_of(preset("h100").accelerator), kernels_of(A100)
    assert measured.of("fp4") is measured.of("int8") is measured.fp8
    assert measured.of("float16") is measured.of("float32") is measured.bf16
    assert other.fp8 is None
    assert other.of("float8") is other.bf16


@pytest.mark.parametrize(("field", "value"), [("arithmetic", 1.1), ("launch_s", -1.0), ("hidden", 2.0), ("cache", 0.0)])
def test_numbers_that_cannot_be_are_refused(field: str, value: float) -> None:
    with pytest.raises(HardwareError, match=field):
        replace(kernels_of(A100).bf16, **{field: value})
