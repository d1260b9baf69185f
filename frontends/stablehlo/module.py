"""A StableHLO module as plain values: functions, regions, operations and tensor types; and its flops in products.

The *document* of a module is made of lists, texts and numbers only, so that the process that parses foreign files can
send it as JSON. `mlir_reader.py` writes it, `Module.from_document` reads it. Values are numbered throughout a module.

`product_flops` estimates the flops of a module's products without running it, to tell a model from its helper
functions. Calls are followed, a loop counts as often as the compiler says, else once, and of a branch its longest side
counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from phaze.errors import ImportModelError
from phaze.ir import DType

__all__ = [
    "Argument",
    "Attribute",
    "Document",
    "Function",
    "Module",
    "Operation",
    "Region",
    "TensorType",
    "product_flops",
]

Document = dict[str, Any]
"""A module as JSON. Its lists mix types by position, which Python's types cannot say: hence `Any` in this file."""

Attribute: TypeAlias = "bool | int | float | str | list[Attribute] | dict[str, Attribute] | None"
"""An attribute of an operation: a number, a text, or lists and mappings of these."""

MOST_LISTED = 8
"""The most functions that a message lists."""

DYNAMIC = -1
"""The size that the reader writes for a dimension whose size is not known."""

_DTYPES = {
    "f64": DType.FLOAT64,
    "f32": DType.FLOAT32,
    "tf32": DType.FLOAT32,
    "bf16": DType.BFLOAT16,
    "f16": DType.FLOAT16,
    "i1": DType.BOOL,
    "ui8": DType.UINT8,
}
_INTEGERS_BY_BITS = {64: DType.INT64, 32: DType.INT32, 16: DType.INT16, 8: DType.INT8}


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and element type, the latter as MLIR writes it (`bf16`, `i32`). Types that are no tensors have no shape."""

    shape: tuple[int, ...]
    element: str

    @property
    def is_dynamic(self) -> bool:
        """Whether the size of some dimension is not known."""
        return DYNAMIC in self.shape

    @property
    def dtype(self) -> DType:
        """The element type in the IR. One that the IR lacks becomes one of like size."""
        if self.element in _DTYPES:
            return _DTYPES[self.element]
        if self.element.startswith("complex"):
            return DType.COMPLEX64
        if self.element.startswith("f"):
            return DType.FLOAT8
        digits = "".join(letter for letter in self.element if letter.isdigit())
        return _INTEGERS_BY_BITS.get(int(digits) if digits else 8, DType.INT8)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. `scope` is the name of its location, such as `jit(f)/jvp(layer_0)/dot_general`."""

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    types: tuple[TensorType, ...]
    attributes: Mapping[str, Attribute]
    regions: tuple[Region, ...]
    scope: str

    @property
    def short_name(self) -> str:
        """The name without its dialect: `add` for `stablehlo.add`."""
        return self.name.partition(".")[2]


@dataclass(frozen=True, slots=True)
class Region:
    """A block of operations with its arguments. The last operation returns the results."""

    arguments: tuple[int, ...]
    types: tuple[TensorType, ...]
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a function, or one of its results, with the name and the sharding that it was given."""

    type: TensorType
    name: str
    sharding: str


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a module, with its arguments, its results and its body."""

    name: str
    arguments: tuple[Argument, ...]
    results: tuple[Argument, ...]
    body: Region


