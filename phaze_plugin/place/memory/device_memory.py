"""Memory of one device, item by item, and whether it fits: where the margin and the reserve are decided.

With p trained parameters on the device and n microbatches in flight (`build_memory_table`, `MemoryTable.of_device`):

    parameters   (p + frozen ones) * parameter bytes (over shard with ZeRO-3), and tables of whole numbers
    gradients    p * gradient bytes (over shard from ZeRO-2 on)
    optimizer    p * (master + state bytes) (over shard from ZeRO-1 on)
    activations  n * what the stage stashes, relayed tensors included
    working set  the largest of its layers while it runs, less what layers behind it stash (not yet in forward, no more
                 in backward)
    buffers      what is received at both ends; what ZeRO's collectives need for the stage's largest layer; parameters
                 that are sharded over stages, whole, and their gradient

Optimizer states that are offloaded are kept on the host, which has an equal part of its memory for each chunk; what it
does not hold stays on the device, which has two buckets as buffers for what passes through it. Activations that are
offloaded have the rest of that part: of each microbatch so many bytes as it can hold of all that are in flight on the
fullest device of the pipeline. What it does not hold of them stays on the device, too.

A device with several chunks adds up the first four and takes the largest of the last two. What ZeRO shards and buffers
is in `zero_sharding.py`. Whether a device fits, with the margin and the calibration's reserve, is `DeviceMemory.fit`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

import numpy as np

from phaze.parallelism import Parallelism
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_space import FloatArray
from phaze.place.model.stage_sums import StageSums
from phaze.place.model.zero_sharding import ZeroSharding
from phaze.place.simulation.pass_orders import in_flight

__all__ = ["OFFLOAD_BUCKET_BYTES", "DeviceMemory", "Fit", "MemoryTable", "build_memory_table"]

OFFLOAD_BUCKET_BYTES = 64 * 2**20
"""States come from the host in buckets of this size: one is updated while another one moves. 64 MiB take about 3 ms on
a PCIe link, so that starting a transfer does not count."""


class Fit(StrEnum):
    """Whether a device holds its stage."""

    FITS = "fits"
    MARGINAL = "marginal"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes on one device of a stage, what it has, and what it keeps on the host, which is no part of the total."""

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    working_bytes: float
    buffers_bytes: float
    capacity_bytes: float
    margin: float
    reserve: float = 0.0
    host_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """All items."""
        return float(sum(getattr(self, item.name) for item in fields(self)[:6]))

    @property
    def reserved_bytes(self) -> float:
        """What the calibration says that allocator and libraries hold besides."""
        return self.reserve * self.total_bytes

    @property
    def fit(self) -> Fit:
        """Fits with all that is reserved below the margin, is over when the items alone exceed the capacity."""
        if self.total_bytes > self.capacity_bytes:
            return Fit.OVER
        held = self.total_bytes + self.reserved_bytes
        return Fit.FITS if held <= self.capacity_bytes * (1 - self.margin) else Fit.MARGINAL


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTable:
    """The items of every stage on one device; per stage, or per (mode, stage)."""

    parameters_bytes: FloatArray
    gradients_bytes: FloatArray
    optimizer_bytes: FloatArray
    stashed_bytes: FloatArray
    working_bytes: FloatArray
    buffers_bytes: FloatArray
    host_bytes: FloatArray
    host_stashed_bytes: FloatArray

    @property
    def held_bytes(self) -> FloatArray:
        """What chunks of one device add up, activations aside; per stage."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def scratch_bytes(self) -> FloatArray:
        """What chunks of one device share, per (mode, stage)."""
        return self.working_bytes + self.buffers_bytes

    def of_device(self, problem: PlacementProblem, chunks: list[tuple[int, int]], in_flight: list[int]) -> DeviceMemory:
        """The items of a device that holds these (mode, stage) chunks with so many microbatches in flight."""
        stages = [stage for _, stage in chunks]
        scratch = max(chunks, key=lambda chunk: float(self.scratch_bytes[chunk]))
        return DeviceMemory(
            parameters_bytes=float(self.parameters_bytes[stages].sum()),
            gradients_bytes=float(self.gradients_bytes[stages].sum()),
            optimizer_bytes=float(self.optimizer_bytes[stages].sum()),
            activations_bytes=float(
                sum(count * self.stashed_bytes[chunk] for chunk, count in zip(chunks, in_flight, strict=True))
            ),
            working_bytes=float(self.working_bytes[scratch]),
            buffers_bytes=float(self.buffers_bytes[scratch[1]]),
            capacity_bytes=float(problem.cluster.accelerator.hbm_bytes),
            margin=problem.memory_margin,
            reserve=problem.calibration.reserve,
            host_bytes=float(
                self.host_bytes[stages].sum()
                + sum(count * self.host_stashed_bytes[chunk] for chunk, count in zip(chunks, in_flight, strict=True))
            ),
        )


def build_memory_table(
    problem: PlacementProblem,
    sums: StageSums,
    sharding: ZeroSharding,
    whole_parameters: float,
    parallelism: Parallelism,
) -> MemoryTable:
    """The items of all stages under one strategy; ``whole_parameters`` are held in parts, and whole during a batch."""
    recipe, kinds = problem.recipe, sharding.by_kind(problem.ep, problem.has_frozen)
    parameters = [kind.parameters for kind in sums.kinds(problem.ep, problem.has_frozen)]
    trained = len(sharding.by_kind(problem.ep))
    buffers = sums.received_bytes + sums.sent_bytes
    buffers = buffers + whole_parameters * (recipe.parameter_bytes + recipe.gradient_bytes)
    # Where experts are held whole, only the others need buffers.
    has_buffers = kinds[trained - 1].buffer_bytes > 0
    scattered = np.where(has_buffers, sums.largest_parameters, sums.largest_dense_parameters)
    buffers = buffers + sharding.scatter_buffer_bytes * scattered
    buffers = buffers + sharding.gather_buffer_bytes * np.where(has_buffers, *sums.largest_held_parameters)
    held_bytes = sum(part.held_copy_bytes_per_parameter * count for part, count in zip(kinds, parameters, strict=True))
    gradients, states = (
        np.asarray(sum(count / getattr(part, name) for part, count in zip(kinds[:trained], parameters, strict=False)))
        for name in ("gradient_shards", "optimizer_shards")
    )
    states_bytes = recipe.optimizer_bytes * states
    part_bytes = problem.host_bytes / parallelism.chunks
    host_bytes = np.minimum(states_bytes, part_bytes) if problem.offload.moves_states else np.zeros_like(states_bytes)
    host_stashed = sums.host_bytes
    if problem.offload.moves_activations:
        host_stashed = np.minimum(host_stashed, (part_bytes - host_bytes) / _most_in_flight(problem, parallelism))
    return MemoryTable(
        parameters_bytes=np.asarray(held_bytes + sums.table_bytes),
        gradients_bytes=recipe.gradient_bytes * gradients,
        optimizer_bytes=states_bytes - host_bytes,
        stashed_bytes=sums.stashed_bytes + sums.host_bytes - host_stashed,
        working_bytes=sums.working_bytes,
        buffers_bytes=buffers + 2 * np.minimum(host_bytes, OFFLOAD_BUCKET_BYTES),
        host_bytes=host_bytes,
        host_stashed_bytes=host_stashed,
    )


def _most_in_flight(problem: PlacementProblem, parallelism: Parallelism) -> int:
    """The most microbatches that a chunk of any device of the pipeline has in flight."""
    micro_batches = parallelism.micro_batches_per_pipeline(problem.micro_batches)
    return int(in_flight(parallelism.schedule, parallelism.pp, micro_batches, parallelism.chunks).max())
