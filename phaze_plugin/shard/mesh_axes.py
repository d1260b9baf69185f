"""Mesh axes inside of a layer by name, the collectives of a sliced graph on them, and what these take.

A collective on the axes of contexts and experts is written by factors like every other op: what devices exchange is the
factor `ways`, which counts them and moves from one dimension to another. Its bytes follow from the rule, so that they
stay right at other microbatch sizes, element types and tensor-parallel slices (`whole_bytes`).

`Axis` is the tensor-parallel axis with what collectives cost on it, and on the axes around it. A tensor is taken from
one layout to another (resharding, `collective_of`) by

partial -> whole         all-reduce
partial -> split         reduce-scatter
split   -> whole         all-gather
split   -> other split   all-to-all
whole   -> split         nothing: each device keeps its part
anything -> partial      impossible, unless it already is
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from phaze.cost import IDEAL, Calibration, Collective, price_collective
from phaze.cost.collective_prices import Line, collective_lines
from phaze.hardware import Cluster
from phaze.ir import Dim, Dims, Factor, FactorKind, Graph, Op, OpKind, Rule
from phaze.shard.layout import Layout

__all__ = [
    "CONTEXT_AXIS",
    "COPIES",
    "EXCHANGE",
    "EXPERT_AXIS",
    "IMPOSSIBLE",
    "RING",
    "TENSOR_AXIS",
    "WAYS",
    "Axis",
    "axis_of",
    "collective_of",
    "collective_op",
    "is_exchange",
    "is_possible",
    "is_ring",
    "nearest_divisors",
    "regrouped",
    "whole_bytes",
]

TENSOR_AXIS = "tensor"
"""The tp devices that share a layer, innermost on the network."""

CONTEXT_AXIS = "context"
"""The cp devices that share a sequence, at a stride of tp."""

EXPERT_AXIS = "expert"
"""The ep devices that experts are divided over, borrowed from the dp x cp ones, at a stride of tp."""

EXCHANGE = "exchange"
"""The attribute of an attention, and of the collectives around it, that says how its keys are exchanged."""

RING = "ring"
"""The exchange in which keys go around in steps, each behind the product with the block before."""

COPIES = "copies"
"""The attribute of an all-to-all that says how many experts each token is sent to."""

WAYS = "ways"
"""The factor of a collective's rule that counts its devices."""


def axis_of(op: Op) -> str:
    """The name of the mesh axis of a collective."""
    axis = op.attribute("axis")
    return axis if isinstance(axis, str) else TENSOR_AXIS


def is_exchange(op: Op) -> bool:
    """Whether an op is a collective of contexts or experts, which stands in a graph before it is sharded."""
    return op.kind is OpKind.COLLECTIVE and axis_of(op) in (CONTEXT_AXIS, EXPERT_AXIS)


def is_ring(op: Op) -> bool:
    """Whether a collective goes around in steps, each behind a block of the attention that it belongs to."""
    return op.kind is OpKind.COLLECTIVE and op.attribute(EXCHANGE) == RING


