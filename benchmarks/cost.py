"""Price every distinct op of a model, forward and backward, on every accelerator of the paper's space.

An estimate is a distinct pair of op shape and accelerator with all its fields (seconds, what binds, off-chip bytes and
energy, each on one core and spread over all); nothing is kept between runs. The reference is the same pricing of a
sample of accelerators one at a time: it must give the same numbers, and the ratio of speeds does not depend on the
machine much.

The rate is one of this grid: its accelerators share most of their fields, so that a price is evaluated on fewer
distinct rows and gathered from there. Both counts are printed, and the rate of the first, cold call beside the median.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Sequence

import numpy as np

import phaze
import phaze.space
from phaze.cost import Estimate, Work, explain, fuse_epilogues, group_work, matmul_work, op_work, price_works
from phaze.cost.operator_work import VIEW
from phaze.cost.work_prices import distinct_accelerators
from phaze.hardware import AcceleratorArray, preset

SAMPLE = 50


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt3-175b")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    graph = phaze.import_graph(arguments.model).with_backward()
    points = phaze.space.paper()
    ops = {op_work(op, graph.tensors) for op in graph.ops} - {VIEW}
    groups = {group_work(group, graph.tensors) for group in fuse_epilogues(graph)} - {VIEW}
    print(f"{arguments.model}: {len(graph.ops)} ops, {len(points)} accelerators")
    measure("ops", sorted(ops, key=repr), points, arguments.runs)
    measure("with epilogues fused", sorted(groups, key=repr), points, arguments.runs)
    print(f"peak resident memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    for size in (8192, 128):
        print(explain(matmul_work(1, size, size, size), preset("tpuv4").accelerator))


def measure(what: str, works: Sequence[Work], points: AcceleratorArray, runs: int) -> None:
    """Price ``works`` on ``points`` a few times, check a sample and print one line."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        estimate = price_works(works, points)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    count = len(works) * len(points)
    evaluated = sum(len(distinct_accelerators(work.kind, points)[0]) for work in works)
    ratio = check_sample(works, points, estimate) / (median / len(points))
    print(
        f"{what}: {len(works)} distinct shapes x {len(points)} accelerators = {count} estimates in {median:.3f} s: "
        f"{count / median / 1e6:.1f} million per second ({count / seconds[0] / 1e6:.1f} in the first, cold call), "
        f"{evaluated} of them evaluated and the rest gathered, "
        f"{ratio:.0f} times as fast as one accelerator at a time"
    )


def check_sample(works: Sequence[Work], points: AcceleratorArray, estimate: Estimate) -> float:
    """Compare a sample with prices of single accelerators; returns seconds per accelerator."""
    chosen = np.linspace(0, len(points) - 1, SAMPLE).astype(int)
    seconds = 0.0
    for index in chosen:
        chip = points.at(int(index))
        start = time.perf_counter()
        alone = price_works(works, chip)
        seconds += time.perf_counter() - start
        for field in ("core_s", "spread_s", "core_bytes", "spread_bytes", "core_energy_j", "spread_energy_j"):
            np.testing.assert_allclose(getattr(estimate, field)[:, index], getattr(alone, field)[:, 0], rtol=1e-12)
        np.testing.assert_array_equal(estimate.core_binding[:, index], alone.core_binding[:, 0])
        np.testing.assert_array_equal(estimate.spread_binding[:, index], alone.spread_binding[:, 0])
    return seconds / SAMPLE


if __name__ == "__main__":
    main()
