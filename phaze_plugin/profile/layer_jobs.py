"""The jobs of a layer: its ops and their prices as a scheduling problem, one for each accelerator.

Each group of ops (one op, or a matrix op with its fused epilogue) becomes one job. The job's resource and its two
latencies come from the cost model. Views hold nothing and take no time. Collectives hold the link; on a software stack
that hides none of them they hold all cores instead (`_on_one_core`). Exchanges of a ring are part of the attention that
works on what they bring (`_behind_rings`), and so are gathers and scatters of the product beside them on a stack that
runs them in pieces (`pieces_of_products`). A group precedes another if it makes a tensor that the other reads
(`group_edges`). No pass takes less than its off-chip traffic over the bandwidth, where the traffic of each group is
counted as if it had the whole buffer, nor less than the host needs to launch all groups, nor less than exchanges of
experts that run beside it take (`_floor_s`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from phaze.cost import BINDINGS, IDEAL, Calibration, CoreKind, Estimate, fuse_epilogues, price_groups, single_groups
from phaze.cost.calibration import BACKWARD_LAUNCHES
from phaze.cost.graph_prices import accelerator_array
from phaze.errors import ScheduleError
from phaze.hardware import Accelerator, AcceleratorArray
from phaze.ir import Graph, Op, OpKind, Phase
from phaze.schedule.makespan_bounds import lower_bounds
from phaze.schedule.scheduling_problem import Compatibility, Job, Resource, SchedulingProblem
from phaze.shard.mesh_axes import EXPERT_AXIS, TENSOR_AXIS, WAYS, axis_of, is_ring

if TYPE_CHECKING:
    from phaze.cost import OpGroup, PriceTable, Work
    from phaze.interfaces import OpPricer

__all__ = ["PricedPass", "group_edges", "is_expert_exchange", "pieces_of_products", "price_pass"]

FloatArray = NDArray[np.float64]

BINDING_NAMES = (*(binding.value for binding in BINDINGS), "link")
"""What may decide the time of a job: what decides that of an op, or the link of a collective."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedPass:
    """One pass of a layer (its forward or backward ops) priced on many accelerators; arrays are [accelerator, op]."""

    name: str
    names: tuple[str, ...]
    resources: tuple[Resource, ...]
    edges: tuple[tuple[int, int], ...]
    latency_s: FloatArray
    spread_s: FloatArray
    energy_j: FloatArray
    spread_energy_j: FloatArray
    bindings: NDArray[np.uint8]  # codes of `BINDING_NAMES`
    memory_s: FloatArray  # [accelerator]
    tensor_cores: NDArray[np.int64]
    vector_cores: NDArray[np.int64]
    intra_op_exclusive: bool = True
    compatibility: Compatibility = Compatibility.PHAZE

    def problem(self, accelerator: int = 0) -> SchedulingProblem:
        """The scheduling problem on one of the accelerators."""
        rows = (self.latency_s, self.spread_s, self.energy_j, self.spread_energy_j)
        bindings = [BINDING_NAMES[code] for code in self.bindings[accelerator].tolist()]
        columns = zip(self.names, self.resources, *(row[accelerator].tolist() for row in rows), bindings, strict=True)
        return SchedulingProblem(
            jobs=tuple(Job(*column) for column in columns),
            edges=self.edges,
            tensor_cores=int(self.tensor_cores[accelerator]),
            vector_cores=int(self.vector_cores[accelerator]),
            intra_op_exclusive=self.intra_op_exclusive,
            memory_s=float(self.memory_s[accelerator]),
            compatibility=self.compatibility,
            name=self.name,
        )

    def lower_bounds(self, *, is_tight: bool = True) -> FloatArray:
        """Lower bounds on the pass's time on every accelerator; see `phaze.schedule.lower_bounds`."""
        return lower_bounds(
            self.problem(0),
            latency_s=self.latency_s,
            spread_s=self.spread_s,
            tensor_cores=self.tensor_cores,
            vector_cores=self.vector_cores,
            memory_s=0.0 if self.compatibility is Compatibility.PAPER else self.memory_s,
            is_tight=is_tight,
        )


