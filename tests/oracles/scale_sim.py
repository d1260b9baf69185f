"""Cycles of a matrix product on one systolic array, as SCALE-Sim counts them.

weight-stationary (ws)  (2R + C + M - 2) * ceil(K/R) * ceil(N/C) - 1
input-stationary  (is)  (2R + C + N - 2) * ceil(K/R) * ceil(M/C) - 1
output-stationary (os)  (R + C + K - 2) * ceil(M/R) * ceil(N/C) - 1
"""

from __future__ import annotations

__all__ = ["scale_sim_cycles"]


def scale_sim_cycles(dataflow: str, *, m: int, n: int, k: int, rows: int, cols: int) -> int:
    """Compute cycles of one product on one array, as SCALE-Sim counts them."""
    forms = {"ws": (k, n, m, 2 * rows), "is": (k, m, n, 2 * rows), "os": (m, n, k, rows)}
    across, along, stream, fill = forms[dataflow]
    return (fill + cols + stream - 2) * -(-across // rows) * -(-along // cols) - 1
