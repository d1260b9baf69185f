"""A calibration from one profiled training step: a torch.profiler Chrome trace, kernel time by class of op.

`read_trace` sorts kernels (on a device that has none, the innermost operators of the host) by their names into matrix
products, collectives, the update and all else. `fit_trace` takes the model's own ops apart as `pass_parts` does. All of
them run once per step and microbatch, so that with their ideal tensor, vector and memory seconds T, V and M:

    update     max(V, M/memory)                          = measured seconds of the update    gives memory
    else       sum of max(V/vector, M/memory)            = measured seconds of all else      gives vector  (`_vector_s`)
    products   sum of T/matrix + M/memory (or the max)   = measured seconds of products      gives matrix  (`_matrix_s`)
    rest       step - all kernels                        = overhead * ops                    gives overhead  (`_idle_s`)

A device with kernels of its own works while its host launches the next ones: there the last line is the sum over passes
of what overhead * ops exceeds the pass's kernels by, and a device that hardly waits tells nothing about the overhead.

The update streams through memory and does little else. A trace without one gets memory from all else, and vector is 1.

Each left side falls with its unknown (the last rises), so each is found by bisection (`_solve`, `_overhead_s`). Where
even full efficiency is too slow the chip is described too small: the efficiency is 1 and the residual says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phaze.calibration_fitting.pass_decomposition import PassParts
from phaze.cost import Calibration
from phaze.errors import FormatError
from phaze.file_access import read_document

__all__ = [
    "StepTrace",
    "TraceFit",
    "fit_trace",
    "read_trace",
]

_KERNEL_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_MATRIX = re.compile(
    r"gemm|cutlass|xmma|cublas|wgmma|\bmm\b|addmm|bmm|linear|matmul|einsum|conv|attention|fmha|flash|mkldnn", re.I
)
_LINK = re.compile(r"nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|c10d|gloo", re.I)
_UPDATE = re.compile(
    r"^(Optimizer|_foreach|_fused|adam|.*multi_tensor_apply|aten::_foreach|aten::_fused|aten::(lerp_|addcmul_|addcdiv_))",
    re.I,
)
_LEAST_EFFICIENCY = 0.005
"""The lowest efficiency that is looked for; a machine below it is not the chip that it is called."""
_LEAST_IDLE = 0.02
"""A device that launches ahead and waits for less than this share of the step tells nothing about the overhead: so
little may as well be gaps between kernels."""
_MOST_OVERHEAD_S = 1.0
"""The highest overhead per op that is looked for: far above any host's."""
_BISECTIONS = 60
"""Halvings of the interval: it is then narrower than the last digits of a float."""
_LATEST_US = 1e18
"""Times of a trace are below this, thirty thousand years; others are damaged and left out."""
_SECONDS_PER_MICROSECOND = 1e-6
"""Traces are in microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """Seconds of one step by class, the kernels in it, the step itself, and whether a host launched them ahead."""

    matrix_s: float
    vector_s: float
    link_s: float
    update_s: float
    step_s: float
    kernels: int
    steps: int
    launches_ahead: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFit:
    """A calibration, per class the measured and the predicted seconds, and terms that the trace does not show."""

    calibration: Calibration
    residuals: dict[str, tuple[float, float]]
    unseen: tuple[str, ...] = ()


def read_trace(path: str | os.PathLike[str]) -> StepTrace:
    """Read a Chrome trace, plain or gzipped; raises FormatError where it is none or holds no kernels."""
    where = os.fspath(path)
    document = read_document(path, "a trace that torch.profiler exported", is_foreign=True, unpacks=True)
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise FormatError(f"{where} has no traceEvents; expected a trace that torch.profiler exported.")
    spans = [span for event in events if (span := _span(event)) is not None]
    kernels = [span for span in spans if span.category.casefold() in _KERNEL_CATEGORIES]
    launches_ahead = bool(kernels)
    if not kernels:
        kernels = _innermost([span for span in spans if span.category == "cpu_op"])
    if not kernels:
        raise FormatError(
            f"{where} holds no kernels and no operators; record a training step with torch.profiler (activities CPU "
            "and, where there is one, CUDA) and export_chrome_trace."
        )
    return _summed(kernels, spans, launches_ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A complete event of a trace, in microseconds; ``enclosing`` are the names of the operators around it."""

    name: str
    category: str
    thread: str
    start_us: float
    duration_us: float
    enclosing: str = ""

    @property
    def end_us(self) -> float:
        """When it ended."""
        return self.start_us + self.duration_us


