"""Equal rows of a table of columns, found without sorting the table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["distinct_rows"]

_LARGEST_TABLE = 2**24


def distinct_rows(columns: Sequence[NDArray[np.generic]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each distinct row of ``columns`` first appears, and for every row which distinct one it is.

    Columns have few different values each, so a row's key is a small integer in mixed radix, and one pass over a table
    of all keys finds the distinct ones. Where the table would be too large, keys are renumbered on the way.
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    size = 1
    for column in columns:
        values = np.unique(column)
        if len(values) > 1:
            key = key * len(values) + np.searchsorted(values, column)
            size *= len(values)
        if size > _LARGEST_TABLE:
            values, key = np.unique(key, return_inverse=True)
            size = len(values)
    first_of_key = np.full(size, -1, dtype=np.int64)
    first_of_key[key[::-1]] = np.arange(len(key) - 1, -1, -1)
    is_used = first_of_key >= 0
    return first_of_key[is_used], (np.cumsum(is_used) - 1)[key]
