"""Accelerators known by name: the presets, and those that plugins add."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phaze.hardware.accelerator import Accelerator

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["known_accelerator"]


def known_accelerator(name: str, manager: PluginManager | None = None) -> Accelerator:
    """The accelerator called ``name``, as ``manager`` (by default a new one) knows it.

    A name that nobody knows is an `UnknownNameError` that lists near ones; one that plugins clash over a `PluginError`.
    """
    from phaze.hooks import PluginManager

    return (manager or PluginManager.load()).accelerators().get(name)
