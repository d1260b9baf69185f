"""The one way in and out for files: what is read is bounded before anyone uses it, what is written is written whole.

Reading. `read_bytes` reads a regular file up to the limit of `phaze.limits`, unpacking gzip within the same limit.
`parse_json` turns text into a document. What is damaged, too large, nested too deeply, or not representable is a
FormatError that names the file and, where there is one, the field. In documents of our own, numbers are finite and fit
64 bits, and text is proper text; a document of another tool (`is_foreign`) is only bounded, for its readers check what
they take.

Writing. A file is there whole or not at all, and on disk when the call returns: it is written beside its destination,
synced, and moved there (`write_whole`). A link is followed, so that what it points to is replaced and not the link. A
device, a pipe or a folder is no place for an answer and is refused.
"""

from __future__ import annotations

import json
import math
import os
import stat
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from phaze.errors import FormatError, shown
from phaze.limits import VARIABLE, limit_of

__all__ = ["check_writable", "parse_json", "read_bytes", "read_document", "read_text", "sync_folder", "write_whole"]

LARGEST_INTEGER = 2**63
"""Whole numbers of our own documents are below this, so that arrays hold them."""

_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31
"""zlib's word for gzip with the largest window."""


def read_bytes(path: str | os.PathLike[str], what: str, *, unpacks: bool = False) -> bytes:
    """The content of a regular file, with `unpacks` that of a gzipped one; raises FormatError as the module says."""
    where, most = os.fspath(path), limit_of("file_mib") << 20
    try:
        # Opening a pipe would wait for its writer, so that its kind is looked at first and again once it is open.
        _check_regular(where, os.stat(path).st_mode)
        with open(path, "rb") as file:
            _check_regular(where, os.fstat(file.fileno()).st_mode)
            data = file.read(most + 1)
    except OSError as error:
        raise FormatError(f"cannot read {where}: {error.strerror or error}.") from error
    except ValueError as error:  # a name with a null character
        raise FormatError(f"cannot read {shown(where)}: {error}.") from error
    if len(data) > most:
        raise _too_large(where)
    return _unpacked(data, where, what, most) if unpacks and data.startswith(_GZIP) else data


def read_text(path: str | os.PathLike[str], what: str, *, encoding: str = "utf-8") -> str:
    """The text of a file; raises FormatError as `read_bytes` does, and where it is no text."""
    try:
        return read_bytes(path, what).decode(encoding)
    except UnicodeDecodeError as error:
        raise FormatError(f"{os.fspath(path)} is not {what}: it is no text in UTF-8 ({error.reason}).") from error


def read_document(path: str | os.PathLike[str], what: str, *, is_foreign: bool = False, unpacks: bool = False) -> Any:
    """The JSON document of a file; raises FormatError as `read_bytes` and `parse_json` do."""
    return parse_json(read_bytes(path, what, unpacks=unpacks), os.fspath(path), what, is_foreign=is_foreign)


