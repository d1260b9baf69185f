"""Symbols that stand for the values of a module while `main` is run, and the recorder of the ops that this gives.

A value of the module becomes a `Tensor` of the graph, a `Constant`, a `Broadcast` of one of these that was not carried
out, or a `Stack` of slots. The `Recorder` makes ops; a `Call` is one operation with its operands as symbols, which is
what the rules in `op_rules/` are given.

The recorder numbers values (Click, "Global code motion, global value numbering", 1995): an op with the same function,
rule and operands as an earlier one gives the earlier one's results. Behind an optimization barrier the same computation
stands again on purpose: it is kept, and `Recorder.repeats` says which op it repeats. That is how rematerialization is
recognised, with or without names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from phaze.errors import GraphError, ImportModelError
from phaze.frontends.stablehlo.module import Attribute as ModuleAttribute
from phaze.frontends.stablehlo.module import Operation
from phaze.frontends.stablehlo.name_scopes import Scope
from phaze.ir import Attribute, Dim, DType, Factor, FactorKind, GraphBuilder, Op, OpKind, Role, Rule
from phaze.ir.graph_builder import broadcast_rule, reshape_rule
from phaze.ir.graph_checks import check_rule

__all__ = [
    "CONSTANT_PREFIX",
    "Broadcast",
    "Call",
    "Constant",
    "Number",
    "Recorder",
    "Shape",
    "Stack",
    "Tensor",
    "Unsupported",
    "Value",
    "Values",
    "is_constant",
    "is_empty",
    "tensors_of",
]

Shape = tuple[int, ...]

Item = TypeVar("Item")

Number = bool | int | float

CONSTANT_PREFIX = "constant."
"""How the ids of graph arguments begin that stand for constants of the module."""

MOST_OPS = 200_000
"""The most ops that are recorded, with those of every trip of a loop.

It bounds the memory and time of an import. The largest known models have tens of thousands; a module with more has
loops over time, not over layers.
"""


_SEEN_THROUGH = (OpKind.VIEW, OpKind.COPY, OpKind.ELEMENTWISE)
"""Kinds of ops with one operand whose slots are those of the operand: transposed, cast or annotated parameters."""


class Unsupported(Exception):  # noqa: N818 - a signal between rules and the interpreter, never seen by users
    """A rule knows the operation, but not in this form: the operation becomes an opaque op."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the graph."""

    id: str
    shape: Shape
    dtype: DType


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that depends on no argument.

    Constants with equal numbers have equal contents. `value` is that of every element, where all are equal and known.
    """

    number: int
    shape: Shape
    dtype: DType
    value: Number | None = None


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A tensor repeated: dimension i of `source` is dimension `into[i]` here, stretched where it has size 1.

    The repeated tensor is not made where its reader can read the source instead.
    """

    source: Tensor | Constant
    into: tuple[int, ...]
    shape: Shape
    dtype: DType


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor taken apart along one dimension, `dim`. `loop` is the loop whose trips write its slots, if there is one.

    A scan over layers reads its stacked parameters slot by slot; kept apart, each layer has parameters of its own.
    Programs stack on any dimension, and transpose what a scan reads.
    """

    slots: tuple[Value, ...]
    shape: Shape
    dtype: DType
    loop: int | None = None
    dim: int = 0

    @property
    def slot_shape(self) -> Shape:
        """The shape of one slot."""
        return self.without(self.shape)

    def without(self, shape: tuple[Item, ...]) -> tuple[Item, ...]:
        """A list for all dimensions, such as a shape, for those of a slot."""
        return (*shape[: self.dim], *shape[self.dim + 1 :])


Value = Tensor | Constant | Broadcast | Stack
Values = tuple[Value, ...]


def is_constant(value: Value) -> bool:
    """Whether a value depends on no argument."""
    return isinstance(value, Constant) or (isinstance(value, Broadcast) and isinstance(value.source, Constant))


def is_empty(value: Value) -> bool:
    """Whether a value has no elements."""
    return math.prod(value.shape) == 0


def tensors_of(values: Sequence[Value]) -> Iterator[Tensor]:
    """The tensors among values, with those inside stacks and those that broadcasts repeat."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Stack):
            yield from tensors_of(value.slots)
        elif isinstance(value, Broadcast) and isinstance(value.source, Tensor):
            yield value.source


