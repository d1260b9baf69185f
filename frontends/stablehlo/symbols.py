"""What a value of StableHLO stands for while a module is walked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phaze.errors import GraphError, ImportModelError
from phaze.frontends.stablehlo.module import Operation, to_dtype
from phaze.ir import Attribute, Dim, DType, Factor, FactorKind, GraphBuilder, Op, OpKind, Role, Rule
from phaze.ir.graph_checks import check_rule
from phaze.ir.shape_rules import broadcast_rule, reshape_rule

__all__ = [
    "CONSTANT",
    "Call",
    "Constant",
    "Recorder",
    "Shape",
    "Spread",
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


class Unsupported(Exception):  # noqa: N818 - a signal between tables, never seen by users
    """A table knows the operation, but not in this form: it becomes an opaque op."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the graph."""

    id: str
    shape: Shape
    dtype: DType


@dataclass(frozen=True, slots=True)
class Constant:
    """What depends on no argument; equal numbers mean equal contents. `value` is that of every element, where known."""

    number: int
    shape: Shape
    dtype: DType
    value: bool | int | float | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """A tensor repeated: dimension i of `source` is dimension `into[i]`, stretched where it has size 1.

    It is not made: who can reads the source instead.
    """

    source: Tensor | Constant
    into: tuple[int, ...]
    shape: Shape
    dtype: DType


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor taken apart along its first dimension; `loop` is the loop that writes or first reads it by trips."""

    slots: tuple[Value, ...]
    shape: Shape
    dtype: DType
    loop: int | None = None


Value = Tensor | Constant | Spread | Stack


def is_constant(value: Value) -> bool:
    """Whether a value depends on no argument."""
    return isinstance(value, Constant) or (isinstance(value, Spread) and isinstance(value.source, Constant))


def is_empty(value: Value) -> bool:
    """Whether there are no elements."""
    return math.prod(value.shape) == 0


def tensors_of(values: Sequence[Value]) -> Iterator[Tensor]:
    """The tensors among values, those inside stacks and behind repeats included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Stack):
            yield from tensors_of(value.slots)
        elif isinstance(value, Spread) and isinstance(value.source, Tensor):
            yield value.source


CONSTANT = "constant."
"""How the ids of arguments begin that stand for constants."""

MOST_OPS = 200_000
"""Ops after loops have run; more are refused."""


