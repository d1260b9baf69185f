"""The one place where the core loads the installed plugins, for public functions whose caller passes none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["installed_plugins"]


def installed_plugins() -> PluginManager:
    """A manager with every installed plugin. It takes milliseconds and is passed on rather than loaded again."""
    # Imported here because the hooks' specifications name types of the core.
    from phaze.hooks import PluginManager

    return PluginManager.load()
