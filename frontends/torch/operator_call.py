"""One call of an aten operator as the tables in `aten/` see it: arguments by name, tensors by id, shapes of results.

A table reads a call's arguments and emits the ops of the graph that compute its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch

from phaze.errors import GraphError
from phaze.ir import Attribute, Dim, Dims, DType, Factor, FactorKind, GraphBuilder, OpKind, Phase, Rule
from phaze.ir.graph_checks import check_rule

__all__ = [
    "Location",
    "OperatorCall",
    "OperatorTable",
    "Shape",
    "TensorId",
    "Unsupported",
    "Value",
    "dims_of",
    "factors_of",
    "to_dtype",
]

Shape = tuple[int, ...]
Value = str | tuple[str | None, ...] | None
"""What a node of a trace became: the id of a tensor; an id for each result (None for an empty one); or nothing."""

_LIKE_SIZED_DTYPES = {
    "complex32": DType.FLOAT32,
    "complex128": DType.COMPLEX64,
    "uint16": DType.INT16,
    "uint32": DType.INT32,
}
"""Element types of torch that the IR lacks, and what stands for each of them."""


def to_dtype(dtype: torch.dtype) -> DType:
    """Translate an element type of torch; one that the IR lacks becomes one of about its size."""
    name = str(dtype).removeprefix("torch.")
    if name.startswith("float8"):
        return DType.FLOAT8
    if name in set(DType):
        return DType(name)
    return _LIKE_SIZED_DTYPES.get(name, DType.INT64 if "64" in name else DType.INT8)


def dims_of(shape: Shape) -> Dims:
    """Name the dimensions of a shape after factors of their own: d0, d1 and so on."""
    return tuple(Dim((f"d{index}",)) for index in range(len(shape)))


def factors_of(shape: Shape, marked: Collection[int] = (), kind: FactorKind = FactorKind.WHOLE) -> tuple[Factor, ...]:
    """Make the factors of `dims_of(shape)`: those of the marked dimensions are of this kind, the others free."""
    return tuple(
        Factor(f"d{index}", size, kind if index in marked else FactorKind.FREE) for index, size in enumerate(shape)
    )


class TensorId(str):
    """The id of a tensor among a call's arguments, told apart from an argument that is text (`approximate='tanh'`)."""

    __slots__ = ()


class Unsupported(Exception):  # noqa: N818 - a signal between tables, never seen by users
    """A table knows the operator, but not in this form: the call becomes an opaque op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The module and phase that the ops of a call belong to, and the forward op whose gradient they compute."""

    module: str = ""
    phase: Phase = Phase.FORWARD
    gradient_of: str = ""


@dataclass(slots=True, kw_only=True)
class OperatorCall:
    """A call of the operator `name` (such as `addmm`).

    `arguments` are those of the operator's schema, with tensors replaced by their ids; their types are as many as
    schemas have. `outputs` are the fake tensors that the trace recorded as results. `constants` are the ids of tensors
    that depend on no parameter and no input. `first_op` is the id of the first op that was emitted, if any.
    """

    name: str
    arguments: Mapping[str, Any]
    outputs: Sequence[torch.Tensor]
    builder: GraphBuilder
    location: Location
    constants: AbstractSet[str]
    first_op: str = ""

    def __getitem__(self, argument: str) -> Any:
        return self.arguments.get(argument)

    def shape(self, tensor_id: str) -> Shape:
        """The shape of a tensor of the graph."""
        return self.builder.tensors[tensor_id].shape

    def dtype(self, tensor_id: str) -> DType:
        """The element type of a tensor of the graph."""
        return self.builder.tensors[tensor_id].dtype

    def tensor(self, *names: str) -> str:
        """The id of the tensor argument that has the first of these names; raises Unsupported if none has."""
        for name in names:
            value = self.arguments.get(name)
            if isinstance(value, TensorId):
                return value
        raise Unsupported

    def optional(self, name: str) -> str | None:
        """The id of a tensor argument, or None where it was not given."""
        value = self.arguments.get(name)
        return value if isinstance(value, TensorId) else None

    def tensors(self) -> tuple[str, ...]:
        """The ids of all tensor arguments, those in lists included."""
        tensor_ids: list[str] = []
        for value in self.arguments.values():
            items = value if isinstance(value, list | tuple) else (value,)
            tensor_ids.extend(item for item in items if isinstance(item, TensorId))
        return tuple(tensor_ids)

    def out_shape(self, index: int = 0) -> Shape:
        """The shape of a result."""
        return tuple(self.outputs[index].shape)

    def out_dtype(self, index: int = 0) -> DType:
        """The element type of a result."""
        return to_dtype(self.outputs[index].dtype)

    def nonempty_outputs(self) -> tuple[int, ...]:
        """The indices of the results that are tensors and have elements."""
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
        """Add the op that computes these results of the call, and return the call's value."""
        for index, dims in zip(outputs, rule.results, strict=True):
            if rule.shape(dims) != self.out_shape(index):
                raise Unsupported
        dtypes = [self.out_dtype(index) for index in outputs]
        result_ids = self.add(kind, function, rule, *inputs, dtypes=dtypes, attributes=attributes)
        if len(self.outputs) == 1:
            return result_ids[0]
        by_index = dict(zip(outputs, result_ids, strict=True))
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
        """Add an op at the call's location and return the ids of its results; raises Unsupported if shapes disagree."""
        if len(inputs) != len(rule.operands):
            raise Unsupported
        for tensor_id, dims in zip(inputs, rule.operands, strict=True):
            if rule.shape(dims) != self.shape(tensor_id):
                raise Unsupported
        location = self.location
        suffix = "" if location.phase is Phase.FORWARD else ".gradient"
        result_ids = self.builder.add(
            f"{location.module}.{self.name}{suffix}".lstrip("."),
            kind,
            function,
            self.builder.shared(rule),
            inputs,
            dtypes=dtypes,
            results=tuple(str(index) for index in range(1, len(dtypes))),
            module=location.module,
            phase=location.phase,
            gradient_of=location.gradient_of,
            origin=f"aten.{self.name}",
            attributes=attributes,
        )
        op = self.builder.ops[-1]
        try:
            check_rule(op)
        except GraphError:
            raise Unsupported from None
        self.first_op = self.first_op or op.id
        return result_ids


OperatorTable = Mapping[str, Callable[[OperatorCall], Value]]
"""How operators are translated: by the name of an operator, the function that adds the ops of a call of it."""
