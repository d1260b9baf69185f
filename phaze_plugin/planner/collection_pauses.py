"""Python's cyclic garbage collector while a plan is searched for: it looks less often at what is all still needed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["rare_collections"]

_OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""So many new objects are waited for before the collector looks: some ten megabytes, and few enough looks that they
take a hundredth of a search. Python's own 700 make it look at all graphs and tables over and over, a tenth of a long
search on many layers."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the collector look less often; as often as before in the end. One that was told to look rarer stays so."""
    before = gc.get_threshold()
    if not 0 < before[0] < _OBJECTS_BETWEEN_COLLECTIONS:
        yield
        return
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
