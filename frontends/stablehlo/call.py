"""One operation with its operands, as the tables in `tables/` see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phaze.frontends.stablehlo.dtypes import to_dtype
from phaze.frontends.stablehlo.module import Operation
from phaze.frontends.stablehlo.recorder import Recorder
from phaze.frontends.stablehlo.values import Constant, Shape, Stack, Tensor, Unsupported, Value
from phaze.ir import Attribute, DType, OpKind, Rule

__all__ = ["Call", "Values"]

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
