"""Try damaged files one after the other, and keep what a file made go wrong.

What must hold of every file: it is read, or refused with a PhazeError, within ten seconds and two gibibytes.
"""

import random
import resource
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mutated_inputs import mutated
from readable_files import Format

from phaze.errors import JournalWarning, PhazeError

__all__ = ["Failure", "Tally", "drawn_inputs", "try_input"]

MOST_SECONDS = 10.0
"""Processor seconds after which a file counts as one that hangs its reader."""

MOST_BYTES = 2 * 2**30
"""Memory that reading any file may add to the process."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A file that made something go wrong, and what."""

    kind: str
    data: bytes
    what: str


@dataclass(slots=True)
class Tally:
    """What became of the files so far."""

    refused: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    longest_s: float = 0.0

    @property
    def tried(self) -> int:
        """How many files were tried."""
        return self.refused.total() + self.accepted.total() + len(self.failures)


def drawn_inputs(formats: Sequence[Format], seed: int, count: int) -> Iterator[tuple[Format, bytes]]:
    """Damaged files of all formats, by their weights; the same ones for the same seed."""
    for number in range(count):
        chance = random.Random(f"{seed}/{number}")
        kind = chance.choices(formats, [drawn.weight for drawn in formats])[0]
        yield kind, mutated(chance.choice(kind.examples()), chance)


def try_input(kind: Format, data: bytes, folder: Path, tally: Tally) -> None:
    """Read one file as a user would, and count what became of it."""
    path = folder / f"input{kind.suffix}"
    path.write_bytes(data)
    started_s, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wrong = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", JournalWarning)
            kind.use(path)
        tally.accepted[kind.name] += 1
    except PhazeError as error:
        tally.refused[kind.name] += 1
        wrong = None if str(error) else "an error without a message"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        wrong = "".join(traceback.format_exception(error)[-6:])
    taken_s = time.process_time() - started_s
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    tally.longest_s = max(tally.longest_s, taken_s)
    if wrong is None and taken_s > MOST_SECONDS:
        wrong = f"took {taken_s:.1f} s"
    if wrong is None and grown > MOST_BYTES:
        wrong = f"took {grown / 2**30:.1f} GiB"
    if wrong is not None:
        tally.failures.append(Failure(kind.name, data, wrong))
