"""Names of element types, as graphs and people write them, and what they mean to hardware."""

from __future__ import annotations

from phaze.errors import HardwareError, shown
from phaze.ir import DType

__all__ = [
    "RATE_NAMES",
    "dtype_bytes",
    "element_type",
    "rate_name",
]

_RATES = {
    DType.BFLOAT16: "bf16",
    DType.FLOAT16: "fp16",
    DType.FLOAT32: "fp32",
    DType.FLOAT64: "fp64",
    DType.FLOAT8: "fp8",
    DType.INT8: "int8",
}

RATE_NAMES = ("bf16", "fp16", "tf32", "fp32", "fp64", "fp8", "fp6", "fp4", "int8")
"""The types that matrix units distinguish. No tensor is stored in tf32, fp6 or fp4: products round to them."""

_OPERAND_BYTES = {"tf32": 4, "fp6": 1, "fp4": 1}

_BY_NAME = {short: dtype for dtype, short in _RATES.items()} | {dtype.value: dtype for dtype in DType}
_BYTES = {name: dtype.size_bytes for name, dtype in _BY_NAME.items()} | _OPERAND_BYTES


def element_type(dtype: str) -> DType:
    """The type that people call ``dtype``; a `HardwareError` where there is none."""
    if not isinstance(dtype, str) or dtype not in _BY_NAME:
        raise HardwareError(f"unknown element type {shown(dtype)}; known are {', '.join(_BY_NAME)}.")
    return _BY_NAME[dtype]


def rate_name(dtype: str) -> str:
    """The matrix rate that ``dtype`` runs at; types that matrix units do not know (int32, bool, ...) run as fp32."""
    if isinstance(dtype, str) and dtype in RATE_NAMES:
        return dtype
    element = element_type(dtype)
    return _RATES[DType.INT8] if element is DType.UINT8 else _RATES.get(element, _RATES[DType.FLOAT32])


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; of types that products round to, those that an operand takes, rounded up."""
    size = _BYTES.get(dtype) if isinstance(dtype, str) else None
    return element_type(dtype).size_bytes if size is None else size
