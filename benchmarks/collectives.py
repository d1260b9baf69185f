"""Measured collectives inside of nodes and racks of GPUs, priced, and the fit of the protocols that are shipped.

Read by ``benchmarks/kernels.py``. The table ``aiconfigurator_nccl.csv`` (ai-dynamo/aiconfigurator, Apache-2.0) has
seconds of NCCL's collectives over 2, 4 and 8 GPUs, by the number of elements of the whole tensor, of several versions
of NCCL. For each system and collective: rows from 1 MiB on, mean error, bias and 95th percentile of the price, and the
mean error of the ideal links and of all rows. Left out of the fit are every fifth size in turn, with all rows of it.
"""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from phaze.cost import IDEAL, Calibration, Collective, price_collective
from phaze.cost.measured_kernels import LinkProtocol, LinkProtocols
from phaze.hardware import Cluster, parse_cluster
from phaze.hooks import PluginManager

Floats = NDArray[np.float64]
TABLE = "aiconfigurator_nccl.csv"
SYSTEMS = {
    "a100_sxm": ("a100-80gb", "a100-40gb"),
    "h100_sxm": ("h100",),
    "h200_sxm": ("h200",),
    "b200_sxm": ("b200",),
    "b300_sxm": ("b300",),
    "gb200": ("gb200",),
    "gb300": ("gb300",),
}
"""Systems with NVLink, and the chips that they are. Others (PCIe cards) are not fitted: what they reach depends on the
host."""
COLLECTIVES = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
}
ELEMENT_BYTES = {"half": 2, "int8": 1}
LARGE_BYTES = 2**20
FOLDS = 5
RARE_ERROR = 0.05
PROTOCOLS = 3
STARTS = (
    (8e-6, 1e-6, 0.15, 1.5e-5, 2e-6, 0.4, 4e-5, 3e-6, 0.85, 0.9),
    (8e-6, 1e-6, 0.3, 2.5e-5, 2e-6, 0.65, 1e-4, 3e-6, 0.9, 0.9),
)
"""Starts of start_s, step_s and share of each protocol, and of what all-to-alls reach."""
LEAST_SECONDS, LEAST_SHARE = 1e-9, 1e-3


@dataclass(frozen=True, eq=False)
class Collectives:
    """Measured collectives of one system: kind, devices, bytes and seconds of each row."""

    system: str
    kinds: NDArray[np.str_]
    devices: NDArray[np.int64]
    sizes: Floats
    seconds: Floats
    clusters: Mapping[int, Cluster]

    @property
    def chips(self) -> tuple[str, ...]:
        return SYSTEMS[self.system]

    @property
    def bandwidth_bytes_per_s(self) -> float:
        return next(iter(self.clusters.values())).levels[0].bandwidth_bytes_per_s

    @property
    def is_large(self) -> NDArray[np.bool_]:
        return self.sizes >= LARGE_BYTES

    @property
    def folds(self) -> NDArray[np.int64]:
        """Which fifth a row belongs to: rows of one size stay together."""
        return np.unique(self.sizes, return_inverse=True)[1].ravel() % FOLDS

    def priced(self, calibration: Calibration) -> Floats:
        """Seconds that the price of a collective says."""
        priced = np.zeros(len(self.sizes))
        for kind in np.unique(self.kinds):
            for count, cluster in self.clusters.items():
                rows = (self.kinds == kind) & (self.devices == count)
                if rows.any():
                    estimate = price_collective(str(kind), self.sizes[rows], cluster, count, calibration=calibration)
                    priced[rows] = estimate.seconds
        return priced

    def part(self, chosen: NDArray[np.bool_]) -> Collectives:
        names = ("kinds", "devices", "sizes", "seconds")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})


def read_collectives(path: Path) -> list[Collectives]:
    """The table by system; rows that are not fitted, and such that cannot be read, are counted and named."""
    plugins, groups = PluginManager.load(), defaultdict[str, list[tuple[str, int, float, float]]](list)
    left_out: Counter[str] = Counter()
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            system, kind, dtype = (row.get(name) or "" for name in ("system", "op", "dtype"))
            try:
                elements, latency_ms = (positive_number(row, name) for name in ("message_size", "latency_ms"))
                devices = int(positive_number(row, "gpus"))
            except ValueError as error:
                left_out[str(error)] += 1
                continue
            if system not in SYSTEMS:
                left_out[f"system {system!r}: cards on PCIe, whose rate is the host's, or unknown"] += 1
            elif kind not in COLLECTIVES or dtype not in ELEMENT_BYTES or devices < 2:
                left_out[f"{kind!r} of {dtype!r} on {devices} GPUs is not fitted"] += 1
            else:
                size = elements * ELEMENT_BYTES[dtype]
                groups[system].append((str(COLLECTIVES[kind]), devices, size, latency_ms / 1e3))
    print_left_out(path.name, left_out)
    systems = []
    for system, rows in groups.items():
        kinds, counts, sizes, seconds = (np.array(column) for column in zip(*rows, strict=True))
        clusters = {
            count: parse_cluster(f"{SYSTEMS[system][0]}:{count}", plugins) for count in np.unique(counts).tolist()
        }
        systems.append(Collectives(system, kinds, counts, sizes, seconds, clusters))
    return systems


