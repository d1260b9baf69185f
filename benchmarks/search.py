"""The accelerator to build for a model, proven over the paper's whole space, beside baselines and a sampled search.

    python benchmarks/search.py --model bert-large [--network paper] [--samples 100,1000] [--out FILE]

searches 29,360 accelerators x 3 memories with microbatches 1, 2, 4, 8 and every recompute mode on 1,024 devices, batch
4096, in two processes. It prints the baselines of the paper (tpuv4-paper with the experts' placement: their degrees on
1F1B, everything else the best for these; tpuv4-paper with Phaze's own placement), the accelerator found, ratios, what
Optuna's TPE finds after so many evaluations, and as its last line

    best T samples/s, largest bound left B, gap G %, bounded/scheduled/placed a/b/c, S seconds

The seconds are those of the search, from the model's name to the plan. `--table FILE ...` prints rows of `--out` files
as a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import phaze
from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.design_search import run_search
from phaze.explore.executors import Workers
from phaze.explore.journal import Journal
from phaze.explore.paper_experiments import EXPERT_STRATEGIES
from phaze.explore.sampled_search import SearchMethod, sample_designs
from phaze.explore.search_question import ask_search
from phaze.hardware import AcceleratorArray, find_accelerator
from phaze.hooks import PluginManager

DEVICES, BATCH, SIZES = 1024, 4096, (1, 2, 4, 8)
BASELINE = "tpuv4-paper"


def main() -> None:
    """Search for one model, or print the table of several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=EXPERT_STRATEGIES)
    parser.add_argument("--network", default="paper", help="paper (default) or tpuv4-pod, TPU v4's own links")
    parser.add_argument("--gap", type=float, default=0.01)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b,zero-bubble", metavar="NAME,NAME", help="pipelines to choose from")
    parser.add_argument(
        "--samples", default="", metavar="N,N", help="evaluations of the sampled search: 100,1000,10000"
    )
    parser.add_argument("--journal", metavar="FILE")
    parser.add_argument("--out", metavar="FILE", help="append the row as JSON, anew whenever it grows")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print rows of such files as a table")
    arguments = parser.parse_args()
    if arguments.table:
        _print_table(arguments.table)
    elif arguments.model:
        _run(arguments)
    else:
        parser.error("give --model NAME, or --table FILE")


def _run(arguments: argparse.Namespace) -> None:
    row: dict[str, Any] = {"model": arguments.model, "network": arguments.network}
    row |= _baselines(arguments.model, arguments.network)
    print(_baseline_text(row), flush=True)
    context = multiprocessing.get_context("spawn")
    started_s, busy = time.monotonic(), _processor_s()
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        best_first = _prepared_search(arguments, Workers(executor=pool))
        result = run_search(best_first, started_s)
    row |= _searched(result)
    row |= {
        "processor_s": _processor_s() - busy,
        "peak_gib": _peak_gib(arguments.processes),
        "load": os.getloadavg()[0],
    }
    print(f"{result}\n{_ratio_text(row)}\n{_returned_text(row)}", flush=True)
    _keep(row, arguments.out)
    counts = [int(count) for count in arguments.samples.split(",") if count]
    if counts:
        best_first.workers = Workers()  # the pool is closed
        _sample(row, best_first, counts, arguments.out)
    proof = result.certificate
    print(
        f"best {proof.value:.6g} samples/s, largest bound left {proof.bound:.6g}, gap {100 * proof.gap:.3f} %, "
        f"bounded/scheduled/placed {proof.points}/{proof.scheduled}/{proof.placed}, {result.seconds:.0f} seconds"
    )


def _sample(row: dict[str, Any], best_first: BestFirstSearch, counts: Sequence[int], out: str | None) -> None:
    """What TPE finds with seed 0 after each number of evaluations."""
    (run,) = sample_designs(best_first, SearchMethod.TPE, [0], max(counts))
    row["sampled"], row["sampled_s"] = {}, run.processor_s
    for count in counts:
        value = run.history[min(count, run.evaluations) - 1]
        row["sampled"][str(count)] = value / row["found"]
        told = f"{value:,.5g} samples/s ({100 * value / row['found']:.1f} %) after {count:,} evaluations"
        print(f"TPE       {told}, {run.processor_s:.0f} s of processor time for all", flush=True)
    _keep(row, out)


def _keep(row: dict[str, Any], out: str | None) -> None:
    if out:
        with Path(out).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _prepared_search(arguments: argparse.Namespace, workers: Workers) -> BestFirstSearch:
    asked = _question(arguments.network, "paper", (32, 64, 80), arguments.gap)
    asked["schedule"] = arguments.schedule.split(",")
    question = ask_search(arguments.model, None, asked, PluginManager.load())
    journal = Journal.open(arguments.journal, question.journal_header()) if arguments.journal else Journal()
    return BestFirstSearch(question=question, workers=workers, journal=journal)


