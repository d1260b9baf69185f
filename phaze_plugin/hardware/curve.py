"""A positive curve through measured points: straight between them on log-log axes, and beyond them as at the end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["log_log"]


def log_log(points: Sequence[tuple[float, float]], at: ArrayLike) -> NDArray[np.float64]:
    """The curve through ``points`` (sorted by x, at least two) evaluated ``at`` positive places.

    At a point's own x the value is the point's own y, without rounding.
    """
    xs = np.array([x for x, _ in points], dtype=np.float64)
    ys = np.array([y for _, y in points], dtype=np.float64)
    places = np.asarray(at, dtype=np.float64)
    segment = np.clip(np.searchsorted(xs, places, side="right") - 1, 0, len(xs) - 2)
    slope = np.log(ys[1:] / ys[:-1]) / np.log(xs[1:] / xs[:-1])
    values: NDArray[np.float64] = ys[segment] * (places / xs[segment]) ** slope[segment]
    return np.where(places == xs[-1], ys[-1], values)
