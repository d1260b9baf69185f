"""Fits the calibrations of `phaze_plugin/hardware/data/calibrations.json` to published runs.

    python benchmarks/fit_published.py --data DIR [--family a100] [--write]

One fit per family of chips over all its datasets. Every dataset counts the same, its residuals measured in the error
that we promise for it: weight 1 / (promise * sqrt(rows)). Printed are the terms, the error in sample, with each row
left out and with each dataset left out (the others refitted on derivatives at the optimum, what was left out predicted
exactly).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from published_rows import Row, read_rows
from validation import price

from phaze.calibration_fitting import Fit, PreparedRun, Run, fit_terms, prepare_run
from phaze.calibration_fitting.least_squares import point_of, slopes_at
from phaze.cost import LIBRARY_STACK, Calibration, Stack
from phaze.cost.calibration import TERMS
from phaze.hooks import PluginManager
from phaze.json_records import to_document

TARGET = Path(__file__).parent.parent / "phaze_plugin" / "hardware" / "data" / "calibrations.json"
PROMISED = {"sc21": 0.04, "korthikanti": 0.06, "bigscience": 0.08, "torchtitan": 0.12, "maxtext": 0.10}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Chips that share a calibration, the datasets to fit it to, and what is fitted."""

    chips: tuple[str, ...]
    datasets: tuple[str, ...]
    terms: tuple[str, ...]
    start: Calibration
    origin: str


XLA_STACK = Stack(recomputes_ends=False)
FAMILIES = {
    "a100": Family(
        chips=("a100-40gb", "a100-80gb"),
        datasets=("sc21", "korthikanti", "bigscience"),
        terms=("matrix", "memory", "link", "overhead_s"),
        start=Calibration(
            matrix=0.8, memory=0.8, link=0.8, network=1.0, overhead_s=1e-5, overlap=0.0, stack=LIBRARY_STACK
        ),
        origin="arXiv:2104.04473 table 1; arXiv:2205.05198 table 5; BigScience's topology sweep of February 2022",
    ),
    "h100": Family(
        chips=("h100",),
        datasets=("torchtitan",),
        terms=("matrix",),
        start=Calibration(
            matrix=0.6, memory=0.8, link=0.8, network=0.8, overhead_s=1e-5, overlap=0.8, stack=LIBRARY_STACK
        ),
        origin="torchtitan's Llama 3.1 tables (a part with 2.4 TB/s HBM2e and 500 W; a stock one may do better); "
        "all but matrix is assumed: five rows do not separate memory from matrix and do not show the rest",
    ),
    "tpuv4": Family(
        chips=("tpuv4",),
        datasets=("maxtext",),
        terms=("matrix",),
        start=Calibration(matrix=0.8, memory=0.8, link=0.8, network=0.5, overlap=0.8, stack=XLA_STACK),
        origin="MaxText's TPU v4 table; all but matrix is assumed: six rows do not show it",
    ),
}


def run_of(row: Row, stack: Stack, weight: float = 1.0) -> Run:
    """A row as a run on a family's stack."""
    assert row.seconds is not None
    assert row.cluster is not None
    return Run(
        name=f"{row.dataset} {row.name}",
        model=row.model,
        cluster=row.cluster,
        global_batch_size=row.global_batch_size,
        strategy=row.strategy,
        seconds=row.seconds,
        precision=row.recipe or "bf16",
        sequence_length=row.sequence_length,
        stack=replace(stack, **row.stack),
        attention=row.attention,
        weight=weight,
    )


def predictor(runs: Sequence[PreparedRun]):  # type: ignore[no-untyped-def]
    """Seconds per (calibration, run)."""
    return lambda calibrations: np.stack([run.seconds(calibrations) for run in runs], axis=1)


def fitted(runs: Sequence[PreparedRun], family: Family, start: Calibration) -> Fit:
    """One fit."""
    measured = [one.run.seconds for one in runs]
    weights = [one.run.weight for one in runs]
    return fit_terms(predictor(runs), measured, start, family.terms, weights=weights)


def left_out(
    runs: Sequence[PreparedRun], family: Family, best: Calibration, groups: Sequence[Sequence[int]]
) -> list[float]:
    """The error of every run when the others are fitted without the group that it belongs to.

    log seconds are linear enough around the optimum that the others' refit runs on their derivatives; what was left out
    is then predicted exactly. A term that the others do not show is as it was before any fit.
    """
    point, now, slopes = slopes_at(predictor(runs), best, family.terms)
    errors = [0.0] * len(runs)
    for group in groups:
        keep = np.array([index not in group for index in range(len(runs))])

        def predict(calibrations: Sequence[Calibration], keep: np.ndarray = keep) -> np.ndarray:
            points = np.stack([point_of(calibration, family.terms) for calibration in calibrations])
            return np.exp((np.log(now) + (points - point) @ slopes.T)[:, keep])

        measured = [run.run.seconds for run, kept in zip(runs, keep, strict=True) if kept]
        weights = [run.run.weight for run, kept in zip(runs, keep, strict=True) if kept]
        fit = fit_terms(predict, measured, best, family.terms, weights=weights)
        refit = replace(fit.calibration, **{term: getattr(family.start, term) for term in fit.unseen})
        for index in group:
            errors[index] = float(runs[index].seconds([refit])[0]) / runs[index].run.seconds - 1
    return errors