def _question(network: str, space: object, hbm_gib: Sequence[float], gap: float) -> dict[str, Any]:
    return {
        "devices": DEVICES,
        "space": space,
        "hbm_gib": hbm_gib,
        "micro_batch_size": SIZES,
        "global_batch_size": BATCH,
        "network": network,
        "gap": gap,
    }


def _baselines(model: str, network: str) -> dict[str, Any]:
    """Samples per second of tpuv4-paper: with the experts' placement, and with the best one."""
    expert = phaze.evaluate(
        model,
        strategy=dict(EXPERT_STRATEGIES[model]),
        cluster=f"{BASELINE}:{DEVICES}@{network}",
        global_batch_size=BATCH,
        micro_batch_size=SIZES,
        target=None,
        compares=False,
    ).plan
    chip = find_accelerator(BASELINE)
    question = _question(network, AcceleratorArray.of([chip]), (chip.hbm_bytes / 2**30,), 0.01)
    placed = run_search(
        BestFirstSearch(
            question=ask_search(model, None, question, PluginManager.load()), workers=Workers(), journal=Journal()
        ),
        time.monotonic(),
    )
    return {
        "expert": BATCH / expert.step_time_s,
        "is_expert_fitting": expert.is_feasible,
        "placed": placed.best.value,
        "placed_plan": _plan_text(placed.best.models[0].strategy),
    }


def _searched(result: phaze.SearchResult) -> dict[str, Any]:
    best, proof = result.best, result.certificate
    return {
        "found": best.value,
        "accelerator": best.name,
        "hbm_gib": best.hbm_gib,
        "area_mm2": best.area_mm2,
        "plan": _plan_text(best.models[0].strategy),
        "step_of_plan": next(iter(result.plans.values())).step_time_s / best.models[0].step_time_s,
        "bound": proof.bound,
        "gap": proof.gap,
        "counts": [proof.points, proof.scheduled, proof.placed],
        "seconds": result.seconds,
    }


def _plan_text(strategy: Mapping[str, object]) -> str:
    return (
        f"dp {strategy['dp']} tp {strategy['tp']} pp {strategy['pp']}, microbatch {strategy['micro_batch_size']}, "
        f"ZeRO-{strategy['zero']}, {strategy['schedule']}"
    )


def _baseline_text(row: dict[str, Any]) -> str:
    fits = "" if row["is_expert_fitting"] else " (does not fit in its memory)"
    return (
        f"{row['model']}, network {row['network']}, {DEVICES} devices, batch {BATCH}\n"
        f"{BASELINE} with the experts' placement {row['expert']:,.5g} samples/s{fits}\n"
        f"{BASELINE} with Phaze's placement {row['placed']:,.5g} samples/s: {row['placed_plan']}"
    )


def _ratio_text(row: dict[str, Any]) -> str:
    return (
        f"ratios    found / experts {row['found'] / row['expert']:.3f}, found / Phaze's placement "
        f"{row['found'] / row['placed']:.3f}, Phaze's placement / experts {row['placed'] / row['expert']:.3f}\n"
        f"spent     {row['processor_s']:.0f} s of processor time, {row['peak_gib']:.2f} GiB at most, load "
        f"{row['load']:.1f}"
    )


def _returned_text(row: dict[str, Any]) -> str:
    """Plans on several devices per stage are sliced again for the accelerator found, so that their time may differ."""
    return f"plan      {row['found'] / row['step_of_plan']:.6g} samples/s as it is returned, {row['plan']}"


def _processor_s() -> float:
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def _peak_gib(processes: int) -> float:
    """This process and all workers, as if all had their largest size at once."""
    parent, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (parent + processes * child) / 2**20


def _print_table(paths: Sequence[str]) -> None:
    rows = [json.loads(line) for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines()]
    latest = {(row["network"], row["model"]): row for row in rows}
    print("| model | network | samples/s | / experts | / own placement | accelerator | plan | gap | ", end="")
    print("scheduled/placed | seconds (processor) | TPE, part of it |")
    print("|" + "---|" * 11)
    for row in sorted(latest.values(), key=lambda row: (row["network"], list(EXPERT_STRATEGIES).index(row["model"]))):
        sampled = ", ".join(f"{count}: {100 * part:.1f} %" for count, part in row.get("sampled", {}).items())
        mark = "" if row["is_expert_fitting"] else " (does not fit)"
        columns = [
            row["model"],
            row["network"],
            f"{row['found']:,.5g}",
            f"{row['found'] / row['expert']:.2f}{mark}",
            f"{row['found'] / row['placed']:.2f}",
            f"{row['accelerator']}, {row['hbm_gib']:g} GiB",
            row["plan"],
            f"{100 * row['gap']:.2f} %",
            "/".join(str(count) for count in row["counts"][1:]),
            f"{row['seconds']:.0f} ({row['processor_s']:.0f})",
            sampled or "-",
        ]
        print("| " + " | ".join(columns) + " |")


if __name__ == "__main__":
    main()
