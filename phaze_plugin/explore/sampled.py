"""What a sampled search finds in the same space with the same evaluations: Optuna's TPE, as many people would use it.

Every field that varies over the space is a parameter (the position of its value among all values), memory too. Trials
outside the space become the nearest point of it, repeated ones are counted once. A trial that provably
cannot beat the best so far is told a bound above its throughput (by the sweep and quick placement, mostly within a few
percent) instead of being evaluated: quicker, and what is called best was evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from phaze.errors import PlanError
from phaze.explore.bounds import Cell
from phaze.explore.boxes import Swept
from phaze.explore.question import SearchQuestion
from phaze.explore.tasks import EvaluateTask, evaluate_point
from phaze.hardware import Accelerator
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS
from phaze.place import Effort, bound_placement

if TYPE_CHECKING:
    import optuna

__all__ = ["Sampled", "sample_designs"]

_MOST_ASKED = 30
"""Trials per evaluation after which sampling ends: what is left of the space is hardly ever proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The best after so many evaluations: samples per second (0 if nothing fits), accelerator and memory."""

    evaluations: int
    samples_per_s: float
    name: str
    hbm_bytes: int


def sample_designs(
    question: SearchQuestion, cells: Sequence[Swept], evaluations: Sequence[int], seed: int = 0
) -> list[Sampled]:
    """The throughput that sampling reaches after each number of evaluations, for the question's first model.

    `cells` are those that a search swept. Where new points are hardly ever proposed, the last has fewer. Raises
    PlanError where Optuna is not installed.
    """
    study = _study(seed)
    sampling = _Sampling(question, [swept for swept in cells if swept.cell.model == 0])
    told: dict[tuple[int, int], float] = {}
    found: list[Sampled] = []
    wanted = sorted(set(evaluations))
    for _ in range(_MOST_ASKED * wanted[-1]):
        trial = study.ask()
        at = sampling.propose(trial)
        is_new = at not in told
        if is_new:
            told[at] = sampling.evaluate(*at)
        study.tell(trial, told[at])
        if is_new and len(told) in wanted:
            found.append(replace(sampling.best, evaluations=len(told)))
        if len(told) == wanted[-1]:
            return found
    return [*found, replace(sampling.best, evaluations=len(told))]


def _study(seed: int) -> optuna.Study:
    try:
        import optuna
    except ImportError as error:
        raise PlanError("Optuna is not installed: pip install 'phaze-plugin[optuna]'.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))


class _Sampling:
    """Proposals as points of the space, and their throughput."""

    def __init__(self, question: SearchQuestion, cells: Sequence[Swept]) -> None:
        self._question, self._cells = question, cells
        points = question.points
        columns = {name: getattr(points, name) for name in (*INTEGER_FIELDS, *REAL_FIELDS) if name != "hbm_bytes"}
        values = {name: np.unique(column) for name, column in columns.items()}
        self._values = {name: one for name, one in values.items() if len(one) > 1}
        positions = [np.searchsorted(one, columns[name]).tolist() for name, one in self._values.items()]
        self._points: dict[tuple[int, ...], int] = {(): 0}
        if positions:
            self._points = {key: at for at, key in enumerate(zip(*positions, strict=True))}
        self._next: dict[tuple[int, ...], set[int]] = {}
        for key in self._points:
            for depth, value in enumerate(key):
                self._next.setdefault(key[:depth], set()).add(value)
        self.best = Sampled(evaluations=0, samples_per_s=0.0, name="", hbm_bytes=0)

    def propose(self, trial: optuna.Trial) -> tuple[int, int]:
        """The point and memory of a trial: of each field the nearest value that is there beside those before it."""
        at: tuple[int, ...] = ()
        for name, values in self._values.items():
            wanted = trial.suggest_int(name, 0, len(values) - 1)
            at = (*at, min(self._next[at], key=lambda value: (abs(value - wanted), value)))
        sizes = self._question.hbm_bytes
        return self._points[at], sizes[trial.suggest_int("hbm_bytes", 0, len(sizes) - 1)]

    def evaluate(self, point: int, hbm_bytes: int) -> float:
        """Samples per second; where it cannot beat the best so far, a bound above them. 0 where nothing fits."""
        request = self._question.requests[0]
        samples, most = request.global_batch_size, self.best.samples_per_s
        cutoff_s = samples / most if most else math.inf
        chip = replace(self._question.points.at(point), hbm_bytes=hbm_bytes)
        bounds = self._bounds(point, chip, cutoff_s)
        least_s = min(bound_s for bound_s, _ in bounds)
        if least_s >= cutoff_s:
            return samples / least_s
        outcome = evaluate_point(
            EvaluateTask(request=request, accelerator=chip, cells=tuple(bounds), cutoff_s=cutoff_s)
        )
        if outcome.time_s is None:
            return min(samples / least_s, most)
        found = samples / outcome.time_s
        if found > most:
            self.best = Sampled(evaluations=0, samples_per_s=found, name=chip.name, hbm_bytes=hbm_bytes)
        return found

    def _bounds(self, point: int, chip: Accelerator, cutoff_s: float) -> list[tuple[float, Cell]]:
        """The cells of a point with bounds under their step times, by placement as far as these matter.

        Those of cells that are neither below the cutoff nor the point's quickest do not. Of cells about as quick the
        smallest microbatches come first: mostly the best, and the others are then done.
        """
        known = sorted(
            ((float(swept.rows.least_s[point]), swept) for swept in self._cells),
            key=lambda pair: (round(20 * math.log(pair[0])), pair[1].cell.micro_batch_size, pair[1].cell.name),
        )
        found: list[tuple[float, Cell]] = []
        least_s = math.inf
        for swept_s, swept in known:
            bound_s = swept_s
            enough_s = max(least_s, cutoff_s)
            if swept_s < enough_s:
                bound_s = max(swept_s, self._bound(swept, point, chip, enough_s))
            if bound_s < cutoff_s < math.inf:
                bound_s = max(bound_s, self._bound(swept, point, chip, cutoff_s, Effort()))
            least_s = min(least_s, bound_s)
            found.append((bound_s, swept.cell))
        return found

    def _bound(
        self, swept: Swept, point: int, chip: Accelerator, cutoff_s: float, effort: Effort | None = None
    ) -> float:
        problem = swept.cell.problem_at(swept.rows.seconds[point], chip)
        return bound_placement(problem, cutoff_s=cutoff_s, effort=effort, network=swept.cell.network)
