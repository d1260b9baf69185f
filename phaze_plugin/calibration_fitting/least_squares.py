"""The calibration under which measured runs are predicted best, by robust least squares.

`fit_terms` minimises residuals weight * log(predicted / measured). The loss (`_loss`) grows like the square up to a few
percent and linearly beyond (pseudo-Huber), so that a run which no constant explains does not drag the others along. The
variables are the logarithms of efficiencies and of the overhead, and the overlap itself, each within its range
(`_to_variable`). `_minimise` takes Gauss-Newton steps with Levenberg's damping; derivatives are differences
(`_slopes`). The same runs always give the same fit.

With a prior the start is what is known before the runs: it counts as one more run for each term, whose residual is the
way from the start in units of how far machines lie apart (`PRIOR_SPREADS`), times how far comparable runs lie from
their predictions. So runs that are predicted within that distance hardly move a term, terms that few runs show stay
near the start, and there may be fewer runs than terms.

The runs cannot separate two terms if changing both leaves the residuals as they are: the columns of their derivatives
are then (nearly) parallel (`_parallel`). A term that changes nothing is not seen at all, and is not moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phaze.cost import Calibration
from phaze.cost.calibration import MOST_NARROW_MATRIX, comparable_runs
from phaze.errors import QuestionError
from phaze.hardware import Cluster, PrecisionRecipe

__all__ = [
    "PRIOR_ERROR",
    "PRIOR_SPREADS",
    "Fit",
    "fit_terms",
    "point_of",
    "prior_error_of",
    "separable_terms",
    "slopes_at",
]

_Floats = NDArray[np.float64]
Predict = Callable[[Sequence[Calibration]], _Floats]
"""Seconds per (calibration, run)."""

_BEND = 0.05
"""The residual at which the loss turns from quadratic to linear. A smaller one ignores runs that no constant explains
more, a larger one trusts all runs alike."""
_STEP = 1e-3
"""The step of differences, in a variable: small against what a fit must resolve, large against rounding."""
_ROUNDS = 40
"""At most so many steps are taken: a bound on the work of fits that converge slowly."""
_LEAST_GAIN = 1e-4
"""The search ends when the loss falls by less than this share; less would cost rounds for digits that nobody reads."""
_DAMPING = 1e-3
_LEAST_DAMPING = 1e-6
"""The damping to begin with, and the one below which Gauss-Newton steps are taken as they are."""
_FACTORS = (0.1, 1.0, 10.0, 1e3)
"""Dampings that each round tries, relative to the last one: a bolder step, the same, and two more careful ones."""
_LEAST_CURVATURE, _RIDGE = 1e-9, 1e-12
"""What keeps the normal equations solvable where the loss is flat along a variable."""
_SHORTEST = 1e-30
"""Added to lengths that are divided by, so that a term without any effect is parallel to nothing."""
_PARALLEL = 0.995
"""Two terms whose columns of derivatives have a cosine above this are told apart by noise only."""
_UNSEEN = 1e-3
"""A term is not seen, and not moved, if no run's log seconds change by this much per unit of its variable."""
_SHOWN = 0.02
"""A term is worth fitting if some run's log seconds change by at least this much per unit of its variable."""
_RANGES = {"overhead_s": (1e-7, 1e-2), "overlap": (0.0, 1.0), "narrow_matrix": (0.5, MOST_NARROW_MATRIX)}
PRIOR_SPREADS = {"attention": 0.3, "network": 0.3, "overhead_s": 0.35, "overlap": 0.3}
_EFFICIENCY_SPREAD = 0.04
"""How far a machine's terms lie from those fitted to others of its chip, in variables: products, memory and links,
which are of the same silicon, by some 4 %; attention, whose kernels differ, and the network by a third; the host's
overhead by a factor of 1.4; the overlap by 0.3. Narrower and wider ones were tried on five published tables on A100,
each left out of the fit as a whole, of which three runs are known (`benchmarks/calibration_prior.py`)."""
PRIOR_ERROR = 0.09
"""How far a run lies from its prediction on a chip of whose comparable runs nothing is known: what it is on those that
were fitted, whose 80 % of runs span 0.18 to 0.33."""
_EFFICIENCY_RANGE = (0.02, 1.0)
"""Where terms may lie: wide enough for any machine, narrow enough that logarithms stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What was fitted.

    Attributes:
        calibration: the best one.
        terms: the names of what was fitted.
        errors: predicted / measured - 1 of each run.
        slopes: change of log seconds per change of each term (log, or overlap itself), mean over runs.
        start_errors: the mean error with one term alone back at its start.
        unseen: terms that the runs say nothing about; they keep their start.
        inseparable: pairs of terms that the runs cannot tell apart; none with a prior, which does.
    """

    calibration: Calibration
    terms: tuple[str, ...]
    errors: tuple[float, ...]
    slopes: dict[str, float]
    start_errors: dict[str, float]
    unseen: tuple[str, ...]
    inseparable: tuple[tuple[str, str], ...]

    @property
    def mean_error(self) -> float:
        """The mean of the errors' sizes."""
        return float(np.mean(np.abs(self.errors)))