def positive_number(row: Mapping[str, str | None], name: str) -> float:
    """The number of a cell; raises ValueError for what is no finite number above 0."""
    try:
        value = float(row.get(name) or "")
    except ValueError:
        raise ValueError(f"{name} is {row.get(name)!r}") from None
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {row.get(name)!r}")
    return value


def print_left_out(table: str, reasons: Mapping[str, int]) -> None:
    """How many rows of a table are not scored, and why."""
    for reason, count in reasons.items():
        print(f"{table}: {count} rows not scored: {reason}")


def protocols_at(point: Floats, bandwidth_bytes_per_s: float) -> LinkProtocols:
    """The protocols at a point of logarithms."""
    numbers = [float(f"{value:.4g}") for value in np.exp(point)]
    protocols = [
        LinkProtocol(start_s=start, step_s=step, share=share)
        for start, step, share in (numbers[3 * place : 3 * place + 3] for place in range(PROTOCOLS))
    ]
    return LinkProtocols(bandwidth_bytes_per_s=bandwidth_bytes_per_s, protocols=tuple(protocols), exchanged=numbers[-1])


def fit_protocols(rows: Collectives) -> LinkProtocols:
    """The best of the fits from all starts."""
    measured, kinds = np.log(rows.seconds), rows.kinds
    steps = np.where(kinds == Collective.ALL_TO_ALL, 1, rows.devices - 1) * np.where(
        kinds == Collective.ALL_REDUCE, 2, 1
    )
    ideal_s = rows.priced(Calibration(name="no latency")) - _latencies(rows)
    is_exchange = kinds == Collective.ALL_TO_ALL

    def residuals(point: Floats) -> Floats:
        numbers = np.exp(point)
        sent_s = ideal_s / np.where(is_exchange, numbers[-1], 1.0)
        lines = [
            start + steps * step + sent_s / share
            for start, step, share in (numbers[3 * place : 3 * place + 3] for place in range(PROTOCOLS))
        ]
        return np.log(np.minimum.reduce(lines)) - measured

    least = np.log([LEAST_SECONDS, LEAST_SECONDS, LEAST_SHARE] * PROTOCOLS + [LEAST_SHARE])
    fits = [
        least_squares(residuals, np.log(start), bounds=(least, 1e-12), loss="soft_l1", f_scale=RARE_ERROR, x_scale=0.1)
        for start in STARTS
    ]
    return protocols_at(np.minimum(min(fits, key=lambda fit: fit.cost).x, 0.0), rows.bandwidth_bytes_per_s)


def _latencies(rows: Collectives) -> Floats:
    """What the ideal price has for messages of no size."""
    return replace(rows, sizes=np.zeros_like(rows.sizes)).priced(IDEAL)


def errors_of(rows: Collectives, links: LinkProtocols | None) -> Floats:
    """Of every price, as a part of the measured time."""
    calibration = IDEAL if links is None else Calibration(name="protocols", links=links)
    return rows.priced(calibration) / rows.seconds - 1


def left_out_error(rows: Collectives) -> float:
    """The mean error from 1 MiB on when every fifth size is left out of the fit in turn."""
    errors: list[float] = []
    for fold in range(FOLDS):
        is_out = rows.folds == fold
        out = rows.part(is_out & rows.is_large)
        errors += list(np.abs(errors_of(out, fit_protocols(rows.part(~is_out)))))
    return float(np.mean(errors))


def show_collectives(rows: Collectives, links: LinkProtocols, out: float) -> None:
    """A line for the system, and one for each collective."""
    errors, ideal = errors_of(rows, links), errors_of(rows, None)
    size = np.abs(errors)
    print(
        f"{rows.chips[0]:10s} collectives {rows.is_large.sum():5d} rows from 1 MiB: {_told(errors[rows.is_large])}, "
        f"left out {out:5.1%}; ideal links {np.abs(ideal[rows.is_large]).mean():5.1%}; all {len(size)} rows "
        f"{size.mean():5.1%}"
    )
    for kind in np.unique(rows.kinds):
        chosen = rows.is_large & (rows.kinds == kind)
        print(
            f"    {kind:16s} {chosen.sum():5d} rows: {_told(errors[chosen])}; ideal {np.abs(ideal[chosen]).mean():5.1%}"
        )


def _told(errors: Floats) -> str:
    size = np.abs(errors)
    return f"mean error {size.mean():5.1%}, bias {errors.mean():+6.1%}, 95th percentile {np.percentile(size, 95):5.1%}"


def fitted_collectives(tables: Sequence[Collectives]) -> dict[str, dict[str, object]]:
    """Every system with its protocols as they are shipped, printed on the way."""
    entries: dict[str, dict[str, object]] = {}
    for rows in tables:
        links, out = fit_protocols(rows), left_out_error(rows)
        show_collectives(rows, links, out)
        large = errors_of(rows, links)[rows.is_large]
        told = {"mean_error": float(np.abs(large).mean()), "bias": float(large.mean()), "left_out": out}
        entries[rows.chips[0]] = {
            "chips": list(rows.chips),
            **asdict(links),
            "rows": len(large),
            **{name: round(value, 4) for name, value in told.items()},
        }
    return entries
