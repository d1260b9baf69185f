"""All strategies that a cluster, a target and memory allow at first sight, with a closed-form bound under each.

`list_parallelisms` walks over tp, schedules and ZeRO stages, and for each over all pairs of dp and pp. It leaves out
what the target cannot run, what divides devices or microbatches in a way that is not allowed, and what memory cannot
hold even if all stages shared theirs (`ClosedFormBounds.least_bytes`).

On many devices most values of dp differ in little: a row may stand for all that give the fullest pipeline equally many
microbatches, of which there are at most twice the square root of all microbatches, and for all groups over which ZeRO
may shard (`DataDegrees`). Its bound is one under each of them: states are sharded as in the largest group, and
collectives take no longer than with the smallest dp and in the smallest group. `split_rows` divides such rows where
their bound does not rule them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from phaze.parallelism import ALL_DEVICES, Parallelism, PipelineSchedule
from phaze.place.bounds.path_bounds import ClosedFormBounds
from phaze.place.model.network_prices import Network
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray, StageSpace
from phaze.place.model.stage_sums import StageSums
from phaze.place.model.zero_sharding import DataDegrees, every_shard, listed_shards, shard_ranges
from phaze.tolerances import BOUND_MARGIN, MEMORY_MARGIN

__all__ = [
    "SCHEDULES",
    "SPLIT_SCHEDULES",
    "V_SCHEDULES",
    "ParallelismTable",
    "chunk_sizes",
    "list_parallelisms",
    "split_rows",
]

SCHEDULES = tuple(PipelineSchedule)
"""What `ParallelismTable.schedule` indexes."""

SPLIT_SCHEDULES = tuple(index for index, kind in enumerate(SCHEDULES) if kind.splits_backward)
"""Which of them have the weights' part of backward as a pass of its own."""

V_SCHEDULES = tuple(index for index, kind in enumerate(SCHEDULES) if kind.is_v_shaped)
"""Which of them have the shape of a V."""


def chunk_sizes(layers: int, chunks: int) -> tuple[int, ...]:
    """How many layers a chunk may have; nothing where they would be too uneven.

    Where most have one layer, two may have one more: the embedding and the logits lie beside a block.
    """
    least, extra = divmod(layers, chunks)
    if extra == 0:
        return (least,)
    return (least, least + 1) if least >= 2 or extra <= 2 else ()


