"""The strategies of an op on a tensor-parallel axis of t devices, from its rule alone.

A strategy says which factors are split how many ways (none: every device does all of it), and so which layout each
operand must have and each result gets. The ground rules, without which the best answer is data parallelism:

 1. the batch factor is never split;
 2. a parameter that is contracted or looked up is split t ways and never gathered;
 3. a factor that must stay whole is not split, nor one of a dimension that a rule covers in part;
 4. heads (what a product without parameters is batched over) are split evenly; other factors may split unevenly.

A result that sums over a split factor is a partial sum. It is settled where it is made: reduced to whole, reduced and
scattered to a split, or passed on as it is to an op that is linear in it. Splitting a normalized factor costs the
reduction of its statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from phaze.ir import FactorKind, Graph, Op, OpKind, Role
from phaze.ir.rule import names_of
from phaze.shard.layout import PARTIAL, WHOLE, Layout, layout_of

__all__ = ["Strategy", "head_factors", "op_strategies", "split_choices"]

_LINEAR = frozenset({"add", "cast", "negative", "scale", "scale_backward", "sum", "expand", "reshape", "transpose"})
_MASKED_LOOKUPS = frozenset({"embedding", "pick", "scatter_add"})
_ROUTED = frozenset({"combine", "combine_rows_backward", "combine_weights_backward", "dispatch", "undispatch"})
_BY_PARAMETER = frozenset({OpKind.CONTRACTION, OpKind.CONVOLUTION, OpKind.LOOKUP})

Ways = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to run an op: split factors, operand layouts, and result layouts as made and as settled."""

    ways: Ways
    operands: tuple[Layout, ...]
    made: tuple[Layout, ...]
    results: tuple[Layout, ...]


