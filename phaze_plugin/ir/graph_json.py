"""Graphs as JSON: exact round trips, a schema version, and errors that name the field.

Rules stand once each as text, ops refer to them by position. Nothing is pickled and nothing is guessed: a document of
an unknown version, or one that is not what `GRAPH_SCHEMA` says, is refused before anything of it is used.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from phaze.errors import FormatError, GraphError, PhazeError, shown
from phaze.file_access import parse_json, read_text, write_whole
from phaze.ir.graph import DType, Graph, Role, Tensor
from phaze.ir.op import Attribute, Op, OpKind, Phase
from phaze.ir.rule import Rule
from phaze.json_documents import DRAFT, SchemaCheck

__all__ = [
    "FORMAT",
    "GRAPH_SCHEMA",
    "VERSION",
    "graph_content_json",
    "graph_from_json",
    "graph_to_json",
    "read_graph",
    "save_graph",
]

FORMAT = "phaze-graph"
VERSION = 1
"""The schema of the document; a graph of another version is refused. Optional fields do not change it."""

_OPTIONAL = ("module", "gradient_of", "origin")
_OPTIONAL_FACTS = ("is_backward_derived", "why_backward_kept", "runs_as", "saved", "mixes_samples", "averages_samples")

_TEXT: Mapping[str, object] = {"type": "string"}
_TEXTS: Mapping[str, object] = {"type": "array", "items": _TEXT}
_WHOLE: Mapping[str, object] = {"type": "integer"}
_NO_NUMBER_OF_JSON = ["inf", "-inf", "nan"]


def _record(needed: Mapping[str, object], optional: Mapping[str, object]) -> dict[str, object]:
    """The schema of an object with some fields, and no others."""
    fields = {"properties": {**needed, **optional}, "required": list(needed)}
    return {"type": "object", **fields, "additionalProperties": False}


_TENSOR = _record(
    {"id": _TEXT, "shape": {"type": "array", "items": _WHOLE}, "dtype": {"enum": [kind.value for kind in DType]}},
    {"role": {"enum": [role.value for role in Role]}, "is_frozen": {"type": "boolean"}},
)
_ATTRIBUTE = {
    "anyOf": [
        {"type": "number"},
        {"type": "string"},
        {"type": "boolean"},
        {"type": "array", "items": {"anyOf": [_WHOLE, {"type": "boolean"}]}},
        _record({"float": {"enum": _NO_NUMBER_OF_JSON}}, {}),
    ]
}
_OP = _record(
    {
        "id": _TEXT,
        "kind": {"enum": [kind.value for kind in OpKind]},
        "function": _TEXT,
        "rule": _WHOLE,
        "inputs": _TEXTS,
        "outputs": _TEXTS,
        "phase": {"enum": [phase.value for phase in Phase]},
    },
    {
        "attributes": {"type": "object", "additionalProperties": _ATTRIBUTE},
        "collective_bytes": _WHOLE,
        **dict.fromkeys(_OPTIONAL, _TEXT),
    },
)
GRAPH_SCHEMA: Mapping[str, object] = {
    "$schema": DRAFT,
    "title": "a graph",
    **_record(
        {
            "format": {"const": FORMAT},
            "version": {"const": VERSION},
            "name": _TEXT,
            "micro_batch_size": _WHOLE,
            "notes": _TEXTS,
            "tensors": {"type": "array", "items": _TENSOR},
            "rules": _TEXTS,
            "ops": {"type": "array", "items": _OP},
            "outputs": _TEXTS,
            "gradients": {"type": "array", "items": {**_TEXTS, "minItems": 2, "maxItems": 2}},
        },
        {
            "is_backward_derived": {"type": "boolean"},
            "why_backward_kept": _TEXT,
            "runs_as": {"type": "object", "additionalProperties": _WHOLE},
            "saved": _TEXTS,
            "mixes_samples": _TEXT,
            "averages_samples": {"type": "boolean"},
        },
    ),
}
"""What a saved graph is made of. That ids, shapes and rules agree with each other is checked by the graph itself."""


@cache
def _graph_check() -> SchemaCheck:
    return SchemaCheck(GRAPH_SCHEMA)


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
    """JSON of what a graph computes alone: without its notes, how its backward was obtained, what its loss is like."""
    plain = replace(graph, notes=(), is_backward_derived=False, why_backward_kept="", runs_as={})
    return graph_to_json(replace(plain, mixes_samples="", averages_samples=False))


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
    _graph_check()(document, "the graph")
    return _graph_from_document(document)


def _graph_from_document(document: Mapping[str, Any]) -> Graph:
    """The graph of a document that is what the schema says."""
    rules = [_parse_rule(text, index) for index, text in enumerate(document["rules"])]
    tensors: dict[str, Tensor] = {}
    for entry in document["tensors"]:
        tensor = _tensor_from_json(entry)
        if tensor.id in tensors:
            raise GraphError(f"two tensors have the id {tensor.id!r}; ids must be unique.")
        tensors[tensor.id] = tensor
    return Graph(
        name=document["name"],
        tensors=tensors,
        ops=tuple(_op_from_json(entry, rules, f"ops[{i}]") for i, entry in enumerate(document["ops"])),
        outputs=tuple(document["outputs"]),
        gradients=tuple((first, second) for first, second in document["gradients"]),
        micro_batch_size=document["micro_batch_size"],
        is_backward_derived=document.get("is_backward_derived", False),
        why_backward_kept=document.get("why_backward_kept", ""),
        runs_as=document.get("runs_as", {}),
        saved=tuple(document.get("saved", ())),
        mixes_samples=document.get("mixes_samples", ""),
        averages_samples=document.get("averages_samples", False),
        notes=tuple(document["notes"]),
    )


def _tensor_to_json(tensor: Tensor) -> dict[str, object]:
    entry: dict[str, object] = {"id": tensor.id, "shape": list(tensor.shape), "dtype": tensor.dtype.value}
    entry |= {} if tensor.role is None else {"role": tensor.role.value}
    return entry | ({"is_frozen": True} if tensor.is_frozen else {})


def _tensor_from_json(entry: Mapping[str, Any]) -> Tensor:
    role = Role(entry["role"]) if "role" in entry else None
    return Tensor(entry["id"], tuple(entry["shape"]), DType(entry["dtype"]), role, entry.get("is_frozen", False))


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


def _op_from_json(entry: Mapping[str, Any], rules: list[Rule], where: str) -> Op:
    if not 0 <= entry["rule"] < len(rules):
        raise FormatError(f"{where}.rule is {entry['rule']}, but there are {len(rules)} rules.")
    return Op(
        id=entry["id"],
        kind=OpKind(entry["kind"]),
        function=entry["function"],
        rule=rules[entry["rule"]],
        inputs=tuple(entry["inputs"]),
        outputs=tuple(entry["outputs"]),
        phase=Phase(entry["phase"]),
        attributes=tuple((name, _attribute(value)) for name, value in entry.get("attributes", {}).items()),
        collective_bytes=entry.get("collective_bytes", 0),
        **{name: entry[name] for name in _OPTIONAL if name in entry},
    )


def _attribute(value: Any) -> Attribute:
    """The value of an attribute: lists as tuples, infinities and NaN from the object that stands for them."""
    if isinstance(value, list):
        return tuple(value)
    return float(value["float"]) if isinstance(value, dict) else value


def _parse_rule(text: str, index: int) -> Rule:
    try:
        return Rule.parse(text)
    except GraphError as error:
        raise GraphError(f"rules[{index}]: {error}") from error
