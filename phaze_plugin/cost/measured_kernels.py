"""Measured libraries on GPUs: seconds of matrix products in waves of tiles, and of collectives by protocols of links.

Products (`ProductKernel`). A product Y[M, N] = X[M, K] W[K, N], B times, with elements of e bytes, on P multiprocessors
that together reach `peak` flops a second in its type. The library cuts Y into tiles of b x c, and K into s parts whose
sums are added up after it:

    tile    = tile_s + 64 ceil(K / (64 s)) max(2 b c P / (arithmetic peak), (b + c) e P / (cache bandwidth))
    waves   = ceil(B ceil(M/b) ceil(N/c) s / P); of a product in n pieces n ceil(B ceil(M/(n b)) ceil(N/c) s / P)
    busy    = the least waves x tile over the tiles and parts of `_TILES` and `_PARTS`
    lasting = busy, and what exceeds `BURST_S` of it at the clock that the power limit leaves: `sustained` of the first
    moved   = bytes of operands and result / (memory bandwidth)
    seconds = launch_s + max(lasting, moved) + (1 - hidden) min(lasting, moved)

Every candidate grows with B, M, N, K, so that a bigger product never costs less; shares are at most 1, so that none is
faster than flops over peak or bytes over bandwidth. What a wave leaves idle is in `waves`, and small tiles are slower
because every multiprocessor draws b + c elements from the shared cache for b c multiply-accumulates. Types without
measurements take the numbers of the nearest one at their own peak: narrow ones those of fp8, all others those of bf16.
A chip
with the multiprocessors of a measured one and another power limit has its arithmetic in the ratio of both (assumed).
Arrays that no library was measured on (TPUs, searched designs) are priced by `phaze.cost.systolic_cycles`. So are the
products inside of fused attention, at the share `attention` of it.

Links (`LinkProtocol`). Inside of a node or rack the library has several protocols (NCCL: LL, LL128, Simple) and takes
the quickest for a size. With n devices, links of b bytes a second and direction, and a collective that sends the share
h of a tensor of S bytes in r steps one after the other (`phaze.cost.collective_prices`), protocol j takes

    start_j + r step_j + h S / (b share_j),     r = n - 1 for all-gather and reduce-scatter, 2 (n - 1) for all-reduce,
                                                1 for all-to-all and for a message, whose pairs talk at once

and the collective the least of these; an all-to-all reaches the share `exchanged` of a protocol's rate. So time grows
with size and count, and the rate grows slowly with size, as it does on the machines. The numbers hold for links of the
bandwidth that they were measured on: a cluster whose innermost links are other ones, rows of a torus and links between
nodes keep latency and bandwidth as the network says them.

``hardware/data/kernels.json`` has the numbers of each chip and type; `benchmarks/kernels.py` fits them to what was
measured and prints the errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from phaze.hardware import Accelerator, AcceleratorArray, InterconnectLevel
from phaze.hardware.hardware_numbers import Table, fraction, non_negative, packaged_table, positive, positive_integer
from phaze.hardware.precision import dtype_bytes

__all__ = [
    "BURST_S",
    "CANDIDATES",
    "LinkProtocol",
    "LinkProtocols",
    "ProductKernel",
    "ProductKernels",
    "kernel_seconds",
    "link_protocols_of",
    "linked_chips",
    "measured_chips",
    "product_kernels_of",
]

_Floats = NDArray[np.float64]

BURST_S = 5e-4
"""Products that are shorter run at the full clock. Of 0.2, 0.5 and 1 ms this fitted the measured products best."""
_TILES = (
    (32, 64),
    (64, 32),
    (64, 64),
    (64, 128),
    (128, 64),
    (128, 128),
    (64, 256),
    (256, 64),
    (128, 192),
    (192, 128),
    (128, 256),
    (256, 128),
    (256, 256),
)
"""Tiles of a result that libraries for GPUs have; the fit is the same with a few more or less."""
_PARTS = (1, 2, 3, 4)
"""Parts of the contracted dim that may run beside each other."""
_DEPTH = 64
"""Elements of the contracted dim that a multiprocessor takes at once."""
CANDIDATES = len(_TILES) * len(_PARTS)
"""Ways to run a product that are compared."""
_GRID = np.array([(rows, cols, parts) for rows, cols in _TILES for parts in _PARTS], dtype=np.float64).T


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKernel:
    """How a chip's library runs products of one element type.

    Attributes:
        launch_s: of every product, before its first and after its last tile.
        arithmetic: share of the peak that multiprocessors reach inside of a tile.
        sustained: share of that clock which is left under the power limit in a product that lasts.
        tile_s: of every tile, to fill its pipeline and to hand over its result.
        cache: bytes a second that the multiprocessors draw from the shared cache, as a multiple of HBM's bandwidth.
        memory: share of HBM's bandwidth that is reached.
        hidden: share of the shorter one of arithmetic and memory traffic that runs behind the longer one.
    """

    launch_s: float
    arithmetic: float
    sustained: float
    tile_s: float
    cache: float
    memory: float
    hidden: float

    def __post_init__(self) -> None:
        """Check ranges."""
        owner = "product kernel"
        for name in ("arithmetic", "sustained", "memory"):
            fraction(owner, name, getattr(self, name))
        for name in ("launch_s", "tile_s"):
            non_negative(owner, name, getattr(self, name))
        positive(owner, "cache", self.cache)
        if self.hidden:
            fraction(owner, "hidden", self.hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKernels:
    """A chip's multiprocessors, how its library runs products on them, and the share that fused attention reaches."""

    multiprocessors: int
    bf16: ProductKernel
    fp8: ProductKernel | None
    attention: float

    def __post_init__(self) -> None:
        """Check ranges."""
        positive_integer("product kernels", "multiprocessors", self.multiprocessors)
        fraction("product kernels", "attention", self.attention)

    def of(self, dtype: str) -> ProductKernel:
        """The measured kernel that stands for products of a type."""
        return self.fp8 if self.fp8 is not None and dtype_bytes(dtype) == 1 else self.bf16

    @property
    def arithmetic(self) -> float:
        """The largest share of the peak that any product reaches."""
        return max(kernel.arithmetic for kernel in (self.bf16, self.fp8) if kernel is not None)

    @property
    def memory(self) -> float:
        """The largest share of HBM's bandwidth that any product reaches."""
        return max(kernel.memory for kernel in (self.bf16, self.fp8) if kernel is not None)


