"""Silicon area of an accelerator, in closed form (Wang et al., ICML 2024, at 22 nm):

    760.041386 um2 per multiply-accumulate unit + 759.823853 um2 per vector lane
    + an L2 for each tensor core of max(1 KiB, 16 * rows * cols bytes)
    + an L2 for each vector core of max(1 KiB, 16 * lanes bytes)
    + the shared buffer

where SRAM areas follow a table, log-log between its points (and, as an extrapolation, beyond them). The model has no
HBM interface, links or network on chip: its areas compare with each other, not with real dies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phaze.hardware.accelerator import Accelerator
from phaze.hardware.array import AcceleratorArray
from phaze.hardware.curve import log_log
from phaze.hardware.packaged import packaged_table

__all__ = ["area_mm2", "areas_mm2"]

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
