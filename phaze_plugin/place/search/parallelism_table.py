"""How a plan divides devices and microbatches: the degrees of parallelism, and all that are possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from phaze.capabilities import PipelineSchedule
from phaze.place.bounds.closed_form_bounds import WholeModel
from phaze.place.model.network_prices import Network
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray, StageSpace
from phaze.place.model.stage_sums import WidthTable

__all__ = ["SCHEDULES", "Choices", "Degrees", "chunk_sizes", "list_choices"]

SCHEDULES: tuple[PipelineSchedule | None, ...] = (None, *PipelineSchedule)
"""What `Choices.schedule` indexes; None stands for a single stage."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Degrees:
    """Everything about a plan but its stages.

    Attributes:
        width: tensor-parallel devices of a stage.
        pipelines: copies of the pipeline.
        devices: pipeline depth in devices (times the width).
        chunks: stages per device.
        schedule: the order of passes; None for a single stage.
        zero_stage: what is sharded over pipelines.
    """

    width: int
    pipelines: int
    devices: int
    chunks: int
    schedule: PipelineSchedule | None
    zero_stage: int

    @property
    def stages(self) -> int:
        """Stages in the pipeline."""
        return self.devices * self.chunks

    def rounds(self, micro_batches: int) -> int:
        """Microbatches that the fullest pipeline runs."""
        return -(-micro_batches // self.pipelines)


def chunk_sizes(layers: int, chunks: int) -> tuple[int, ...]:
    """How many layers a chunk may have; nothing where they would be too uneven.

    Where most have one layer, two may have one more: the embedding and the logits lie beside a block.
    """
    least, extra = divmod(layers, chunks)
    if extra == 0:
        return (least,)
    return (least, least + 1) if least >= 2 or extra <= 2 else ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """Many degrees as parallel arrays, with a bound under the time of each.

    `schedule` indexes `SCHEDULES`; `rounds` are the microbatches of the fullest pipeline.
    """

    width: IntArray
    pipelines: IntArray
    devices: IntArray
    chunks: IntArray
    schedule: IntArray
    zero_stage: IntArray
    rounds: IntArray
    floor_s: FloatArray

    def __len__(self) -> int:
        """How many."""
        return len(self.floor_s)

    def take(self, index: IntArray | BoolArray) -> Choices:
        """Some of them."""
        return Choices(**{name: getattr(self, name)[index] for name in self.__slots__})

    def has(self, degrees: Degrees) -> bool:
        """Whether some degrees are among them."""
        return bool(
            (
                (self.width == degrees.width)
                & (self.pipelines == degrees.pipelines)
                & (self.devices == degrees.devices)
                & (self.chunks == degrees.chunks)
                & (self.schedule == SCHEDULES.index(degrees.schedule))
                & (self.zero_stage == degrees.zero_stage)
            ).any()
        )

    def degrees(self, index: int) -> Degrees:
        """One of them."""
        return Degrees(
            width=int(self.width[index]),
            pipelines=int(self.pipelines[index]),
            devices=int(self.devices[index]),
            chunks=int(self.chunks[index]),
            schedule=SCHEDULES[self.schedule[index]],
            zero_stage=int(self.zero_stage[index]),
        )


def list_choices(
    problem: PlacementProblem,
    space: StageSpace,
    tables: Mapping[int, WidthTable],
    network: Network,
    update_s: float,
    *,
    checks_memory: bool = True,
) -> Choices:
    """All degrees that the cluster, the target and (unless told otherwise) memory allow at first sight."""
    parts: list[Choices] = []
    for table in tables.values():
        grid = _grid(problem, space, table)
        for schedule, chunks in _schedules(problem):
            zero_stages = _zero_stages(problem, schedule)
            for zero in zero_stages:
                use = _allowed(problem, space, schedule, chunks, *grid)
                if zero > min(zero_stages):
                    use &= grid[0] > 1
                pipelines, devices = grid[0][use], grid[1][use]
                model = WholeModel.of(problem, space, table, network, zero, pipelines)
                roomy = model.least_bytes() <= problem.usable_bytes * devices * (1 + 1e-9)
                constant = (table.width, chunks, SCHEDULES.index(schedule), zero)
                part = Choices(
                    **{
                        name: np.full(len(pipelines), value)
                        for name, value in zip(("width", "chunks", "schedule", "zero_stage"), constant, strict=True)
                    },
                    pipelines=pipelines,
                    devices=devices,
                    rounds=-(-problem.micro_batches // pipelines),
                    floor_s=model.floor_s(schedule, chunks, devices, update_s) * (1 - 1e-11),
                )
                parts.append(part.take(roomy) if checks_memory else part)
    return Choices(
        **{
            name: np.concatenate([np.zeros(0, dtype=np.int64), *(getattr(part, name) for part in parts)])
            for name in Choices.__slots__
        }
    )


def _grid(problem: PlacementProblem, space: StageSpace, table: WidthTable) -> tuple[IntArray, IntArray]:
    """All (pipelines, devices per pipeline) that the cluster and the batch allow."""
    count = problem.cluster.device_count
    depths = np.arange(1, min(space.layers, count) + 1)
    if problem.stage_counts is not None:
        depths = depths[np.isin(depths, problem.stage_counts)]
    copies = np.arange(1, min(count, problem.micro_batches) + 1)
    if problem.pipelines is not None:
        copies = copies[np.isin(copies, problem.pipelines)]
    if problem.needs_even_micro_batches:
        copies = copies[problem.micro_batches % copies == 0]
    pipelines, devices = (grid.ravel() for grid in np.meshgrid(copies, depths, indexing="ij"))
    singles = np.minimum(devices, table.unsliced_layers if problem.capabilities.allows_mixed_widths else 0)
    fits = pipelines * (table.width * (devices - singles) + singles) <= count
    if not problem.capabilities.allows_idle_devices:
        fits &= (count % pipelines == 0) & (pipelines * table.width * devices >= count)
    return pipelines[fits], devices[fits]


def _schedules(problem: PlacementProblem) -> list[tuple[PipelineSchedule | None, int]]:
    """Schedules with their chunk counts; None stands for a single stage."""
    allowed = [kind for kind in dict.fromkeys(problem.schedules) if kind in problem.capabilities.schedules]
    pairs: list[tuple[PipelineSchedule | None, int]] = [(None, 1)]
    for kind in allowed:
        interleaved = kind is PipelineSchedule.INTERLEAVED
        pairs += [(kind, chunks) for chunks in (dict.fromkeys(problem.chunk_counts) if interleaved else (1,))]
    return pairs


def _zero_stages(problem: PlacementProblem, schedule: PipelineSchedule | None) -> list[int]:
    capabilities = problem.capabilities
    return [
        zero
        for zero in dict.fromkeys(problem.zero_stages)
        if zero in capabilities.zero_stages and (schedule is None or capabilities.supports(schedule, zero))
    ]


def _allowed(
    problem: PlacementProblem,
    space: StageSpace,
    schedule: PipelineSchedule | None,
    chunks: int,
    pipelines: IntArray,
    devices: IntArray,
) -> BoolArray:
    use = (devices == 1) if schedule is None else (devices > 1) & (devices * chunks <= space.layers)
    if chunks > 1:
        use &= -(-problem.micro_batches // pipelines) % devices == 0
        possible = [bool(chunk_sizes(space.layers, depth * chunks)) for depth in range(1, space.layers // chunks + 1)]
        use &= np.isin(devices, np.flatnonzero(possible) + 1)
    return np.asarray(use)
