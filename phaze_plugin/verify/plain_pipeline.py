"""Pipelines written a second time, for verification: one pass after the other, without tables or numpy.

order of a device's passes         `plain_order`
microbatches that a stage holds    `plain_in_flight`
seconds of a step                  `plain_simulation`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

__all__ = [
    "PlainStage",
    "plain_device",
    "plain_in_flight",
    "plain_order",
    "plain_simulation",
    "plain_stages_of",
    "without_turn",
]

_V_SHAPED = ("zb-v", "dualpipe-v")
"""Schedules whose stages go down the devices and come back."""


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
        received_s: what of a forward pass is receiving its input.
        waited_s: what of a backward pass is receiving its gradient, beyond what recompute hides.
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
    received_s: float = 0.0
    waited_s: float = 0.0
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
"""Kind (F, B, W, or X for a B and a W in one pass), chunk, microbatch."""


def plain_device(schedule: str, pp: int, stage: int) -> tuple[int, int]:
    """The device of a stage, and which of the device's chunks it is."""
    if schedule in _V_SHAPED and stage >= pp:
        return 2 * pp - 1 - stage, 1
    return stage % pp, stage // pp


def plain_stages_of(schedule: str, pp: int, stages: int, device: int) -> list[int]:
    """The stages of a device, the first chunk first."""
    return [stage for stage in range(stages) if plain_device(schedule, pp, stage)[0] == device]


def without_turn(schedule: str, pp: int, stages: Sequence[PlainStage], first: int = 0) -> list[PlainStage]:
    """Some stages from the first one on, without what two stages of one device, where a V turns, do not receive."""
    turned = list(stages)
    for place, stage in enumerate(stages):
        if schedule in _V_SHAPED and first + place == pp:
            turned[place] = replace(stage, forward_s=stage.forward_s - stage.received_s, received_s=0.0)
        elif schedule in _V_SHAPED and first + place == pp - 1:
            turned[place] = replace(stage, backward_s=stage.backward_s - stage.waited_s, waited_s=0.0)
    return turned


def plain_order(schedule: str, pp: int, micro_batches: int, chunks: int, device: int) -> list[PlainPass]:
    """Passes of one device of a pipeline, one after the other."""
    if schedule == "zb-v":
        return _zero_bubble_v_order(pp, micro_batches, device)
    if schedule == "dualpipe-v":
        return _dual_pipe_v_order(pp, micro_batches, device)
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


class _Counted:
    """Passes of one device, each with the next microbatch of its kind and chunk."""

    def __init__(self) -> None:
        self.passes: list[PlainPass] = []
        self.counts = {(kind, chunk): 0 for kind in "FBW" for chunk in (0, 1)}
        self.left: list[tuple[int, int]] = []

    def add(self, *names: str) -> None:
        """Add passes: "B1" is a backward of chunk 1, "W" the weights of the backward that has waited longest."""
        for name in names:
            kind = name[0]
            if name == "W":
                chunk, batch = self.left.pop(0)
                self.counts["W", chunk] += 1
            else:
                chunk = int(name[1])
                batch = self.counts["B" if kind == "X" else kind, chunk]
                for counted in "BW" if kind == "X" else kind:
                    self.counts[counted, chunk] += 1
            if kind == "B":
                self.left.append((chunk, batch))
            self.passes.append((kind, chunk, batch))


def _zero_bubble_v_order(pp: int, micro_batches: int, device: int) -> list[PlainPass]:
    """Passes of ZB-V: those of as many microbatches as fill the pipeline, without the ones that there are not."""
    row, filled = _Counted(), max(micro_batches, 2 * pp - 1)
    done = row.counts
    while done["F", 0] < 2 * (pp - device) - 1:
        row.add("F0")
    for _ in range(device):
        row.add("F1", "F0")
    while done["F", 1] < pp:
        row.add("F1", "B1", "W1")
    while done["F", 1] < filled:
        if done["F", 0] < filled:
            row.add("F0")
        row.add("B0", "W0", "F1", "B1", "W1")
    while done["B", 1] < filled:
        row.add("B0", "B1")
    while done["B", 0] < filled:
        row.add("B0", "W0")
    for name in ("W1", "W0"):
        while done["W", int(name[1])] < filled:
            row.add(name)
    return [each for each in row.passes if each[2] < micro_batches]


