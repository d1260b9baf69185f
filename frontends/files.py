"""Questions that frontends ask about files before they read them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_file"]


def is_file(path: Path) -> bool:
    """Whether there is a file; a name that no file can have (too long, a null character) is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
