"""The graphs that `torch.compile(model, backend="phaze")` captured: what the backend saw, for whoever asks."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phaze.ir import Graph

__all__ = ["last_compiled", "remember_compiled"]

MOST_REMEMBERED = 64

_COMPILED: deque[Graph] = deque(maxlen=MOST_REMEMBERED)
"""The compiler calls the backend from inside itself: what it captured can reach nobody but through this record."""


def last_compiled() -> tuple[Graph, ...]:
    """The graphs that were captured last in this process, oldest first, at most 64; a model may be several graphs.

    A graph's notes say which backend runs it.
    """
    return tuple(_COMPILED)


def remember_compiled(graph: Graph) -> None:
    """Keep a graph for `last_compiled`."""
    _COMPILED.append(graph)
