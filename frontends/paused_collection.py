"""Importing a model without stopping again and again for Python's search for cycles of garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused_collection"]


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Switch the cyclic collector off for the context, and on again where it was on.

    An import makes several 100,000 objects that live until it ends. The collector walks all of them each time that
    their number has grown by a quarter, which takes a fifth to a quarter of the import, and finds next to nothing.
    What is freed by reference counts is freed as always.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
