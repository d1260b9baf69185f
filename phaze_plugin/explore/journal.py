"""The journal of a search: every result is a line on disk, so that a killed search resumes and can be verified later.

The first line says what was asked (format, version, models, space, question). Each further line is a task with its
cutoff and its result. A search asks for the same tasks whenever the question is the same, so that the journal is a
table of results: what it has is not computed again. A line is on disk before the search goes on.

Every line ends with a digest of itself and of all lines before it, so that no line can be changed, left out or moved
without a trace. The last line may be torn by a kill and is dropped; behind any other damage, resuming drops what
follows it, with a warning that says how much is computed again, and reading refuses it. One search at a time writes to
a journal. A disk that is full, or a journal that was removed, ends the search with an error; the lines that were there
stay. A file that does not begin as a journal does is left as it is.
"""

from __future__ import annotations

import json
import math
import os
import stat
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, cast

from phaze.errors import FormatError, JournalWarning, shown
from phaze.file_access import parse_json, read_bytes, sync_folder
from phaze.json_documents import DIGEST, DRAFT, SchemaCheck, digest_of

try:
    import fcntl
except ImportError:  # pragma: no cover  # systems without it have no locks of this kind
    fcntl = None  # type: ignore[assignment]

__all__ = ["FORMAT", "LINE_SCHEMA", "Journal", "JournalRecord", "is_journal", "read_header", "seconds_or_none"]

FORMAT = "phaze-search-journal"

VERSION = 6
"""Version 6 has strategies that say how experts are shared, version 5 calibrations with a share of 8-bit products,
version 4 ones that say how products are run, version 3 a digest in every line."""

_BEGINNING = f'{{"format": "{FORMAT}"'.encode()

_DIGEST_CHARACTERS = 16
"""How much of a line's digest is written: 64 bits, enough for damage, and shorter than the line."""

_LISTED_DIFFERENCES = 5
"""How many differences between two questions a message names; more would bury the first."""

_HEAD_CHARACTERS = 200
"""How much of a first line is read to see whether a file is a journal: enough for the format's name, which is first."""

_SHOWN_CHARACTERS = 40
"""How much of a value a message about another question shows."""


_TEXT: Mapping[str, object] = {"type": "string"}


def _line_schema(properties: Mapping[str, object]) -> dict[str, object]:
    needed = {**properties, DIGEST: _TEXT}
    return {"type": "object", "properties": needed, "required": list(needed), "additionalProperties": False}


_FIRST_LINE = _line_schema(
    {
        "format": {"const": FORMAT},
        "version": {"const": VERSION},
        "phaze": _TEXT,
        "models": {"type": "object", "additionalProperties": _TEXT},
        "space": {"type": "object"},
        "prices": {"type": "array", "items": _TEXT},
        "question": {"type": "object"},
    }
)
_FURTHER_LINE = _line_schema(
    {"task": _TEXT, "cutoff_s": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "result": {"type": "object"}}
)
LINE_SCHEMA: Mapping[str, object] = {
    "$schema": DRAFT,
    "title": "a line of a search's journal",
    "anyOf": [_FIRST_LINE, _FURTHER_LINE],
}
"""What a line is made of: the first one, or one behind it. Each result is that of its task's own class."""

_check_first_line, _check_further_line = SchemaCheck(_FIRST_LINE), SchemaCheck(_FURTHER_LINE)


class JournalRecord(TypedDict):
    """A line of a journal: a task by its name, its cutoff (None for infinity), and its result as JSON knows it."""

    task: str
    cutoff_s: float | None
    result: Mapping[str, object]


@dataclass(slots=True, eq=False)
class Journal:
    """Results by the names of their tasks. A journal without a file only remembers.

    Attributes:
        records: what is known.
        path: the file; None where nothing is written.
        descriptor: the open and locked file.
        size: its bytes, all of them whole lines.
        digest: that of its last line.
    """

    records: dict[str, JournalRecord] = field(default_factory=dict)
    path: Path | None = None
    descriptor: int | None = None
    size: int = 0
    digest: str = ""

    @classmethod
    def open(cls, path: str | os.PathLike[str], header: Mapping[str, object]) -> Journal:
        """Begin a journal, or resume one; raises FormatError if it is another's, another question's, or in use."""
        journal = cls(path=Path(path))
        try:
            _check_kind(journal.path)
            journal.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            journal._lock()
            journal._resume(header)
        except BaseException as error:
            journal.close()
            if isinstance(error, OSError):
                raise FormatError(f"cannot write the journal {path}: {error.strerror}.") from error
            if isinstance(error, ValueError):  # a name with a null character
                raise FormatError(f"cannot write the journal {shown(path)}: {error}.") from error
            raise
        return journal

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Journal:
        """Read a journal without resuming it; raises FormatError where any line is damaged."""
        content = _read(Path(path)).undamaged()
        content.known_header()
        return cls(content.records)

    def close(self) -> None:
        """Leave the file, and with it the lock."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

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
        """Remember a result; it is on disk when this returns. Raises FormatError where it cannot be."""
        record: JournalRecord = {"task": task, "cutoff_s": seconds_or_none(cutoff_s), "result": dict(result)}
        self.records[task] = record
        if self.descriptor is not None:
            self._write(cast("Mapping[str, object]", record))

    def kept_text(self) -> str:
        """What a search that ends now leaves behind, in words."""
        if self.path is None:
            return "Nothing is kept without a journal."
        if not self.records:
            return f"The journal {self.path} has no results yet: the first ones come after all slicings were bounded."
        return f"The journal {self.path} keeps {len(self.records)} results, from which the same search goes on."

    def _lock(self) -> None:
        """Take the file for this process alone, until it is closed."""
        assert self.descriptor is not None
        if fcntl is None:  # pragma: no cover
            return
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FormatError(
                f"the journal {self.path} is in use by another search; wait for its end, or name another file."
            ) from None
        except OSError:  # a file system without locks
            return

    def _resume(self, header: Mapping[str, object]) -> None:
        """Take over what the file holds, drop what is torn or damaged, and write the first line where there is none."""
        assert self.path is not None
        assert self.descriptor is not None
        if os.fstat(self.descriptor).st_size:
            content = _read(self.path)
            if content.header is not None:
                _check_question(self.path, content.header, header)
            if content.damage is not None:
                warnings.warn(JournalWarning(f"{content.damage} What follows is computed again."), stacklevel=4)
            self.records, self.size, self.digest = content.records, content.good_bytes, content.digest
            os.ftruncate(self.descriptor, self.size)
        if self.size == 0:
            self._write({"format": FORMAT, "version": VERSION, **header})
            sync_folder(self.path.parent)

    def _write(self, record: Mapping[str, object]) -> None:
        assert self.descriptor is not None
        document = json.loads(json.dumps(record, allow_nan=False))
        digest = _line_digest(document, self.digest)
        line = (json.dumps({**document, DIGEST: digest}) + "\n").encode()
        try:
            self._check_present()
            os.lseek(self.descriptor, self.size, os.SEEK_SET)
            written = 0
            while written < len(line):
                written += os.write(self.descriptor, line[written:])
            os.fsync(self.descriptor)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self.descriptor, self.size)
            raise FormatError(
                f"cannot write the journal {self.path}: {error.strerror}. {self._results()} of the search are in it; "
                "make room for more, and the same search goes on from them."
            ) from error
        self.size, self.digest = self.size + len(line), digest

    def _results(self) -> str:
        return f"{max(0, len(self.records) - 1)} results"

    def _check_present(self) -> None:
        """Raise FormatError where the file's name is gone: what is written then would be lost without a word."""
        assert self.path is not None
        assert self.descriptor is not None
        try:
            is_same = os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise FormatError(
                f"the journal {self.path} was removed or replaced while the search ran, so that nothing more can be "
                "kept there. Put its folder back, or begin a new journal."
            )


