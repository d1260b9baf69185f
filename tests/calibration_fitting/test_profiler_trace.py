import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phaze.calibration_fitting import StepTrace, fit_trace, read_trace
from phaze.calibration_fitting.pass_decomposition import LinkParts, PassParts
from phaze.cost import EAGER_STACK, Calibration
from phaze.errors import FormatError

START = Calibration(stack=EAGER_STACK)
PASS = PassParts(
    tensor_s=np.array([0.3, 0.0, 0.1]),
    vector_s=np.array([0.0, 0.01, 0.0]),
    memory_s=np.array([0.05, 0.2, 0.05]),
    moved=LinkParts(latency_s=0.0, inner_s=0.0, outer_s=0.0),
    rings=(),
    links=0,
    stack=EAGER_STACK,
)


def span(name: str, start: float, length: float, category: str) -> dict[str, object]:
    return {"ph": "X", "name": name, "ts": start, "dur": length, "cat": category, "tid": 1, "pid": 1}


def written(tmp_path: Path, events: object) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_kernels_are_summed_by_class_over_the_steps_of_a_trace(tmp_path: Path) -> None:
    events = [
        *(span(f"ProfilerStep#{step}", 1000 * step, 900, "user_annotation") for step in (0, 1)),
        *(span("ampere_bf16_gemm_128x256", 1000 * step, 400, "kernel") for step in (0, 1)),
        *(span("vectorized_elementwise_kernel", 1000 * step + 400, 200, "kernel") for step in (0, 1)),
        *(span("ncclDevKernel_AllReduce", 1000 * step + 600, 100, "kernel") for step in (0, 1)),
        span("aten::mm", 0, 5, "cpu_op"),
    ]
    trace = read_trace(written(tmp_path, events))
    seconds = (trace.matrix_s, trace.vector_s, trace.link_s, trace.step_s)
    assert seconds == pytest.approx((400e-6, 200e-6, 100e-6, 900e-6))
    assert (trace.kernels, trace.steps) == (3, 2)


def test_without_kernels_every_operator_counts_with_its_own_time(tmp_path: Path) -> None:
    events = [
        span("aten::linear", 0, 100, "cpu_op"),
        span("aten::addmm", 10, 80, "cpu_op"),
        span("aten::add", 100, 30, "cpu_op"),
    ]
    trace = read_trace(written(tmp_path, events))
    assert (trace.matrix_s, trace.vector_s) == pytest.approx((100e-6, 30e-6))


@pytest.mark.parametrize(("events", "words"), [([], "holds no kernels"), (None, "no traceEvents")])
def test_a_trace_without_kernels_is_refused(tmp_path: Path, events: object, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        read_trace(written(tmp_path, events))


def traced(idle_s: float, *, launches_ahead: bool) -> StepTrace:
    matrix_s, vector_s = 0.4 / 0.5 + 0.1 / 0.8, 0.2 / 0.8
    return StepTrace(
        matrix_s=matrix_s,
        vector_s=vector_s,
        link_s=0.0,
        update_s=0.0,
        step_s=matrix_s + vector_s + idle_s,
        kernels=3,
        steps=1,
        launches_ahead=launches_ahead,
    )


def test_a_fit_explains_the_trace_that_a_calibration_made() -> None:
    trace = traced(3 * 1e-3, launches_ahead=False)
    fit = fit_trace(trace, [PASS], START, name="traced")
    calibration = fit.calibration
    assert (calibration.matrix, calibration.memory, calibration.overhead_s) == pytest.approx((0.5, 0.8, 1e-3))
    for measured, predicted in fit.residuals.values():
        assert predicted == pytest.approx(measured)


def test_the_update_gives_memory_and_all_else_the_rate_of_vector_work() -> None:
    trace = replace(traced(0.0, launches_ahead=False), update_s=0.5, vector_s=0.4)
    fit = fit_trace(trace, [PASS], START, name="traced", update_bytes_s=0.4)
    assert (fit.calibration.memory, fit.calibration.vector) == pytest.approx((0.8, 0.01 / 0.4))
    assert fit.residuals["update"] == pytest.approx((0.5, 0.5))


def test_a_device_that_waits_for_its_host_shows_the_overhead_per_launch() -> None:
    passes = [PASS, replace(PASS, **{name: getattr(PASS, name) / 1e4 for name in ("tensor_s", "vector_s", "memory_s")})]
    fit = fit_trace(traced(0.3, launches_ahead=True), passes, START, name="traced")
    assert fit.unseen == ()
    assert fit.calibration.stack.launches_ahead
    assert fit.calibration.overhead_s == pytest.approx(0.1, rel=0.2)


def test_a_device_that_hardly_waits_does_not_show_it() -> None:
    start = replace(START, overhead_s=7e-6)
    fit = fit_trace(traced(1e-3, launches_ahead=True), [PASS], start, name="traced")
    assert fit.unseen == ("overhead_s",)
    assert fit.calibration.overhead_s == 7e-6


def test_a_trace_with_products_only_cannot_separate_matrix_from_memory() -> None:
    trace = replace(traced(0.0, launches_ahead=False), vector_s=0.0)
    with pytest.raises(FormatError, match="cannot be separated"):
        fit_trace(trace, [PASS], START, name="traced")
