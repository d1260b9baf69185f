"""Tensors of a graph: element types and their sizes, shapes, and the role of a graph's arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["LARGEST_TENSOR", "DType", "Role", "Tensor"]

LARGEST_TENSOR = 2**55
"""The most elements of a tensor: its bytes, at up to 8 an element, still fit into 64 bits with room for a few sums."""


class DType(StrEnum):
    """The element type of a tensor (what a chip computes in is `hardware`'s to say)."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8 = "float8"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"
    COMPLEX64 = "complex64"

    @property
    def size_bytes(self) -> int:
        """Bytes per element."""
        return _SIZE_BYTES[self]

    @property
    def is_float(self) -> bool:
        """Whether gradients can flow through this type."""
        return self.value.startswith(("float", "bfloat", "complex"))


_SIZE_BYTES = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.FLOAT8: 1,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.BOOL: 1,
    DType.COMPLEX64: 8,
}


class Role(StrEnum):
    """What a graph's argument is; intermediate tensors have no role."""

    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer_state"
    BATCH = "batch"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value that flows between ops, or an argument of the graph where it has a role.

    A parameter that is frozen is read and not trained: it has no gradient and no optimizer state.
    """

    id: str
    shape: tuple[int, ...]
    dtype: DType
    role: Role | None = None
    is_frozen: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether this is a parameter that an optimizer updates: a float one that is not frozen."""
        return self.role is Role.PARAMETER and self.dtype.is_float and not self.is_frozen

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.elements * self.dtype.size_bytes
