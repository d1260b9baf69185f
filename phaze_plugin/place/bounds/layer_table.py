"""The layers of a chain under many degrees at once, ready to be filled into stages (`filling.py`).

Each term is the least over recompute modes that does not depend on them, at the fastest links, without latencies. Of
two sums of which a pass takes the longer (its own seconds, and those of the collectives behind it), the one that is
longer over the whole model is used. A tied parameter counts for the first layer that has it; if the first and the last
layer share it, for both; what is spread over stages does not count. Interleaved schedules are let through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from phaze.cost import Collective
from phaze.parallelism import PipelineSchedule
from phaze.place.bounds.stage_filling import LayerTerms, StageFilling
from phaze.place.model.network_prices import Network
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray, StageSpace
from phaze.place.model.stage_sums import cut_bytes
from phaze.place.model.zero_sharding import ZeroSharding
from phaze.place.search.parallelism_table import SCHEDULES, ParallelismTable
from phaze.profile.layer_profile import LayerProfile

__all__ = ["LayerTable", "build_layer_table"]

_AT_ONCE = 4_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTable:
    """Layers of a chain, per (width, layer) and the least over recompute modes; empty if the graph is no chain.

    `recompute_s`, `stash_bytes` and `peak_bytes` (the working set) are per (mode, width, layer), `least_cut_s` is the
    least time of receiving what crosses a cut, per width. Tied parameters are those of `tied`, each at the first layer
    that has it; `tied_ends` are those that the first and the last layer share, per (first or last, width).
    """

    tp_degrees: tuple[int, ...]
    forward_s: FloatArray
    input_s: FloatArray
    weight_s: FloatArray
    untied: FloatArray
    tied: FloatArray
    tied_ends: FloatArray
    stashed_bytes: FloatArray
    working_bytes: FloatArray
    prices: FloatArray
    recompute_s: FloatArray
    stash_bytes: FloatArray
    peak_bytes: FloatArray
    least_cut_s: FloatArray
    problem: PlacementProblem
    network: Network
    mixed_tp: frozenset[int]
    most_used: int
    update_s: float

    @property
    def parameters(self) -> FloatArray:
        """What a stage holds at least of each of its layers, per (width, layer)."""
        return np.asarray(self.untied + self.tied)

    def refuted(self, strategies: ParallelismTable, target_s: FloatArray) -> BoolArray:
        """Whether nothing with each of these degrees takes less than its target."""
        result = np.zeros(len(strategies), dtype=bool)
        for part in self._parts(strategies):
            some = strategies.take(part)
            result[part] = self._stage_filling(some).refuted(target_s[part])
        return result

    def _parts(self, strategies: ParallelismTable) -> list[IntArray]:
        """Indices of what can be packed, in portions of one schedule each."""
        if not self.forward_s.size:
            return []
        every = [
            np.flatnonzero((strategies.schedule == one) & (strategies.chunks == 1)) for one in range(len(SCHEDULES))
        ]
        return [one[start : start + _AT_ONCE] for one in every for start in range(0, len(one), _AT_ONCE)]

    def tightened(self, strategies: ParallelismTable, target_s: float, steps: int = 5) -> FloatArray:
        """A bound under each choice, at least its floor, by bisection up to the target."""
        floors = strategies.bound_s.copy()
        for part in self._parts(strategies):
            some = strategies.take(part)
            filling = self._stage_filling(some)
            low, high = some.bound_s, np.maximum(some.bound_s, target_s)
            for _ in range(steps):
                middle = (low + high) / 2
                out = filling.refuted(middle)
                low, high = np.where(out, middle, low), np.where(out, high, middle)
            floors[part] = low
        return floors

    def _stage_filling(self, strategies: ParallelismTable) -> StageFilling:
        return StageFilling(strategies, self.terms(strategies), self.problem.usable_bytes)

    def sharding(self, strategies: ParallelismTable) -> ZeroSharding:
        """What the ZeRO stage of each choice holds and moves."""
        return ZeroSharding(self.problem.recipe, strategies.zero, strategies.dp)

    def _rates(self, strategies: ParallelismTable) -> FloatArray:
        """Seconds per byte of gather, scatter and all-reduce over the pipelines of each choice, latencies left out."""
        levels = self.network.depths(self.most_used)
        depth = levels[np.minimum(strategies.tp * strategies.dp * strategies.pp, self.most_used)]
        keys = np.stack([strategies.tp, strategies.dp, depth], axis=1)
        distinct, first, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        used = (strategies.tp * strategies.dp * strategies.pp)[first]
        rates = np.empty((3, len(distinct)))
        for index, (tp, dp, _) in enumerate(distinct.tolist()):
            strides = (tp, 1) if tp in self.mixed_tp else (tp,)
            for row, kind in enumerate((Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)):
                prices = [self.network.collective(kind, dp, stride, int(used[index])) for stride in strides]
                rates[row, index] = min(price.s_per_byte for price in prices)
        return rates[:, which.ravel()]

    def terms(self, strategies: ParallelismTable) -> LayerTerms:
        """What each layer adds to a stage under each choice."""
        at = np.searchsorted(self.tp_degrees, strategies.tp)
        forward, first, weight = (table[at].T for table in (self.forward_s, self.input_s, self.weight_s))
        untied, tied = self.untied[at].T, self._tied(strategies)
        parameters = untied + tied
        sharding = self.sharding(strategies)
        gather, scatter, reduce = self._rates(strategies)
        gathered = parameters * (sharding.gathered_bytes_per_pass * gather)
        scattered = parameters * (sharding.scattered_bytes_per_backward * scatter)
        split = strategies.schedule == SCHEDULES.index(PipelineSchedule.ZERO_BUBBLE)
        run = _longer(forward, gathered)
        back = _longer(np.where(split, first, first + weight), gathered + np.where(split, 0.0, scattered))
        reduction = sharding.all_reduced_bytes_per_batch * reduce + sharding.scattered_bytes_per_batch * scatter
        settled = self.update_s / sharding.optimizer_shards + sharding.gathered_bytes_per_batch * gather
        finish = parameters * settled + tied * reduction
        between = np.where(strategies.pp > 1, self.problem.recipe.reduction_bytes * self.network.least_s_per_byte, 0.0)
        finish[[0, -1]] += between * self.tied_ends[:, at]
        again, stash, working = (
            table[:, at].transpose(0, 2, 1) for table in (self.recompute_s, self.stash_bytes, self.peak_bytes)
        )
        return LayerTerms(
            run_s=run,
            through_s=run + back,
            weight_s=np.where(split, _longer(weight, scattered), 0.0),
            finish_s=finish,
            reduced_s=untied * reduction,
            hidden_s=np.where(strategies.zero < 2, np.where(split, weight, first + weight), 0.0),
            held_bytes=parameters * sharding.held_bytes_per_parameter,
            buffer_bytes=parameters * sharding.buffer_bytes,
            again_s=again,
            stash_bytes=stash,
            working_bytes=working,
            cut_s=self.least_cut_s[at],
        )

    def _tied(self, strategies: ParallelismTable) -> FloatArray:
        """Per (layer, choice): tied parameters, on the last layer too where it cannot lie beside the first."""
        at = np.searchsorted(self.tp_degrees, strategies.tp)
        tied = self.tied[at].T.copy()
        tied[-1] += np.where(strategies.pp > 1, self.tied_ends[1, at], 0.0)
        return tied


def _longer(one: FloatArray, other: FloatArray) -> FloatArray:
    """Of two terms per (layer, choice), for each choice the one with the larger sum."""
    return np.where(one.sum(axis=0) >= other.sum(axis=0), one, other)


def build_layer_table(
    problem: PlacementProblem, space: StageSpace, network: Network, update_s: float, use_bounds: bool
) -> LayerTable:
    """The layers of a problem, ready to be packed; with the profiles' values or their lower bounds."""
    layers = range(space.layers) if space.is_chain else range(0)

    def by_mode(read: Callable[[LayerProfile], float]) -> FloatArray:
        return np.array(
            [
                [[read(problem.profile(layer, tp, mode)) for layer in layers] for tp in problem.tp_degrees]
                for mode in problem.choices.recompute
            ]
        )

    def seconds(name: str) -> FloatArray:
        return by_mode(lambda profile: float(getattr(getattr(profile, name), kind)[problem.accelerator]))

    stash, peak = by_mode(lambda profile: profile.stashed_bytes), by_mode(lambda profile: profile.peak_working_bytes)
    untied = by_mode(lambda profile: profile.parameters - sum(profile.tied_parameters.values()))
    untied[..., problem.stage_sharded_layers[list(layers)]] = 0.0
    tied, tied_ends = _tied(problem, layers)
    kind = "bound" if use_bounds else "value"
    prices = np.array([_prices(problem, tp, layers) for tp in problem.tp_degrees]).T
    return LayerTable(
        tp_degrees=problem.tp_degrees,
        prices=prices,
        recompute_s=seconds("recompute_s"),
        stash_bytes=stash,
        peak_bytes=peak,
        least_cut_s=np.array([_least_cut_bytes(problem, space, tp) for tp in problem.tp_degrees])
        * network.least_s_per_byte,
        forward_s=seconds("forward_s").min(axis=0),
        input_s=seconds("backward_input_s").min(axis=0),
        weight_s=seconds("backward_weight_s").min(axis=0),
        untied=untied.min(axis=0),
        tied=tied,
        tied_ends=tied_ends,
        stashed_bytes=stash.min(axis=0),
        working_bytes=peak.min(axis=0),
        problem=problem,
        network=network,
        mixed_tp=frozenset(
            tp
            for tp in problem.tp_degrees
            if problem.capabilities.allows_mixed_tp
            and not all(problem.profile(layer, tp, problem.choices.recompute[0]).is_tensor_parallel for layer in layers)
        ),
        most_used=problem.cluster.device_count,
        update_s=update_s,
    )


