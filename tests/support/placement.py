"""Placement written a second time: plainly, slowly, and without tables or bounds."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from phaze.capabilities import PipelineSchedule
from phaze.cost import Collective, price_collective, price_works, update_work
from phaze.hardware import Cluster, InterconnectLevel
from phaze.hardware.dtypes import dtype_bytes
from phaze.hardware.energy import energy_model
from phaze.place.problem import PlacementProblem
from phaze.place.profile import RecomputeMode

ENERGY = energy_model()


@dataclass(kw_only=True)
class PlainStage:
    """One stage's seconds and bytes."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    exposed: float = 0.0
    reduction: float = 0.0
    tie: float = 0.0
    finish: float = 0.0
    held: float = 0.0
    scratch: float = 0.0
    stash: float = 0.0
    devices: int = 1


def plain_order(schedule: str, devices: int, batches: int, chunks: int, device: int) -> list[tuple[str, int, int]]:
    """Passes (kind, chunk, microbatch) of one device, one after the other."""
    if schedule == "gpipe":
        return [("F", 0, batch) for batch in range(batches)] + [("B", 0, batch) for batch in range(batches)]
    forwards, backwards = [], []
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
    if schedule != "zero-bubble":
        return passes
    with_weights = []
    for kind, chunk, batch in passes:
        with_weights.append((kind, chunk, batch))
        if kind == "B" and batch >= device:
            with_weights.append(("W", 0, batch - device))
    done = sum(kind == "W" for kind, _, _ in with_weights)
    return with_weights + [("W", 0, batch) for batch in range(done, batches)]


def plain_in_flight(schedule: str, devices: int, batches: int, chunks: int, device: int, chunk: int) -> int:
    """The most microbatches whose forward ran and whose last backward pass did not."""
    last = "W" if schedule == "zero-bubble" else "B"
    held = most = 0
    for kind, of, _ in plain_order(schedule, devices, batches, chunks, device):
        held += (kind == "F" and of == chunk) - (kind == last and of == chunk)
        most = max(most, held)
    return most


def plain_simulation(schedule: str, devices: int, batches: int, stages: list[PlainStage]) -> float:
    """Seconds per batch: every device waits for what its next pass needs."""
    chunks = len(stages) // devices
    left = [plain_order(schedule, devices, batches, chunks, device) for device in range(devices)]
    clock = [0.0] * devices
    end: dict[tuple[str, int, int], float] = {}
    while any(left):
        for device in range(devices):
            while left[device]:
                kind, chunk, batch = left[device][0]
                stage = chunk * devices + device
                if kind == "F":
                    needs = ("F", stage - 1, batch) if stage else None
                elif kind == "B":
                    needs = ("B", stage + 1, batch) if stage + 1 < len(stages) else ("F", stage, batch)
                else:
                    needs = ("B", stage, batch)
                if needs is not None and needs not in end:
                    break
                times = stages[stage]
                takes = {"F": times.forward, "B": times.backward, "W": times.weight}[kind]
                clock[device] = max(clock[device], end[needs] if needs else 0.0) + takes
                end[kind, stage, batch] = clock[device]
                left[device].pop(0)
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


