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

RATE_NAMES = tuple(_RATES.values())
"""The types that matrix units distinguish."""

_BY_NAME = {short: dtype for dtype, short in _RATES.items()} | {dtype.value: dtype for dtype in DType}


def element_type(dtype: str) -> DType:
    """The type that people call ``dtype``; a `HardwareError` where there is none."""
    if not isinstance(dtype, str) or dtype not in _BY_NAME:
        raise HardwareError(f"unknown element type {shown(dtype)}; known are {', '.join(_BY_NAME)}.")
    return _BY_NAME[dtype]


def rate_name(dtype: str) -> str:
    """The matrix rate that ``dtype`` runs at; types that matrix units do not know (int32, bool, ...) run as fp32."""
    element = element_type(dtype)
    return _RATES[DType.INT8] if element is DType.UINT8 else _RATES.get(element, _RATES[DType.FLOAT32])


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element."""
    return element_type(dtype).size_bytes
