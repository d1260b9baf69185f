import pytest

from phaze.errors import UnknownNameError
from phaze.hardware import Fact, Preset, network_of, preset, preset_names, presets
from phaze.hardware.chip_presets import chip_name
from phaze.name_spelling import folded_name

MAKERS = {
    "NVIDIA": "v100 a10 a40 a100-40gb a100-80gb l4 l40 l40s h100-pcie h100-nvl h100 h800 h20 h200 gh200 b200 b300 "
    "gb200 gb300 rtx3090 rtx4090 rtx5090 rtxpro6000",
    "AMD": "mi250x mi300x mi325x mi355x",
    "Google": "tpuv3 tpuv4 tpuv4-paper tpuv5e tpuv5p tpuv6e tpu7x",
    "AWS": "trn1 trn2 trn3",
    "Intel": "gaudi2 gaudi3",
    "generic": "cpu",
}
PUBLISHED = [entry for entry in presets() if entry.published_peak_flops_per_s is not None]


def named(entry: Preset) -> str:
    return entry.accelerator.name


def test_every_promised_chip_is_there() -> None:
    by_maker = {maker: " ".join(named(chip) for chip in presets() if chip.maker == maker) for maker in MAKERS}
    assert by_maker == MAKERS
    assert len(preset_names()) == sum(len(chips.split()) for chips in MAKERS.values())
    assert {named(entry) for entry in presets()} - {named(entry) for entry in PUBLISHED} == {"cpu"}


@pytest.mark.parametrize("entry", PUBLISHED, ids=named)
def test_peak_flops_are_within_one_percent_of_the_published_figure(entry: Preset) -> None:
    published = entry.published_peak_flops_per_s
    assert published is not None
    assert entry.accelerator.peak_flops_per_s(entry.published_dtype) == pytest.approx(published.value, rel=0.01)


DENSE_TERAFLOPS = {
    # without sparsity, as published: bf16, fp8, fp4 (where there is one)
    "a100-80gb": (312, None, None),
    "h100": (989.4, 1978.9, None),
    "h200": (989.4, 1978.9, None),
    "h20": (148, 296, None),
    "b200": (2250, 4500, 9000),
    "b300": (2250, 4500, 13125),
    "gb200": (2500, 5000, 10000),
    "gb300": (2500, 5000, 15000),
    "a10": (125, None, None),
    "a40": (149.7, None, None),
    "l4": (121, 242, None),
    "l40": (181.05, 362, None),
    "l40s": (362.05, 733, None),
    "h100-pcie": (756, 1513, None),
    "h100-nvl": (835, 1671, None),
    "rtx3090": (71.2, None, None),
    "rtx4090": (165.15, 330.3, None),
    "rtx5090": (209.5, 419, 3352 / 2),
    "rtxpro6000": (500, 1000, 2000),
    "mi300x": (1307.4, 2614.9, None),
    "mi355x": (2516.6, 5033.2, 10066.3),
    "tpuv6e": (918, 918, None),
    "tpu7x": (2307 / 2, 4614 / 2, None),
    "trn1": (190, 190, None),
    "trn2": (667, 1299, None),
    "trn3": (671, 2517, 2517),
    "gaudi2": (432, None, None),
    "gaudi3": (1835, 1835, None),
}


@pytest.mark.parametrize(("name", "published"), DENSE_TERAFLOPS.items())
def test_products_of_few_bits_run_at_their_published_rate_without_sparsity(
    name: str, published: tuple[float | None, ...]
) -> None:
    chip = preset(name).accelerator
    for dtype, teraflops in zip(("bf16", "fp8", "fp4"), published, strict=True):
        if teraflops is not None:
            assert chip.peak_flops_per_s(dtype) == pytest.approx(teraflops * 1e12, rel=0.004)


@pytest.mark.parametrize("entry", presets(), ids=named)
def test_fewer_bits_are_never_slower_and_more_bits_never_faster(entry: Preset) -> None:
    rates = entry.accelerator.rates
    assert rates.fp8 >= rates.bf16
    assert rates.fp8 <= rates.fp6 <= rates.fp4
    assert rates.fp64 <= max(rates.fp32, 0.25)
    assert rates.fp32 <= rates.tf32


