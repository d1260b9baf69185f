"""What a search has computed, line by line on disk: a killed search goes on where it was, and can be checked later.

The first line says what was asked (format, version, models, space, question); each further one is a task with its
cutoff and its result. A search asks for the same tasks in the same order whenever the question is the same, so the
journal is a table of answers: what it has is not computed again. A line is on disk before the search goes on. The last
line may be torn by a kill and is dropped; anything else that is damaged is reported, and a file that does not begin as
a journal does is left as it is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from phaze.errors import FormatError

__all__ = ["FORMAT", "Journal", "is_journal", "read_header"]

FORMAT = "phaze-search-journal"
VERSION = 1
_BEGINNING = f'{{"format": "{FORMAT}"'.encode()


@dataclass(slots=True, eq=False)
class Journal:
    """Answers by task. Without a file it only remembers."""

    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    path: Path | None = None
    _file: IO[str] | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str], header: Mapping[str, object]) -> Journal:
        """Begin a journal, or go on with one; raises FormatError if it is damaged or of another question."""
        where = Path(path)
        records: dict[str, dict[str, Any]] = {}
        try:
            if where.exists() and where.stat().st_size:
                found, records, good_bytes = _read(where)
                if found is not None:
                    _check(where, found, header)
                os.truncate(where, good_bytes)
            file = where.open("a", encoding="utf-8")
        except OSError as error:
            raise FormatError(f"cannot write the journal {where}: {error.strerror}.") from error
        journal = cls(records, where, file)
        if where.stat().st_size == 0:
            journal._write({"format": FORMAT, "version": VERSION, **header})
        return journal

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Journal:
        """Read a journal without going on with it."""
        header, records, _ = _read(Path(path))
        if header is None:
            raise FormatError(f"{os.fspath(path)} is a journal without a first line; the search was killed at once.")
        return cls(records)

    def close(self) -> None:
        """Leave the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def find(self, task: str, cutoff_s: float) -> dict[str, Any] | None:
        """The result of a task, if it is known; raises FormatError if the journal's task had another cutoff."""
        record = self.records.get(task)
        if record is None:
            return None
        if record["cutoff_s"] != number(cutoff_s):
            raise FormatError(
                f"the journal's task {task} has the cutoff {record['cutoff_s']}, where {number(cutoff_s)} follows from "
                "its other lines; a line was changed or removed. Begin a new journal."
            )
        result: dict[str, Any] = record["result"]
        return result

    def add(self, task: str, cutoff_s: float, result: Mapping[str, object]) -> None:
        """Remember a result; it is on disk when this returns."""
        record: dict[str, Any] = {"task": task, "cutoff_s": number(cutoff_s), "result": dict(result)}
        self.records[task] = record
        if self._file is not None:
            self._write(record)

    def _write(self, record: Mapping[str, object]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def number(value: float) -> float | None:
    """As JSON knows it: None for infinity."""
    return None if math.isinf(value) else value


def is_journal(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a journal does."""
    try:
        with open(path, encoding="utf-8") as file:
            return f'"{FORMAT}"' in file.readline(200)
    except (OSError, UnicodeDecodeError):
        return False


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a journal's search was asked; raises FormatError."""
    header = _read(Path(path))[0]
    if header is None:
        raise FormatError(f"{os.fspath(path)} is a journal without a first line; the search was killed at once.")
    return header


def _read(path: Path) -> tuple[dict[str, Any] | None, dict[str, dict[str, Any]], int]:
    """The header (None if it is torn), the records, and how many bytes are good."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FormatError(f"cannot read the journal {path}: {error.strerror}.") from error
    lines = content.split(b"\n")
    last = lines.pop()  # empty if the last line is whole
    first = lines[0] if lines else last
    if not (first.startswith(_BEGINNING) or (not lines and _BEGINNING.startswith(first))):
        raise _not_a_journal(path)
    header: dict[str, Any] | None = None
    records: dict[str, dict[str, Any]] = {}
    for index, line in enumerate(lines):
        document = _document(path, index + 1, line)
        if index == 0:
            header = _header(path, document)
        elif set(document) != {"task", "cutoff_s", "result"} or not isinstance(document["result"], dict):
            raise FormatError(f"{path}, line {index + 1}: no task with its cutoff and result; the journal is damaged.")
        else:
            records[str(document["task"])] = document
    return header, records, len(content) - len(last)


def _document(path: Path, line: int, text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"{path}, line {line}: {type(error).__name__}: {error}; the journal is damaged. Only its last line may be "
            "torn; begin a new one."
        ) from error
    if not isinstance(document, dict):
        raise FormatError(f"{path}, line {line}: expected an object; the journal is damaged.")
    return document


def _header(path: Path, document: dict[str, Any]) -> dict[str, Any]:
    if document.get("version") != VERSION:
        raise FormatError(
            f"{path} has version {document.get('version')} of the journal's format; this Phaze reads {VERSION}."
        )
    return {name: value for name, value in document.items() if name not in ("format", "version")}


def _not_a_journal(path: Path) -> FormatError:
    return FormatError(
        f"{path} is not the journal of a search: it does not begin as one. It is left as it is; name another file."
    )


def _check(path: Path, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Name everything that differs between two questions."""
    wanted = json.loads(json.dumps(wanted))
    differing = list(_differences("", found, wanted))
    if differing:
        raise FormatError(
            f"the journal {path} belongs to another search: {'; '.join(differing[:5])}. Ask the same question again, "
            "or name another file."
        )


def _differences(where: str, found: object, wanted: object) -> list[str]:
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        names = dict.fromkeys((*found, *wanted))
        told = [
            text
            for name in names
            for text in _differences(f"{where}.{name}" if where else str(name), found.get(name), wanted.get(name))
        ]
        if not told and list(found) != list(wanted):  # tasks call models by their numbers
            return [f"{where} was in the order {', '.join(found)} and is in the order {', '.join(wanted)} now"]
        return told
    return [] if found == wanted else [f"{where} was {_short(found)} and is {_short(wanted)} now"]


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
