"""Graphs as JSON: exact round trips, a schema version, and errors that name the field.

Rules stand once each as text, ops refer to them by position. Nothing is pickled and nothing is guessed: an unknown
version or a field of the wrong type is refused.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import TypeVar, cast

from phaze.errors import FormatError, GraphError, PhazeError, shown
from phaze.file_reading import parse_json, read_text
from phaze.file_writing import write_whole
from phaze.ir.graph import Graph
from phaze.ir.op import Attribute, Op, OpKind, Phase
from phaze.ir.rule import Rule
from phaze.ir.tensor import DType, Role, Tensor

__all__ = ["FORMAT", "VERSION", "graph_content_json", "graph_from_json", "graph_to_json", "read_graph", "save_graph"]

FORMAT = "phaze-graph"
VERSION = 1
"""The schema of the document; a graph of another version is refused. Optional fields do not change it."""

_Kind = TypeVar("_Kind")
_Enum = TypeVar("_Enum", bound=StrEnum)

_OPTIONAL = ("module", "gradient_of", "origin")
_OPTIONAL_FACTS = ("is_backward_derived", "why_backward_kept", "runs_as")
_GRAPH_FIELDS = frozenset(
    (
        "format",
        "version",
        "name",
        "micro_batch_size",
        "notes",
        "tensors",
        "rules",
        "ops",
        "outputs",
        "gradients",
        *_OPTIONAL_FACTS,
    )
)
_TENSOR_FIELDS = frozenset(("id", "shape", "dtype", "role"))
_OP_FIELDS = frozenset(
    ("id", "kind", "function", "rule", "inputs", "outputs", "phase", "attributes", "collective_bytes", *_OPTIONAL)
)


def graph_to_json(graph: Graph) -> str:
    """The graph as one JSON document."""
    texts: dict[str, int] = {}
    by_object: dict[int, int] = {}
    for op in graph.ops:
        if id(op.rule) not in by_object:
            by_object[id(op.rule)] = texts.setdefault(str(op.rule), len(texts))
    document = {
        "format": FORMAT,
        "version": VERSION,
        "name": graph.name,
        "micro_batch_size": graph.micro_batch_size,
        "notes": list(graph.notes),
        "tensors": [_tensor_to_json(tensor) for tensor in graph.tensors.values()],
        "rules": list(texts),
        "ops": [_op_to_json(op, by_object[id(op.rule)]) for op in graph.ops],
        "outputs": list(graph.outputs),
        "gradients": [list(pair) for pair in graph.gradients],
    }
    document |= {name: getattr(graph, name) for name in _OPTIONAL_FACTS if getattr(graph, name)}
    return json.dumps(document, indent=None, separators=(",", ":"), allow_nan=False)


def graph_content_json(graph: Graph) -> str:
    """JSON of what a graph computes alone: without its notes and without how its backward was obtained."""
    return graph_to_json(replace(graph, notes=(), is_backward_derived=False, why_backward_kept="", runs_as={}))


def save_graph(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write a graph next to its destination, then move it there: whole or not at all."""
    write_whole(path, graph_to_json(graph))


def read_graph(path: str | os.PathLike[str]) -> Graph:
    """Read a graph that `save_graph` wrote."""
    text = read_text(path, "a saved graph")
    try:
        return graph_from_json(text)
    except PhazeError as error:
        raise type(error)(f"{path}: {error}") from error


def graph_from_json(text: str) -> Graph:
    """The graph of a JSON document; FormatError names the field that is wrong, GraphError what contradicts itself."""
    document = parse_json(text, "the text", "a saved graph")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FormatError(f"JSON, but not a saved graph: expected an object with format {FORMAT!r}.")
    if document.get("version") != VERSION:
        raise FormatError(
            f"saved graph of schema version {shown(document.get('version'))}; this Phaze reads version {VERSION}. "
            "Save it again with a matching Phaze."
        )
    return _graph_from_document(document)


def _degrees(document: Mapping[str, object]) -> dict[str, int]:
    """The strategy that a captured program runs."""
    given: dict[str, object] = _field(document, "runs_as", dict, "", default={})
    for name, degree in given.items():
        if isinstance(degree, bool) or not isinstance(degree, int):
            raise FormatError(f"runs_as.{name} is {shown(degree)}; expected a whole number.")
    return {name: degree for name, degree in given.items() if isinstance(degree, int)}


def _graph_from_document(document: Mapping[str, object]) -> Graph:
    """The graph of a document whose format and version are right."""
    _refuse_unknown(document, _GRAPH_FIELDS, "")
    rules = [_parse_rule(text, index) for index, text in enumerate(_strings(document, "rules"))]
    tensors: dict[str, Tensor] = {}
    for index, entry in enumerate(_list(document, "tensors")):
        tensor = _tensor_from_json(entry, f"tensors[{index}]")
        if tensor.id in tensors:
            raise GraphError(f"two tensors have the id {tensor.id!r}; ids must be unique.")
        tensors[tensor.id] = tensor
    return Graph(
        name=_string(document, "name"),
        tensors=tensors,
        ops=tuple(_op_from_json(entry, rules, f"ops[{i}]") for i, entry in enumerate(_list(document, "ops"))),
        outputs=tuple(_strings(document, "outputs")),
        gradients=tuple(_pair(pair, f"gradients[{i}]") for i, pair in enumerate(_list(document, "gradients"))),
        micro_batch_size=_field(document, "micro_batch_size", int, ""),
        is_backward_derived=_field(document, "is_backward_derived", bool, "", default=False),
        why_backward_kept=_string(document, "why_backward_kept") if "why_backward_kept" in document else "",
        runs_as=_degrees(document),
        notes=tuple(_strings(document, "notes")),
    )


