"""A pass of a layer taken apart into ideal seconds, so that any calibration prices it with a few sums.

Ops run one after the other, as they do on chips whose stack hides no collectives. With T, V, M the ideal tensor, vector
and memory seconds of an op, and a collective's latency A, inner seconds B and outer seconds C at full bandwidth:

    op          of attention T stands for T/attention
                max(T/matrix + M/memory, V/vector) + overhead     (max(T/matrix, M/memory, ..) where memory is hidden)
    collective  A + B/link + C/network + overhead
    attention   of W seconds in n blocks, whose keys go around in a ring of R seconds: max(W, W/n + R); a product in n
                pieces beside its collectives likewise

T and M are those of `phaze.cost.work_prices`: T is that of product kernels where they were measured, traffic included.
Where the host launches ahead, overhead is no part of an op. A pass takes at least overhead * (ops and collectives), a
backward pass `BACKWARD_LAUNCHES` of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phaze.cost import Calibration, OpGroup, Stack, Work, fuse_epilogues, group_work, price_works
from phaze.cost.calibration import BACKWARD_LAUNCHES
from phaze.cost.measured_kernels import ProductKernels
from phaze.hardware import Accelerator
from phaze.hardware.precision import dtype_bytes
from phaze.ir import Graph, Op, OpKind, Phase
from phaze.profile.layer_jobs import group_edges, is_expert_exchange, pieces_of_products
from phaze.shard import Axis
from phaze.shard.mesh_axes import WAYS, is_ring

__all__ = [
    "LinkParts",
    "PassParts",
    "RingParts",
    "pass_parts",
    "work_parts",
]

_Floats = NDArray[np.float64]
_LESS = 1 - 2**-10
"""So little less that a collective on measured links keeps its protocol; the parts hold near such efficiencies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkParts:
    """Seconds of some collectives together: latency, and on inner and outer links at full bandwidth."""

    latency_s: float
    inner_s: float
    outer_s: float

    def seconds(self, calibration: Calibration) -> float:
        """All of them under a calibration, without launches."""
        return self.latency_s + self.inner_s / calibration.link + self.outer_s / calibration.network


@dataclass(frozen=True, slots=True, kw_only=True)
class RingParts:
    """Collectives beside op number `op` of a pass, an attention or a product: behind all of its `blocks` but one."""

    op: int
    blocks: int
    links: LinkParts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassParts:
    """Ideal seconds per op (tensor, vector, memory), of rings, and of all other collectives together.

    `attentions` are the ops that are fused attention, `narrow_products` those that run as measured 8-bit products.
    `exchanged` are exchanges of experts that run beside the pass.
    """

    tensor_s: _Floats
    vector_s: _Floats
    memory_s: _Floats
    moved: LinkParts
    rings: tuple[RingParts, ...]
    links: int
    stack: Stack
    attentions: tuple[int, ...] = ()
    narrow_products: tuple[int, ...] = ()
    is_backward: bool = False
    exchanged: LinkParts = LinkParts(latency_s=0.0, inner_s=0.0, outer_s=0.0)

    def seconds(self, calibration: Calibration) -> float:
        """The pass under a calibration of the same stack."""
        tensor, memory = self.tensor_s / calibration.matrix, self.memory_s / calibration.memory
        tensor[list(self.attentions)] /= replace(calibration, stack=self.stack).attention_share
        tensor[list(self.narrow_products)] /= calibration.narrow_matrix
        run = np.maximum(tensor, memory) if self.stack.hides_memory else tensor + memory
        ops = np.maximum(run, self.vector_s / calibration.vector)
        for ring in self.rings:
            blocks_s = ops[ring.op] + (ring.blocks - 1) * calibration.op_overhead_s
            waits_s = ring.links.seconds(calibration) - (1 - 1 / ring.blocks) * blocks_s
            ops[ring.op] = blocks_s + max(0.0, waits_s)
        launched = len(run) + self.links
        spent = ops.sum() + self.moved.seconds(calibration) + launched * calibration.op_overhead_s
        launches = launched * (BACKWARD_LAUNCHES if self.is_backward else 1.0)
        return float(max(spent, launches * calibration.overhead_s, self.exchanged.seconds(calibration)))


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
    trips = np.array([work.trips for work in works])
    vector = trips * np.array([work.vector_operations for work in works]) / lanes
    added = Calibration(stack=replace(stack, hides_memory=False), products=products)
    bare = [replace(work, vector_operations=0.0) if work.products else work for work in works]
    whole = price_works(bare, accelerator, calibration=added).spread_s[:, 0]
    is_kernel = np.array([products is not None and work.is_plain_product for work in works])
    besides = np.where(is_kernel, trips * [work.streamed_bytes for work in works], moved)
    tensor = whole - besides / accelerator.hbm_bandwidth_bytes_per_s
    tensor = np.where([bool(work.products) for work in works], tensor, 0.0)
    memory = (moved if stack.hides_memory else besides) / accelerator.hbm_bandwidth_bytes_per_s
    return np.maximum(tensor, 0.0), vector, memory


