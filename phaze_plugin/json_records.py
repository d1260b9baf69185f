"""Frozen dataclasses as JSON documents: every field under its own name, read back by its type, nothing guessed.

Types that a field may have: bool, int, float, str, unions of these with None, tuples of one type, mappings from str,
enums of str, dataclasses of such fields, and object for any JSON. `from_document` checks a document against the schema
of its class first; `record_of` takes one that was checked. A whole number is read where a float is expected, and
nothing else is converted.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin

from phaze.errors import FormatError
from phaze.json_schemas import is_saved, record_hints, record_schema
from phaze.schema_checks import SchemaCheck

__all__ = ["from_document", "record_of", "to_document"]

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
