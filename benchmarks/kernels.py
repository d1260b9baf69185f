"""Measured matrix products and collectives of GPUs against priced ones, and the fit of the numbers that are shipped.

    python benchmarks/kernels.py --data DIR [--write] [--buckets]

DIR has ``aiconfigurator_nccl.csv``, of which ``collectives.py`` says more, and ``aiconfigurator_gemm_m1024up.csv``
(both ai-dynamo/aiconfigurator, Apache-2.0): milliseconds of products with m rows of activations, n columns and k
contracted elements, results in two bytes. Measurements of fp8 begin with activations of two bytes and include their
cast (m k elements read in two bytes and written in one, at a share of the bandwidth that is fitted and told as "cast"),
which is no part of a product's price.

For each chip and type: rows, the mean error of what is shipped, its bias and 95th percentile, the mean error with every
fifth of the pairs (n, k) left out of the fit in turn, and beside it that of the best single efficiency (flops over a
share of the peak, or bytes over bandwidth, whichever is longer; with the same cast and the mean error made least). For
each system and collective the same from 1 MiB on, and the error of ideal links.

``--write`` fits everything to all its rows and writes ``hardware/data/kernels.json``.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
from collectives import TABLE as COLLECTIVES_TABLE
from collectives import (
    fitted_collectives,
    positive_number,
    print_left_out,
    read_collectives,
    show_collectives,
)
from numpy.typing import NDArray
from scipy.optimize import least_squares

from phaze.cost.measured_kernels import (
    ProductKernel,
    ProductKernels,
    kernel_seconds,
    link_protocols_of,
    product_kernels_of,
)
from phaze.hardware import AcceleratorArray, preset
from phaze.hardware.hardware_numbers import packaged_table

Floats = NDArray[np.float64]
TARGET = Path(__file__).parent.parent / "phaze_plugin" / "hardware" / "data" / "kernels.json"
TABLE = "aiconfigurator_gemm_m1024up.csv"
TYPES = {"bfloat16": "bf16", "fp8": "fp8"}
FOLDS = 5
CAST_BYTES = 3
"""Per activation: two are read, one is written."""
OUTPUT_BYTES = 2
RARE_ERROR = 0.05
"""Residuals beyond this count less than their square (soft L1), so that odd kernels do not decide a fit."""
STARTS = ((4e-6, 0.75, 0.9, 1e-7, 4, 0.7, 0.7, 0.6), (2e-6, 0.9, 0.8, 1e-6, 6, 0.9, 0.2, 0.4))
LEAST = (5e-7, 0.3, 0.5, 1e-9, 0.5, 0.2, 0.001, 0.1)
MOST = (5e-5, 1.0, 0.999, 1e-5, 20.0, 1.0, 0.99, 1.0)
"""Starts and ranges of launch_s, arithmetic, sustained, tile_s, cache, memory, hidden and cast."""


@dataclass(frozen=True)
class Chip:
    """A GPU of the table: presets with its multiprocessors, how many these are, and what fused attention reaches.

    `relative_power` has the presets with another power limit, as a multiple of that of the chip that was measured.
    """

    presets: tuple[str, ...]
    multiprocessors: int
    attention: float
    attention_source: str
    relative_power: Mapping[str, float] = field(default_factory=dict)


_FLASH_2 = "FlashAttention-2 (arXiv:2307.08691): 50 to 73 % of the peak on A100"
_FLASH_3 = "between FlashAttention-2's 35 % and FlashAttention-3's 75 % of the peak on H100 (arXiv:2407.08608)"
CHIPS = {
    "NVIDIA A100-SXM4-80GB": Chip(("a100-80gb", "a100-40gb"), 108, 0.6, _FLASH_2),
    "NVIDIA H100 80GB HBM3": Chip(("h100", "h800", "gh200"), 132, 0.55, _FLASH_3),
    "NVIDIA H200": Chip(("h200",), 132, 0.55, _FLASH_3),
    "NVIDIA B200": Chip(("b200", "b300"), 148, 0.55, "assumed as on H100"),
    "NVIDIA GB200": Chip(("gb200", "gb300"), 152, 0.55, "assumed as on H100", relative_power={"gb300": 1.167}),
}
_POWER_SOURCE = "assumed: 1400 W instead of 1200 W, and products of both are limited by power"


@dataclass(frozen=True, eq=False)
class Products:
    """Measured products of one chip and type: columns m, n, k, and seconds."""

    chip: Chip
    dtype: str
    sizes: Floats
    seconds: Floats

    @property
    def has_cast(self) -> bool:
        return self.dtype == "fp8"

    @property
    def array(self) -> AcceleratorArray:
        return AcceleratorArray.of([preset(self.chip.presets[0]).accelerator])

    @property
    def moved_bytes(self) -> Floats:
        m, n, k = self.sizes.T
        element = 1 if self.dtype == "fp8" else 2
        return element * (m * k + n * k) + OUTPUT_BYTES * m * n

    def cast_s(self, share: float) -> Floats | float:
        """Seconds of casting the activations, where they are cast."""
        bandwidth = float(self.array.hbm_bandwidth_bytes_per_s[0])
        return CAST_BYTES * self.sizes[:, 0] * self.sizes[:, 2] / (bandwidth * share) if self.has_cast else 0.0

    def priced(self, kernel: ProductKernel, cast: float) -> Floats:
        """Seconds that the kernel says."""
        kernels = ProductKernels(
            multiprocessors=self.chip.multiprocessors, bf16=kernel, fp8=kernel, attention=self.chip.attention
        )
        m, n, k = self.sizes.T[:, :, None]
        sizes = (np.ones_like(m), m, n, k)
        seconds = kernel_seconds(kernels, self.dtype, sizes, self.moved_bytes[:, None], self.array)[:, 0]
        return seconds + self.cast_s(cast)

    def part(self, chosen: NDArray[np.bool_]) -> Products:
        return replace(self, sizes=self.sizes[chosen], seconds=self.seconds[chosen])

    @property
    def folds(self) -> NDArray[np.int64]:
        """Which fifth a row belongs to: rows that differ in m only stay together."""
        n, k = self.sizes[:, 1].astype(np.int64), self.sizes[:, 2].astype(np.int64)
        return (n * 7919 + k * 104729) // 32 % FOLDS


def read_products(path: Path) -> list[Products]:
    """The table by chip and type; rows of other GPUs or types, and such that cannot be read, are counted and named."""
    groups: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    left_out: Counter[str] = Counter()
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            gpu, dtype = row.get("gpu") or "", row.get("dtype") or ""
            try:
                m, n, k, latency_ms = (positive_number(row, name) for name in ("m", "n", "k", "latency_ms"))
            except ValueError as error:
                left_out[str(error)] += 1
                continue
            if gpu in CHIPS and dtype in TYPES:
                groups[gpu, TYPES[dtype]].append([m, n, k, latency_ms / 1e3])
            else:
                left_out[f"{gpu or 'no GPU'} with {dtype or 'no type'} is not fitted"] += 1
    print_left_out(path.name, left_out)
    measured = [(CHIPS[gpu], dtype, np.array(rows)) for (gpu, dtype), rows in groups.items()]
    return [Products(chip, dtype, rows[:, :3], rows[:, 3]) for chip, dtype, rows in measured]


def kernel_of(point: Floats) -> tuple[ProductKernel, float]:
    """The kernel and the cast's share at a point of logarithms."""
    *numbers, cast = (float(f"{value:.3g}") for value in np.exp(point))
    names = [field.name for field in fields(ProductKernel)]
    return ProductKernel(**dict(zip(names, numbers, strict=True))), cast


