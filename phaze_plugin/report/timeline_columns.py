"""A timeline as a page holds it: columns of whole numbers, deflated, in base64.

A pipeline of many stages and microbatches has a hundred thousand events. As differences in whole ticks they repeat
themselves, so that a page stays far below a megabyte.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np

from phaze.place.simulation.timeline import KINDS, Timeline

__all__ = ["timeline_columns"]

_TICKS = 1 << 24
"""Ticks in a step: finer than a pixel at any zoom that a person uses, and small enough for a whole number in JSON."""


def timeline_columns(timeline: Timeline) -> dict[str, object]:
    """The events by device and start: per event its kind, stage and microbatch, the pause before it, and its length.

    Columns are little-endian, one after the other: kind (1 byte), stage and microbatch (2 bytes, 65535 for none), pause
    and length in ticks (4 bytes each). `counts` says how many events each device has.
    """
    table = timeline.table
    start, end = (
        np.rint(seconds / timeline.time_s * _TICKS).astype(np.int64) for seconds in (table.start_s, table.end_s)
    )
    counts = np.bincount(table.device, minlength=timeline.devices)
    firsts = np.concatenate([[0], np.cumsum(counts)[:-1]])[counts > 0]
    before = np.concatenate([[0], end[:-1]])
    before[firsts] = 0
    columns = (
        table.kind.astype("<u1"),
        (table.stage & 0xFFFF).astype("<u2"),
        (table.micro_batch & 0xFFFF).astype("<u2"),
        np.maximum(start - before, 0).astype("<u4"),
        (end - start).astype("<u4"),
    )
    packed = zlib.compress(b"".join(column.tobytes() for column in columns), 9)
    return {
        "seconds": timeline.time_s,
        "ticks": _TICKS,
        "kinds": [kind.value for kind in KINDS],
        "counts": counts.tolist(),
        "columns": base64.b64encode(packed).decode(),
    }
