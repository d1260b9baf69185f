"""Layouts of tensors on the tensor-parallel devices, and the splits of an op, each with the layouts that it needs.

A layout says where the elements of a tensor lie. A tensor is *whole* (every device has all of it), *partial* (every
device has a summand of the same shape) or *split*. A split cuts a dimension, seen as `outer` runs of equal length,
inside each run into chunks of `chunk` elements: with outer = 1 device k holds one block; with outer = 3, as for the
fused columns (3 h d) cut by heads, it holds its part of each third. Device k of the axis holds chunk (k // stride) %
ways. The last chunk may be shorter. Users pin or forbid layouts with a `LayoutConstraint`.

An `OpSplit` says which factors of an op are split how many ways (none: every device does all of it), and so which
layout each operand must have and each result gets. Every admissible split is found from the op's rule alone. These
rules hold on an axis of tp devices; without them the best answer is data parallelism:

 1. the batch factor is never split (`split_choices`);
 2. a parameter that is contracted or looked up is split tp ways and never gathered (`_keeps_parameters_split`);
 3. a factor that must stay whole is not split, nor one of a dimension that a rule covers in part (`_may_split`,
    `split_choices`);
 4. heads (what a product without parameters is batched over, `head_factors`) are split evenly, which
    `sharding_problem.check_heads` sees to; other factors may split unevenly as long as no device is left without a part
    (`fills`).

A result that sums over a split factor is a partial sum. It is settled where it is made (`_settled`): reduced to whole,
reduced and scattered to a split, or left partial for an op that is linear in it (`_passing_partial`). Splitting a
normalized factor costs the reduction of its statistics (`statistics_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from phaze.errors import ShardError
from phaze.ir import Dims, DType, FactorKind, Graph, Op, OpKind, Role, Rule
from phaze.ir.rule import factor_names, names_of

__all__ = [
    "PARTIAL",
    "ROUTED",
    "WHOLE",
    "Layout",
    "LayoutConstraint",
    "OpSplit",
    "Split",
    "Ways",
    "admits",
    "check_constraints",
    "fills",
    "head_factors",
    "layout_of",
    "split_choices",
    "splits_of_op",
    "statistics_bytes",
]


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """One dimension that is cut into chunks."""

    dim: int
    outer: int
    chunk: int
    ways: int
    stride: int = 1

    def local_size(self, size: int, kept: int | None = None) -> int:
        """The part of a dimension on the device that holds most of it.

        `kept` is what earlier splits of the same dimension leave of it, in whole runs of this split; None stands for
        all of it.
        """
        run = size // self.outer
        return (size if kept is None else kept) // run * min(self.chunk, run)

    def __str__(self) -> str:
        run = "" if self.outer == 1 else f" in {self.outer} runs"
        return f"dim {self.dim}{run} / {self.ways}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Whole, partial, or split along one or more dimensions."""

    splits: tuple[Split, ...] = ()
    is_partial: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether every device has the final value of every element."""
        return not self.splits and not self.is_partial

    @property
    def is_strided(self) -> bool:
        """Whether a device's part of some dimension is not one block."""
        return any(split.outer > 1 for split in self.splits)

    @property
    def ways(self) -> int:
        """Into how many different parts the tensor is cut."""
        product = 1
        for split in self.splits:
            product *= split.ways
        return product

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape on the device that holds most."""
        sizes = list(shape)
        for split in sorted(self.splits):
            sizes[split.dim] = split.local_size(shape[split.dim], sizes[split.dim])
        return tuple(sizes)

    def joined(self) -> Layout:
        """The same layout, with splits of factors that lie side by side in a dimension as one split."""
        splits: list[Split] = []
        for split in sorted(self.splits):
            last = splits[-1] if splits else None
            is_inside_last = last is not None and (last.dim, last.outer * last.ways) == (split.dim, split.outer)
            if last is not None and is_inside_last and last.stride == split.ways * split.stride:
                splits[-1] = Split(last.dim, last.outer, split.chunk, last.ways * split.ways, split.stride)
            else:
                splits.append(split)
        return Layout(tuple(splits), self.is_partial)

    def is_one_cut(self, shape: Sequence[int]) -> bool:
        """Whether all devices together cut one dimension, or two neighbours that could as well be one dimension."""
        splits = self.joined().splits
        if len(splits) < 2:
            return True
        first, second = splits[0], splits[1]
        is_used_up = (first.outer, first.chunk, first.ways) == (1, 1, shape[first.dim])
        is_even = second.outer == 1 and second.chunk * second.ways == shape[second.dim]
        is_next = second.dim == first.dim + 1 and first.stride == second.ways * second.stride
        return len(splits) == 2 and is_used_up and is_even and is_next

    def __str__(self) -> str:
        if self.is_partial:
            return "partial"
        return " and ".join(str(split) for split in self.splits) or "whole"


WHOLE = Layout()
PARTIAL = Layout(is_partial=True)


def layout_of(rule: Rule, dims: Dims, ways: Mapping[str, int]) -> Layout:
    """The layout of a tensor with these dimensions when an op splits each named factor so many ways.

    The order of `ways` matters: from one device to the next, the part of the last factor changes first.
    """
    names = list(ways)
    splits = []
    for index, dim in enumerate(dims):
        outer, inner = 1, rule.dim_size(dim)
        for name in dim.factors:
            size = rule.size(name)
            inner //= size
            if name in ways:
                stride = 1
                for later in names[names.index(name) + 1 :]:
                    stride *= ways[later]
                splits.append(Split(index, outer, -(-size // ways[name]) * inner, ways[name], stride))
            outer *= size
    return Layout(tuple(sorted(splits)))


@dataclass(frozen=True, slots=True)
class LayoutConstraint:
    """A user's wish: pin (or, with `is_forbidden`, rule out) the layout of tensors whose names match a pattern.

    The layout meant is whole for `dim=None`, else split along that dimension.
    """

    pattern: str
    dim: int | None
    is_forbidden: bool = False

    def __str__(self) -> str:
        layout = "whole" if self.dim is None else f"split along dim {self.dim}"
        return f"{'forbid' if self.is_forbidden else 'pin'} {self.pattern!r} {layout}"

    def matches(self, name: str) -> bool:
        """Whether the pattern (shell style: * ? [...]) matches a parameter's or tensor's name."""
        return fnmatchcase(name, self.pattern)

    def admits(self, layout: Layout) -> bool:
        """Whether the constraint allows this layout."""
        is_meant = layout.is_whole if self.dim is None else {split.dim for split in layout.splits} == {self.dim}
        return is_meant is not self.is_forbidden


def admits(constraints: Sequence[LayoutConstraint], name: str, layout: Layout) -> bool:
    """Whether every constraint on a name allows a layout."""
    return all(constraint.admits(layout) for constraint in constraints if constraint.matches(name))


def check_constraints(constraints: Sequence[LayoutConstraint], names: Iterable[str]) -> None:
    """Raise ShardError for a pattern that matches none of the names, or for constraints that contradict each other."""
    known = tuple(names)
    pinned: dict[str, LayoutConstraint] = {}
    for constraint in constraints:
        matched = [name for name in known if constraint.matches(name)]
        if not matched:
            raise ShardError(f"the constraint to {constraint} matches no parameter or tensor; check its pattern.")
        if constraint.is_forbidden:
            continue
        for name in matched:
            earlier_pin = pinned.get(name)
            if earlier_pin is not None and earlier_pin.dim != constraint.dim:
                raise ShardError(f"constraints contradict each other on {name!r}: {earlier_pin}, and {constraint}.")
            pinned[name] = constraint
    for constraint in constraints:
        for name, pin in pinned.items():
            if constraint.is_forbidden and constraint.matches(name) and constraint.dim == pin.dim:
                raise ShardError(f"constraints contradict each other on {name!r}: {pin}, and {constraint}.")


_LINEAR = frozenset({"add", "cast", "negative", "scale", "scale_backward", "sum", "expand", "reshape", "transpose"})
"""Functions f with f(a + b) = f(a) + f(b): they may run on partial sums."""

_MASKED_LOOKUPS = frozenset({"embedding", "pick", "scatter_add"})
"""Lookups that a device can do on its rows of the table alone, with zeros for indices that lie elsewhere."""

ROUTED = frozenset({"combine", "combine_rows_backward", "combine_weights_backward", "dispatch", "undispatch"})
"""Functions that carry tokens to experts and back; only the factor of experts can be split."""

_BY_PARAMETER = frozenset({OpKind.CONTRACTION, OpKind.CONVOLUTION, OpKind.LOOKUP})
"""Kinds whose parameters are the large ones, so that rule 2 applies to them."""

_STATISTICS_PER_ROW = 2
"""A softmax reduces a maximum and a sum for each row, a norm a mean and a variance."""

Ways = tuple[tuple[str, int], ...]
"""Split factors with the number of ways of each; from device to device, the part of the last one changes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSplit:
    """One way to split an op: its split factors, the layouts of its operands, and those of its results.

    `made` are the layouts in which the local op leaves its results, `results` those after partial sums are settled.
    """

    ways: Ways
    operands: tuple[Layout, ...]
    made: tuple[Layout, ...]
    results: tuple[Layout, ...]