@dataclass
class PlainCosts:
    """Stage costs of one choice of width, pipelines, ZeRO stage and depth, layer by layer."""

    problem: PlacementProblem
    width: int
    pipelines: int
    zero: int
    devices: int
    split: bool
    mixed: bool
    known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def _price(self, collective: str, size: float, stride: int) -> float:
        if self.pipelines == 1 or size <= 0:
            return 0.0
        key = (collective, size, stride)
        if key not in self.known:
            self.known[key] = self._asked_price(collective, size, stride)
        return self.known[key]

    def _asked_price(self, collective: str, size: float, stride: int) -> float:
        cluster = self.problem.cluster
        used = self.pipelines * self.width * self.devices
        part = Cluster(cluster.accelerator, used, self._levels(used))
        return float(
            price_collective(
                collective, size, part, self.pipelines, stride, calibration=self.problem.calibration, energy=ENERGY
            ).seconds
        )

    def _levels(self, used: int) -> tuple[InterconnectLevel, ...]:
        levels = self.problem.cluster.levels
        joined = math.prod(level.size for level in levels)
        if joined >= used:
            return levels
        return (
            *levels[:-1],
            InterconnectLevel(levels[-1].size * used, levels[-1].bandwidth_bytes_per_s, levels[-1].latency_s),
        )

    def _between(self, collective: str, size: float, members: int) -> float:
        if self.devices == 1 or size <= 0:
            return 0.0
        key = (collective, size, members, "between")
        if key not in self.known:
            self.known[key] = self._asked_between(collective, size, members)
        return self.known[key]

    def _asked_between(self, collective: str, size: float, members: int) -> float:
        cluster, stride = self.problem.cluster, self.pipelines * self.width
        used = stride * self.devices
        joined = math.prod(level.size for level in cluster.levels)
        far = cluster.levels[-1]
        if used <= joined:
            far = Cluster(cluster.accelerator, used, cluster.levels).axis_levels(self.devices, stride)[-1]
        level = InterconnectLevel(members, far.bandwidth_bytes_per_s, far.latency_s)
        part = Cluster(cluster.accelerator, members, (level,))
        return float(
            price_collective(
                collective, size, part, members, calibration=self.problem.calibration, energy=ENERGY
            ).seconds
        )

    def _cut(self, placed: set[int]) -> float:
        total = 0.0
        for flow in self.problem.graph.flows:
            if flow.producer in placed and not set(flow.consumers) <= placed:
                total += self._profile(flow.producer).outputs[flow.output].size_bytes
        return total

    def _profile(self, layer: int, mode: RecomputeMode | None = None):  # type: ignore[no-untyped-def]
        return self.problem.profile(layer, self.width, mode or self.problem.recompute_modes[0])

    def stage(self, before: set[int], layers: set[int], mode: RecomputeMode) -> PlainStage:
        """One stage, given what comes before it."""
        recipe, at = self.problem.recipe, self.problem.accelerator
        order = sorted(layers)
        profiles = {layer: self._profile(layer, mode) for layer in order}
        sliced = any(profile.is_tensor_parallel for profile in profiles.values())
        devices = self.width if sliced or not self.mixed else 1
        cut_in, cut_out = self._cut(before), self._cut(before | layers)
        receive = self._between(Collective.POINT_TO_POINT, cut_in, 2)
        returned = self._between(Collective.POINT_TO_POINT, cut_out, 2)
        total = {
            name: sum(float(getattr(profile, name).value[at]) for profile in profiles.values())
            for name in ("forward_s", "backward_input_s", "backward_weight_s", "recompute_s")
        }
        reduction_bytes = dtype_bytes(recipe.reduction_dtype)
        gather = scatter = 0.0
        for profile in profiles.values():
            if self.zero == 3:
                gather += self._price(Collective.ALL_GATHER, profile.parameters * recipe.parameter_bytes, devices)
            if self.zero >= 2:
                scatter += self._price(Collective.REDUCE_SCATTER, profile.parameters * reduction_bytes, devices)
        start = max(returned, total["recompute_s"])
        result = PlainStage(devices=devices)
        result.forward = receive + max(total["forward_s"], gather)
        both = total["backward_input_s"] + total["backward_weight_s"]
        result.backward = start + max(both, gather + scatter)
        if self.split:
            result.backward = start + max(total["backward_input_s"], gather)
            result.weight = max(total["backward_weight_s"], scatter)
        self._after(result, order, profiles, devices)
        self._memory(result, before, order, profiles, cut_in + cut_out)
        return result

    def _ties(self, order: list[int]) -> dict[str, tuple[float, float, int, int]]:
        """Per tie with a layer here: parameters held, those of all layers here, layers here, layers in all."""
        found = {}
        for name, members in self.problem.graph.ties.items():
            sizes = [self._profile(layer).tied_parameters.get(name, 0.0) for layer in set(members) & set(order)]
            if sizes:
                found[name] = (max(sizes), sum(sizes), len(sizes), len(set(members)))
        return found

    def _after(self, result: PlainStage, order: list[int], profiles, devices: int) -> None:  # type: ignore[no-untyped-def]
        recipe, at, ties = self.problem.recipe, self.problem.accelerator, self._ties(order)
        size = dtype_bytes(recipe.reduction_dtype)
        if self.zero < 2:
            kind = Collective.ALL_REDUCE if self.zero == 0 else Collective.REDUCE_SCATTER
            free = ready = 0.0
            for layer in reversed(order):
                profile = profiles[layer]
                ready += float(profile.backward_weight_s.value[at])
                if not self.split:
                    ready += float(profile.backward_input_s.value[at])
                own = profile.parameters - sum(profile.tied_parameters.values())
                takes = self._price(kind, own * size, devices)
                result.reduction += takes
                free = max(free, ready) + takes
            result.exposed = free - ready if self.problem.overlaps_reduction else result.reduction
            for parameters, _, _, _ in ties.values():
                takes = self._price(kind, parameters * size, devices)
                result.exposed += takes
                result.reduction += takes
        for parameters, _, here, members in ties.values():
            if here < members:
                result.tie += self._between(Collective.ALL_REDUCE, parameters * size, min(members, self.devices))
        parameters = self._parameters(order)
        if ("update",) not in self.known:
            works, chip = [update_work(recipe, 1 << 30)], self.problem.cluster.accelerator
            estimate = price_works(works, chip, calibration=self.problem.calibration, energy=ENERGY)
            self.known["update",] = float(estimate.spread_s[0, 0]) / (1 << 30)
        result.finish = parameters * self.known["update",] / (self.pipelines if self.zero >= 1 else 1)
        if self.zero in (1, 2):
            result.finish += self._price(Collective.ALL_GATHER, parameters * recipe.parameter_bytes, devices)

    def _parameters(self, order: list[int]) -> float:
        repeats = sum(together - held for held, together, _, _ in self._ties(order).values())
        return sum(self._profile(layer).parameters for layer in order) - repeats

    def _memory(self, result: PlainStage, before: set[int], order: list[int], profiles, received: float) -> None:  # type: ignore[no-untyped-def]
        recipe, d = self.problem.recipe, self.pipelines
        parameters = self._parameters(order)
        result.held = parameters * recipe.parameter_bytes / (d if self.zero == 3 else 1)
        result.held += parameters * recipe.gradient_bytes / (d if self.zero >= 2 else 1)
        result.held += parameters * recipe.optimizer_bytes / (d if self.zero >= 1 else 1)
        result.held += sum(profile.frozen_bytes for profile in profiles.values())
        largest = max(profile.parameters for profile in profiles.values())
        result.scratch = max(profile.peak_working_bytes for profile in profiles.values()) + received
        if d > 1 and self.zero >= 2:
            result.scratch += largest * recipe.gradient_bytes
        if d > 1 and self.zero == 3:
            result.scratch += 2 * largest * recipe.parameter_bytes
        result.stash = sum(profile.stashed_bytes for profile in profiles.values())
        placed = before | set(order)
        for flow in self.problem.graph.flows:
            readers = set(flow.consumers)
            if flow.producer in before and not readers <= placed and not readers & set(order):
                result.stash += self._profile(flow.producer).outputs[flow.output].size_bytes


