"""The command line: `phaze COMMAND`."""

from __future__ import annotations

__all__ = ["main"]


def main() -> int:
    """Run one command and return its exit code."""
    return 0
