"""Placement written a second time, for checking: plainly, slowly, layer by layer, without tables, bounds or numpy.

`phaze.place` finds a placement with prefix sums over all stages and simulates many candidates at once; here one given
placement is added up and simulated one pass after the other. Only prices of single collectives and of the update are
shared with it. The rules are those of `phaze.place.model.stage_costs`, `memory`, `orders` and `simulate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from phaze.cost import Collective, price_collective, price_works, update_work
from phaze.hardware import Cluster, InterconnectLevel
from phaze.hardware.area_energy import EnergyModel, energy_model
from phaze.hardware.element_types import dtype_bytes
from phaze.ir import RecomputeMode
from phaze.place import LayerProfile, PlacementProblem

__all__ = ["PlainCosts", "PlainStage", "plain_in_flight", "plain_order", "plain_simulation"]


@dataclass(slots=True, kw_only=True)
class PlainStage:
    """One stage's seconds and bytes."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    exposed: float = 0.0
    reduction: float = 0.0
    tie: float = 0.0
    finish: float = 0.0
    stash: float = 0.0
    devices: int = 1
    held: dict[str, float] = field(default_factory=dict)
    working: float = 0.0
    buffers: float = 0.0

    @property
    def scratch(self) -> float:
        """What chunks of one device share."""
        return self.working + self.buffers


PlainPass = tuple[str, int, int]
"""Kind (F, B or W), chunk, microbatch."""


def plain_order(schedule: str, devices: int, batches: int, chunks: int, device: int) -> list[PlainPass]:
    """Passes of one device, one after the other."""
    if schedule == "gpipe":
        return [("F", 0, batch) for batch in range(batches)] + [("B", 0, batch) for batch in range(batches)]
    forwards: list[PlainPass] = []
    backwards: list[PlainPass] = []
    group = devices if chunks > 1 else batches
    for start in range(0, batches, group):
        for chunk in range(chunks):
            for batch in range(start, min(start + group, batches)):
                forwards.append(("F", chunk, batch))
                backwards.append(("B", chunks - 1 - chunk, batch))
    ahead = devices - 1 - device
    first = min(2 * ahead + (chunks - 1) * devices if chunks > 1 else ahead, len(forwards))
    passes = forwards[:first]
    for turn, forward in enumerate(forwards[first:]):
        passes += [forward, backwards[turn]]
    passes += backwards[len(forwards) - first :]
    return passes if schedule != "zero-bubble" else _with_weights(passes, batches, device)


def _with_weights(passes: Sequence[PlainPass], batches: int, device: int) -> list[PlainPass]:
    """A device delays each W by as many backwards as devices come before it."""
    found: list[PlainPass] = []
    for kind, chunk, batch in passes:
        found.append((kind, chunk, batch))
        if kind == "B" and batch >= device:
            found.append(("W", 0, batch - device))
    done = sum(kind == "W" for kind, _, _ in found)
    return found + [("W", 0, batch) for batch in range(done, batches)]


def plain_in_flight(schedule: str, devices: int, batches: int, chunks: int, device: int, chunk: int) -> int:
    """The most microbatches whose forward ran and whose last backward pass did not."""
    last = "W" if schedule == "zero-bubble" else "B"
    held = most = 0
    for kind, of, _ in plain_order(schedule, devices, batches, chunks, device):
        held += (kind == "F" and of == chunk) - (kind == last and of == chunk)
        most = max(most, held)
    return most


def plain_simulation(schedule: str, devices: int, batches: int, stages: Sequence[PlainStage]) -> float:
    """Seconds per batch: every device waits for what its next pass needs."""
    chunks = len(stages) // devices
    end = _pass_ends(schedule, devices, batches, stages)
    last = "W" if schedule == "zero-bubble" else "B"
    reduced = []
    for device in range(devices):
        network = -math.inf
        for chunk in range(chunks - 1, -1, -1):
            stage = stages[chunk * devices + device]
            finished = max(end[last, chunk * devices + device, batch] for batch in range(batches))
            network = max(finished + stage.exposed, network + stage.reduction)
        reduced.append(network)
    tie = [sum(stages[chunk * devices + device].tie for chunk in range(chunks)) for device in range(devices)]
    meeting = max((reduced[device] for device in range(devices) if tie[device] > 0), default=0.0)
    ends = []
    for device in range(devices):
        settled = meeting + tie[device] if tie[device] > 0 else reduced[device]
        ends.append(settled + sum(stages[chunk * devices + device].finish for chunk in range(chunks)))
    return max(ends)


