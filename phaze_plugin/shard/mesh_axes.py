"""Mesh axes inside of a layer by name, and the collectives that a sliced graph has on them.

A collective on the axes of contexts and experts is written by factors like every other op: what devices exchange is the
factor `ways`, which counts them and moves from one dimension to another. Its bytes follow from the rule, so that they
stay right at other microbatch sizes, element types and tensor-parallel slices (`whole_bytes`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from phaze.ir import Dim, Dims, Factor, FactorKind, Graph, Op, OpKind, Rule

__all__ = [
    "CONTEXT_AXIS",
    "EXCHANGE",
    "EXPERT_AXIS",
    "RING",
    "TENSOR_AXIS",
    "WAYS",
    "axis_of",
    "collective_op",
    "is_exchange",
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
