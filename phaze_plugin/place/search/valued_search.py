"""The best plan by another value than its step time, over all strategies on as many devices as each of them takes.

The value of a plan is a line in its seconds (`PlanValue`). With n devices and a step of T seconds,

    value = n x (per_device + per_device_second x T) + constant of its strategy

is n x T for cost (the price of a device-hour is only a scale), n for the fewest devices, and for energy the static
watts of n devices times T plus the joules that the strategy's work takes at least. A bound under T is therefore one
under the value, and a value to beat is a time to beat (`PlanValue.seconds_below`), another one for each strategy:

1. closed forms and stage filling rule out strategies that cannot beat the best value (`unrefuted`);
2. what is left is searched in the order of the bounds under its value, each with the time that it has to beat
   (`search_by_value`), by the branch and bound that the search for the fastest plan uses.

Rows of a table that stand for several strategies count with the fewest devices of them until they are split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phaze.parallelism import Parallelism
from phaze.place.model.stage_space import FloatArray, IntArray
from phaze.place.search.parallelism_search import SearchEffort, closed_bounds, split_strategies, stages_below
from phaze.place.search.parallelism_table import ParallelismTable
from phaze.place.search.prepared_problem import PreparedProblem
from phaze.place.search.stage_search import FoundPlan
from phaze.tolerances import EQUAL_SEARCH_TIMES

__all__ = ["PlanValue", "ValuedAnswer", "likely_strategies", "search_by_value", "unrefuted"]

_FOREVER_S = 1e30
"""Stands for an infinite target, with which stage filling would compute infinity minus infinity."""

_LIKELY = 12
"""Strategies that are tried where no value is known yet: the first that fits rules out most others."""


def _nothing(parallelism: Parallelism) -> float:
    return 0.0


def _any_count(devices: int) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanValue:
    """What is made small, as a line in the seconds of a step.

    Attributes:
        per_device: value of each device, whatever the step takes.
        per_device_second: value of each second of each device.
        constant: what every plan has at least beside that.
        further: what a plan of one strategy has at least beyond the constant.
        most_s: plans whose step takes longer are none.
        allows: whether so many devices may be used.
        measured: the value of a plan that was found; by default that of its line.
    """

    per_device: float = 0.0
    per_device_second: float = 0.0
    constant: float = 0.0
    further: Callable[[Parallelism], float] = _nothing
    most_s: float = math.inf
    allows: Callable[[int], bool] = _any_count
    measured: Callable[[FoundPlan], float] | None = None

    def of(self, parallelism: Parallelism, seconds: float) -> float:
        """A bound under the value of a strategy's plans, if none of them takes less than so many seconds."""
        if seconds > self.most_s or math.isinf(seconds):
            return math.inf
        devices = parallelism.device_count
        line = devices * (self.per_device + self.per_device_second * seconds)
        return line + self.constant + self.further(parallelism)

    def of_plan(self, plan: FoundPlan) -> float:
        """The value of a plan."""
        return self.of(plan.parallelism, plan.time_s) if self.measured is None else self.measured(plan)

    def of_rows(self, rows: ParallelismTable, cp: int) -> FloatArray:
        """Bounds under the values of all plans of some rows, by the bounds under their seconds."""
        values = _devices(rows, cp) * (self.per_device + self.per_device_second * rows.bound_s) + self.constant
        return np.where(rows.bound_s > self.most_s, math.inf, values)

    def seconds_below(self, parallelism: Parallelism, value: float) -> float:
        """Seconds that a plan of a strategy must beat to have a lower value; 0 where none can."""
        left = value - parallelism.device_count * self.per_device - self.constant - self.further(parallelism)
        return self._seconds(left, parallelism.device_count)

    def _seconds(self, left: float, devices: int) -> float:
        if left <= 0:
            return 0.0
        longest_s = self.most_s * (1 + EQUAL_SEARCH_TIMES)
        return min(longest_s, left / (devices * self.per_device_second)) if self.per_device_second else longest_s

    def row_seconds_below(self, rows: ParallelismTable, cp: int, value: float) -> FloatArray:
        """The same for the strategies of some rows."""
        devices = _devices(rows, cp)
        left = value - devices * self.per_device - self.constant
        pairs = zip(left.tolist(), devices.tolist(), strict=True)
        return np.array([self._seconds(each, count) for each, count in pairs], dtype=np.float64)


