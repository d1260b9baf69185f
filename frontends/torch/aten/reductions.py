"""Torch reductions over dimensions, sorting, the k largest, and counting."""

from __future__ import annotations

from phaze.frontends.torch.operator_call import (
    OperatorCall,
    OperatorTable,
    Unsupported,
    Value,
    dims_of,
    factors_of,
)
from phaze.ir import Dim, Factor, FactorKind, OpKind, Rule
from phaze.ir.shape_rules import reduction_rule

__all__ = ["REDUCTIONS"]

_FUNCTIONS = {"amax": "max", "amin": "min"}


def _reduced_dims(call: OperatorCall, rank: int) -> tuple[int, ...]:
    """The dimensions that a call reduces over; all of them where it names none."""
    named = call["dim"]
    if named is None or (isinstance(named, list | tuple) and not named):
        return tuple(range(rank))
    return tuple(index % rank for index in ((named,) if isinstance(named, int) else named)) if rank else ()


def _reduce(call: OperatorCall) -> Value:
    x = call.tensor("self")
    shape = call.shape(x)
    rule = reduction_rule(shape, _reduced_dims(call, len(shape)), keep=bool(call["keepdim"]))
    outputs = call.nonempty_outputs()
    if len(outputs) > 1:
        rule = Rule(rule.operands, rule.results * len(outputs), rule.factors)
    return call.emit(OpKind.REDUCTION, _FUNCTIONS.get(call.name, call.name), rule, x, outputs=outputs)


def _sort(call: OperatorCall) -> Value:
    """Sorting or the k largest along a dimension, which stays whole."""
    x = call.tensor("self")
    shape, result = call.shape(x), call.out_shape()
    if not shape:
        raise Unsupported
    along = (call["dim"] if isinstance(call["dim"], int) else -1) % len(shape)
    factors = factors_of(shape, (along,))
    operand = sorted_dims = dims_of(shape)
    if result[along] != shape[along]:
        factors += (Factor("k", result[along], FactorKind.WHOLE),)
        sorted_dims = (*operand[:along], Dim(("k",)), *operand[along + 1 :])
    outputs = call.nonempty_outputs()
    rule = Rule((operand,), (sorted_dims,) * len(outputs), factors)
    return call.emit(OpKind.SORT, "top_k" if call.name == "topk" else call.name, rule, x, outputs=outputs)


def _count(call: OperatorCall) -> Value:
    """How often each bin occurs."""
    x = call.tensor("self")
    dims, factors = dims_of(call.shape(x)), factors_of(call.shape(x))
    bins = Factor("v", call.out_shape()[0], FactorKind.LOOKUP)
    return call.emit(OpKind.SCATTER, "count", Rule((dims,), ((Dim(("v",)),),), (*factors, bins)), x)


_REDUCED = "sum mean amax amin max min prod any all argmax argmin logsumexp std var var_mean std_mean norm median"

REDUCTIONS: OperatorTable = {
    **dict.fromkeys((*_REDUCED.split(), "linalg_vector_norm", "count_nonzero"), _reduce),
    **dict.fromkeys(("sort", "topk", "argsort"), _sort),
    **dict.fromkeys(("histc", "bincount"), _count),
}
