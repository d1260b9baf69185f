"""Accelerators: the paper's template of cores, a buffer and HBM; one, or thousands at once; their area and energy.

A tensor core is a systolic array of ``tensor_rows x tensor_cols`` multiply-accumulate units; a vector core has
``vector_lanes`` lanes. With clock f,

    peak flops = 2 * tensor_cores * tensor_rows * tensor_cols * f * rate(dtype)

where ``rate`` is 1 for the data type that the arrays were built for. Each core owns a private L2 whose size the paper
derives from the core's width: max(1 KiB, 16 bytes per multiply-accumulate unit or lane).

`Accelerator` is one chip. `AcceleratorArray` holds many as a structure of arrays, one entry per accelerator and one
array per field, so that a price is computed for all of them in one call.

Silicon area, in closed form (Wang et al., ICML 2024, at 22 nm; `areas_mm2`):

    760.041386 um2 per multiply-accumulate unit + 759.823853 um2 per vector lane
    + an L2 for each tensor core of max(1 KiB, 16 * rows * cols bytes)
    + an L2 for each vector core of max(1 KiB, 16 * lanes bytes)
    + the shared buffer

SRAM areas follow a table. The model has no HBM interface, links or network on chip: its areas compare with each other,
not with real dies.

Energy of computing and of moving bytes (`EnergyModel`):

    dynamic = MACs * mac + vector operations * operation + sum over memory levels of bytes * (energy per byte)
    static  = power per mm2 of modelled area * area * time

SRAM energy per byte grows with capacity. The coefficients and their source (7 nm logic, HBM2) are in
``data/energy.json``; they are estimates, good for comparing accelerators with each other.

Between the points of both tables, and as an extrapolation beyond them, curves are straight on log-log axes (`log_log`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phaze.errors import HardwareError
from phaze.hardware.hardware_numbers import (
    LARGEST_BYTES,
    LARGEST_COUNT,
    LARGEST_REAL,
    SMALLEST_REAL,
    packaged_table,
    positive,
    positive_integer,
)
from phaze.hardware.precision import RATE_NAMES, rate_name

__all__ = [
    "INTEGER_FIELDS",
    "REAL_FIELDS",
    "Accelerator",
    "AcceleratorArray",
    "EnergyModel",
    "MatrixRates",
    "area_mm2",
    "areas_mm2",
    "energy_model",
    "largest",
    "log_log",
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


_UM2_PER_MM2 = 1e6


def area_mm2(accelerator: Accelerator) -> float:
    """Area of one accelerator."""
    return float(areas_mm2(AcceleratorArray.of([accelerator]))[0])


def areas_mm2(accelerators: AcceleratorArray) -> NDArray[np.float64]:
    """Area of each accelerator."""
    table = packaged_table("area")
    macs = accelerators.tensor_rows * accelerators.tensor_cols
    cores = table["tensor_mac_um2"] * (accelerators.tensor_cores * macs) + table["vector_lane_um2"] * (
        accelerators.vector_cores * accelerators.vector_lanes
    )
    tensor_l2 = log_log(table["core_l2_um2_by_bytes"], accelerators.tensor_l2_bytes)
    vector_l2 = log_log(table["core_l2_um2_by_bytes"], accelerators.vector_l2_bytes)
    buffer = log_log(table["buffer_um2_by_bytes"], accelerators.buffer_bytes)
    total: NDArray[np.float64] = (
        cores + accelerators.tensor_cores * tensor_l2 + accelerators.vector_cores * vector_l2 + buffer
    )
    return total / _UM2_PER_MM2


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyModel:
    """Coefficients of the energy model, in joules, watts and bytes.

    A multiply-accumulate costs ``mac_j`` by the names of `MatrixRates`, a lane's operation ``vector_operation_j``, a
    byte of SRAM what the curve through ``sram_points`` (capacity in bytes, joules per byte) says. Leakage and clocks
    draw ``static_w_per_mm2`` of modelled area. ``sources`` says where each coefficient comes from.
    """

    mac_j: dict[str, float]
    vector_operation_j: float
    sram_points: tuple[tuple[float, float], ...]
    hbm_j_per_byte: float
    link_j_per_byte: float
    static_w_per_mm2: float
    sources: dict[str, str]

    def mac_energy_j(self, dtype: str) -> float:
        """Energy of one multiply-accumulate at ``dtype``."""
        return self.mac_j[rate_name(dtype)]

    def sram_j_per_byte(self, capacity_bytes: ArrayLike) -> NDArray[np.float64]:
        """Energy of reading or writing one byte of an SRAM of this capacity."""
        return log_log(self.sram_points, capacity_bytes)

    def static_power_w(self, accelerators: AcceleratorArray) -> NDArray[np.float64]:
        """Power of each accelerator that flows whatever it does."""
        return self.static_w_per_mm2 * areas_mm2(accelerators)


def energy_model() -> EnergyModel:
    """The energy model that is shipped."""
    table = packaged_table("energy")
    single = ("vector_operation_j", "hbm_j_per_byte", "link_j_per_byte", "static_w_per_mm2")
    sram = table["sram_j_per_byte_by_bytes"]
    return EnergyModel(
        mac_j={dtype: cell["value"] for dtype, cell in table["mac_j"].items()},
        sram_points=tuple((capacity, cell["value"]) for capacity, cell in sram),
        **{name: table[name]["value"] for name in single},
        sources={name: table[name]["source"] for name in single}
        | {f"mac_j.{dtype}": cell["source"] for dtype, cell in table["mac_j"].items()}
        | {"sram_j_per_byte": sram[0][1]["source"]},
    )


def log_log(points: Sequence[tuple[float, float]], places: ArrayLike) -> NDArray[np.float64]:
    """The curve through ``points`` (sorted by x, at least two) evaluated at positive ``places``.

    At a point's own x the value is the point's own y, without rounding.
    """
    xs = np.array([x for x, _ in points], dtype=np.float64)
    ys = np.array([y for _, y in points], dtype=np.float64)
    positions = np.asarray(places, dtype=np.float64)
    segment = np.clip(np.searchsorted(xs, positions, side="right") - 1, 0, len(xs) - 2)
    slope = np.log(ys[1:] / ys[:-1]) / np.log(xs[1:] / xs[:-1])
    values: NDArray[np.float64] = ys[segment] * (positions / xs[segment]) ** slope[segment]
    return np.where(positions == xs[-1], ys[-1], values)
