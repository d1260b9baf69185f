"""The frontend for HLO and StableHLO files: text, bytecode, protos, bytes, and folders that XLA or JAX dumped.

The door of the package: `importing.py` and what it needs are loaded when a first file is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from phaze.frontends.hlo.dumps import find_dumps, find_form, read_head
from phaze.hooks import hookimpl
from phaze.interfaces import Frontend
from phaze.ir import Graph

__all__ = ["HloFrontend", "phaze_frontends"]


@dataclass(frozen=True, slots=True)
class HloFrontend:
    """Takes StableHLO (text or bytecode) and HLO (text or proto), as a path, as bytes, or as a folder of dumps.

    Options: `parameters` and `batch` (indices or paths of arguments; inferred where gradients or updated parameters are
    among the results), `loss` (index or name of the result to train, where the module does not show it), `module` (the
    name of one of several), `entry` (a function other than main), `trips` (of loops that depend on data),
    `micro_batch_size` (other than the module's), `time_limit_s` (for parsing).
    """

    name: str = "hlo"
    libraries: tuple[str, ...] = ("jax",)
    options: tuple[str, ...] = (
        "parameters",
        "batch",
        "loss",
        "module",
        "entry",
        "trips",
        "micro_batch_size",
        "time_limit_s",
    )

    def accepts(self, model: object) -> bool:
        """Whether this is a file, a folder or bytes that look like a module."""
        if isinstance(model, bytes):
            return find_form(model) is not None
        if not isinstance(model, str | os.PathLike):
            return False
        head = read_head(model)
        return bool(find_dumps(model)) if head is None else find_form(head, os.fspath(model)) is not None

    def import_model(self, model: object, inputs: object, options: Mapping[str, object]) -> Graph:
        """The graph; raises FormatError where a file is damaged, ImportModelError where roles are ambiguous."""
        from phaze.frontends.hlo.importing import import_file

        return import_file(model, inputs, options)


@hookimpl
def phaze_frontends() -> tuple[Frontend, ...]:
    """The frontend for HLO files."""
    return (HloFrontend(),)
