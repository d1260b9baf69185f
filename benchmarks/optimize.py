"""From model names to plans: how long it takes, what comes out, and how much of it is proven.

    python benchmarks/optimize.py [MODEL ...] [--cluster tpuv4:1024@tpuv4-pod] [--global-batch 4096] [--verify]

A row a model: seconds (and those of the search alone, without the explanation), strategy, tokens per second, MFU, gap.
The last line counts the passes of layers that were scheduled and proven within 1 %.

    python benchmarks/optimize.py --grid gpt2-xl --cluster a100-80gb:64 --global-batch 256

plans at gap 0 and prices every strategy of a grid over (dp, tp, pp, micro_batch_size, recompute, zero); none may be
faster. The last line counts strategies that fit, and those that are faster.
"""

from __future__ import annotations

import argparse
import itertools
import time

import phaze
from phaze.planner import Progress
from phaze.report.plan_text import strategy_text

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


def main() -> None:
    """Plan models and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--cluster", default="tpuv4:1024@tpuv4-pod")
    parser.add_argument("--global-batch", type=int, default=4096)
    parser.add_argument("--grid", metavar="MODEL", help="price a grid of strategies against the best plan")
    parser.add_argument("--verify", action="store_true", help="derive every number of every plan again")
    arguments = parser.parse_args()
    if arguments.grid is not None:
        _grid(arguments.grid, arguments.cluster, arguments.global_batch)
    else:
        _table(arguments.models or MODELS, arguments)


def _table(models: tuple[str, ...] | list[str], arguments: argparse.Namespace) -> None:
    schedules = proven = feasible = 0
    slowest = 0.0
    print(f"{'model':<18}{'seconds':>8}{'search':>8}{'tokens/s':>13}{'MFU':>7}{'gap':>8}  plan")
    for name in models:
        searched: list[float] = []

        def listen(progress: Progress, searched: list[float] = searched) -> None:
            if progress.doing.startswith("the best plan of another kind") and not searched:
                searched.append(progress.elapsed_s)

        start = time.perf_counter()
        plan = phaze.optimize(
            name, cluster=arguments.cluster, global_batch_size=arguments.global_batch, progress=listen
        )
        seconds = time.perf_counter() - start
        slowest = max(slowest, seconds)
        feasible += plan.is_feasible
        schedules += plan.provenance.schedules
        proven += plan.provenance.schedules_proven
        told = strategy_text(plan.strategy) if plan.is_feasible else f"does not fit: {strategy_text(plan.strategy)}"
        print(
            f"{name:<18}{seconds:>8.1f}{(searched or [seconds])[0]:>8.1f}{plan.tokens_per_s:>13,.0f}{plan.mfu:>7.1%}"
            f"{plan.gap:>8.2%}  {told}{_verified(plan, name) if arguments.verify else ''}",
            flush=True,
        )
    print(
        f"{feasible} of {len(models)} feasible, slowest {slowest:.1f} s; {proven} of {schedules} scheduled passes of "
        f"layers proven within 1 % ({proven / schedules:.1%})"
    )


def _verified(plan: phaze.Plan, name: str) -> str:
    from phaze.verify.plan_checks import check_plan

    findings = check_plan(plan, name)
    return f"; {sum(finding.holds for finding in findings)} of {len(findings)} checks hold"


def _grid(name: str, cluster: str, batch: int) -> None:
    graph = phaze.import_graph(name)
    question = {"cluster": cluster, "global_batch_size": batch, "gap": 0.0}
    best = phaze.optimize(graph, **question)  # type: ignore[arg-type]
    print(f"best: {best.step_time_s:.6g} s, gap {best.gap:.2e}: {strategy_text(best.strategy)}", flush=True)
    devices = best.cluster.device_count
    degrees = [2**power for power in range(devices.bit_length())]
    tried = fitting = faster = 0
    closest = float("inf")
    for dp, tp, pp, size, mode, zero in itertools.product(
        degrees, (1, 2, 4, 8), degrees, (1, 2, 4, 8), ("none", "selective", "full"), (0, 1, 2, 3)
    ):
        is_possible = dp * tp * pp == devices and pp <= len(graph.layers) and dp * size <= batch
        if not is_possible or (zero and dp == 1):
            continue
        asked = {"dp": dp, "tp": tp, "pp": pp, "micro_batch_size": size, "recompute": mode, "zero": zero}
        try:
            found = phaze.evaluate(graph, strategy=asked, compares=False, **question)  # type: ignore[arg-type]
        except phaze.PhazeError:
            continue
        tried += 1
        fitting += found.is_feasible
        if found.is_feasible:
            closest = min(closest, found.step_time_s / best.step_time_s)
            if found.step_time_s < best.step_time_s * (1 - 1e-9):
                faster += 1
                print(f"faster: {found.step_time_s:.6g} s: {strategy_text(found.plan.strategy)}", flush=True)
    print(
        f"{tried} strategies, {fitting} fit, {faster} faster; the best of them takes {closest:.6f} of the plan's time"
    )


if __name__ == "__main__":
    main()