@pytest.mark.parametrize("entry", presets(), ids=named)
def test_links_and_power_have_sources_and_are_above_zero(entry: Preset) -> None:
    facts: list[Fact] = [entry.power_w] if entry.power_w else []
    for link in entry.links.values():
        facts += [link.bandwidth_bytes_per_s, link.latency_s]
    assert all(fact.value > 0 and len(fact.source) > 5 for fact in facts)
    assert entry.links or named(entry) == "cpu"
    assert not any(fact.is_verified and "from memory" in fact.source for fact in facts)


@pytest.mark.parametrize("entry", presets(), ids=named)
def test_every_field_has_a_source(entry: Preset) -> None:
    rates = {f"rates.{name}" for name in entry.accelerator.rates.__slots__}
    fields = set(entry.accelerator.__slots__) - {"name", "rates"}
    assert set(entry.facts) == fields | rates
    assert all(len(fact.source) > 5 for fact in entry.facts.values())


@pytest.mark.parametrize("entry", presets(), ids=named)
def test_what_comes_from_memory_is_an_estimate(entry: Preset) -> None:
    assert not any(fact.is_verified and "from memory" in fact.source for fact in entry.facts.values())


def test_cells_that_nobody_checked_are_estimates() -> None:
    assert set(preset("tpuv4").estimates) == {"buffer_bytes"}
    assert "clock_hz" in preset("mi250x").estimates
    assert len(preset("cpu").estimates) == 9
    assert preset("tpuv4-paper").estimates == ()


@pytest.mark.parametrize("entry", presets(), ids=named)
def test_what_is_drawn_chosen_or_derived_is_an_estimate(entry: Preset) -> None:
    words = ("drawn as", "chosen", "shared by", "counted as", "lanes x")
    assert not any(fact.is_verified and any(word in fact.source for word in words) for fact in entry.facts.values())


def test_the_arrays_of_a_gpu_are_a_drawing_and_its_memory_a_fact() -> None:
    drawn = {"tensor_rows", "tensor_cols", "vector_cores", "vector_lanes"}
    assert set(preset("h100").estimates) == set(preset("a100-80gb").estimates) == drawn
    assert set(preset("v100").estimates) == drawn | {"hbm_bytes"}


def test_float32_on_an_h100_runs_at_the_rate_of_its_vector_units() -> None:
    """133.8e12 fp16 flops per second on the vector units, fp32 at half of it."""
    assert preset("h100").accelerator.peak_flops_per_s("fp32") == pytest.approx(133.8e12 / 2, rel=1e-3)


def test_the_papers_baseline_is_the_designs() -> None:
    chip = preset("tpuv4-paper").accelerator
    assert (chip.tensor_cores, chip.tensor_rows, chip.tensor_cols) == (8, 128, 128)
    assert (chip.vector_cores, chip.vector_lanes, chip.buffer_bytes) == (2, 128, 128 * 2**20)
    assert (chip.hbm_bytes, chip.hbm_bandwidth_bytes_per_s, chip.clock_hz) == (32 * 2**30, 1.2e12, 1.05e9)
    assert preset("tpuv4").accelerator.vector_lanes == 8 * 128


@pytest.mark.parametrize("entry", presets(), ids=named)
def test_every_default_network_exists(entry: Preset) -> None:
    assert network_of(named(entry)).joining(2)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100", "h100"),
        ("h100-80GB", "h100"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("A100-SXM4-80GB", "a100-80gb"),
        ("RTX 4090", "rtx4090"),
        ("GB200-NVL72", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v5p", "tpuv5p"),
        ("tpu-v6e", "tpuv6e"),
        ("Trillium", "tpuv6e"),
        ("Trainium2", "trn2"),
    ],
)
def test_other_spellings_and_names_of_a_chip_are_that_chip(text: str, name: str) -> None:
    assert preset(text) == preset(name)


def test_no_two_chips_share_a_spelling() -> None:
    assert all(chip_name(name) == name for name in preset_names())
    spellings = [folded_name(text) for entry in presets() for text in (named(entry), *entry.also_called)]
    assert len(set(spellings)) == len(spellings)


def test_an_unknown_preset_lists_near_names() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean tpuv5"):
        preset("tpuv5")
