"""Graphs under construction: the builder that frontends and passes write into, and rules made from shapes alone.

The rules are for frontends that know an op's dimensions but not their meaning. Factors are named `d0`, `d1`, ... in
order of appearance; those of ids `p0`, ...; those of convolutions after what they are (batch, groups, inputs, outputs,
positions, kernel). Nothing is marked as batch here. Shapes that do not fit each other raise ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from phaze.errors import GraphError
from phaze.ir.graph import DType, Graph, Role, Tensor
from phaze.ir.op import Attribute, Op, OpKind, Phase
from phaze.ir.rule import Dim, Dims, Factor, FactorKind, Rule

__all__ = [
    "GraphBuilder",
    "broadcast_rule",
    "concatenate_rule",
    "contraction_rule",
    "convolution_rule",
    "elementwise_rule",
    "lookup_rule",
    "opaque_rule",
    "reduction_rule",
    "reshape_rule",
    "slice_rule",
    "transpose_rule",
]

Shape = Sequence[int]


def elementwise_rule(result: Shape, *operands: Shape) -> Rule:
    """Operands broadcast to a result by numpy's rules: aligned at the last dimension, sizes 1 stretched."""
    dims = _named(result)
    sides = []
    for shape in operands:
        start = len(dims) - len(shape)
        if start < 0:
            raise ValueError(f"an operand of shape {tuple(shape)} cannot be broadcast to {tuple(result)}")
        aligned = zip(shape, dims[start:], result[start:], strict=True)
        sides.append(tuple(_stretched(size, dim, whole) for size, dim, whole in aligned))
    return Rule(tuple(sides), (dims,), _factors(result))


def broadcast_rule(shape: Shape, result: Shape, into: Sequence[int]) -> Rule:
    """A tensor repeated: its dimension i becomes dimension `into[i]` of the result."""
    dims = _named(result)
    operand = tuple(_stretched(size, dims[place], result[place]) for size, place in zip(shape, into, strict=True))
    return Rule((operand,), (dims,), _factors(result))


def transpose_rule(shape: Shape, order: Sequence[int]) -> Rule:
    """Dimensions in another order."""
    dims = _named(shape)
    return Rule((dims,), (tuple(dims[index] for index in order),), _factors(shape))


def reduction_rule(shape: Shape, over: Sequence[int], *, keep: bool = False) -> Rule:
    """A reduction over some dimensions, which stay with size 1 where `keep` says so."""
    dims = _named(shape)
    gone = {index % len(shape) for index in over}
    result = [Dim() if index in gone else dim for index, dim in enumerate(dims) if keep or index not in gone]
    return Rule((dims,), (tuple(result),), _factors(shape))


def slice_rule(shape: Shape, result: Shape) -> Rule:
    """A part of a tensor; dimensions of another size are covered in part and stay whole."""
    cut = {index for index, (size, part) in enumerate(zip(shape, result, strict=True)) if size != part}
    factors = tuple(
        Factor(f"d{i}", size, FactorKind.WHOLE if i in cut else FactorKind.FREE) for i, size in enumerate(result)
    )
    operand = tuple(Dim((f"d{i}",), shape[i] if i in cut else None) for i in range(len(shape)))
    return Rule((operand,), (_named(result),), factors)


def concatenate_rule(shapes: Sequence[Shape], along: int) -> Rule:
    """Tensors one after another along a dimension, which stays whole."""
    joined = along % len(shapes[0])
    total = sum(shape[joined] for shape in shapes)
    result = [total if index == joined else size for index, size in enumerate(shapes[0])]
    factors = tuple(
        Factor(f"d{i}", size, FactorKind.WHOLE if i == joined else FactorKind.FREE) for i, size in enumerate(result)
    )
    operands = tuple(
        tuple(Dim((f"d{i}",), shape[joined] if i == joined else None) for i in range(len(shape))) for shape in shapes
    )
    return Rule(operands, (_named(result),), factors)


