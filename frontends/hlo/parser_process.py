"""The process that parses: `python -m phaze.frontends.hlo.parser_process FD`.

XLA's and MLIR's parsers can abort or hang on damaged input, so they run here and not in the user's process. A request
is two messages, the form and the bytes; the answer is one, JSON with the module's document or an error. The process
ends when its connection does, and takes no more memory than `MOST_BYTES`.
"""

from __future__ import annotations

import json
import resource
import sys
from multiprocessing.connection import Connection
from typing import Any

from phaze.frontends.hlo.dumps import Form

__all__ = ["READY", "main"]

READY = b"ready"
MOST_BYTES = 24 * 2**30
"""Address space, most of which jaxlib reserves without using it."""

_PORTABLE = b"StableHLO_v"


def main(descriptor: int) -> None:
    """Answer requests until the connection ends."""
    connection = Connection(descriptor)
    parser = _Parser()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or most > MOST_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, most))
    connection.send_bytes(READY)
    while True:
        try:
            form, data = Form(connection.recv_bytes().decode()), connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(parser, form, data))


def _answer(parser: _Parser, form: Form, data: bytes) -> bytes:
    from phaze.frontends.stablehlo.mlir_reader import read_module

    try:
        document = read_module(parser.parse(form, data))
        return json.dumps({"document": document}).encode()
    except Exception as error:  # whatever a parser says of foreign input is the answer
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = f"{type(error).__name__}: {' '.join(lines[:4])[:800]}"
        return json.dumps({"error": text}).encode()


class _Parser:
    """jaxlib's parsers; a context is made for each module, since it keeps all that was ever parsed in it."""

    def __init__(self) -> None:
        import jax.extend.mlir
        from jax._src.interpreters import mlir
        from jaxlib import _hlo
        from jaxlib.mlir import ir

        self.convert: Any = jax.extend.mlir
        self.make_context: Any = mlir.make_ir_context
        self.hlo: Any = _hlo
        self.ir: Any = ir

    def parse(self, form: Form, data: bytes) -> Any:
        """The module; raises what the parsers raise."""
        with self.make_context():
            if form is Form.STABLEHLO_BYTECODE and _PORTABLE in data[:64]:
                return self.convert.deserialize_portable_artifact(data)
            return self.ir.Module.parse(self._as_mlir(form, data))

    def _as_mlir(self, form: Form, data: bytes) -> str | bytes:
        if form is Form.STABLEHLO_TEXT:
            return data.decode()
        if form is Form.STABLEHLO_BYTECODE:
            return data
        if form is Form.HLO_TEXT:
            data = self.hlo.hlo_module_from_text(data.decode()).as_serialized_hlo_module_proto()
        converted: bytes = self.convert.hlo_to_stablehlo(unwrapped(data))
        return converted


def unwrapped(data: bytes) -> bytes:
    """The HloModuleProto inside an HloProto, whose first field it is; itself where it already is one.

    The first field of a module is its name, a text; that of an HloProto is a message, which begins with a field tag.
    """
    if data[:1] != b"\x0a":
        return data
    length, shift, start = 0, 0, 1
    while start < len(data) and shift < 63:
        byte = data[start]
        length |= (byte & 0x7F) << shift
        start, shift = start + 1, shift + 7
        if not byte & 0x80:
            break
    inner = data[start : start + length]
    return inner if inner[:1] == b"\x0a" and len(inner) > len(data) // 8 else data


if __name__ == "__main__":
    main(int(sys.argv[1]))
