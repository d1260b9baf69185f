"""Strategies that a problem offers, and their pipelines, written a second time, for verification, without numpy.

Pipelines run one pass after the other:

    order of a device's passes         `plain_order`
    microbatches that a stage holds    `plain_in_flight`
    seconds of a step                  `plain_simulation`

Strategies and stages are listed one by one. `phaze.place` lists them as columns of numpy arrays, several in a row where
it can. Here every combination is tried against the rules, which are written out once more (`plain_strategies`,
`are_offered_stages`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from phaze.parallelism import ALL_DEVICES, Parallelism, PipelineSchedule
from phaze.place import PlacementProblem

__all__ = [
    "PlainStage",
    "are_offered_stages",
    "device_bytes",
    "is_offered_device_count",
    "plain_device",
    "plain_downsets",
    "plain_in_flight",
    "plain_order",
    "plain_simulation",
    "plain_stages_of",
    "plain_strategies",
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


def plain_strategies(problem: PlacementProblem) -> Iterator[Parallelism]:
    """Every strategy that the choices, the target and the batch allow, and that the devices may suffice for."""
    copies = range(1, min(problem.cluster.device_count, problem.micro_batches) + 1)
    for tp, dp, (schedule, chunks) in itertools.product(problem.tp_degrees, copies, _schedules(problem)):
        replicas, micro_batches = dp * problem.cp, -(-problem.micro_batches // dp)
        if problem.choices.dp and dp not in problem.choices.dp:
            continue
        if problem.capabilities.needs_several_copies and replicas == 1:
            continue
        if problem.capabilities.needs_single_micro_batch and micro_batches > 1:
            continue
        if (problem.needs_even_micro_batches and problem.micro_batches % dp) or replicas % problem.ep:
            continue
        for pp in _depths(problem, schedule, chunks):
            needs_full = schedule in problem.capabilities.needs_micro_batches_per_stage
            if (needs_full and problem.micro_batches // dp < pp * chunks) or not _runs(schedule, pp, micro_batches):
                continue
            if replicas * pp * (1 if problem.capabilities.allows_mixed_tp else tp) > problem.cluster.device_count:
                continue
            for zero, shard in _sharding(problem, tp, replicas, schedule):
                yield Parallelism(
                    dp=dp,
                    cp=problem.cp,
                    ep=problem.ep,
                    tp=tp,
                    pp=pp,
                    zero=zero,
                    shard=shard,
                    schedule=schedule,
                    chunks=chunks,
                    offload=problem.offload,
                )


def _schedules(problem: PlacementProblem) -> list[tuple[PipelineSchedule, int]]:
    """Schedules with the numbers of stages that each device may have."""
    schedules = [(PipelineSchedule.NONE, 1)]
    for kind in problem.choices.schedule:
        if kind in problem.capabilities.schedules:
            chunk_counts = problem.choices.chunks if kind is PipelineSchedule.INTERLEAVED else (1,)
            if kind in (PipelineSchedule.ZERO_BUBBLE_V, PipelineSchedule.DUAL_PIPE_V):
                chunk_counts = (2,)
            schedules += [(kind, chunks) for chunks in chunk_counts]
    return schedules


def _runs(schedule: PipelineSchedule, pp: int, micro_batches: int) -> bool:
    """Whether a schedule has an order for so many microbatches on so many devices."""
    if schedule is PipelineSchedule.INTERLEAVED:
        return micro_batches % pp == 0
    return schedule is not PipelineSchedule.DUAL_PIPE_V or micro_batches >= 2 * pp


def _depths(problem: PlacementProblem, schedule: PipelineSchedule, chunks: int) -> list[int]:
    """Every pp that the layers and the choices allow."""
    most = len(problem.graph.layers) // chunks
    depths = [1] if schedule is PipelineSchedule.NONE else range(2, most + 1)
    return [pp for pp in depths if not problem.choices.pp or pp in problem.choices.pp]


def _sharding(
    problem: PlacementProblem, tp: int, replicas: int, schedule: PipelineSchedule
) -> Iterator[tuple[int, int | str]]:
    """ZeRO stages, and the devices over which each may divide states; a single copy has nothing to divide."""
    capabilities = problem.capabilities
    stages = sorted(
        zero
        for zero in problem.choices.zero
        if zero in capabilities.zero_stages
        and (schedule is PipelineSchedule.NONE or capabilities.supports(schedule, zero))
    )
    for zero in stages if replicas > 1 else stages[:1]:
        yield from ((zero, shard) for shard in (_shards(problem, tp, replicas, zero) if zero else [ALL_DEVICES]))


def _shards(problem: PlacementProblem, tp: int, replicas: int, zero: int) -> list[int | str]:
    """Every group over which ZeRO may shard: powers of two, as many as fill a level of the network, and all."""
    runs = problem.capabilities
    if problem.choices.shard is not None:
        # Groups that are asked for of a target that has none are priced all the same.
        return [
            size
            for size in problem.choices.shard
            if size in (ALL_DEVICES, replicas)
            or (
                replicas % int(size) == 0
                and (
                    not runs.allows_shard_groups or runs.runs_groups(int(size), zero=zero, cp=problem.cp, ep=problem.ep)
                )
            )
        ]
    if not runs.allows_shard_groups:
        return [ALL_DEVICES]
    levels = [level.size for level in problem.cluster.levels]
    blocks = [math.prod(levels[: depth + 1]) for depth in range(len(levels))]
    return [
        ALL_DEVICES,
        *(
            size
            for size in range(2, replicas)
            if replicas % size == 0
            and (size & (size - 1) == 0 or size * tp in blocks)
            and (size % problem.ep == 0 or problem.ep % size == 0)
            and runs.runs_groups(size, zero=zero, cp=problem.cp, ep=problem.ep)
        ),
    ]


def plain_downsets(problem: PlacementProblem, most: int) -> list[frozenset[int]]:
    """Every set of layers that may be placed before a cut, smaller ones first; nothing where there are too many."""
    layers = range(len(problem.graph.layers))
    needed: dict[int, set[int]] = {layer: set() for layer in layers}
    for flow in problem.graph.flows:
        for consumer in flow.consumers:
            needed[consumer].add(flow.producer)
    known: set[frozenset[int]] = {frozenset()}
    edge = known
    while edge:
        edge = {
            placed | {layer} for placed in edge for layer in layers if layer not in placed and needed[layer] <= placed
        } - known
        known = known | edge
        if len(known) > most:
            return []
    return sorted(known, key=lambda placed: (len(placed), sorted(placed)))


def are_offered_stages(problem: PlacementProblem, chunks: int, stages: Sequence[frozenset[int]]) -> bool:
    """Whether the target runs stages of these layers, and chunks are nearly equally long."""
    body = problem.graph.body
    if not problem.capabilities.allows_uneven_stages and len({sum(body[each] for each in s) for s in stages}) > 1:
        return False
    sizes = [len(stage) for stage in stages]
    is_uneven = max(sizes) > 1.5 * min(sizes) and sum(sizes) - len(sizes) > 2
    return chunks == 1 or (max(sizes) - min(sizes) <= 1 and not is_uneven)


def is_offered_device_count(problem: PlacementProblem, strategy: Parallelism, stages: Sequence[PlainStage]) -> bool:
    """Whether the devices of all stages are there, and none is left over where none may be idle."""
    places = range(strategy.pp)
    each = [max(stage.devices for stage in stages[place :: strategy.pp]) for place in places]
    used, device_count = strategy.replicas * sum(each), problem.cluster.device_count
    return used == device_count or (used < device_count and problem.capabilities.allows_idle_devices)


def device_bytes(chunks: Sequence[PlainStage], in_flight: Sequence[int]) -> float:
    """What a device needs for its chunks: all that they hold and stash, and the largest scratch."""
    held = sum(
        sum(chunk.held_bytes.values()) + count * chunk.stash_bytes
        for chunk, count in zip(chunks, in_flight, strict=True)
    )
    return held + max(chunk.scratch_bytes for chunk in chunks)