def splits(
    problem: PlacementProblem, parts: int, before: frozenset[int] = frozenset()
) -> Iterator[tuple[frozenset[int], ...]]:
    """Every way to cut the layers into so many stages in order, no tensor flowing backward."""
    layers = range(len(problem.graph.layers))
    rest = [layer for layer in layers if layer not in before]
    if parts == 0:
        if not rest:
            yield ()
        return
    for count in range(1, len(rest) - parts + 2):
        for chosen in itertools.combinations(rest, count):
            stage = frozenset(chosen)
            placed = before | stage
            if all(flow.producer in placed for flow in problem.graph.flows if set(flow.consumers) & stage):
                for others in splits(problem, parts - 1, placed):
                    yield (stage, *others)


def _is_even(problem: PlacementProblem, stages: tuple[frozenset[int], ...]) -> bool:
    keys = [layer.key for layer in problem.graph.layers]
    body = max(dict.fromkeys(keys), key=keys.count)
    counts = [sum(keys[layer] == body for layer in stage) for stage in stages]
    return len(set(counts)) == 1


def brute_force(problem: PlacementProblem) -> dict[tuple[object, ...], float]:
    """The least simulated time of every choice of degrees that something fits, by trying everything."""
    capabilities, cluster = problem.capabilities, problem.cluster
    found: dict[tuple[object, ...], float] = {}
    shapes: list[tuple[PipelineSchedule | None, int]] = [(None, 1)]
    for kind in problem.schedules:
        if kind in capabilities.schedules:
            shapes += [(kind, chunks) for chunks in (problem.chunk_counts if kind == "interleaved-1f1b" else (1,))]
    layers = len(problem.graph.layers)
    for width, d, zero, (schedule, chunks) in itertools.product(
        problem.widths, range(1, min(cluster.device_count, problem.micro_batches) + 1), problem.zero_stages, shapes
    ):
        if zero not in capabilities.zero_stages or (problem.pipelines and d not in problem.pipelines):
            continue
        stages = [one for one in problem.zero_stages if schedule is None or capabilities.supports(schedule, one)]
        if d == 1 and zero > min(set(stages) & capabilities.zero_stages, default=zero):
            continue
        if problem.needs_even_micro_batches and problem.micro_batches % d:
            continue
        if schedule is not None and not capabilities.supports(schedule, zero):
            continue
        rounds = -(-problem.micro_batches // d)
        for devices in [1] if schedule is None else range(2, layers // chunks + 1):
            if problem.stage_counts and devices not in problem.stage_counts:
                continue
            if chunks > 1 and rounds % devices:
                continue
            best = _best_of(problem, width, d, zero, schedule, chunks, devices, rounds)
            if best < math.inf:
                found[width, d, devices, chunks, schedule, zero] = best
    return found


def _best_of(
    problem: PlacementProblem,
    width: int,
    d: int,
    zero: int,
    schedule: PipelineSchedule | None,
    chunks: int,
    devices: int,
    rounds: int,
) -> float:
    capabilities, cluster, layers = problem.capabilities, problem.cluster, len(problem.graph.layers)
    name = str(schedule or "1f1b")
    mixed = capabilities.allows_mixed_widths and chunks == 1
    costs = PlainCosts(problem, width, d, zero, devices, name == "zero-bubble", mixed)
    flight = [
        [plain_in_flight(name, devices, rounds, chunks, device, chunk) for chunk in range(chunks)]
        for device in range(devices)
    ]
    best = math.inf
    if not mixed and d * width * devices > cluster.device_count:
        return best
    stage_costs: dict[tuple[frozenset[int], frozenset[int]], list[PlainStage]] = {}
    for parts in splits(problem, devices * chunks):
        if not capabilities.allows_uneven_stages and not _is_even(problem, parts):
            continue
        sizes = [len(part) for part in parts]
        is_uneven = max(sizes) > 1.5 * min(sizes) and layers - len(sizes) > 2
        if chunks > 1 and (max(sizes) - min(sizes) > 1 or is_uneven):
            continue
        before = [frozenset().union(*parts[:index]) for index in range(len(parts))]
        for key in zip(before, parts, strict=True):
            if key not in stage_costs:
                stage_costs[key] = [costs.stage(set(key[0]), set(key[1]), mode) for mode in problem.recompute_modes]
        options = [stage_costs[key] for key in zip(before, parts, strict=True)]
        needs = d * sum(
            max(options[index][0].devices for index in range(device, len(parts), devices)) for device in range(devices)
        )
        if needs > cluster.device_count or (needs < cluster.device_count and not capabilities.allows_idle_devices):
            continue
        for stages in itertools.product(*options):
            if all(
                sum(
                    stages[chunk * devices + device].held
                    + flight[device][chunk] * stages[chunk * devices + device].stash
                    for chunk in range(chunks)
                )
                + max(stages[chunk * devices + device].scratch for chunk in range(chunks))
                <= problem.usable_bytes
                for device in range(devices)
            ):
                best = min(best, plain_simulation(name, devices, rounds, list(stages)))
    return best
