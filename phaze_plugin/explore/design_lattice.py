"""A space with its memories as a numbered list of designs, for methods that draw designs instead of proving them.

A row is one accelerator with one memory. Every field that varies over the space has a *place* in each row: the position
of its value among all values of the field. `features` are the numbers that an architect would look at first, as a
domain-aware optimiser sees a design (Sakhuja et al., "Leveraging Domain Information for the Efficient Automated Design
of Deep Learning Accelerators", HPCA 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from phaze.hardware import AcceleratorArray
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS

__all__ = ["DesignLattice"]


class DesignLattice:
    """The designs of a space by row; each is taken once.

    Attributes:
        size: how many designs there are.
        highest: the largest place of each field that varies, by its name.
    """

    def __init__(self, points: AcceleratorArray, hbm_bytes: Sequence[int]) -> None:
        self._points, self._sizes = points, tuple(hbm_bytes)
        self.size = len(points) * len(self._sizes)
        columns = {name: getattr(points, name) for name in (*INTEGER_FIELDS, *REAL_FIELDS) if name != "hbm_bytes"}
        columns = {name: np.repeat(column, len(self._sizes)) for name, column in columns.items()}
        columns["hbm_bytes"] = np.tile(self._sizes, len(points))
        places = {name: np.unique(column, return_inverse=True)[1] for name, column in columns.items()}
        self.highest = {name: int(column.max()) for name, column in places.items() if column.any()}
        self._places = np.array([places[name] for name in self.highest]).reshape(len(self.highest), self.size)
        self._shares = np.array([[1 / high] for high in self.highest.values()]).reshape(-1, 1)
        self._is_taken = np.zeros(self.size, dtype=bool)

    @property
    def left(self) -> int:
        """How many designs were not taken yet."""
        return int((~self._is_taken).sum())

    def design(self, row: int) -> tuple[int, int]:
        """The accelerator's position in the space, and its memory in bytes."""
        return row // len(self._sizes), self._sizes[row % len(self._sizes)]

    def place(self, row: int) -> dict[str, int]:
        """The place of every field that varies."""
        return dict(zip(self.highest, self._places[:, row].tolist(), strict=True))

    def take_nearest(self, wanted: Mapping[str, int]) -> int:
        """The row nearest to some places, of those that were not taken before."""
        away = np.abs(self._places - np.array([[wanted[name]] for name in self.highest]).reshape(-1, 1))
        row = int(np.where(self._is_taken, np.inf, (away * self._shares).sum(axis=0)).argmin())
        self.take([row])
        return row

    def take(self, rows: Sequence[int]) -> None:
        """Mark rows as taken."""
        self._is_taken[list(rows)] = True

    def draw(self, count: int, generator: np.random.Generator) -> list[int]:
        """Rows at random that were not taken, each at most once and as many as there are; they stay as they are."""
        free = np.flatnonzero(~self._is_taken)
        return [int(row) for row in generator.choice(free, min(count, len(free)), replace=False)]

    def features(self, rows: Sequence[int]) -> NDArray[np.float64]:
        """Domain features, a row for each design, as base-2 logarithms because sizes differ by factors.

        They are: all multiply-accumulate units, all lanes, tensor cores, vector cores, the buffer, the aspect of an
        array (rows over columns), HBM bandwidth, clock and memory.
        """
        chips = self._points.take([self.design(row)[0] for row in rows])
        columns = (
            chips.tensor_cores * chips.tensor_rows * chips.tensor_cols,
            chips.vector_cores * chips.vector_lanes,
            chips.tensor_cores,
            chips.vector_cores,
            chips.buffer_bytes,
            chips.tensor_rows / chips.tensor_cols,
            chips.hbm_bandwidth_bytes_per_s,
            chips.clock_hz,
            np.array([self.design(row)[1] for row in rows]),
        )
        return np.log2(np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1))
