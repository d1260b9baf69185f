"""A calibration from one profiled training step: a torch.profiler Chrome trace, kernel time by class of op.

Kernels (on a device that has none, the innermost operators of the host) are sorted into matrix products, collectives
and all else by their names. With the model's own ops taken apart as `pass_parts` does, and all of them run once per
step and microbatch:

    update     max(V, M/memory)                          = measured seconds of the update    gives memory
    else       sum of max(V/vector, M/memory)            = measured seconds of all else      gives vector
    products   sum of T/matrix + M/memory (or the max)   = measured seconds of products      gives matrix
    rest       step - all kernels                        = overhead * ops                    gives overhead

A device with kernels of its own works while its host launches the next ones: there the last line is the sum over passes
of what overhead * ops exceeds the pass's kernels by, and a device that hardly waits tells nothing about the overhead.

The update streams through memory and does little else. A trace without one gets memory from all else, and vector is 1.

Each left side falls with its unknown (the last rises), so each is found by bisection. Where even full efficiency is too
slow the chip is described too small: the efficiency is 1 and the residual says so.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from phaze.calibration_fitting.pass_decomposition import PassParts
from phaze.cost import Calibration
from phaze.errors import FormatError

__all__ = [
    "StepTrace",
    "TraceFit",
    "fit_trace",
    "read_trace",
]

_MATRIX = re.compile(
    r"gemm|cutlass|xmma|cublas|wgmma|\bmm\b|addmm|bmm|linear|matmul|einsum|conv|attention|fmha|flash|mkldnn", re.I
)
_LINK = re.compile(r"nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|c10d|gloo", re.I)
_UPDATE = re.compile(
    r"^(Optimizer|_foreach|_fused|adam|.*multi_tensor_apply|aten::_foreach|aten::_fused|aten::(lerp_|addcmul_|addcdiv_))",
    re.I,
)
_LEAST = 0.005
_LEAST_IDLE = 0.02
_MOST_OVERHEAD_S = 1.0


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
    try:
        raw = Path(path).read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        document = json.loads(text)
    except OSError as error:
        raise FormatError(f"cannot read {where}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is no JSON ({error}); expected a trace that torch.profiler exported.") from error
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise FormatError(f"{where} has no traceEvents; expected a trace that torch.profiler exported.")
    spans = [event for event in events if _is_span(event)]
    kernels = [
        event for event in spans if str(event.get("cat", "")).casefold() in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    launches_ahead = bool(kernels)
    if not kernels:
        kernels = _innermost([event for event in spans if event.get("cat") == "cpu_op"])
    if not kernels:
        raise FormatError(
            f"{where} holds no kernels and no operators; record a training step with torch.profiler (activities CPU "
            "and, where there is one, CUDA) and export_chrome_trace."
        )
    return _summed(kernels, spans, launches_ahead)


def _is_span(event: object) -> bool:
    return isinstance(event, dict) and event.get("ph") == "X" and isinstance(event.get("dur"), int | float)


def _innermost(operators: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operators as if nested ones did not count for those around them: every one with its own time."""
    found: list[dict[str, Any]] = []
    stacks: dict[object, list[dict[str, Any]]] = {}
    for event in sorted(operators, key=lambda one: (float(one["ts"]), -float(one["dur"]))):
        stack = stacks.setdefault(event.get("tid"), [])
        while stack and float(event["ts"]) >= float(stack[-1]["ts"]) + float(stack[-1]["whole"]):
            stack.pop()
        own = {"name": event["name"], "ts": event["ts"], "dur": float(event["dur"]), "whole": float(event["dur"])}
        own["above"] = " ".join(str(one["name"]) for one in stack)
        if stack:
            stack[-1]["dur"] -= own["whole"]
        stack.append(own)
        found.append(own)
    return [event for event in found if event["dur"] > 0]