def fit(products: Products) -> tuple[ProductKernel, float]:
    """The best of the fits from all starts."""
    measured = np.log(products.seconds)
    names = [field.name for field in fields(ProductKernel)]

    def residuals(point: Floats) -> Floats:
        *numbers, cast = np.exp(point)
        kernel = ProductKernel(**dict(zip(names, numbers, strict=True)))
        return np.log(products.priced(kernel, cast)) - measured

    bounds = np.log(LEAST), np.log(MOST)
    fits = [
        least_squares(
            residuals, np.log(start), bounds=bounds, loss="soft_l1", f_scale=RARE_ERROR, x_scale=0.1, diff_step=1e-3
        )
        for start in STARTS
    ]
    return kernel_of(min(fits, key=lambda result: result.cost).x)


def left_out_error(products: Products) -> float:
    """The mean error of every row when its fifth of the pairs (n, k) is left out of the fit."""
    errors = []
    for fold in range(FOLDS):
        is_out = products.folds == fold
        out = products.part(is_out)
        errors += list(np.abs(out.priced(*fit(products.part(~is_out))) / out.seconds - 1))
    return float(np.mean(errors))


def constant_error(products: Products, cast: float) -> tuple[float, float]:
    """The mean error of flops over a share of the peak or bytes over bandwidth, at the best share; and the share."""
    chip = preset(products.chip.presets[0]).accelerator
    flops_s = 2 * products.sizes.prod(axis=1) / chip.peak_flops_per_s(products.dtype)
    bytes_s = products.moved_bytes / chip.hbm_bandwidth_bytes_per_s

    def error(share: float) -> float:
        priced = np.maximum(flops_s / share, bytes_s) + products.cast_s(cast)
        return float(np.abs(priced / products.seconds - 1).mean())

    return min((error(share), float(share)) for share in np.linspace(0.3, 1.0, 71))


