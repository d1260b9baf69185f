"""Where the core loads the installed plugins, and which libraries are there, found out without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["installed_plugins", "installed_version", "missing_libraries"]


def installed_plugins() -> PluginManager:
    """A manager with every installed plugin. It takes milliseconds and is passed on rather than loaded again."""
    # Imported here because the hooks' specifications name types of the core.
    from phaze.hooks import PluginManager

    return PluginManager.load()


def missing_libraries(modules: Iterable[str]) -> tuple[str, ...]:
    """Those of the modules whose library cannot be imported here."""
    return tuple(name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is None)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
