"""Pipelines written a second time, for verification: one pass after the other, without tables or numpy.

order of a device's passes         `plain_order`
microbatches that a stage holds    `plain_in_flight`
seconds of a step                  `plain_simulation`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["PlainStage", "plain_in_flight", "plain_order", "plain_simulation"]


@dataclass(slots=True, kw_only=True)
class PlainStage:
    """One stage: seconds of its passes and of what follows them, and bytes on each of its devices.

    Attributes:
        forward_s: a forward pass, with the transfer that it waits for.
        backward_s: a backward pass; in zero-bubble schedules the part that makes gradients of inputs.
        weight_s: the part of a backward pass that makes gradients of weights, in zero-bubble schedules.
        exposed_s: reductions of gradients that no backward pass hides.
        reduction_s: all reductions of gradients.
        tie_s: exchanges with stages that hold the same parameters.
        finish_s: the update, and the gathers of updated parameters.
        stash_bytes: what a microbatch keeps from its forward pass to its last backward pass.
        devices: devices that share the stage.
        held_bytes: parameters, gradients and optimizer states, by these names.
        working_bytes: the most that a layer needs beside stashes.
        buffer_bytes: buffers of transfers and collectives.
        host_bytes: optimizer states that are kept on the host.
        host_stash_bytes: what a microbatch keeps on the host from its forward pass to its last backward pass.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    exposed_s: float = 0.0
    reduction_s: float = 0.0
    tie_s: float = 0.0
    finish_s: float = 0.0
    stash_bytes: float = 0.0
    devices: int = 1
    held_bytes: dict[str, float] = field(default_factory=dict)
    working_bytes: float = 0.0
    buffer_bytes: float = 0.0
    host_bytes: float = 0.0
    host_stash_bytes: float = 0.0

    @property
    def scratch_bytes(self) -> float:
        """What chunks of one device share, as one of them runs at a time."""
        return self.working_bytes + self.buffer_bytes


PlainPass = tuple[str, int, int]
"""Kind (F, B or W), chunk, microbatch."""


def plain_order(schedule: str, pp: int, micro_batches: int, chunks: int, device: int) -> list[PlainPass]:
    """Passes of one device of a pipeline, one after the other."""
    if schedule == "gpipe":
        batches = range(micro_batches)
        return [("F", 0, batch) for batch in batches] + [("B", 0, batch) for batch in batches]
    forwards: list[PlainPass] = []
    backwards: list[PlainPass] = []
    group = pp if chunks > 1 else micro_batches
    for start in range(0, micro_batches, group):
        for chunk in range(chunks):
            for batch in range(start, min(start + group, micro_batches)):
                forwards.append(("F", chunk, batch))
                backwards.append(("B", chunks - 1 - chunk, batch))
    ahead = pp - 1 - device
    twice = chunks > 1 or schedule == "eager-1f1b"
    first = min(2 * ahead + (chunks - 1) * pp if twice else ahead, len(forwards))
    passes = forwards[:first]
    for turn, forward in enumerate(forwards[first:]):
        passes += [forward, backwards[turn]]
    passes += backwards[len(forwards) - first :]
    return passes if schedule != "zero-bubble" else _with_weight_passes(passes, micro_batches, device)


def _with_weight_passes(passes: Sequence[PlainPass], micro_batches: int, device: int) -> list[PlainPass]:
    """The passes with a W for every microbatch, which comes as many backwards late as devices come before."""
    order: list[PlainPass] = []
    for kind, chunk, batch in passes:
        order.append((kind, chunk, batch))
        if kind == "B" and batch >= device:
            order.append(("W", 0, batch - device))
    done = sum(kind == "W" for kind, _, _ in order)
    return order + [("W", 0, batch) for batch in range(done, micro_batches)]


def plain_in_flight(schedule: str, pp: int, micro_batches: int, chunks: int, device: int, chunk: int) -> int:
    """The most microbatches whose forward pass ran on a chunk and whose last backward pass did not."""
    last = "W" if schedule == "zero-bubble" else "B"
    held = most = 0
    for kind, pass_chunk, _ in plain_order(schedule, pp, micro_batches, chunks, device):
        if pass_chunk == chunk:
            held += (kind == "F") - (kind == last)
            most = max(most, held)
    return most


def plain_simulation(schedule: str, pp: int, micro_batches: int, stages: Sequence[PlainStage]) -> float:
    """Seconds of a step in which every device waits for what its next pass needs."""
    chunks = len(stages) // pp
    on_device = [[stages[chunk * pp + device] for chunk in range(chunks)] for device in range(pp)]
    ends_s = _pass_ends_s(schedule, pp, micro_batches, stages)
    last = "W" if schedule == "zero-bubble" else "B"
    reduced_s = []
    for device in range(pp):
        network_s = -math.inf
        for chunk in range(chunks - 1, -1, -1):
            stage = on_device[device][chunk]
            finished_s = max(ends_s[last, chunk * pp + device, batch] for batch in range(micro_batches))
            network_s = max(finished_s + stage.exposed_s, network_s + stage.reduction_s)
        reduced_s.append(network_s)
    ties_s = [sum(stage.tie_s for stage in on_device[device]) for device in range(pp)]
    # Devices that exchange tied parameters wait for the last of them.
    meeting_s = max((reduced_s[device] for device in range(pp) if ties_s[device] > 0), default=0.0)
    device_ends_s = []
    for device in range(pp):
        settled_s = meeting_s + ties_s[device] if ties_s[device] > 0 else reduced_s[device]
        device_ends_s.append(settled_s + sum(stage.finish_s for stage in on_device[device]))
    return max(device_ends_s)


def _pass_ends_s(
    schedule: str, pp: int, micro_batches: int, stages: Sequence[PlainStage]
) -> dict[tuple[str, int, int], float]:
    """When each (kind, stage, microbatch) ends."""
    chunks = len(stages) // pp
    waiting = [plain_order(schedule, pp, micro_batches, chunks, device)[::-1] for device in range(pp)]
    clock_s = [0.0] * pp
    ends_s: dict[tuple[str, int, int], float] = {}
    while any(waiting):
        for device in range(pp):
            while waiting[device]:
                kind, chunk, batch = waiting[device][-1]
                stage = chunk * pp + device
                needed = _needed_pass(kind, stage, batch, len(stages))
                if needed is not None and needed not in ends_s:
                    break
                times = stages[stage]
                takes_s = {"F": times.forward_s, "B": times.backward_s, "W": times.weight_s}[kind]
                clock_s[device] = max(clock_s[device], ends_s[needed] if needed else 0.0) + takes_s
                ends_s[kind, stage, batch] = clock_s[device]
                waiting[device].pop()
    return ends_s


def _needed_pass(kind: str, stage: int, batch: int, stages: int) -> tuple[str, int, int] | None:
    """The pass whose result a pass needs, as (kind, stage, microbatch)."""
    if kind == "F":
        return ("F", stage - 1, batch) if stage else None
    if kind == "B":
        return ("B", stage + 1, batch) if stage + 1 < stages else ("F", stage, batch)
    return ("B", stage, batch)
