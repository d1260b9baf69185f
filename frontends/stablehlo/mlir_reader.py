"""Read a parsed module out of jaxlib's MLIR into the plain document that `module.py` describes.

This file runs where jaxlib is: in the user's process for JAX models, in the parser's process for HLO files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

from jaxlib.mlir import ir

from phaze.frontends.stablehlo.module import DYNAMIC, Attribute, Document

__all__ = ["read_module"]

MOST_ELEMENTS = 64
"""The most elements whose contents are kept for a constant.

Dimension numbers and start indices are shorter. The weights that somebody baked into a module are longer, and only
their size matters.
"""

MOST_CHARACTERS = 2000
"""Attributes that are kept as text are cut here, so that a constant printed in one cannot fill the document."""

MOST_NESTED_LOCATIONS = 8
"""How many locations inside locations are opened to find a name. JAX nests them two or three deep."""

_FIELD = re.compile(r"(\w+) = (\[[^\]]*\]|-?\d+)")
"""A field of an attribute that MLIR only prints, such as `offset_dims = [2]`."""


def read_module(module: ir.Module) -> Document:
    """The document of a module."""
    reader = _Reader()
    functions, meshes = [], []
    aliases: list[list[int]] = []
    for op in module.body.operations:
        name = op.operation.name
        if name == "func.func":
            functions.append(reader.function(op))
            if functions[-1]["name"] == "main":
                aliases = _aliases(op)
        elif name == "sdy.mesh":
            meshes.append(str(op.operation)[:MOST_CHARACTERS])
    attributes = module.operation.attributes
    name = attributes["sym_name"].value if "sym_name" in attributes else "module"
    counts = {key: _device_count(attributes, f"mhlo.num_{key}") for key in ("partitions", "replicas")}
    return {"name": name, "functions": functions, "meshes": meshes, "aliases": aliases, **counts}


def _device_count(attributes: ir.OpAttributeMap, name: str) -> int:
    """The devices that a module says it is for: one where it says nothing."""
    if name not in attributes:
        return 1
    given = attributes[name]
    return max(1, int(given.value)) if isinstance(given, ir.IntegerAttr) else 1


def _aliases(function: ir.OpView) -> list[list[int]]:
    """Pairs of an argument and the result that is written over it: JAX's donated arguments."""
    attributes = function.operation.attributes
    count = len(ir.FunctionType(attributes["function_type"].value).inputs)
    given = [_dictionary(attributes, "arg_attrs", index).get("tf.aliasing_output") for index in range(count)]
    return [[index, attribute.value] for index, attribute in enumerate(given) if attribute is not None]


class _Reader:
    """Reads functions and all that is inside them. Values get numbers in the order of their appearance.

    A document has no tuples: a value that is one has a number for each array in it, and the operations that pack and
    unpack tuples are gone.
    """

    def __init__(self) -> None:
        self.known: dict[ir.Value, list[int]] = {}
        self.count = 0

    def numbers(self, value: ir.Value) -> list[int]:
        if value not in self.known:
            size = len(_types(value.type))
            self.known[value] = list(range(self.count, self.count + size))
            self.count += size
        return self.known[value]

    def all_numbers(self, values: Iterable[ir.Value]) -> list[int]:
        return [number for value in values for number in self.numbers(value)]

    def function(self, op: ir.OpView) -> dict[str, Any]:
        attributes = op.operation.attributes
        function_type = ir.FunctionType(attributes["function_type"].value)
        blocks = list(op.operation.regions[0].blocks)
        block_arguments = list(blocks[0].arguments) if blocks else []
        arguments = []
        for index, input_type in enumerate(function_type.inputs):
            given = _dictionary(attributes, "arg_attrs", index)
            name = _scope(block_arguments[index].location) if index < len(block_arguments) else ""
            arguments += [[kind, name, _sharding(given)] for kind in _types(input_type)]
        results = []
        for index, result_type in enumerate(function_type.results):
            given = _dictionary(attributes, "res_attrs", index)
            name = _text(given.get("jax.result_info"))
            results += [[kind, name, _sharding(given)] for kind in _types(result_type)]
        body = self.region(op.operation.regions[0]) if blocks else [[], [], []]
        return {"name": attributes["sym_name"].value, "arguments": arguments, "results": results, "body": body}

    def region(self, region: ir.Region) -> list[Any]:
        blocks = list(region.blocks)
        if not blocks:
            return [[], [], []]
        if len(blocks) > 1:
            raise ValueError("a function jumps between blocks (cf.br); only structured loops and branches are read.")
        arguments = self.all_numbers(blocks[0].arguments)
        types = [kind for argument in blocks[0].arguments for kind in _types(argument.type)]
        operations = [self.operation(op) for op in blocks[0].operations if not self.unpacks(op.operation)]
        return [arguments, types, operations]

    def unpacks(self, operation: ir.Operation) -> bool:
        """Whether an operation only packs or unpacks a tuple, whose numbers its result then has."""
        name = operation.name.rpartition(".")[2]
        if name == "tuple":
            self.known[operation.results[0]] = self.all_numbers(operation.operands)
        elif name == "get_tuple_element":
            packed = ir.TupleType(operation.operands[0].type)
            index = ir.IntegerAttr(operation.attributes["index"]).value
            start = sum(len(_types(packed.get_type(part))) for part in range(index))
            size = len(_types(packed.get_type(index)))
            self.known[operation.results[0]] = self.numbers(operation.operands[0])[start : start + size]
        else:
            return False
        return True

    def operation(self, op: ir.OpView) -> list[Any]:
        operation = op.operation
        results = list(operation.results)
        return [
            operation.name,
            self.all_numbers(operation.operands),
            self.all_numbers(results),
            [kind for result in results for kind in _types(result.type)],
            {str(name): self.attribute(operation, str(name)) for name in operation.attributes},
            [self.region(region) for region in operation.regions],
            _scope(operation.location),
        ]

    def attribute(self, operation: ir.Operation, name: str) -> Attribute:
        """An attribute; what Python has no type for (complex constants, texts of bytes) is told by its operation."""
        try:
            given = operation.attributes[name]
            return _groups(given) if name == "replica_groups" else _attribute(given)
        except (TypeError, RuntimeError, UnicodeDecodeError):
            return {"made_by": next(iter(self.all_numbers(operation.results)), 0)}


