"""How a plan divides devices and microbatches: the degrees of parallelism, and all that are possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place.bounds.closed_form_bounds import ClosedFormBounds
from phaze.place.model.network_prices import Network
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray, StageSpace
from phaze.place.model.stage_sums import StageSums

__all__ = ["SCHEDULES", "ParallelismTable", "chunk_sizes", "list_parallelisms"]

SCHEDULES = tuple(PipelineSchedule)
"""What `ParallelismTable.schedule` indexes."""


def chunk_sizes(layers: int, chunks: int) -> tuple[int, ...]:
    """How many layers a chunk may have; nothing where they would be too uneven.

    Where most have one layer, two may have one more: the embedding and the logits lie beside a block.
    """
    least, extra = divmod(layers, chunks)
    if extra == 0:
        return (least,)
    return (least, least + 1) if least >= 2 or extra <= 2 else ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParallelismTable:
    """Many degrees as parallel arrays, with a bound under the time of each.

    `schedule` indexes `SCHEDULES`; `rounds` are the microbatches of the fullest pipeline.
    """

    tp: IntArray
    dp: IntArray
    pp: IntArray
    chunks: IntArray
    schedule: IntArray
    zero: IntArray
    rounds: IntArray
    bound_s: FloatArray

    def __len__(self) -> int:
        """How many."""
        return len(self.bound_s)

    def take(self, index: IntArray | BoolArray) -> ParallelismTable:
        """Some of them."""
        return ParallelismTable(**{name: getattr(self, name)[index] for name in self.__slots__})

    def has(self, parallelism: Parallelism) -> bool:
        """Whether some degrees are among them."""
        return bool(
            (
                (self.tp == parallelism.tp)
                & (self.dp == parallelism.dp)
                & (self.pp == parallelism.pp)
                & (self.chunks == parallelism.chunks)
                & (self.schedule == SCHEDULES.index(parallelism.schedule))
                & (self.zero == parallelism.zero)
            ).any()
        )

    def parallelism(self, index: int) -> Parallelism:
        """One of them."""
        return Parallelism(
            tp=int(self.tp[index]),
            dp=int(self.dp[index]),
            pp=int(self.pp[index]),
            chunks=int(self.chunks[index]),
            schedule=SCHEDULES[self.schedule[index]],
            zero=int(self.zero[index]),
        )


def list_parallelisms(
    problem: PlacementProblem,
    space: StageSpace,
    tables: Mapping[int, StageSums],
    network: Network,
    update_s: float,
    *,
    checks_memory: bool = True,
) -> ParallelismTable:
    """All degrees that the cluster, the target and (unless told otherwise) memory allow at first sight."""
    parts: list[ParallelismTable] = []
    for table in tables.values():
        grid = _grid(problem, space, table)
        for schedule, chunks in _schedules(problem):
            zero_stages = _zero_stages(problem, schedule)
            for zero in zero_stages:
                use = _allowed(problem, space, schedule, chunks, *grid)
                if zero > min(zero_stages):
                    use &= grid[0] > 1
                dp, devices = grid[0][use], grid[1][use]
                model = ClosedFormBounds.of(problem, space, table, network, zero, dp)
                roomy = model.least_bytes() <= problem.usable_bytes * devices * (1 + 1e-9)
                constant = (table.tp, chunks, SCHEDULES.index(schedule), zero)
                part = ParallelismTable(
                    **{
                        name: np.full(len(dp), value)
                        for name, value in zip(("tp", "chunks", "schedule", "zero"), constant, strict=True)
                    },
                    dp=dp,
                    pp=devices,
                    rounds=-(-problem.micro_batches // dp),
                    bound_s=model.time_bound_s(schedule, chunks, devices, update_s) * (1 - 1e-11),
                )
                parts.append(part.take(roomy) if checks_memory else part)
    return ParallelismTable(
        **{
            name: np.concatenate([np.zeros(0, dtype=np.int64), *(getattr(part, name) for part in parts)])
            for name in ParallelismTable.__slots__
        }
    )


def _grid(problem: PlacementProblem, space: StageSpace, table: StageSums) -> tuple[IntArray, IntArray]:
    """All (pipelines, devices per pipeline) that the cluster and the batch allow."""
    count = problem.cluster.device_count
    depths = np.arange(1, min(space.layers, count) + 1)
    if problem.choices.pp is not None:
        depths = depths[np.isin(depths, problem.choices.pp)]
    copies = np.arange(1, min(count, problem.micro_batches) + 1)
    if problem.choices.dp is not None:
        copies = copies[np.isin(copies, problem.choices.dp)]
    if problem.needs_even_micro_batches:
        copies = copies[problem.micro_batches % copies == 0]
    dp, devices = (grid.ravel() for grid in np.meshgrid(copies, depths, indexing="ij"))
    singles = np.minimum(devices, table.unsliced_layers if problem.capabilities.allows_mixed_tp else 0)
    fits = dp * (table.tp * (devices - singles) + singles) <= count
    if not problem.capabilities.allows_idle_devices:
        fits &= (count % dp == 0) & (dp * table.tp * devices >= count)
    return dp[fits], devices[fits]


def _schedules(problem: PlacementProblem) -> list[tuple[PipelineSchedule, int]]:
    """Schedules with their chunk counts."""
    allowed = [kind for kind in dict.fromkeys(problem.choices.schedule) if kind in problem.capabilities.schedules]
    pairs: list[tuple[PipelineSchedule, int]] = [(PipelineSchedule.NONE, 1)]
    for kind in allowed:
        interleaved = kind is PipelineSchedule.INTERLEAVED
        pairs += [(kind, chunks) for chunks in (dict.fromkeys(problem.choices.chunks) if interleaved else (1,))]
    return pairs


def _zero_stages(problem: PlacementProblem, schedule: PipelineSchedule) -> list[int]:
    capabilities = problem.capabilities
    return [
        zero
        for zero in dict.fromkeys(problem.choices.zero)
        if zero in capabilities.zero_stages
        and (schedule is PipelineSchedule.NONE or capabilities.supports(schedule, zero))
    ]


def _allowed(
    problem: PlacementProblem,
    space: StageSpace,
    schedule: PipelineSchedule,
    chunks: int,
    dp: IntArray,
    devices: IntArray,
) -> BoolArray:
    use = (devices == 1) if schedule is PipelineSchedule.NONE else (devices > 1) & (devices * chunks <= space.layers)
    if chunks > 1:
        use &= -(-problem.micro_batches // dp) % devices == 0
        possible = [bool(chunk_sizes(space.layers, depth * chunks)) for depth in range(1, space.layers // chunks + 1)]
        use &= np.isin(devices, np.flatnonzero(possible) + 1)
    return np.asarray(use)
