"""Parse HLO files with jaxlib, in a process of its own: `python -m phaze.frontends.hlo.parser_process DESCRIPTOR`.

XLA's and MLIR's parsers can abort or hang on damaged input, so they run here and not in the user's process.
`parser_client.py` starts it with the descriptor of a connection. A request on it is two messages, the form and the
bytes; the answer is one, JSON with the documents of the modules in them or an error. The process ends when its
connection does, and takes no more memory than `MOST_BYTES`.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import jax.extend.mlir
from jax._src.interpreters.mlir import make_ir_context
from jaxlib import _hlo
from jaxlib.mlir import ir

from phaze.frontends.hlo.dumps import Form, exported_module
from phaze.frontends.hlo.foreign_text import (
    ForeignTextError,
    explained,
    split_hlo_modules,
    split_stablehlo_modules,
    upgraded,
)
from phaze.frontends.hlo.hlo_lowering import lower_module
from phaze.frontends.hlo.hlo_text import HloTextError, read_hlo_text
from phaze.frontends.hlo.parser_client import READY
from phaze.frontends.stablehlo.mlir_reader import read_module
from phaze.frontends.stablehlo.module import Document

__all__ = ["main", "unwrapped"]

MOST_BYTES = 24 * 2**30
"""The most address space, most of which jaxlib reserves without using it. Damaged sizes ask for far more."""

MOST_DATA_BYTES = 4 * 2**30
"""The most memory that it may write to: a module of a hundred MiB, as much as is read, takes about half of it."""

MOST_ERROR_LINES = 4
"""How many lines of a parser's complaint are passed on: it repeats itself after that."""

MOST_ERROR_CHARACTERS = 800
"""Where a parser's complaint is cut: it may quote the whole module."""

_PORTABLE_MARK = b"StableHLO_v"
"""What the head of a portable artifact holds: bytecode of a versioned dialect."""

_HEAD_BYTES = 64
"""How far the mark of a portable artifact may stand from the start."""

_VERSIONED_FUNCTION = "vhlo.func"
"""The functions of a portable artifact, read as it is."""

_HEAD_CHARACTERS = 4000
"""How far into the text of a module its first function is looked for."""

_FIRST_FIELD = b"\x0a"
"""The tag of a proto's first field, if it is a text or a message."""


def main(descriptor: int) -> None:
    """Answer requests until the connection ends."""
    connection = Connection(descriptor)
    for limit, most in ((resource.RLIMIT_AS, MOST_BYTES), (resource.RLIMIT_DATA, MOST_DATA_BYTES)):
        _, hard_limit = resource.getrlimit(limit)
        if hard_limit == resource.RLIM_INFINITY or hard_limit > most:
            resource.setrlimit(limit, (most, hard_limit))
    connection.send_bytes(READY)
    while True:
        try:
            form, data = Form(connection.recv_bytes().decode()), connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(form, data))


def _answer(form: Form, data: bytes) -> bytes:
    try:
        return json.dumps({"documents": _documents(form, data)}).encode()
    except Exception as error:  # whatever a parser says of foreign input is the answer
        return json.dumps({"error": _complaint(error)}).encode()


def _documents(form: Form, data: bytes) -> list[Document]:
    """The documents of the modules in a file, which is one but for text; raises what the parsers raise."""
    if form is Form.HLO_TEXT:
        return _all_readable(split_hlo_modules(data.decode()), lambda text: [lower_module(read_hlo_text(text))])
    if form is Form.HLO_PROTO:
        options = _hlo.HloPrintOptions()
        options.print_large_constants = False
        module = _hlo.HloModule.from_serialized_hlo_module_proto(unwrapped(data))
        return [lower_module(read_hlo_text(module.to_string(options)))]
    if form is Form.STABLEHLO_TEXT:
        return _all_readable(split_stablehlo_modules(data.decode()), _read_stablehlo)
    data = exported_module(data) if form is Form.JAX_EXPORT else data
    # A context keeps all that was parsed in it, so each module has its own.
    with make_ir_context():
        if _PORTABLE_MARK in data[:_HEAD_BYTES]:
            return [read_module(jax.extend.mlir.deserialize_portable_artifact(data))]
        module = ir.Module.parse(data)
        if _VERSIONED_FUNCTION in str(module)[:_HEAD_CHARACTERS]:
            module = jax.extend.mlir.deserialize_portable_artifact(data)  # older ones do not say so in their head
        return [read_module(module)]


def _all_readable(parts: Sequence[str], read: Callable[[str], list[Document]]) -> list[Document]:
    """The documents of all modules of a text that can be read; raises what is wrong with the first where none can.

    Where only some can be read, a note of each says how many others there are and what is wrong with the first of them.
    """
    documents: list[Document] = []
    unread: list[Exception] = []
    for part in parts:
        try:
            documents += read(part)
        except Exception as error:  # whatever a parser says of foreign input
            unread.append(error)
    if not unread:
        return documents
    if not documents:
        raise unread[0]
    note = f"{len(unread)} of {len(parts)} modules of the text cannot be read and were left out; the first: "
    return [{**document, "notes": [*document.get("notes", ()), note + _complaint(unread[0])]} for document in documents]


def _complaint(error: Exception) -> str:
    """What a parser says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:MOST_ERROR_LINES])[:MOST_ERROR_CHARACTERS]
    return text if isinstance(error, HloTextError | ForeignTextError) else f"{type(error).__name__}: {text}"


def _read_stablehlo(text: str) -> list[Document]:
    """The documents of one part of a text, as it is or in today's form of attributes; raises what is wrong with it."""
    complaints: list[Exception] = []
    for form in dict.fromkeys((text, upgraded(text))):
        try:
            with make_ir_context() as context:
                context.allow_unregistered_dialects = True  # their attributes, and operations in generic form
                return _read_all(ir.Module.parse(form))
        except Exception as error:  # jaxlib's own, which is no common class
            complaints.append(error)
    sentence = explained(str(complaints[0]))
    raise complaints[0] if sentence is None else ForeignTextError(sentence)


def _read_all(module: ir.Module) -> list[Document]:
    """The document of a module, or those of the modules that alone stand in it."""
    inner = [op for op in module.body.operations if op.operation.name == "builtin.module"]
    if not inner or len(inner) < len(list(module.body.operations)):
        return [read_module(module)]
    return [read_module(op) for op in inner]


def unwrapped(data: bytes) -> bytes:
    """The HloModuleProto inside an HloProto, whose first field it is; itself where it already is one.

    The first field of a module is its name, a text; that of an HloProto is a message, which begins with a field tag.
    """
    if data[:1] != _FIRST_FIELD:
        return data
    length, shift, start = 0, 0, 1
    # A length is written seven bits to a byte; the last byte has no top bit.
    while start < len(data) and shift < 63:
        byte = data[start]
        length |= (byte & 0x7F) << shift
        start, shift = start + 1, shift + 7
        if not byte & 0x80:
            break
    inner = data[start : start + length]
    # A name could begin with this byte too, but a module is most of its proto.
    return inner if inner[:1] == _FIRST_FIELD and len(inner) > len(data) // 8 else data


if __name__ == "__main__":
    main(int(sys.argv[1]))
