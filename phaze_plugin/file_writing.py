"""The one way out for files: whole or not at all, and on disk when the call returns.

A file is written beside its destination, synced, and moved there. A link is followed, so that what it points to is
replaced and not the link. A device, a pipe or a folder is no place for an answer and is refused.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phaze.errors import FormatError

__all__ = ["check_writable", "sync_folder", "write_whole"]

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
