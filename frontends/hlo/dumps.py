"""The forms in which modules are written, and how to tell them apart by their first bytes and their file's name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

__all__ = ["HEAD_BYTES", "Dump", "Form", "find_dumps", "find_form", "read_head"]

HEAD_BYTES = 65536


class Form(StrEnum):
    """How a module is written."""

    STABLEHLO_TEXT = "StableHLO text"
    STABLEHLO_BYTECODE = "StableHLO bytecode"
    HLO_TEXT = "HLO text"
    HLO_PROTO = "HLO proto"


_MAGIC = b"ML\xefR"
_BY_SUFFIX = {
    ".mlir": Form.STABLEHLO_TEXT,
    ".stablehlo": Form.STABLEHLO_TEXT,
    ".mlirbc": Form.STABLEHLO_BYTECODE,
    ".hlo": Form.HLO_TEXT,
    ".pb": Form.HLO_PROTO,
}
_HLO = re.compile(r"^HloModule\b", re.MULTILINE)
_MLIR = re.compile(r"^(module\b|#loc|func\.func\b|\s*%\w+ = (\"?stablehlo|\"?mhlo)\.)", re.MULTILINE)
_FIRST_FIELD = 0x0A


def find_form(data: bytes, name: str = "") -> Form | None:
    """The form of what begins so; None where it looks like no module at all."""
    if data.startswith(_MAGIC):
        return Form.STABLEHLO_BYTECODE
    try:
        text = data[:HEAD_BYTES].decode("utf-8", errors="strict" if len(data) < HEAD_BYTES else "ignore")
    except UnicodeDecodeError:
        text = None
    if text is not None and _HLO.search(text):
        return Form.HLO_TEXT
    if text is not None and _MLIR.search(text):
        return Form.STABLEHLO_TEXT
    by_name = _BY_SUFFIX.get(os.path.splitext(name)[1])
    if by_name is not None:
        return by_name
    return Form.HLO_PROTO if _looks_like_proto(data) else None


def _looks_like_proto(data: bytes) -> bool:
    """An HLO proto begins with its module or its module's name, and names its entry computation in clear."""
    return data[:1] == bytes([_FIRST_FIELD]) and len(data) > 16 and b"\x00" in data and b"main" in data


def read_head(path: str | os.PathLike[str]) -> bytes | None:
    """The first bytes of a file; None where there is none."""
    try:
        if not Path(path).is_file():
            return None
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES)
    except (OSError, ValueError):
        return None


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
