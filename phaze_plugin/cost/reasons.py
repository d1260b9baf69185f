"""Why a work takes as long as it does, in a sentence."""

from __future__ import annotations

import math

from phaze.cost.calibration import Calibration
from phaze.cost.estimate import Binding, CoreKind
from phaze.cost.fitted import calibration_of
from phaze.cost.price import price_works
from phaze.cost.report import least_tensor_s, work_shape
from phaze.cost.work import Work
from phaze.errors import CostError
from phaze.hardware import Accelerator

__all__ = ["explain"]

_WELL_USED = 0.8
"""From this share of peak on, padding and idle arrays are not worth a word."""


def explain(work: Work, accelerator: Accelerator, *, calibration: Calibration | None = None) -> str:
    """One sentence: how long ``work`` takes when spread over all cores, how near to peak, what binds and why.

    A view takes no time that could be explained and is refused with a `CostError`.
    """
    if work.kind is CoreKind.NONE:
        raise CostError("a view costs nothing and nothing binds it; explain a work that computes.")
    chosen = calibration or calibration_of(accelerator)
    estimate = price_works([work], accelerator, calibration=chosen)
    seconds, moved, binding = float(estimate.spread_s[0, 0]), float(estimate.spread_bytes[0, 0]), estimate.binding()
    reasons = {
        Binding.COMPUTE: lambda: _compute_reason(work, accelerator, chosen, seconds - chosen.op_overhead_s),
        Binding.MEMORY: lambda: f"{moved:.3g} bytes cross to HBM while the cores wait",
        Binding.FILL: lambda: (
            f"arrays of {accelerator.tensor_rows}x{accelerator.tensor_cols} spend more than half of the time filling "
            "and draining"
        ),
        Binding.OVERHEAD: lambda: f"{_seconds(chosen.op_overhead_s)} of overhead per op exceed the work itself",
    }
    reached = f", {least_tensor_s(work, accelerator) / seconds:.1%} of peak" if work.products else ""
    return (
        f"{work_shape(work)} on {accelerator.name} ({chosen.name}): {_seconds(seconds)}{reached}; "
        f"{binding} binds: {reasons[binding]()}."
    )


def _compute_reason(work: Work, accelerator: Accelerator, calibration: Calibration, seconds: float) -> str:
    """Which cores decide, and whether the tensor cores' time is spent on the work or on padding."""
    lanes = accelerator.vector_cores * accelerator.vector_lanes
    vector_s = math.ceil(work.vector_operations / lanes) / (accelerator.clock_hz * calibration.vector)
    if vector_s >= seconds * (1 - 1e-9):
        idle = "; the tensor cores wait" if work.products else ""
        return f"the vector cores are busy with {work.vector_operations:.3g} lane operations{idle}"
    useful = least_tensor_s(work, accelerator) / (seconds * calibration.matrix)
    if useful < _WELL_USED:
        size = f"{accelerator.tensor_rows}x{accelerator.tensor_cols}"
        return (
            f"the tensor cores need {_seconds(seconds)} but multiply for {useful:.0%} of it; the rest is padding the "
            f"shape to {accelerator.tensor_cores} arrays of {size}, idle arrays and fill"
        )
    return "the tensor cores are busy throughout"


def _seconds(value: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"