def _types(value_type: ir.Type) -> list[list[Any]]:
    """The types of the arrays in a value: its own, or those of all parts of a tuple."""
    if not isinstance(value_type, ir.TupleType):
        return [_type(value_type)]
    return [kind for part in range(value_type.num_types) for kind in _types(value_type.get_type(part))]


def _type(value_type: ir.Type) -> list[Any]:
    """Shape and element type; a type that is no tensor has no shape, and its text instead of an element type."""
    if not isinstance(value_type, ir.RankedTensorType):
        return [[], str(value_type)[:MOST_CHARACTERS]]
    dims = range(value_type.rank)
    shape = [DYNAMIC if value_type.is_dynamic_dim(dim) else value_type.get_dim_size(dim) for dim in dims]
    return [shape, str(value_type.element_type)]


def _scope(location: ir.Location) -> str:
    """The innermost name of a location; empty where it has none."""
    for _ in range(MOST_NESTED_LOCATIONS):
        if isinstance(location, ir.NameLoc):
            return str(location.name_str)
        inner = getattr(location, "locations", None)
        if not inner:
            return ""
        location = inner[0]
    return ""


def _attribute(attribute: ir.Attribute) -> Attribute:
    """A number, text, list or mapping. What has a form of its own (`#stablehlo.dot<...>`) is read by its fields."""
    if isinstance(attribute, ir.BoolAttr | ir.IntegerAttr | ir.FloatAttr | ir.StringAttr | ir.FlatSymbolRefAttr):
        value: Attribute = attribute.value
        return value
    if isinstance(attribute, ir.DenseI64ArrayAttr | ir.DenseI32ArrayAttr | ir.DenseBoolArrayAttr):
        return list(attribute)
    if isinstance(attribute, ir.ArrayAttr):
        return [_attribute(item) for item in attribute]
    if isinstance(attribute, ir.DictAttr):
        return {item.name: _attribute(item.attr) for item in attribute}
    if isinstance(attribute, ir.DenseElementsAttr):
        return _elements(attribute)
    text = str(attribute)[:MOST_CHARACTERS]
    fields = _FIELD.findall(text)
    return {"text": text, **{name: _field(value) for name, value in fields}} if fields else text


def _groups(attribute: ir.Attribute) -> Attribute:
    """The groups of a collective as HLO writes them: `[groups,size]` counted through, where they are listed."""
    if not isinstance(attribute, ir.DenseElementsAttr):
        return _attribute(attribute)
    count, size = (*ir.RankedTensorType(attribute.type).shape, 1)[:2]
    return f"[{count},{size}]<=[{count * size}]" if count * size else "{}"


def _elements(attribute: ir.DenseElementsAttr) -> dict[str, Any]:
    """The contents of a constant: `splat` where all elements are equal, `values` of few integers, else the `size`.

    Beside the size stands what tells the contents of two constants apart.
    """
    if attribute.is_splat:
        try:
            value = attribute.get_splat_value().value
        except (AttributeError, TypeError, ValueError):
            value = None  # a type that Python has no number for, such as a complex one
        return {"splat": value if isinstance(value, bool | int | float) else None}
    size = len(attribute)
    if size <= MOST_ELEMENTS and isinstance(attribute, ir.DenseIntElementsAttr):
        return {"values": [int(value) for value in attribute]}
    try:
        contents = memoryview(attribute)
    except (BufferError, ValueError) as error:  # a type that Python has no buffer of
        raise TypeError(str(attribute.type)) from error
    return {"size": size, "text": hashlib.blake2b(contents.tobytes(), digest_size=8).hexdigest()}


def _field(text: str) -> Attribute:
    """The number or the list of numbers that a printed field has; lists may be written `[1x2x3]`."""
    if not text.startswith("["):
        return int(text)
    words = text.strip("[]").replace("x", ",").split(",")
    return [int(word) for word in words if word.strip().lstrip("-").isdigit()]


def _dictionary(attributes: ir.OpAttributeMap, name: str, index: int) -> dict[str, ir.Attribute]:
    """The attributes of one argument or result of a function."""
    if name not in attributes:
        return {}
    return {item.name: item.attr for item in attributes[name][index]}


def _text(attribute: ir.Attribute | None) -> str:
    return "" if attribute is None else str(getattr(attribute, "value", attribute))[:MOST_CHARACTERS]


def _sharding(given: dict[str, ir.Attribute]) -> str:
    return next((_text(given[key]) for key in ("sdy.sharding", "mhlo.sharding") if key in given), "")
