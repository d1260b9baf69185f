import pytest

from phaze.errors import UnknownNameError
from phaze.hardware import Preset, network_levels, preset, preset_names, presets

TPUS = {"tpuv3", "tpuv4", "tpuv4-paper", "tpuv5e", "tpuv5p"}
OTHERS = {"v100", "a100-40gb", "a100-80gb", "h100", "mi250x", "mi300x", "cpu"}
PUBLISHED = [entry for entry in presets() if entry.published_peak_flops_per_s is not None]


def named(entry: Preset) -> str:
    return entry.accelerator.name


def test_every_promised_chip_is_there() -> None:
    assert set(preset_names()) == TPUS | OTHERS
    assert {named(entry) for entry in presets()} - {named(entry) for entry in PUBLISHED} == {"cpu"}


@pytest.mark.parametrize("entry", PUBLISHED, ids=named)
def test_peak_flops_are_within_one_percent_of_the_published_figure(entry: Preset) -> None:
    published = entry.published_peak_flops_per_s
    assert published is not None
    assert entry.accelerator.peak_flops_per_s(entry.published_dtype) == pytest.approx(published.value, rel=0.01)


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
    assert network_levels(entry.default_network, 2)


def test_an_unknown_preset_lists_near_names() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean tpuv5"):
        preset("tpuv5")