def fit_terms(
    predict: Predict,
    measured_s: Sequence[float],
    start: Calibration,
    terms: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    prior_error: float | None = None,
) -> Fit:
    """Fit some terms of a calibration to measured seconds.

    With ``prior_error`` the start is known from other machines, where runs lay so far from their predictions (one
    standard deviation of the logarithm). Raises QuestionError where there are fewer runs than terms and no prior.
    """
    seconds = np.asarray(measured_s, dtype=np.float64)
    if len(seconds) < len(terms) and prior_error is None:
        raise QuestionError(
            f"{len(seconds)} measured runs for {len(terms)} terms ({', '.join(terms)}); expected at least as many runs "
            f"as terms. {_least_apart(predict, start, terms)}Measure more runs, or fit fewer terms."
        )
    weight = np.ones(len(seconds)) if weights is None else np.asarray(weights, dtype=np.float64)
    known = point_of(start, terms)
    spreads = np.array([PRIOR_SPREADS.get(term, _EFFICIENCY_SPREAD) for term in terms])
    pulls = np.zeros(len(terms)) if prior_error is None else prior_error / spreads

    def residuals(points: Sequence[_Floats]) -> _Floats:
        predicted = predict([_calibration_at(start, terms, point) for point in points])
        away = (np.stack([np.asarray(point) for point in points]) - known) * pulls
        return np.concatenate([np.log(predicted / seconds), away], axis=1)

    point, runs = known, len(seconds)
    low, high = (np.array([_to_variable(term, _range(term)[end]) for term in terms]) for end in (0, 1))
    all_weights = np.concatenate([weight, np.ones(len(terms))])
    point, all_slopes = _minimise(residuals, np.clip(point, low, high), low, high, all_weights)
    errors, slopes = np.exp(residuals([point])[0][:runs]) - 1, all_slopes[:runs]
    unseen = tuple(term for term, column in zip(terms, slopes.T, strict=True) if np.abs(column).max() < _UNSEEN)
    best = _calibration_at(start, terms, point)
    without_term = predict([replace(best, **{term: getattr(start, term)}) for term in terms]) / seconds - 1
    return Fit(
        calibration=best,
        terms=tuple(terms),
        errors=tuple(errors.tolist()),
        slopes=dict(zip(terms, slopes.mean(axis=0).tolist(), strict=True)),
        start_errors=dict(zip(terms, np.abs(without_term).mean(axis=1).tolist(), strict=True)),
        unseen=unseen,
        inseparable=_parallel(slopes * weight[:, None], terms, unseen) if prior_error is None else (),
    )


def prior_error_of(shipped: Calibration, asked: Sequence[tuple[Cluster, PrecisionRecipe]]) -> float:
    """How far runs on some clusters at some precisions lie from what a shipped calibration predicts, for `fit_terms`.

    That is the spread of the published runs that are comparable, on average over what is asked.
    """
    comparable = [comparable_runs(shipped, cluster, recipe) for cluster, recipe in asked]
    return float(np.mean([PRIOR_ERROR if runs is None else runs.deviation for runs in comparable]))


