"""Tables that are shipped inside the package, read once.

They cannot change while a program runs and are handed out deeply frozen, so that keeping them is not visible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

__all__ = ["packaged_table"]


@cache
def packaged_table(name: str) -> Mapping[str, Any]:
    """The table ``data/NAME.json``."""
    text = resources.files("phaze.hardware.data").joinpath(f"{name}.json").read_text(encoding="utf-8")
    table: Mapping[str, Any] = _frozen(json.loads(text))
    return table


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return MappingProxyType({key: _frozen(item) for key, item in value.items()})
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
