"""Operator schedules: against known optima, on the layers of real models, and two exact methods against each other.

    PYTHONPATH=tests python benchmarks/schedule.py --instances tests/data/schedule.json [--method auto] [--solver highs]
    PYTHONPATH=tests python benchmarks/schedule.py --models [--micro-batch 1] [--fused]
    PYTHONPATH=tests python benchmarks/schedule.py --sharded [--fused]
    PYTHONPATH=tests python benchmarks/schedule.py --agree [--work 0.5] [--workers 8]
    PYTHONPATH=tests python benchmarks/schedule.py --bounds

--instances solves every instance to gap 0, prints those that differ from the known makespan by more than 1e-6, and ends
with `N/N optimal`. --models schedules the forward and backward pass of every distinct layer of nine models on twelve
accelerators, to a gap of 1 %; the last line counts rows proven, the median and the largest seconds. --sharded does the
same for tensor-parallel blocks with their collectives. --agree proves the passes of at least 30 ops to gap 0 by two
independent methods, the exact method and CP-SAT; CP-SAT knows the list schedule and nothing of the search (`--work`
is its deterministic seconds for each; several workers prove more, not always the same). --bounds prices the lower
bounds of one layer on the paper's 29,360 accelerators.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from oracles.scheduling_instances import read_instances

import phaze
from phaze.cost import Collective
from phaze.errors import PhazeError
from phaze.hardware import AcceleratorArray, parse_cluster, preset
from phaze.hooks import PluginManager
from phaze.ir import Graph, Op, Phase
from phaze.profile.layer_jobs import price_pass
from phaze.schedule import Schedule, ScheduleStatus, SchedulingProblem, schedule_layer
from phaze.schedule.cp_sat_model import solve_cp_sat
from phaze.schedule.list_scheduling import list_schedule, makespan
from phaze.schedule.scheduling_problem import reduce_problem
from phaze.shard import Axis, ShardingProblem, shard_layer, slice_layer
from phaze.solvers import choose_solver

MODELS = (
    "bert-large",
    "gpt2-xl",
    "opt-350m",
    "llama2-7b",
    "megatron-bert",
    "megatron-gpt2-xl",
    "megatron-gpt2-54",
    "megatron-gpt2-72",
    "gpt3-175b",
)
CORES = (
    (1, 1),
    (2, 1),
    (2, 2),
    (4, 2),
    (8, 2),
    (8, 8),
    (16, 4),
    (32, 8),
    (64, 16),
    (128, 64),
    (256, 256),
    (512, 512),
)
"""Tensor and vector cores. All have the arrays, lanes, buffer and memory of tpuv4-paper, which is (8, 2)."""

MANY_OPS = 30
SHARDED_MODELS = ("gpt3-175b", "llama2-7b", "mixtral-8x7b")
SHARDED_CLUSTERS = ("a100-80gb:8", "tpuv4:8", "tpuv4-paper:8@paper")
TP_DEGREES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Row:
    """One pass of one layer on one accelerator."""

    model: str
    layer: str
    phase: str
    where: str  # the accelerator's cores, or the cluster and the tensor-parallel degree
    problem: SchedulingProblem

    def __str__(self) -> str:
        return f"{self.model:<17}{self.layer[-26:]:<27}{self.phase:<9}{self.where:>15}{len(self.problem.jobs):>5}"


def accelerators() -> AcceleratorArray:
    """One accelerator for each pair of core counts."""
    base = preset("tpuv4-paper").accelerator
    return AcceleratorArray.of(
        replace(base, name=f"{tensor},{vector}", tensor_cores=tensor, vector_cores=vector) for tensor, vector in CORES
    )


def rows(micro_batch: int, *, is_fused: bool) -> Iterator[Row]:
    """Every distinct layer's passes on every accelerator."""
    chips = accelerators()
    for model in MODELS:
        graph = phaze.import_graph(model).with_micro_batch(micro_batch)
        for layer in graph.distinct_layers:
            for phase, ops in (("forward", layer.forward), ("backward", layer.backward)):
                priced = price_pass(graph, ops, chips, name=layer.name, is_fused=is_fused)
                for number, (tensor, vector) in enumerate(CORES):
                    yield Row(model, layer.name, phase, f"{tensor},{vector}", priced.problem(number))