def price_pass(
    graph: Graph,
    ops: Sequence[Op],
    accelerators: AcceleratorArray | Accelerator,
    *,
    name: str = "layer",
    is_fused: bool = False,
    link_s: Callable[[Op], float] | None = None,
    calibration: Calibration = IDEAL,
    prices: Mapping[str, OpPricer] | None = None,
    table: PriceTable | None = None,
    known_works: dict[tuple[str, ...], Work] | None = None,
    tp: int = 1,
    intra_op_exclusive: bool = True,
    compatibility: Compatibility = Compatibility.PHAZE,
) -> PricedPass:
    """Price `ops` (of one phase) on all accelerators; `link_s` gives the seconds of a collective.

    `tp` devices share the products, which matters to a stack that runs collectives in pieces beside them. `table` holds
    prices of the only accelerator and `known_works` the works of this graph that were found so far, if there are any.
    Raises ScheduleError if there is a collective and nobody prices it, and what pricing raises.
    """
    chips = accelerator_array(accelerators, table)
    groups = fuse_epilogues(graph, ops, calibration.stack.fusion) if is_fused else single_groups(ops)
    edges = group_edges(groups)
    heads = {index: group.head for index, group in enumerate(groups) if _is_link(group.head)}
    links = {index: _seconds(head, link_s) + calibration.op_overhead_s for index, head in heads.items()}
    pieces, hidden = _pieces(groups, edges, links, calibration, tp), _hidden_exchanges(heads, links, calibration)
    groups = tuple(replace(group, pieces=tp) if index in pieces else group for index, group in enumerate(groups))
    rings = _rings(groups, edges, links) | pieces
    links |= dict.fromkeys((index for ring in rings.values() for index in ring.links), 0.0)
    links |= dict.fromkeys(hidden, calibration.op_overhead_s)
    local = [group for index, group in enumerate(groups) if index not in heads]
    estimate = price_groups(
        graph, local, chips, calibration=calibration, prices=prices, table=table, known_works=known_works
    )
    placed = [index for index in range(len(groups)) if index not in links]
    on_cores = {placed.index(index): ring for index, ring in rings.items()}
    estimate = _behind_rings(estimate, on_cores, calibration.op_overhead_s)
    resources = [Resource.LINK if calibration.stack.hides_links else Resource.BOTH] * len(groups)
    for index, kind in zip(placed, estimate.kinds, strict=True):
        resources[index] = Resource(kind.value)
    bandwidth = chips.hbm_bandwidth_bytes_per_s * calibration.memory
    moved_s = np.minimum(estimate.core_bytes, estimate.spread_bytes).sum(axis=0) / bandwidth
    return PricedPass(
        name=name,
        names=tuple(group.head.id for group in groups),
        resources=tuple(resources),
        edges=edges,
        latency_s=_columns(estimate.core_s, placed, _on_one_core(links, calibration, chips), len(groups)),
        spread_s=_spread(estimate, placed, {} if calibration.stack.hides_links else links, len(groups)),
        energy_j=_columns(estimate.core_energy_j, placed, {}, len(groups)),
        spread_energy_j=_columns(estimate.spread_energy_j, placed, {}, len(groups)),
        bindings=_bindings(estimate, placed, links, len(groups)),
        memory_s=np.maximum(moved_s, _floor_s(links, hidden, local, estimate, calibration)),
        tensor_cores=chips.tensor_cores,
        vector_cores=chips.vector_cores,
        intra_op_exclusive=intra_op_exclusive,
        compatibility=compatibility,
    )


def group_edges(groups: Sequence[OpGroup]) -> tuple[tuple[int, int], ...]:
    """Which group makes what another reads."""
    maker = {tensor: index for index, group in enumerate(groups) for op in group.ops for tensor in op.outputs}
    edges = {(maker[tensor], index) for index, group in enumerate(groups) for tensor in group.reads if tensor in maker}
    return tuple(sorted((before, after) for before, after in edges if before != after))


@dataclass(frozen=True, slots=True)
class _Ring:
    """Exchanges that go around in steps while an attention works on the blocks that have come."""

    links: tuple[int, ...]
    seconds: float
    blocks: int


def _rings(groups: Sequence[OpGroup], edges: Sequence[tuple[int, int]], links: Mapping[int, float]) -> dict[int, _Ring]:
    """The ring of each attention that has one: exchanges of keys that it reads and of gradients that it makes."""
    beside: dict[int, list[int]] = {}
    for before, after in edges:
        for index, other in ((before, after), (after, before)):
            if index in links and is_ring(groups[index].head) and groups[other].head.kind is OpKind.ATTENTION:
                beside.setdefault(other, []).append(index)
    return {
        attention: _Ring(
            tuple(members),
            sum(links[index] for index in members),
            max(groups[index].head.rule.size(WAYS) for index in members),
        )
        for attention, members in beside.items()
    }


def _pieces(
    groups: Sequence[OpGroup],
    edges: Sequence[tuple[int, int]],
    links: Mapping[int, float],
    calibration: Calibration,
    tp: int,
) -> dict[int, _Ring]:
    """The collectives that run in pieces beside each product, on a stack that does so."""
    if not calibration.stack.pipelines_products or tp == 1:
        return {}
    return {
        product: _Ring(tuple(beside), sum(links[index] for index in beside), tp)
        for product, beside in pieces_of_products(groups, edges).items()
    }


