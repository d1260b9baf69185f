"""Tell which form a module is written in by its first bytes and name, and which file of a dump folder to take.

Folders are those that XLA (`xla_dump_to`) or JAX (`JAX_DUMP_IR_TO`) wrote. Modules before optimizations are what the
model says; those of JAX are as good; those after optimizations are what a compiler made of it. Of the best kind that is
there, the module with the most flops in products is the model: the others are helper functions. A folder that torch_xla
saved has its modules in `functions/`. Files may be gzipped.
"""

from __future__ import annotations

import mmap
import os
import re
import zlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

__all__ = ["HEAD_BYTES", "Dump", "Form", "exported_module", "find_dumps", "find_form", "read_head"]

HEAD_BYTES = 65536
"""How much of a file is read to tell its form: past any leading comments, and quick for a file of gigabytes."""

SHORTEST_PROTO_BYTES = 16
"""Bytes that are fewer hold no module, whatever they begin with."""


class Form(StrEnum):
    """How a module is written."""

    STABLEHLO_TEXT = "StableHLO text"
    STABLEHLO_BYTECODE = "StableHLO bytecode"
    HLO_TEXT = "HLO text"
    HLO_PROTO = "HLO proto"
    JAX_EXPORT = "jax.export artifact"


_BYTECODE_MAGIC = b"ML\xefR"
_PORTABLE_MAGIC = re.compile(re.escape(_BYTECODE_MAGIC) + rb"[\x00-\x7f]StableHLO_v")
"""How the module inside an artifact of jax.export begins, somewhere behind the artifact's own table: with MLIR's magic
number, a version in one byte, and the name of what wrote it."""

_GZIP_MAGIC = b"\x1f\x8b"
_PROTO_FIRST_FIELD = b"\x0a"
_FORM_BY_SUFFIX = {
    ".mlir": Form.STABLEHLO_TEXT,
    ".stablehlo": Form.STABLEHLO_TEXT,
    ".mlirbc": Form.STABLEHLO_BYTECODE,
    ".bytecode": Form.STABLEHLO_BYTECODE,
    ".hlo": Form.HLO_TEXT,
    ".pb": Form.HLO_PROTO,
}
_HLO_TEXT = re.compile(r"^\s*HloModule\b|^ENTRY\b", re.MULTILINE)
_STABLEHLO_TEXT = re.compile(r"^(module\b|#loc|func\.func\b|\s*%\w+ = (\"?stablehlo|\"?mhlo)\.)", re.MULTILINE)

_DUMP_NAMES_BEST_FIRST = (
    re.compile(r"before_optimizations?\.(txt|hlo)(\.gz)?$"),
    re.compile(r"before_optimizations?\.hlo\.pb(\.gz)?$"),
    re.compile(r"\.(mlir|mlirbc|bytecode|stablehlo)(\.gz)?$"),
    re.compile(r"after_optimizations?\.(txt|hlo)(\.gz)?$"),
    re.compile(r"after_optimizations?\.hlo\.pb(\.gz)?$"),
    re.compile(r"\.hlo(\.pb|\.txt)?(\.gz)?$"),
)


def find_form(data: bytes, name: str = "") -> Form | None:
    """The form of a file that begins so and has this name; None where it looks like no module at all."""
    if data.startswith(_BYTECODE_MAGIC):
        return Form.STABLEHLO_BYTECODE
    # A head that is cut may end within a character, a whole file may not.
    try:
        text = data[:HEAD_BYTES].decode("utf-8", errors="strict" if len(data) < HEAD_BYTES else "ignore")
    except UnicodeDecodeError:
        text = None
    if text is not None and _HLO_TEXT.search(text):
        return Form.HLO_TEXT
    if text is not None and _STABLEHLO_TEXT.search(text):
        return Form.STABLEHLO_TEXT
    if _PORTABLE_MAGIC.search(data):
        return Form.JAX_EXPORT
    by_suffix = _FORM_BY_SUFFIX.get(os.path.splitext(name.removesuffix(".gz"))[1])
    if by_suffix is not None:
        return by_suffix
    return Form.HLO_PROTO if _looks_like_proto(data) else None


def exported_module(data: bytes) -> bytes:
    """The StableHLO bytecode in an artifact of jax.export, which is written behind its length, in four bytes."""
    found = _PORTABLE_MAGIC.search(data)
    assert found is not None  # find_form saw it
    start = found.start()
    return data[start : start + int.from_bytes(data[start - 4 : start], "little")]


def _looks_like_proto(data: bytes) -> bool:
    """An HLO proto begins with its module or its module's name, and names its entry computation in clear."""
    return (
        data.startswith(_PROTO_FIRST_FIELD) and len(data) > SHORTEST_PROTO_BYTES and b"\x00" in data and b"main" in data
    )


def read_head(path: str | os.PathLike[str]) -> bytes | None:
    """The first bytes of a file, unpacked where it is gzipped; None where there is none.

    Of an artifact of jax.export the start of the module in it follows, which may stand far behind.
    """
    try:
        if not Path(path).is_file():
            return None
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
            if head.startswith(_GZIP_MAGIC):
                return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(head, HEAD_BYTES)
            if len(head) == HEAD_BYTES and b"\x00" in head:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                    found = _PORTABLE_MAGIC.search(mapped)
                    head += found[0] if found is not None else b""
            return head
    except (OSError, ValueError, zlib.error):
        return None


@dataclass(frozen=True, slots=True)
class Dump:
    """A file of a dump folder that holds a module."""

    path: Path
    size_bytes: int


def find_dumps(folder: str | os.PathLike[str]) -> list[Dump]:
    """The dumps of the best kind in a folder, the largest first; none where it is no folder or holds none."""
    try:
        inner = Path(folder, "functions")
        files = [entry for entry in os.scandir(inner if inner.is_dir() else folder) if entry.is_file()]
    except (OSError, ValueError):
        return []
    for pattern in _DUMP_NAMES_BEST_FIRST:
        dumps = [Dump(Path(entry.path), entry.stat().st_size) for entry in files if pattern.search(entry.name)]
        if dumps:
            return sorted(dumps, key=lambda dump: (-dump.size_bytes, dump.path.name))
    return []
