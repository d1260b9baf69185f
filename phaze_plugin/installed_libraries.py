"""Which libraries are here, found out without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable

__all__ = ["installed_version", "missing_libraries"]


def missing_libraries(modules: Iterable[str]) -> tuple[str, ...]:
    """Those of the modules whose library cannot be imported here."""
    return tuple(name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is None)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
