"""Three measured runs and a calibration that never saw their like: what a prior is worth, table by table.

    python benchmarks/calibration_prior.py --data DIR [--family a100] [--draws N]

Each published table on a family of chips is left out as a whole, and the family's terms are fitted to the others. Of
the table's rows three are drawn (always the same draws) and the others are predicted: by that fit, and by it with the
three known, as `phaze calibrate` makes of them with a prior. Printed are the mean errors over all draws, and the worst
draw. All fits are made on derivatives at the shipped terms, so that hundreds of them take seconds.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fit_published import FAMILIES, Family, Sample, Tangent, sample_of, shipped
from numpy.typing import NDArray
from published import read_rows
from scoring import Scorer
from validation import part_of

from phaze.calibration_fitting import fit_terms, prior_error_of
from phaze.calibration_fitting.least_squares import point_of
from phaze.cost import Calibration

TERMS = ("matrix", "attention", "memory", "link", "network", "overhead_s", "overlap")
"""What `phaze calibrate` fits to steps whose products are not narrow."""
KNOWN = 3
"""Runs that a user has."""
LEAST_ROWS = 20
"""Smaller tables leave too few rows to predict."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """Some rows of a sample, predicted linearly in the terms."""

    sample: Sample
    tangent: Tangent
    members: NDArray[np.int64]

    @property
    def measured_s(self) -> _Floats:
        """What was measured."""
        return self.sample.measured_s[self.members]

    def predict(self, calibrations: Sequence[Calibration]) -> _Floats:
        """Seconds per (calibration, row)."""
        points = np.stack([point_of(calibration, TERMS) for calibration in calibrations]) - self.tangent.point
        return np.asarray(np.exp(self.tangent.logarithms[self.members] + points @ self.tangent.slopes[self.members].T))

    def rows(self, chosen: Sequence[int]) -> Table:
        """Some of the rows."""
        return Table(self.sample, self.tangent, self.members[list(chosen)])

    def error(self, calibration: Calibration) -> float:
        """The mean of the errors' sizes."""
        return float(np.abs(self.predict([calibration])[0] / self.measured_s - 1).mean())

    def fitted(
        self,
        start: Calibration,
        terms: Sequence[str],
        weights: Sequence[float] | None = None,
        prior_error: float | None = None,
    ) -> Calibration:
        """The start with its terms fitted to the rows."""
        seconds = self.measured_s.tolist()
        return fit_terms(self.predict, seconds, start, terms, weights=weights, prior_error=prior_error).calibration


def main() -> None:
    """Leave each table out, draw, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--family", choices=FAMILIES, default="a100")
    parser.add_argument("--draws", type=int, default=100)
    arguments = parser.parse_args()
    family = FAMILIES[arguments.family]
    sample = sample_of(read_rows(arguments.data), family, Scorer())
    start, _ = shipped(sample, arguments.family, family)
    table = Table(sample, Tangent.at(sample, start, TERMS), np.arange(len(sample.rows)))
    parts = np.array([part_of(row) for row in sample.rows])
    for part in dict.fromkeys(parts.tolist()):
        if (parts == part).sum() >= LEAST_ROWS:
            others = table.rows(np.flatnonzero(parts != part).tolist())
            without = others.fitted(start, family.terms, weights=sample.weights[others.members].tolist())
            show(part, table.rows(np.flatnonzero(parts == part).tolist()), without, start, family, arguments.draws)


def show(part: str, own: Table, without: Calibration, start: Calibration, family: Family, draws: int) -> None:
    """The errors of one table with three of its rows known, over all draws."""
    before, after = [], []
    for draw in range(draws):
        chosen = random.Random(draw).sample(range(len(own.members)), KNOWN)
        known, rest = own.rows(chosen), own.rows([row for row in range(len(own.members)) if row not in chosen])
        problems = [own.sample.runs[member].problem for member in known.members]
        prior_error = prior_error_of(start, [(problem.cluster, problem.recipe) for problem in problems])
        before.append(rest.error(without))
        after.append(rest.error(known.fitted(without, TERMS, prior_error=prior_error)))
    print(
        f"{part:24s} {len(own.members):4d} rows on {family.chips[0]} and its kin, left out {np.mean(before):6.1%}, "
        f"three known {np.mean(after):6.1%}, worst draw {max(after):6.1%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
