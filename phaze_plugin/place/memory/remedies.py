"""Why nothing fits, and the remedies: the smallest single changes after which something does.

The reason is the plan that needs least memory: which of its devices are over, and by how much. If there is no plan at
all, `_reasons` says which fixed choices contradict the model, the batch or the target. Every remedy is a changed
problem whose least-memory plan was found to fit (`fits`). Of each kind, the first change that fits is taken. Remedies
are looked for when somebody asks for them: each asks for the least memory of several other problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from phaze.hardware.hardware_numbers import LARGEST_BYTES
from phaze.parallelism import ZERO_STAGES, PipelineSchedule
from phaze.place.memory.least_memory_plan import least_memory
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.search.parallelism_table import chunk_sizes
from phaze.place.search.prepared_problem import PreparedProblem
from phaze.place.simulation.placement import Placement, assemble
from phaze.profile.layer_profile import RecomputeMode
from phaze.tolerances import EQUAL_COPIES

__all__ = ["Infeasibility", "Remedy", "RemedyKind", "StageOver", "explain_infeasibility", "fits"]

_MOST_TIMES = 64
"""More devices are tried up to so many times those at hand: a larger factor is no remedy that anyone could follow."""

_DEVICE_STEPS = 64
"""The least number of devices is found to a 64th of those at hand. Each bisection asks for the least memory again."""


class RemedyKind(StrEnum):
    """What a remedy changes."""

    RECOMPUTE = "recompute"
    ZERO = "zero"
    STAGES = "stages"
    TP = "tp"
    MICRO_BATCH = "microbatch"
    DEVICES = "devices"
    MARGIN = "margin"
    HBM = "hbm"


@dataclass(frozen=True, slots=True)
class StageOver:
    """A place in the pipeline whose devices hold too much, and by how many bytes."""

    device: int
    over_bytes: float


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change after which something fits: what it is in words, and the changed problem."""

    kind: RemedyKind
    text: str
    problem: PlacementProblem


@dataclass(frozen=True, kw_only=True, eq=False)
class Infeasibility:
    """Why nothing fits.

    Attributes:
        least: the plan that needs least memory; None if the devices cannot be divided in any allowed way.
        over: its devices that are over.
        reasons: why no strategy is allowed, as far as it is known, where there is no such plan.
        prepared: the problem in which nothing fits.
        smaller_micro_batches: the same problem with other microbatch sizes, as `explain_infeasibility` takes them.
    """

    least: Placement | None
    over: tuple[StageOver, ...]
    reasons: tuple[str, ...]
    prepared: PreparedProblem
    smaller_micro_batches: tuple[tuple[int, PlacementProblem], ...] = ()
    _known: dict[RemedyKind, Remedy | None] = field(default_factory=dict, repr=False)

    def remedy(self, kind: RemedyKind) -> Remedy | None:
        """The single change of a kind that makes something fit, looked for once; None if there is none."""
        if kind not in self._known:
            self._known[kind] = self._found(kind)
        return self._known[kind]

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """Single changes that make something fit, one of each kind at most."""
        return tuple(remedy for remedy in map(self.remedy, RemedyKind) if remedy is not None)

    def _found(self, kind: RemedyKind) -> Remedy | None:
        prepared, problem = self.prepared, self.prepared.problem
        match kind:
            case RemedyKind.RECOMPUTE:
                return _first(prepared, kind, _recompute(problem))
            case RemedyKind.ZERO:
                return _first(prepared, kind, _zero(problem))
            case RemedyKind.STAGES:
                return _first(prepared, kind, _stages(problem))
            case RemedyKind.TP:
                return _first(prepared, kind, _tp_degrees(problem))
            case RemedyKind.MICRO_BATCH:
                return _first(prepared, kind, _micro_batches(self.smaller_micro_batches))
            case RemedyKind.DEVICES:
                return _devices(prepared)
            case RemedyKind.MARGIN:
                return _first(prepared, kind, _margin(problem))
            case RemedyKind.HBM:
                return _hbm(prepared, self.least)

    def __str__(self) -> str:
        """The reasons and remedies in lines."""
        if self.least is None:
            lines = [*self.reasons] or ["no allowed dp, tp and pp divide the devices and microbatches."]
        else:
            parallelism = self.least.parallelism
            degrees = f"dp {parallelism.dp} x tp {parallelism.tp} x pp {parallelism.pp}"
            lines = [f"even the plan that needs least memory ({degrees}, ZeRO-{parallelism.zero}) is over:"]
            lines += [f"  device {stage.device} by {stage.over_bytes / 2**30:.3g} GiB" for stage in self.over]
        lines += [f"would fit: {remedy.text}" for remedy in self.remedies] or ["no single change that was tried fits."]
        return "\n".join(lines)


