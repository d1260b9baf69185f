"""Silicon area of accelerators, and the energy of computing and of moving bytes on them.

Area, in closed form (Wang et al., ICML 2024, at 22 nm; `areas_mm2`):

    760.041386 um2 per multiply-accumulate unit + 759.823853 um2 per vector lane
    + an L2 for each tensor core of max(1 KiB, 16 * rows * cols bytes)
    + an L2 for each vector core of max(1 KiB, 16 * lanes bytes)
    + the shared buffer

SRAM areas follow a table. The model has no HBM interface, links or network on chip: its areas compare with each other,
not with real dies.

Energy (`EnergyModel`):

    dynamic = MACs * mac + vector operations * operation + sum over memory levels of bytes * (energy per byte)
    static  = power per mm2 of modelled area * area * time

SRAM energy per byte grows with capacity. The coefficients and their source (7 nm logic, HBM2) are in
``data/energy.json``; they are estimates, good for comparing accelerators with each other.

Between the points of both tables, and as an extrapolation beyond them, curves are straight on log-log axes (`log_log`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phaze.hardware.accelerator import Accelerator, AcceleratorArray
from phaze.hardware.element_types import rate_name
from phaze.hardware.packaged_data import packaged_table

__all__ = [
    "EnergyModel",
    "area_mm2",
    "areas_mm2",
    "energy_model",
    "log_log",
]

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