def split_choices(op: Op, tp: int) -> list[Ways]:
    """Every admissible choice of split factors, the empty one first.

    One factor is split tp ways, or two neighbours in a dimension are split together where the major one is too small:
    two key heads and the four queries of each over eight devices.
    """
    rule = op.rule
    covered_in_part = frozenset(
        name for dims in rule.tensors() for dim in dims if dim.size is not None for name in dim.factors
    )
    allowed = [
        factor.name
        for factor in rule.factors
        if not factor.is_batch and factor.name not in covered_in_part and _may_split(op, factor.name)
    ]
    choices: list[Ways] = [()]
    choices += [((name, tp),) for name in allowed if fills(rule.size(name), tp)]
    for major, minor in _neighbours(op, allowed):
        ways = rule.size(major)
        if 1 < ways < tp and tp % ways == 0 and rule.size(minor) % (tp // ways) == 0:
            choices.append(((major, ways), (minor, tp // ways)))
    return choices


def splits_of_op(graph: Graph, op: Op, choices: Sequence[Ways], tp: int) -> list[OpSplit]:
    """The splits of an op for the given choices of factors; none where the rules above leave none."""
    splits = []
    for ways in choices:
        ways_of = dict(ways)
        operands = tuple(layout_of(op.rule, dims, ways_of) for dims in op.rule.operands)
        if not _keeps_parameters_split(graph, op, operands, tp):
            continue
        made = tuple(_result_layout(op, index, ways_of) for index in range(len(op.outputs)))
        splits += [
            OpSplit(ways=ways, operands=operands, made=made, results=results) for results in _settled(op, made, tp)
        ]
    if op.function in _LINEAR and () in choices:
        splits += _passing_partial(graph, op)
    return splits


def head_factors(graph: Graph, op: Op) -> tuple[str, ...]:
    """The factors that a product of two activations is batched over, besides the batch: attention heads, or experts."""
    if op.kind is OpKind.ATTENTION:
        shared = frozenset.intersection(*op.rule.operand_names[:3])
    elif op.kind is OpKind.CONTRACTION and not _parameter_operands(graph, op):
        shared = frozenset.intersection(*op.rule.operand_names[:2], op.rule.result_names[0])
    else:
        return ()
    return tuple(factor.name for factor in op.rule.factors if factor.name in shared and not factor.is_batch)


def fills(size: int, ways: int) -> bool:
    """Whether every device gets a part when chunks of ceil(size / ways) are dealt out."""
    return (ways - 1) * -(-size // ways) < size


def _may_split(op: Op, name: str) -> bool:
    kind = op.rule.factor(name).kind
    if op.function in ROUTED:
        return name == _expert_factor(op)
    if kind is FactorKind.LOOKUP:
        return op.function in _MASKED_LOOKUPS
    if kind is FactorKind.NORMALIZED:
        return op.kind in (OpKind.SOFTMAX, OpKind.NORM)
    if op.kind is OpKind.ATTENTION:
        return name in op.rule.operand_names[0] and name in op.rule.result_names[0]
    return kind is FactorKind.FREE


def _expert_factor(op: Op) -> str:
    """The leading factor of the tensor that holds one block of rows per expert."""
    dims = next(dims for dims in op.rule.tensors() if len(dims) == 4)
    return dims[0].factors[0]


def _neighbours(op: Op, allowed: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of allowed factors that stand side by side in some tensor, major first."""
    pairs: dict[tuple[str, str], None] = {}
    for dims in op.rule.tensors():
        for major, minor in pairwise(factor_names(dims)):
            if major in allowed and minor in allowed:
                pairs[major, minor] = None
    return list(pairs)


def _parameter_operands(graph: Graph, op: Op) -> list[int]:
    return [index for index, name in enumerate(op.inputs) if graph.tensors[graph.storage(name)].role is Role.PARAMETER]


def _keeps_parameters_split(graph: Graph, op: Op, operands: Sequence[Layout], tp: int) -> bool:
    if op.kind not in _BY_PARAMETER:
        return True
    return all(operands[index].ways == tp for index in _parameter_operands(graph, op))


def _result_layout(op: Op, index: int, ways_of: Mapping[str, int]) -> Layout:
    names = names_of(op.rule.results[index])
    if any(name not in names for name in ways_of):
        return PARTIAL
    return layout_of(op.rule, op.rule.results[index], ways_of)


def _settled(op: Op, made: tuple[Layout, ...], tp: int) -> list[tuple[Layout, ...]]:
    """The layouts that results may have after settling: what they are made in where none is partial.

    A first result that is partial has a choice; further partial results (statistics) become whole.
    """
    if not any(layout.is_partial for layout in made):
        return [made]
    targets: list[Layout] = [WHOLE]
    if made[0].is_partial:
        dims = op.rule.results[0]
        names = [name for dim in dims for name in dim.factors if dim.size is None]
        free = [name for name in names if not op.rule.factor(name).is_batch and fills(op.rule.size(name), tp)]
        targets += [layout_of(op.rule, dims, {name: tp}) for name in free]
        # The maximum of partial maxima is not their sum, so that nothing linear may follow it.
        if op.function != "max":
            targets.append(PARTIAL)
    settled = []
    for target in dict.fromkeys(targets):
        rest = tuple(WHOLE if layout.is_partial else layout for layout in made[1:])
        settled.append((target if made[0].is_partial else made[0], *rest))
    return settled


def _passing_partial(graph: Graph, op: Op) -> list[OpSplit]:
    """The split of a linear op that takes partial sums and hands them on; arguments of the graph are never partial."""
    if any(graph.tensors[name].role is not None for name in op.inputs):
        return []
    operands, results = (PARTIAL,) * len(op.inputs), (PARTIAL,) * len(op.outputs)
    return [OpSplit(ways=(), operands=operands, made=results, results=results)]


def statistics_bytes(op: Op, ways: Ways) -> int:
    """Bytes of single-precision statistics to reduce because a normalized factor is split; 0 where none is."""
    rule = op.rule
    if not any(rule.factor(name).kind is FactorKind.NORMALIZED for name, _ in ways):
        return 0
    rows = math.prod(factor.size for factor in rule.factors if factor.kind is not FactorKind.NORMALIZED)
    return _STATISTICS_PER_ROW * DType.FLOAT32.size_bytes * rows
