"""A pass of a layer taken apart into ideal seconds, so that any calibration prices it with a few sums.

Ops run one after the other, as they do on chips whose stack hides no collectives. With T, V, M the ideal tensor, vector
and memory seconds of an op, and a collective's latency A, inner seconds B and outer seconds C at full bandwidth:

    op          max(T/matrix + M/memory, V/vector) + overhead     (max(T/matrix, M/memory, ..) where memory is hidden)
    collective  A + B/link + C/network + overhead

T and M are those of `phaze.cost.work_prices`: T is that of product kernels where they were measured, traffic included.
Where the host launches ahead, overhead is no part of an op. A pass takes at least overhead * (ops and collectives).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phaze.cost import Calibration, Stack, Work, fuse_epilogues, group_work, price_works
from phaze.cost.product_kernels import ProductKernels
from phaze.hardware import Accelerator
from phaze.ir import Graph, Op, OpKind
from phaze.shard import Axis

__all__ = [
    "PassParts",
    "pass_parts",
    "work_parts",
]

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassParts:
    """Ideal seconds per op (tensor, vector, memory), and of all collectives together (latency, inner, outer)."""

    tensor_s: _Floats
    vector_s: _Floats
    memory_s: _Floats
    latency_s: float
    inner_s: float
    outer_s: float
    links: int
    hides_memory: bool

    def seconds(self, calibration: Calibration) -> float:
        """The pass under a calibration of the same stack."""
        tensor, memory = self.tensor_s / calibration.matrix, self.memory_s / calibration.memory
        run = np.maximum(tensor, memory) if self.hides_memory else tensor + memory
        ops = np.maximum(run, self.vector_s / calibration.vector).sum()
        moved = self.latency_s + self.inner_s / calibration.link + self.outer_s / calibration.network
        launched = len(run) + self.links
        return float(max(ops + moved + launched * calibration.op_overhead_s, launched * calibration.overhead_s))


def work_parts(
    works: Sequence[Work], accelerator: Accelerator, stack: Stack, products: ProductKernels | None = None
) -> tuple[_Floats, _Floats, _Floats]:
    """Tensor, vector and memory seconds of works that are spread over all cores, at full efficiency.

    Where a GPU's product kernels are given, the traffic of products is in their tensor seconds, unless the stack hides
    memory: then the longer of both decides, and both are whole.
    """
    estimate = price_works(works, accelerator, calibration=Calibration(stack=stack))
    moved = estimate.spread_bytes[:, 0]
    lanes = accelerator.vector_cores * accelerator.vector_lanes * accelerator.clock_hz
    vector = np.array([work.vector_operations for work in works]) / lanes
    added = Calibration(stack=replace(stack, hides_memory=False), products=products)
    bare = [replace(work, vector_operations=0.0) if work.products else work for work in works]
    whole = price_works(bare, accelerator, calibration=added).spread_s[:, 0]
    is_kernel = np.array([products is not None and work.is_plain_product for work in works])
    besides = np.where(is_kernel, [work.streamed_bytes for work in works], moved)
    tensor = whole - besides / accelerator.hbm_bandwidth_bytes_per_s
    tensor = np.where([bool(work.products) for work in works], tensor, 0.0)
    memory = (moved if stack.hides_memory else besides) / accelerator.hbm_bandwidth_bytes_per_s
    return np.maximum(tensor, 0.0), vector, memory


def pass_parts(local: Graph, ops: Sequence[Op], axis: Axis, stack: Stack) -> PassParts:
    """The parts of ``ops``, a pass of a sliced layer."""
    groups = fuse_epilogues(local, ops, stack.fusion)
    links = [group.head for group in groups if group.head.kind is OpKind.COLLECTIVE]
    computing = (group for group in groups if group.head.kind is not OpKind.COLLECTIVE)
    works = [work for group in computing if (work := group_work(group, local.tensors)).compulsory_bytes]
    chip, products = axis.cluster.accelerator, axis.calibration.products
    tensor, vector, memory = work_parts(works, chip, stack, products) if works else (np.zeros(0),) * 3
    # Halving an efficiency doubles the seconds on its links, so that the differences are what those links take.
    whole, inner, outer = (
        sum(_link_s(axis, local, op, link, network) for op in links)
        for link, network in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5))
    )
    return PassParts(
        tensor_s=tensor,
        vector_s=vector,
        memory_s=memory,
        latency_s=max(0.0, 3 * whole - inner - outer),
        inner_s=inner - whole,
        outer_s=outer - whole,
        links=len(links),
        hides_memory=stack.hides_memory,
    )


def _link_s(axis: Axis, local: Graph, op: Op, link: float, network: float) -> float:
    return replace(axis, calibration=Calibration(name="parts", link=link, network=network)).link_s(local, op)
