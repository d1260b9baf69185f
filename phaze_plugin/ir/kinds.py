"""What each kind of op asks of its rule."""

from __future__ import annotations

from collections.abc import Callable

from phaze.errors import GraphError
from phaze.ir.op import Op, OpKind, Phase
from phaze.ir.rule import FactorKind, Rule, names_of

__all__ = ["check_rule"]

_PARTLY_COVERED = frozenset(
    {
        OpKind.VIEW,
        OpKind.COPY,
        OpKind.CONVOLUTION,
        OpKind.REDUCTION,
        OpKind.LOOKUP,
        OpKind.SCATTER,
        OpKind.SORT,
        OpKind.OPAQUE,
    }
)


def check_rule(op: Op) -> None:
    """Raise GraphError where a rule does not fit the kind of its op."""
    rule = op.rule
    if op.kind not in _PARTLY_COVERED and any(dim.size is not None for dims in rule.tensors() for dim in dims):
        raise GraphError(f"op {op.id!r}: a rule of kind {op.kind} cannot cover a dimension in part: '{rule}'.")
    used = frozenset[str]().union(*(names_of(dims) for dims in rule.tensors()))
    unused = [factor.name for factor in rule.factors if factor.name not in used]
    if unused:
        raise GraphError(f"op {op.id!r}: factors {', '.join(unused)} of '{rule}' stand in no tensor.")
    complaint = _CHECKS[op.kind](rule) if op.kind in _CHECKS and op.phase is Phase.FORWARD else ""
    if complaint:
        raise GraphError(f"op {op.id!r} of kind {op.kind}: its rule '{rule}' {complaint}.")


def _product(rule: Rule) -> str:
    return "" if len(rule.operands) == 2 and len(rule.results) == 1 else "must have two operands and one result"


def _attention(rule: Rule) -> str:
    return "" if len(rule.operands) >= 3 else "must have query, key and value as operands"


def _elementwise(rule: Rule) -> str:
    results = rule.result_names
    if all(names <= result for names in rule.operand_names for result in results):
        return ""
    return "has an operand factor that a result lacks, so it is not elementwise"


def _normalizing(rule: Rule) -> str:
    return _needs(rule, FactorKind.NORMALIZED, "must mark the normalized factors with '~'")


def _looking_up(rule: Rule) -> str:
    return _needs(rule, FactorKind.LOOKUP, "must mark the looked-up factors with '?'")


def _reduction(rule: Rule) -> str:
    if len(rule.operands) != 1:
        return "must have one operand"
    is_inside = all(names <= rule.operand_names[0] for names in rule.result_names)
    return "" if is_inside else "has a result factor that its operand lacks"


def _view(rule: Rule) -> str:
    return "" if len(rule.operands) == 1 else "must have one operand"


def _needs(rule: Rule, kind: FactorKind, complaint: str) -> str:
    return "" if any(factor.kind is kind for factor in rule.factors) else complaint


_CHECKS: dict[OpKind, Callable[[Rule], str]] = {
    OpKind.CONTRACTION: _product,
    OpKind.CONVOLUTION: _product,
    OpKind.ATTENTION: _attention,
    OpKind.ELEMENTWISE: _elementwise,
    OpKind.DROPOUT: _elementwise,
    OpKind.SOFTMAX: _normalizing,
    OpKind.NORM: _normalizing,
    OpKind.LOOKUP: _looking_up,
    OpKind.SCATTER: _looking_up,
    OpKind.REDUCTION: _reduction,
    OpKind.VIEW: _view,
}