def explain_infeasibility(
    prepared: PreparedProblem, smaller_micro_batches: Sequence[tuple[int, PlacementProblem]] = ()
) -> Infeasibility:
    """Reasons and remedies of a problem in which nothing fits.

    ``smaller_micro_batches`` are (size, problem): the same problem with other microbatch sizes, profiled by the caller.
    """
    problem = prepared.problem
    least = least_memory(prepared)
    placement = None if least is None else assemble(prepared, least.parallelism, least.stages)
    over = (
        []
        if placement is None
        else [
            StageOver(device, memory.total_bytes - problem.usable_bytes)
            for device, memory in enumerate(placement.memory)
            if memory.total_bytes > problem.usable_bytes
        ]
    )
    return Infeasibility(
        least=placement,
        over=tuple(over),
        reasons=tuple(_reasons(problem)) if placement is None else (),
        prepared=prepared,
        smaller_micro_batches=tuple(smaller_micro_batches),
    )


def _reasons(problem: PlacementProblem) -> Iterator[str]:
    """Which fixed choices contradict the model, the batch or the target by themselves."""
    layers, batches = len(problem.graph.layers), problem.micro_batches
    depths, copies = problem.choices.pp or (), problem.choices.dp or ()
    if depths and min(depths) > layers:
        yield f"{min(depths)} stages need a layer each; the model has {layers}."
        return
    if copies and problem.needs_even_micro_batches and all(batches % count for count in copies):
        yield f"dp {copies[0]} does not divide {batches} microbatches, as the target needs it."
    schedule = problem.choices.schedule[0]
    if not depths or min(depths) == 1 or len(problem.choices.schedule) > 1 or not schedule.has_chunks:
        return
    chunk_counts = schedule.chunk_counts(problem.choices.chunks)
    cuts = {depth * chunks for depth in depths for chunks in chunk_counts}
    if not any(count <= layers and chunk_sizes(layers, count) for count in cuts):
        cut, kind = f"{depths[0]} x {chunk_counts[0]}", "V-shaped" if schedule.is_v_shaped else "interleaved"
        yield f"{layers} layers cannot be cut into {cut} nearly equal chunks, as {kind} pipelines need them."
    per_pipeline = {-(-batches // count) for count in copies or range(1, batches + 1)}
    if schedule is PipelineSchedule.DUAL_PIPE_V and max(per_pipeline) < 2 * min(depths):
        yield (
            f"dualpipe-v on {min(depths)} devices needs at least {2 * min(depths)} microbatches each; there are "
            f"{max(per_pipeline)}."
        )
    if schedule is PipelineSchedule.INTERLEAVED and all(count % depth for count in per_pipeline for depth in depths):
        yield (
            f"interleaved pipelines of {depths[0]} devices need a multiple of {depths[0]} microbatches each; there are "
            f"{max(per_pipeline)}."
        )


def fits(prepared: PreparedProblem) -> bool:
    """Whether some plan fits."""
    usable = prepared.problem.usable_bytes
    least = least_memory(prepared, enough_bytes=usable)
    return least is not None and least.peak_bytes <= usable


_Change = tuple[str, PlacementProblem]


def _first(prepared: PreparedProblem, kind: RemedyKind, changes: Iterable[_Change]) -> Remedy | None:
    """The first change that fits."""
    for text, changed in changes:
        if fits(prepared.with_problem(changed)):
            return Remedy(kind, text, changed)
    return None


def _recompute(problem: PlacementProblem) -> Iterable[_Change]:
    """Each profiled recompute mode that the target runs and that is not among the choices."""
    profiled = {mode for _, _, mode in problem.profiles if mode in problem.capabilities.recompute_modes}
    for mode in RecomputeMode:
        if mode in profiled and mode not in problem.choices.recompute:
            modes = (*problem.choices.recompute, mode)
            yield f"recompute mode {mode}", problem.choosing(recompute=modes)


def _zero(problem: PlacementProblem) -> Iterable[_Change]:
    """Each ZeRO stage that the target runs and that is not among the choices."""
    for zero in ZERO_STAGES:
        if zero in problem.capabilities.zero_stages and zero not in problem.choices.zero:
            stages = (*problem.choices.zero, zero)
            yield f"ZeRO stage {zero}", problem.choosing(zero=stages)


def _stages(problem: PlacementProblem) -> Iterable[_Change]:
    """Each number of stages that is not among the choices, where these are limited."""
    if problem.choices.pp is not None:
        for count in range(1, min(len(problem.graph.layers), problem.cluster.device_count) + 1):
            if count not in problem.choices.pp:
                yield f"{count} pipeline stages", problem.choosing(pp=(count,))


def _tp_degrees(problem: PlacementProblem) -> Iterable[_Change]:
    """Each profiled tp that is not among the choices."""
    for tp in problem.choosing(tp=None).tp_degrees:
        if tp not in problem.tp_degrees:
            yield f"tp {tp}", problem.choosing(tp=(*problem.tp_degrees, tp))


def _micro_batches(others: Sequence[tuple[int, PlacementProblem]]) -> Iterable[_Change]:
    """The problems of smaller microbatches, the largest first."""
    for size, problem in sorted(others, key=lambda size_and_problem: -size_and_problem[0]):
        yield f"microbatches of {size}", problem


def _margin(problem: PlacementProblem) -> Iterable[_Change]:
    """Using the memory that is kept free."""
    if not problem.allows_marginal and problem.memory_margin > 0:
        text = f"using the margin of {problem.memory_margin:.0%} that is kept free"
        yield text, replace(problem, allows_marginal=True)


def _devices(prepared: PreparedProblem) -> Remedy | None:
    """The least number of devices, by doubling and bisection."""
    if not prepared.problem.cluster.levels:
        return None
    count = prepared.problem.cluster.device_count
    low, high = count, 2 * count
    while not fits(_with_devices(prepared, high)):
        low, high = high, 2 * high
        if high > _MOST_TIMES * count:
            return None
    while high - low > max(1, count // _DEVICE_STEPS):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(_with_devices(prepared, middle)) else (middle, high)
    return Remedy(RemedyKind.DEVICES, f"{high} devices", _with_devices(prepared, high).problem)


def _with_devices(prepared: PreparedProblem, count: int) -> PreparedProblem:
    """The same problem on so many devices; the outermost links join as many more as are needed."""
    cluster = prepared.problem.cluster
    levels, joined = list(cluster.levels), math.prod(level.size for level in cluster.levels)
    if joined < count:
        levels[-1] = replace(levels[-1], size=-(-count * levels[-1].size // joined))
    return prepared.with_cluster(replace(cluster, device_count=count, levels=tuple(levels)))


def _hbm(prepared: PreparedProblem, least: Placement | None) -> Remedy | None:
    """Devices with just the memory that the least-memory plan needs, if such a size is possible."""
    if least is None:
        return None
    problem, peak_bytes = prepared.problem, max(memory.total_bytes for memory in least.memory)
    share = problem.usable_bytes / problem.cluster.accelerator.hbm_bytes
    needed = int(peak_bytes / share * (1 + EQUAL_COPIES)) + 1
    if needed > LARGEST_BYTES:
        return None
    accelerator = replace(problem.cluster.accelerator, hbm_bytes=needed)
    changed = prepared.with_cluster(replace(problem.cluster, accelerator=accelerator))
    text = f"{needed / 2**30:.4g} GiB of memory per device"
    return Remedy(RemedyKind.HBM, text, changed.problem) if fits(changed) else None
