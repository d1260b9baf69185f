"""`Estimate`: seconds, bytes and energy of ops on each of many accelerators, and what binds their time.

Seconds come twice, as the scheduler needs them: on one core of the op's kind, and spread over all cores of that kind.
The binding term says which part of the time decides:

    compute   the cores are busy with the op's work and with padding its shape to the array
    memory    off-chip traffic over bandwidth exceeds the time on the cores
    fill      the time on the cores would more than halve if arrays filled and drained in no time
    overhead  the calibrated overhead per op exceeds everything else
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["BINDINGS", "Binding", "CoreKind", "Estimate", "stack_estimates", "total_estimate"]


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
    """Prices of several ops on several accelerators: every array is indexed [op, accelerator].

    ``kinds`` are the cores that each op occupies. Arrays called ``core_*`` are for one core, which owns its share of
    the buffer; ``spread_*`` for all cores of the op's kind with the whole buffer, never slower. Bindings are codes into
    `BINDINGS` and say what decides the seconds; bytes are off-chip traffic; energy is dynamic, static power times the
    layer's time comes on top.
    """

    kinds: tuple[CoreKind, ...]
    core_s: NDArray[np.float64]
    spread_s: NDArray[np.float64]
    core_binding: NDArray[np.uint8]
    spread_binding: NDArray[np.uint8]
    core_bytes: NDArray[np.float64]
    spread_bytes: NDArray[np.float64]
    core_energy_j: NDArray[np.float64]
    spread_energy_j: NDArray[np.float64]

    @classmethod
    def empty(cls, kinds: Sequence[CoreKind], accelerators: int) -> Estimate:
        """Room for the prices of ops of these kinds, all zero."""
        shape = (len(kinds), accelerators)
        arrays = {name: np.zeros(shape, np.uint8 if name.endswith("binding") else np.float64) for name in _ARRAYS}
        return cls(kinds=tuple(kinds), **arrays)

    def __len__(self) -> int:
        """Number of ops."""
        return len(self.kinds)

    def gather(self, sources: NDArray[np.int64], target: Estimate, rows: Sequence[int]) -> None:
        """Write this estimate's ops into ``rows`` of ``target``, whose i-th accelerator is our ``sources[i]``-th."""
        for name in _ARRAYS:
            values, written = getattr(self, name), getattr(target, name)
            if len(rows) == 1:  # of many accelerators, which are not copied twice
                np.take(values[0], sources, out=written[rows[0]], mode="clip")
            else:
                written[list(rows)] = values[:, sources]

    def repeat(self, times: Sequence[int]) -> None:
        """Take each op so many times, one after the other."""
        if any(count > 1 for count in times):
            for name in _ARRAYS:
                if not name.endswith("binding"):
                    getattr(self, name)[...] *= np.array(times, np.float64)[:, None]

    def rows(self, ops: Sequence[int]) -> Estimate:
        """The estimates of the ops at these rows, in this order."""
        arrays = {name: getattr(self, name)[list(ops)] for name in _ARRAYS}
        return Estimate(kinds=tuple(self.kinds[op] for op in ops), **arrays)

    def binding(self, op: int = 0, accelerator: int = 0) -> Binding:
        """What decides the spread time of one op on one accelerator."""
        return BINDINGS[int(self.spread_binding[op, accelerator])]


_ARRAYS = tuple(field.name for field in fields(Estimate))[1:]


def stack_estimates(estimates: Sequence[Estimate]) -> Estimate:
    """The ops of several estimates on the same accelerators, one after the other."""
    arrays = {name: np.concatenate([getattr(estimate, name) for estimate in estimates]) for name in _ARRAYS}
    return Estimate(kinds=tuple(kind for estimate in estimates for kind in estimate.kinds), **arrays)


def total_estimate(estimate: Estimate) -> Estimate:
    """All ops of an estimate one after the other, as one op; the longest of them says what binds."""
    arrays = {name: getattr(estimate, name).sum(axis=0, keepdims=True) for name in _ARRAYS if "binding" not in name}
    for name in ("core", "spread"):
        longest = getattr(estimate, f"{name}_s").argmax(axis=0)[None]
        arrays[f"{name}_binding"] = np.take_along_axis(getattr(estimate, f"{name}_binding"), longest, axis=0)
    kinds = set(estimate.kinds) - {CoreKind.NONE}
    kind = kinds.pop() if len(kinds) == 1 else CoreKind.BOTH if kinds else CoreKind.NONE
    return Estimate(kinds=(kind,), **arrays)