def _check_kind(path: Path | None) -> None:
    """Raise FormatError for what cannot be a journal, and would hold whoever opens it."""
    assert path is not None
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FormatError(f"cannot write the journal {path}: it is no file; name one.")


def _line_digest(document: Mapping[str, object], before: str) -> str:
    """The digest of a line behind all lines before it."""
    return digest_of(document, before)[:_DIGEST_CHARACTERS]


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
    """What a journal's file holds.

    Attributes:
        path: the file.
        header: the first line; None if it is torn.
        records: the lines behind it, up to the first that is damaged.
        good_bytes: how many bytes these are.
        digest: that of the last good line.
        damage: which line is damaged and what is lost with it, in words; None where none is.
    """

    path: Path
    header: Mapping[str, object] | None
    records: dict[str, JournalRecord]
    good_bytes: int
    digest: str
    damage: str | None = None

    def known_header(self) -> Mapping[str, object]:
        """The first line; raises FormatError if there is none."""
        if self.header is None:
            raise FormatError(f"{self.path} is a journal without a first line; the search was killed at once.")
        return self.header

    def undamaged(self) -> _Content:
        """The content; raises FormatError if some line is damaged."""
        if self.damage is not None:
            raise FormatError(f"{self.damage} Searching again with this journal goes on from before that line.")
        return self


def _read(path: Path) -> _Content:
    content = read_bytes(path, "a journal")
    lines = content.split(b"\n")
    torn = lines.pop()  # empty if the last line is whole
    first = lines[0] if lines else torn
    if not (first.startswith(_BEGINNING) or (not lines and _BEGINNING.startswith(first))):
        raise _not_a_journal(path)
    header: Mapping[str, object] | None = None
    records: dict[str, JournalRecord] = {}
    digest, good_bytes = "", 0
    for index, line in enumerate(lines):
        try:
            document = _document(f"{path}, line {index + 1}", line, digest)
            if index == 0:
                header = _header(path, document)
            else:
                record = _record(f"{path}, line {index + 1}", document)
                records[record["task"]] = record
        except FormatError as error:
            if index == 0:
                raise
            damage = f"{error} {len(records)} results before it are good; {len(lines) - index} lines are not used."
            return _Content(path, header, records, good_bytes, digest, damage)
        digest, good_bytes = str(document[DIGEST]), good_bytes + len(line) + 1
    return _Content(path, header, records, good_bytes, digest)


def _document(where: str, text: bytes, before: str) -> dict[str, object]:
    """The document of a line whose digest is right; raises FormatError."""
    document = parse_json(text, where, "a line of a journal")
    if not isinstance(document, dict):
        raise FormatError(f"{where}: expected an object; the journal is damaged.")
    # Lines of another version are told by their version, whatever they have for a digest.
    is_other_version = before == "" and document.get("version") != VERSION
    if not is_other_version and document.get(DIGEST) != _line_digest(document, before):
        raise FormatError(f"{where}: the line does not agree with its digest; the journal is damaged.")
    return document


def _record(where: str, document: Mapping[str, object]) -> JournalRecord:
    """The task of a line; raises FormatError."""
    _check_further_line(document, where)
    return cast("JournalRecord", {name: value for name, value in document.items() if name != DIGEST})


def _header(path: Path, document: Mapping[str, object]) -> dict[str, object]:
    if document.get("version") != VERSION:
        raise FormatError(
            f"{path} has version {shown(document.get('version'))} of the journal's format; this Phaze reads {VERSION}."
        )
    _check_first_line(document, f"{path}, line 1")
    return {name: value for name, value in document.items() if name not in ("format", "version", DIGEST)}


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