def _dual_pipe_v_order(pp: int, micro_batches: int, device: int) -> list[PlainPass]:
    """Passes of DualPipeV, whose forwards and backwards stand side by side in the middle."""
    row = _Counted()
    done = row.counts
    for _ in range(device + 1, pp):
        row.add("F0", "F0")
    for _ in range(device + 1):
        row.add("F0", "F1")
    for _ in range(device + 1, pp):
        row.add("B1", "W", "F1")
    while done["F", 0] < micro_batches:
        row.add("F0", "X1", "F1", "X0")
    while done["F", 1] < micro_batches:
        row.add("X1", "F1", "X0")
    for turn in range(2 * (device + 1)):
        row.add(("X" if turn <= device else "B") + ("0" if turn % 2 else "1"))
    while done["B", 0] < micro_batches:
        row.add("W", "B0")
    while row.left:
        row.add("W")
    return row.passes


def plain_in_flight(schedule: str, pp: int, micro_batches: int, chunks: int, device: int, chunk: int) -> int:
    """The most microbatches whose forward pass ran on a chunk and whose last backward pass did not."""
    last = _last_kind(schedule)
    held = most = 0
    for kind, pass_chunk, _ in plain_order(schedule, pp, micro_batches, chunks, device):
        if pass_chunk == chunk:
            held += (kind == "F") - (kind in (last, "X"))
            most = max(most, held)
    return most


def _last_kind(schedule: str) -> str:
    """The pass that ends a microbatch on a stage."""
    return "W" if schedule == "zero-bubble" or schedule in _V_SHAPED else "B"


def plain_simulation(schedule: str, pp: int, micro_batches: int, stages: Sequence[PlainStage]) -> float:
    """Seconds of a step in which every device waits for what its next pass needs."""
    chunks, stages = len(stages) // pp, without_turn(schedule, pp, stages)
    places = [plain_stages_of(schedule, pp, len(stages), device) for device in range(pp)]
    on_device = [[stages[place] for place in held] for held in places]
    ends_s = _pass_ends_s(schedule, pp, micro_batches, stages)
    last = _last_kind(schedule)
    reduced_s = []
    for device in range(pp):
        network_s = -math.inf
        for chunk in range(chunks - 1, -1, -1):
            stage = on_device[device][chunk]
            finished_s = max(ends_s[last, places[device][chunk], batch] for batch in range(micro_batches))
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
                stage = plain_stages_of(schedule, pp, len(stages), device)[chunk]
                needed = _needed_pass(kind, stage, batch, len(stages))
                if needed is not None and needed not in ends_s:
                    break
                times = stages[stage]
                both_s = times.backward_s + times.weight_s
                takes_s = {"F": times.forward_s, "B": times.backward_s, "W": times.weight_s, "X": both_s}[kind]
                clock_s[device] = max(clock_s[device], ends_s[needed] if needed else 0.0) + takes_s
                for ended in "BW" if kind == "X" else kind:
                    ends_s[ended, stage, batch] = clock_s[device]
                waiting[device].pop()
    return ends_s


def _needed_pass(kind: str, stage: int, batch: int, stages: int) -> tuple[str, int, int] | None:
    """The pass whose result a pass needs, as (kind, stage, microbatch)."""
    if kind == "F":
        return ("F", stage - 1, batch) if stage else None
    if kind in "BX":
        return ("B", stage + 1, batch) if stage + 1 < stages else ("F", stage, batch)
    return ("B", stage, batch)