def _pass_ends(
    schedule: str, devices: int, batches: int, stages: Sequence[PlainStage]
) -> dict[tuple[str, int, int], float]:
    """When each (kind, stage, microbatch) ends."""
    chunks = len(stages) // devices
    left = [plain_order(schedule, devices, batches, chunks, device)[::-1] for device in range(devices)]
    clock = [0.0] * devices
    end: dict[tuple[str, int, int], float] = {}
    while any(left):
        for device in range(devices):
            while left[device]:
                kind, chunk, batch = left[device][-1]
                stage = chunk * devices + device
                needs = _needs(kind, stage, batch, len(stages))
                if needs is not None and needs not in end:
                    break
                times = stages[stage]
                takes = {"F": times.forward, "B": times.backward, "W": times.weight}[kind]
                clock[device] = max(clock[device], end[needs] if needs else 0.0) + takes
                end[kind, stage, batch] = clock[device]
                left[device].pop()
    return end


def _needs(kind: str, stage: int, batch: int, stages: int) -> tuple[str, int, int] | None:
    if kind == "F":
        return ("F", stage - 1, batch) if stage else None
    if kind == "B":
        return ("B", stage + 1, batch) if stage + 1 < stages else ("F", stage, batch)
    return ("B", stage, batch)


@dataclass(slots=True)
class PlainCosts:
    """Stage costs of one choice of width, pipelines, ZeRO stage and depth, layer by layer."""

    problem: PlacementProblem
    tp: int
    dp: int
    zero: int
    devices: int
    split: bool
    mixed: bool
    energy: EnergyModel = field(default_factory=energy_model)
    known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def stage(self, before: set[int], layers: set[int], mode: RecomputeMode) -> PlainStage:
        """One stage, given what comes before it."""
        recipe, at = self.problem.recipe, self.problem.accelerator
        order = sorted(layers)
        profiles = {layer: self._profile(layer, mode) for layer in order}
        sliced = any(profile.is_tensor_parallel for profile in profiles.values())
        devices = self.tp if sliced or not self.mixed else 1
        cut_in, cut_out = self._cut(before), self._cut(before | layers)
        receive, returned = self._transfer(before), self._transfer(before | layers)
        total = {
            name: math.fsum(float(getattr(profile, name).value[at]) for profile in profiles.values())
            for name in ("forward_s", "backward_input_s", "backward_weight_s", "recompute_s")
        }
        gather = scatter = 0.0
        for profile in profiles.values():
            if self.zero == 3:
                gather += self._price(Collective.ALL_GATHER, profile.parameters * recipe.parameter_bytes, devices)
            if self.zero >= 2:
                size = profile.parameters * dtype_bytes(recipe.reduction_dtype)
                scatter += self._price(Collective.REDUCE_SCATTER, size, devices)
        start = max(returned, total["recompute_s"])
        result = PlainStage(devices=devices)
        together = self.problem.calibration.together_s
        result.forward = receive + together(total["forward_s"], gather)
        both = total["backward_input_s"] + total["backward_weight_s"]
        result.backward = start + together(both, gather + scatter)
        if self.split:
            result.backward = start + together(total["backward_input_s"], gather)
            result.weight = together(total["backward_weight_s"], scatter)
        self._after(result, order, profiles, devices)
        self._memory(result, before, order, profiles, cut_in + cut_out)
        return result

    def _profile(self, layer: int, mode: RecomputeMode | None = None) -> LayerProfile:
        return self.problem.profile(layer, self.tp, mode or self.problem.choices.recompute[0])

    def _price(self, collective: Collective, size: float, stride: int) -> float:
        """Over the copies of a stage."""
        if self.dp == 1 or size <= 0:
            return 0.0
        key = (collective, size, stride)
        if key not in self.known:
            cluster = self.problem.cluster
            used = self.dp * self.tp * self.devices
            part = Cluster(cluster.accelerator, used, self._levels(used))
            self.known[key] = self._seconds(collective, size, part, self.dp, stride)
        return self.known[key]

    def _seconds(
        self, collective: Collective, size: float, part: Cluster, members: int, stride: int = 1, is_inner: bool = True
    ) -> float:
        calibration = self.problem.calibration
        calibration = calibration if is_inner else replace(calibration, link=calibration.network)
        price = price_collective(collective, size, part, members, stride, calibration=calibration, energy=self.energy)
        return float(price.seconds)

    def _levels(self, used: int) -> tuple[InterconnectLevel, ...]:
        levels = self.problem.cluster.levels
        if math.prod(level.size for level in levels) >= used:
            return levels
        last = levels[-1]
        return (*levels[:-1], InterconnectLevel(last.size * used, last.bandwidth_bytes_per_s, last.latency_s))

    def _between(self, collective: Collective, size: float, members: int) -> float:
        """Between stages, on the links that reach farthest."""
        if self.devices == 1 or size <= 0:
            return 0.0
        key = (collective, size, members, "between")
        if key not in self.known:
            cluster, stride = self.problem.cluster, self.dp * self.tp
            used = stride * self.devices
            far = cluster.levels[-1]
            if used <= math.prod(level.size for level in cluster.levels):
                far = Cluster(cluster.accelerator, used, cluster.levels).axis_levels(self.devices, stride)[-1]
            level = InterconnectLevel(members, far.bandwidth_bytes_per_s, far.latency_s)
            part = Cluster(cluster.accelerator, members, (level,))
            is_inner = far.bandwidth_bytes_per_s == cluster.levels[0].bandwidth_bytes_per_s
            self.known[key] = self._seconds(collective, size, part, members, is_inner=is_inner)
        return self.known[key]

    def _transfer(self, placed: set[int]) -> float:
        """Seconds of what crosses a cut: sent by every device, or in parts that are gathered behind."""
        size, whole = self._cut(placed), self._cut(placed, only_whole=True)
        alone = self._between(Collective.POINT_TO_POINT, size, 2)
        if self.devices == 1 or self.tp == 1 or whole <= 0:
            return alone
        used = self.dp * self.tp * self.devices
        part = Cluster(self.problem.cluster.accelerator, used, self._levels(used))
        gather = self._seconds(Collective.ALL_GATHER, whole, part, self.tp)
        return min(alone, self._between(Collective.POINT_TO_POINT, size - whole + whole / self.tp, 2) + gather)

    def _cut(self, placed: set[int], *, only_whole: bool = False) -> float:
        """Bytes of tensors (or only of whole ones) made before a cut and read behind it."""
        total = 0.0
        for flow in self.problem.graph.flows:
            if flow.producer in placed and not set(flow.consumers) <= placed:
                tensor = self._profile(flow.producer).outputs[flow.output]
                total += tensor.size_bytes if tensor.is_whole or not only_whole else 0.0
        return total

    def _ties(self, order: Sequence[int]) -> dict[str, tuple[float, float, int, int]]:
        """Per tie with a layer here: parameters held, those of all layers here, layers here, layers in all."""
        found = {}
        for name, members in self.problem.graph.ties.items():
            sizes = [self._profile(layer).tied_parameters.get(name, 0.0) for layer in set(members) & set(order)]
            if sizes:
                found[name] = (max(sizes), sum(sizes), len(sizes), len(set(members)))
        return found

    def _after(self, result: PlainStage, order: Sequence[int], profiles: dict[int, LayerProfile], devices: int) -> None:
        """Reductions, ties and the update."""
        recipe, ties, spread = self.problem.recipe, self._ties(order), self._spread()
        size = dtype_bytes(recipe.reduction_dtype)
        if self.zero < 2:
            self._reduction(result, order, profiles, devices)
        result.tie += self._between(Collective.ALL_GATHER, spread * recipe.parameter_bytes, self.devices)
        result.tie += self._between(Collective.REDUCE_SCATTER, spread * size, self.devices)
        for parameters, _, here, members in ties.values():
            if here < members and not spread:
                result.tie += self._between(Collective.ALL_REDUCE, parameters * size, min(members, self.devices))
        parameters = self._parameters(order)
        result.finish = parameters * self._update_s() / (self.dp if self.zero >= 1 else 1)
        if self.zero in (1, 2):
            result.finish += self._price(Collective.ALL_GATHER, parameters * recipe.parameter_bytes, devices)

    def _reduction(
        self, result: PlainStage, order: Sequence[int], profiles: dict[int, LayerProfile], devices: int
    ) -> None:
        """Gradients layer by layer behind the last backward, the last layer first; tied ones at the end."""
        at, size = self.problem.accelerator, dtype_bytes(self.problem.recipe.reduction_dtype)
        kind = Collective.ALL_REDUCE if self.zero == 0 else Collective.REDUCE_SCATTER
        free = ready = 0.0
        for layer in reversed(order):
            profile = profiles[layer]
            ready += float(profile.backward_weight_s.value[at])
            if not self.split:
                ready += float(profile.backward_input_s.value[at])
            own = self._untied(layer) if not (self._spread() and self.problem.spread_layers[layer]) else 0.0
            takes = self._price(kind, own * size, devices)
            result.reduction += takes
            free = max(free, ready) + takes
        result.exposed = free - ready if self.problem.overlaps_reduction else result.reduction
        part = self.problem.calibration.overlap
        result.exposed = part * result.exposed + (1 - part) * result.reduction
        late = [parameters for parameters, _, _, _ in self._ties(order).values()]
        for parameters in [self._spread() / self.devices] if self._spread() else late:
            takes = self._price(kind, parameters * size, devices)
            result.exposed += takes
            result.reduction += takes

    def _update_s(self) -> float:
        if ("update",) not in self.known:
            works = [update_work(self.problem.recipe, 1 << 30, stack=self.problem.calibration.stack)]
            calibration = self.problem.calibration
            estimate = price_works(works, self.problem.cluster.accelerator, calibration=calibration, energy=self.energy)
            self.known["update",] = float(estimate.spread_s[0, 0]) / (1 << 30)
        return self.known["update",]

    def _untied(self, layer: int) -> float:
        profile = self._profile(layer)
        return profile.parameters - sum(profile.tied_parameters.values())

    def _spread(self) -> float:
        """Parameters that all stages hold in equal parts: of layers unlike most, and tied ones, each once."""
        spread = self.problem.spread_layers
        if self.devices == 1 or not spread.any():
            return 0.0
        layers = range(len(spread))
        shared = sum(held for held, _, _, _ in self._ties(layers).values())
        return sum(self._untied(layer) for layer in layers if spread[layer]) + shared

    def _parameters(self, order: Sequence[int]) -> float:
        if spread := self._spread():
            own = [layer for layer in order if not self.problem.spread_layers[layer]]
            return sum(self._untied(layer) for layer in own) + spread / self.devices
        repeats = sum(together - held for held, together, _, _ in self._ties(order).values())
        return sum(self._profile(layer).parameters for layer in order) - repeats

    def _memory(
        self,
        result: PlainStage,
        before: set[int],
        order: Sequence[int],
        profiles: dict[int, LayerProfile],
        received: float,
    ) -> None:
        recipe, d = self.problem.recipe, self.dp
        parameters = self._parameters(order)
        frozen = sum(profile.frozen_bytes for profile in profiles.values())
        result.held = {
            "parameters": parameters * recipe.parameter_bytes / (d if self.zero == 3 else 1) + frozen,
            "gradients": parameters * recipe.gradient_bytes / (d if self.zero >= 2 else 1),
            "optimizer": parameters * recipe.optimizer_bytes / (d if self.zero >= 1 else 1),
        }
        largest = max(profile.parameters for profile in profiles.values())
        stashed = peak = 0.0
        for layer in order:
            stashed += profiles[layer].stashed_bytes
            peak = max(peak, stashed + profiles[layer].peak_working_bytes)
        result.working = peak - stashed
        result.buffers = received + self._spread() * (recipe.parameter_bytes + recipe.gradient_bytes)
        if d > 1 and self.zero >= 2:
            result.buffers += largest * recipe.reduction_bytes
        if d > 1 and self.zero == 3:
            result.buffers += 2 * largest * recipe.parameter_bytes
        result.stash = stashed
        placed = before | set(order)
        for flow in self.problem.graph.flows:
            readers = set(flow.consumers)
            if flow.producer in before and not readers <= placed and not readers & set(order):
                result.stash += self._profile(flow.producer).outputs[flow.output].size_bytes
