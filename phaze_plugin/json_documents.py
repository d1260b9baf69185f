"""JSON documents of our own: checked against JSON Schemas, made of dataclasses and read back, sealed with digests.

Checks (`SchemaCheck`). A document is checked before anything of it is used; a FormatError names the field that is
wrong. Of JSON Schema 2020-12 the check knows what the published schemas use: type, const, enum, properties, required,
additionalProperties, items, minItems, maxItems, anyOf, minimum, exclusiveMinimum and $ref to $defs. As in JSON, true is
no number; as in every document of ours, numbers are finite. A schema is turned into functions once, so that a graph of
a hundred thousand ops is checked in about a second.

Schemas (`document_schema`, `record_schema`). They are made from the dataclasses that read the documents: one truth,
published as files. `phaze schema plan` prints the same schema for other programs.

Records (`to_document`, `from_document`, `record_of`). A frozen dataclass is a document with every field under its own
name, read back by its type. Types that a field may have: bool, int, float, str, unions of these with None, tuples of
one type, mappings from str, enums of str, dataclasses of such fields, and object for any JSON. `from_document` checks a
document against the schema of its class first; `record_of` takes one that was checked. A whole number is read where a
float is expected, and nothing else is converted.

Digests (`with_digest`, `without_digest`). A document says the digest of everything else in it. A file that does not
agree with its own digest was damaged or edited on the way; one that agrees with it and is wrong was made wrong, which
`phaze verify` finds. A digest is no signature: whoever edits a file on purpose can write a new one.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from phaze.errors import FormatError, shown

__all__ = [
    "DIGEST",
    "DRAFT",
    "SchemaCheck",
    "digest_of",
    "document_schema",
    "from_document",
    "is_saved",
    "record_hints",
    "record_of",
    "record_schema",
    "schema_of",
    "to_document",
    "with_digest",
    "without_digest",
]

_Check = Callable[[Any], None]

_TYPES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "object": (lambda value: type(value) is dict, "an object"),
    "array": (lambda value: type(value) is list, "a list"),
    "string": (lambda value: type(value) is str, "text"),
    "integer": (lambda value: type(value) is int, "a whole number"),
    "number": (lambda value: _is_finite(value), "a finite number"),
    "boolean": (lambda value: type(value) is bool, "true or false"),
    "null": (lambda value: value is None, "null"),
}

_DAMAGED = "the file is damaged or of another version."
_ABOUT = frozenset({"$schema", "$defs", "title", "description"})
_KNOWN = _ABOUT | {"$ref", "type", "const", "enum", "anyOf", "properties", "required", "additionalProperties"}
_KNOWN |= {"items", "minItems", "maxItems", "minimum", "exclusiveMinimum"}


def _is_finite(value: object) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        return False


class _RefusedError(Exception):
    """Why a document is refused; `path` is where, the innermost field first.

    `has_type` says whether the document is at least of the type that was expected.
    """

    def __init__(self, why: str, *, has_type: bool = True) -> None:
        super().__init__(why)
        self.path: list[str] = []
        self.has_type = has_type


class SchemaCheck:
    """A schema as a function of documents. Raises ValueError for a keyword that it does not know."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._definitions: Mapping[str, Mapping[str, Any]] = schema.get("$defs", {})
        self._defined: dict[str, _Check] = {}
        self._check = self._made(schema)

    def __call__(self, document: object, where: str) -> None:
        """Raise FormatError where a document is not what the schema says; `where` begins the names of fields."""
        try:
            self._check(document)
        except _RefusedError as refused:
            raise FormatError(f"{where}{''.join(reversed(refused.path))} {refused}") from None

    def _made(self, schema: Mapping[str, Any]) -> _Check:
        """One function for all keywords of a schema."""
        if unknown := sorted(schema.keys() - _KNOWN):
            raise ValueError(f"the schema has {unknown[0]!r}, which is not checked; expected some of {sorted(_KNOWN)}.")
        checks: list[_Check] = []
        if "$ref" in schema:
            checks.append(self._referred(schema["$ref"].removeprefix("#/$defs/")))
        if "const" in schema:
            checks.append(_constant(schema["const"]))
        if "enum" in schema:
            checks.append(_listed(schema["enum"]))
        if "type" in schema:
            checks.append(_typed(schema["type"]))
        if "anyOf" in schema:
            checks.append(self._any_of(schema["anyOf"]))
        if "properties" in schema or "additionalProperties" in schema:
            checks.append(self._fields(schema))
        if "items" in schema or "minItems" in schema or "maxItems" in schema:
            checks.append(self._items(schema))
        if "minimum" in schema or "exclusiveMinimum" in schema:
            checks.append(_at_least(schema))
        return checks[0] if len(checks) == 1 else _all_of(checks)

    def _referred(self, name: str) -> _Check:
        """The check of a definition, made when it is needed first: definitions may refer to each other."""

        def check(value: Any) -> None:
            if name not in self._defined:
                self._defined[name] = self._made(self._definitions[name])
            self._defined[name](value)

        return check

    def _any_of(self, schemas: Sequence[Mapping[str, Any]]) -> _Check:
        checks = [self._made(schema) for schema in schemas]
        # Where nothing fits, the alternative of the value's type that fits furthest inwards tells why (the first of
        # several), else the first that is not null.
        told = next(index for index, schema in enumerate(schemas) if schema.get("type") != "null")

        def check(value: Any) -> None:
            refusals = []
            for each in checks:
                try:
                    each(value)
                    return
                except _RefusedError as refused:
                    refusals.append(refused)
            of_type = [refused for refused in refusals if refused.has_type or refused.path]
            raise max(of_type, key=lambda refused: len(refused.path)) if of_type else refusals[told]

        return check

    def _fields(self, schema: Mapping[str, Any]) -> _Check:
        known = {name: self._made(each) for name, each in schema.get("properties", {}).items()}
        required, others = schema.get("required", ()), schema.get("additionalProperties", True)
        other = self._made(others) if isinstance(others, Mapping) else None

        def check(value: Any) -> None:
            if others is False and (unknown := [name for name in value if name not in known]):
                raise _RefusedError(
                    f"has an unknown field {shown(unknown[0])}; the file is damaged or of another version."
                )
            for name in required:
                if name not in value:
                    raise _RefusedError(f"lacks {name!r}; {_DAMAGED}")
            for name, item in value.items():
                each = known.get(name, other)
                if each is None:
                    continue
                try:
                    each(item)
                except _RefusedError as refused:
                    refused.path.append(f".{name}")
                    raise

        return check

    def _items(self, schema: Mapping[str, Any]) -> _Check:
        each = self._made(schema.get("items", {}))
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)

        def check(value: Any) -> None:
            if not least <= len(value) <= most:
                count = f"{least}" if least == most else f"at least {least}" if most == math.inf else f"at most {most}"
                raise _RefusedError(f"has {len(value)} items; expected {count}.")
            index = 0
            try:
                for item in value:
                    each(item)
                    index += 1
            except _RefusedError as refused:
                refused.path.append(f"[{index}]")
                raise

        return check


