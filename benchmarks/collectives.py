"""Priced collectives against measured ones inside a node.

    python benchmarks/collectives.py --data DIR [--calibrated] [--rows]

DIR has ``aiconfigurator_nccl.csv`` (ai-dynamo/aiconfigurator, Apache-2.0): seconds of NCCL's collectives over 2, 4 and
8 GPUs of one node or rack, by the number of elements of the whole tensor. Nothing is fitted here: prices are those of
the chip's own links (`phaze cluster CHIP:N`), ideal unless ``--calibrated``. Printed are, for each system and
collective, the median relative error of the price (signed, and without sign) for tensors from 16 MiB on and for smaller
ones, and the share of the priced rate that the largest tensors reach.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phaze.cost import IDEAL, calibration_of, price_collective
from phaze.hardware import Cluster, parse_cluster
from phaze.hooks import PluginManager

CHIPS = {
    "a100_sxm": "a100-80gb",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
}
"""Systems of the table that a chip is known for; others are left out."""
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
ELEMENT_BYTES = {"half": 2, "int8": 1}
LARGE_BYTES = 16 * 2**20
"""From here on bandwidth decides; below, launches and synchronisation, which prices of links do not have."""


@dataclass(frozen=True)
class Row:
    """One measured collective beside its price."""

    system: str
    collective: str
    gpus: int
    tensor_bytes: int
    measured_s: float
    priced_s: float

    @property
    def error(self) -> float:
        """Of the price, as a part of the measured time; negative where it is too fast."""
        return self.priced_s / self.measured_s - 1


def rows(path: Path, calibrated: bool) -> Iterator[Row]:
    """Every row of a known system with its price."""
    plugins, clusters = PluginManager.load(), dict[tuple[str, int], Cluster]()
    with path.open(newline="", encoding="utf-8") as file:
        for entry in csv.DictReader(file):
            if entry["system"] not in CHIPS:
                continue
            chip, gpus = CHIPS[entry["system"]], int(entry["gpus"])
            size = int(entry["message_size"]) * ELEMENT_BYTES[entry["dtype"]]
            if (chip, gpus) not in clusters:
                clusters[chip, gpus] = parse_cluster(f"{chip}:{gpus}", plugins)
            cluster, collective = clusters[chip, gpus], COLLECTIVES[entry["op"]]
            calibration = calibration_of(cluster.accelerator) if calibrated else IDEAL
            priced = price_collective(collective, size, cluster, gpus, calibration=calibration)
            yield Row(entry["system"], collective, gpus, size, float(entry["latency_ms"]) / 1e3, float(priced.seconds))


def show(name: str, found: list[Row]) -> None:
    """One line: medians of the errors of large and of small tensors, and the bandwidth share of the largest."""
    parts = []
    for what, group in (
        ("from 16 MiB", [row for row in found if row.tensor_bytes >= LARGE_BYTES]),
        ("below", [row for row in found if row.tensor_bytes < LARGE_BYTES]),
    ):
        if group:
            signed = statistics.median(row.error for row in group)
            size = statistics.median(abs(row.error) for row in group)
            parts.append(f"{what} {len(group):4d} rows {signed:+7.1%} ({size:.1%})")
    largest = max(row.tensor_bytes for row in found)
    share = statistics.median(row.priced_s / row.measured_s for row in found if row.tensor_bytes == largest)
    print(f"{name:26s} {'; '.join(parts)}; {share:.0%} of the priced rate at {largest / 2**20:.0f} MiB")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with aiconfigurator_nccl.csv")
    parser.add_argument("--calibrated", action="store_true", help="with the chips' calibrations, where they have one")
    parser.add_argument("--rows", action="store_true", help="print every row of 8 GPUs")
    arguments = parser.parse_args()
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows(arguments.data / "aiconfigurator_nccl.csv", arguments.calibrated):
        groups[row.system, row.collective].append(row)
        if arguments.rows and row.gpus == 8:
            print(f"{row.system} {row.collective} {row.tensor_bytes} {row.measured_s:.3e} {row.priced_s:.3e}")
    for (system, collective), found in groups.items():
        show(f"{system} {collective}", found)
    node = [row for (system, name), found in groups.items() if name == "all_reduce" for row in found if row.gpus == 8]
    for system in dict.fromkeys(row.system for row in node):
        show(f"{system} all_reduce on 8", [row for row in node if row.system == system])


if __name__ == "__main__":
    main()
