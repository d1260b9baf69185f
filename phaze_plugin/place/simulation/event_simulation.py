"""Event simulation of a placed pipeline: every pass of every microbatch, and what follows the last backward.

A device runs its passes in the fixed order of its schedule (`pass_orders.py`). A pass starts when the device is free
and its input has been sent: F of stage k after F of stage k-1, B of stage k after B of stage k+1 (after its own F on
the last stage). Receiving belongs to the pass, as in the paper: F takes the transfer and then the layers; B takes the
transfer or the recompute, whichever is longer, and then the layers. Sending is free for the sender. In the shape of a V
two neighbouring stages are on one device: nothing is sent there. A backward that is one pass with its weights' part
sends its gradient when that is over.

With E the end of a stage's last pass that makes gradients of weights, its reduction over copies ends (`_finish`) at

    max(E + exposed, end of the device's previous reduction + reduction)

(chunks reduce one after the other, the last one first). Stages that share a parameter then wait for each other and
reduce it, and the device updates its parameters (and gathers them, with ZeRO). The batch ends with the last device.

Since orders are fixed, every end is a sum of durations along some path: shorter durations never make the batch longer.
Candidates with the same order are simulated together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phaze.place.simulation.pass_orders import IntArray, Order, Pass

__all__ = ["Program", "Simulation", "StageTimes", "compile_order", "simulate", "simulated_s"]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Seconds per (candidate, device, chunk).

    Attributes:
        forward_s: one F, its transfer included.
        backward_s: one B, transfer and recompute included, and the weights' part unless it is split off.
        weight_s: one W; unused where backward is not split.
        exposed_s: what the reduction takes beyond the last pass when the network was free.
        reduction_s: all of the reduction.
        tie_s: reduction of parameters shared with other stages; 0 where there is none.
        finish_s: update and gather.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    weight_s: FloatArray
    exposed_s: FloatArray
    reduction_s: FloatArray
    tie_s: FloatArray
    finish_s: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """An order made ready to run: passes sorted so that each stands after what it waits for.

    Attributes:
        order: what was compiled.
        starts: where each level of passes that do not wait for each other starts, and the end.
        duration: index of each pass into the flat (kind, device, chunk) durations.
        before: index of the same device's previous pass, or the number of passes if there is none.
        awaited: index of the pass whose result is received, or the number of passes.
        place: where the pass at (device, step) stands.
        last_gradients: where the last pass stands that makes gradients of weights, per (device, chunk).
    """

    order: Order
    starts: tuple[int, ...]
    duration: IntArray
    before: IntArray
    awaited: IntArray
    place: IntArray
    last_gradients: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """Ends of everything, per candidate.

    Attributes:
        time_s: seconds per batch, per candidate.
        pass_end_s: per (candidate, device, step).
        compute_end_s: end of the last pass per (candidate, device).
        reduced_s: end of all gradient reductions per (candidate, device).
        device_end_s: end of the update per (candidate, device).
    """

    time_s: FloatArray
    pass_end_s: FloatArray
    compute_end_s: FloatArray
    reduced_s: FloatArray
    device_end_s: FloatArray


def compile_order(order: Order) -> Program:
    """Sort the passes of an order by levels."""
    pp, steps = order.kind.shape
    count = pp * steps
    stage = order.stage
    flat_index = np.arange(count).reshape(pp, steps)
    where = np.full((len(Pass), pp * order.chunks, order.micro_batches), count)
    where[order.kind, stage, order.micro_batch] = flat_index
    awaited = _awaited(order, stage, where, count)
    level = _levels(awaited)
    rank = np.argsort(level.ravel(), kind="stable")
    place = np.empty(count + 1, dtype=np.int64)
    place[rank], place[count] = np.arange(count), count
    before = np.where(np.arange(steps) > 0, flat_index - 1, count)
    duration = (order.kind * pp + np.arange(pp)[:, None]) * order.chunks + order.chunk
    counts = np.bincount(level.ravel())
    return Program(
        order=order,
        starts=(0, *np.cumsum(counts).tolist()),
        duration=duration.ravel()[rank],
        before=place[before.ravel()[rank]],
        awaited=place[awaited.ravel()[rank]],
        place=place[:count].reshape(pp, steps),
        last_gradients=place[_last_gradients(order)],
    )


def _last_gradients(order: Order) -> IntArray:
    """Per (device, chunk): the index of the last pass that makes gradients of weights. Passes end in their order."""
    pp, steps = order.kind.shape
    is_of_chunk = order.chunk[:, None] == np.arange(order.chunks)[:, None]
    makes_gradients = (order.kind == order.kind.max())[:, None] & is_of_chunk
    last_step = steps - 1 - makes_gradients[..., ::-1].argmax(axis=2)
    return np.asarray(np.arange(pp)[:, None] * steps + last_step)


def _awaited(order: Order, stage: IntArray, where: IntArray, count: int) -> IntArray:
    """Per (device, step): the flat index of the pass whose result is received."""
    last = stage.max()
    batch = order.micro_batch
    forward = np.where(stage > 0, where[Pass.FORWARD, np.maximum(stage - 1, 0), batch], count)
    next_stage = np.minimum(stage + 1, last)
    above = where[Pass.BACKWARD, next_stage, batch]
    if order.is_whole.any():  # the gradient of a whole backward comes after its weights' part
        is_whole = np.zeros(where.shape[1:], dtype=bool)
        is_whole[stage[order.is_whole], batch[order.is_whole]] = True
        above = np.where(is_whole[next_stage, batch], where[Pass.WEIGHT, next_stage, batch], above)
    backward = np.where(stage < last, above, where[Pass.FORWARD, stage, batch])
    weight = where[Pass.BACKWARD, stage, batch]
    return np.choose(order.kind, [forward, backward, weight])


def _levels(awaited: IntArray) -> IntArray:
    """Per (device, step): the first tick in which the pass can run if every pass takes one tick."""
    pp, steps = awaited.shape
    waits_for, count = awaited.tolist(), pp * steps
    level = [count] * count + [-1]  # the last entry is that of no pass, which is always over
    next_step, tick, left = [0] * pp, 0, count
    while left:
        ready = [
            device
            for device in range(pp)
            if next_step[device] < steps and level[waits_for[device][next_step[device]]] < tick
        ]
        assert ready, "the order waits for itself"
        for device in ready:
            level[device * steps + next_step[device]] = tick
            next_step[device] += 1
        left -= len(ready)
        tick += 1
    return np.array(level[:-1]).reshape(pp, steps)


def simulate(program: Program, times: StageTimes) -> Simulation:
    """Run all candidates of ``times`` through the order of ``program``."""
    end = _run(program, times)
    pass_end = np.moveaxis(end[program.place], 2, 0)
    settled, device_end = _finish(program, times, end)
    return Simulation(
        time_s=device_end.max(axis=1),
        pass_end_s=pass_end,
        compute_end_s=pass_end[:, :, -1],
        reduced_s=settled,
        device_end_s=device_end,
    )


def simulated_s(program: Program, times: StageTimes) -> FloatArray:
    """Seconds per batch of all candidates of ``times``: what `simulate` says of them, without the end of every pass."""
    return np.asarray(_finish(program, times, _run(program, times))[1].max(axis=1))


def _run(program: Program, times: StageTimes) -> FloatArray:
    """The end of every pass, per (pass, candidate); behind the last one stands that of no pass, which is 0."""
    candidates = len(times.forward_s)
    durations = np.stack([times.forward_s, times.backward_s, times.weight_s], axis=0)
    flat = durations.transpose(0, 2, 3, 1).reshape(-1, candidates)
    taken = flat[program.duration]
    end = np.zeros((len(taken) + 1, candidates))
    for start, stop in zip(program.starts, program.starts[1:], strict=False):
        ready = np.maximum(end[program.before[start:stop]], end[program.awaited[start:stop]])
        np.add(ready, taken[start:stop], out=end[start:stop])
    return end


def _finish(program: Program, times: StageTimes, end_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The ends of reductions and ties, and of updates, per (candidate, device)."""
    reduced = np.full(times.forward_s.shape[:2], -np.inf)
    for chunk in range(program.order.chunks - 1, -1, -1):
        last_end_s = end_s[program.last_gradients[:, chunk]].T
        reduced = np.maximum(last_end_s + times.exposed_s[..., chunk], reduced + times.reduction_s[..., chunk])
    tie = times.tie_s.sum(axis=2)
    together = np.where(tie > 0, reduced, -np.inf).max(axis=1, keepdims=True)
    settled = np.where(tie > 0, together + tie, reduced)
    return settled, np.asarray(settled + times.finish_s.sum(axis=2))
