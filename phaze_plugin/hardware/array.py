"""Thousands of accelerators as a structure of arrays, one entry per accelerator and one array per field.

Each core owns a private L2 whose size the paper derives from the core's width: max(1 KiB, 16 bytes per
multiply-accumulate unit or lane).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phaze.errors import HardwareError
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS, Accelerator, MatrixRates, largest
from phaze.hardware.dtypes import RATE_NAMES, rate_name
from phaze.hardware.validate import LARGEST_REAL, SMALLEST_REAL

__all__ = ["AcceleratorArray"]

_MINIMUM_L2_BYTES = 1024
_L2_BYTES_PER_UNIT = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcceleratorArray:
    """The fields of `Accelerator`, each an array of equal length; ``rates`` has a column per field of `MatrixRates`.

    The arrays are copied and cannot be written. What `Accelerator` refuses is refused here as well, by a
    `HardwareError` that names the index.
    """

    names: tuple[str, ...]
    tensor_cores: NDArray[np.int64]
    tensor_rows: NDArray[np.int64]
    tensor_cols: NDArray[np.int64]
    vector_cores: NDArray[np.int64]
    vector_lanes: NDArray[np.int64]
    buffer_bytes: NDArray[np.int64]
    hbm_bytes: NDArray[np.int64]
    hbm_bandwidth_bytes_per_s: NDArray[np.float64]
    clock_hz: NDArray[np.float64]
    rates: NDArray[np.float64]

    def __post_init__(self) -> None:
        """Check every entry as `Accelerator` does, and keep read-only copies."""
        names = tuple(self.names)
        if not all(isinstance(name, str) and name for name in names):
            raise HardwareError("accelerator array: a name is empty or no text; give every accelerator a name.")
        object.__setattr__(self, "names", names)
        for field in INTEGER_FIELDS:
            self._settle(field, (len(names),), "iu", 1, largest(field))
        for field in REAL_FIELDS:
            self._settle(field, (len(names),), "iuf", SMALLEST_REAL, LARGEST_REAL)
        self._settle("rates", (len(names), len(RATE_NAMES)), "iuf", SMALLEST_REAL, LARGEST_REAL)

    def _settle(self, field: str, shape: tuple[int, ...], kinds: str, least: float, most: float) -> None:
        values = np.array(getattr(self, field), dtype=None if len(self) else np.int64)
        if values.shape[:1] != shape[:1]:
            found = len(values) if values.ndim else "no"
            raise HardwareError(f"accelerator array: {field} has {found} entries; expected {shape[0]}.")
        if values.shape != shape or values.dtype.kind not in kinds:
            what = "whole numbers" if kinds == "iu" else "numbers"
            raise HardwareError(
                f"accelerator array: {field} is an array of shape {values.shape} and type {values.dtype}; expected "
                f"{what} of shape {shape}."
            )
        is_possible = (values >= least) & (values <= most)
        wrong = np.flatnonzero(~is_possible.reshape(shape[0], -1).all(axis=1)) if shape[0] else np.array([])
        if wrong.size:
            at = int(wrong[0])
            raise HardwareError(f"accelerator array: {field}[{at}] is {values[at]}; expected {least:g} to {most:g}.")
        settled = values.astype(np.int64 if kinds == "iu" else np.float64, copy=False)
        settled.setflags(write=False)
        object.__setattr__(self, field, settled)

    def __len__(self) -> int:
        """Number of accelerators."""
        return len(self.names)

    @classmethod
    def of(cls, accelerators: Iterable[Accelerator]) -> AcceleratorArray:
        """Collect single accelerators."""
        chips = tuple(accelerators)
        columns: dict[str, Any] = {
            field: np.array([getattr(chip, field) for chip in chips], dtype=dtype)
            for fields_of_type, dtype in ((INTEGER_FIELDS, np.int64), (REAL_FIELDS, np.float64))
            for field in fields_of_type
        }
        rates = np.array([[getattr(chip.rates, rate) for rate in RATE_NAMES] for chip in chips], dtype=np.float64)
        return cls(
            names=tuple(chip.name for chip in chips), **columns, rates=rates.reshape(len(chips), len(RATE_NAMES))
        )

    def take(self, indices: Sequence[int] | NDArray[np.integer]) -> AcceleratorArray:
        """The accelerators at ``indices``, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        columns = {field: getattr(self, field)[chosen] for field in (*INTEGER_FIELDS, *REAL_FIELDS, "rates")}
        return AcceleratorArray(names=tuple(self.names[int(index)] for index in chosen), **columns)

    def renamed(self, names: Sequence[str]) -> AcceleratorArray:
        """The same accelerators under other names."""
        return replace(self, names=tuple(names))

    def at(self, index: int) -> Accelerator:
        """The accelerator at ``index``."""
        row: dict[str, Any] = {field: getattr(self, field)[index].item() for field in (*INTEGER_FIELDS, *REAL_FIELDS)}
        rates = MatrixRates(**dict(zip(RATE_NAMES, map(float, self.rates[index]), strict=True)))
        return Accelerator(name=self.names[index], **row, rates=rates)

    def rate(self, dtype: str) -> NDArray[np.float64]:
        """Matrix rate at ``dtype``, one entry per accelerator."""
        return self.rates[:, RATE_NAMES.index(rate_name(dtype))]

    @property
    def tensor_l2_bytes(self) -> NDArray[np.int64]:
        """Private L2 of one tensor core."""
        return _l2_bytes(self.tensor_rows * self.tensor_cols)

    @property
    def vector_l2_bytes(self) -> NDArray[np.int64]:
        """Private L2 of one vector core."""
        return _l2_bytes(self.vector_lanes)

    def peak_flops_per_s(self, dtype: str | None = None) -> NDArray[np.float64]:
        """Peak matrix flops per second at ``dtype``, one entry per accelerator."""
        macs = (self.tensor_cores * self.tensor_rows * self.tensor_cols).astype(np.float64)
        return 2.0 * macs * self.clock_hz * (1.0 if dtype is None else self.rate(dtype))


def _l2_bytes(units: NDArray[np.int64]) -> NDArray[np.int64]:
    sizes: NDArray[np.int64] = np.maximum(_MINIMUM_L2_BYTES, _L2_BYTES_PER_UNIT * units)
    return sizes
