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
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from published_rows import Row, read_rows
from validation import price

from phaze.cost import EAGER_STACK, LIBRARY_STACK, Calibration, Stack
from phaze.fitting import Fit, PreparedRun, Run, fit_terms, prepare
from phaze.fitting.least_squares import point_of, slopes_at
from phaze.hooks import PluginManager
from phaze.records import to_document

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
        terms=("matrix", "memory", "link", "network", "overhead_s"),
        start=Calibration(
            matrix=0.812, memory=0.829, link=0.852, network=0.832, overhead_s=1.1e-5, overlap=0.0, stack=LIBRARY_STACK
        ),
        origin="arXiv:2104.04473 table 1; arXiv:2205.05198 table 5; BigScience's topology sweep of February 2022",
    ),
    "h100": Family(
        chips=("h100",),
        datasets=("torchtitan",),
        terms=("matrix", "memory"),
        start=Calibration(
            matrix=0.84, memory=0.3, link=0.8, network=0.8, overhead_s=3e-6, overlap=0.8, stack=LIBRARY_STACK
        ),
        origin="torchtitan's Llama 3.1 tables (a part with 2.4 TB/s HBM2e and 500 W; a stock one may do better); "
        "links, overhead and overlap are assumed: five rows do not show them",
    ),
    "tpuv4": Family(
        chips=("tpuv4",),
        datasets=("maxtext",),
        terms=("matrix",),
        start=Calibration(matrix=0.8, memory=0.8, link=0.8, network=0.5, overlap=0.8, stack=XLA_STACK),
        origin="MaxText's TPU v4 table; all but matrix is assumed: six rows do not show it",
    ),
}


def run_of(row: Row, weight: float = 1.0) -> Run:
    """A row as a run."""
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
        stack=EAGER_STACK if row.is_eager else None,
        fuses_attention=row.fuses_attention,
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
    is then predicted exactly.
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
        refit = fit_terms(predict, measured, best, family.terms, weights=weights).calibration
        for index in group:
            errors[index] = float(runs[index].seconds([refit])[0]) / runs[index].run.seconds - 1
    return errors


def reserve_of(rows: Sequence[Row], calibration: Calibration) -> float:
    """What devices hold beyond the need that we predict: the median over rows with a measured figure."""
    shares = []
    for row in rows:
        if row.memory_bytes is not None and not row.fuses_attention:
            plan = price(row, replace(calibration, reserve=0.0))
            shares.append(row.memory_bytes / max(stage.memory_bytes["total"] for stage in plan.stages) - 1)
    return max(0.0, statistics.median(shares)) if shares else 0.0


def weight(row: Row, counts: dict[str, int]) -> float:
    """Every dataset counts the same, in units of the error that we promise for it; 1 for the largest at 8 %."""
    return 0.08 / PROMISED[row.dataset] * float(np.sqrt(max(counts.values()) / counts[row.dataset]))


def mape(errors: Sequence[float]) -> float:
    """Mean size of errors."""
    return float(np.mean(np.abs(errors)))


def distinct(rows: Sequence[Row]) -> list[Row]:
    """Rows that can be fitted; repeats of a question are averaged."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.reason is None and row.seconds is not None:
            found.setdefault(row.question, []).append(row)
    return [row for repeats in found.values() for row in repeats]


def main() -> None:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--times-only", action="store_true", help="keep the reserve of memory as it is in the file")
    parser.add_argument("--write", action="store_true", help=f"into {TARGET.name}")
    arguments = parser.parse_args()
    plugins = PluginManager.load()
    document = json.loads(TARGET.read_text(encoding="utf-8"))
    for name in arguments.family or FAMILIES:
        family = FAMILIES[name]
        rows = [row for row in distinct(read_rows(arguments.data, list(family.datasets))) if row.seconds]
        counts = {dataset: sum(row.dataset == dataset for row in rows) for dataset in family.datasets}
        runs = [prepare(run_of(row, weight(row, counts)), family.start.stack, plugins) for row in rows]
        fit = fitted(runs, family, family.start)
        print(f"{name}: " + ", ".join(f"{term} {getattr(fit.calibration, term):.4g}" for term in family.terms))
        print("  unseen:", fit.unseen, "inseparable:", fit.inseparable)
        print(f"  in sample {mape(fit.errors):.2%}", flush=True)
        alone = left_out(runs, family, fit.calibration, [[index] for index in range(len(runs))])
        sets = [[index for index, row in enumerate(rows) if row.dataset == dataset] for dataset in family.datasets]
        outside = left_out(runs, family, fit.calibration, sets) if len(sets) > 1 else []
        errors: dict[str, dict[str, float | int | None]] = {}
        for dataset in family.datasets:
            own = [index for index, row in enumerate(rows) if row.dataset == dataset]
            errors[dataset] = {
                "rows": len(own),
                "in_sample": round(mape([fit.errors[i] for i in own]), 4),
                "row_left_out": round(mape([alone[i] for i in own]), 4),
                "dataset_left_out": round(mape([outside[i] for i in own]), 4) if outside else None,
            }
            print(f"  {dataset}: {errors[dataset]}")
            for i in own:
                if dataset != "bigscience" or abs(alone[i]) > 0.08:
                    print(f"    {rows[i].name:60} {fit.errors[i]:+.1%} in sample, {alone[i]:+.1%} left out")
        known = document["families"].get(name, {}).get("terms", {}).get("reserve")
        reserve = known if arguments.times_only and known is not None else reserve_of(rows, fit.calibration)
        print(f"  reserve {reserve:.3f}", flush=True)
        document["families"][name] = {
            "name": f"{name}, fitted to published runs",
            "chips": list(family.chips),
            "terms": {
                term: float(f"{getattr(fit.calibration, term):.4g}")
                for term in ("matrix", "vector", "memory", "link", "network", "overhead_s", "overlap")
            }
            | {"reserve": round(reserve, 3)},
            "fitted": [*family.terms, "reserve"] if reserve else list(family.terms),
            "stack": to_document(fit.calibration.stack),
            "origin": family.origin,
            "errors": errors,
        }
    if arguments.write:
        TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
