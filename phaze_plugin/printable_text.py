"""Foreign text as a terminal may show it: control and bidirectional characters are written out, not obeyed.

A model's name, a layer's path or a note may hold escape sequences that clear a screen or type for the user, or marks
that show text in another order than it is read. What Python does not call printable is shown as an escape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, TypeVar

__all__ = ["printable", "with_printable_text"]

_Value = TypeVar("_Value")


def printable(text: str, *, keeps_lines: bool = False) -> str:
    """The text with everything that is not printable as escapes; line ends stay where lines are our own."""
    if text.isprintable():
        return text
    if keeps_lines:
        return "\n".join(printable(line) for line in text.split("\n"))
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def with_printable_text(value: _Value) -> _Value:
    """A value with all text in it printable, in one line each; the value itself where nothing needs to change."""
    changed: Any = value
    if isinstance(value, Enum):
        return value
    if isinstance(value, str):
        changed = printable(value)
    elif is_dataclass(value) and not isinstance(value, type):
        shown = {
            field.name: new
            for field in fields(value)
            if field.init
            and field.compare
            and (new := with_printable_text(old := getattr(value, field.name))) is not old
        }
        changed = replace(value, **shown) if shown else value
    elif isinstance(value, Mapping):
        entries = {with_printable_text(key): with_printable_text(item) for key, item in value.items()}
        is_same = all(key in entries and entries[key] is item for key, item in value.items())
        changed = value if is_same else entries
    elif isinstance(value, tuple | list):
        items = [with_printable_text(item) for item in value]
        is_same = all(new is old for new, old in zip(items, value, strict=True))
        changed = value if is_same else type(value)(items)
    return changed  # type: ignore[no-any-return]
