"""Methods that look for a good accelerator by drawing designs: Spotlight, Optuna's TPE, chance; and what they draw.

`DesignLattice` is a space with its memories as a numbered list of designs. A row is one accelerator with one memory.
Every field that varies over the space has a *place* in each row: the position of its value among all values of the
field. `features` are the numbers that an architect would look at first, as a domain-aware optimiser sees a design
(Sakhuja et al., "Leveraging Domain Information for the Efficient Automated Design of Deep Learning Accelerators", HPCA
2023).

`SpotlightSampler` follows Spotlight (same paper): Bayesian optimisation over domain features. A Gaussian process with a
linear kernel and noise, over standardised features, predicts the logarithm of a design's cost. Of 1,000 candidates
drawn at random, those with the least lower confidence bound (mean less `_CONFIDENCE` standard deviations) are
evaluated, ten at a time, one of the ten being drawn at random to explore. The first ten designs are drawn at random.
scikit-learn does the process.

`TpeSampler` is Optuna's tree-structured Parzen estimator over the places of a design's fields, as many people would use
it. `RandomSampler` draws.

All of them propose designs by their rows of a `DesignLattice`, never one twice, and are told how good each was. Equal
seeds propose equal designs.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phaze.errors import PlanError
from phaze.explore.design_bounds import FloatArray
from phaze.hardware import AcceleratorArray
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS

if TYPE_CHECKING:
    from optuna.trial import Trial

__all__ = ["DesignLattice", "DesignSampler", "RandomSampler", "SpotlightSampler", "TpeSampler"]


class DesignLattice:
    """The designs of a space by row; each is taken once.

    Attributes:
        size: how many designs there are.
        highest: the largest place of each field that varies, by its name.
    """

    def __init__(self, points: AcceleratorArray, hbm_bytes: Sequence[int]) -> None:
        self._points, self._sizes = points, tuple(hbm_bytes)
        self.size = len(points) * len(self._sizes)
        columns = {name: getattr(points, name) for name in (*INTEGER_FIELDS, *REAL_FIELDS) if name != "hbm_bytes"}
        columns = {name: np.repeat(column, len(self._sizes)) for name, column in columns.items()}
        columns["hbm_bytes"] = np.tile(self._sizes, len(points))
        places = {name: np.unique(column, return_inverse=True)[1] for name, column in columns.items()}
        self.highest = {name: int(column.max()) for name, column in places.items() if column.any()}
        self._places = np.array([places[name] for name in self.highest]).reshape(len(self.highest), self.size)
        self._shares = np.array([[1 / high] for high in self.highest.values()]).reshape(-1, 1)
        self._is_taken = np.zeros(self.size, dtype=bool)

    @property
    def left(self) -> int:
        """How many designs were not taken yet."""
        return int((~self._is_taken).sum())

    def design(self, row: int) -> tuple[int, int]:
        """The accelerator's position in the space, and its memory in bytes."""
        return row // len(self._sizes), self._sizes[row % len(self._sizes)]

    def place(self, row: int) -> dict[str, int]:
        """The place of every field that varies."""
        return dict(zip(self.highest, self._places[:, row].tolist(), strict=True))

    def take_nearest(self, wanted: Mapping[str, int]) -> int:
        """The row nearest to some places, of those that were not taken before."""
        away = np.abs(self._places - np.array([[wanted[name]] for name in self.highest]).reshape(-1, 1))
        row = int(np.where(self._is_taken, np.inf, (away * self._shares).sum(axis=0)).argmin())
        self.take([row])
        return row

    def take(self, rows: Sequence[int]) -> None:
        """Mark rows as taken."""
        self._is_taken[list(rows)] = True

    def draw(self, count: int, generator: np.random.Generator) -> list[int]:
        """Rows at random that were not taken, each at most once and as many as there are; they stay as they are."""
        free = np.flatnonzero(~self._is_taken)
        return [int(row) for row in generator.choice(free, min(count, len(free)), replace=False)]

    def features(self, rows: Sequence[int]) -> NDArray[np.float64]:
        """Domain features, a row for each design, as base-2 logarithms because sizes differ by factors.

        They are: all multiply-accumulate units, all lanes, tensor cores, vector cores, the buffer, the aspect of an
        array (rows over columns), HBM bandwidth, clock and memory.
        """
        chips = self._points.take([self.design(row)[0] for row in rows])
        columns = (
            chips.tensor_cores * chips.tensor_rows * chips.tensor_cols,
            chips.vector_cores * chips.vector_lanes,
            chips.tensor_cores,
            chips.vector_cores,
            chips.buffer_bytes,
            chips.tensor_rows / chips.tensor_cols,
            chips.hbm_bandwidth_bytes_per_s,
            chips.clock_hz,
            np.array([self.design(row)[1] for row in rows]),
        )
        return np.log2(np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1))


_WARM_UP = 10
_BATCH = 10
_CANDIDATES = 1000
"""Spotlight's numbers: designs drawn before the first prediction, designs of a batch, candidates that are predicted."""

_EXPLORING_SHARE = 0.1
"""The part of a batch that is drawn at random, whatever is predicted."""

_CONFIDENCE = 2.0
"""Standard deviations below the mean at which a candidate is judged: the usual choice, about 95 % on one side."""

_TPE_BEST_FEW = 25
"""How many of its trials TPE learns from, at most: it looks at which are its best (a tenth of all, at most 25) and
never at how good the others are, so that the others need no value."""