def pass_parts(local: Graph, ops: Sequence[Op], axis: Axis, stack: Stack) -> PassParts:
    """The parts of ``ops``, a pass of a sliced layer."""
    groups = fuse_epilogues(local, ops, stack.fusion)
    links = [group.head for group in groups if group.head.kind is OpKind.COLLECTIVE]
    pieces = pieces_of_products(groups, group_edges(groups)) if stack.pipelines_products and axis.tp > 1 else {}
    computing = [
        replace(group, pieces=axis.tp) if index in pieces else group
        for index, group in enumerate(groups)
        if group.head.kind is not OpKind.COLLECTIVE
    ]
    priced = [(group, work) for group in computing if (work := group_work(group, local.tensors)).compulsory_bytes]
    works = [work for _, work in priced]
    chip, products = axis.cluster.accelerator, axis.calibration.products
    tensor, vector, memory = work_parts(works, chip, stack, products) if works else (np.zeros(0),) * 3
    rings = _rings(local, [group for group, _ in priced], [op for op in links if is_ring(op)], axis)
    exchanges = [op for op in links if stack.hides_exchanges and is_expert_exchange(op)]
    beside = {op.id for op in links if is_ring(op)} | {op.id for op in exchanges}
    index_of = {group.head.id: index for index, (group, _) in enumerate(priced)}
    for product, members in pieces.items():
        heads = [groups[member].head for member in members]
        beside.update(op.id for op in heads)
        index = index_of[groups[product].head.id]
        rings.append(RingParts(op=index, blocks=axis.tp, links=_link_parts(axis, local, heads)))
    return PassParts(
        tensor_s=tensor,
        vector_s=vector,
        memory_s=memory,
        moved=_link_parts(axis, local, [op for op in links if op.id not in beside]),
        exchanged=_link_parts(axis, local, exchanges),
        rings=tuple(rings),
        links=len(links),
        stack=stack,
        is_backward=bool(ops) and ops[0].phase is Phase.BACKWARD,
        attentions=tuple(index for index, work in enumerate(works) if work.is_fused_attention),
        narrow_products=tuple(index for index, work in enumerate(works) if products and _is_narrow_product(work)),
    )


def _is_narrow_product(work: Work) -> bool:
    return work.is_plain_product and dtype_bytes(work.products[0].dtype) <= 1


def _rings(local: Graph, groups: Sequence[OpGroup], links: Sequence[Op], axis: Axis) -> list[RingParts]:
    """The ring of each attention: exchanges of keys that it reads and of gradients that it makes."""
    rings = []
    for index, group in enumerate(groups):
        if group.head.kind is not OpKind.ATTENTION:
            continue
        touched = {*group.head.inputs, *group.head.outputs}
        beside = [op for op in links if touched.intersection((*op.inputs, *op.outputs))]
        if beside:
            blocks = max(op.rule.size(WAYS) for op in beside)
            rings.append(RingParts(op=index, blocks=blocks, links=_link_parts(axis, local, beside)))
    return rings


def _link_parts(axis: Axis, local: Graph, links: Sequence[Op]) -> LinkParts:
    """The parts of some collectives.

    Seconds on links are inverse to their efficiency, so that a little less of it shows what those links take.
    """
    whole, inner, outer = (
        sum(_link_s(axis, local, op, link, network) for op in links)
        for link, network in ((1.0, 1.0), (_LESS, 1.0), (1.0, _LESS))
    )
    inner_s, outer_s = ((less - whole) / (1 / _LESS - 1) for less in (inner, outer))
    return LinkParts(latency_s=max(0.0, whole - inner_s - outer_s), inner_s=inner_s, outer_s=outer_s)


def _link_s(axis: Axis, local: Graph, op: Op, link: float, network: float) -> float:
    calibration = axis.calibration
    parts = Calibration(name="parts", link=link, network=network, links=calibration.links, stack=calibration.stack)
    return replace(axis, calibration=parts).link_s(local, op)
