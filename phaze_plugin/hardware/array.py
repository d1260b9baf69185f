"""Thousands of accelerators as a structure of arrays, one entry per accelerator and one array per field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phaze.errors import HardwareError
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS, Accelerator, MatrixRates
from phaze.hardware.dtypes import RATE_NAMES, rate_name

__all__ = ["AcceleratorArray"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcceleratorArray:
    """The fields of `Accelerator`, each an array of equal length; ``rates`` has a column per field of `MatrixRates`.

    Raises:
        HardwareError: lengths differ, or an entry is zero, negative or not finite (its index is named).
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
        """Check lengths and signs, and make the arrays read-only."""
        for field in (*INTEGER_FIELDS, *REAL_FIELDS, "rates"):
            values = getattr(self, field)
            if len(values) != len(self.names):
                raise HardwareError(
                    f"accelerator array: {field} has {len(values)} entries; expected {len(self.names)}."
                )
            is_possible = np.isfinite(values) & (values > 0)
            wrong = np.flatnonzero(~is_possible.all(axis=tuple(range(1, values.ndim))))
            if wrong.size:
                at = int(wrong[0])
                raise HardwareError(f"accelerator array: {field}[{at}] is {values[at]!r}; expected a number above 0.")
            values.setflags(write=False)

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

    def peak_flops_per_s(self, dtype: str | None = None) -> NDArray[np.float64]:
        """Peak matrix flops per second at ``dtype``, one entry per accelerator."""
        macs = (self.tensor_cores * self.tensor_rows * self.tensor_cols).astype(np.float64)
        return 2.0 * macs * self.clock_hz * (1.0 if dtype is None else self.rate(dtype))
