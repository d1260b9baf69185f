"""Fits the calibrations of `phaze_plugin/hardware/data/calibrations.json` to published runs.

    python benchmarks/fit_published.py --data DIR [--family a100] [--rows] [--as-shipped] [--write]

One fit per family of chips over all rows on its chips, whatever dataset they are of: at most six numbers, none of
which depends on a dataset, a model or a row. Every part of a dataset counts the same, however many rows it has, and
rows of one question (the same run published in several versions) share one weight. A part that has one question twice
with times that differ by more than `LARGEST_CONTRADICTION` is not fitted to: its releases differ more than its runs;
nor is one of fewer than `LEAST_ROWS_OF_A_PART` rows.
Fits go in rounds: the logarithms of seconds are linear in the terms near a point, so that each round solves a robust
least-squares problem on derivatives at the last point and moves there. Printed are the terms, and for each part of a
dataset the error in sample, and with each group of rows that differ only in strategy left out as a whole (the others
refitted on derivatives at the optimum, what was left out predicted exactly). With ``--as-shipped`` terms stay as they
are shipped, and errors, reserve and margin are those of today's prices: for changes that hardly move a term.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from published import Row, read_rows
from scoring import Scorer, distinct, mean_size
from validation import part_of

from phaze.calibration_fitting import PreparedRun, fit_terms
from phaze.calibration_fitting.least_squares import point_of, slopes_at
from phaze.cost import LIBRARY_STACK, Calibration, Stack
from phaze.cost.calibration import TERMS, RunClass, fitted_families, runs_by_class
from phaze.json_documents import to_document

TARGET = Path(__file__).parent.parent / "phaze_plugin" / "hardware" / "data" / "calibrations.json"
ROUNDS = 8
"""Linear fits one after the other, enough for a term to move by a factor of 25 from where it begins."""
LARGEST_STEP = 1.5
"""The factor by which a term may change in one round."""
LEAST_ROWS_OF_A_PART = 3
"""Parts with fewer rows are scored and not fitted to."""
LARGEST_CONTRADICTION = 1.5
"""The ratio of two published times of one run beyond which no constants of a chip explain both."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Chips that share a calibration, what is fitted to rows on them, and where the fit begins."""

    chips: tuple[str, ...]
    terms: tuple[str, ...]
    start: Calibration
    origin: str


_GPU_START = Calibration(
    matrix=0.95, attention=0.5, memory=0.6, link=0.9, network=0.7, overhead_s=1e-5, overlap=0.8, stack=LIBRARY_STACK
)
_TPU_START = Calibration(
    matrix=0.8, memory=0.8, link=0.8, network=0.5, overlap=0.8, stack=Stack(recomputes_ends=False, hides_links=False)
)
_MAXTEXT = "MaxText's tables as first published"
FAMILIES = {
    "a100": Family(
        chips=("a100-40gb", "a100-80gb"),
        terms=("attention", "memory", "network", "overhead_s"),
        start=replace(_GPU_START, matrix=1.0, link=1.0),  # as measured; the reserve and the margin make six
        origin="arXiv:2104.04473 table 1; arXiv:2205.05198 table 5; BigScience's topology sweep of February 2022; "
        "vTrain's ground truth; llm-foundry's and InternEvo's tables",
    ),
    "h100": Family(
        chips=("h100", "h200", "h800", "gh200"),
        terms=("narrow_matrix", "attention", "memory", "network"),
        start=replace(_GPU_START, matrix=1.0, link=1.0),  # as measured; the reserve makes five
        origin="torchtitan's, llm-foundry's, nanotron's, NVIDIA DGX Cloud's, NeMo's and Megatron-Bridge's tables on "
        "H100; H200, H800 and GH200 share its multiprocessors and were in no row",
    ),
    "blackwell": Family(
        chips=("b200", "b300", "gb200", "gb300"),
        terms=("narrow_matrix", "attention", "memory", "network"),
        start=replace(_GPU_START, matrix=1.0, link=1.0),
        origin="NVIDIA DGX Cloud's and Megatron-Bridge's tables on B200, B300, GB200 and GB300; the rest is assumed",
    ),
    "tpuv4": Family(chips=("tpuv4",), terms=("matrix",), start=_TPU_START, origin=f"{_MAXTEXT}; the rest is assumed"),
    "tpuv5e": Family(
        chips=("tpuv5e",),
        terms=("matrix", "memory", "network"),
        start=_TPU_START,
        origin=f"{_MAXTEXT}; the rest is assumed",
    ),
    "tpuv5p": Family(
        chips=("tpuv5p",),
        terms=("matrix", "link"),
        start=_TPU_START,
        origin=f"{_MAXTEXT}; the rest is assumed",
    ),
    "tpuv6e": Family(
        chips=("tpuv6e",), terms=("matrix",), start=_TPU_START, origin="Google's recipes; all but matrix is assumed"
    ),
    "tpu7x": Family(
        chips=("tpu7x",), terms=("matrix",), start=_TPU_START, origin="Google's recipes; all but matrix is assumed"
    ),
}

_Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The rows of a family as prepared runs, with their weights."""

    rows: tuple[Row, ...]
    runs: tuple[PreparedRun, ...]
    weights: _Floats

    @property
    def measured_s(self) -> _Floats:
        """What was measured."""
        return np.array([row.seconds for row in self.rows], dtype=float)

    def predict(self, calibrations: Sequence[Calibration]) -> _Floats:
        """Seconds per (calibration, row)."""
        return np.stack([run.seconds(calibrations) for run in self.runs], axis=1)


def sample_of(rows: Sequence[Row], family: Family, scorer: Scorer) -> Sample:
    """Every row on the family's chips that can be priced and fitted to, but for parts that contradict themselves."""
    usable = [row for row in distinct(rows) if row.chip in family.chips and row.not_fitted is None]
    for reason, count in Counter(row.not_fitted for row in rows if row.not_fitted).items():
        print(f"{count} rows are not fitted to: {reason}")
    unfit = contradicting_parts(usable) | small_parts(usable)
    usable = [row for row in usable if part_of(row) not in unfit]
    prepared = [(row, scorer.prepare(row, family.start.stack)) for row in usable]
    kept = [(row, run) for row, run in prepared if isinstance(run, PreparedRun)]
    repeats = Counter(row.question for row, _ in kept)
    parts = Counter[str]()
    for row, _ in kept:
        parts[part_of(row)] += 1 / repeats[row.question]
    weights = [1 / math.sqrt(parts[part_of(row)] * repeats[row.question]) for row, _ in kept]
    return Sample(
        rows=tuple(row for row, _ in kept),
        runs=tuple(run for _, run in kept),
        weights=np.array(weights) / max(weights, default=1.0),
    )


def small_parts(rows: Sequence[Row]) -> set[str]:
    """Parts of datasets with so few rows that they would say too much where every part counts the same; printed."""
    counts = Counter(part_of(row) for row in rows)
    found = {part for part, count in counts.items() if count < LEAST_ROWS_OF_A_PART}
    for part in sorted(found):
        print(f"{part}: not fitted to, it has {counts[part]} rows")
    return found


def contradicting_parts(rows: Sequence[Row]) -> set[str]:
    """Parts of datasets in which one run has published times that differ too much; printed."""
    times: dict[tuple[str, object], list[float]] = {}
    for row in rows:
        if row.seconds is not None:
            times.setdefault((part_of(row), row.question), []).append(row.seconds)
    found = {part for (part, _), seconds in times.items() if max(seconds) > LARGEST_CONTRADICTION * min(seconds)}
    for part in sorted(found):
        print(f"{part}: not fitted to, one of its runs was published with times that contradict each other")
    return found