def regrouped(rule: Rule, ways: int, *, gathered: str, divided: str | None = None) -> Rule:
    """The rule of a collective on a tensor whose rule is the identity.

    Devices hold 1/ways of the factor `gathered` before, and all of it afterwards. In an all-gather that is all; in an
    all-to-all they hold 1/ways of the factor `divided` instead. Of that one, every ways-th element goes to a device, so
    that runs of it which tensor-parallel devices hold stay in place.
    """
    (dims,) = rule.operands
    factors = []
    for factor in rule.factors:
        is_cut = factor.name in (gathered, divided)
        kind = FactorKind.WHOLE if factor.name == gathered else FactorKind.FREE
        factors.append(replace(factor, size=-(-factor.size // ways) if is_cut else factor.size, kind=kind))
    after = tuple(_with_ways(dim, gathered, is_major=True) for dim in dims)
    before = dims if divided is None else tuple(_with_ways(dim, divided, is_major=False) for dim in dims)
    return Rule((before,), (after,), (*factors, Factor(WAYS, ways, FactorKind.WHOLE)))


def _with_ways(dim: Dim, name: str, *, is_major: bool) -> Dim:
    """A dimension with the factor of devices beside another factor."""
    if name not in dim.factors:
        return dim
    place = dim.factors.index(name) + (0 if is_major else 1)
    return Dim((*dim.factors[:place], WAYS, *dim.factors[place:]), dim.size)


def collective_op(
    function: str,
    axis: str,
    rule: Rule,
    source: str,
    result: str,
    op: Op,
    extra: tuple[tuple[str, str | int], ...] = (),
) -> Op:
    """A collective that belongs to another op: it has that op's module and phase."""
    return Op(
        id=f"{result}:{axis}_{function}" if result == op.id or result in op.outputs else result,
        kind=OpKind.COLLECTIVE,
        function=function,
        rule=rule,
        inputs=(source,),
        outputs=(result,),
        module=op.module,
        phase=op.phase,
        attributes=(("axis", axis), *extra),
    )


def whole_bytes(graph: Graph, op: Op, ways: int) -> float:
    """The size of the tensor that a collective works on, put together from all devices.

    `collective_bytes` says so on the tensor axis; on the others it follows from the rule.
    """
    if op.collective_bytes or axis_of(op) == TENSOR_AXIS:
        return float(op.collective_bytes)
    sides: tuple[Dims, ...] = (*op.rule.operands, *op.rule.results)
    elements = max(math.prod(op.rule.shape(dims)) for dims in sides)
    size = float(elements * graph.tensors[op.outputs[0]].dtype.size_bytes)
    return size * ways if op.function == "all_to_all" else size


def nearest_divisors(count: int, wanted: int) -> str:
    """Which divisors of a number lie around another one, in words."""
    divisors = [candidate for candidate in range(1, count + 1) if count % candidate == 0]
    below = [str(divisor) for divisor in divisors if divisor < wanted][-1:]
    above = [str(divisor) for divisor in divisors if divisor > wanted][:1]
    nearest = (*below, *above)
    return f"the nearest that do are {' and '.join(nearest)}" if len(nearest) > 1 else f"the nearest is {nearest[0]}"


IMPOSSIBLE = float("inf")
"""The seconds of a move that no collective makes."""

_PROBED_BYTES = 2**40
"""The size at which a collective's energy is asked for."""


@dataclass(frozen=True, slots=True)
class _CollectiveCost:
    """A collective's time, the least of some straight lines in its bytes, and its energy; no bytes have no energy."""

    lines: tuple[Line, ...]
    j_per_byte: float

    def seconds(self, size: float) -> float:
        """The time of a size."""
        return min(line.latency_s + line.s_per_byte * size for line in self.lines)


@dataclass(frozen=True, slots=True)
class Axis:
    """The tensor-parallel mesh axis: the innermost `tp` devices of a cluster, and what collectives cost on them.

    Collectives of contexts and experts run on axes of `cp` and `ep` devices that lie around this one: every tp-th
    device of the cluster (`link_s`).
    """

    cluster: Cluster
    tp: int
    calibration: Calibration = IDEAL
    cp: int = 1
    ep: int = 1
    _costs: Mapping[str, Mapping[Collective, _CollectiveCost]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        axes = {TENSOR_AXIS: (self.tp, 1), CONTEXT_AXIS: (self.cp, self.tp), EXPERT_AXIS: (self.ep, self.tp)}
        costs = {
            name: self._probed(size, stride) for name, (size, stride) in axes.items() if name == TENSOR_AXIS or size > 1
        }
        object.__setattr__(self, "_costs", costs)

    def _probed(self, size: int, stride: int) -> dict[Collective, _CollectiveCost]:
        """The cost of every collective on so many devices at a stride; one device talks to nobody."""
        if size == 1:
            return dict.fromkeys(Collective, _CollectiveCost((Line(0.0, 0.0),), 0.0))
        costs = {}
        for collective in Collective:
            price = price_collective(collective, float(_PROBED_BYTES), self.cluster, size, stride)
            lines = collective_lines(collective, self.cluster, size, stride, calibration=self.calibration)
            costs[collective] = _CollectiveCost(lines, float(price.energy_j) / _PROBED_BYTES)
        return costs

    def devices_of(self, axis: str) -> int:
        """How many devices a mesh axis has."""
        return {TENSOR_AXIS: self.tp, CONTEXT_AXIS: self.cp, EXPERT_AXIS: self.ep}[axis]

    def seconds(self, collective: Collective, tensor_bytes: float, axis: str = TENSOR_AXIS) -> float:
        """The time of a collective on a tensor of so many bytes in all; an all-to-all moves only a device's share."""
        return self._costs[axis][collective].seconds(self._priced_bytes(collective, tensor_bytes, axis))

    def seconds_of_many(self, collective: Collective, tensor_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """The times of a collective on tensors of so many bytes each; equal to `seconds` on each of them."""
        cost = self._costs[TENSOR_AXIS][collective]
        priced = tensor_bytes / self.tp if collective is Collective.ALL_TO_ALL else tensor_bytes
        times: NDArray[np.float64] = np.minimum.reduce(
            [line.latency_s + line.s_per_byte * priced for line in cost.lines]
        )
        return times

    def link_s(self, graph: Graph, op: Op) -> float:
        """The time of a collective op of a sliced graph, on the mesh axis that it names.

        In a ring, every step takes one device's part to the next device.
        """
        axis = axis_of(op)
        devices = self.devices_of(axis)
        size_bytes = whole_bytes(graph, op, devices)
        if is_ring(op):
            return (devices - 1) * self.seconds(Collective.POINT_TO_POINT, size_bytes / devices, axis)
        copies = op.attribute(COPIES)
        if self.calibration.stack.sends_tokens_once and isinstance(copies, int):
            lines = collective_lines(
                Collective.ALL_TO_ALL, self.cluster, devices, self.tp, calibration=self.calibration, copies=copies
            )
            return _CollectiveCost(lines, 0.0).seconds(size_bytes / devices)
        return self.seconds(Collective(op.function), size_bytes, axis)

    def link_j(self, graph: Graph, op: Op) -> float:
        """The energy of one device's part of a collective op; a ring sends what an all-gather sends."""
        axis = axis_of(op)
        collective = Collective(op.function)
        size_bytes = whole_bytes(graph, op, self.devices_of(axis))
        return self._costs[axis][collective].j_per_byte * self._priced_bytes(collective, size_bytes, axis)

    def _priced_bytes(self, collective: Collective, tensor_bytes: float, axis: str) -> float:
        """The bytes that a collective is priced by: a device's share for an all-to-all, else the whole tensor."""
        return tensor_bytes / self.devices_of(axis) if collective is Collective.ALL_TO_ALL else tensor_bytes

    def move_s(self, before: Layout, after: Layout, tensor_bytes: float) -> float:
        """Seconds from one layout to another; infinite where that is impossible."""
        if not is_possible(before, after):
            return IMPOSSIBLE
        collective = collective_of(before, after)
        return 0.0 if collective is None else self.seconds(collective, tensor_bytes)


def is_possible(before: Layout, after: Layout) -> bool:
    """Whether a tensor can get from one layout to another."""
    return before == after or not after.is_partial


def collective_of(before: Layout, after: Layout) -> Collective | None:
    """The collective of a possible move; None where no device needs another."""
    if before == after or before.is_whole:
        return None
    if before.is_partial:
        return Collective.REDUCE_SCATTER if after.splits else Collective.ALL_REDUCE
    return Collective.ALL_TO_ALL if after.splits else Collective.ALL_GATHER
