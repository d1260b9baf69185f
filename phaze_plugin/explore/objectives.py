"""What a search is for: one number that grows with what is wanted, or the front of three.

    throughput        samples per second
    per-area          samples per second and mm2
    per-energy        samples per joule, at each accelerator's fastest plan

Several models count as ratios to the reference accelerator's own best plan, averaged with weights or the worst of them.
Everything is written for *facts* that may be bounds: with the least seconds, joules and area of a set of accelerators,
the value is an upper bound for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from phaze.explore.design_bounds import FloatArray

__all__ = ["TIE", "Facts", "Goal", "Metric", "front_of", "least_cutoff_s"]

TIE = 3e-6
"""Values that differ by less than this part are equal: then the smaller area wins, then the order of the space."""

_BISECTIONS = 60


class Metric(StrEnum):
    """What is made large."""

    THROUGHPUT = "throughput"
    PER_AREA = "throughput-per-area"
    PER_ENERGY = "throughput-per-energy"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Facts:
    """About one accelerator, or the least over several: seconds and dynamic joules of a step by model and cell.

    Where a model was evaluated it has one cell, with the whole energy of its plan and no static power on top.
    """

    seconds: tuple[FloatArray, ...]
    joules: tuple[FloatArray, ...]
    static_w: float
    area_mm2: float

    def time_s(self, model: int) -> float:
        """The least seconds of a model over its cells."""
        return float(self.seconds[model].min(initial=np.inf))

    def energy_j(self, model: int) -> float:
        """The least joules of a model over its cells."""
        return float((self.joules[model] + self.static_w * self.seconds[model]).min(initial=np.inf))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Goal:
    """A metric, samples per step by model, and how models are joined.

    `bases` are the metric's on the reference accelerator by model, `base_rates` the throughputs; empty for one model.
    """

    metric: Metric
    samples: tuple[int, ...]
    weights: tuple[float, ...]
    takes_worst: bool = False
    bases: tuple[float, ...] = ()
    base_rates: tuple[float, ...] = ()

    def of_model(self, facts: Facts, model: int) -> float:
        """The metric of one model."""
        samples = self.samples[model]
        if self.metric is Metric.PER_ENERGY:
            return samples / facts.energy_j(model)
        rate = samples / facts.time_s(model)
        return rate / facts.area_mm2 if self.metric is Metric.PER_AREA else rate

    def value(self, facts: Facts) -> float:
        """What is made large; 0 where some model fits in no way."""
        found = [self.of_model(facts, model) for model in range(len(self.samples))]
        if not self.bases:
            return found[0]
        if min(found) == 0.0:
            return 0.0
        ratios = [one / base for one, base in zip(found, self.bases, strict=True)]
        if self.takes_worst:
            return min(ratios)
        return sum(weight * ratio for weight, ratio in zip(self.weights, ratios, strict=True)) / sum(self.weights)

    def coordinates(self, facts: Facts) -> tuple[float, float, float]:
        """Throughput (or the mean ratio), area, and joules per sample (the mean over models)."""
        rates = Goal(
            metric=Metric.THROUGHPUT,
            samples=self.samples,
            weights=self.weights,
            takes_worst=self.takes_worst,
            bases=self.base_rates,
        )
        each = [facts.energy_j(model) / samples for model, samples in enumerate(self.samples)]
        return rates.value(facts), facts.area_mm2, sum(each) / len(each)


def front_of(coordinates: Sequence[tuple[float, float, float]]) -> list[int]:
    """Which points no other one beats or equals earlier: more throughput, less area, less energy; in their order."""
    rounded = [tuple(float(f"{value:.9g}") for value in (-rate, area, energy)) for rate, area, energy in coordinates]
    found = []
    for index, mine in enumerate(rounded):
        if not any(
            all(theirs <= own for theirs, own in zip(other, mine, strict=True)) and (other != mine or at < index)
            for at, other in enumerate(rounded)
            if at != index
        ):
            found.append(index)
    return found


def least_cutoff_s(is_enough: Callable[[float], bool], known_s: float) -> float:
    """The least seconds (of those tried) from which on a bound suffices; infinite if none does.

    `is_enough(seconds)` is false, then true.
    """
    low, high = known_s, known_s * 1e4
    if not is_enough(high):
        return float("inf")
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high