@dataclass(frozen=True, kw_only=True)
class Tangent:
    """The logarithms of a sample's seconds near a calibration, linear in its terms."""

    terms: tuple[str, ...]
    point: _Floats
    logarithms: _Floats
    slopes: _Floats

    @classmethod
    def at(cls, sample: Sample, calibration: Calibration, terms: tuple[str, ...]) -> Tangent:
        """Derivatives by differences."""
        point, now, slopes = slopes_at(sample.predict, calibration, terms)
        return cls(terms=terms, point=point, logarithms=np.log(now), slopes=slopes)

    def fit(self, sample: Sample, calibration: Calibration, kept: NDArray[np.bool_]) -> Calibration:
        """The best terms for some of the rows; a term that they do not show stays as it is."""

        def predict(calibrations: Sequence[Calibration]) -> _Floats:
            points = np.stack([point_of(tried, self.terms) for tried in calibrations])
            return np.exp((self.logarithms + (points - self.point) @ self.slopes.T)[:, kept])

        weights = sample.weights[kept]
        return fit_terms(predict, sample.measured_s[kept], calibration, self.terms, weights=weights).calibration


def fitted(sample: Sample, family: Family) -> tuple[Calibration, Tangent]:
    """The best calibration, and the derivatives there."""
    calibration, everything = family.start, np.ones(len(sample.rows), dtype=bool)
    tangent = Tangent.at(sample, calibration, family.terms)
    for _ in range(ROUNDS):
        calibration = nearer(calibration, tangent.fit(sample, calibration, everything), family.terms)
        tangent = Tangent.at(sample, calibration, family.terms)
    return calibration, tangent


def shipped(sample: Sample, name: str, family: Family) -> tuple[Calibration, Tangent]:
    """The calibration that is shipped, and the derivatives there."""
    calibration = replace(family.start, **{term: fitted_families()[name]["terms"][term] for term in TERMS})
    return calibration, Tangent.at(sample, calibration, family.terms)


def nearer(before: Calibration, after: Calibration, terms: Sequence[str]) -> Calibration:
    """A step towards a fit that changes no term by more than `LARGEST_STEP`: derivatives hold near their point only."""
    moved = {}
    for term in terms:
        old, new = getattr(before, term), getattr(after, term)
        moved[term] = min(max(new, old / LARGEST_STEP), old * LARGEST_STEP)
    return replace(before, **moved)


def left_out(sample: Sample, tangent: Tangent, best: Calibration) -> _Floats:
    """The error of every row when its group has no part in the fit."""
    groups: dict[object, list[int]] = {}
    for index, row in enumerate(sample.rows):
        groups.setdefault(row.group_key, []).append(index)
    errors = np.zeros(len(sample.rows))
    for members in groups.values():
        kept = np.ones(len(sample.rows), dtype=bool)
        kept[members] = False
        if kept.sum() < len(tangent.terms):
            kept[:] = True  # A family whose rows are one group has nothing to be fitted to without it.
        refit = tangent.fit(sample, best, kept)
        for index in members:
            errors[index] = float(sample.runs[index].seconds([refit])[0]) / sample.measured_s[index] - 1
    return errors


def memory_terms(rows: Sequence[Row], family: Family, scorer: Scorer) -> dict[str, float]:
    """What devices hold beyond the need that we predict, and the margin that tells runs which ran out of memory.

    The reserve is the median over rows with a measured figure; the margin is the least (in percent, at least the usual
    five) that calls the rows which ran out of memory.
    """
    shares, fullest = [], []
    own = [row for row in rows if row.reason is None and row.chip in family.chips]
    for row in {row.question: row for row in own}.values():
        run = scorer.prepare(row, family.start.stack)
        if isinstance(run, str):
            continue
        filled = run.needed_bytes / run.problem.cluster.accelerator.hbm_bytes
        if row.is_out_of_memory:
            fullest.append(filled)
        elif row.memory_bytes:
            shares.append(row.memory_bytes / run.needed_bytes - 1)
    reserve = round(max(0.0, statistics.median(shares)), 3) if shares else 0.0
    least = min((share * (1 + reserve) for share in fullest), default=1.0)
    return {"reserve": reserve, "margin": max(0.05, math.ceil((1 - least) * 100) / 100)}