class Recorder:
    """A graph under construction, and what is known about its ops.

    `scopes` says where every op stands, `repeats` the earlier op that an op computes again, `notes` what a reader
    should know, with the number of times that it was said, `handed_on` what one trip of a loop makes of the state that
    the next one begins with, by that state.
    """

    def __init__(self, name: str) -> None:
        self.builder = GraphBuilder(name)
        self.scopes: dict[str, Scope] = {}
        self.repeats: dict[str, str] = {}
        self.notes: dict[str, int] = {}
        self.handed_on: dict[str, str] = {}
        self._results_by_key: dict[object, tuple[str, ...]] = {}
        self._first_by_key: dict[object, Op] = {}
        self._first_equal: dict[str, str] = {}
        self._constant_numbers: dict[object, int] = {}
        self._constant_arguments: dict[int, str] = {}
        self._reshaped_from: dict[str, str] = {}
        self._keys: dict[str, tuple[object, object]] = {}
        self._unique = itertools.count()
        self._op_counts: dict[str, int] = {}
        self._producers: dict[str, Op] = {}

    def note(self, text: str) -> None:
        """Count something that a reader should know of."""
        self.notes[text] = self.notes.get(text, 0) + 1

    def constant(self, key: object, shape: Shape, dtype: DType, value: Number | None = None) -> Constant:
        """The constant that is computed as `key` says; equal keys, shapes and types give equal ones.

        Where the value of all elements is known, it is the key.
        """
        whole_key = ("splat", value, shape, dtype) if value is not None else (key, shape, dtype)
        number = self._constant_numbers.setdefault(whole_key, len(self._constant_numbers))
        return Constant(number, shape, dtype, value)

    def origin(self, tensor_id: str, dim: int, arguments: Collection[str]) -> tuple[str, int] | None:
        """The argument that a tensor is, seen through views and element by element, and what its dimension is there.

        None where it is made of anything else.
        """
        while tensor_id not in arguments:
            op = self._producers.get(tensor_id)
            if op is None or len(op.inputs) != 1 or len(op.outputs) != 1 or op.kind not in _SEEN_THROUGH:
                return None
            source = op.rule.operands[0]
            if op.rule.results[0][dim] not in source:
                return None
            tensor_id, dim = op.inputs[0], source.index(op.rule.results[0][dim])
        return tensor_id, dim

    def is_made_of(self, tensor_id: str, arguments: Collection[str]) -> bool:
        """Whether a tensor is one of the arguments, seen through views and element by element."""
        while tensor_id not in arguments:
            op = self._producers.get(tensor_id)
            if op is None or len(op.inputs) != 1 or op.kind not in _SEEN_THROUGH:
                return False
            tensor_id = op.inputs[0]
        return True

    def unique(self) -> int:
        """A number that was not given before."""
        return next(self._unique)

    def id(self, value: Value, scope: Scope) -> str:
        """The id of a tensor with this value, which is made where there is none yet."""
        if isinstance(value, Tensor):
            return value.id
        if isinstance(value, Constant):
            return self._constant_argument(value)
        if isinstance(value, Broadcast):
            source = self.id(value.source, scope)
            rule = broadcast_rule(value.source.shape, value.shape, value.into)
            return self.emit(OpKind.VIEW, "expand", rule, (source,), (value.dtype,), scope, "broadcast_in_dim")[0]
        slots = tuple(self.id(slot, scope) for slot in value.slots)
        dims = tuple(Dim((f"d{index}",)) for index in range(len(value.shape) - 1))
        factors = tuple(Factor(f"d{index}", size) for index, size in enumerate(value.slot_shape))
        count = Factor("c", len(slots), FactorKind.WHOLE)
        rule = Rule((dims,) * len(slots), ((*dims[: value.dim], Dim(("c",)), *dims[value.dim :]),), (count, *factors))
        return self.emit(OpKind.COPY, "stack", rule, slots, (value.dtype,), scope, "concatenate")[0]

    def tensor(self, value: Value, scope: Scope) -> Tensor:
        """The tensor with this value, which is made where there is none yet."""
        return Tensor(self.id(value, scope), value.shape, value.dtype)

    def _constant_argument(self, value: Constant) -> str:
        """The argument of the graph that stands for a constant: an op can only read a tensor."""
        if value.number not in self._constant_arguments:
            name = f"{CONSTANT_PREFIX}{len(self._constant_arguments)}"
            self._constant_arguments[value.number] = self.builder.argument(name, value.shape, Role.OTHER, value.dtype)
        return self._constant_arguments[value.number]

    def reshape(self, value: Value, shape: Shape, scope: Scope, origin: str = "reshape") -> Value:
        """The same elements in another shape; a view back gives what it was a view of."""
        if value.shape == shape:
            return value
        if isinstance(value, Constant):
            return self.constant(("reshape", value.number), shape, value.dtype, value.value)
        source = self.id(value, scope)
        earlier = self._reshaped_from.get(source)
        while earlier is not None:
            if self.builder.tensors[earlier].shape == shape:
                return Tensor(earlier, shape, value.dtype)
            earlier = self._reshaped_from.get(earlier)
        rule = reshape_rule(value.shape, shape)
        (view,) = self.emit(OpKind.VIEW, "reshape", rule, (source,), (value.dtype,), scope, origin)
        self._reshaped_from[view] = source
        return Tensor(view, shape, value.dtype)

    def without_units(self, tensor_id: str) -> str:
        """The tensor that this one is a view of, if only dimensions of size 1 were put in or taken out."""
        source = self._reshaped_from.get(tensor_id)
        while source is not None and self._sizes_above_one(source) == self._sizes_above_one(tensor_id):
            tensor_id = source
            source = self._reshaped_from.get(tensor_id)
        return tensor_id

    def _sizes_above_one(self, tensor_id: str) -> list[int]:
        return [size for size in self.builder.tensors[tensor_id].shape if size != 1]

    def emit(
        self,
        kind: OpKind,
        function: str,
        rule: Rule,
        inputs: Sequence[str],
        dtypes: Sequence[DType],
        scope: Scope,
        origin: str,
        *,
        attributes: Mapping[str, Attribute] | None = None,
        is_pure: bool = True,
    ) -> tuple[str, ...]:
        """Add an op, or find the equal one, and give the ids of its results.

        An op that is not pure is never equal to another. Raises Unsupported where the rule does not fit the operands.
        """
        self._check_operands(rule, inputs)
        rule = self.builder.shared(rule)
        given = tuple(sorted((attributes or {}).items()))
        computation = (kind, function, id(rule), given, tuple(dtypes), None if is_pure else self.unique())
        key = (*computation, tuple(inputs))
        if key in self._results_by_key:
            return self._results_by_key[key]
        if len(self.builder.ops) >= MOST_OPS:
            raise ImportModelError(
                f"the module has more than {MOST_OPS:,} ops once its loops are run; import one with shorter loops."
            )
        count = self._op_counts[origin] = self._op_counts.get(origin, 0) + 1
        results = self.builder.add(
            origin if count == 1 else f"{origin}.{count}",
            kind,
            function,
            rule,
            inputs,
            dtypes=dtypes,
            results=tuple(str(index) for index in range(1, len(dtypes))),
            origin=origin,
            attributes=dict(given),
        )
        self._keep_if_valid(results, scope)
        self._producers.update(dict.fromkeys(results, self.builder.ops[-1]))
        self._results_by_key[key] = results
        self._keys[self.builder.ops[-1].id] = (key, None)
        self._find_repeat(computation, inputs, is_barrier=function == "barrier")
        return results

    def disown(self, ops: Sequence[Op]) -> None:
        """Forget what is known of ops, so that no later op is taken for equal to one of them."""
        gone = {tensor_id for op in ops for tensor_id in op.outputs}
        for op in ops:
            key, first_key = self._keys.pop(op.id, (None, None))
            self._results_by_key.pop(key, None)
            if first_key is not None and self._first_by_key.get(first_key) is op:
                del self._first_by_key[first_key]
            for tensor_id in op.outputs:
                self._first_equal.pop(tensor_id, None)
                self._producers.pop(tensor_id, None)
                self._reshaped_from.pop(tensor_id, None)
        for view in [view for view, source in self._reshaped_from.items() if source in gone]:
            del self._reshaped_from[view]

    def take_back(self, start: int) -> None:
        """Remove all ops from a position on, as if they had never been recorded."""
        removed = self.builder.ops[start:]
        self.disown(removed)
        del self.builder.ops[start:]
        for op in removed:
            self.scopes.pop(op.id, None)
            self.repeats.pop(op.id, None)
            for tensor_id in op.outputs:
                del self.builder.tensors[tensor_id]

    def _check_operands(self, rule: Rule, inputs: Sequence[str]) -> None:
        if len(inputs) != len(rule.operands):
            raise Unsupported
        for tensor_id, dims in zip(inputs, rule.operands, strict=True):
            if rule.shape(dims) != self.builder.tensors[tensor_id].shape:
                raise Unsupported

    def _keep_if_valid(self, results: tuple[str, ...], scope: Scope) -> None:
        """Check the op that was just added against its kind; where it does not fit, take it back."""
        op = self.builder.ops[-1]
        try:
            check_rule(op)
        except GraphError:
            self.builder.ops.pop()
            for tensor_id in results:
                del self.builder.tensors[tensor_id]
            raise Unsupported from None
        self.scopes[op.id] = scope

    def _find_repeat(self, computation: tuple[object, ...], inputs: Sequence[str], *, is_barrier: bool) -> None:
        """Find the first op that computes the same as the last one, if barriers are looked through."""
        op = self.builder.ops[-1]
        if is_barrier:
            self._first_equal[op.outputs[0]] = self._first_equal.get(inputs[0], inputs[0])
            return
        key = (*computation, tuple(self._first_equal.get(tensor_id, tensor_id) for tensor_id in inputs))
        first = self._first_by_key.setdefault(key, op)
        self._keys[op.id] = (self._keys[op.id][0], key)
        if first is not op:
            self.repeats[op.id] = first.id
            for result, first_result in zip(op.outputs, first.outputs, strict=True):
                self._first_equal[result] = self._first_equal.get(first_result, first_result)


