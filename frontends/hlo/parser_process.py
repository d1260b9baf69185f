"""Parse HLO files with jaxlib, in a process of its own: `python -m phaze.frontends.hlo.parser_process DESCRIPTOR`.

XLA's and MLIR's parsers can abort or hang on damaged input, so they run here and not in the user's process.
`parser_client.py` starts it with the descriptor of a connection. A request on it is two messages, the form and the
bytes; the answer is one, JSON with the documents of the modules in them or an error. The process ends when its
connection does, and takes no more memory than `MOST_BYTES`.

Before it is parsed, text as other tools and other versions write it is made into what the parsers take. A file may hold
several modules: test files of MLIR put `// -----` between them, HLO text begins each with `HloModule`. Before 2024
StableHLO wrote lists of integers as tensors (`dense<[1, 0]> : tensor<2xi64>`), and before 2022 the dimension numbers of
a product as a dictionary; both are rewritten where the parser refuses the text as it is (`upgraded`). Operations of
other dialects than StableHLO's cannot be read at all, which `explained` says in a sentence.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import jax.extend.mlir
from jax._src.interpreters.mlir import make_ir_context
from jaxlib import _hlo
from jaxlib.mlir import ir

from phaze.frontends.hlo.dumps import Form, exported_module
from phaze.frontends.hlo.hlo_lowering import lower_module
from phaze.frontends.hlo.hlo_text import HloTextError, read_hlo_text
from phaze.frontends.hlo.parser_client import READY
from phaze.frontends.stablehlo.mlir_reader import read_module
from phaze.frontends.stablehlo.module import Document

__all__ = [
    "ForeignTextError",
    "explained",
    "main",
    "split_hlo_modules",
    "split_stablehlo_modules",
    "unwrapped",
    "upgraded",
]


class ForeignTextError(ValueError):
    """The text is of another language than StableHLO; the message says which."""


_SEPARATOR = re.compile(r"^// -----.*$", re.MULTILINE)
_HEADER = re.compile(r"^[ \t]*HloModule\b", re.MULTILINE)
_COMMENT = re.compile(r"//.*$", re.MULTILINE)

_LISTS = (
    "base_dilations|broadcast_dimensions|broadcast_sizes|dimensions|edge_padding_high|edge_padding_low|fft_length|"
    "interior_padding|lhs_dilation|limit_indices|permutation|rhs_dilation|slice_sizes|start_indices|strides|"
    "window_dilations|window_dimensions|window_strides"
)
"""Attributes of StableHLO that were tensors of integers and are arrays now."""

_TENSOR_LIST = re.compile(rf"\b({_LISTS})(\s*=\s*)dense<(\[[-\d,\s]*\]|-?\d+)>\s*:\s*tensor<(\d+)xi64>", re.DOTALL)
_REVERSAL = re.compile(r"\b(window_reversal\s*=\s*)dense<(\[[\w,\s]*\]|\w+)>\s*:\s*tensor<(\d+)xi1>", re.DOTALL)
_STABLEHLO_OPERATION = re.compile(r'"?stablehlo\.\w+')
_PRODUCT_NUMBERS = re.compile(r"\bdot_dimension_numbers\s*=\s*\{([^{}]*)\}", re.DOTALL)
_PRODUCT_FIELD = re.compile(r"(\w+)\s*=\s*dense<(\[[\d,\s]*\]|\d+)>\s*:\s*tensor<(\d+)xi64>", re.DOTALL)
_FOREIGN_OPERATION = re.compile(r'"-":(\d+):\d+: Dialect `(\w+)\' not found for custom op \'([\w.]+)\'')


def split_hlo_modules(text: str) -> list[str]:
    """The modules of HLO text, each from its header on; the whole text where there is at most one header."""
    bare = _COMMENT.sub(lambda comment: " " * len(comment[0]), text)
    starts = [header.start() for header in _HEADER.finditer(bare)]
    if len(starts) < 2:
        return [text]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def split_stablehlo_modules(text: str) -> list[str]:
    """The modules of StableHLO text; parts that are comments alone are none."""
    parts, lines = [], 0
    for part in _SEPARATOR.split(text):
        if _COMMENT.sub("", part).strip():
            parts.append("\n" * lines + part)  # so that complaints name the line of the file
        lines += part.count("\n")
    return parts or [text]


def upgraded(text: str) -> str:
    """The text in today's form of attributes; itself where nothing in it is of an older form.

    MHLO still has the older form, so that a text with operations of it alone keeps it.
    """
    dialect = "stablehlo" if _STABLEHLO_OPERATION.search(text) else "mhlo"
    text = _PRODUCT_NUMBERS.sub(lambda found: _product_numbers(found[1], dialect), text)
    if dialect == "mhlo":
        return text
    text = _TENSOR_LIST.sub(lambda found: f"{found[1]}{found[2]}array<i64{_array(found[3], int(found[4]))}>", text)
    return _REVERSAL.sub(lambda found: f"{found[1]}array<i1{_array(found[2], int(found[3]))}>", text)


def _product_numbers(fields: str, dialect: str) -> str:
    numbers = {field[1]: _elements(field[2], int(field[3])) for field in _PRODUCT_FIELD.finditer(fields)}
    written = ", ".join(f"{name} = [{', '.join(dims)}]" for name, dims in numbers.items() if dims)
    return f"dot_dimension_numbers = #{dialect}.dot<{written}>"


def _array(text: str, size: int) -> str:
    """The elements of an array attribute behind its type, with the colon that an empty one does not have."""
    elements = _elements(text, size)
    return f": {', '.join(elements)}" if elements else ""


def _elements(text: str, size: int) -> list[str]:
    """The elements of a dense attribute; a single one stands for all."""
    if not text.startswith("["):
        return [text] * size
    return [word.strip() for word in text.strip("[]").split(",") if word.strip()]


def explained(complaint: str) -> str | None:
    """What is wrong with text that the parser complains about so, in a sentence; None where that is not known."""
    foreign = _FOREIGN_OPERATION.search(complaint)
    if foreign is not None:
        line, dialect, operation = foreign.groups()
        return (
            f"line {line} has {operation}, an operation of the dialect {dialect!r}, which is no part of StableHLO; "
            "lower the module to StableHLO alone first."
        )
    return None


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
