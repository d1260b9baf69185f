"""Accelerators: the paper's template of tensor cores, vector cores, a shared buffer and HBM; one, or thousands at once.

A tensor core is a systolic array of ``tensor_rows x tensor_cols`` multiply-accumulate units; a vector core has
``vector_lanes`` lanes. With clock f,

    peak flops = 2 * tensor_cores * tensor_rows * tensor_cols * f * rate(dtype)

where ``rate`` is 1 for the data type that the arrays were built for. Each core owns a private L2 whose size the paper
derives from the core's width: max(1 KiB, 16 bytes per multiply-accumulate unit or lane).

`Accelerator` is one chip. `AcceleratorArray` holds many as a structure of arrays, one entry per accelerator and one
array per field, so that a price is computed for all of them in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phaze.errors import HardwareError
from phaze.hardware.element_types import RATE_NAMES, rate_name
from phaze.hardware.field_checks import (
    LARGEST_BYTES,
    LARGEST_COUNT,
    LARGEST_REAL,
    SMALLEST_REAL,
    positive,
    positive_integer,
)

__all__ = [
    "INTEGER_FIELDS",
    "REAL_FIELDS",
    "Accelerator",
    "AcceleratorArray",
    "MatrixRates",
    "largest",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRates:
    """Multiply-accumulate rate of the tensor cores per data type, relative to the arrays' native one.

    The defaults are the paper's space: 16-bit and fewer at full rate, 32-bit at a quarter, 64-bit at a sixteenth.
    """

    bf16: float = 1.0
    fp16: float = 1.0
    tf32: float = 0.25
    fp32: float = 0.25
    fp64: float = 0.0625
    fp8: float = 1.0
    fp6: float = 1.0
    fp4: float = 1.0
    int8: float = 1.0

    def __post_init__(self) -> None:
        """Check every rate."""
        for field in fields(self):
            positive("matrix rates", field.name, getattr(self, field.name))

    def of(self, dtype: str) -> float:
        """The rate of ``dtype``, as `rate_name` maps it."""
        return float(getattr(self, rate_name(dtype)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One chip as the cost model sees it.

    A lane of a vector core does one elementwise operation per cycle. The buffer is shared by all cores; bandwidth
    counts reads and writes together; both core kinds run at the one clock. A field that is zero, negative or not a
    number is a `HardwareError`.
    """

    name: str
    tensor_cores: int
    tensor_rows: int
    tensor_cols: int
    vector_cores: int
    vector_lanes: int
    buffer_bytes: int
    hbm_bytes: int
    hbm_bandwidth_bytes_per_s: float
    clock_hz: float
    rates: MatrixRates = MatrixRates()

    def __post_init__(self) -> None:
        """Check every field and settle its type."""
        if not isinstance(self.name, str) or not self.name:
            raise HardwareError(f"accelerator name is {self.name!r}; expected a non-empty text.")
        for field in INTEGER_FIELDS:
            object.__setattr__(self, field, positive_integer(self.name, field, getattr(self, field), largest(field)))
        for field in REAL_FIELDS:
            object.__setattr__(self, field, positive(self.name, field, getattr(self, field)))
        if not isinstance(self.rates, MatrixRates):
            raise HardwareError(f"{self.name}: rates is {self.rates!r}; expected MatrixRates.")

    def peak_flops_per_s(self, dtype: str | None = None) -> float:
        """Peak matrix flops per second at ``dtype``, or at the arrays' native type when none is given."""
        macs = self.tensor_cores * self.tensor_rows * self.tensor_cols
        return 2.0 * macs * self.clock_hz * (1.0 if dtype is None else self.rates.of(dtype))


INTEGER_FIELDS = (
    "tensor_cores",
    "tensor_rows",
    "tensor_cols",
    "vector_cores",
    "vector_lanes",
    "buffer_bytes",
    "hbm_bytes",
)
REAL_FIELDS = ("hbm_bandwidth_bytes_per_s", "clock_hz")


def largest(field: str) -> int:
    """The largest value that an integer field may have."""
    return LARGEST_BYTES if field.endswith("_bytes") else LARGEST_COUNT


_MINIMUM_L2_BYTES = 1024
_L2_BYTES_PER_UNIT = 16
"""The paper's sizes of a core's private L2: 16 bytes for each unit, and no less than 1 KiB."""


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
        """Check one field and keep a read-only copy; ``kinds`` are numpy's kinds of number that it may have."""
        values = np.array(getattr(self, field), dtype=None if len(self) else np.int64)
        if values.shape[:1] != shape[:1]:
            entries = len(values) if values.ndim else "no"
            raise HardwareError(f"accelerator array: {field} has {entries} entries; expected {shape[0]}.")
        if values.shape != shape or values.dtype.kind not in kinds:
            what = "whole numbers" if kinds == "iu" else "numbers"
            raise HardwareError(
                f"accelerator array: {field} is an array of shape {values.shape} and type {values.dtype}; expected "
                f"{what} of shape {shape}."
            )
        is_possible = (values >= least) & (values <= most)
        wrong = np.flatnonzero(~is_possible.reshape(shape[0], -1).all(axis=1)) if shape[0] else np.array([])
        if wrong.size:
            index = int(wrong[0])
            raise HardwareError(
                f"accelerator array: {field}[{index}] is {values[index]}; expected {least:g} to {most:g}."
            )
        settled = values.astype(np.int64 if kinds == "iu" else np.float64, copy=False)
        settled.setflags(write=False)
        object.__setattr__(self, field, settled)

    def __len__(self) -> int:
        """Number of accelerators."""
        return len(self.names)

    @classmethod
    def of(cls, accelerators: Iterable[Accelerator]) -> AcceleratorArray:
        """The array of single accelerators, in their order."""
        chips = tuple(accelerators)
        columns: dict[str, NDArray[Any]] = {
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
        # Every entry was checked in this array, so that the new one is not checked again: searches take many.
        taken = object.__new__(AcceleratorArray)
        object.__setattr__(taken, "names", tuple(map(self.names.__getitem__, chosen.tolist())))
        for field in (*INTEGER_FIELDS, *REAL_FIELDS, "rates"):
            column = getattr(self, field)[chosen]
            column.setflags(write=False)
            object.__setattr__(taken, field, column)
        return taken

    def renamed(self, names: Sequence[str]) -> AcceleratorArray:
        """The same accelerators under other names."""
        return replace(self, names=tuple(names))

    def at(self, index: int) -> Accelerator:
        """The accelerator at ``index``."""
        fields_of_chip = {field: getattr(self, field)[index].item() for field in (*INTEGER_FIELDS, *REAL_FIELDS)}
        rates = MatrixRates(**dict(zip(RATE_NAMES, map(float, self.rates[index]), strict=True)))
        return Accelerator(name=self.names[index], **fields_of_chip, rates=rates)

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


def _l2_bytes(units: NDArray[np.int64]) -> NDArray[np.int64]:
    sizes: NDArray[np.int64] = np.maximum(_MINIMUM_L2_BYTES, _L2_BYTES_PER_UNIT * units)
    return sizes