class Recorder:
    """A graph under construction, and what was found about its ops."""

    def __init__(self, name: str) -> None:
        self.builder = GraphBuilder(name)
        self.scopes: dict[str, str] = {}
        self.again: dict[str, str] = {}
        self.notes: dict[str, int] = {}
        self._first: dict[object, Op] = {}
        self._canonical: dict[str, str] = {}
        self._known: dict[object, tuple[str, ...]] = {}
        self._numbers: dict[object, int] = {}
        self._constants: dict[int, str] = {}
        self._reshaped: dict[str, str] = {}
        self._unique = itertools.count()
        self._counts: dict[str, int] = {}

    def note(self, text: str) -> None:
        """Count something that a reader should know of."""
        self.notes[text] = self.notes.get(text, 0) + 1

    def constant(self, key: object, shape: Shape, dtype: DType, value: bool | int | float | None = None) -> Constant:
        """The constant that is computed so; equal keys, shapes and types give equal ones."""
        whole = ("splat", value, shape, dtype) if value is not None else (key, shape, dtype)
        return Constant(self._numbers.setdefault(whole, len(self._numbers)), shape, dtype, value)

    def unique(self) -> int:
        """A number that was not given before."""
        return next(self._unique)

    def id(self, value: Value, scope: str) -> str:
        """The id of a tensor with this value, made where it is not there yet."""
        if isinstance(value, Tensor):
            return value.id
        if isinstance(value, Constant):
            return self._argument_of(value)
        if isinstance(value, Spread):
            source = self.id(value.source, scope)
            rule = broadcast_rule(value.source.shape, value.shape, value.into)
            return self.emit(OpKind.VIEW, "expand", rule, (source,), (value.dtype,), scope, "broadcast_in_dim")[0]
        parts = tuple(self.id(slot, scope) for slot in value.slots)
        dims = tuple(Dim((f"d{index}",)) for index in range(len(value.shape) - 1))
        factors = tuple(Factor(f"d{index}", size) for index, size in enumerate(value.shape[1:]))
        count = Factor("c", len(parts), FactorKind.WHOLE)
        rule = Rule((dims,) * len(parts), ((Dim(("c",)), *dims),), (count, *factors))
        return self.emit(OpKind.COPY, "stack", rule, parts, (value.dtype,), scope, "concatenate")[0]

    def tensor(self, value: Value, scope: str) -> Tensor:
        """The tensor with this value."""
        return Tensor(self.id(value, scope), value.shape, value.dtype)

    def _argument_of(self, value: Constant) -> str:
        if value.number not in self._constants:
            name = f"{CONSTANT}{len(self._constants)}"
            self._constants[value.number] = self.builder.argument(name, value.shape, Role.OTHER, value.dtype)
        return self._constants[value.number]

    def reshape(self, value: Value, shape: Shape, scope: str, origin: str = "reshape") -> Value:
        """The same elements in another shape; a view back gives what it was a view of."""
        if value.shape == shape:
            return value
        if isinstance(value, Constant):
            return self.constant(("reshape", value.number), shape, value.dtype, value.value)
        source = self.id(value, scope)
        before = self._reshaped.get(source)
        while before is not None:
            if self.builder.tensors[before].shape == shape:
                return Tensor(before, shape, value.dtype)
            before = self._reshaped.get(before)
        rule = reshape_rule(value.shape, shape)
        (made,) = self.emit(OpKind.VIEW, "reshape", rule, (source,), (value.dtype,), scope, origin)
        self._reshaped[made] = source
        return Tensor(made, shape, value.dtype)

    def without_units(self, tensor_id: str) -> str:
        """The tensor that this one is a view of, if only dimensions of 1 were put in or taken out."""
        source = self._reshaped.get(tensor_id)
        while source is not None and self._significant(source) == self._significant(tensor_id):
            tensor_id = source
            source = self._reshaped.get(tensor_id)
        return tensor_id

    def _significant(self, tensor_id: str) -> list[int]:
        return [size for size in self.builder.tensors[tensor_id].shape if size != 1]

    def emit(
        self,
        kind: OpKind,
        function: str,
        rule: Rule,
        inputs: Sequence[str],
        dtypes: Sequence[DType],
        scope: str,
        origin: str,
        *,
        attributes: Mapping[str, Attribute] | None = None,
        is_pure: bool = True,
    ) -> tuple[str, ...]:
        """Add an op, or find the equal one; its results. Raises Unsupported where the rule does not fit."""
        self._check(rule, inputs)
        rule = self.builder.shared(rule)
        given = tuple(sorted((attributes or {}).items()))
        what = (kind, function, id(rule), given, tuple(dtypes), None if is_pure else self.unique())
        key = (*what, tuple(inputs))
        if key in self._known:
            return self._known[key]
        if len(self.builder.ops) >= MOST_OPS:
            raise ImportModelError(
                f"the module has more than {MOST_OPS:,} ops once its loops are run; import one with shorter loops."
            )
        count = self._counts[origin] = self._counts.get(origin, 0) + 1
        made = self.builder.add(
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
        self._admit(made, scope)
        self._known[key] = made
        self._compare(what, inputs, made, is_barrier=function == "barrier")
        return made

    def _check(self, rule: Rule, inputs: Sequence[str]) -> None:
        if len(inputs) != len(rule.operands):
            raise Unsupported
        for tensor_id, dims in zip(inputs, rule.operands, strict=True):
            if rule.shape(dims) != self.builder.tensors[tensor_id].shape:
                raise Unsupported

    def _admit(self, made: tuple[str, ...], scope: str) -> None:
        op = self.builder.ops[-1]
        try:
            check_rule(op)
        except GraphError:
            self.builder.ops.pop()
            for tensor_id in made:
                del self.builder.tensors[tensor_id]
            raise Unsupported from None
        self.scopes[op.id] = scope

    def _compare(
        self, what: tuple[object, ...], inputs: Sequence[str], made: tuple[str, ...], is_barrier: bool
    ) -> None:
        """Find the first op that computes the same, seen through barriers."""
        op = self.builder.ops[-1]
        if is_barrier:
            self._canonical[made[0]] = self._canonical.get(inputs[0], inputs[0])
            return
        key = (*what, tuple(self._canonical.get(tensor_id, tensor_id) for tensor_id in inputs))
        first = self._first.setdefault(key, op)
        if first is not op:
            self.again[op.id] = first.id
            for own, other in zip(op.outputs, first.outputs, strict=True):
                self._canonical[own] = self._canonical.get(other, other)


Values = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """An operation, what its operands stand for, and where it stands."""

    operation: Operation
    values: Values
    recorder: Recorder
    scope: str

    @property
    def name(self) -> str:
        """The operation's name without its dialect."""
        return self.operation.short_name

    def attribute(self, name: str) -> Any:
        """An attribute, None where it was not given."""
        return self.operation.attributes.get(name)

    def integers(self, name: str) -> tuple[int, ...]:
        """An attribute that is a list of integers; raises Unsupported where it is none."""
        value = self.attribute(name)
        if isinstance(value, Mapping):
            value = value.get("values")
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise Unsupported
        return tuple(value)

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
        return to_dtype(self.operation.types[index].element)

    def is_splat(self, index: int) -> bool:
        """Whether all elements of an operand are one known number."""
        value = self.values[index]
        return isinstance(value, Constant) and value.value is not None

    def is_zero(self, index: int) -> bool:
        """Whether an operand is all zeros (or a stack of such)."""
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
        """Add the op that makes the results of the operation."""
        indices = range(len(self.operation.types)) if outputs is None else outputs
        for index, dims in zip(indices, rule.results, strict=True):
            if rule.shape(dims) != self.out_shape(index):
                raise Unsupported
        dtypes = [self.out_dtype(index) for index in indices]
        made = self.recorder.emit(
            kind, function, rule, inputs, dtypes, self.scope, self.name, attributes=attributes, is_pure=is_pure
        )
        return tuple(
            Tensor(tensor_id, self.out_shape(index), dtype)
            for tensor_id, index, dtype in zip(made, indices, dtypes, strict=True)
        )
