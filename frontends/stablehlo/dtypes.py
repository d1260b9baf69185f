"""Element types of MLIR."""

from __future__ import annotations

from phaze.ir import DType

__all__ = ["to_dtype"]

_NAMES = {
    "f64": DType.FLOAT64,
    "f32": DType.FLOAT32,
    "tf32": DType.FLOAT32,
    "bf16": DType.BFLOAT16,
    "f16": DType.FLOAT16,
    "i1": DType.BOOL,
    "ui8": DType.UINT8,
}
_BY_BITS = {64: DType.INT64, 32: DType.INT32, 16: DType.INT16, 8: DType.INT8}


def to_dtype(element: str) -> DType:
    """The element type that MLIR writes so; those that the IR lacks become one of like size."""
    if element in _NAMES:
        return _NAMES[element]
    if element.startswith("complex"):
        return DType.COMPLEX64
    if element.startswith("f"):
        return DType.FLOAT8
    digits = "".join(letter for letter in element if letter.isdigit())
    return _BY_BITS.get(int(digits) if digits else 8, DType.INT8)
