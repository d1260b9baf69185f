"""Energy of computing and of moving bytes.

    dynamic = MACs * mac + vector operations * operation + sum over memory levels of bytes * (energy per byte)
    static  = power per mm2 of modelled area * area * time

SRAM energy per byte grows with capacity, log-log between published points and beyond. The coefficients and their source
(7 nm logic, HBM2) are in ``data/energy.json``; they are estimates, good for comparing accelerators with each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phaze.hardware.area import areas_mm2
from phaze.hardware.array import AcceleratorArray
from phaze.hardware.curve import log_log
from phaze.hardware.dtypes import rate_name
from phaze.hardware.packaged import packaged_table

__all__ = ["EnergyModel", "energy_model"]


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
