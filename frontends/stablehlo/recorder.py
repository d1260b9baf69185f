"""Ops as they are found: equal ones are made once, constants become arguments when they are read.

Values are numbered (Click, "Global code motion, global value numbering", 1995): an op with the same function, rule and
operands as an earlier one gives the earlier one's results. Behind an optimization barrier the same computation stands
again on purpose: it is kept, and `again` says which op it repeats. That is how rematerialization is recognised, with or
without names.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from phaze.errors import GraphError, ImportModelError
from phaze.frontends.stablehlo.values import Constant, Shape, Spread, Tensor, Unsupported, Value
from phaze.ir import Attribute, Dim, DType, Factor, FactorKind, GraphBuilder, Op, OpKind, Role, Rule
from phaze.ir.kinds import check_rule
from phaze.ir.shape_rules import broadcast_rule, reshape_rule

__all__ = ["CONSTANT", "Recorder"]

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
