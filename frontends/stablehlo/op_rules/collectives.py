"""Rules of collectives, custom calls and sharding annotations that a module already has: kept, and said in notes."""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.stablehlo.op_rules.products_and_reductions import REDUCTIONS
from phaze.frontends.stablehlo.symbols import Broadcast, Call, Constant, Shape, Tensor, Unsupported, Values
from phaze.ir import Dim, Dims, Factor, FactorKind, OpKind, Rule
from phaze.ir.shape_rules import elementwise_rule

__all__ = ["COLLECTIVES", "EMPTY_MESH"]

MOST_CHARACTERS = 200
"""Shardings are cut here: their text is a hint for people, and those of large meshes are long."""

_RESULT_ANNOTATIONS = frozenset({"xla.sdy.FuncResultSharding"})
"""Custom calls around the results of a function, which say how these should lie and nothing about what is computed."""

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


def _sharding(call: Call) -> Values:
    """An annotation of how a tensor should be sharded: a view that keeps the annotation."""
    given = call.attribute("sharding") or call.attribute("mhlo.sharding") or call.attribute("sdy.sharding") or ""
    text = str(given.get("text", given) if isinstance(given, dict) else given)[:MOST_CHARACTERS]
    value = call.values[0]
    if EMPTY_MESH in text or isinstance(value, Constant | Broadcast):
        return (value,)
    call.recorder.note("sharding constraint already present, kept as a view")
    rule = elementwise_rule(value.shape, value.shape)
    return call.emit(OpKind.VIEW, "sharding_constraint", rule, call.id(0), attributes={"sharding": text})


def _custom_call(call: Call) -> Values:
    """Custom calls that are known by the name of their target; all others are opaque."""
    target = str(call.attribute("call_target_name") or "")
    if target in _RESULT_ANNOTATIONS:
        return call.values
    if target in ("Sharding", "annotate_device_placement", "LayoutConstraint"):
        return _sharding(call)
    if target in ("SPMDFullToShardShape", "SPMDShardToFullShape"):
        call.recorder.note("parts that run per device (shard_map) are priced at their local shapes")
        raise Unsupported
    if "topk" in target.lower() or "top_k" in target.lower():
        return REDUCTIONS["top_k"](call)
    if "fmha" in target or "attention" in target.lower():
        return _attention(call, target)
    raise Unsupported


def _attention(call: Call, target: str) -> Values:
    """A fused attention kernel of query, key and value, with the batch first and the head size last.

    Of the two dimensions between, the smaller one is taken for the heads, the larger one for the positions.
    """
    call.recorder.note(f"fused attention: custom call {target}")
    if len(call.values) < 3 or any(len(call.shape(index)) != 4 for index in range(3)):
        raise Unsupported
    query, key, value = (call.shape(index) for index in range(3))
    heads, length = (2, 1) if query[2] <= query[1] else (1, 2)
    if query[heads] % key[heads] or call.out_shape() != (*query[:3], value[3]):
        raise Unsupported
    sizes = {"b": query[0], "g": key[heads], "r": query[heads] // key[heads], "s": query[length], "d": query[3]}
    sizes |= {"t": key[length], "e": value[3]}
    b, g, s, t, d, e = (Dim((name,)) for name in "bgstde")
    grouped = Dim(("g", "r")) if sizes["r"] > 1 else g

    def dims(head: Dim, position: Dim, width: Dim) -> Dims:
        return (b, position, head, width) if heads == 2 else (b, head, position, width)

    operands, result = (dims(grouped, s, d), dims(g, t, d), dims(g, t, e)), dims(grouped, s, e)
    used = {name for side in (*operands, result) for dim in side for name in dim.factors}
    kinds = {"t": FactorKind.NORMALIZED}
    factors = tuple(Factor(n, size, kinds.get(n, FactorKind.FREE)) for n, size in sizes.items() if n in used)
    inputs = [call.id(index) for index in range(3)]
    (attended,) = call.emit(OpKind.ATTENTION, "attention", Rule(operands, (result,), factors), *inputs, outputs=(0,))
    scratch = [
        call.recorder.constant(("scratch", call.recorder.unique()), call.out_shape(index), call.out_dtype(index))
        for index in range(1, len(call.operation.types))
    ]
    return (attended, *scratch)


_COLLECTIVE_NAMES = (
    "all_gather all_reduce reduce_scatter all_to_all collective_permute collective_broadcast cross-replica-sum "
    "all_slice manual_all_reduce"
)

COLLECTIVES: dict[str, Callable[[Call], Values]] = {
    **dict.fromkeys(_COLLECTIVE_NAMES.split(), _collective),
    "custom_call": _custom_call,
    "sharding_constraint": _sharding,
    "reshard": _sharding,
    "sharding_group": _sharding,
}
