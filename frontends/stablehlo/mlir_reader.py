"""From jaxlib's MLIR to the document of a module (`module.py`). Runs where jaxlib is: here, or in a child."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["read_module"]

MOST_VALUES = 64
"""Constants of more elements are kept without their contents, unless all are equal."""

MOST_CHARACTERS = 2000
"""Attributes that are kept as text are cut here."""

_FIELD = re.compile(r"(\w+) = (\[[^\]]*\]|-?\d+)")


def read_module(module: Any) -> dict[str, Any]:
    """The document of an `ir.Module`."""
    reader = _Reader()
    functions, meshes = [], []
    for op in module.body.operations:
        name = op.operation.name
        if name == "func.func":
            functions.append(reader.function(op))
        elif name == "sdy.mesh":
            meshes.append(str(op.operation)[:MOST_CHARACTERS])
    attributes = module.operation.attributes
    name = attributes["sym_name"].value if "sym_name" in attributes else "module"
    return {"name": name, "functions": functions, "meshes": meshes}


class _Reader:
    """Numbers values as they appear."""

    def __init__(self) -> None:
        from jaxlib.mlir import ir

        self.ir = ir
        self.numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def function(self, op: Any) -> dict[str, Any]:
        attributes = op.operation.attributes
        kind = self.ir.FunctionType(attributes["function_type"].value)
        blocks = list(op.operation.regions[0].blocks)
        named = list(blocks[0].arguments) if blocks else []
        arguments = []
        for index, input_type in enumerate(kind.inputs):
            given = _dictionary(attributes, "arg_attrs", index)
            name = self.scope(named[index].location) if index < len(named) else ""
            arguments.append([self.type(input_type), name, _sharding(given)])
        results = []
        for index, result_type in enumerate(kind.results):
            given = _dictionary(attributes, "res_attrs", index)
            results.append([self.type(result_type), _text(given.get("jax.result_info")), _sharding(given)])
        body = self.region(op.operation.regions[0]) if blocks else [[], [], []]
        return {"name": attributes["sym_name"].value, "arguments": arguments, "results": results, "body": body}

    def region(self, region: Any) -> list[Any]:
        blocks = list(region.blocks)
        if not blocks:
            return [[], [], []]
        arguments = [self.number(argument) for argument in blocks[0].arguments]
        types = [self.type(argument.type) for argument in blocks[0].arguments]
        return [arguments, types, [self.operation(op) for op in blocks[0].operations]]

    def operation(self, op: Any) -> list[Any]:
        op = op.operation
        results = list(op.results)
        return [
            op.name,
            [self.number(operand) for operand in op.operands],
            [self.number(result) for result in results],
            [self.type(result.type) for result in results],
            {str(name): self.attribute(op.attributes[name]) for name in op.attributes},
            [self.region(region) for region in op.regions],
            self.scope(op.location),
        ]

    def type(self, kind: Any) -> list[Any]:
        if isinstance(kind, self.ir.RankedTensorType):
            rank = range(kind.rank)
            shape = [-1 if kind.is_dynamic_dim(index) else kind.get_dim_size(index) for index in rank]
            return [shape, str(kind.element_type)]
        return [[], str(kind)[:MOST_CHARACTERS]]

    def scope(self, location: Any) -> str:
        """The innermost name of a location."""
        for _ in range(8):
            if isinstance(location, self.ir.NameLoc):
                return str(location.name_str)
            inner = getattr(location, "locations", None)
            if not inner:
                return ""
            location = inner[0]
        return ""

    def attribute(self, attribute: Any) -> Any:
        """A number, text, list or mapping; what has a form of its own (`#stablehlo.dot<...>`) is read by fields."""
        ir = self.ir
        if isinstance(attribute, ir.BoolAttr | ir.IntegerAttr | ir.FloatAttr | ir.StringAttr | ir.FlatSymbolRefAttr):
            return attribute.value
        if isinstance(attribute, ir.DenseI64ArrayAttr | ir.DenseI32ArrayAttr | ir.DenseBoolArrayAttr):
            return list(attribute)
        if isinstance(attribute, ir.ArrayAttr):
            return [self.attribute(item) for item in attribute]
        if isinstance(attribute, ir.DictAttr):
            return {item.name: self.attribute(item.attr) for item in attribute}
        if isinstance(attribute, ir.DenseElementsAttr):
            return _elements(ir, attribute)
        text = str(attribute)[:MOST_CHARACTERS]
        fields = _FIELD.findall(text)
        return {"text": text, **{name: _field(value) for name, value in fields}} if fields else text


def _dictionary(attributes: Any, name: str, index: int) -> dict[str, Any]:
    if name not in attributes:
        return {}
    given = attributes[name][index]
    return {item.name: item.attr for item in given}


def _text(attribute: Any) -> str:
    return "" if attribute is None else str(getattr(attribute, "value", attribute))[:MOST_CHARACTERS]


def _sharding(given: dict[str, Any]) -> str:
    return next((_text(given[key]) for key in ("sdy.sharding", "mhlo.sharding") if key in given), "")


def _elements(ir: Any, attribute: Any) -> dict[str, Any]:
    """`splat` where all elements are equal, `values` of a few integers, else the number of elements alone."""
    if attribute.is_splat:
        try:
            value = attribute.get_splat_value().value
        except (AttributeError, TypeError, ValueError):
            value = None
        return {"splat": value if isinstance(value, bool | int | float) else None}
    size = len(attribute)
    if size <= MOST_VALUES and isinstance(attribute, ir.DenseIntElementsAttr):
        return {"values": [int(value) for value in attribute]}
    return {"size": size}


def _field(text: str) -> Any:
    if not text.startswith("["):
        return int(text)
    words = text.strip("[]").replace("x", ",").split(",")
    return [int(word) for word in words if word.strip().lstrip("-").isdigit()]
