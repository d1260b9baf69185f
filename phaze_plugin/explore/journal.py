"""The journal of a search: every result is a line on disk, so that a killed search resumes and can be verified later.

The first line says what was asked (format, version, models, space, question). Each further line is a task with its
cutoff and its result. A search asks for the same tasks whenever the question is the same, so that the journal is a
table of results: what it has is not computed again. A line is on disk before the search goes on. The last line may be
torn by a kill and is dropped; any other damage is reported, and a file that does not begin as a journal does is left as
it is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypedDict, cast

from phaze.errors import FormatError

__all__ = ["FORMAT", "Journal", "JournalRecord", "is_journal", "read_header", "seconds_or_none"]

FORMAT = "phaze-search-journal"

VERSION = 2
"""Version 2 spells the question's keys as `phaze.search` does and keeps a plan's strategy as a `Parallelism`."""

_BEGINNING = f'{{"format": "{FORMAT}"'.encode()

_LISTED_DIFFERENCES = 5
"""How many differences between two questions a message names; more would bury the first."""

_HEAD_CHARACTERS = 200
"""How much of a first line is read to see whether a file is a journal: enough for the format's name, which is first."""

_SHOWN_CHARACTERS = 40
"""How much of a value a message about another question shows."""


class JournalRecord(TypedDict):
    """A line of a journal: a task by its name, its cutoff (None for infinity), and its result as JSON knows it."""

    task: str
    cutoff_s: float | None
    result: Mapping[str, object]


@dataclass(slots=True, eq=False)
class Journal:
    """Results by the names of their tasks. A journal without a file only remembers."""

    records: dict[str, JournalRecord] = field(default_factory=dict)
    path: Path | None = None
    _file: IO[str] | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str], header: Mapping[str, object]) -> Journal:
        """Begin a journal, or resume one; raises FormatError if it is damaged or belongs to another question."""
        file_path = Path(path)
        records: dict[str, JournalRecord] = {}
        try:
            if file_path.exists() and file_path.stat().st_size:
                content = _read(file_path)
                records = content.records
                if content.header is not None:
                    _check_question(file_path, content.header, header)
                os.truncate(file_path, content.good_bytes)
            file = file_path.open("a", encoding="utf-8")
        except OSError as error:
            raise FormatError(f"cannot write the journal {file_path}: {error.strerror}.") from error
        journal = cls(records, file_path, file)
        if file_path.stat().st_size == 0:
            journal._write({"format": FORMAT, "version": VERSION, **header})
        return journal

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Journal:
        """Read a journal without resuming it."""
        content = _read(Path(path))
        content.known_header()
        return cls(content.records)

    def close(self) -> None:
        """Leave the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def find(self, task: str, cutoff_s: float) -> Mapping[str, object] | None:
        """The result of a task, or None if it is not known; raises FormatError if the task had another cutoff."""
        record = self.records.get(task)
        if record is None:
            return None
        cutoff = seconds_or_none(cutoff_s)
        if record["cutoff_s"] != cutoff:
            raise FormatError(
                f"the journal's task {task} has the cutoff {record['cutoff_s']}, where {cutoff} follows from its other "
                "lines; a line was changed or removed. Begin a new journal."
            )
        return record["result"]

    def add(self, task: str, cutoff_s: float, result: Mapping[str, object]) -> None:
        """Remember a result; it is on disk when this returns."""
        record: JournalRecord = {"task": task, "cutoff_s": seconds_or_none(cutoff_s), "result": dict(result)}
        self.records[task] = record
        if self._file is not None:
            self._write(record)

    def _write(self, record: Mapping[str, object]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def seconds_or_none(seconds: float) -> float | None:
    """Seconds as JSON knows them: None for infinity."""
    return None if math.isinf(seconds) else seconds


def is_journal(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a journal does."""
    try:
        with open(path, encoding="utf-8") as file:
            return f'"{FORMAT}"' in file.readline(_HEAD_CHARACTERS)
    except (OSError, UnicodeDecodeError):
        return False


def read_header(path: str | os.PathLike[str]) -> Mapping[str, object]:
    """What a journal's search was asked; raises FormatError."""
    return _read(Path(path)).known_header()


@dataclass(frozen=True, slots=True)
class _Content:
    """What a journal's file holds: the first line (None if it is torn), the records, and how many bytes are good."""

    path: Path
    header: Mapping[str, object] | None
    records: dict[str, JournalRecord]
    good_bytes: int

    def known_header(self) -> Mapping[str, object]:
        """The first line; raises FormatError if there is none."""
        if self.header is None:
            raise FormatError(f"{self.path} is a journal without a first line; the search was killed at once.")
        return self.header


def _read(path: Path) -> _Content:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FormatError(f"cannot read the journal {path}: {error.strerror}.") from error
    lines = content.split(b"\n")
    torn = lines.pop()  # empty if the last line is whole
    first = lines[0] if lines else torn
    if not (first.startswith(_BEGINNING) or (not lines and _BEGINNING.startswith(first))):
        raise _not_a_journal(path)
    header: Mapping[str, object] | None = None
    records: dict[str, JournalRecord] = {}
    for index, line in enumerate(lines):
        document = _document(path, index + 1, line)
        if index == 0:
            header = _header(path, document)
        elif set(document) != set(JournalRecord.__annotations__) or not isinstance(document["result"], dict):
            raise FormatError(f"{path}, line {index + 1}: no task with its cutoff and result; the journal is damaged.")
        else:
            records[str(document["task"])] = cast(JournalRecord, document)
    return _Content(path, header, records, len(content) - len(torn))


def _document(path: Path, line: int, text: bytes) -> dict[str, object]:
    try:
        document: object = json.loads(text)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"{path}, line {line}: {type(error).__name__}: {error}; the journal is damaged. Only its last line may be "
            "torn; begin a new one."
        ) from error
    if not isinstance(document, dict):
        raise FormatError(f"{path}, line {line}: expected an object; the journal is damaged.")
    return document


def _header(path: Path, document: Mapping[str, object]) -> dict[str, object]:
    if document.get("version") != VERSION:
        raise FormatError(
            f"{path} has version {document.get('version')} of the journal's format; this Phaze reads {VERSION}."
        )
    return {name: value for name, value in document.items() if name not in ("format", "version")}


def _not_a_journal(path: Path) -> FormatError:
    return FormatError(
        f"{path} is not the journal of a search: it does not begin as one. It is left as it is; name another file."
    )


def _check_question(path: Path, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise FormatError naming what differs between the question of a journal and the one that is asked now."""
    differing = _differences("", before, json.loads(json.dumps(now)))
    if differing:
        raise FormatError(
            f"the journal {path} belongs to another search: {'; '.join(differing[:_LISTED_DIFFERENCES])}. Ask the same "
            "question again, or name another file."
        )


def _differences(where: str, before: object, now: object) -> list[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        differing = [
            text
            for name in dict.fromkeys((*before, *now))
            for text in _differences(f"{where}.{name}" if where else str(name), before.get(name), now.get(name))
        ]
        if not differing and list(before) != list(now):  # the order counts: tasks call models by their numbers
            return [f"{where} was in the order {', '.join(before)} and is in the order {', '.join(now)} now"]
        return differing
    return [] if before == now else [f"{where} was {_short(before)} and is {_short(now)} now"]


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