def _all_of(checks: Sequence[_Check]) -> _Check:
    def check(value: Any) -> None:
        for each in checks:
            each(value)

    return check


def _typed(name: str) -> _Check:
    is_of_type, words = _TYPES[name]

    def check(value: Any) -> None:
        if not is_of_type(value):
            raise _RefusedError(f"is {shown(value)}; expected {words}.", has_type=False)

    return check


def _constant(expected: object) -> _Check:
    def check(value: Any) -> None:
        if type(value) is not type(expected) or value != expected:
            raise _RefusedError(f"is {shown(value)}; expected {expected!r}.")

    return check


def _listed(members: Sequence[str]) -> _Check:
    known = frozenset(members)

    def check(value: Any) -> None:
        if type(value) is not str or value not in known:
            raise _RefusedError(f"is {shown(value)}; expected one of {', '.join(members)}.")

    return check


def _at_least(schema: Mapping[str, Any]) -> _Check:
    least, above = schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf)
    words = f"at least {least}" if "minimum" in schema else f"more than {above}"

    def check(value: Any) -> None:
        if value < least or value <= above:
            raise _RefusedError(f"is {shown(value)}; expected {words}.")

    return check


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
    body = _record_schema(kind, definitions)
    properties = {**{name: _constant_schema(value) for name, value in envelope.items()}, **body["properties"]}
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
    return {**_record_schema(kind, definitions), "$defs": definitions}


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
        definitions[hint.__name__] = _record_schema(hint, definitions)
    return {"$ref": f"#/$defs/{hint.__name__}"}