def contraction_rule(
    left: Shape,
    right: Shape,
    *,
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
    contracted: tuple[Sequence[int], Sequence[int]],
) -> Rule:
    """A product summed over paired dimensions; the result is batch, the rest of the left, the rest of the right."""
    dims = _named(left)
    factors = list(_factors(left))
    pairs = dict(zip((*batch[1], *contracted[1]), (*batch[0], *contracted[0]), strict=True))
    right_dims = []
    for index, size in enumerate(right):
        if index in pairs:
            if size != left[pairs[index]]:
                raise ValueError(f"dimension {pairs[index]} of {tuple(left)} does not meet {index} of {tuple(right)}")
            right_dims.append(dims[pairs[index]])
        else:
            factors.append(Factor(f"d{len(factors)}", size))
            right_dims.append(Dim((factors[-1].name,)))
    result = [dims[index] for index in batch[0]]
    result += [dim for index, dim in enumerate(dims) if index not in (*batch[0], *contracted[0])]
    result += [dim for index, dim in enumerate(right_dims) if index not in pairs]
    return Rule((dims, tuple(right_dims)), (tuple(result),), tuple(factors))


def convolution_rule(x: Shape, weight: Shape, result: Shape, groups: int = 1) -> Rule:
    """A convolution of x[batch, channels, ...] with weight[out, channels / groups, ...] into [batch, out, ...]."""
    spatial = len(x) - 2
    sizes = {"b": x[0], "g": groups, "i": x[1] // groups, "o": weight[0] // groups}
    sizes |= {f"p{n}": result[2 + n] for n in range(spatial)} | {f"k{n}": weight[2 + n] for n in range(spatial)}
    positions = tuple(Dim((f"p{n}",)) for n in range(spatial))
    windows = tuple(Dim((f"p{n}", f"k{n}"), x[2 + n]) for n in range(spatial))
    kernel = tuple(Dim((f"k{n}",)) for n in range(spatial))
    operands = (Dim(("b",)), Dim(("g", "i")), *windows), (Dim(("g", "o")), Dim(("i",)), *kernel)
    return Rule(operands, ((Dim(("b",)), Dim(("g", "o")), *positions),), tuple(Factor(n, s) for n, s in sizes.items()))


def lookup_rule(table: Shape, along: int, ids: Shape) -> Rule:
    """Slices of a table along one dimension picked by ids, whose dimensions stand in its place in the result."""
    picked_from = along % len(table)
    dims, picked = _named(table), tuple(Dim((f"p{index}",)) for index in range(len(ids)))
    factors = tuple(
        Factor(f"d{i}", size, FactorKind.LOOKUP if i == picked_from else FactorKind.FREE)
        for i, size in enumerate(table)
    )
    factors += tuple(Factor(f"p{index}", size) for index, size in enumerate(ids))
    return Rule((dims, picked), ((*dims[:picked_from], *picked, *dims[picked_from + 1 :]),), factors)


def opaque_rule(operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    """Every dimension a whole factor of its own; dimensions of one size at one position are the same factor."""
    names: dict[tuple[int, int], str] = {}
    factors: list[Factor] = []

    def named(shape: Shape) -> Dims:
        for key in enumerate(shape):
            if key not in names:
                names[key] = f"d{len(names)}"
                factors.append(Factor(names[key], key[1], FactorKind.WHOLE))
        return tuple(Dim((names[key],)) for key in enumerate(shape))

    sides = tuple(named(shape) for shape in operands), tuple(named(shape) for shape in results)
    return Rule(*sides, tuple(factors))


def reshape_rule(shape: Shape, result: Shape) -> Rule:
    """A view in another shape: splits and merges as multi-factor dimensions.

    Runs of dimensions with no common factoring, such as (3, 4) into (2, 6), become one dimension's worth of whole
    factors on either side: nothing can be split there.
    """
    if math.prod(shape) != math.prod(result) or not math.prod(shape):
        raise ValueError(f"cannot reshape {tuple(shape)} into {tuple(result)}: different numbers of elements, or none")
    split = _Split()
    i = j = 0
    left, right = list(shape), list(result)
    while i < len(left) or j < len(right):
        if i < len(left) and left[i] == 1:
            i += 1
        elif j < len(right) and right[j] == 1:
            j += 1
        elif left[i] == right[j]:
            split.shared(left[i], i, j)
            i, j = i + 1, j + 1
        elif left[i] % right[j] == 0:
            split.shared(right[j], i, j)
            left[i] //= right[j]
            j += 1
        elif right[j] % left[i] == 0:
            split.shared(left[i], i, j)
            right[j] //= left[i]
            i += 1
        else:
            i, j = split.apart(left, right, i, j)
    operand = tuple(Dim(tuple(split.left.get(index, ()))) for index in range(len(shape)))
    view = tuple(Dim(tuple(split.right.get(index, ()))) for index in range(len(result)))
    return Rule((operand,), (view,), tuple(split.factors))


class _Split:
    """Factors found so far, and which of them make up each dimension on either side."""

    def __init__(self) -> None:
        self.factors: list[Factor] = []
        self.left: dict[int, list[str]] = {}
        self.right: dict[int, list[str]] = {}

    def _add(self, size: int, kind: FactorKind) -> str:
        self.factors.append(Factor(f"d{len(self.factors)}", size, kind))
        return self.factors[-1].name

    def shared(self, size: int, i: int, j: int) -> None:
        name = self._add(size, FactorKind.FREE)
        self.left.setdefault(i, []).append(name)
        self.right.setdefault(j, []).append(name)

    def apart(self, left: list[int], right: list[int], i: int, j: int) -> tuple[int, int]:
        """Give the shortest runs of equal product factors of their own; returns where the runs end."""
        ends = [i + 1, j + 1]
        products = [left[i], right[j]]
        while products[0] != products[1]:
            side = 0 if products[0] < products[1] else 1
            products[side] *= (left, right)[side][ends[side]]
            ends[side] += 1
        for names, sizes, start, end in ((self.left, left, i, ends[0]), (self.right, right, j, ends[1])):
            for index in range(start, end):
                names.setdefault(index, []).append(self._add(sizes[index], FactorKind.WHOLE))
        return ends[0], ends[1]


def _named(shape: Shape) -> Dims:
    return tuple(Dim((f"d{index}",)) for index in range(len(shape)))


def _factors(shape: Shape) -> tuple[Factor, ...]:
    return tuple(Factor(f"d{index}", size) for index, size in enumerate(shape))


def _stretched(size: int, dim: Dim, whole: int) -> Dim:
    if size not in (1, whole):
        raise ValueError(f"a dimension of {size} cannot be broadcast to {whole}")
    return dim if size == whole else Dim()


class GraphBuilder:
    """Collects tensors and ops; `build` verifies them as a whole. Equal rules share one object."""

    def __init__(self, name: str, *, micro_batch_size: int = 1, dtype: DType = DType.BFLOAT16) -> None:
        self.name = name
        self.micro_batch_size = micro_batch_size
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.gradients: list[tuple[str, str]] = []
        self.is_backward_derived = False
        self.why_backward_kept = ""
        self.runs_as: dict[str, int] = {}
        self.saved: tuple[str, ...] = ()
        self.mixes_samples = ""
        self.averages_samples = False
        self.notes: list[str] = []
        self._rules: dict[object, Rule] = {}
        self._op_ids: set[str] = set()

    @classmethod
    def from_graph(cls, graph: Graph) -> GraphBuilder:
        """Start from all that a graph holds, except for its notes, which `build` takes."""
        builder = cls(graph.name, micro_batch_size=graph.micro_batch_size)
        builder.tensors.update(graph.tensors)
        builder.ops.extend(graph.ops)
        builder.gradients.extend(graph.gradients)
        builder.is_backward_derived = graph.is_backward_derived
        builder.why_backward_kept = graph.why_backward_kept
        builder.runs_as = dict(graph.runs_as)
        builder.saved = graph.saved
        builder.mixes_samples, builder.averages_samples = graph.mixes_samples, graph.averages_samples
        builder._op_ids.update(op.id for op in graph.ops)
        return builder

    def argument(
        self, tensor_id: str, shape: Sequence[int], role: Role, dtype: DType | None = None, *, is_frozen: bool = False
    ) -> str:
        """Add an argument of the graph; returns its id."""
        self._add_tensor(Tensor(tensor_id, tuple(shape), dtype or self.dtype, role, is_frozen))
        return tensor_id

    def parameter(self, tensor_id: str, *shape: int) -> str:
        """Add a parameter, or return the one that is there: a second use ties it."""
        known = self.tensors.get(tensor_id)
        if known is None:
            return self.argument(tensor_id, shape, Role.PARAMETER)
        if known.shape != shape or known.role is not Role.PARAMETER:
            raise GraphError(f"parameter {tensor_id!r} is used with shape {list(shape)} and {list(known.shape)}.")
        return tensor_id

    def rule(self, text: str, sizes: Mapping[str, int], **marks: str) -> Rule:
        """`Rule.of`, with equal rules shared."""
        key = (text, tuple(sizes.items()), tuple(marks.items()))
        if key not in self._rules:
            self._rules[key] = Rule.of(text, sizes, **marks)
        return self._rules[key]

    def shared(self, rule: Rule) -> Rule:
        """The one object for rules equal to this."""
        return self._rules.setdefault(rule, rule)

    def add(
        self,
        op_id: str,
        kind: OpKind,
        function: str,
        rule: Rule,
        inputs: Iterable[str],
        *,
        dtypes: Sequence[DType] | None = None,
        results: Sequence[str] = (),
        module: str = "",
        phase: Phase = Phase.FORWARD,
        gradient_of: str = "",
        origin: str = "",
        attributes: Mapping[str, Attribute] | None = None,
    ) -> tuple[str, ...]:
        """Add an op; returns its result ids: the op's own, then `op_id:name` for each further name in `results`."""
        op_id = self.unused(op_id)
        op = Op(
            id=op_id,
            kind=kind,
            function=function,
            rule=rule,
            inputs=tuple(inputs),
            outputs=(op_id, *(f"{op_id}:{name}" for name in results)),
            module=module,
            phase=phase,
            gradient_of=gradient_of,
            origin=origin,
            attributes=tuple(sorted((attributes or {}).items())),
        )
        return self.insert(op, dtypes or [self.dtype] * len(op.outputs))

    def insert(self, op: Op, dtypes: Sequence[DType]) -> tuple[str, ...]:
        """Add a finished op under its own ids, with its results as tensors of these types."""
        for tensor_id, dims, dtype in zip(op.outputs, op.rule.results, dtypes, strict=True):
            self._add_tensor(Tensor(tensor_id, op.rule.shape(dims), dtype))
        self._op_ids.add(op.id)
        self.ops.append(op)
        return op.outputs

    def build(self, outputs: Iterable[str], notes: Iterable[str] = ()) -> Graph:
        """The verified graph, with the notes taken on the way and these."""
        return Graph(
            name=self.name,
            tensors=self.tensors,
            ops=tuple(self.ops),
            outputs=tuple(outputs),
            gradients=tuple(self.gradients),
            micro_batch_size=self.micro_batch_size,
            is_backward_derived=self.is_backward_derived,
            why_backward_kept=self.why_backward_kept,
            runs_as=self.runs_as,
            saved=self.saved,
            mixes_samples=self.mixes_samples,
            averages_samples=self.averages_samples,
            notes=(*self.notes, *notes),
        )

    def _add_tensor(self, tensor: Tensor) -> None:
        if tensor.id in self.tensors:
            raise GraphError(f"two tensors have the id {tensor.id!r}; ids must be unique.")
        self.tensors[tensor.id] = tensor

    def unused(self, op_id: str) -> str:
        """An id that no op or tensor has: this one, or with a number behind it; it is taken from then on."""
        candidate, count = op_id, 1
        while candidate in self._op_ids or candidate in self.tensors:
            count += 1
            candidate = f"{op_id}.{count}"
        self._op_ids.add(candidate)
        return candidate
