"""Tables that say how fast a run was and not how it was run: they are listed, never scored.

- tpu_and_headline.csv: its MaxText rows are superseded by the tables as first published; the others are headlines.
- nvidia_jax_toolbox.csv: recompute is not stated, and decides the time by a third.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from published.rows import Row, lines_of, unscored

__all__ = ["read_headlines", "read_jax_toolbox"]


def read_headlines(path: Path) -> Iterator[Row]:
    """Headlines of many papers."""
    for number, values in lines_of(path):
        name = f"line {number}: {values['model']}, {values['chips']} {values['hw']}"
        is_superseded = values["hw"].startswith(("TPUv4", "TPUv5e")) and "MaxText" in values["source"]
        reason = "superseded by the tables as first published" if is_superseded else "a headline without its strategy"
        yield unscored("headlines", name, reason)


def read_jax_toolbox(path: Path) -> Iterator[Row]:
    """NVIDIA's Pax runs."""
    for number, values in lines_of(path):
        name = f"line {number}: {values['model']}, {values['gpus']} {values['gpu']}, {values['precision']}"
        yield unscored("jax-toolbox", name, "recompute is not stated")
