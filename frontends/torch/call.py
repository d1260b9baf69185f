"""One call of an aten operator, as the tables in `aten/` see it: arguments by name, tensors by id, ops to emit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phaze.errors import GraphError
from phaze.frontends.torch.dtypes import to_dtype
from phaze.ir import Attribute, DType, GraphBuilder, OpKind, Phase, Rule
from phaze.ir.kinds import check_rule

__all__ = ["CONSTANT", "Call", "Place", "Shape", "TensorId", "Unsupported", "Value"]

Shape = tuple[int, ...]
Value = str | tuple[str | None, ...] | None
"""What a node of the trace became: a tensor's id, one id a result (None for empty ones), or nothing."""


CONSTANT = "constant."
"""How the ids of arguments begin that stand for constants of a trace."""


class TensorId(str):
    """The id of a tensor among a call's arguments, told apart from one that is a word (`approximate='tanh'`)."""

    __slots__ = ()


class Unsupported(Exception):  # noqa: N818 - a signal between tables, never seen by users
    """A table knows the operator, but not in this form: it becomes an opaque op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where ops of a call belong."""

    module: str = ""
    phase: Phase = Phase.FORWARD
    gradient_of: str = ""


@dataclass(slots=True, kw_only=True)
class Call:
    """A call: `name` is the operator's (`addmm`), `arguments` its arguments with tensors replaced by their ids."""

    name: str
    arguments: Mapping[str, Any]
    outputs: Sequence[Any]
    builder: GraphBuilder
    place: Place
    first_op: str = field(default="")

    def __getitem__(self, argument: str) -> Any:
        return self.arguments.get(argument)

    def shape(self, tensor_id: str) -> Shape:
        """The shape of a tensor that is in the graph."""
        return self.builder.tensors[tensor_id].shape

    def dtype(self, tensor_id: str) -> DType:
        """The element type of a tensor that is in the graph."""
        return self.builder.tensors[tensor_id].dtype

    def tensor(self, *names: str) -> str:
        """The id of the tensor under the first of these names."""
        for name in names:
            value = self.arguments.get(name)
            if isinstance(value, TensorId):
                return value
        raise Unsupported

    def optional(self, name: str) -> str | None:
        """The id of a tensor argument, None where it was not given."""
        value = self.arguments.get(name)
        return value if isinstance(value, TensorId) else None

    def is_constant(self, tensor_id: str) -> bool:
        """Whether a tensor depends on no parameter and no input."""
        return tensor_id.startswith(CONSTANT)

    def tensors(self) -> tuple[str, ...]:
        """The ids of all tensor arguments, lists of tensors included."""
        found: list[str] = []
        for value in self.arguments.values():
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, TensorId):
                    found.append(item)
        return tuple(found)

    def out_shape(self, index: int = 0) -> Shape:
        """The shape of a result."""
        return tuple(self.outputs[index].shape)

    def out_dtype(self, index: int = 0) -> DType:
        """The element type of a result."""
        return to_dtype(self.outputs[index].dtype)

    def made(self) -> tuple[int, ...]:
        """The indices of the results that are tensors with elements."""
        return tuple(
            index for index, value in enumerate(self.outputs) if hasattr(value, "shape") and math.prod(value.shape) > 0
        )

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        """A dimension argument, counted from the front."""
        value = self.arguments.get(name)
        if not isinstance(value, int):
            raise Unsupported
        size = rank if rank is not None else len(self.shape(self.tensor("self", "input")))
        return value % size if size else 0

    def emit(
        self,
        kind: OpKind,
        function: str,
        rule: Rule,
        *inputs: str,
        outputs: Sequence[int] = (0,),
        attributes: Mapping[str, Attribute] | None = None,
    ) -> Value:
        """Add the op that makes these results of the call; the call's value."""
        for index, dims in zip(outputs, rule.results, strict=True):
            if rule.shape(dims) != self.out_shape(index):
                raise Unsupported
        dtypes = [self.out_dtype(index) for index in outputs]
        made = self.add(kind, function, rule, *inputs, dtypes=dtypes, attributes=attributes)
        if len(self.outputs) == 1:
            return made[0]
        by_index = dict(zip(outputs, made, strict=True))
        return tuple(by_index.get(index) for index in range(len(self.outputs)))

    def add(
        self,
        kind: OpKind,
        function: str,
        rule: Rule,
        *inputs: str,
        dtypes: Sequence[DType],
        attributes: Mapping[str, Attribute] | None = None,
    ) -> tuple[str, ...]:
        """Add an op at the call's place; its result ids."""
        if len(inputs) != len(rule.operands):
            raise Unsupported
        for tensor_id, dims in zip(inputs, rule.operands, strict=True):
            if rule.shape(dims) != self.shape(tensor_id):
                raise Unsupported
        place = self.place
        suffix = "" if place.phase is Phase.FORWARD else ".gradient"
        made = self.builder.add(
            f"{place.module}.{self.name}{suffix}".lstrip("."),
            kind,
            function,
            self.builder.shared(rule),
            inputs,
            dtypes=dtypes,
            results=tuple(str(index) for index in range(1, len(dtypes))),
            module=place.module,
            phase=place.phase,
            gradient_of=place.gradient_of,
            origin=f"aten.{self.name}",
            attributes=attributes,
        )
        try:
            check_rule(self.builder.ops[-1])
        except GraphError:
            raise Unsupported from None
        self.first_op = self.first_op or made[0]
        return made
