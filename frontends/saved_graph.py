"""The frontend for graphs that need no import: a Graph itself, or the file that `Graph.save` wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from phaze.errors import ImportModelError
from phaze.hooks import hookimpl
from phaze.interfaces import Frontend
from phaze.ir import Graph
from phaze.ir.graph_json import FORMAT, read_graph

__all__ = ["SavedGraphFrontend", "phaze_frontends"]

HEAD_BYTES = 256
"""How much of a file is read to see what it is: the format's name is among its first fields."""


@dataclass(frozen=True, slots=True)
class SavedGraphFrontend:
    """Takes graphs as they are."""

    name: str = "saved-graph"
    libraries: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def accepts(self, model: object) -> bool:
        """Whether this is a Graph or a file that says it holds one."""
        if isinstance(model, Graph):
            return True
        if not isinstance(model, str | os.PathLike) or not os.path.isfile(model):
            return False
        with open(model, "rb") as file:
            return FORMAT.encode() in file.read(HEAD_BYTES)

    def import_model(self, model: object, inputs: object, options: Mapping[str, object]) -> Graph:
        """The graph; raises FormatError where the file is damaged."""
        if isinstance(model, Graph):
            return model
        if not isinstance(model, str | os.PathLike):
            raise ImportModelError(f"{type(model).__name__} is neither a Graph nor the path of a saved one.")
        return read_graph(model)


@hookimpl
def phaze_frontends() -> tuple[Frontend, ...]:
    """This file's one frontend."""
    return (SavedGraphFrontend(),)