def _summed(kernels: Sequence[dict[str, Any]], spans: Sequence[dict[str, Any]], launches_ahead: bool) -> StepTrace:
    marks = [event for event in spans if str(event.get("name", "")).startswith("ProfilerStep")]
    marks = list({str(event["name"]): event for event in marks}.values())
    steps = max(1, len(marks))
    totals = {"matrix": 0.0, "vector": 0.0, "link": 0.0, "update": 0.0}
    for event in kernels:
        totals[_class(str(event.get("name", "")), str(event.get("above", "")))] += float(event["dur"])
    first = min(float(event["ts"]) for event in kernels)
    last = max(float(event["ts"]) + float(event["dur"]) for event in kernels)
    whole = sum(float(event["dur"]) for event in marks) if marks else last - first
    seconds = {name: value * 1e-6 / steps for name, value in totals.items()}
    return StepTrace(
        matrix_s=seconds["matrix"],
        vector_s=seconds["vector"],
        link_s=seconds["link"],
        update_s=seconds["update"],
        step_s=whole * 1e-6 / steps,
        kernels=len(kernels) // steps,
        steps=steps,
        launches_ahead=launches_ahead,
    )


def _class(name: str, above: str) -> str:
    if _UPDATE.search(name) or "Optimizer.step" in above or "Optimizer.zero_grad" in above:
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
        memory = min(1.0, max(_LEAST, update_bytes_s / trace.update_s))
        vector = _solve(lambda share: _vector_s(passes, memory, share), trace.vector_s)
    else:
        memory, vector = _solve(lambda share: _vector_s(passes, share, 1.0), trace.vector_s), 1.0
    matrix = _solve(lambda share: _matrix_s(passes, share, memory), trace.matrix_s)
    stack = replace(start.stack, launches_ahead=trace.launches_ahead)
    found = replace(start, name=name, matrix=matrix, vector=vector, memory=memory, overhead_s=0.0, stack=stack)
    idle_s = max(0.0, trace.step_s - trace.matrix_s - trace.vector_s - trace.link_s - trace.update_s)
    is_seen = not trace.launches_ahead or idle_s > _LEAST_IDLE * trace.step_s
    if is_seen:
        found = replace(found, overhead_s=_overhead_s(passes, found, idle_s))
    waited_s = _idle_s(passes, found, found.overhead_s)
    return TraceFit(
        calibration=found if is_seen else replace(found, overhead_s=start.overhead_s),
        residuals={
            "products": (trace.matrix_s, _matrix_s(passes, matrix, memory)),
            "all else": (trace.vector_s, _vector_s(passes, memory, vector)),
            "update": (trace.update_s, update_bytes_s / memory),
            "between kernels": (idle_s, waited_s),
        },
        unseen=() if is_seen else ("overhead_s",),
    )


def _idle_s(passes: Sequence[PassParts], calibration: Calibration, overhead_s: float) -> float:
    """Seconds that passes take beyond their kernels at some overhead per op."""
    some = replace(calibration, overhead_s=overhead_s)
    none = replace(calibration, overhead_s=0.0)
    return sum(one.seconds(some) - one.seconds(none) for one in passes)


def _overhead_s(passes: Sequence[PassParts], calibration: Calibration, idle_s: float) -> float:
    """The overhead per op at which passes wait as long as measured, by bisection."""
    low, high = 0.0, _MOST_OVERHEAD_S
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _idle_s(passes, calibration, middle) < idle_s else (low, middle)
    return high


def _vector_s(passes: Sequence[PassParts], memory: float, vector: float) -> float:
    times = (np.maximum(one.vector_s / vector, one.memory_s / memory)[one.tensor_s == 0].sum() for one in passes)
    return float(sum(times))


def _matrix_s(passes: Sequence[PassParts], matrix: float, memory: float) -> float:
    total = 0.0
    for one in passes:
        tensor, moved = one.tensor_s / matrix, one.memory_s / memory
        run = np.maximum(tensor, moved) if one.hides_memory else tensor + moved
        total += float(run[one.tensor_s > 0].sum())
    return total


def _solve(seconds: Callable[[float], float], measured_s: float) -> float:
    """The efficiency at which the seconds are as measured, by bisection; 1 where even that is slower."""
    low, high = _LEAST, 1.0
    if seconds(high) >= measured_s:
        return high
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) > measured_s else (low, middle)
    return high
