"""How often the garbage collector looks in tests and in programs that they start.

A process that has imported torch, JAX and transformers holds millions of objects, almost all of them for good; looking
through them as often as Python does by itself is a twentieth of all processor time.
"""

import gc

__all__ = ["collect_rarely", "keep_what_is_there"]

OBJECTS = 20_000
"""Objects that may be made between two looks; Python's own 700 is for programs that hold little."""
GENERATIONS = 20
"""Looks at the young before one at the older: graphs in cycles, of some MB each, are found after seconds."""


def collect_rarely() -> None:
    gc.set_threshold(OBJECTS, GENERATIONS, GENERATIONS)


def keep_what_is_there() -> None:
    """Never look at what has been imported again; processes that are forked then share its pages."""
    gc.collect()
    gc.freeze()