Errors = dict[str, dict[str, float | int]]


def errors_by_part(sample: Sample, inside: _Floats, outside: _Floats, shows_rows: bool) -> Errors:
    """Mean errors of each part of a dataset, printed and returned."""
    found: Errors = {}
    for part in dict.fromkeys(part_of(row) for row in sample.rows):
        own = [index for index, row in enumerate(sample.rows) if part_of(row) == part]
        found[part] = {
            "rows": len(own),
            "in_sample": round(mean_size(inside[own].tolist()), 4),
            "group_left_out": round(mean_size(outside[own].tolist()), 4),
        }
        bias = statistics.mean(outside[own].tolist())
        print(f"  {part:36} {found[part]}, bias {bias:+.1%}")
        for index in own if shows_rows else ():
            print(f"    {sample.rows[index].name:76} {inside[index]:+.1%} in sample, {outside[index]:+.1%} left out")
    return found


def quantiles(outside: _Floats) -> dict[str, float]:
    """Where 80 % of comparable runs lie, measured against predicted: the 10th and 90th percentile."""
    ratios = 1 / (1 + outside) - 1
    low, high = np.quantile(ratios, [0.1, 0.9]).tolist()
    return {"runs": len(outside), "tenth": round(low, 4), "ninetieth": round(high, 4)}


def fit_family(
    name: str, rows: Sequence[Row], scorer: Scorer, shows_rows: bool, keeps_terms: bool
) -> dict[str, object] | None:
    """Fit one family, print what was found and return what is written; None where no row is on its chips."""
    family = FAMILIES[name]
    sample = sample_of(rows, family, scorer)
    if len(sample.rows) < len(family.terms):
        print(f"{name}: {len(sample.rows)} rows, too few for {len(family.terms)} terms")
        return None
    calibration, tangent = shipped(sample, name, family) if keeps_terms else fitted(sample, family)
    inside = np.exp(tangent.logarithms) / sample.measured_s - 1
    outside = left_out(sample, tangent, calibration)
    shown = ", ".join(f"{term} {getattr(calibration, term):.4g}" for term in family.terms)
    print(f"{name}: {len(sample.rows)} rows, {shown}", flush=True)
    errors = errors_by_part(sample, inside, outside, shows_rows)
    memory = memory_terms(rows, family, scorer)
    print(f"  {memory}, {quantiles(outside)}", flush=True)
    seen = [term for term, least in (("reserve", 0.0), ("margin", 0.05)) if memory[term] > least]
    return {
        "name": f"{name}, fitted to published runs",
        "chips": list(family.chips),
        "terms": {term: float(f"{getattr(calibration, term):.4g}") for term in TERMS} | memory,
        "fitted": [*family.terms, *seen],
        "stack": to_document(calibration.stack),
        "origin": family.origin,
        "errors": errors,
        "comparable": runs_by_class(
            [RunClass.of(run.problem.cluster, run.problem.recipe) for run in sample.runs], outside.tolist()
        ),
    }


def main() -> None:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--as-shipped", action="store_true", help="keep the shipped terms, renew their errors")
    parser.add_argument("--write", action="store_true", help=f"into {TARGET.name}")
    arguments = parser.parse_args()
    scorer, rows = Scorer(), read_rows(arguments.data)
    document = json.loads(TARGET.read_text(encoding="utf-8"))
    for name in arguments.family or FAMILIES:
        written = fit_family(name, rows, scorer, arguments.rows, arguments.as_shipped)
        if written is not None:
            document["families"][name] = written
    if arguments.write:
        TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