def pieces_of_products(groups: Sequence[OpGroup], edges: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """Gathers and scatters of the tensor axis by the product that they run in pieces beside.

    A gather runs beside the first product that reads what it brings, a scatter beside the one that makes what it sends.
    """
    pieces: dict[int, list[int]] = {}
    taken: set[int] = set()
    for before, after in edges:
        for link, product, function in ((before, after, "all_gather"), (after, before, "reduce_scatter")):
            head = groups[link].head
            is_piece = _is_link(head) and head.function == function and axis_of(head) == TENSOR_AXIS
            if is_piece and link not in taken and groups[product].head.kind is OpKind.CONTRACTION:
                taken.add(link)
                pieces.setdefault(product, []).append(link)
    return pieces


def _behind_rings(estimate: Estimate, rings: Mapping[int, _Ring], overhead_s: float) -> Estimate:
    """Attentions that wait for their rings: each step is hidden behind the work on one of the blocks, but for the last.

    An attention of W seconds in n blocks whose n - 1 exchanges take R in all ends after max(W, W / n + R). Kernels of
    rings are written so (Transformer Engine's `AttnFuncWithCPAndKVP2P`), whatever else a software stack hides. Each
    block is a kernel of its own and has its overhead.
    """
    if not rings:
        return estimate
    core_s, spread_s = estimate.core_s.copy(), estimate.spread_s.copy()
    for row, ring in rings.items():
        for seconds in (core_s, spread_s):
            seconds[row] += (ring.blocks - 1) * overhead_s
            seconds[row] += np.maximum(0.0, ring.seconds - (1 - 1 / ring.blocks) * seconds[row])
    return replace(estimate, core_s=core_s, spread_s=spread_s)


def _hidden_exchanges(
    heads: Mapping[int, Op], links: Mapping[int, float], calibration: Calibration
) -> dict[int, float]:
    """The seconds of the exchanges of experts that run beside the passes of another microbatch."""
    if not calibration.stack.hides_exchanges:
        return {}
    return {index: links[index] for index, head in heads.items() if is_expert_exchange(head)}


def _floor_s(
    links: Mapping[int, float],
    hidden: Mapping[int, float],
    local: Sequence[OpGroup],
    estimate: Estimate,
    calibration: Calibration,
) -> FloatArray | float:
    """The longer of what the host needs to launch ops and of the exchanges of experts that run beside the pass."""
    return np.maximum(_launches_s(links, local, estimate, calibration), sum(hidden.values()))


def _launches_s(
    links: Mapping[int, float], local: Sequence[OpGroup], estimate: Estimate, calibration: Calibration
) -> FloatArray | float:
    """The host's time for launching all ops but views; all ops one after the other where it launches none ahead."""
    if not calibration.stack.launches_ahead:
        one_by_one: FloatArray = estimate.spread_s.sum(axis=0)
        return one_by_one + sum(links.values())
    on_cores = (group for group, kind in zip(local, estimate.kinds, strict=True) if kind is not CoreKind.NONE)
    launched = len(links) + sum(group.head.rule.trips for group in on_cores)  # those of a loop in every trip
    is_backward = bool(local) and local[0].head.phase is Phase.BACKWARD
    return calibration.overhead_s * launched * (BACKWARD_LAUNCHES if is_backward else 1.0)


def is_expert_exchange(op: Op) -> bool:
    """Whether an op is an all-to-all between the devices of experts."""
    return _is_link(op) and op.function == "all_to_all" and axis_of(op) == EXPERT_AXIS


def _is_link(op: Op) -> bool:
    return op.kind is OpKind.COLLECTIVE


def _seconds(op: Op, link_s: Callable[[Op], float] | None) -> float:
    if link_s is None:
        raise ScheduleError(
            f"op {op.id!r} is a collective ({op.function}) and nobody says how long it takes; pass link_s, "
            "for example from phaze.cost.price_collective on its mesh axis."
        )
    return float(link_s(op))


def _columns(
    values: FloatArray | NDArray[np.uint8], placed: Sequence[int], links: Mapping[int, float | FloatArray], count: int
) -> FloatArray:
    """[accelerator, op] from [priced op, accelerator] and the seconds of links."""
    columns = np.zeros((values.shape[1], count))
    columns[:, list(placed)] = values.T
    for index, seconds in links.items():
        columns[:, index] = seconds
    return columns


def _bindings(estimate: Estimate, placed: Sequence[int], links: Mapping[int, float], count: int) -> NDArray[np.uint8]:
    """What decides the time of each job."""
    return _columns(estimate.spread_binding, placed, dict.fromkeys(links, len(BINDINGS)), count).astype(np.uint8)


def _on_one_core(
    links: Mapping[int, float], calibration: Calibration, chips: AcceleratorArray
) -> Mapping[int, float | FloatArray]:
    """Seconds of links; where nothing may run beside them so many that they hold all cores instead."""
    if calibration.stack.hides_links:
        return links
    cores = np.maximum(chips.tensor_cores, chips.vector_cores).astype(np.float64)
    return {index: 2 * cores * seconds for index, seconds in links.items()}


def _spread(estimate: Estimate, placed: Sequence[int], alone: Mapping[int, float], count: int) -> FloatArray:
    """Spread times; infinite for ops that hold no core, all cores for links beside which nothing runs."""
    spread = np.full((estimate.spread_s.shape[1], count), np.inf)
    for index, seconds in alone.items():
        spread[:, index] = seconds
    for row, (index, kind) in enumerate(zip(placed, estimate.kinds, strict=True)):
        if kind is not CoreKind.NONE:
            spread[:, index] = estimate.spread_s[row]
    return spread