def split_choices(op: Op, width: int, *, only_factors: Iterable[str] | None = None) -> list[Ways]:
    """Every admissible choice of split factors, the empty one first."""
    rule = op.rule
    covered_in_part = frozenset(
        n for dims in rule.tensors() for dim in dims if dim.size is not None for n in dim.factors
    )
    allowed = [
        factor.name
        for factor in rule.factors
        if not factor.is_batch and factor.name not in covered_in_part and _may_split(op, factor.name)
    ]
    if only_factors is not None:
        wanted = frozenset(only_factors)
        allowed = [name for name in allowed if name in wanted]
    choices: list[Ways] = [()]
    choices += [((name, width),) for name in allowed if fills(rule.size(name), width)]
    for major, minor in _neighbours(op, allowed):
        ways = rule.size(major)
        if 1 < ways < width and width % ways == 0 and rule.size(minor) % (width // ways) == 0:
            choices.append(((major, ways), (minor, width // ways)))
    return choices


def op_strategies(graph: Graph, op: Op, choices: Sequence[Ways], width: int) -> list[Strategy]:
    """The strategies of an op for the given split choices; none where the ground rules leave none."""
    strategies = []
    for ways in choices:
        split = dict(ways)
        operands = tuple(layout_of(op.rule, dims, split) for dims in op.rule.operands)
        if not _keeps_parameters_split(graph, op, operands, width):
            continue
        made = tuple(_result_layout(op, index, split) for index in range(len(op.outputs)))
        strategies += [
            Strategy(ways=ways, operands=operands, made=made, results=results)
            for results in _settled(graph, op, made, width)
        ]
    if op.function in _LINEAR and () in choices:
        strategies += _passing_partial(graph, op)
    return strategies


def head_factors(graph: Graph, op: Op) -> tuple[str, ...]:
    """The factors that a product of two activations is batched over, besides the batch: attention heads, or experts."""
    if op.kind not in (OpKind.CONTRACTION, OpKind.ATTENTION) or _parameter_operands(graph, op):
        return ()
    shared = frozenset.intersection(*op.rule.operand_names[:2], op.rule.result_names[0])
    if op.kind is OpKind.ATTENTION:
        shared = op.rule.operand_names[0] & op.rule.operand_names[1] & op.rule.operand_names[2]
    return tuple(f.name for f in op.rule.factors if f.name in shared and not f.is_batch)


def fills(size: int, ways: int) -> bool:
    """Whether every device gets a part when chunks of ceil(size / ways) are dealt out."""
    return (ways - 1) * -(-size // ways) < size


def _may_split(op: Op, name: str) -> bool:
    kind = op.rule.factor(name).kind
    if op.function in _ROUTED:
        return name == _expert_factor(op)
    if kind is FactorKind.LOOKUP:
        return op.function in _MASKED_LOOKUPS
    if kind is FactorKind.NORMALIZED:
        return op.kind in (OpKind.SOFTMAX, OpKind.NORM)
    if op.kind is OpKind.ATTENTION:
        return name in op.rule.operand_names[0] and (name in op.rule.result_names[0])
    return kind is FactorKind.FREE


def _expert_factor(op: Op) -> str:
    """The leading factor of the tensor that holds one block of rows per expert."""
    dims = next(dims for dims in op.rule.tensors() if len(dims) == 4)
    return dims[0].factors[0]


def _neighbours(op: Op, allowed: Sequence[str]) -> list[tuple[str, str]]:
    pairs: dict[tuple[str, str], None] = {}
    for dims in op.rule.tensors():
        names = [name for dim in dims for name in dim.factors]
        for pair in pairwise(names):
            if pair[0] in allowed and pair[1] in allowed:
                pairs[pair] = None
    return list(pairs)


def _parameter_operands(graph: Graph, op: Op) -> list[int]:
    return [index for index, name in enumerate(op.inputs) if graph.tensors[graph.storage(name)].role is Role.PARAMETER]


def _keeps_parameters_split(graph: Graph, op: Op, operands: Sequence[Layout], width: int) -> bool:
    if op.kind not in _BY_PARAMETER:
        return True
    return all(operands[index].ways == width for index in _parameter_operands(graph, op))


def _result_layout(op: Op, index: int, split: Mapping[str, int]) -> Layout:
    names = names_of(op.rule.results[index])
    if any(name not in names for name in split):
        return PARTIAL
    return layout_of(op.rule, op.rule.results[index], split)


def _settled(graph: Graph, op: Op, made: tuple[Layout, ...], width: int) -> list[tuple[Layout, ...]]:
    """What partial results become: one choice for the first, whole for the others; as made where none is partial."""
    if not any(layout.is_partial for layout in made):
        return [made]
    targets: list[Layout] = [WHOLE]
    if made[0].is_partial:
        dims = op.rule.results[0]
        names = [n for dim in dims for n in dim.factors if dim.size is None]
        free = [n for n in names if not op.rule.factor(n).is_batch and fills(op.rule.size(n), width)]
        targets += [layout_of(op.rule, dims, {name: width}) for name in free]
        if op.function != "max":
            targets.append(PARTIAL)
    settled = []
    for target in dict.fromkeys(targets):
        rest = tuple(WHOLE if layout.is_partial else layout for layout in made[1:])
        settled.append((target if made[0].is_partial else made[0], *rest))
    return settled


def _passing_partial(graph: Graph, op: Op) -> list[Strategy]:
    if any(graph.tensors[name].role is not None for name in op.inputs):
        return []
    operands, results = (PARTIAL,) * len(op.inputs), (PARTIAL,) * len(op.outputs)
    return [Strategy(ways=(), operands=operands, made=results, results=results)]


def statistics_bytes(op: Op, ways: Ways) -> int:
    """Bytes of single-precision statistics to reduce because a normalized factor is split; 0 where none is."""
    rule = op.rule
    if not any(rule.factor(name).kind is FactorKind.NORMALIZED for name, _ in ways):
        return 0
    rows = math.prod(f.size for f in rule.factors if f.kind is not FactorKind.NORMALIZED)
    return 2 * 4 * rows
