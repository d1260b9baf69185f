"""Rules of collectives and sharding annotations that a module already has: kept, and said in notes."""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.stablehlo.symbols import Broadcast, Call, Constant, Shape, Tensor, Unsupported, Values
from phaze.ir import Dim, Dims, Factor, FactorKind, OpKind, Rule
from phaze.ir.shape_rules import elementwise_rule

__all__ = ["COLLECTIVES", "EMPTY_MESH", "sharding"]

MOST_CHARACTERS = 200
"""Shardings are cut here: their text is a hint for people, and those of large meshes are long."""

EMPTY_MESH = "@empty_mesh"
"""The mesh that JAX names where there is none."""


def _collective(call: Call) -> Values:
    """One collective op for each operand. A dimension that changes size is covered in part by the smaller side."""
    if len(call.values) != len(call.operation.types):
        raise Unsupported
    call.recorder.note(f"collective already present: {call.name}")
    results: list[Tensor] = []
    for index in range(len(call.values)):
        shape, out_shape = call.shape(index), call.out_shape(index)
        if len(shape) != len(out_shape):
            raise Unsupported
        larger = tuple(map(max, shape, out_shape))
        dims = tuple(Dim((f"d{dim}",)) for dim in range(len(shape)))
        kinds = [FactorKind.FREE if a == b else FactorKind.WHOLE for a, b in zip(shape, out_shape, strict=True)]
        factors = tuple(Factor(f"d{dim}", size, kinds[dim]) for dim, size in enumerate(larger))
        rule = Rule((_covering(dims, shape, larger),), (_covering(dims, out_shape, larger),), factors)
        (value,) = call.emit(
            OpKind.COLLECTIVE, call.name, rule, call.id(index), outputs=(index,), attributes=_participants(call)
        )
        assert isinstance(value, Tensor)
        results.append(value)
    return tuple(results)


def _participants(call: Call) -> dict[str, str]:
    """Who takes part in a collective, as the module writes it."""
    given = call.attribute("replica_groups")
    return {"replica_groups": given[:MOST_CHARACTERS]} if isinstance(given, str) else {}


def _covering(dims: Dims, shape: Shape, larger: Shape) -> Dims:
    """The dimensions of the operand or the result: those smaller than the larger of the two cover it in part."""
    sizes = zip(dims, shape, larger, strict=True)
    return tuple(dim if size == full else Dim(dim.factors, size) for dim, size, full in sizes)


def sharding(call: Call) -> Values:
    """An annotation of how a tensor should be sharded: a view that keeps the annotation."""
    given = call.attribute("sharding") or call.attribute("mhlo.sharding") or call.attribute("sdy.sharding") or ""
    text = str(given.get("text", given) if isinstance(given, dict) else given)[:MOST_CHARACTERS]
    value = call.values[0]
    if EMPTY_MESH in text or isinstance(value, Constant | Broadcast):
        return (value,)
    call.recorder.note("sharding constraint already present, kept as a view")
    rule = elementwise_rule(value.shape, value.shape)
    return call.emit(OpKind.VIEW, "sharding_constraint", rule, call.id(0), attributes={"sharding": text})


_COLLECTIVE_NAMES = (
    "all_gather all_reduce reduce_scatter all_to_all collective_permute collective_broadcast cross-replica-sum "
    "all_slice manual_all_reduce"
)

COLLECTIVES: dict[str, Callable[[Call], Values]] = {
    **dict.fromkeys(_COLLECTIVE_NAMES.split(), _collective),
    "sharding_constraint": sharding,
    "reshard": sharding,
    "sharding_group": sharding,
}