def memory_terms(rows: Sequence[Row], calibration: Calibration) -> dict[str, float]:
    """What devices hold beyond the need that we predict, and the margin that tells runs which ran out of memory.

    The reserve is the median over rows with a measured figure, the margin the least (in percent, at least the usual
    five) that leaves no run out of memory among those that fit.
    """
    bare = replace(calibration, reserve=0.0)
    shares, fullest = [], []
    for row in {row.question: row for row in rows if row.memory_bytes or row.is_out_of_memory}.values():
        plan = price(row, replace(bare, stack=replace(bare.stack, **row.stack)))
        need = max(stage.memory_bytes["total"] for stage in plan.stages)
        if row.is_out_of_memory:
            fullest.append(need / plan.stages[0].memory_bytes["capacity"])
        elif row.memory_bytes:
            shares.append(row.memory_bytes / need - 1)
    reserve = round(max(0.0, statistics.median(shares)), 3) if shares else 0.0
    least = min((share * (1 + reserve) for share in fullest), default=1.0)
    return {"reserve": reserve, "margin": max(0.05, math.ceil((1 - least) * 100) / 100)}


def weight(row: Row, counts: dict[str, int]) -> float:
    """Every dataset counts the same, in units of the error that we promise for it; 1 for the largest at 8 %."""
    return 0.08 / PROMISED[row.dataset] * float(np.sqrt(max(counts.values()) / counts[row.dataset]))


def mape(errors: Sequence[float]) -> float:
    """Mean size of errors."""
    return float(np.mean(np.abs(errors)))


def distinct(rows: Sequence[Row]) -> list[Row]:
    """Rows that can be fitted; one that repeats another in everything, time included, counts once."""
    usable = [row for row in rows if row.reason is None and row.seconds]
    return list({(*row.question, row.seconds): row for row in usable}.values())


def same(values: Sequence[object]) -> list[list[int]]:
    """Indices of equal values."""
    groups: dict[object, list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(value, []).append(index)
    return list(groups.values())


Errors = dict[str, dict[str, float | int | None]]


def fit_family(name: str, rows: Sequence[Row], plugins: PluginManager) -> tuple[Calibration, Errors]:
    """Fit one family, print and return what was found."""
    family = FAMILIES[name]
    counts = {dataset: sum(row.dataset == dataset for row in rows) for dataset in family.datasets}
    stack = family.start.stack
    runs = [prepare_run(run_of(row, stack, weight(row, counts)), stack, plugins) for row in rows]
    fit = fitted(runs, family, family.start)
    print(f"{name}: " + ", ".join(f"{term} {getattr(fit.calibration, term):.4g}" for term in family.terms))
    print("  unseen:", fit.unseen, "inseparable:", fit.inseparable)
    print(f"  in sample {mape(fit.errors):.2%}", flush=True)
    alone = left_out(runs, family, fit.calibration, same([row.question for row in rows]))
    sets = same([row.dataset for row in rows])
    outside = left_out(runs, family, fit.calibration, sets) if len(sets) > 1 else None
    errors: Errors = {}
    for own in sets:
        dataset = rows[own[0]].dataset
        errors[dataset] = {
            "rows": len(own),
            "in_sample": round(mape([fit.errors[i] for i in own]), 4),
            "row_left_out": round(mape([alone[i] for i in own]), 4),
            "dataset_left_out": round(mape([outside[i] for i in own]), 4) if outside else None,
        }
        print(f"  {dataset}: {errors[dataset]}")
        for i in own:
            print(f"    {rows[i].name:60} {fit.errors[i]:+.1%} in sample, {alone[i]:+.1%} left out")
    return fit.calibration, errors


def main() -> None:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--write", action="store_true", help=f"into {TARGET.name}")
    arguments = parser.parse_args()
    plugins = PluginManager.load()
    document = json.loads(TARGET.read_text(encoding="utf-8"))
    for name in arguments.family or FAMILIES:
        family = FAMILIES[name]
        rows = read_rows(arguments.data, list(family.datasets))
        calibration, errors = fit_family(name, distinct(rows), plugins)
        memory = memory_terms([row for row in rows if row.reason is None], calibration)
        print(f"  {memory}", flush=True)
        seen = [term for term, least in (("reserve", 0.0), ("margin", 0.05)) if memory[term] > least]
        document["families"][name] = {
            "name": f"{name}, fitted to published runs",
            "chips": list(family.chips),
            "terms": {term: float(f"{getattr(calibration, term):.4g}") for term in TERMS} | memory,
            "fitted": [*family.terms, *seen],
            "stack": to_document(calibration.stack),
            "origin": family.origin,
            "errors": errors,
        }
    if arguments.write:
        TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
