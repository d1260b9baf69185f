"""Folders that XLA (`xla_dump_to`) or JAX (`JAX_DUMP_IR_TO`) wrote: which file to take.

Modules before optimizations are what the model says; those of JAX are as good; those after optimizations are what a
compiler made of it. Of the best kind that is there, the largest file is the model: small ones are helpers.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Dump", "find_dumps"]

_KINDS = (
    re.compile(r"before_optimizations\.(txt|hlo)$"),
    re.compile(r"before_optimizations\.hlo\.pb$"),
    re.compile(r"\.(mlir|mlirbc|stablehlo)$"),
    re.compile(r"after_optimizations\.(txt|hlo)$"),
    re.compile(r"after_optimizations\.hlo\.pb$"),
    re.compile(r"\.hlo(\.pb)?$"),
)


@dataclass(frozen=True, slots=True)
class Dump:
    """A file with a module."""

    path: Path
    size: int


def find_dumps(folder: str | os.PathLike[str]) -> list[Dump]:
    """The dumps of the best kind in a folder, the largest first; none where it is no folder or holds none."""
    try:
        files = [entry for entry in os.scandir(folder) if entry.is_file()]
    except (OSError, ValueError):
        return []
    for kind in _KINDS:
        found = [Dump(Path(entry.path), entry.stat().st_size) for entry in files if kind.search(entry.name)]
        if found:
            return sorted(found, key=lambda dump: (-dump.size, dump.path.name))
    return []
