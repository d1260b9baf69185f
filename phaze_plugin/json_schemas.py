"""The JSON Schemas of our own documents, made from the dataclasses that read them: one truth, published as files.

Whoever reads a document checks it against its schema first (`phaze.schema_checks`), and `phaze schema plan` prints the
same schema for other programs.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

__all__ = ["DRAFT", "document_schema", "is_saved", "record_hints", "record_schema", "schema_of"]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
"""The version of JSON Schema that the schemas are written in."""

_PLAIN: Mapping[object, dict[str, object]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
    object: {},
}


def document_schema(title: str, kind: type, envelope: Mapping[str, object]) -> dict[str, object]:
    """The schema of a saved document: the fields of a dataclass, and constants beside them; all are required."""
    definitions: dict[str, dict[str, object]] = {}
    body = _record(kind, definitions)
    properties = {**{name: _constant(value) for name, value in envelope.items()}, **body["properties"]}
    return {
        "$schema": DRAFT,
        "title": title,
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        "$defs": dict(sorted(definitions.items())),
    }


@cache
def record_schema(kind: type) -> dict[str, object]:
    """The schema of a dataclass that stands alone."""
    definitions: dict[str, dict[str, object]] = {}
    return {**_record(kind, definitions), "$defs": definitions}


@cache
def record_hints(kind: type) -> dict[str, Any]:
    """The fields of a dataclass that are saved, with their types."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if is_saved(field)}


def is_saved(field: Field[Any]) -> bool:
    """Whether a field belongs to the document; one with ``metadata={"is_saved": False}`` lives in memory only."""
    return bool(field.metadata.get("is_saved", True))


def schema_of(hint: Any, definitions: dict[str, dict[str, object]]) -> dict[str, object]:
    """The schema of a field's type; dataclasses are defined once, under their names."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(argument, definitions) for argument in arguments]}
    if origin is tuple:
        return {"type": "array", "items": schema_of(arguments[0], definitions)}
    if origin is not None:
        return {"type": "object", "additionalProperties": schema_of(arguments[1], definitions)}
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return {"enum": [member.value for member in hint]}
    assert is_dataclass(hint), hint
    assert isinstance(hint, type)
    if hint.__name__ not in definitions:
        definitions[hint.__name__] = {}  # a type that holds itself refers to what is being made
        definitions[hint.__name__] = _record(hint, definitions)
    return {"$ref": f"#/$defs/{hint.__name__}"}


def _record(kind: type, definitions: dict[str, dict[str, object]]) -> dict[str, Any]:
    properties = {name: schema_of(hint, definitions) for name, hint in record_hints(kind).items()}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _constant(value: object) -> dict[str, object]:
    """A field that has one value, or is of a type (given as one)."""
    return _PLAIN[value] if isinstance(value, type) else {"const": value}
