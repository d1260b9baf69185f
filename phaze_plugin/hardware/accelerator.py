"""One accelerator: the paper's template of tensor cores, vector cores, a shared buffer and HBM.

A tensor core is a systolic array of ``tensor_rows x tensor_cols`` multiply-accumulate units; a vector core has
``vector_lanes`` lanes. With clock f,

    peak flops = 2 * tensor_cores * tensor_rows * tensor_cols * f * rate(dtype)

where ``rate`` is 1 for the data type that the arrays were built for.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from phaze.errors import HardwareError
from phaze.hardware.dtypes import rate_name
from phaze.hardware.validate import LARGEST_BYTES, LARGEST_COUNT, positive, positive_integer

__all__ = ["INTEGER_FIELDS", "REAL_FIELDS", "Accelerator", "MatrixRates", "largest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRates:
    """Multiply-accumulate rate of the tensor cores per data type, relative to the arrays' native one.

    The defaults are the paper's space: 16-bit and 8-bit at full rate, 32-bit at a quarter, 64-bit at a sixteenth.
    """

    bf16: float = 1.0
    fp16: float = 1.0
    fp32: float = 0.25
    fp64: float = 0.0625
    fp8: float = 1.0
    int8: float = 1.0

    def __post_init__(self) -> None:
        """Check every rate."""
        for field in fields(self):
            positive("matrix rates", field.name, getattr(self, field.name))

    def of(self, dtype: str) -> float:
        """The rate of ``dtype``, as `rate_name` maps it."""
        return float(getattr(self, rate_name(dtype)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One chip as the cost model sees it.

    A lane of a vector core does one elementwise operation per cycle. The buffer is shared by all cores; bandwidth
    counts reads and writes together; both core kinds run at the one clock. A field that is zero, negative or not a
    number is a `HardwareError`.
    """

    name: str
    tensor_cores: int
    tensor_rows: int
    tensor_cols: int
    vector_cores: int
    vector_lanes: int
    buffer_bytes: int
    hbm_bytes: int
    hbm_bandwidth_bytes_per_s: float
    clock_hz: float
    rates: MatrixRates = MatrixRates()

    def __post_init__(self) -> None:
        """Check every field and settle its type."""
        if not isinstance(self.name, str) or not self.name:
            raise HardwareError(f"accelerator name is {self.name!r}; expected a non-empty text.")
        for field in INTEGER_FIELDS:
            object.__setattr__(self, field, positive_integer(self.name, field, getattr(self, field), largest(field)))
        for field in REAL_FIELDS:
            object.__setattr__(self, field, positive(self.name, field, getattr(self, field)))
        if not isinstance(self.rates, MatrixRates):
            raise HardwareError(f"{self.name}: rates is {self.rates!r}; expected MatrixRates.")

    def peak_flops_per_s(self, dtype: str | None = None) -> float:
        """Peak matrix flops per second at ``dtype``, or at the arrays' native type when none is given."""
        macs = self.tensor_cores * self.tensor_rows * self.tensor_cols
        return 2.0 * macs * self.clock_hz * (1.0 if dtype is None else self.rates.of(dtype))

    def peak_vector_ops_per_s(self) -> float:
        """Elementwise operations per second of all vector cores."""
        return float(self.vector_cores * self.vector_lanes) * self.clock_hz


INTEGER_FIELDS = (
    "tensor_cores",
    "tensor_rows",
    "tensor_cols",
    "vector_cores",
    "vector_lanes",
    "buffer_bytes",
    "hbm_bytes",
)
REAL_FIELDS = ("hbm_bandwidth_bytes_per_s", "clock_hz")


def largest(field: str) -> int:
    """The largest value of an integer field."""
    return LARGEST_BYTES if field.endswith("_bytes") else LARGEST_COUNT
