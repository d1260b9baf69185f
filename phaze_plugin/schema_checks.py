"""Documents checked against JSON Schemas before anything of them is used; a FormatError names the field that is wrong.

Of JSON Schema 2020-12 it knows what the published schemas use: type, const, enum, properties, required,
additionalProperties, items, minItems, maxItems, anyOf, minimum, exclusiveMinimum and $ref to $defs. As in JSON, true is
no number; as in every document of ours, numbers are finite. A schema is turned into functions once, so that a graph of
a hundred thousand ops is checked in about a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phaze.errors import FormatError, shown

__all__ = ["SchemaCheck"]

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
