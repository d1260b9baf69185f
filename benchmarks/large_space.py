"""A space of 1,000,000 accelerators over seven axes, searched for one model with proof.

    python benchmarks/large_space.py [--model gpt3-175b] [--network paper-artifact] [--processes 2] [--time-limit S]

Axes: tensor cores, rows, columns, vector cores, buffer, HBM bandwidth and clock. Limits: the area of tpuv4-paper, and
the power of tpuv4-paper with everything at work. It prints how many accelerators keep within the limits, the answer
with its certificate, how many were left by each level of the screening, and as its last line

    1,000,000 combinations, N within the limits, best T samples/s, gap G %, S seconds, P s of processor time, M GiB
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time

import phaze
from phaze.hardware import AcceleratorArray, preset
from phaze.hardware.accelerator import area_mm2

AXES = {
    "tensor_cores": [2**power for power in range(10)],
    "tensor_rows": [16, 32, 64, 128, 256],
    "tensor_cols": [16, 32, 64, 128, 256],
    "vector_cores": [2**power for power in range(10)],
    "buffer_mib": [2**power for power in range(8)],
    "hbm_bandwidth_bytes_per_s": [0.4e12 * step for step in range(1, 11)],
    "clock_hz": [0.75e9, 0.9e9, 1.05e9, 1.2e9, 1.35e9],
}


def main() -> None:
    """Search, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt3-175b")
    parser.add_argument("--network", default="paper-artifact")
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--time-limit", type=float)
    arguments = parser.parse_args()
    chip = preset("tpuv4-paper").accelerator
    power_w = float(phaze.space.powers_w(AcceleratorArray.of([chip]))[0])
    started_s = time.monotonic()
    points = phaze.space.grid(**AXES, max_area_mm2=area_mm2(chip), max_power_w=power_w)
    count = len(points)
    print(f"{count:,} accelerators within {area_mm2(chip):.1f} mm2 and {power_w:.0f} W", flush=True)

    def listen(progress: object) -> None:
        doing = getattr(progress, "doing", "")
        if "screening" in doing:
            print(f"{time.monotonic() - started_s:.0f} s: {doing}", file=sys.stderr, flush=True)

    result = phaze.search(
        arguments.model,
        devices=arguments.devices,
        space=points,
        network=arguments.network,
        executor=f"processes:{arguments.processes}",
        time_limit_s=arguments.time_limit,
        progress=listen,
    )
    print(result)
    for box in result.certificate.pruned:
        if box.name.startswith("screened"):
            print(f"{box.name}: {box.points:,} closed, none exceeds {box.bound:.6g}")
    proof = result.certificate
    print(
        f"1,000,000 combinations, {count:,} within the limits, best {proof.value:.6g} samples/s, gap "
        f"{100 * proof.gap:.2f} %, {time.monotonic() - started_s:.0f} seconds, {_processor_s():.0f} s of processor "
        f"time, {_peak_gib(arguments.processes):.2f} GiB"
    )


def _processor_s() -> float:
    while multiprocessing.active_children():  # those that ended count when they are waited for
        time.sleep(0.1)
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def _peak_gib(processes: int) -> float:
    """This process and all workers, as if all had their largest size at once."""
    parent, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (parent + processes * child) / 2**20


if __name__ == "__main__":
    main()
