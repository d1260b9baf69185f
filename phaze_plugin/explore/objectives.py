"""What a search makes large: throughput, throughput per area or per energy, over one model or several; Pareto fronts.

    throughput               samples per second
    throughput-per-area      samples per second and mm2 of one accelerator
    throughput-per-energy    samples per joule, at each accelerator's fastest plan

Several models count by their ratios to what the reference accelerator's own best plan reaches; the ratios are averaged
with weights, or the worst of them counts. An objective is a function of `DesignCosts` (seconds, joules, area), which
may be exact or lower bounds: with the least costs over a set of accelerators, the value is an upper bound for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["DesignCosts", "Metric", "Objective", "least_sufficient_s", "pareto_front"]

_BISECTIONS = 60
"""Halvings of an interval of seconds: 60 of them use up the digits of a double, so that more would change nothing."""

_WIDEST_RAISE = 1e4
"""How many times the known bound is tried, at most, as a cutoff. A bound that would have to rise farther than this is
treated as one that never suffices."""


class Metric(StrEnum):
    """What is made large."""

    THROUGHPUT = "throughput"
    PER_AREA = "throughput-per-area"
    PER_ENERGY = "throughput-per-energy"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DesignCosts:
    """What one accelerator costs, or the least that any accelerator of a set costs.

    Attributes:
        seconds: seconds of a step, for each model an array over its slicings.
        joules: dynamic joules of a step, likewise. A model that was evaluated has a single entry, which is the whole
            energy of its plan; `static_w` is then 0.
        static_w: leakage power of all devices together.
        area_mm2: area of one accelerator.
    """

    seconds: tuple[NDArray[np.float64], ...]
    joules: tuple[NDArray[np.float64], ...]
    static_w: float
    area_mm2: float

    def time_s(self, model: int) -> float:
        """The least seconds of a model over its slicings; infinite where it has none."""
        return float(self.seconds[model].min(initial=np.inf))

    def energy_j(self, model: int) -> float:
        """The least joules of a model over its slicings; infinite where it has none."""
        return float((self.joules[model] + self.static_w * self.seconds[model]).min(initial=np.inf))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objective:
    """The number that a search makes large.

    Attributes:
        metric: what counts for one model.
        samples: sequences in a step, by model.
        weights: weights of the models in an average.
        takes_worst: whether the worst ratio counts instead of the average.
        reference_values: the metric on the reference accelerator, by model; empty for a single model.
        reference_rates: the throughput on the reference accelerator, by model; empty for a single model.
    """

    metric: Metric
    samples: tuple[int, ...]
    weights: tuple[float, ...]
    takes_worst: bool = False
    reference_values: tuple[float, ...] = ()
    reference_rates: tuple[float, ...] = ()

    def of_model(self, costs: DesignCosts, model: int) -> float:
        """The metric of one model."""
        samples = self.samples[model]
        if self.metric is Metric.PER_ENERGY:
            return samples / costs.energy_j(model)
        rate = samples / costs.time_s(model)
        return rate / costs.area_mm2 if self.metric is Metric.PER_AREA else rate

    def value(self, costs: DesignCosts) -> float:
        """The value of a design, or an upper bound from lower bounds; 0 where some model fits in no way."""
        values = [self.of_model(costs, model) for model in range(len(self.samples))]
        if not self.reference_values:
            return values[0]
        if min(values) == 0.0:
            return 0.0
        ratios = [value / reference for value, reference in zip(values, self.reference_values, strict=True)]
        if self.takes_worst:
            return min(ratios)
        return sum(weight * ratio for weight, ratio in zip(self.weights, ratios, strict=True)) / sum(self.weights)

    def coordinates(self, costs: DesignCosts) -> tuple[float, float, float]:
        """The three axes of a front: throughput (or the joined ratio), area, and mean joules per sample."""
        throughput = Objective(
            metric=Metric.THROUGHPUT,
            samples=self.samples,
            weights=self.weights,
            takes_worst=self.takes_worst,
            reference_values=self.reference_rates,
        )
        joules_per_sample = [costs.energy_j(model) / samples for model, samples in enumerate(self.samples)]
        return throughput.value(costs), costs.area_mm2, sum(joules_per_sample) / len(joules_per_sample)


def pareto_front(coordinates: Sequence[tuple[float, float, float]]) -> list[int]:
    """The positions of points that no other point beats in throughput, area and energy, in their order.

    Of points that are equal to nine digits, the first is kept.
    """
    costs = [tuple(float(f"{value:.9g}") for value in (-rate, area, energy)) for rate, area, energy in coordinates]

    def beats(rival: int, index: int) -> bool:
        is_as_good = all(theirs <= mine for theirs, mine in zip(costs[rival], costs[index], strict=True))
        return is_as_good and (costs[rival] != costs[index] or rival < index)

    return [
        index
        for index in range(len(costs))
        if not any(beats(rival, index) for rival in range(len(costs)) if rival != index)
    ]


def least_sufficient_s(is_enough: Callable[[float], bool], known_s: float) -> float:
    """The least seconds, found by bisection from a known bound upward, that a bound must reach to be enough.

    `is_enough(seconds)` is false up to some number of seconds and true from there on. The result is infinite if no
    number of seconds that is tried is enough.
    """
    low, high = known_s, known_s * _WIDEST_RAISE
    if not is_enough(high):
        return float("inf")
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high
