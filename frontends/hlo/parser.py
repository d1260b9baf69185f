"""Owning the process that parses: started when first needed, reused, ended with ours, and started anew when it dies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from functools import cache
from multiprocessing.connection import Connection
from typing import IO, Any

from phaze.errors import FormatError, ImportModelError
from phaze.frontends.hlo.dumps import Form
from phaze.frontends.hlo.parser_process import READY

__all__ = ["Parser", "shared_parser"]

START_LIMIT_S = 300.0
MOST_COMPLAINT_BYTES = 2000


class Parser:
    """Parses modules in a process of its own. One request at a time; `close` ends the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self.starts = 0

    def parse(self, data: bytes, form: Form, *, time_limit_s: float, name: str) -> Mapping[str, Any]:
        """The document of a module; raises FormatError where the parser refuses, crashes or takes too long."""
        with self._lock:
            child = self._running()
            try:
                answer = child.ask(form, data, time_limit_s)
            except _Gone as gone:
                self._end()
                raise FormatError(f"{name} is damaged: reading it as {form} {gone}.") from None
            except BaseException:
                self._end()
                raise
        try:
            document = json.loads(answer)
        except (ValueError, RecursionError):
            raise FormatError(f"{name} is nested too deeply to be read.") from None
        if "error" in document:
            raise FormatError(f"{name} could not be read as {form}: {document['error']}")
        found: Mapping[str, Any] = document["document"]
        return found

    def close(self) -> None:
        """End the process; the next request starts another."""
        with self._lock:
            self._end()

    def _running(self) -> _Child:
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


class _Gone(Exception):  # noqa: N818 - said as a FormatError
    """The process died or did not answer in time; the text says which."""


class _Child:
    """A started process and the connection to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.owner = os.getpid()
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
        self._finalizer = weakref.finalize(self, _stop, self.process, self.connection, self.complaints, self.owner)
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
        return self.owner == os.getpid() and self.process.poll() is None

    def ask(self, form: Form, data: bytes, time_limit_s: float) -> bytes:
        """The answer; raises _Gone."""
        try:
            self.connection.send_bytes(form.encode())
            self.connection.send_bytes(data)
            if not self.connection.poll(time_limit_s):
                raise _Gone(f"takes longer than {time_limit_s:g} s")
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            raise _Gone(f"crashes the parser. {self._complaint()}".rstrip(". ")) from None

    def _complaint(self) -> str:
        """The last lines that the process wrote before it died."""
        self.complaints.seek(0)
        lines = self.complaints.read()[-MOST_COMPLAINT_BYTES:].decode(errors="replace").splitlines()
        telling = [line for line in lines if "Check failed" in line or "LLVM ERROR" in line or "Error" in line]
        return " ".join((telling or lines)[-1:])[:300]

    def end(self) -> None:
        """Kill the process."""
        self._finalizer()


def _stop(process: subprocess.Popen[bytes], connection: Connection, complaints: IO[bytes], owner: int) -> None:
    connection.close()
    complaints.close()
    if owner == os.getpid():
        process.kill()
        process.wait()
    else:
        process.returncode = 0  # another process's child: nothing to wait for


@cache
def shared_parser() -> Parser:
    """The one parser of this process: imports come one by one, and starting jaxlib for each would cost a second."""
    return Parser()
