"""What a stage does with each microbatch and at the end of a batch, in seconds, and the timeline of a whole pipeline.

`StagePasses` are all that a timeline is made of, so that a saved plan is drawn again without its model
(`simulate_stages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phaze.parallelism import Parallelism
from phaze.place.simulation.event_simulation import FloatArray, Simulation, StageTimes, compile_order, simulate
from phaze.place.simulation.pass_orders import IntArray, Order, Pass, pipeline_order, stages_of_devices
from phaze.place.simulation.timeline import KINDS, EventKind, EventTable, Timeline

__all__ = ["StagePasses", "build_timeline", "simulate_stages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePasses:
    """Seconds of one stage: of one microbatch, and of what follows the last one.

    Attributes:
        forward_s: one forward, receiving included.
        backward_s: one backward, receiving and recompute included, and the weights' part unless it is split off.
        weight_s: the weights' part of backward where it is a pass of its own, else 0.
        receive_s: receiving the activation, a part of forward.
        receive_gradient_s: receiving the gradient; the part of backward that recompute does not hide.
        recompute_s: running forward again, a part of backward.
        exposed_reduction_s: reducing gradients beyond the last pass, where the network is free.
        reduction_s: all of that reduction.
        shared_reduction_s: reducing what the stage shares with other stages.
        update_s: the optimizer, and gathering what it updated.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    receive_s: float
    receive_gradient_s: float
    recompute_s: float
    exposed_reduction_s: float
    reduction_s: float
    shared_reduction_s: float
    update_s: float


def simulate_stages(parallelism: Parallelism, micro_batches: int, stages: Sequence[StagePasses]) -> Timeline:
    """The timeline of a pipeline of these stages, in their order; a copy of it runs so many microbatches."""
    order = pipeline_order(parallelism.schedule, parallelism.pp, micro_batches, parallelism.chunks)
    columns = {
        "forward_s": "forward_s",
        "backward_s": "backward_s",
        "weight_s": "weight_s",
        "exposed_s": "exposed_reduction_s",
        "reduction_s": "reduction_s",
        "tie_s": "shared_reduction_s",
        "finish_s": "update_s",
    }
    by_device = stages_of_devices(parallelism.schedule, parallelism.pp, parallelism.chunks).T
    times = {
        name: np.array([getattr(stage, field) for stage in stages])[by_device][None] for name, field in columns.items()
    }
    return build_timeline(order, stages, simulate(compile_order(order), StageTimes(**times)))


def build_timeline(order: Order, stages: Sequence[StagePasses], simulation: Simulation) -> Timeline:
    """Every pass in its parts (receive, or recompute, which hides it; then the layers), and what follows the last."""

    def per_stage(*names: str) -> FloatArray:
        return np.array([[getattr(stage, name) if name else 0.0 for stage in stages] for name in names])

    ends = simulation.pass_end_s[0]
    device = np.broadcast_to(np.arange(order.pp)[:, None], ends.shape)
    stage = order.stage
    starts = ends - per_stage("forward_s", "backward_s", "weight_s")[order.kind, stage]
    again = starts + np.where(order.kind == Pass.BACKWARD, per_stage("recompute_s")[0][stage], 0.0)
    ready = np.maximum(again, starts + per_stage("receive_s", "receive_gradient_s", "")[order.kind, stage])
    runs = np.array([KINDS.index(kind) for kind in (EventKind.FORWARD, EventKind.BACKWARD, EventKind.WEIGHT)])
    computed, reduced, updated = (
        ends_s[0] for ends_s in (simulation.compute_end_s, simulation.reduced_s, simulation.device_end_s)
    )
    no_stage = np.full(order.pp, -1)

    def pass_events(kind: IntArray, start: FloatArray, end: FloatArray) -> EventTable:
        return EventTable(
            device=device, kind=kind, stage=stage, micro_batch=order.micro_batch, start_s=start, end_s=end
        )

    def device_events(kind: EventKind, start: FloatArray, end: FloatArray) -> EventTable:
        number = np.full(start.shape, KINDS.index(kind))
        return EventTable(
            device=device[:, 0], kind=number, stage=no_stage, micro_batch=no_stage, start_s=start, end_s=end
        )

    parts = (
        pass_events(np.full(ends.shape, KINDS.index(EventKind.RECOMPUTE)), starts, again),
        pass_events(np.full(ends.shape, KINDS.index(EventKind.RECEIVE)), again, ready),
        pass_events(runs[order.kind], ready, ends),
        device_events(EventKind.REDUCE, computed, reduced),
        device_events(EventKind.UPDATE, reduced, updated),
    )
    return Timeline(order.pp, float(simulation.time_s[0]), EventTable.joined(parts))