_KEPT_COUNTS = 64
"""Of so many numbers of layers and chunks the possible depths are kept: a search asks for a handful, over and over."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParallelismTable:
    """Many strategies as parallel arrays, with a bound under the time of each.

    Attributes:
        tp: devices that each layer is split over.
        dp: copies of the pipeline; of several values the largest.
        least_dp: the smallest of them.
        shard: devices that ZeRO divides states over; of several values the largest.
        least_shard: the smallest of them.
        pp: pipeline depth.
        chunks: stages on each device.
        schedule: index into `SCHEDULES`.
        zero: ZeRO stage.
        micro_batches: microbatches of the fullest pipeline.
        bound_s: no plan with the strategy takes less.
        least_bytes: the fullest device holds at least as much.
    """

    tp: IntArray
    dp: IntArray
    least_dp: IntArray
    shard: IntArray
    least_shard: IntArray
    pp: IntArray
    chunks: IntArray
    schedule: IntArray
    zero: IntArray
    micro_batches: IntArray
    bound_s: FloatArray
    least_bytes: FloatArray

    @classmethod
    def joined(cls, tables: Sequence[ParallelismTable]) -> ParallelismTable:
        """The rows of several tables."""
        return cls(
            **{
                name: np.concatenate([np.zeros(0, dtype=np.int64), *(getattr(table, name) for table in tables)])
                for name in cls.__slots__
            }
        )

    @property
    def degrees(self) -> DataDegrees:
        """dp and ZeRO of every strategy."""
        names = ("zero", "dp", "least_dp", "shard", "least_shard")
        return DataDegrees(**{name: getattr(self, name) for name in names})

    @property
    def is_wide(self) -> BoolArray:
        """Whether a row stands for several strategies."""
        return self.degrees.is_wide

    def narrowed(self) -> ParallelismTable:
        """The same rows, each for the largest of its values alone."""
        return replace(self, least_dp=self.dp, least_shard=self.shard)

    def __len__(self) -> int:
        """How many strategies."""
        return len(self.bound_s)

    def take(self, index: IntArray | BoolArray) -> ParallelismTable:
        """The strategies at some indices, or where a mask is true."""
        return ParallelismTable(**{name: getattr(self, name)[index] for name in self.__slots__})

    def has(self, parallelism: Parallelism) -> bool:
        """Whether a strategy is among them."""
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

    def parallelism(self, index: int, problem: PlacementProblem) -> Parallelism:
        """The strategy at one index, with the largest of its values of dp and shard."""
        dp, shard = int(self.dp[index]), int(self.shard[index])
        return Parallelism(
            tp=int(self.tp[index]),
            dp=dp,
            cp=problem.cp,
            ep=problem.ep,
            shard=ALL_DEVICES if shard == dp * problem.cp else shard,
            pp=int(self.pp[index]),
            chunks=int(self.chunks[index]),
            schedule=SCHEDULES[self.schedule[index]],
            zero=int(self.zero[index]),
            offload=problem.offload,
        )


def list_parallelisms(
    problem: PlacementProblem,
    space: StageSpace,
    stage_sums: Mapping[int, StageSums],
    network: Network,
    update_s: float,
    *,
    checks_memory: bool = True,
    joins_rows: bool = False,
) -> ParallelismTable:
    """All strategies that the cluster, the target and (unless told otherwise) memory allow at first sight.

    ``stage_sums`` are by tp, and ``update_s`` are the seconds of updating one parameter. ``joins_rows`` makes one row
    of strategies that differ only in dp and shard and not in their microbatches; otherwise each has its own.
    """
    parts: list[ParallelismTable] = []
    for sums in stage_sums.values():
        all_dp, all_pp = _degrees(problem, space, sums)
        by_degrees: dict[tuple[int, bytes], tuple[ClosedFormBounds, IntArray]] = {}  # most schedules allow the same
        for schedule, chunks in _schedules(problem):
            zero_stages = _zero_stages(problem, schedule)
            is_allowed = _allowed(problem, space, schedule, chunks, all_dp, all_pp)
            for zero in zero_stages:
                # A single copy has nothing to shard: only the least ZeRO stage is listed for it.
                is_listed = is_allowed & (all_dp * problem.cp > 1) if zero > min(zero_stages) else is_allowed
                key = (zero, is_listed.tobytes())
                if key not in by_degrees:
                    dp, pp = all_dp[is_listed], all_pp[is_listed]
                    degrees, pp = _joined_degrees(problem, sums, zero, dp, pp, joins_rows)
                    by_degrees[key] = ClosedFormBounds.of(problem, space, sums, network, degrees), pp
                bounds, pp = by_degrees[key]
                degrees, least_bytes = bounds.degrees, bounds.least_bytes() / pp
                has_room = least_bytes <= problem.usable_bytes * (1 + MEMORY_MARGIN)
                part = ParallelismTable(
                    tp=np.full(len(pp), sums.tp),
                    dp=degrees.dp,
                    least_dp=degrees.least_dp,
                    shard=degrees.shard,
                    least_shard=degrees.least_shard,
                    pp=pp,
                    chunks=np.full(len(pp), chunks),
                    schedule=np.full(len(pp), SCHEDULES.index(schedule)),
                    zero=np.full(len(pp), zero),
                    micro_batches=-(-problem.micro_batches // degrees.dp),
                    bound_s=bounds.time_bound_s(schedule, chunks, pp, update_s) * (1 - BOUND_MARGIN),
                    least_bytes=least_bytes,
                )
                parts.append(part.take(has_room) if checks_memory else part)
    return ParallelismTable.joined(parts)


def _joined_degrees(
    problem: PlacementProblem, sums: StageSums, zero: int, dp: IntArray, pp: IntArray, joins_rows: bool
) -> tuple[DataDegrees, IntArray]:
    """The degrees of data parallelism and the depths of rows, where each stands for one strategy or for several."""
    if not joins_rows:
        row, shard = every_shard(problem, sums.tp, zero, dp)
        return DataDegrees(zero=zero, dp=dp[row], least_dp=dp[row], shard=shard, least_shard=shard), pp[row]
    least_shard, shard = shard_ranges(problem, sums.tp, zero, dp)
    dp, pp, least_shard, shard = (column[shard > 0] for column in (dp, pp, least_shard, shard))
    first, last = _runs(problem, sums, dp, pp)
    if len(first):
        least_shard, shard = np.minimum.reduceat(least_shard, first), np.maximum.reduceat(shard, first)
    return DataDegrees(zero=zero, dp=dp[last], least_dp=dp[first], shard=shard, least_shard=least_shard), pp[last]


def split_rows(
    problem: PlacementProblem, space: StageSpace, stage_sums: Mapping[int, StageSums], rows: ParallelismTable
) -> ParallelismTable:
    """Two rows for each, one with the smaller and one with the larger half of its values of dp; bounds are kept.

    Rows of one dp are divided by their values of shard.
    """
    halves: list[tuple[int, int, int, int, int]] = []  # the row, its least and largest dp, and shard likewise
    columns = (rows.tp, rows.pp, rows.zero, rows.least_dp, rows.dp, rows.least_shard, rows.shard)
    ranges: dict[tuple[int, int, int, int], tuple[IntArray, IntArray, IntArray]] = {}  # rows share most of them
    for index, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        tp, depth, zero, least_dp, most_dp, least_shard, most_shard = row
        if least_dp == most_dp:
            sizes = listed_shards(problem, tp, least_dp, least_shard, most_shard, zero)
            middle = -(-len(sizes) // 2)
            parts = [part for part in (sizes[:middle], sizes[middle:]) if part]
            halves += [(index, least_dp, most_dp, part[0], part[-1]) for part in parts]
            continue
        if (key := (tp, zero, least_dp, most_dp)) not in ranges:
            copies = _copies(problem, least_dp, most_dp)
            ranges[key] = copies, *shard_ranges(problem, tp, zero, copies)
        dp, least, largest = ranges[key]
        pp = np.full(len(dp), depth)
        is_allowed = _divides_devices(problem, stage_sums[tp], dp, pp)
        is_allowed &= _allowed(problem, space, SCHEDULES[rows.schedule[index]], int(rows.chunks[index]), dp, pp)
        for half in np.array_split(np.flatnonzero(is_allowed & (largest > 0)), 2):
            if len(half):
                bounds = int(dp[half[0]]), int(dp[half[-1]]), int(least[half].min()), int(largest[half].max())
                halves.append((index, *bounds))
    row_index, least_dps, dps, least_shards, shards = np.array(halves, dtype=np.int64).reshape(-1, 5).T
    return replace(rows.take(row_index), least_dp=least_dps, dp=dps, least_shard=least_shards, shard=shards)


def _copies(problem: PlacementProblem, least: int, most: int) -> IntArray:
    """All dp in a range that the batch allows."""
    if problem.capabilities.needs_several_copies and problem.cp == 1:
        least = max(least, 2)
    if problem.capabilities.needs_single_micro_batch:
        least = max(least, problem.micro_batches)
    copies = np.arange(least, min(most, problem.micro_batches) + 1)
    if problem.choices.dp is not None:
        copies = copies[np.isin(copies, problem.choices.dp)]
    if problem.needs_even_micro_batches:
        copies = copies[problem.micro_batches % copies == 0]
    return np.asarray(copies[copies * problem.cp % problem.ep == 0])


def _degrees(problem: PlacementProblem, space: StageSpace, sums: StageSums) -> tuple[IntArray, IntArray]:
    """All (dp, pp) that the cluster and the batch allow at one tp, sorted by pp and then by dp."""
    device_count = problem.cluster.device_count // problem.cp
    depths = np.arange(1, min(space.layers, device_count) + 1)
    if problem.choices.pp is not None:
        depths = depths[np.isin(depths, problem.choices.pp)]
    copies = _copies(problem, 1, device_count)
    counts = np.searchsorted(copies, device_count // _least_devices(problem, sums, depths), side="right")
    pp = np.repeat(depths, counts)
    dp = copies[np.arange(len(pp)) - np.repeat(np.cumsum(counts) - counts, counts)]
    is_allowed = _divides_devices(problem, sums, dp, pp)
    return dp[is_allowed], pp[is_allowed]


def _least_devices(problem: PlacementProblem, sums: StageSums, pp: IntArray) -> IntArray:
    """How many devices each part of a sequence takes at least, if as many stages as possible take a single one."""
    single_stages = np.minimum(pp, sums.unsliced_layers if problem.capabilities.allows_mixed_tp else 0)
    return np.asarray(sums.tp * (pp - single_stages) + single_stages)


def _divides_devices(problem: PlacementProblem, sums: StageSums, dp: IntArray, pp: IntArray) -> BoolArray:
    """Whether there are enough devices, and none is left over where none may idle."""
    device_count, replicas = problem.cluster.device_count, dp * problem.cp
    divides = replicas * _least_devices(problem, sums, pp) <= device_count
    if not problem.capabilities.allows_idle_devices:
        divides &= (device_count % replicas == 0) & (replicas * sums.tp * pp >= device_count)
    return np.asarray(divides)


def _runs(problem: PlacementProblem, sums: StageSums, dp: IntArray, pp: IntArray) -> tuple[IntArray, IntArray]:
    """The first and the last of neighbours with the same pp and microbatches, whose devices suffice or not alike."""
    needs_no_singles = dp * problem.cp * pp * sums.tp <= problem.cluster.device_count
    key = np.stack([pp, -(-problem.micro_batches // dp), needs_no_singles])
    is_new = np.any(np.diff(key, axis=1) != 0, axis=0)
    first = np.concatenate([np.zeros(min(len(dp), 1), dtype=np.int64), np.flatnonzero(is_new) + 1])
    return first, np.concatenate([first[1:], np.full(min(len(dp), 1), len(dp))]) - 1


def _schedules(problem: PlacementProblem) -> list[tuple[PipelineSchedule, int]]:
    """Schedules with their chunk counts."""
    allowed = [kind for kind in dict.fromkeys(problem.choices.schedule) if kind in problem.capabilities.schedules]
    pairs: list[tuple[PipelineSchedule, int]] = [(PipelineSchedule.NONE, 1)]
    for kind in allowed:
        pairs += [(kind, chunks) for chunks in kind.chunk_counts(problem.choices.chunks)]
    return pairs


def _zero_stages(problem: PlacementProblem, schedule: PipelineSchedule) -> list[int]:
    """ZeRO stages that the target runs with a schedule."""
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
    pp: IntArray,
) -> BoolArray:
    """Whether a schedule runs with each depth: one stage or several, enough layers and microbatches, full groups."""
    allowed = (pp == 1) if schedule is PipelineSchedule.NONE else (pp > 1) & (pp * chunks <= space.layers)
    if schedule in problem.capabilities.needs_micro_batches_per_stage:
        allowed &= problem.micro_batches // dp >= pp * chunks
    if schedule is PipelineSchedule.DUAL_PIPE_V:
        allowed &= -(-problem.micro_batches // dp) >= 2 * pp
    if schedule is PipelineSchedule.INTERLEAVED:
        allowed &= -(-problem.micro_batches // dp) % pp == 0
    if chunks > 1:
        allowed &= np.isin(pp, _depths_in_chunks(space.layers, chunks))
    return np.asarray(allowed)


@lru_cache(maxsize=_KEPT_COUNTS)
def _depths_in_chunks(layers: int, chunks: int) -> tuple[int, ...]:
    """The depths of pipelines of so many nearly equal chunks on each device."""
    return tuple(depth for depth in range(1, layers // chunks + 1) if chunk_sizes(layers, depth * chunks))
