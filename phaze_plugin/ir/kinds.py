"""What each kind of op asks of its rule."""

from __future__ import annotations

from collections.abc import Callable

from phaze.errors import GraphError
from phaze.ir.functions import OPERANDS_AND_RESULTS
from phaze.ir.op import Op, OpKind
from phaze.ir.rule import FactorKind, Rule, names_of

__all__ = ["check_rule"]

LARGEST_WORK = 2**62

_NOT_LOOPED = frozenset({OpKind.VIEW, OpKind.COPY, OpKind.SORT, OpKind.OPAQUE, OpKind.COLLECTIVE})

_PARTLY_COVERED = frozenset(
    {
        OpKind.VIEW,
        OpKind.COPY,
        OpKind.CONVOLUTION,
        OpKind.REDUCTION,
        OpKind.LOOKUP,
        OpKind.SCATTER,
        OpKind.SORT,
        OpKind.COLLECTIVE,
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
    complaint = _CHECKS[op.kind](rule) if op.kind in _CHECKS else ""
    complaint = complaint or _function_complaint(op)
    if complaint:
        raise GraphError(f"op {op.id!r} of kind {op.kind}: its rule '{rule}' {complaint}.")


def _function_complaint(op: Op) -> str:
    rule = op.rule
    if op.kind not in _NOT_LOOPED and rule.work > LARGEST_WORK:
        return f"runs more than {LARGEST_WORK} times, which is more than can be counted"
    if op.function == "concatenate":
        return _concatenation(rule)
    if op.function not in OPERANDS_AND_RESULTS:
        return ""
    operands, results = OPERANDS_AND_RESULTS[op.function]
    if len(rule.operands) in operands and len(rule.results) >= results:
        return ""
    takes = " or ".join(str(count) for count in operands)
    return f"does not fit {op.function}, which takes {takes} operands and gives at least {results} results"


def _concatenation(rule: Rule) -> str:
    covered = [[dim for dim in dims if dim.size is not None] for dims in rule.operands]
    if any(len(dims) != 1 or len(dims[0].factors) != 1 for dims in covered):
        return "must cover one dimension of each operand in part"
    total = sum(dims[0].size or 0 for dims in covered)
    whole = rule.size(covered[0][0].factors[0])
    return "" if total == whole else f"joins parts of {total} in all into a dimension of {whole}"


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
