"""What a sampled search finds in the same space with the same evaluations: Optuna's TPE, as many people would use it.

Every field that varies over the space is a parameter (the position of its value among all values), memory too. A
proposal that is outside the space or was evaluated before gives way to the nearest point that is neither, and the
sampler is told of that one: every trial is an evaluation of something new.

TPE learns from which trials are its best few (a tenth of all, at most 25) and never from how good the others are. So a
trial that provably is not among the best 25 is told 0 and not evaluated to the end: the same proposals follow (up to
the gap of evaluations), in a fraction of the time. What is called best was evaluated.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import optuna

from phaze.explore.design_bounds import FloatArray, SweptSlicing, run_sweeps, sweep_tasks
from phaze.explore.executors import Workers
from phaze.explore.search_question import SearchQuestion
from phaze.explore.worker_tasks import EvaluateTask, evaluate_design
from phaze.hardware import Accelerator
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS
from phaze.parallelism import Parallelism
from phaze.place import is_beaten
from phaze.place.model.stage_costs import update_s_per_parameter

__all__ = ["Sampled", "sample_designs"]

_BEST_FEW = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The best after so many evaluations: samples per second (0 if nothing fits), accelerator and memory."""

    evaluations: int
    samples_per_s: float
    name: str
    hbm_bytes: int


def sample_designs(
    question: SearchQuestion,
    evaluations: Sequence[int],
    *,
    enough_samples_per_s: float = math.inf,
    seed: int = 0,
) -> Iterator[Sampled]:
    """The throughput that sampling reaches after each number of evaluations, for the question's first model.

    The last has fewer evaluations where it reached enough, or where the space has no more points.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    lattice = _Lattice(question)
    evaluator = _Evaluator.of(question)
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
        is_enough = evaluator.best.samples_per_s >= enough_samples_per_s
        if count in wanted or is_enough:
            yield replace(evaluator.best, evaluations=count)
        if is_enough:
            return


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
    """The throughput of points of the space as far as they are among the best few, and the best of them."""

    def __init__(self, question: SearchQuestion, slicings: Sequence[SweptSlicing], few: int) -> None:
        self._question, self._slicings, self._few = question, slicings, few
        self._best_few: list[float] = []  # ascending
        self._likely: dict[str, Parallelism | None] = {}  # by slicing: what was best the last time
        self._beaten: dict[str, _Beaten] = {
            swept.slicing.name: _Beaten(len(swept.slicing.columns) + 2) for swept in slicings
        }
        self.best = Sampled(evaluations=0, samples_per_s=0.0, name="", hbm_bytes=0)

    @classmethod
    def of(cls, question: SearchQuestion, few: int = _BEST_FEW) -> _Evaluator:
        """All slicings of the first model are swept tightly."""
        tasks = [replace(task, is_tight=True) for task in sweep_tasks(question) if task.model == 0]
        return cls(question, run_sweeps(tasks, Workers())[0], few)

    def evaluate(self, point: int, hbm_bytes: int) -> float:
        """Samples per second; 0 where it is not among the best few, or nothing fits."""
        model_question = self._question.questions[0]
        samples, found_s = model_question.global_batch_size, math.inf
        cutoff_s = samples / self._best_few[0] if len(self._best_few) == self._few else math.inf
        chip = replace(self._question.points.at(point), hbm_bytes=hbm_bytes)
        for swept in self._promising(point):
            slicing, least_s = swept.slicing, float(swept.bounds.step_s[point])
            if least_s >= cutoff_s or self._is_beaten(swept, point, chip, cutoff_s):
                continue
            evaluation = evaluate_design(
                EvaluateTask(
                    model_question=model_question,
                    accelerator=chip,
                    slicings=((least_s, slicing),),
                    cutoff_s=cutoff_s / (1 - model_question.gap / 2),  # what is nearer to it is not looked for
                    likely=self._likely.get(slicing.name),
                )
            )
            if evaluation.time_s is not None and evaluation.time_s < cutoff_s:
                found_s = cutoff_s = evaluation.time_s
                self._likely[slicing.name] = evaluation.parallelism
        return self._kept(samples / found_s, chip)

    def _kept(self, found: float, chip: Accelerator) -> float:
        if found:
            insort(self._best_few, found)
            del self._best_few[: -self._few]
        if found > self.best.samples_per_s:
            self.best = Sampled(evaluations=0, samples_per_s=found, name=chip.name, hbm_bytes=chip.hbm_bytes)
        return found

    def _promising(self, point: int) -> list[SweptSlicing]:
        """The quickest slicings first; of about equal ones the smallest microbatches, which are mostly the best."""
        return sorted(
            self._slicings,
            key=lambda swept: (
                round(20 * math.log(float(swept.bounds.step_s[point]))),
                swept.slicing.micro_batch_size,
                swept.slicing.name,
            ),
        )

    def _is_beaten(self, swept: SweptSlicing, point: int, chip: Accelerator, time_s: float) -> bool:
        """Whether no plan of a slicing takes less than some time, as far as it can be told quickly."""
        if math.isinf(time_s) or swept.slicing.is_paper:
            return False
        problem = swept.slicing.problem_with(swept.bounds.pass_s[point], chip)
        row = np.array([*swept.bounds.pass_s[point], update_s_per_parameter(problem), -float(chip.hbm_bytes)])
        known = self._beaten[swept.slicing.name]
        if known.covers(row, time_s):
            return True
        if is_beaten(problem, time_s, swept.slicing.network):
            known.add(row, time_s)
            return True
        return False


class _Beaten:
    """Accelerators that take at least some time on a slicing: so does one that is no better in any number.

    The numbers are those of its row, the seconds of its update and its memory, with a minus.
    """

    def __init__(self, numbers: int) -> None:
        self._rows, self._times, self._count = np.empty((256, numbers)), np.empty(256), 0

    def covers(self, row: FloatArray, time_s: float) -> bool:
        """Whether this follows from something known."""
        known, times = self._rows[: self._count], self._times[: self._count]
        return bool(((times >= time_s) & (known <= row).all(axis=1)).any())

    def add(self, row: FloatArray, time_s: float) -> None:
        """Remember one."""
        if self._count == len(self._times):
            self._rows, self._times = (np.concatenate((one, one)) for one in (self._rows, self._times))
        self._rows[self._count], self._times[self._count] = row, time_s
        self._count += 1
