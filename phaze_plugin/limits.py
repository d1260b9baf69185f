"""The largest counts that Phaze works with before it asks: far above what is real, and far below what fills a machine.

A file, a config or a question beyond a limit is refused before any work starts. Whoever means it raises the limit in
the environment: `PHAZE_LIMITS="devices=4194304,file_mib=1024"`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from phaze.errors import LimitError, shown

__all__ = ["LIMITS", "check_limit", "limit_of"]

VARIABLE = "PHAZE_LIMITS"

LIMITS: Mapping[str, int] = MappingProxyType(
    {
        # The largest clusters have 2^17 accelerators; tables of strategies grow with the divisors of this number.
        "devices": 2**20,
        # Sequences of a step: runs have up to 2^16, and the passes of every microbatch of a pipeline are simulated.
        "batch": 2**20,
        # Layers of a config: each is written out as operators, a few kilobytes a piece.
        "layers": 10_000,
        # Experts of a layer, and words of a vocabulary, of a config: the largest models have hundreds, and 2^18.
        "experts": 2**16,
        "vocabulary": 2**28,
        # Mebibytes of a file, unpacked: Python takes about eight times the text of a JSON document.
        "file_mib": 128,
        # Values of a document: about 100 bytes each in memory.
        "values": 10_000_000,
        # Levels of a document: our own formats have fewer than ten.
        "depth": 100,
    }
)
"""The limits by name."""


def limit_of(name: str) -> int:
    """A limit: the default one, or what the environment says.

    Raises LimitError where the environment's words are no limits.
    """
    given = os.environ.get(VARIABLE, "")
    for part in filter(None, (part.strip() for part in given.split(","))):
        key, _, value = (text.strip() for text in part.partition("="))
        if key not in LIMITS or not (value.isascii() and value.isdigit() and 0 < len(value) < 19):
            known = ", ".join(LIMITS)
            raise LimitError(
                f"{VARIABLE} has {shown(part)}; expected such as devices=4194304, with one of {known} and a whole "
                "number, several with commas between."
            )
        if key == name:
            return int(value)
    return LIMITS[name]


def check_limit(name: str, value: int, what: str) -> None:
    """Raise LimitError where a count exceeds its limit, saying how to raise it."""
    most = limit_of(name)
    if value > most:
        raise LimitError(
            f"{what} is {shown(value)}, more than the {most:,} that are worked with by default. If it is meant, set "
            f"{VARIABLE}={name}=N in the environment, with N of at least that."
        )
