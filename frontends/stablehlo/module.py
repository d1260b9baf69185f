"""A StableHLO module as plain values: what is read from MLIR, before anything is understood.

The *document* of a module is made of lists, texts and numbers only, so that it can be sent as JSON by the process that
parses foreign files. Values are numbered throughout a module; a dynamic dimension is -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phaze.ir import DType

__all__ = ["Argument", "Function", "Module", "Operation", "Region", "TensorType", "to_dtype"]

DYNAMIC = -1


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and element type, the latter as MLIR writes it (`bf16`, `i32`); other types have the name alone."""

    shape: tuple[int, ...]
    element: str

    @property
    def is_dynamic(self) -> bool:
        """Whether some dimension has no size."""
        return DYNAMIC in self.shape


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation; `scope` is the name of its location, such as `jit(f)/jvp(layer_0)/dot_general`."""

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    types: tuple[TensorType, ...]
    attributes: Mapping[str, Any]
    regions: tuple[Region, ...]
    scope: str

    @property
    def short_name(self) -> str:
        """The name without its dialect."""
        return self.name.partition(".")[2]


@dataclass(frozen=True, slots=True)
class Region:
    """A block with its arguments; its last operation returns."""

    arguments: tuple[int, ...]
    types: tuple[TensorType, ...]
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a function, or a result with the name that it was given."""

    type: TensorType
    name: str
    sharding: str


@dataclass(frozen=True, slots=True)
class Function:
    """A function by name."""

    name: str
    arguments: tuple[Argument, ...]
    results: tuple[Argument, ...]
    body: Region


@dataclass(frozen=True, slots=True)
class Module:
    """Functions by name; meshes are those that shardings refer to."""

    name: str
    functions: Mapping[str, Function]
    meshes: tuple[str, ...] = ()

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Module:
        """The module of a document that `read_module` wrote."""
        functions = {entry["name"]: _function(entry) for entry in document["functions"]}
        return cls(document["name"], functions, tuple(document["meshes"]))


def _function(entry: Mapping[str, Any]) -> Function:
    return Function(
        entry["name"],
        tuple(Argument(_type(kind), name, sharding) for kind, name, sharding in entry["arguments"]),
        tuple(Argument(_type(kind), name, sharding) for kind, name, sharding in entry["results"]),
        _region(entry["body"]),
    )


def _region(entry: Sequence[Any]) -> Region:
    arguments, types, operations = entry
    return Region(
        tuple(arguments), tuple(_type(kind) for kind in types), tuple(_operation(operation) for operation in operations)
    )


def _operation(entry: Sequence[Any]) -> Operation:
    name, operands, results, types, attributes, regions, scope = entry
    return Operation(
        name,
        tuple(operands),
        tuple(results),
        tuple(_type(kind) for kind in types),
        attributes,
        tuple(_region(region) for region in regions),
        scope,
    )


def _type(entry: Sequence[Any]) -> TensorType:
    shape, element = entry
    return TensorType(tuple(shape), element)


_NAMES = {
    "f64": DType.FLOAT64,
    "f32": DType.FLOAT32,
    "tf32": DType.FLOAT32,
    "bf16": DType.BFLOAT16,
    "f16": DType.FLOAT16,
    "i1": DType.BOOL,
    "ui8": DType.UINT8,
}
_BY_BITS = {64: DType.INT64, 32: DType.INT32, 16: DType.INT16, 8: DType.INT8}


def to_dtype(element: str) -> DType:
    """The element type that MLIR writes so; those that the IR lacks become one of like size."""
    if element in _NAMES:
        return _NAMES[element]
    if element.startswith("complex"):
        return DType.COMPLEX64
    if element.startswith("f"):
        return DType.FLOAT8
    digits = "".join(letter for letter in element if letter.isdigit())
    return _BY_BITS.get(int(digits) if digits else 8, DType.INT8)