def separable_terms(
    predict: Predict, start: Calibration, candidates: Sequence[str], most: int, *, has_prior: bool = False
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Of some terms those that runs show most, each apart from the ones before it; and why not the others.

    What the runs show is judged at the start, by the derivatives of their seconds. Where a prior says how far each term
    may lie from its start, terms need not be apart: what the runs ask of them together it shares out.
    """
    _, _, slopes = slopes_at(predict, start, candidates)
    chosen: dict[str, _Floats] = {}
    left: dict[str, str] = {}
    columns = dict(zip(candidates, slopes.T, strict=True))
    for term in sorted(candidates, key=lambda term: -float(np.linalg.norm(columns[term]))):
        column = columns[term]
        twin = next((name for name, known in chosen.items() if _cosine(column, known) > _PARALLEL), None)
        shown = float(np.abs(column).max())
        if shown < _SHOWN:
            left[term] = "the runs say nothing about it" if shown < _UNSEEN else "the runs hardly show it"
        elif twin is not None and not has_prior:
            left[term] = f"the runs cannot separate it from {twin}"
        elif len(chosen) == most:
            left[term] = "there are too few runs for it"
        else:
            chosen[term] = column
    return tuple(term for term in candidates if term in chosen), left


def point_of(calibration: Calibration, terms: Sequence[str]) -> _Floats:
    """The variables of a calibration."""
    return np.array([_to_variable(term, getattr(calibration, term)) for term in terms])


def slopes_at(predict: Predict, calibration: Calibration, terms: Sequence[str]) -> tuple[_Floats, _Floats, _Floats]:
    """The variables of a calibration, the seconds there, and the derivatives of their logarithms per (run, term)."""
    point = point_of(calibration, terms)
    high = np.array([_to_variable(term, _range(term)[1]) for term in terms])
    now = predict([calibration])[0]

    def logarithms(points: Sequence[_Floats]) -> _Floats:
        return np.log(predict([_calibration_at(calibration, terms, point) for point in points]))

    return point, now, _slopes(logarithms, point, np.log(now), high)


def _minimise(
    residuals: Callable[[Sequence[_Floats]], _Floats], point: _Floats, low: _Floats, high: _Floats, weight: _Floats
) -> tuple[_Floats, _Floats]:
    """The best point, and the derivatives of the residuals there."""
    damping = _DAMPING
    now = residuals([point])[0]
    slopes = _slopes(residuals, point, now, high)
    for _ in range(_ROUNDS):
        bent = weight**2 / np.sqrt(1 + (weight * now / _BEND) ** 2)
        normal = (slopes.T * bent) @ slopes
        gradient = (slopes.T * bent) @ now
        is_free = (np.abs(slopes).max(axis=0) >= _UNSEEN) & ~(
            (point <= low) & (gradient > 0) | (point >= high) & (gradient < 0)
        )
        trials = [
            np.clip(point - _damped_step(normal, gradient, is_free, damping * factor), low, high) for factor in _FACTORS
        ]
        trial_residuals = residuals(trials)
        losses = [_loss(residual, weight) for residual in trial_residuals]
        best = int(np.argmin(losses))
        loss = _loss(now, weight)
        if losses[best] >= loss * (1 - _LEAST_GAIN):
            break
        damping = max(_LEAST_DAMPING, damping * _FACTORS[best])
        point, now = trials[best], trial_residuals[best]
        slopes = _slopes(residuals, point, now, high)
    return point, slopes


def _damped_step(normal: _Floats, gradient: _Floats, is_free: NDArray[np.bool_], damping: float) -> _Floats:
    """Levenberg's step: the normal equations of the free variables with their diagonal enlarged; others stay."""
    step = np.zeros_like(gradient)
    free = np.flatnonzero(is_free)
    if len(free):
        part = normal[np.ix_(free, free)]
        scale = np.diag(np.maximum(np.diag(part), _LEAST_CURVATURE)) * damping + _RIDGE * np.eye(len(free))
        step[free] = np.linalg.solve(part + scale, gradient[free])
    return step


def _slopes(residuals: Callable[[Sequence[_Floats]], _Floats], point: _Floats, now: _Floats, high: _Floats) -> _Floats:
    """Derivatives per (run, term), by steps that stay within the ranges."""
    steps = np.where(point + _STEP <= high, _STEP, -_STEP)
    moved = residuals([point + step * np.eye(len(point))[index] for index, step in enumerate(steps)])
    return np.asarray(((moved - now) / steps[:, None]).T)


def _loss(residual: _Floats, weight: _Floats) -> float:
    return float((_BEND**2 * (np.sqrt(1 + (weight * residual / _BEND) ** 2) - 1)).sum())


def _cosine(first: _Floats, second: _Floats) -> float:
    return abs(float(first @ second)) / (float(np.linalg.norm(first)) * float(np.linalg.norm(second)) + _SHORTEST)


def _parallel(slopes: _Floats, terms: Sequence[str], unseen: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Pairs of terms that the runs cannot tell apart."""
    pairs = []
    for first in range(len(terms)):
        for second in range(first + 1, len(terms)):
            if terms[first] in unseen or terms[second] in unseen:
                continue
            if _cosine(slopes[:, first], slopes[:, second]) > _PARALLEL:
                pairs.append((terms[first], terms[second]))
    return tuple(pairs)


def _least_apart(predict: Predict, start: Calibration, terms: Sequence[str]) -> str:
    """Which two terms the runs separate least."""
    if len(terms) < 2:
        return ""
    _, _, slopes = slopes_at(predict, start, terms)
    length = np.linalg.norm(slopes, axis=0) + _SHORTEST
    cosine = np.abs((slopes / length).T @ (slopes / length)) - np.eye(len(terms)) * 2
    first, second = sorted(divmod(int(cosine.argmax()), len(terms)))
    return f"They cannot separate {terms[first]} from {terms[second]}. "


def _range(term: str) -> tuple[float, float]:
    return _RANGES.get(term, _EFFICIENCY_RANGE)


def _to_variable(term: str, value: float) -> float:
    return value if term == "overlap" else math.log(max(value, _range(term)[0]))


def _calibration_at(start: Calibration, terms: Sequence[str], point: _Floats) -> Calibration:
    """The start with its terms replaced by the values that a point in the variables stands for."""
    values = {
        term: float(min(_range(term)[1], value if term == "overlap" else math.exp(value)))
        for term, value in zip(terms, point.tolist(), strict=True)
    }
    return replace(start, **values)  # type: ignore[arg-type]