_MISSING = (
    "the method needs {package}, which is not installed: pip install 'phaze-plugin[baselines]'. The exact search needs "
    "nothing more."
)


class DesignSampler(Protocol):
    """A method of drawing designs."""

    def propose(self) -> list[int]:
        """The rows to evaluate next; none when no design is left."""
        ...

    def tell(self, rows: Sequence[int], values: Sequence[float]) -> None:
        """Say how good the proposed designs are: the objective's values, 0 where nothing fits."""
        ...

    def least_useful(self, values: Sequence[float]) -> float:
        """The least value that the method can tell from others, after it has seen these values, ascending."""
        ...


class RandomSampler:
    """Draws designs at random."""

    def __init__(self, lattice: DesignLattice, seed: int) -> None:
        self._lattice, self._generator = lattice, np.random.default_rng(seed)

    def propose(self) -> list[int]:
        """One design."""
        rows = self._lattice.draw(1, self._generator)
        self._lattice.take(rows)
        return rows

    def tell(self, rows: Sequence[int], values: Sequence[float]) -> None:
        """Nothing is learnt."""

    def least_useful(self, values: Sequence[float]) -> float:
        """Only the best counts."""
        return values[-1] if values else 0.0


class TpeSampler:
    """Optuna's TPE; a proposal outside of the space, or one made before, gives way to the nearest other design."""

    def __init__(self, lattice: DesignLattice, seed: int) -> None:
        try:
            import optuna
        except ImportError as error:
            raise PlanError(_MISSING.format(package="optuna")) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._lattice = optuna, lattice
        self._study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        self._ranges = {name: optuna.distributions.IntDistribution(0, high) for name, high in lattice.highest.items()}
        self._trial: Trial | None = None

    def propose(self) -> list[int]:
        """One design."""
        if not self._lattice.left:
            return []
        self._trial = self._study.ask(self._ranges)
        return [self._lattice.take_nearest(self._trial.params)]

    def tell(self, rows: Sequence[int], values: Sequence[float]) -> None:
        """Tell the study of the design that was evaluated, which may be another than the one that it asked for."""
        trial, create, (row,), (value,) = self._trial, self._optuna.trial.create_trial, rows, values
        assert trial is not None
        place = self._lattice.place(row)
        if place == trial.params:
            self._study.tell(trial, value)
            return
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        self._study.add_trial(create(params=place, distributions=dict(self._ranges), value=value))

    def least_useful(self, values: Sequence[float]) -> float:
        """What is not among the best few is not looked at."""
        return values[-_TPE_BEST_FEW] if len(values) >= _TPE_BEST_FEW else 0.0


class SpotlightSampler:
    """Spotlight's Bayesian optimisation over domain features."""

    def __init__(self, lattice: DesignLattice, seed: int) -> None:
        self._lattice, self._seed, self._generator = lattice, seed, np.random.default_rng(seed)
        self._rows: list[int] = []
        self._values: list[float] = []

    def propose(self) -> list[int]:
        """The warm-up, then batches with the least lower confidence bounds."""
        lattice = self._lattice
        if len(self._rows) < _WARM_UP:
            rows = lattice.draw(_WARM_UP - len(self._rows), self._generator)
        else:
            candidates = lattice.draw(_CANDIDATES, self._generator)
            exploring = candidates[: round(_BATCH * _EXPLORING_SHARE)]  # candidates are in the order of chance
            ranked = self._ranked(candidates[len(exploring) :])
            rows = [*exploring, *ranked[: _BATCH - len(exploring)]]
        lattice.take(rows)
        return rows

    def tell(self, rows: Sequence[int], values: Sequence[float]) -> None:
        """Remember how good the designs are."""
        self._rows += rows
        self._values += values

    def least_useful(self, values: Sequence[float]) -> float:
        """The process learns from all values."""
        return 0.0

    def _ranked(self, candidates: list[int]) -> list[int]:
        """The candidates, those with the least lower confidence bound on their cost first."""
        positive = [value for value in self._values if value > 0]
        if not candidates or not positive:
            return candidates
        # A design on which nothing fits counts as the worst that fitted, so that one bad number does not bend the fit.
        costs = -np.log(np.maximum(self._values, min(positive)))
        known, asked = self._lattice.features(self._rows), self._lattice.features(candidates)
        means, deviations = known.mean(axis=0), known.std(axis=0)
        deviations[deviations == 0] = 1.0
        process = self._fitted((known - means) / deviations, costs)
        cost, deviation = process.predict((asked - means) / deviations, return_std=True)
        order = np.argsort(cost - _CONFIDENCE * deviation, kind="stable")
        return [candidates[index] for index in order]

    def _fitted(self, features: FloatArray, costs: FloatArray) -> Any:
        """A process with a linear kernel and noise; its two parameters are fitted as scikit-learn does it."""
        try:
            from sklearn.exceptions import ConvergenceWarning
            from sklearn.gaussian_process import GaussianProcessRegressor
            from sklearn.gaussian_process.kernels import DotProduct, WhiteKernel
        except ImportError as error:
            raise PlanError(_MISSING.format(package="scikit-learn")) from error
        process = GaussianProcessRegressor(DotProduct() + WhiteKernel(), normalize_y=True, random_state=self._seed)
        with warnings.catch_warnings():
            # Its search for kernel parameters may end at their limits, which are wide: the fit is then as good.
            warnings.simplefilter("ignore", ConvergenceWarning)
            return process.fit(features, costs)