def sharded_rows(micro_batch: int, *, is_fused: bool) -> Iterator[Row]:
    """The largest layer of each model, sliced for each tensor-parallel degree on each cluster."""
    for model in SHARDED_MODELS:
        graph = phaze.import_graph(model).with_micro_batch(micro_batch)
        block = max(graph.distinct_layers, key=lambda layer: len(layer.backward))
        for cluster, tp in product(SHARDED_CLUSTERS, TP_DEGREES):
            axis = Axis(parse_cluster(cluster), tp)
            local = slice_layer(shard_layer(ShardingProblem(graph=graph, layer=block, axis=axis)))
            where = f"{cluster.partition(':')[0]}/{tp}"
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                ops = [op for op in local.ops if op.phase is phase]
                problem = sliced_problem(local, ops, axis, block.name, is_fused=is_fused)
                yield Row(model, block.name, phase.value, where, problem)


def sliced_problem(local: Graph, ops: Sequence[Op], axis: Axis, name: str, *, is_fused: bool) -> SchedulingProblem:
    """One pass of one device's slice, its collectives as links."""

    def link_s(op: Op) -> float:
        return axis.seconds(Collective(op.function), op.collective_bytes)

    accelerator = axis.cluster.accelerator
    return price_pass(local, ops, accelerator, name=name, is_fused=is_fused, link_s=link_s).problem()


def run_instances(path: Path, method: str, solver: str | None) -> int:
    """Solve the instances of a file to gap 0; the exit code."""
    instances = read_instances(path)
    chain = None if solver is None else choose_solver(solver, PluginManager.load())
    optimal = 0
    for instance in instances:
        answer = schedule_layer(instance.problem, gap=0.0, method=method, solver=chain)
        known = answer.makespan_s if instance.makespan is None else instance.makespan
        is_proven = answer.status is ScheduleStatus.OPTIMAL
        if is_proven and abs(answer.makespan_s - known) <= 1e-6 * max(1.0, abs(known)):
            optimal += 1
        else:
            told = answer.report if not answer.is_feasible else f"{answer.makespan_s} ({answer.status})"
            print(f"{instance.problem.name}: {told}, expected {instance.makespan}")
    print(f"{optimal}/{len(instances)} optimal")
    return 0 if optimal == len(instances) else 1


def run_models(passes: Iterator[Row]) -> int:
    """Schedule every pass within 1 % and print a row each."""
    print(
        f"{'model':<17}{'layer':<27}{'pass':<9}{'cores':>15}{'ops':>5}"
        f"{'makespan us':>14}{'time us':>12}{'bound us':>12}{'gap':>8}{'work':>9}{'seconds':>9}  method"
    )
    seconds, resisting = [], []
    for row in passes:
        start = time.perf_counter()
        answer = schedule_layer(row.problem)
        seconds.append(time.perf_counter() - start)
        line = (
            f"{row}{answer.makespan_s * 1e6:>14.2f}{answer.time_s * 1e6:>12.2f}{answer.time_bound_s * 1e6:>12.2f}"
            f"{answer.gap:>8.2%}{answer.work:>9.0f}{seconds[-1]:>9.3f}  {answer.method}"
        )
        print(line)
        if not is_within(answer, 0.01):
            resisting.append(line)
    if resisting:
        print("not proven:", *resisting, sep="\n")
    proven = len(seconds) - len(resisting)
    print(
        f"{proven}/{len(seconds)} rows proven within 1 %, median {statistics.median(seconds):.4f} s, "
        f"largest {max(seconds):.2f} s"
    )
    return 0 if proven >= 0.9 * len(seconds) else 1


def is_within(answer: Schedule, gap: float) -> bool:
    """Whether an answer is proven within a gap."""
    return answer.gap <= gap + 1e-9


