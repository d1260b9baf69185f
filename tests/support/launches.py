"""Launches of processes, for tests of plans that are made together."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["OneProcess"]


@dataclass(frozen=True, slots=True)
class OneProcess:
    """A launch of a single process."""

    name: str = "one"

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def gather(self, text: str) -> Sequence[str]:
        return [text]

    def visible_devices(self) -> tuple[str, int] | None:
        return None