def parse_json(text: str | bytes, where: str, what: str, *, is_foreign: bool = False) -> Any:
    """The document that a text is; `where` begins the names of its fields in messages."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        if len(text) > limit_of("file_mib") << 20:
            raise _too_large(where)
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        document = json.loads(text, parse_constant=None if is_foreign else refuse)
    except UnicodeDecodeError as error:
        raise FormatError(f"{where} is not {what}: it is no text in UTF-8 ({error.reason}).") from error
    except RecursionError as error:
        raise FormatError(f"{where} is not {what}: it is nested too deeply.") from error
    except ValueError as error:
        raise FormatError(f"{where} is not {what}: not valid JSON ({error}); it may be cut off.") from error
    _check_bounds(document, where, is_foreign)
    return document


def _check_regular(where: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
        raise FormatError(f"cannot read {where}: it is {kind}; expected a file.")


def _too_large(where: str) -> FormatError:
    most = limit_of("file_mib")
    return FormatError(
        f"{where} is larger than {most} MiB, unpacked, which is the most that is read by default. If it is meant, set "
        f"{VARIABLE}=file_mib=N in the environment; reading takes about eight times as much memory."
    )


def _unpacked(data: bytes, where: str, what: str, most: int) -> bytes:
    """What a gzipped text holds, however many parts it has; unpacking ends where it exceeds the limit."""
    parts, size = [], 0
    try:
        while data.startswith(_GZIP):
            unpacker = zlib.decompressobj(wbits=_GZIP_WINDOW)
            parts.append(unpacker.decompress(data, most + 1 - size))
            size += len(parts[-1])
            if size > most:
                raise _too_large(where)
            if not unpacker.eof:
                raise FormatError(f"{where} is not {what}: it is gzipped and cut off.")
            data = unpacker.unused_data
    except zlib.error as error:
        raise FormatError(f"{where} is not {what}: it is gzipped and damaged ({error}).") from error
    return b"".join(parts)


def _check_bounds(document: object, where: str, is_foreign: bool) -> None:
    """Raise FormatError where a document has too many values or levels, or a value that nothing can hold.

    Level by level, without recursion, as a document may be nested deeper than Python's stack.
    """
    most_values, most_depth, count = limit_of("values"), limit_of("depth"), 0
    level: list[object] = [document]
    for _ in range(most_depth):
        inner: list[object] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
                if not is_foreign and not all(map(_is_text, value)):
                    _refuse_value(document, where)
            elif isinstance(value, list):
                inner += value
            elif not is_foreign and not _is_plain(value):
                _refuse_value(document, where)
        count += len(inner)
        if count > most_values:
            raise FormatError(f"{where} has more than {most_values:,} values; see {VARIABLE} to read more.")
        if not inner:
            return
        level = inner
    raise FormatError(f"{where} is nested deeper than {most_depth} levels; expected a plainer document.")


def _is_text(text: str) -> bool:
    """Whether a text has no half of a character, which JSON allows and no file does."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _is_plain(value: object) -> bool:
    """Whether a value of a document is a number that arrays hold, proper text, or none of both."""
    if isinstance(value, str):
        return _is_text(value)
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or -LARGEST_INTEGER < value < LARGEST_INTEGER


def _refuse_value(document: object, where: str) -> NoReturn:
    """Raise FormatError naming the first field whose value nothing can hold."""
    for path, value in _leaves(document, where):
        if not _is_plain(value):
            kind = "half a character" if isinstance(value, str) else "too large a number"
            raise FormatError(f"{path} is {shown(value)}, {kind}; expected proper text and finite numbers of 64 bits.")
    raise FormatError(f"{where} has a key with half a character; expected proper text.")


def _leaves(document: object, where: str) -> Iterator[tuple[str, object]]:
    """Every value of a document with where it stands; levels beyond the limit are left out."""
    level: list[tuple[str, object]] = [(where, document)]
    for _ in range(limit_of("depth") + 1):
        inner: list[tuple[str, object]] = []
        for path, value in level:
            if isinstance(value, dict):
                inner += [(f"{path}.{key!s}" if _is_text(key) else path, item) for key, item in value.items()]
            elif isinstance(value, list):
                inner += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
            else:
                yield path, value
        level = inner


_NAME_CHARACTERS = 100
"""How much of a file's name the name beside it has: names may be 255 bytes long, and its own ending needs some."""


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file: whole or not at all. Raises FormatError where it cannot be; what was there is then still there."""
    with _beside(path) as (beside, target):
        with open(beside, "xb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            os.chmod(beside, stat.S_IMODE(os.stat(target).st_mode))
        os.replace(beside, target)
        sync_folder(target.parent)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise what `write_whole` would raise, before the work whose answer is to be written."""
    with _beside(path) as (beside, _):
        beside.touch(exist_ok=False)


def sync_folder(folder: Path) -> None:
    """Have a folder's names on disk; file systems that cannot sync folders keep them in their own way."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _beside(path: str | os.PathLike[str]) -> Iterator[tuple[Path, Path]]:
    """A name for a file beside another one, which is gone in the end; what goes wrong is a FormatError."""
    beside = None
    try:
        target = Path(os.path.realpath(path))
        with suppress(FileNotFoundError):
            mode = os.stat(target).st_mode
            if not stat.S_ISREG(mode):
                kind = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
                raise FormatError(f"cannot write {path}: it is {kind}; name a file.")
        beside = target.parent / f".{target.name[:_NAME_CHARACTERS]}.{uuid.uuid4().hex}"
        yield beside, target
    except OSError as error:
        raise FormatError(
            f"cannot write {path}: {error.strerror or error}. What was there before is unchanged."
        ) from error
    except (UnicodeEncodeError, ValueError) as error:
        raise FormatError(f"cannot write {path!r}: {error}.") from error
    finally:
        if beside is not None:
            with suppress(OSError, ValueError):
                beside.unlink(missing_ok=True)
