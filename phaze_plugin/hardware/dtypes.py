"""Names of element types, as graphs and people write them, and what they mean to hardware."""

from __future__ import annotations

from phaze.errors import HardwareError

__all__ = ["DTYPE_BYTES", "RATE_NAMES", "dtype_bytes", "rate_name"]

RATE_NAMES = ("bf16", "fp16", "fp32", "fp64", "fp8", "int8")
"""The types that matrix units distinguish."""

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
}

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "fp8": "float8"}
_RATE = {long: short for short, long in _SHORT.items()} | {"int8": "int8", "uint8": "int8"}


def rate_name(dtype: str) -> str:
    """The matrix rate that ``dtype`` runs at; types that matrix units do not know (int32, bool, ...) run as fp32.

    Raises:
        HardwareError: there is no such type.
    """
    return _RATE.get(_long(dtype), "fp32")


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        HardwareError: there is no such type.
    """
    return DTYPE_BYTES[_long(dtype)]


def _long(dtype: str) -> str:
    name = _SHORT.get(dtype, str(dtype))
    if name not in DTYPE_BYTES:
        known = ", ".join((*DTYPE_BYTES, *_SHORT))
        raise HardwareError(f"unknown element type {dtype!r}; known are {known}.")
    return name
