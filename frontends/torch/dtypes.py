"""Element types of torch."""

from __future__ import annotations

from typing import Any

from phaze.ir import DType

__all__ = ["to_dtype"]

_OTHER_NAMES = {"complex32": DType.FLOAT32, "complex128": DType.COMPLEX64, "uint16": DType.INT16, "uint32": DType.INT32}


def to_dtype(dtype: Any) -> DType:
    """The element type of a torch dtype; those that the IR lacks become one of like size."""
    name = str(dtype).removeprefix("torch.")
    if name.startswith("float8"):
        return DType.FLOAT8
    if name in set(DType):
        return DType(name)
    return _OTHER_NAMES.get(name, DType.INT64 if "64" in name else DType.INT8)