def _span(event: object) -> _Span | None:
    """The span that an event describes; None for events of other kinds."""
    if not isinstance(event, dict) or event.get("ph") != "X":
        return None
    start, duration = event.get("ts"), event.get("dur")
    if not isinstance(duration, int | float) or not isinstance(start, int | float):
        return None
    if not abs(start) < _LATEST_US or not 0 <= duration < _LATEST_US:  # what is no number compares as False
        return None
    return _Span(
        name=str(event.get("name", "")),
        category=str(event.get("cat", "")),
        thread=str(event.get("tid")),
        start_us=float(start),
        duration_us=float(duration),
    )


def _innermost(operators: Sequence[_Span]) -> list[_Span]:
    """Operators, each with the time that it spent outside of the operators nested in it."""
    in_order = sorted(operators, key=lambda span: (span.start_us, -span.duration_us))
    own_us = [span.duration_us for span in in_order]
    enclosing: list[str] = []
    stacks: dict[str, list[int]] = {}
    for index, span in enumerate(in_order):
        stack = stacks.setdefault(span.thread, [])
        while stack and span.start_us >= in_order[stack[-1]].end_us:
            stack.pop()
        enclosing.append(" ".join(in_order[outer].name for outer in stack))
        if stack:
            own_us[stack[-1]] -= span.duration_us
        stack.append(index)
    return [
        replace(span, duration_us=duration_us, enclosing=names)
        for span, duration_us, names in zip(in_order, own_us, enclosing, strict=True)
        if duration_us > 0
    ]


def _summed(kernels: Sequence[_Span], spans: Sequence[_Span], launches_ahead: bool) -> StepTrace:
    """Seconds by class, per step: the profiler marks steps; without marks the trace is one step."""
    marks = list({span.name: span for span in spans if span.name.startswith("ProfilerStep")}.values())
    steps = max(1, len(marks))
    totals_us = {"matrix": 0.0, "vector": 0.0, "link": 0.0, "update": 0.0}
    for kernel in kernels:
        totals_us[_class(kernel.name, kernel.enclosing)] += kernel.duration_us
    first_us = min(kernel.start_us for kernel in kernels)
    last_us = max(kernel.end_us for kernel in kernels)
    whole_us = sum(mark.duration_us for mark in marks) if marks else last_us - first_us
    seconds = {name: total * _SECONDS_PER_MICROSECOND / steps for name, total in totals_us.items()}
    return StepTrace(
        matrix_s=seconds["matrix"],
        vector_s=seconds["vector"],
        link_s=seconds["link"],
        update_s=seconds["update"],
        step_s=whole_us * _SECONDS_PER_MICROSECOND / steps,
        kernels=len(kernels) // steps,
        steps=steps,
        launches_ahead=launches_ahead,
    )


def _class(name: str, enclosing: str) -> str:
    """The class of a kernel by its name and the operators around it."""
    if _UPDATE.search(name) or "Optimizer.step" in enclosing or "Optimizer.zero_grad" in enclosing:
        return "update"
    if _LINK.search(name):
        return "link"
    return "matrix" if _MATRIX.search(name) else "vector"