def kernel_seconds(
    kernels: ProductKernels,
    dtype: str,
    sizes: Sequence[_Floats],
    moved_bytes: _Floats,
    chips: AcceleratorArray,
    pieces: _Floats | float = 1.0,
) -> _Floats:
    """Seconds of products of one type on every chip, [product, chip].

    ``sizes`` are columns [product, 1] of B, M, N and K, ``moved_bytes`` one of what operands and results have, and
    ``pieces`` one of how many kernels make each product: they share its rows and are queued at once.
    """
    kernel, count = kernels.of(dtype), float(kernels.multiprocessors)
    arrays = chips.tensor_cores * chips.tensor_rows * chips.tensor_cols
    flops_per_s = 2.0 * arrays * chips.clock_hz * chips.rate(dtype) * kernel.arithmetic
    cached_per_s = kernel.cache * chips.hbm_bandwidth_bytes_per_s
    rows, cols, parts = _GRID
    batch, m, n, k = (size[:, :, None] for size in sizes)
    each = np.asarray(pieces)[..., None]
    waves = each * np.ceil(batch * np.ceil(np.ceil(m / each) / rows) * np.ceil(n / cols) * parts / count)
    depth = _DEPTH * np.ceil(k / (_DEPTH * parts))
    multiplied_s = 2.0 * count * rows * cols / flops_per_s[:, None]
    drawn_s = count * dtype_bytes(dtype) * (rows + cols) / cached_per_s[:, None]
    busy = (waves * (kernel.tile_s + depth * np.maximum(multiplied_s, drawn_s))).min(axis=2)
    lasting = busy + (1 / kernel.sustained - 1) * np.maximum(busy - BURST_S, 0.0)
    moved = moved_bytes / (chips.hbm_bandwidth_bytes_per_s * kernel.memory)
    seconds: _Floats = kernel.launch_s + np.maximum(lasting, moved) + (1 - kernel.hidden) * np.minimum(lasting, moved)
    return seconds