def _tied(problem: PlacementProblem, layers: range) -> tuple[FloatArray, FloatArray]:
    """Per (width, layer) and per (first or last, width): as `Packing` counts tied parameters."""
    tied, ends = np.zeros((len(problem.tp_degrees), len(layers))), np.zeros((2, len(problem.tp_degrees)))
    if not layers or problem.stage_sharded_layers.any():
        return tied, ends
    for name, members in problem.graph.ties.items():
        for row, tp in enumerate(problem.tp_degrees):
            sizes = {
                layer: problem.profile(layer, tp, problem.choices.recompute[0]).tied_parameters.get(name, 0.0)
                for layer in members
            }
            tied[row, min(members)] += sizes[min(members)]
            if {0, layers[-1]} <= set(members) and len(layers) > 1:
                ends[:, row] += sizes[0], sizes[layers[-1]]
    return tied, ends


def _least_cut_bytes(problem: PlacementProblem, space: StageSpace, tp: int) -> float:
    """Bytes that cross the cheapest cut."""
    profiles = [problem.profile(layer, tp, problem.choices.recompute[0]) for layer in range(space.layers)]
    return float(cut_bytes(problem, space, profiles)[1:-1].min()) if space.layers > 1 else 0.0


def _prices(problem: PlacementProblem, tp: int, layers: range) -> list[float]:
    """For each recompute mode after the first: what it costs over the one before it per byte of stash saved."""
    prices = []
    for before, after in pairwise(problem.choices.recompute):
        spent = saved = 0.0
        for layer in layers:
            one, other = problem.profile(layer, tp, before), problem.profile(layer, tp, after)
            spent += float((other.recompute_s.value - one.recompute_s.value)[problem.accelerator])
            saved += one.stashed_bytes - other.stashed_bytes
        prices.append(spent / saved if spent > 0 and saved > 0 else 0.0)
    return prices
