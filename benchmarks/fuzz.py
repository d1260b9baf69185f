"""Damaged files of every format, for as long as one likes: `make fuzz MINUTES=10`, or with COUNT and SEED.

Every input is drawn from its seed alone, so that a failure is found again by the same seed. What fails is written to
`--keep DIR`; a failure that was mended belongs into `tests/data/fuzz/`, where the tests read it for good.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import resource
import tempfile
import time
from pathlib import Path

from fuzzing import Tally, drawn_inputs, try_input
from readable_files import FORMATS

MOST_COUNT = 10_000_000
"""Inputs that a run with a time limit may draw: far more than it has time for."""

MOST_SHOWN = 3000
"""Characters of a failure that are printed: a message may quote the whole file."""

ADDRESS_SPACE_BYTES = 6 * 2**30
"""Address space of the process: what a reader takes beyond that is a MemoryError, and counts as a failure."""


def main() -> int:
    """Draw, read, count; 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--count", type=int, default=MOST_COUNT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="a format's name; all by default")
    parser.add_argument("--keep", type=Path, help="write what fails into this folder")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    formats = [kind for kind in FORMATS if arguments.only is None or kind.name in arguments.only]
    tally, until = Tally(), time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        for kind, data in drawn_inputs(formats, arguments.seed, arguments.count):
            try_input(kind, data, Path(folder), tally)
            if time.monotonic() > until:
                break
    seen: dict[str, int] = {}
    for failure in tally.failures:
        line = f"{failure.kind}: {failure.what.strip().splitlines()[-1][:150]}"
        first = seen.setdefault(re.sub(r"\d+", "N", line), 0) == 0
        seen[re.sub(r"\d+", "N", line)] += 1
        if first:
            print(f"{failure.kind}\n{failure.what[:MOST_SHOWN]}")
        if arguments.keep is not None:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            name = f"{failure.kind.replace(' ', '-')}-{hashlib.sha256(failure.data).hexdigest()[:12]}"
            (arguments.keep / name).write_bytes(failure.data)
    for line, count in seen.items():
        print(f"{count:6d}  {line}")
    for kind in formats:
        print(f"{kind.name:20s} accepted {tally.accepted[kind.name]:7d}   refused {tally.refused[kind.name]:7d}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"seed {arguments.seed}: {tally.tried} inputs, {len(tally.failures)} failures; the slowest took "
        f"{tally.longest_s:.2f} s, the process {peak:.2f} GiB at most"
    )
    return 1 if tally.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