def _tensor_to_json(tensor: Tensor) -> dict[str, object]:
    entry: dict[str, object] = {"id": tensor.id, "shape": list(tensor.shape), "dtype": tensor.dtype.value}
    return entry if tensor.role is None else entry | {"role": tensor.role.value}


def _tensor_from_json(entry: object, where: str) -> Tensor:
    fields = _object(entry, where)
    _refuse_unknown(fields, _TENSOR_FIELDS, where)
    # Sizes that are no integers are refused, with the tensor named, when the graph is checked.
    shape = cast("tuple[int, ...]", tuple(_list(fields, "shape", where)))
    role = _enum(Role, fields["role"], f"{where}.role") if "role" in fields else None
    return Tensor(_string(fields, "id", where), shape, _enum(DType, fields.get("dtype"), f"{where}.dtype"), role)


def _op_to_json(op: Op, rule: int) -> dict[str, object]:
    entry: dict[str, object] = {
        "id": op.id,
        "kind": op.kind.value,
        "function": op.function,
        "rule": rule,
        "inputs": list(op.inputs),
        "outputs": list(op.outputs),
        "phase": op.phase.value,
    }
    entry |= {name: getattr(op, name) for name in _OPTIONAL if getattr(op, name)}
    if op.collective_bytes:
        entry["collective_bytes"] = op.collective_bytes
    attributes = {name: _attribute_to_json(value) for name, value in op.attributes}
    return entry | ({"attributes": attributes} if attributes else {})


def _attribute_to_json(value: Attribute) -> object:
    """The value itself; infinities and NaN, for which JSON has no number, as an object."""
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _op_from_json(entry: object, rules: list[Rule], where: str) -> Op:
    fields = _object(entry, where)
    _refuse_unknown(fields, _OP_FIELDS, where)
    index = _field(fields, "rule", int, where)
    if not 0 <= index < len(rules):
        raise FormatError(f"{where}.rule is {index}, but there are {len(rules)} rules.")
    attributes = _object(fields.get("attributes", {}), f"{where}.attributes")
    return Op(
        id=_string(fields, "id", where),
        kind=_enum(OpKind, fields.get("kind"), f"{where}.kind"),
        function=_string(fields, "function", where),
        rule=rules[index],
        inputs=tuple(_strings(fields, "inputs", where)),
        outputs=tuple(_strings(fields, "outputs", where)),
        phase=_enum(Phase, fields.get("phase"), f"{where}.phase"),
        attributes=tuple((name, _attribute(value, f"{where}.attributes.{name}")) for name, value in attributes.items()),
        collective_bytes=_field(fields, "collective_bytes", int, where, default=0),
        **{name: _string(fields, name, where) for name in _OPTIONAL if name in fields},
    )


def _attribute(value: object, where: str) -> Attribute:
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return tuple(value)
    if isinstance(value, dict) and value.get("float") in ("inf", "-inf", "nan"):
        return float(value["float"])
    if isinstance(value, int | float | str):
        return value
    raise FormatError(f"{where} is {shown(value)}; expected a number, text or a list of integers.")


def _parse_rule(text: str, index: int) -> Rule:
    try:
        return Rule.parse(text)
    except GraphError as error:
        raise GraphError(f"rules[{index}]: {error}") from error


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise FormatError(f"{where} is {shown(value)}; expected an object.")
    return value


def _refuse_unknown(fields: Mapping[str, object], known: frozenset[str], where: str) -> None:
    unknown = sorted(name for name in fields if name not in known)
    if unknown:
        raise FormatError(
            f"{_path(where, unknown[0])} is not a field of a saved graph; known are {', '.join(sorted(known))}."
        )


def _field(fields: Mapping[str, object], name: str, kind: type[_Kind], where: str, *, default: object = None) -> _Kind:
    value = fields.get(name, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FormatError(f"{_path(where, name)} is {shown(value)}; expected {_KIND_NAMES[kind]}.")
    return value


def _string(fields: Mapping[str, object], name: str, where: str = "") -> str:
    return _readable(str(_field(fields, name, str, where)), _path(where, name))


def _readable(text: str, where: str) -> str:
    """The text, which must be possible to print: JSON allows halves of characters."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise FormatError(f"{where} is {shown(text)}, which holds half a character; expected proper text.")
    return text


def _list(fields: Mapping[str, object], name: str, where: str = "") -> list[object]:
    return list(_field(fields, name, list, where))


def _strings(fields: Mapping[str, object], name: str, where: str = "") -> list[str]:
    texts = []
    for index, value in enumerate(_list(fields, name, where)):
        if not isinstance(value, str):
            raise FormatError(f"{_path(where, name)}[{index}] is {shown(value)}; expected text.")
        texts.append(_readable(value, f"{_path(where, name)}[{index}]"))
    return texts


def _pair(value: object, where: str) -> tuple[str, str]:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(item, str) for item in value):
        return value[0], value[1]
    raise FormatError(f"{where} is {shown(value)}; expected a pair of ids.")


def _enum(kind: type[_Enum], value: object, where: str) -> _Enum:
    for member in kind:
        if member == value:
            return member
    allowed = ", ".join(member.value for member in kind)
    raise FormatError(f"{where} is {shown(value)}; expected one of {allowed}.")


def _path(where: str, name: str) -> str:
    """Where a field stands in the document, for messages."""
    return f"{where}.{name}" if where else name


_KIND_NAMES: dict[type, str] = {bool: "true or false", int: "an integer", str: "text", list: "a list"}
