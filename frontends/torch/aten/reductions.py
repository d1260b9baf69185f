"""Reductions over dimensions, sorting and counting."""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.torch.call import Call, Unsupported, Value
from phaze.ir import Dim, Factor, FactorKind, OpKind, Rule
from phaze.ir.shape_rules import reduction_rule

__all__ = ["REDUCTIONS", "reduced_dims"]

_NAMES = {"amax": "max", "amin": "min"}


def reduced_dims(call: Call, rank: int) -> tuple[int, ...]:
    """The dimensions that a call reduces over; all of them where it names none."""
    given = call["dim"]
    if given is None or (isinstance(given, list | tuple) and not given):
        return tuple(range(rank))
    return tuple(index % rank for index in ((given,) if isinstance(given, int) else given)) if rank else ()


def _reduce(call: Call) -> Value:
    x = call.tensor("self")
    shape = call.shape(x)
    rule = reduction_rule(shape, reduced_dims(call, len(shape)), keep=bool(call["keepdim"]))
    outputs = call.made()
    if len(outputs) > 1:
        rule = Rule(rule.operands, rule.results * len(outputs), rule.factors)
    return call.emit(OpKind.REDUCTION, _NAMES.get(call.name, call.name), rule, x, outputs=outputs)


def _sort(call: Call) -> Value:
    """Sorting or the k largest along a dimension, which stays whole."""
    x = call.tensor("self")
    shape, result = call.shape(x), call.out_shape()
    if not shape:
        raise Unsupported
    given = call["dim"]
    along = (given if isinstance(given, int) else -1) % len(shape)
    names = [f"d{index}" for index in range(len(shape))]
    factors = [Factor(name, size) for name, size in zip(names, shape, strict=True)]
    factors[along] = Factor(names[along], shape[along], FactorKind.WHOLE)
    operand = tuple(Dim((name,)) for name in names)
    sorted_dims = operand
    if result[along] != shape[along]:
        factors.append(Factor("k", result[along], FactorKind.WHOLE))
        sorted_dims = tuple(Dim(("k",)) if index == along else dim for index, dim in enumerate(operand))
    outputs = call.made()
    rule = Rule((operand,), (sorted_dims,) * len(outputs), tuple(factors))
    return call.emit(OpKind.SORT, "top_k" if call.name == "topk" else call.name, rule, x, outputs=outputs)


def _count(call: Call) -> Value:
    """How often each bin occurs."""
    x = call.tensor("self")
    dims = tuple(Dim((f"d{index}",)) for index in range(len(call.shape(x))))
    factors = tuple(Factor(f"d{index}", size) for index, size in enumerate(call.shape(x)))
    bins = Factor("v", call.out_shape()[0], FactorKind.LOOKUP)
    return call.emit(OpKind.SCATTER, "count", Rule((dims,), ((Dim(("v",)),),), (*factors, bins)), x)


_REDUCED = "sum mean amax amin max min prod any all argmax argmin logsumexp std var var_mean std_mean norm median"

REDUCTIONS: dict[str, Callable[[Call], Value]] = {
    **dict.fromkeys((*_REDUCED.split(), "linalg_vector_norm", "count_nonzero"), _reduce),
    **dict.fromkeys(("sort", "topk", "argsort"), _sort),
    **dict.fromkeys(("histc", "bincount"), _count),
}
