"""Three measured runs and a shipped calibration: what a prior is worth, on a dataset most of which is left out.

    python benchmarks/calibration_prior.py --data DIR --dataset NAME [--draws N] [--most N]

Of the published rows of one dataset on one family of chips, three are drawn (always the same draws) and the others are
predicted: by the calibration that is shipped, by its terms fitted to the three rows alone from round numbers, and by
the same fit with the shipped calibration as a prior, as `phaze calibrate` makes it. Printed are the mean errors over
all draws. Whether the dataset was part of the shipped fit is said in ``hardware/data/calibrations.json``.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from published import Row, read_rows
from scoring import Scorer, distinct, mean_size, shipped_calibration

from phaze.calibration_fitting import PreparedRun, fit_terms, prior_error_of, separable_terms
from phaze.cost import Calibration

CANDIDATES = ("matrix", "memory", "link", "network", "overhead_s", "overlap")
KNOWN = 3
"""Runs that a user has."""
ROUND = {"matrix": 0.7, "memory": 0.7, "link": 0.7, "network": 0.7, "overhead_s": 1e-5, "overlap": 0.5}
"""Where a fit from scratch begins, as `phaze calibrate` does on a chip without a calibration."""


def errors(runs: Sequence[PreparedRun], rows: Sequence[Row], calibration: Calibration) -> list[float]:
    """Predicted over measured seconds, less one."""
    measured = [row.seconds or 0.0 for row in rows]
    return [float(run.seconds([calibration])[0]) / seconds - 1 for run, seconds in zip(runs, measured, strict=True)]


def fitted(
    runs: Sequence[PreparedRun], rows: Sequence[Row], start: Calibration, prior_error: float | None
) -> Calibration:
    """What `phaze calibrate` makes of a few runs."""

    def predict(calibrations: Sequence[Calibration]) -> np.ndarray:
        return np.stack([run.seconds(calibrations) for run in runs], axis=1)

    most = max(1, 2 * len(runs) // 3) if prior_error is None else len(CANDIDATES)
    terms, _ = separable_terms(predict, start, CANDIDATES, most)
    return fit_terms(predict, [row.seconds or 0.0 for row in rows], start, terms, prior_error=prior_error).calibration


def main() -> None:
    """Draw, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--most", type=int, default=40, help="rows that are looked at, evenly taken from the dataset")
    arguments = parser.parse_args()
    scorer = Scorer()
    own = [row for row in distinct(read_rows(arguments.data)) if row.dataset == arguments.dataset and row.seconds]
    own = own[:: max(1, -(-len(own) // arguments.most))]
    shipped = shipped_calibration(own[0])
    pairs = [(row, scorer.prepare(row, shipped.stack)) for row in own if row.chip == own[0].chip]
    known = [(row, run) for row, run in pairs if isinstance(run, PreparedRun)]
    sizes: dict[str, list[float]] = {"shipped": [], "three runs from scratch": [], "three runs with the prior": []}
    for draw in range(arguments.draws):
        chosen = set(random.Random(draw).sample(range(len(known)), KNOWN))
        few = [pair for index, pair in enumerate(known) if index in chosen]
        others = [pair for index, pair in enumerate(known) if index not in chosen]
        rows, runs = [row for row, _ in few], [run for _, run in few]
        fits = (
            shipped,
            fitted(runs, rows, replace(shipped, **ROUND), None),
            fitted(
                runs,
                rows,
                shipped,
                prior_error_of(shipped, [(run.problem.cluster, run.problem.recipe) for run in runs]),
            ),
        )
        for name, calibration in zip(sizes, fits, strict=True):
            sizes[name].append(mean_size(errors([run for _, run in others], [row for row, _ in others], calibration)))
    print(f"{arguments.dataset} on {own[0].chip}: {len(known)} rows, {KNOWN} of them known, {arguments.draws} draws")
    for name, found in sizes.items():
        print(f"  {name:26s} mean error {np.mean(found):6.1%}, worst draw {max(found):6.1%}")


if __name__ == "__main__":
    main()
