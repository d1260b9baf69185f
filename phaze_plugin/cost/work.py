"""What an op asks of an accelerator, in the few terms that the price is made of.

Ops of every kind are first turned into `Work`; prices look at nothing else. The parts run at the same time, each on its
own resource, so the largest decides:

    tensor time   matrix products, one after the other
    vector time   lane operations
    memory time   bytes of the tilings, and bytes that stream through once

`Work` of true views is empty and occupies no cores: the only thing that costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from phaze.cost.estimate import CoreKind
from phaze.cost.sizes import check_amounts, check_sizes
from phaze.cost.traffic import ProductTiling, Tiling
from phaze.errors import CostError
from phaze.hardware.dtypes import dtype_bytes

__all__ = ["VIEW", "Product", "Work", "matmul_work", "vector_work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """``batch`` products of (m, k) with (k, n) at ``dtype``."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str

    def __post_init__(self) -> None:
        """Check that sizes are sizes."""
        check_sizes("matrix product", batch=self.batch, m=self.m, n=self.n, k=self.k)

    @property
    def macs(self) -> float:
        """Multiply-accumulates."""
        return float(self.batch) * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The terms of one op: tilings are the traffic that depends on the buffer, streamed bytes that which does not.

    A work that computes without moving a byte is a `CostError`, since it would be priced too low.
    """

    products: tuple[Product, ...] = ()
    vector_operations: float = 0.0
    tilings: tuple[Tiling, ...] = ()
    streamed_bytes: float = 0.0

    def __post_init__(self) -> None:
        """Check signs, and that what computes also moves bytes."""
        amounts = {"vector_operations": self.vector_operations, "streamed_bytes": self.streamed_bytes}
        check_amounts("work", may_be_zero=True, **amounts)
        computes = bool(self.products) or self.vector_operations > 0
        if computes != (self.compulsory_bytes > 0):
            raise CostError(
                f"work with {len(self.products)} products and {self.vector_operations} vector operations moves "
                f"{self.compulsory_bytes} bytes; an op either computes and moves bytes, or is a view."
            )

    @property
    def kind(self) -> CoreKind:
        """The cores that the op occupies."""
        if self.products:
            return CoreKind.BOTH if self.vector_operations else CoreKind.TENSOR
        return CoreKind.VECTOR if self.vector_operations else CoreKind.NONE

    @property
    def macs(self) -> float:
        """Multiply-accumulates of all products."""
        return sum(product.macs for product in self.products)

    @property
    def compulsory_bytes(self) -> float:
        """Bytes that move however large the buffer is."""
        return sum(tiling.compulsory_bytes for tiling in self.tilings) + self.streamed_bytes


VIEW = Work()
"""An op that renames elements without touching them."""


def matmul_work(
    batch: int, m: int, n: int, k: int, *, dtype: str = "bfloat16", output_dtype: str | None = None
) -> Work:
    """``batch`` dense products of (m, k) with (k, n) at ``dtype``; the result has ``output_dtype``, or the same."""
    check_sizes("matrix product", batch=batch, m=m, n=n, k=k)
    size = dtype_bytes(dtype)
    tiling = ProductTiling(
        batch=batch,
        m=m,
        n=n,
        k=k,
        left_bytes=float(size) * batch * m * k,
        right_bytes=float(size) * batch * k * n,
        output_bytes=float(dtype_bytes(output_dtype or dtype)) * batch * m * n,
        element_bytes=size,
    )
    return Work(products=(Product(batch=batch, m=m, n=n, k=k, dtype=dtype),), tilings=(tiling,))


def vector_work(operations: float, moved_bytes: float) -> Work:
    """Elementwise work of so many lane operations on so many bytes."""
    return Work(vector_operations=operations, streamed_bytes=moved_bytes)
