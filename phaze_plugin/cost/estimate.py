"""What one op costs on each of many accelerators.

Seconds come twice, as the scheduler needs them: on one core of the op's kind, and spread over all cores of that kind.
The binding term says which part of the time decides:

    compute   the units are busy with useful work, or with padding of the shape to the array
    memory    off-chip traffic over bandwidth exceeds the time on the cores
    fill      more than half of the time on the cores is filling and draining the arrays
    overhead  the calibrated overhead per op exceeds everything else
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["BINDINGS", "Binding", "CoreKind", "Estimate"]


class CoreKind(StrEnum):
    """The cores that an op occupies."""

    TENSOR = "tensor"
    VECTOR = "vector"
    BOTH = "both"
    LINK = "link"
    NONE = "none"


class Binding(StrEnum):
    """The term that decides an op's time."""

    COMPUTE = "compute"
    MEMORY = "memory"
    FILL = "fill"
    OVERHEAD = "overhead"


BINDINGS = tuple(Binding)
"""The meaning of the codes in an `Estimate`'s binding arrays: ``BINDINGS[code]``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimate:
    """Prices of one op (or of a batch of ops, on leading dims) with the accelerators on the last dim.

    Attributes:
        kind: the cores that the op occupies.
        core_s: seconds on one core.
        spread_s: seconds when spread over all cores of its kind; never more than on one core.
        core_binding: what decides ``core_s``, as codes into `BINDINGS`.
        spread_binding: what decides ``spread_s``, as codes into `BINDINGS`.
        core_bytes: off-chip traffic on one core, which owns its share of the buffer.
        spread_bytes: off-chip traffic when spread, with the whole buffer.
        core_energy_j: dynamic energy on one core; static power times the layer's time comes on top.
        spread_energy_j: dynamic energy when spread.
    """

    kind: CoreKind
    core_s: NDArray[np.float64]
    spread_s: NDArray[np.float64]
    core_binding: NDArray[np.uint8]
    spread_binding: NDArray[np.uint8]
    core_bytes: NDArray[np.float64]
    spread_bytes: NDArray[np.float64]
    core_energy_j: NDArray[np.float64]
    spread_energy_j: NDArray[np.float64]