def _record_schema(kind: type, definitions: dict[str, dict[str, object]]) -> dict[str, Any]:
    properties = {name: schema_of(hint, definitions) for name, hint in record_hints(kind).items()}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _constant_schema(value: object) -> dict[str, object]:
    """A field that has one value, or is of a type (given as one)."""
    return _PLAIN[value] if isinstance(value, type) else {"const": value}


_Record = TypeVar("_Record")


def to_document(value: object) -> Any:
    """The value as JSON knows it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_document(getattr(value, field.name)) for field in fields(value) if is_saved(field)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_document(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_document(item) for item in value]
    return value


def from_document(kind: type[_Record], document: object, where: str) -> _Record:
    """The record that a document describes; raises FormatError naming the field that is missing, unknown or wrong."""
    _check_of(kind)(document, where)  # type: ignore[arg-type]
    return record_of(kind, document, where)


@cache
def _check_of(kind: type) -> SchemaCheck:
    return SchemaCheck(record_schema(kind))


def record_of(kind: type[_Record], document: Any, where: str) -> _Record:
    """The record of a document that is what its schema says; raises FormatError for values that the class refuses."""
    hints = record_hints(kind)  # type: ignore[arg-type]
    values = {name: _read(hint, document[name], f"{where}.{name}") for name, hint in hints.items()}
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        raise FormatError(f"{where}: {error}") from error


def _read(hint: Any, value: Any, where: str) -> Any:
    """A value of a checked document as its field's type has it."""
    if hint is object or value is None:
        return value
    if hint is float:
        return float(value)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        allowed = [kind for kind in arguments if kind is not type(None)]
        # A union of plain types, such as int | str, takes the type that the value has.
        return _read(type(value) if type(value) in allowed else allowed[0], value, where)
    if origin is tuple:
        return tuple(_read(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is not None:
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(hint):
        return record_of(hint, value, where)  # type: ignore[arg-type]
    return hint(value) if isinstance(hint, type) and issubclass(hint, StrEnum) else value


DIGEST = "digest"
"""The field of a document that holds its digest."""


def digest_of(document: Mapping[str, object], after: str = "") -> str:
    """The digest of a document without its digest; with `after`, that of a document behind another one."""
    body = {name: value for name, value in document.items() if name != DIGEST}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{after}{text}".encode()).hexdigest()


def with_digest(document: Mapping[str, object]) -> dict[str, object]:
    """The document with its digest."""
    return {**document, DIGEST: digest_of(document)}


def without_digest(document: Mapping[str, object], where: str) -> dict[str, object]:
    """The document without its digest; raises FormatError where they do not agree."""
    said, found = document.get(DIGEST), digest_of(document)
    if said != found:
        raise FormatError(
            f"{where} is damaged or was edited: it says the digest {shown(said)}, and its content has {found[:16]}... "
            "Get the file again from where it was made, or make it again."
        )
    return {name: value for name, value in document.items() if name != DIGEST}
