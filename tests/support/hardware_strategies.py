"""Random accelerators and networks for property tests."""

from hypothesis import strategies as st

from phaze.hardware import Accelerator, Cluster, InterconnectLevel, Links, MatrixRates

RATES = st.sampled_from([0.0625, 0.125, 0.25, 0.5, 1.0, 2.0])


@st.composite
def accelerators(draw: st.DrawFn) -> Accelerator:
    return Accelerator(
        name="random",
        tensor_cores=draw(st.integers(1, 700)),
        tensor_rows=draw(st.integers(1, 256)),
        tensor_cols=draw(st.integers(1, 256)),
        vector_cores=draw(st.integers(1, 700)),
        vector_lanes=draw(st.integers(1, 2048)),
        buffer_bytes=draw(st.integers(1, 2**28)),
        hbm_bytes=draw(st.integers(2**30, 2**37)),
        hbm_bandwidth_bytes_per_s=draw(st.floats(1e9, 1e13)),
        clock_hz=draw(st.floats(1e8, 4e9)),
        rates=MatrixRates(bf16=draw(RATES), fp32=draw(RATES), fp8=draw(RATES)),
    )


@st.composite
def levels(draw: st.DrawFn) -> InterconnectLevel:
    return InterconnectLevel(
        draw(st.integers(2, 9)),
        draw(st.floats(1e8, 1e12)),
        draw(st.floats(0, 1e-4)),
        draw(st.sampled_from(Links)),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    links = tuple(draw(st.lists(levels(), min_size=1, max_size=3)))
    joined = 1
    for level in links:
        joined *= level.size
    return Cluster(draw(accelerators()), draw(st.integers(1, joined)), links)