@dataclass(frozen=True, slots=True)
class Call:
    """One operation with the symbols of its operands, as the rules in `op_rules/` see it."""

    operation: Operation
    values: Values
    recorder: Recorder
    scope: Scope

    @property
    def name(self) -> str:
        """The operation's name without its dialect."""
        return self.operation.short_name

    def attribute(self, name: str) -> ModuleAttribute:
        """An attribute, None where it was not given."""
        return self.operation.attributes.get(name)

    def integers(self, name: str) -> tuple[int, ...]:
        """An attribute that is a list of integers; raises Unsupported where it is none."""
        value = self.attribute(name)
        if isinstance(value, Mapping):
            value = value.get("values")
        if not isinstance(value, list):
            raise Unsupported
        integers = tuple(item for item in value if isinstance(item, int))
        if len(integers) != len(value):
            raise Unsupported
        return integers

    def shape(self, index: int) -> Shape:
        """The shape of an operand."""
        return self.values[index].shape

    def id(self, index: int) -> str:
        """The id of an operand's tensor."""
        return self.recorder.id(self.values[index], self.scope)

    def out_shape(self, index: int = 0) -> Shape:
        """The shape of a result."""
        return self.operation.types[index].shape

    def out_dtype(self, index: int = 0) -> DType:
        """The element type of a result."""
        return self.operation.types[index].dtype

    def is_splat(self, index: int) -> bool:
        """Whether all elements of an operand are one known number."""
        value = self.values[index]
        return isinstance(value, Constant) and value.value is not None

    def is_zero(self, index: int) -> bool:
        """Whether an operand is all zeros, or a stack of such."""
        value = self.values[index]
        if isinstance(value, Stack):
            return all(isinstance(slot, Constant) and slot.value == 0 for slot in value.slots)
        return isinstance(value, Constant) and value.value is not None and value.value == 0

    def emit(
        self,
        kind: OpKind,
        function: str,
        rule: Rule,
        *inputs: str,
        outputs: Sequence[int] | None = None,
        attributes: Mapping[str, Attribute] | None = None,
        is_pure: bool = True,
    ) -> Values:
        """Add the op that makes the results of the operation (those numbered in `outputs`, else all)."""
        indices = range(len(self.operation.types)) if outputs is None else outputs
        for index, dims in zip(indices, rule.results, strict=True):
            if rule.shape(dims) != self.out_shape(index):
                raise Unsupported
        dtypes = [self.out_dtype(index) for index in indices]
        results = self.recorder.emit(
            kind, function, rule, inputs, dtypes, self.scope, self.name, attributes=attributes, is_pure=is_pure
        )
        return tuple(
            Tensor(tensor_id, self.out_shape(index), dtype)
            for tensor_id, index, dtype in zip(results, indices, dtypes, strict=True)
        )