def run_agreement(micro_batch: int, work: float, workers: int) -> int:
    """Prove passes of many ops to gap 0 by two independent methods."""
    print(
        f"{'model':<17}{'layer':<27}{'pass':<9}{'cores':>15}{'ops':>5}"
        f"{'exact us':>14}{'seconds':>9}{'cp-sat us':>14}{'seconds':>9}  agree"
    )
    agreed, tried, wrong = 0, 0, 0
    seen: set[str] = set()
    for row in rows(micro_batch, is_fused=False):
        if len(row.problem.jobs) < MANY_OPS or row.problem.key() in seen:
            continue
        seen.add(row.problem.key())
        start = time.perf_counter()
        exact = schedule_layer(replace(row.problem, memory_s=0.0), gap=0.0, work=30_000_000)
        middle = time.perf_counter()
        reduced = reduce_problem(row.problem)
        other = solve_cp_sat(reduced, list_schedule(reduced), gap=0.0, work=work, workers=workers)
        end = time.perf_counter()
        other_s = makespan(other.placed)
        other_gap = max(0.0, 1.0 - other.bound_s / other_s)
        is_proven = exact.status is ScheduleStatus.OPTIMAL and other_gap <= 1e-9
        is_equal = abs(exact.makespan_s - other_s) <= 1e-6 * exact.makespan_s
        is_bracketed = other.bound_s <= exact.makespan_s * (1 + 1e-6) and exact.bound_s <= other_s * (1 + 1e-6)
        tried, agreed = tried + 1, agreed + (is_proven and is_equal)
        wrong += (is_proven and not is_equal) or not is_bracketed
        told = ("yes" if is_equal else "NO") if is_proven else f"cp-sat {other_gap:.2%}, exact {exact.gap:.2%}"
        print(
            f"{row}{exact.makespan_s * 1e6:>14.3f}{middle - start:>9.2f}{other_s * 1e6:>14.3f}{end - middle:>9.1f}  "
            f"{told}",
            flush=True,
        )
    print(f"{agreed} of {tried} layers with {MANY_OPS} or more ops proven at gap 0 by both methods, {wrong} disagree")
    return 0 if agreed >= 20 and not wrong else 1


def run_bounds() -> int:
    """Lower bounds of a backward pass on the paper's space, against schedules of a sample."""
    graph = phaze.import_graph("gpt2-xl")
    layer = max(graph.distinct_layers, key=lambda layer: len(layer.backward))
    chips = phaze.space.paper()
    start = time.perf_counter()
    priced = price_pass(graph, layer.backward, chips, name=layer.name)
    middle = time.perf_counter()
    bounds = priced.lower_bounds()
    end = time.perf_counter()
    quick = priced.lower_bounds(is_tight=False)
    quick_s = time.perf_counter() - end
    sample = np.random.default_rng(0).choice(len(chips), 200, replace=False)
    times = np.array([schedule_layer(priced.problem(int(number))).time_s for number in sample])
    for name, values in (("bound", bounds), ("quick bound", quick)):
        shares = values[sample] / times
        print(f"{name} over time on {len(sample)} of them: mean {shares.mean():.4f}, least {shares.min():.4f}")
    print(
        f"{len(chips)} accelerators, {len(layer.backward)} ops: prices {middle - start:.2f} s, "
        f"bounds {end - middle:.2f} s, quick bounds {quick_s:.3f} s"
    )
    return 0


def main() -> int:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--instances", type=Path, metavar="FILE")
    what.add_argument("--models", action="store_true")
    what.add_argument("--sharded", action="store_true")
    what.add_argument("--agree", action="store_true")
    what.add_argument("--bounds", action="store_true")
    parser.add_argument("--method", default="auto", help="auto, list, exact, cp-sat, milp (default: auto)")
    parser.add_argument("--solver", metavar="NAME", help="for auto and milp: highs, scip, gurobi or a plugin's")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--fused", action="store_true", help="fuse elementwise epilogues into matrix ops")
    parser.add_argument("--work", type=float, default=0.5)
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    try:
        if arguments.instances:
            return run_instances(arguments.instances, arguments.method, arguments.solver)
        if arguments.agree:
            return run_agreement(arguments.micro_batch, arguments.work, arguments.workers)
        if arguments.bounds:
            return run_bounds()
        passes = sharded_rows if arguments.sharded else rows
        return run_models(passes(arguments.micro_batch, is_fused=arguments.fused))
    except (PhazeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