def fit_trace(
    trace: StepTrace,
    passes: Sequence[PassParts],
    start: Calibration,
    *,
    name: str,
    update_bytes_s: float = 0.0,
) -> TraceFit:
    """The calibration that explains a trace of a step made of ``passes``; raises FormatError where a class is empty.

    ``update_bytes_s`` is what the update's traffic takes at full bandwidth.
    """
    if trace.matrix_s <= 0 or trace.vector_s <= 0:
        lacking = "matrix products" if trace.matrix_s <= 0 else "elementwise kernels"
        raise FormatError(
            f"the trace has no {lacking} among its {trace.kernels} kernels; matrix and memory efficiency cannot be "
            "separated. Record a whole training step of a model with both."
        )
    if trace.update_s > 0 and update_bytes_s > 0:
        memory = min(1.0, max(_LEAST_EFFICIENCY, update_bytes_s / trace.update_s))
        vector = _solve(lambda share: _vector_s(passes, memory, share), trace.vector_s)
    else:
        memory, vector = _solve(lambda share: _vector_s(passes, share, 1.0), trace.vector_s), 1.0
    matrix = _solve(lambda share: _matrix_s(passes, share, memory), trace.matrix_s)
    stack = replace(start.stack, launches_ahead=trace.launches_ahead)
    fitted = replace(start, name=name, matrix=matrix, vector=vector, memory=memory, overhead_s=0.0, stack=stack)
    idle_s = max(0.0, trace.step_s - trace.matrix_s - trace.vector_s - trace.link_s - trace.update_s)
    is_seen = not trace.launches_ahead or idle_s > _LEAST_IDLE * trace.step_s
    if is_seen:
        fitted = replace(fitted, overhead_s=_overhead_s(passes, fitted, idle_s))
    waited_s = _idle_s(passes, fitted, fitted.overhead_s)
    return TraceFit(
        calibration=fitted if is_seen else replace(fitted, overhead_s=start.overhead_s),
        residuals={
            "products": (trace.matrix_s, _matrix_s(passes, matrix, memory)),
            "all else": (trace.vector_s, _vector_s(passes, memory, vector)),
            "update": (trace.update_s, update_bytes_s / memory),
            "between kernels": (idle_s, waited_s),
        },
        unseen=() if is_seen else ("overhead_s",),
    )


def _idle_s(passes: Sequence[PassParts], calibration: Calibration, overhead_s: float) -> float:
    """Seconds that passes take beyond their kernels at this overhead per op."""
    with_overhead = replace(calibration, overhead_s=overhead_s)
    without = replace(calibration, overhead_s=0.0)
    return sum(parts.seconds(with_overhead) - parts.seconds(without) for parts in passes)


def _overhead_s(passes: Sequence[PassParts], calibration: Calibration, idle_s: float) -> float:
    """The overhead per op at which passes wait as long as measured, by bisection."""
    low, high = 0.0, _MOST_OVERHEAD_S
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _idle_s(passes, calibration, middle) < idle_s else (low, middle)
    return high


def _vector_s(passes: Sequence[PassParts], memory: float, vector: float) -> float:
    """Seconds of all ops without matrix products."""
    times = (
        np.maximum(parts.vector_s / vector, parts.memory_s / memory)[parts.tensor_s == 0].sum() for parts in passes
    )
    return float(sum(times))


def _matrix_s(passes: Sequence[PassParts], matrix: float, memory: float) -> float:
    """Seconds of all ops with matrix products."""
    total = 0.0
    for parts in passes:
        tensor_s, memory_s = parts.tensor_s / matrix, parts.memory_s / memory
        op_s = np.maximum(tensor_s, memory_s) if parts.stack.hides_memory else tensor_s + memory_s
        total += float(op_s[parts.tensor_s > 0].sum())
    return total


def _solve(seconds: Callable[[float], float], measured_s: float) -> float:
    """The efficiency at which the seconds are as measured, by bisection; 1 where even that is slower."""
    low, high = _LEAST_EFFICIENCY, 1.0
    if seconds(high) >= measured_s:
        return high
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) > measured_s else (low, middle)
    return high