def show(products: Products, kernel: ProductKernel, cast: float, out: float, buckets: bool) -> None:
    """One line, and by the duration of products where that is asked for."""
    errors = products.priced(kernel, cast) / products.seconds - 1
    size = np.abs(errors)
    constant, share = constant_error(products, cast)
    print(
        f"{products.chip.presets[0]:10s} {products.dtype:5s} {len(errors):5d} rows: mean error {size.mean():5.1%}, "
        f"bias {errors.mean():+6.1%}, 95th percentile {np.percentile(size, 95):5.1%}, left out {out:5.1%}; "
        f"one efficiency ({share:.2f}) {constant:5.1%}"
    )
    if buckets:
        powers = np.floor(np.log10(products.seconds))
        for power in np.unique(powers):
            chosen = powers == power
            print(
                f"    from 1e{power:.0f} s: {chosen.sum():5d} rows, mean error {size[chosen].mean():5.1%}, "
                f"bias {errors[chosen].mean():+6.1%}"
            )


def entry(products: Products, kernel: ProductKernel, cast: float, out: float) -> dict[str, object]:
    """What is shipped of a chip and type."""
    errors = products.priced(kernel, cast) / products.seconds - 1
    told = {
        "rows": len(errors),
        "mean_error": float(np.abs(errors).mean()),
        "bias": float(errors.mean()),
        "left_out": out,
    }
    casts = {"cast": cast} if products.has_cast else {}
    return {**asdict(kernel), **casts, **{name: round(value, 4) for name, value in told.items()}}


def shipped(products: Products) -> tuple[ProductKernel, float, float]:
    """The shipped kernel of a chip and type, its cast's share, and its error left out."""
    kernels = product_kernels_of(preset(products.chip.presets[0]).accelerator)
    assert kernels is not None
    table = packaged_table("kernels")["products"][products.chip.presets[0]][products.dtype]
    return kernels.of(products.dtype), table.get("cast", 1.0), table["left_out"]


def fitted(tables: Sequence[Products], *, buckets: bool) -> dict[str, dict[str, object]]:
    """Every chip with its fitted types, printed on the way."""
    chips: dict[str, dict[str, object]] = {}
    for products in tables:
        kernel, cast = fit(products)
        out = left_out_error(products)
        show(products, kernel, cast, out, buckets)
        chip = products.chip
        powers = {
            name: {"value": power, "source": _POWER_SOURCE, "verified": False}
            for name, power in chip.relative_power.items()
        }
        record = chips.setdefault(
            chip.presets[0],
            {
                "chips": list(chip.presets),
                **({"relative_power": powers} if powers else {}),
                "multiprocessors": chip.multiprocessors,
                "attention": {"value": chip.attention, "source": chip.attention_source, "verified": False},
            },
        )
        record[products.dtype] = entry(products, kernel, cast, out)
    return chips


def main() -> None:
    """Print, and write where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {TABLE} and {COLLECTIVES_TABLE}")
    parser.add_argument("--write", action="store_true", help="fit and write what is shipped")
    parser.add_argument("--buckets", action="store_true", help="errors by the duration of products, too")
    arguments = parser.parse_args()
    tables, collectives = read_products(arguments.data / TABLE), read_collectives(arguments.data / COLLECTIVES_TABLE)
    if arguments.write:
        record = {
            "version": 1,
            "origin": "ai-dynamo/aiconfigurator (Apache-2.0): measured matrix products with m of at least "
            "1,024; NCCL's collectives on 2, 4 and 8 GPUs",
            "products": fitted(tables, buckets=arguments.buckets),
            "collectives": fitted_collectives(collectives),
        }
        TARGET.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return
    for products in tables:
        chip = products.chip.presets[0]
        if products.dtype in packaged_table("kernels")["products"].get(chip, {}):
            show(products, *shipped(products), buckets=arguments.buckets)
        else:
            print_left_out(TABLE, {f"products of {chip} in {products.dtype} were not fitted": len(products.seconds)})
    for rows in collectives:
        links = link_protocols_of(preset(rows.chips[0]).accelerator)
        assert links is not None
        show_collectives(rows, links, packaged_table("kernels")["collectives"][rows.chips[0]]["left_out"])


if __name__ == "__main__":
    main()
