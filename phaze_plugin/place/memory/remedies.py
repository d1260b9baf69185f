"""Why nothing fits, and the smallest single changes after which something does.

The reason is the plan that needs least memory: which of its devices are over, and by how much. Every lever is a changed
problem whose own least-memory plan was found to fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from phaze.capabilities import ZERO_STAGES, PipelineSchedule
from phaze.hardware import Cluster
from phaze.hardware.field_checks import LARGEST_BYTES
from phaze.place.memory.least_memory_plan import least_memory
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.search.parallelism_table import chunk_sizes
from phaze.place.search.prepared_problem import Ground
from phaze.place.simulation.placement import Placement
from phaze.place.simulation.placement_assembly import assemble
from phaze.profile.layer_profile import RecomputeMode

__all__ = ["Infeasibility", "Lever", "LeverKind", "StageOver", "explain_infeasibility", "fits"]

_MOST_TIMES = 64


class LeverKind(StrEnum):
    """What a lever changes."""

    RECOMPUTE = "recompute"
    ZERO = "zero"
    STAGES = "stages"
    TENSOR_WIDTH = "tensor width"
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
class Lever:
    """A change after which something fits: what it is in words, and the changed problem."""

    kind: LeverKind
    text: str
    problem: PlacementProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasibility:
    """Why nothing fits.

    Attributes:
        least: the plan that needs least memory; None if the devices cannot be divided in any allowed way.
        over: its devices that are over.
        levers: single changes that make something fit.
        reasons: why there are no degrees, as far as it is known, where there is no such plan.
    """

    least: Placement | None
    over: tuple[StageOver, ...]
    levers: tuple[Lever, ...]
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The reasons and levers in lines."""
        if self.least is None:
            lines = [*self.reasons] or ["no allowed combination of degrees divides the devices and microbatches."]
        else:
            degrees = self.least.degrees
            pipelines = "1 pipeline" if degrees.pipelines == 1 else f"{degrees.pipelines} pipelines"
            lines = [
                f"even the plan that needs least memory ({pipelines} of {degrees.devices} x {degrees.width} devices, "
                f"ZeRO-{degrees.zero_stage}) is over:"
            ]
            lines += [f"  device {one.device} by {one.over_bytes / 2**30:.3g} GiB" for one in self.over]
        lines += [f"would fit: {lever.text}" for lever in self.levers] or ["no single change that was tried fits."]
        return "\n".join(lines)


def explain_infeasibility(
    ground: Ground, smaller_micro_batches: Sequence[tuple[int, PlacementProblem]] = ()
) -> Infeasibility:
    """Reasons and levers of a problem in which nothing fits.

    ``smaller_micro_batches`` are the same problem with other microbatch sizes, profiled by the caller.
    """
    problem = ground.problem
    least = least_memory(ground)
    placement = None if least is None else assemble(ground, least.degrees, least.stages)
    over = (
        []
        if placement is None
        else [
            StageOver(device, memory.total_bytes - problem.usable_bytes)
            for device, memory in enumerate(placement.memory)
            if memory.total_bytes > problem.usable_bytes
        ]
    )
    found = (
        _first(ground, LeverKind.RECOMPUTE, _recompute(problem)),
        _first(ground, LeverKind.ZERO, _zero(problem)),
        _first(ground, LeverKind.STAGES, _stages(problem)),
        _first(ground, LeverKind.TENSOR_WIDTH, _widths(problem)),
        _first(ground, LeverKind.MICRO_BATCH, _micro_batches(smaller_micro_batches)),
        _devices(ground),
        _first(ground, LeverKind.MARGIN, _margin(problem)),
        _hbm(ground, None if least is None else least.peak_bytes),
    )
    return Infeasibility(
        least=placement,
        over=tuple(over),
        levers=tuple(lever for lever in found if lever is not None),
        reasons=tuple(_reasons(problem)) if placement is None else (),
    )


