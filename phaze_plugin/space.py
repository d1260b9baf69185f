"""Spaces of accelerators to search.

The paper's space (Wang et al., ICML 2024), all quantities powers of two: 1 to 4096 tensor cores, 1 to 4096 vector
cores, arrays of 2..256 rows and 2..256 columns, as many vector lanes as rows, and a buffer of 2 to 128 MiB; with an
area of at most tpuv4-paper's, and of at least 30 % of it unless there is a single tensor core or a single vector core.
Points inherit tpuv4-paper's clock, rates and HBM bandwidth at any HBM size. There are 29,360.
"""

from __future__ import annotations

import numpy as np

from phaze.hardware.area import area_mm2, areas_mm2
from phaze.hardware.array import AcceleratorArray
from phaze.hardware.presets import preset
from phaze.hardware.validate import positive_integer

__all__ = ["PAPER_HBM_BYTES", "paper"]

_MIB = 2**20
_GIB = 2**30
_LEAST_AREA_SHARE = 0.3

PAPER_HBM_BYTES = (32 * _GIB, 64 * _GIB, 80 * _GIB)
"""The HBM sizes that the paper's search crosses with its accelerators."""


def paper(hbm_bytes: int = PAPER_HBM_BYTES[0]) -> AcceleratorArray:
    """The paper's 29,360 accelerators with ``hbm_bytes`` of HBM, in order of their tuples.

    The tuple is (tensor cores, rows, columns, vector cores, lanes, buffer bytes); it also makes the name.
    """
    hbm_bytes = positive_integer("the paper's space", "hbm_bytes", hbm_bytes)
    cores, sides, buffers = 2 ** np.arange(13), 2 ** np.arange(1, 9), _MIB * 2 ** np.arange(1, 8)
    grid = np.meshgrid(cores, sides, sides, cores, buffers, indexing="ij")
    tensor_cores, rows, cols, vector_cores, buffer_bytes = (axis.ravel().astype(np.int64) for axis in grid)
    baseline = preset("tpuv4-paper").accelerator
    count = len(rows)
    points = AcceleratorArray(
        names=("unnamed",) * count,
        tensor_cores=tensor_cores,
        tensor_rows=rows,
        tensor_cols=cols,
        vector_cores=vector_cores,
        vector_lanes=rows.copy(),
        buffer_bytes=buffer_bytes,
        hbm_bytes=np.full(count, hbm_bytes, dtype=np.int64),
        hbm_bandwidth_bytes_per_s=np.full(count, baseline.hbm_bandwidth_bytes_per_s),
        clock_hz=np.full(count, baseline.clock_hz),
        rates=np.tile(AcceleratorArray.of([baseline]).rates, (count, 1)),
    )
    areas, most = areas_mm2(points), area_mm2(baseline)
    is_single = (tensor_cores == 1) | (vector_cores == 1)
    chosen = points.take(np.flatnonzero((areas <= most) & ((areas >= _LEAST_AREA_SHARE * most) | is_single)))
    return chosen.renamed(point_names(chosen))


def point_names(points: AcceleratorArray) -> tuple[str, ...]:
    """Names of the form ``t8x128x128-v2x128-b128m``: tensor cores, vector cores, buffer in MiB."""
    columns = (
        points.tensor_cores,
        points.tensor_rows,
        points.tensor_cols,
        points.vector_cores,
        points.vector_lanes,
        points.buffer_bytes // _MIB,
    )
    return tuple(
        f"t{tensor}x{rows}x{cols}-v{vector}x{lanes}-b{buffer}m"
        for tensor, rows, cols, vector, lanes, buffer in zip(*(column.tolist() for column in columns), strict=True)
    )
