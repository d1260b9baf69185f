"""Tables as CSV: a line of names, then a line a row; what is None is left empty."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

__all__ = ["csv_text"]


def csv_text(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The text of a table."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow(["" if value is None else value for value in row])
    return text.getvalue()