@dataclass(frozen=True, slots=True)
class Module:
    """A module: its functions by name, and the text of the meshes that its shardings refer to.

    `entry` is the name of the function that a program starts with. `aliases` pairs arguments with the results that are
    written over them. `assumed_trips` is how often a loop runs whose trips depend on data. A module for `partitions`
    devices that `is_partitioned` already has the shapes of one of them.
    """

    name: str
    functions: Mapping[str, Function]
    meshes: tuple[str, ...] = ()
    entry: str = "main"
    aliases: tuple[tuple[int, int], ...] = ()
    partitions: int = 1
    replicas: int = 1
    is_partitioned: bool = False
    notes: tuple[str, ...] = ()
    assumed_trips: int = 1

    @property
    def main(self) -> Function:
        """The function that a program starts with: the entry, or the only function that no other one calls.

        Raises ImportModelError where there is none.
        """
        if self.entry in self.functions:
            return self.functions[self.entry]
        uncalled = self._uncalled() if self.entry == "main" else []
        if len(uncalled) == 1:
            return uncalled[0]
        known = ", ".join(list(self.functions)[:MOST_LISTED]) or "none at all"
        more = f" and {len(self.functions) - MOST_LISTED} more" if len(self.functions) > MOST_LISTED else ""
        raise ImportModelError(
            f"the module {self.name!r} has no function {self.entry!r} (functions: {known}{more}); "
            + ("name the one to import with entry= (--entry)." if self.functions else "nothing to import.")
        )

    def _uncalled(self) -> list[Function]:
        called: set[str] = set()
        for function in self.functions.values():
            called |= _callees(function.body) - {function.name}
        return [function for name, function in self.functions.items() if name not in called]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Module:
        """The module of a document that `read_module` wrote."""
        functions = {entry["name"]: _function(entry) for entry in document["functions"]}
        return cls(
            name=document["name"],
            functions=functions,
            meshes=tuple(document["meshes"]),
            entry=document.get("entry", "main"),
            aliases=tuple((argument, result) for argument, result in document.get("aliases", ())),
            partitions=document.get("partitions", 1),
            replicas=document.get("replicas", 1),
            is_partitioned=document.get("is_partitioned", False),
            notes=tuple(document.get("notes", ())),
        )


def _callees(region: Region) -> set[str]:
    """The names of all functions that the operations of a region refer to."""
    names: set[str] = set()
    for operation in region.operations:
        names |= {text for text in operation.attributes.values() if isinstance(text, str)}
        for listed in operation.attributes.values():
            names |= {text for text in listed if isinstance(text, str)} if isinstance(listed, list) else set()
        for inner in operation.regions:
            names |= _callees(inner)
    return names


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


MOST_NESTED = 100
"""How deep calls are followed: deeper ones are damaged modules, which call themselves."""

_KERNEL_LAYOUT = re.compile(r"\]x\[([\w, ?]*)\]")


def product_flops(module: Module) -> float:
    """Twice the multiplications of all products and convolutions that the entry reaches; 0 where there is no entry."""
    entry = module.functions.get(module.entry)
    if entry is None and module.functions:
        return max(_Counter(module).region(function.body, 0) for function in module.functions.values())
    return 0.0 if entry is None else _Counter(module).region(entry.body, 0)


class _Counter:
    """Counts regions; a function that is called many times is counted once and remembered."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.types: dict[int, TensorType] = {}
        self.known: dict[str, float] = {}

    def region(self, region: Region, depth: int) -> float:
        self.types.update(zip(region.arguments, region.types, strict=False))
        total = 0.0
        for operation in region.operations:
            self.types.update(zip(operation.results, operation.types, strict=False))
            total += self._operation(operation, depth)
        return total

    def _operation(self, operation: Operation, depth: int) -> float:
        name = operation.short_name
        if name in ("dot_general", "dot", "convolution"):
            return self._product(operation)
        callee = operation.attributes.get("callee")
        if isinstance(callee, str) and callee in self.module.functions and depth < MOST_NESTED:
            if callee not in self.known:
                self.known[callee] = 0.0  # a function that calls itself adds nothing more
                self.known[callee] = self.region(self.module.functions[callee].body, depth + 1)
            return self.known[callee]
        counts = list(map(partial(self.region, depth=depth + 1), operation.regions)) if depth < MOST_NESTED else []
        if name in ("case", "if"):
            return max(counts, default=0.0)
        trips = operation.attributes.get("trips")
        return sum(counts) * (trips if isinstance(trips, int) else 1)

    def _product(self, operation: Operation) -> float:
        sides = [self.types.get(number) for number in operation.operands[:2]]
        if len(sides) < 2 or sides[0] is None or sides[1] is None or not operation.types:
            return 0.0
        left, right = sides[0].shape, sides[1].shape
        result = math.prod(operation.types[0].shape)
        if operation.short_name == "convolution":
            layout = _KERNEL_LAYOUT.search(str(operation.attributes.get("dimension_numbers")))
            words = [word.strip() for word in layout[1].split(",")] if layout else []
            outputs = right[words.index("o")] if "o" in words and len(words) == len(right) else 1
            return 2.0 * result * math.prod(right) / max(1, outputs)
        numbers = operation.attributes.get("dot_dimension_numbers")
        given = numbers.get("lhs_contracting_dimensions") if isinstance(numbers, dict) else None
        dims = given if isinstance(given, list) else [len(left) - 1] if operation.short_name == "dot" else []
        return 2.0 * result * math.prod(left[dim] for dim in dims if isinstance(dim, int) and 0 <= dim < len(left))