def _devices(rows: ParallelismTable, cp: int) -> IntArray:
    """The devices that the strategies of each row take at least."""
    return np.asarray(rows.least_dp * cp * rows.tp * rows.pp)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuedAnswer:
    """The plan of least value that was found below another one, if there is one, and a bound under all values.

    The bound is at most the value to beat.
    """

    plan: FoundPlan | None
    value: float
    bound: float


def unrefuted(
    prepared: PreparedProblem, strategies: ParallelismTable, value: PlanValue, best_value: float
) -> ParallelismTable:
    """The single strategies of which closed forms and stage filling do not prove that no plan beats a value."""
    cp, left = prepared.problem.cp, []
    rows = strategies
    while len(rows):
        rows = rows.take(value.of_rows(rows, cp) < best_value)
        rows.bound_s[:] = closed_bounds(prepared, rows)
        targets_s = np.minimum(value.row_seconds_below(rows, cp, best_value), _FOREVER_S)
        rows = rows.take(rows.bound_s < targets_s)
        targets_s = np.minimum(value.row_seconds_below(rows, cp, best_value), _FOREVER_S)
        rows = rows.take(~prepared.layer_table.refuted(rows, targets_s))
        left.append(rows.take(~rows.is_wide))
        rows = split_strategies(prepared, rows.take(rows.is_wide))
    joined = ParallelismTable.joined(left)
    is_allowed = [value.allows(count) for count in _devices(joined, cp).tolist()]
    return joined.take(np.array(is_allowed, dtype=bool))


def likely_strategies(
    prepared: PreparedProblem, strategies: ParallelismTable, value: PlanValue, best_value: float = math.inf
) -> ParallelismTable:
    """A few single strategies that seem to fit, and of which some have values near the least; nothing is proven."""
    cp = prepared.problem.cp
    is_strategy = strategies.dp * cp % strategies.shard == 0
    rows = strategies.take(is_strategy).narrowed()
    is_allowed = [value.allows(count) for count in _devices(rows, cp).tolist()]
    rows = rows.take(np.array(is_allowed, dtype=bool) & (value.of_rows(rows, cp) < best_value))
    targets_s = np.minimum(value.row_seconds_below(rows, cp, best_value), _FOREVER_S)
    rows = rows.take(~prepared.layer_table.refuted(rows, targets_s) & (rows.chunks == 1))
    return rows.take(np.argsort(value.of_rows(rows, cp), kind="stable")[:_LIKELY])


def search_by_value(
    prepared: PreparedProblem,
    rows: ParallelismTable,
    value: PlanValue,
    *,
    best_value: float = math.inf,
    gap: float = 0.0,
    effort: SearchEffort | None = None,
) -> ValuedAnswer:
    """The plan of least value below another value, but for the gap, among those of single strategies."""
    effort, cp, best = effort or SearchEffort(), prepared.problem.cp, None
    values = value.of_rows(rows, cp)
    bound, nodes = math.inf, 0
    for solved, index in enumerate(np.argsort(values, kind="stable").tolist()):
        if values[index] >= best_value * (1 - gap) or solved >= effort.strategies or nodes >= effort.nodes:
            bound = min(bound, float(values[index]))
            break
        parallelism = rows.parallelism(index, prepared.problem)
        known_s = float(rows.bound_s[index])
        cutoff_s = value.seconds_below(parallelism, best_value)
        if known_s >= cutoff_s * (1 - gap):
            bound = min(bound, value.of(parallelism, known_s))
            continue
        search = prepared.stage_search_below(parallelism, cutoff_s)
        if search is None:
            continue
        known_s = max(known_s, search.root_bound(known_s, cutoff_s))
        if known_s >= cutoff_s * (1 - gap):
            bound = min(bound, value.of(parallelism, known_s))
            continue
        node_limit = min(effort.nodes_per_strategy, effort.nodes - nodes)
        answer, known_s = stages_below(prepared, search, cutoff_s, known_s, node_limit, gap, best_s=cutoff_s)
        nodes += answer.nodes
        is_proven = answer.bound_s >= min(answer.time_s, cutoff_s)
        least_s = min(answer.time_s, cutoff_s) if is_proven else max(known_s, answer.bound_s)
        bound = min(bound, value.of(parallelism, least_s))
        if answer.time_s < cutoff_s:
            stages = search.candidates.stages_and_modes(answer.pipeline)
            plan = FoundPlan(time_s=answer.time_s, parallelism=parallelism, stages=stages)
            if (plan_value := value.of_plan(plan)) < best_value:
                best, best_value = plan, plan_value
    return ValuedAnswer(plan=best, value=best_value, bound=min(bound, best_value))