def _reasons(problem: PlacementProblem) -> Iterator[str]:
    """Which fixed degrees contradict the model, the batch or the target by themselves."""
    layers, batches = len(problem.graph.layers), problem.micro_batches
    depths, copies = problem.stage_counts or (), problem.pipelines or ()
    if depths and min(depths) > layers:
        yield f"{min(depths)} stages need a layer each; the model has {layers}."
        return
    if copies and problem.needs_even_micro_batches and all(batches % count for count in copies):
        yield f"{copies[0]} pipelines cannot share {batches} microbatches evenly, as the target needs it."
    if not depths or min(depths) == 1 or set(problem.schedules) != {PipelineSchedule.INTERLEAVED}:
        return
    cuts = {depth * chunks for depth in depths for chunks in problem.chunk_counts}
    if not any(count <= layers and chunk_sizes(layers, count) for count in cuts):
        cut = f"{depths[0]} x {problem.chunk_counts[0]}"
        yield f"{layers} layers cannot be cut into {cut} nearly equal chunks, as interleaved pipelines need them."
    rounds = {-(-batches // count) for count in copies or range(1, batches + 1)}
    if all(count % depth for count in rounds for depth in depths):
        yield (
            f"interleaved pipelines of {depths[0]} devices need a multiple of {depths[0]} microbatches each; there are "
            f"{max(rounds)}."
        )


def fits(ground: Ground) -> bool:
    """Whether some plan fits."""
    usable = ground.problem.usable_bytes
    least = least_memory(ground, enough_bytes=usable)
    return least is not None and least.peak_bytes <= usable


_Change = tuple[str, PlacementProblem]


def _first(ground: Ground, kind: LeverKind, changes: Iterable[_Change]) -> Lever | None:
    """The first change that fits."""
    for text, changed in changes:
        if fits(ground.with_choices(changed)):
            return Lever(kind, text, changed)
    return None


def _recompute(problem: PlacementProblem) -> Iterable[_Change]:
    profiled = {mode for _, _, mode in problem.profiles}
    for mode in RecomputeMode:
        if mode in profiled and mode not in problem.recompute_modes:
            modes = (*problem.recompute_modes, mode)
            yield f"recompute mode {mode}", replace(problem, recompute_modes=modes)


def _zero(problem: PlacementProblem) -> Iterable[_Change]:
    for zero in ZERO_STAGES:
        if zero in problem.capabilities.zero_stages and zero not in problem.zero_stages:
            stages = (*problem.zero_stages, zero)
            yield f"ZeRO stage {zero}", replace(problem, zero_stages=stages)


def _stages(problem: PlacementProblem) -> Iterable[_Change]:
    if problem.stage_counts is not None:
        for count in range(1, min(len(problem.graph.layers), problem.cluster.device_count) + 1):
            if count not in problem.stage_counts:
                yield f"{count} pipeline stages", replace(problem, stage_counts=(count,))


def _widths(problem: PlacementProblem) -> Iterable[_Change]:
    every = replace(problem, tensor_widths=None).widths
    for width in every:
        if width not in problem.widths:
            widths = (*problem.widths, width)
            yield f"tensor width {width}", replace(problem, tensor_widths=widths)


def _micro_batches(others: Sequence[tuple[int, PlacementProblem]]) -> Iterable[_Change]:
    for size, other in sorted(others, key=lambda one: -one[0]):
        yield f"microbatches of {size}", other


def _margin(problem: PlacementProblem) -> Iterable[_Change]:
    if not problem.allows_marginal and problem.memory_margin > 0:
        text = f"using the margin of {problem.memory_margin:.0%} that is kept free"
        yield text, replace(problem, allows_marginal=True)


def _devices(ground: Ground) -> Lever | None:
    """The least number of devices (to a 64th of those at hand), by doubling and bisection."""
    if not ground.problem.cluster.levels:
        return None
    count = ground.problem.cluster.device_count
    low, high = count, 2 * count
    while not fits(_with_devices(ground, high)):
        low, high = high, 2 * high
        if high > _MOST_TIMES * count:
            return None
    while high - low > max(1, count // 64):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(_with_devices(ground, middle)) else (middle, high)
    return Lever(LeverKind.DEVICES, f"{high} devices", _with_devices(ground, high).problem)


def _with_devices(ground: Ground, count: int) -> Ground:
    cluster = ground.problem.cluster
    levels, joined = list(cluster.levels), math.prod(level.size for level in cluster.levels)
    if joined < count:
        levels[-1] = replace(levels[-1], size=-(-count * levels[-1].size // joined))
    return ground.with_cluster(Cluster(cluster.accelerator, count, tuple(levels)))


def _hbm(ground: Ground, peak_bytes: float | None) -> Lever | None:
    if peak_bytes is None:
        return None
    problem = ground.problem
    share = problem.usable_bytes / problem.cluster.accelerator.hbm_bytes
    needed = int(peak_bytes / share * (1 + 1e-12)) + 1
    if needed > LARGEST_BYTES:
        return None
    accelerator = replace(problem.cluster.accelerator, hbm_bytes=needed)
    changed = ground.with_cluster(replace(problem.cluster, accelerator=accelerator))
    text = f"{needed / 2**30:.4g} GiB of memory per device"
    return Lever(LeverKind.HBM, text, changed.problem) if fits(changed) else None
