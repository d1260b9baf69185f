"""What a sampled search finds in the same space with the same evaluations: Optuna's TPE, as many people would use it.

Every field that varies over the space is a parameter (the position of its value among all values), memory too. A
proposal that is outside the space or was evaluated before gives way to the nearest point that is neither, and the
sampler is told of that one: every trial is an evaluation of something new. A trial that provably cannot beat the best
so far is told a bound above its throughput (by the sweep and quick placement, mostly within a few percent) instead of
being evaluated: quicker, and what is called best was evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phaze.errors import PlanError
from phaze.explore.bounds import Cell
from phaze.explore.boxes import Swept
from phaze.explore.question import SearchQuestion
from phaze.explore.tasks import EvaluateTask, evaluate_point
from phaze.hardware import Accelerator
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS
from phaze.place import bound_placement

__all__ = ["Sampled", "sample_designs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The best after so many evaluations: samples per second (0 if nothing fits), accelerator and memory."""

    evaluations: int
    samples_per_s: float
    name: str
    hbm_bytes: int


def sample_designs(
    question: SearchQuestion, cells: Sequence[Swept], evaluations: Sequence[int], seed: int = 0
) -> Iterator[Sampled]:
    """The throughput that sampling reaches after each number of evaluations, for the question's first model.

    `cells` are those that a search swept. Where the space has fewer points, the last has as many as there are. Raises
    PlanError where Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise PlanError("Optuna is not installed: pip install 'phaze-plugin[optuna]'.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    lattice = _Lattice(question)
    evaluator = _Evaluator(question, [swept for swept in cells if swept.cell.model == 0])
    ranges = {name: optuna.distributions.IntDistribution(0, high) for name, high in lattice.highest.items()}
    wanted = {min(count, lattice.size) for count in evaluations}
    for count in range(1, max(wanted) + 1):
        trial = study.ask(ranges)
        place, point, hbm_bytes = lattice.take(trial.params)
        value = evaluator.evaluate(point, hbm_bytes)
        if place == trial.params:
            study.tell(trial, value)
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            study.add_trial(optuna.trial.create_trial(params=place, distributions=dict(ranges), value=value))
        if count in wanted:
            yield replace(evaluator.best, evaluations=count)


class _Lattice:
    """The points of a space with their memories, by the positions of their values among all values of each field."""

    def __init__(self, question: SearchQuestion) -> None:
        points, self._sizes = question.points, question.hbm_bytes
        self.size = len(points) * len(self._sizes)
        columns = {name: getattr(points, name) for name in (*INTEGER_FIELDS, *REAL_FIELDS) if name != "hbm_bytes"}
        columns = {name: np.repeat(column, len(self._sizes)) for name, column in columns.items()}
        columns["hbm_bytes"] = np.tile(self._sizes, len(points))
        places = {name: np.unique(column, return_inverse=True)[1] for name, column in columns.items()}
        self.highest = {name: int(one.max()) for name, one in places.items() if one.any()}
        self._places = np.array([places[name] for name in self.highest]).reshape(len(self.highest), self.size)
        self._shares = np.array([[1 / high] for high in self.highest.values()]).reshape(-1, 1)
        self._is_taken = np.zeros(self.size, dtype=bool)

    def take(self, wanted: Mapping[str, int]) -> tuple[dict[str, int], int, int]:
        """The nearest place that was not taken before, its point and its memory."""
        away = np.abs(self._places - np.array([[wanted[name]] for name in self.highest]).reshape(-1, 1))
        row = int(np.where(self._is_taken, np.inf, (away * self._shares).sum(axis=0)).argmin())
        self._is_taken[row] = True
        place = dict(zip(self.highest, self._places[:, row].tolist(), strict=True))
        return place, row // len(self._sizes), self._sizes[row % len(self._sizes)]


class _Evaluator:
    """The throughput of points of the space, and the best of them."""

    def __init__(self, question: SearchQuestion, cells: Sequence[Swept]) -> None:
        self._question, self._cells = question, cells
        self.best = Sampled(evaluations=0, samples_per_s=0.0, name="", hbm_bytes=0)

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
        task = EvaluateTask(request=request, accelerator=chip, cells=tuple(bounds), cutoff_s=math.inf)
        outcome = evaluate_point(task)
        found = 0.0 if outcome.time_s is None else samples / outcome.time_s
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
            least_s = min(least_s, bound_s)
            found.append((bound_s, swept.cell))
        return found

    def _bound(self, swept: Swept, point: int, chip: Accelerator, cutoff_s: float) -> float:
        problem = swept.cell.problem_at(swept.rows.seconds[point], chip)
        return bound_placement(problem, cutoff_s=cutoff_s, network=swept.cell.network)
