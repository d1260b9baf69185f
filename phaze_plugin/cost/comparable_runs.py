"""How far steps that were measured lay from their predictions, in runs like the one that is asked about.

Runs are alike where the calibration's family of chips, the number of nodes (one, or many) and the width of products
(two bytes and more, or fewer) are the same. ``hardware/data/calibrations.json`` has, for each such class with at least
`LEAST_RUNS` published runs, the tenth and the ninetieth percentile of measured against predicted seconds, each run
predicted by a fit that had no run of its group (`benchmarks/fit_published.py`). Where there is no such class nothing is
said: neither of chips that were not fitted, nor under a calibration of the user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phaze.cost.calibration import Calibration, fitted_families
from phaze.hardware import Cluster, PrecisionRecipe

__all__ = ["LEAST_RUNS", "ComparableRuns", "RunClass", "comparable_runs", "runs_by_class"]

LEAST_RUNS = 8
"""Fewer runs say too little of a tenth of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClass:
    """What makes runs on one family of chips comparable."""

    has_many_nodes: bool
    has_narrow_products: bool

    @classmethod
    def of(cls, cluster: Cluster, recipe: PrecisionRecipe) -> RunClass:
        """The class of runs on a cluster at a precision."""
        node = cluster.levels[0].size if cluster.levels else 1
        return cls(has_many_nodes=cluster.device_count > node, has_narrow_products=recipe.quantizes_products)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparableRuns:
    """Measured over predicted seconds, less one, of so many runs: 80 % lie between ``tenth`` and ``ninetieth``."""

    runs: int
    tenth: float
    ninetieth: float

    @property
    def spread(self) -> float:
        """The relative difference below which predictions of two steps do not tell which is the quicker one."""
        return max(abs(self.tenth), abs(self.ninetieth))

    def __str__(self) -> str:
        return f"80 % of {self.runs} comparable runs lie within {self.tenth:+.0%} and {self.ninetieth:+.0%}"


def comparable_runs(calibration: Calibration, cluster: Cluster, recipe: PrecisionRecipe) -> ComparableRuns | None:
    """The published runs that are like those on a cluster at a precision; None where too few are known."""
    family = next((family for family in fitted_families().values() if family["name"] == calibration.name), None)
    asked = RunClass.of(cluster, recipe)
    for entry in () if family is None else family.get("comparable", ()):
        if (entry["has_many_nodes"], entry["has_narrow_products"]) == (asked.has_many_nodes, asked.has_narrow_products):
            return ComparableRuns(runs=entry["runs"], tenth=entry["tenth"], ninetieth=entry["ninetieth"])
    return None


def runs_by_class(classes: Sequence[RunClass], errors: Sequence[float]) -> list[dict[str, object]]:
    """What is shipped of a family: of each class of its runs the quantiles of their errors, where they are enough.

    Errors are those of predictions (predicted over measured, less one), left out of the fit.
    """
    entries: list[dict[str, object]] = []
    for kind in dict.fromkeys(classes):
        ratios = [1 / (1 + error) - 1 for error, own in zip(errors, classes, strict=True) if own == kind]
        if len(ratios) >= LEAST_RUNS:
            tenth, ninetieth = np.quantile(ratios, [0.1, 0.9]).tolist()
            entries.append(
                {
                    "has_many_nodes": kind.has_many_nodes,
                    "has_narrow_products": kind.has_narrow_products,
                    "runs": len(ratios),
                    "tenth": round(tenth, 4),
                    "ninetieth": round(ninetieth, 4),
                }
            )
    return entries
