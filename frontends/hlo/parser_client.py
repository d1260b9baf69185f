"""Own the process that parses HLO files: start it when first needed, reuse it, and start another when it dies.

`parser_process.py` is what runs there. It ends with this process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from functools import cache
from multiprocessing.connection import Connection
from typing import IO

from phaze.errors import FormatError, ImportModelError
from phaze.frontends.hlo.dumps import Form
from phaze.frontends.stablehlo.module import Document

__all__ = ["READY", "Parser", "shared_parser"]

READY = b"ready"
"""What the process says once it has loaded jaxlib."""

START_LIMIT_S = 300.0
"""How long the process may take to load jaxlib: it takes a second, but minutes on a busy machine with a cold disk."""

MOST_COMPLAINT_BYTES = 2000
"""How much of what the process wrote last is searched for the reason why it died."""

MOST_COMPLAINT_CHARACTERS = 300
"""Where the line with that reason is cut."""


class Parser:
    """Parses modules in a process of its own. One request at a time; `close` ends the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self.starts = 0

    def parse(self, data: bytes, form: Form, *, time_limit_s: float, name: str) -> list[Document]:
        """The documents of the modules in a file; raises FormatError where the parser refuses, crashes or is late."""
        with self._lock:
            child = self._running()
            try:
                answer = child.ask(form, data, time_limit_s)
            except _ChildLost as reason:
                self._end()
                raise FormatError(f"{name} is damaged: reading it as {form} {reason}.") from None
            except BaseException:
                self._end()
                raise
        try:
            answered = json.loads(answer)
        except (ValueError, RecursionError):
            raise FormatError(f"{name} is nested too deeply to be read.") from None
        if "error" in answered:
            raise FormatError(f"{name} could not be read as {form}: {answered['error']}")
        documents: list[Document] = answered["documents"]
        return documents

    def close(self) -> None:
        """End the process; the next request starts another."""
        with self._lock:
            self._end()

    def _running(self) -> _Child:
        """The process, started anew where there is none, or where it is another process's."""
        if self._child is not None and not self._child.is_usable:
            self._end()
        if self._child is None:
            self._child = _Child()
            self.starts += 1
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _ChildLost(Exception):  # noqa: N818 - said as a FormatError
    """The process died or did not answer in time; the text says which."""


class _Child:
    """A started process and the connection to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.owner_pid = os.getpid()
        self.complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        with theirs:
            command = [sys.executable, "-P", "-m", "phaze.frontends.hlo.parser_process", str(theirs.fileno())]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.complaints,
                pass_fds=[theirs.fileno()],
            )
        self.connection = Connection(ours.detach())
        self._finalizer = weakref.finalize(self, _stop, self.process, self.connection, self.complaints, self.owner_pid)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        try:
            is_ready = self.connection.poll(START_LIMIT_S) and self.connection.recv_bytes() == READY
        except (EOFError, OSError):
            is_ready = False
        if not is_ready:
            complaint = self._complaint()
            self.end()
            raise ImportModelError(f"the process that reads HLO files could not be started. {complaint}")

    @property
    def is_usable(self) -> bool:
        """Whether the process runs and is ours: a forked copy of this process must start its own."""
        return self.owner_pid == os.getpid() and self.process.poll() is None

    def ask(self, form: Form, data: bytes, time_limit_s: float) -> bytes:
        """The answer; raises _ChildLost."""
        try:
            self.connection.send_bytes(form.encode())
            self.connection.send_bytes(data)
            if not self.connection.poll(time_limit_s):
                raise _ChildLost(f"takes longer than {time_limit_s:g} s")
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            raise _ChildLost(f"crashes the parser. {self._complaint()}".rstrip(". ")) from None

    def _complaint(self) -> str:
        """The last lines that the process wrote before it died."""
        self.complaints.seek(0)
        lines = self.complaints.read()[-MOST_COMPLAINT_BYTES:].decode(errors="replace").splitlines()
        telling = [line for line in lines if "Check failed" in line or "LLVM ERROR" in line or "Error" in line]
        return " ".join((telling or lines)[-1:])[:MOST_COMPLAINT_CHARACTERS]

    def end(self) -> None:
        """Kill the process."""
        self._finalizer()


def _stop(process: subprocess.Popen[bytes], connection: Connection, complaints: IO[bytes], owner_pid: int) -> None:
    """End the process; a static function, so that the finalizer keeps no reference to the child."""
    connection.close()
    complaints.close()
    if owner_pid == os.getpid():
        process.kill()
        process.wait()
    else:
        process.returncode = 0  # another process's child: nothing to wait for


@cache
def shared_parser() -> Parser:
    """The one parser of this process: imports come one by one, and starting jaxlib for each would cost a second."""
    return Parser()