def measured_chips() -> tuple[str, ...]:
    """The chips whose products were measured."""
    return tuple(chip for entry in packaged_table("kernels")["products"].values() for chip in entry["chips"])


def product_kernels_of(accelerator: Accelerator) -> ProductKernels | None:
    """The measured kernels of the chip that has this name, or of one with its multiprocessors; None without any."""
    entries = packaged_table("kernels")["products"].values()
    entry = next((entry for entry in entries if accelerator.name in entry["chips"]), None)
    if entry is None:
        return None
    power = entry.get("relative_power", {}).get(accelerator.name, {"value": 1.0})["value"]
    return ProductKernels(
        multiprocessors=entry["multiprocessors"],
        bf16=_kernel(entry["bf16"], power),
        fp8=_kernel(entry["fp8"], power) if "fp8" in entry else None,
        attention=entry["attention"]["value"],
    )


def _kernel(entry: Table, power: float) -> ProductKernel:
    """The numbers of an entry, which also says how far they are off; arithmetic grows with the power of a chip."""
    kernel = ProductKernel(**{field.name: entry[field.name] for field in fields(ProductKernel)})
    return replace(kernel, arithmetic=min(1.0, power * kernel.arithmetic))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProtocol:
    """One way to run collectives: seconds before the first step, seconds of a step, and the share of the bandwidth."""

    start_s: float
    step_s: float
    share: float

    def __post_init__(self) -> None:
        """Check ranges."""
        non_negative("link protocol", "start_s", self.start_s)
        non_negative("link protocol", "step_s", self.step_s)
        fraction("link protocol", "share", self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProtocols:
    """The protocols of a chip's links, the bandwidth of these, and what all-to-alls reach of a protocol's rate."""

    bandwidth_bytes_per_s: float
    protocols: tuple[LinkProtocol, ...]
    exchanged: float

    def __post_init__(self) -> None:
        """Check ranges."""
        positive("link protocols", "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)
        fraction("link protocols", "exchanged", self.exchanged)
        positive("link protocols", "number of protocols", len(self.protocols))

    @property
    def bulk(self) -> LinkProtocol:
        """The protocol of large tensors: the one with the highest rate."""
        return max(self.protocols, key=lambda protocol: protocol.share)

    def hold_for(self, level: InterconnectLevel) -> bool:
        """Whether links are those that were measured."""
        return not level.links.is_row and level.bandwidth_bytes_per_s == self.bandwidth_bytes_per_s


def linked_chips() -> tuple[str, ...]:
    """The chips whose collectives were measured."""
    return tuple(chip for entry in packaged_table("kernels")["collectives"].values() for chip in entry["chips"])


def link_protocols_of(accelerator: Accelerator) -> LinkProtocols | None:
    """The measured protocols of the chip that has this name; None where there are none."""
    entries = packaged_table("kernels")["collectives"].values()
    entry = next((entry for entry in entries if accelerator.name in entry["chips"]), None)
    if entry is None:
        return None
    return LinkProtocols(
        bandwidth_bytes_per_s=entry["bandwidth_bytes_per_s"],
        protocols=tuple(LinkProtocol(**protocol) for protocol in entry["protocols"]),
        exchanged=entry["exchanged"],
    )
