"""Frozen dataclasses as JSON documents: every field under its own name, read back by its type, nothing guessed.

Types that a field may have: bool, int, float, str, unions of these with None, tuples of one type, mappings from str,
enums of str, dataclasses of such fields, and object for any JSON. A whole number is read where a float is expected, and
nothing else is converted.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from phaze.errors import FormatError, shown

__all__ = ["from_document", "record_hints", "to_document"]

_Record = TypeVar("_Record")


def to_document(value: object) -> Any:
    """The value as JSON knows it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_document(getattr(value, field.name)) for field in fields(value) if _is_saved(field)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_document(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_document(item) for item in value]
    return value


def from_document(kind: type[_Record], document: object, where: str) -> _Record:
    """The record that a document describes; raises FormatError naming the field that is missing, unknown or wrong."""
    if not isinstance(document, dict):
        raise FormatError(f"{where} is {shown(document)}; expected an object.")
    hints = record_hints(kind)  # type: ignore[arg-type]
    if missing := [name for name in hints if name not in document]:
        raise FormatError(f"{where} lacks {missing[0]!r}; the file is damaged or of another version.")
    if unknown := [name for name in document if name not in hints]:
        raise FormatError(f"{where} has an unknown field {unknown[0]!r}; the file is damaged or of another version.")
    values = {name: _read(hint, document[name], f"{where}.{name}") for name, hint in hints.items()}
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        raise FormatError(f"{where}: {error}") from error


@cache
def record_hints(kind: type) -> dict[str, Any]:
    """The fields of a dataclass that are saved, with their types."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if _is_saved(field)}


def _is_saved(field: Field[Any]) -> bool:
    """Whether a field belongs to the document; one with ``metadata={"is_saved": False}`` lives in memory only."""
    return bool(field.metadata.get("is_saved", True))


def _read(hint: Any, value: object, where: str) -> Any:
    if hint is object:
        return value
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        allowed = [kind for kind in arguments if kind is not type(None)]
        # A union of plain types, such as int | str, takes the type that the value has.
        return _read(type(value) if type(value) in allowed else allowed[0], value, where)
    if origin is tuple:
        items = _typed(list, value, where)
        return tuple(_read(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(items))
    if origin is not None:
        items = _typed(dict, value, where)
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in items.items()}
    if is_dataclass(hint):
        return from_document(hint, value, where)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        if value not in list(hint):
            raise FormatError(f"{where} is {shown(value)}; expected one of {', '.join(hint)}.")
        return hint(str(value))
    return _number(value, where) if hint is float else _typed(hint, value, where)


def _typed(kind: type, value: object, where: str) -> Any:
    if type(value) is not kind:
        raise FormatError(f"{where} is {shown(value)}; expected {kind.__name__}.")
    return value


def _number(value: object, where: str) -> float:
    try:
        number = float(value) if type(value) in (int, float) else math.nan  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise FormatError(f"{where} is {shown(value)}; expected a finite number.")
    return number
