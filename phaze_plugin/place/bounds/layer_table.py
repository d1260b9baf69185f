"""What each layer adds to a stage under many strategies at once: the input of `stage_filling.py`.

In a graph that branches only the layers of a longest chain count (`_backbone`): a stage takes and holds at least what
its layers of that chain do.

`LayerTable.terms` computes lower bounds, so that what filling the stages proves holds for every plan:

- every term is the least over recompute modes, unless it is listed per mode;
- collectives over copies and shards take what they take at least; those of rows that stand for several strategies, and
  all others, run on the fastest links that they could use, without latencies (`LayerTable.data_prices`);
- a pass takes as long as its layers or as the collectives behind them, whichever is longer, and what of the shorter is
  not hidden; here the one that is longer over the whole model is charged for every layer (`_overlapped_over_model`),
  which is never more than a stage pays; likewise of reductions only the part that may be hidden is;
- where the graph branches, the backward of all layers that are left out may hide the reductions of any stage;
- a tied parameter counts for the first layer that has it, and for both ends if the first and the last layer share it
  (`_tied_parameters`); parameters that are sharded over stages do not count.

`LayerTable.refuted` asks whether a strategy can beat a target, `LayerTable.tightened` bisects for the largest target
that it provably cannot beat. Interleaved schedules are never refuted here: `interleaved_bounds.py` bounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from phaze.place.bounds.stage_filling import LayerTerms, StageFilling, copies_to_bisect
from phaze.place.model.network_prices import Network
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray, StageSpace
from phaze.place.model.stage_sums import cut_bytes, frozen_by_layer
from phaze.place.model.zero_sharding import ZeroSharding, distinct_columns, listed_shards
from phaze.place.search.parallelism_table import SCHEDULES, SPLIT_SCHEDULES, V_SCHEDULES, ParallelismTable
from phaze.profile.layer_profile import LayerProfile, RecomputeMode

__all__ = ["LayerTable", "build_layer_table"]

_STRATEGIES_AT_ONCE = 4_000
"""How many strategies are filled together. More save calls of numpy; but all are carried along to the last layer, and
some twenty rows of 4,000 numbers (640 kB) still fit into many a processor's second cache."""

_BISECTIONS = 5
"""How often `LayerTable.tightened` halves the interval between a bound and the target: five leave a 32nd of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _DataTerms:
    """What layers hold, buffer and exchange with copies and shards of their parameters, per (kind, strategy).

    Attributes:
        gathered_s: parameters gathered in every pass.
        scattered_s: gradients scattered in every backward.
        reduced_s: gradients reduced after the last backward, without tied ones.
        finish_s: update and gather, and the reduction of tied parameters.
        held_bytes: parameters, gradients and optimizer state.
        buffer_bytes: of which a stage needs the largest.
    """

    gathered_s: FloatArray
    scattered_s: FloatArray
    reduced_s: FloatArray
    finish_s: FloatArray
    held_bytes: FloatArray
    buffer_bytes: FloatArray

    @classmethod
    def nothing(cls, shape: tuple[int, ...]) -> _DataTerms:
        """No parameters."""
        return cls(**{name: np.zeros(shape) for name in cls.__slots__})

    def __add__(self, other: _DataTerms) -> _DataTerms:
        """Both together."""
        return _DataTerms(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTable:
    """Layers in order, per (tp, layer) and the least over recompute modes; of a graph that branches, some of them.

    Attributes:
        tp_degrees: the values of tp, in the order of the first axis.
        forward_s: forward.
        input_s: the part of backward that makes gradients of inputs.
        weight_s: the part of backward that makes gradients of parameters.
        untied: parameters that no other layer shares and that are not sharded over stages.
        experts: those of them that belong to experts which are divided over several devices.
        frozen: parameters that are read and not trained, dense ones and those of divided experts, tied ones at the
            first layer that has them; per (dense or experts, tp, layer).
        tied: tied parameters, each at the first layer that has it.
        tied_ends: tied parameters that the first and the last layer share, per (first or last, tp).
        stashed_bytes: stash per microbatch.
        working_bytes: working set.
        prices: what each recompute mode after the first costs per byte of stash that it saves over the one before it,
            per (mode after the first, tp).
        recompute_s: recompute, per (mode, tp, layer).
        stash_bytes: stash per microbatch, per (mode, tp, layer).
        peak_bytes: working set, per (mode, tp, layer).
        least_cut_s: least seconds of receiving what crosses a cut on the fastest link, per tp.
        least_sent_bytes: least bytes that cross a cut between two devices, each of which sends a part of what all of
            its tp devices hold whole; per tp.
        kinds: a layer of each kind, in order: layers of one kind add the same to a stage. The first and the last
            layer are kinds of their own.
        kind_of_layer: per layer, the place of its kind among the kinds.
        left_out: how many layers of the graph are not among these.
        left_out_backward_s: their backward at its longest, per tp.
        problem: what is placed.
        network: prices of links.
        mixed_tp: values of tp at which some layer is not sliced and may lie on a single device.
        most_used: devices of the cluster.
        update_s: seconds of updating one parameter.
    """

    tp_degrees: tuple[int, ...]
    forward_s: FloatArray
    input_s: FloatArray
    weight_s: FloatArray
    untied: FloatArray
    experts: FloatArray
    frozen: FloatArray
    tied: FloatArray
    tied_ends: FloatArray
    stashed_bytes: FloatArray
    working_bytes: FloatArray
    prices: FloatArray
    recompute_s: FloatArray
    stash_bytes: FloatArray
    peak_bytes: FloatArray
    least_cut_s: FloatArray
    least_sent_bytes: FloatArray
    kinds: IntArray
    kind_of_layer: IntArray
    left_out: int
    left_out_backward_s: FloatArray
    problem: PlacementProblem
    network: Network
    mixed_tp: frozenset[int]
    most_used: int
    update_s: float

    @property
    def parameters(self) -> FloatArray:
        """What a stage trains at least of each of its layers, per (tp, layer)."""
        return np.asarray(self.untied + self.tied)

    @property
    def _held_kinds(self) -> tuple[FloatArray, ...]:
        """What a stage holds at least of each of its layers, per (tp, layer), in the order of the kinds of sharding."""
        trained = (self.parameters - self.experts, self.experts)
        count = 1 if self.problem.ep == 1 else 2
        return (*trained[:count], *(self.frozen[:count] if self.problem.has_frozen else ()))

    def refuted(self, strategies: ParallelismTable, target_s: FloatArray) -> BoolArray:
        """Whether nothing with each of these strategies takes less than its target."""
        result = np.zeros(len(strategies), dtype=bool)
        for part in self._parts(strategies):
            result[part] = self._stage_filling(strategies.take(part)).refuted(target_s[part])
        return result

    def tightened(self, strategies: ParallelismTable, target_s: float) -> FloatArray:
        """A bound under each strategy, at least the one that it has, by bisection up to the target."""
        bounds = strategies.bound_s.copy()
        for part in self._parts(strategies):
            part_strategies = strategies.take(part)
            low, high = part_strategies.bound_s, np.maximum(part_strategies.bound_s, target_s)
            index = np.tile(np.arange(len(part)), copies_to_bisect(len(part)))
            filling = self._stage_filling(part_strategies, index)
            bounds[part] = filling.bisected(low, high, _BISECTIONS)
        return bounds

    def _parts(self, strategies: ParallelismTable) -> list[IntArray]:
        """Indices of strategies that can be filled, in portions of one schedule each."""
        if not self.forward_s.size:
            return []
        by_schedule = [
            np.flatnonzero((strategies.schedule == schedule) & (strategies.chunks == 1))
            for schedule in range(len(SCHEDULES))
        ]
        return [
            indices[start : start + _STRATEGIES_AT_ONCE]
            for indices in by_schedule
            for start in range(0, len(indices), _STRATEGIES_AT_ONCE)
        ]

    def _stage_filling(self, strategies: ParallelismTable, index: IntArray | None = None) -> StageFilling:
        """Stages to be filled under each strategy, or under some of them, each as often as ``index`` names it."""
        terms = self.terms(strategies)
        if index is not None:
            strategies, terms = strategies.take(index), terms.take(index)
        return StageFilling(strategies, terms, self.problem.usable_bytes, self.left_out)

    def held_and_buffered_bytes(self, strategies: ParallelismTable) -> tuple[FloatArray, FloatArray]:
        """What a device holds for each layer, and what buffers the layer needs, per (layer, strategy)."""
        tp_index = np.searchsorted(self.tp_degrees, strategies.tp)
        held, buffers = np.zeros((2, self.parameters.shape[1], len(strategies)))
        kinds = strategies.degrees.sharding(self.problem)
        for sharding, count in zip(kinds, self._held_kinds, strict=True):
            held += count[tp_index].T * sharding.held_bytes_per_parameter
            buffers += count[tp_index].T * sharding.buffer_bytes
        return held, buffers

    def held_by_model_bytes(self, strategies: ParallelismTable) -> FloatArray:
        """What all devices of a pipeline hold together for the layers, per strategy."""
        tp_index = np.searchsorted(self.tp_degrees, strategies.tp)
        kinds = zip(strategies.degrees.sharding(self.problem), self._held_kinds, strict=True)
        return np.asarray(
            sum(count.sum(axis=1)[tp_index] * sharding.held_bytes_per_parameter for sharding, count in kinds)
        )

    def data_prices(self, strategies: ParallelismTable, experts: bool) -> FloatArray:
        """Of gather, scatter and reduction of each strategy: seconds per byte, and latencies.

        Of rows that stand for several values of dp: what the fewest devices move on the fastest links, no latencies. Of
        those that stand for several groups of one dp: the least of each.
        """
        degrees = strategies.degrees
        shares = degrees.shares(self.problem)[int(experts)]
        parts = np.stack([shares.within, shares.within, shares.reduced]) * self.network.least_s_per_byte
        prices = np.concatenate([parts, np.zeros_like(parts)])
        narrow = np.flatnonzero(degrees.least_dp == degrees.dp)
        if not len(narrow):
            return prices
        tp, zero, dp = strategies.tp[narrow], np.minimum(strategies.zero[narrow], 2), strategies.dp[narrow]
        # Where stages may lie on single devices, all degrees together may count more devices than the cluster has.
        # Prices only grow with the devices used, so that those of the whole cluster are a bound; one stage's copies
        # must fit.
        copies = tp * dp * self.problem.cp
        used = np.maximum(np.minimum(copies * strategies.pp[narrow], self.most_used), copies)
        depths = self.network.depths(used)
        columns = np.stack([tp, zero, dp, degrees.least_shard[narrow], degrees.shard[narrow], depths])
        first, which = distinct_columns(columns)
        least = np.array(
            [
                self._least_prices(key, experts, devices)
                for key, devices in zip(columns[:, first].T.tolist(), used[first].tolist(), strict=True)
            ]
        )
        prices[:, narrow] = least[which].T
        return prices

    def _least_prices(self, key: list[int], experts: bool, used: int) -> tuple[float, ...]:
        """Of one tp, ZeRO stage and dp, the least over a range of groups, in plans of one depth; each once."""
        tp, zero, dp, least_shard, shard, depth = key
        problem, known = self.problem, self.network.rates
        widths = (tp, 1) if tp in self.mixed_tp else (tp,)
        sizes = [shard] if least_shard == shard else listed_shards(problem, tp, dp, least_shard, shard)
        index = (problem.cp, problem.ep, int(experts), tp, len(widths), zero, dp, depth, *sizes)
        if index not in known:
            by_size = []
            for size, width in product(sizes, widths):
                dense = ZeroSharding(problem.recipe, zero, size, dp * problem.cp // size)
                part, stride = dense.by_kind(problem.ep)[int(experts)], width * (problem.ep if experts else 1)
                by_size.append(self.network.data_prices(zero, int(part.shard), int(part.groups), stride, used)[:3])
            by_kind = list(zip(*by_size, strict=True))
            rates = (min(price.s_per_byte for price in prices) for prices in by_kind)
            known[index] = (*rates, *(min(price.latency_s for price in prices) for prices in by_kind))
        return known[index]

    def _data_terms(self, strategies: ParallelismTable) -> _DataTerms:
        """What layers of each kind exchange with copies and shards of their parameters, and the update."""
        tp_index = np.searchsorted(self.tp_degrees, strategies.tp)
        experts, tied = self.experts[:, self.kinds][tp_index].T, self._tied(strategies)
        dense = self.untied[:, self.kinds][tp_index].T - experts
        frozen = [count[:, self.kinds][tp_index].T for count in self.frozen]
        total = _DataTerms.nothing(dense.shape)
        for place, sharding in enumerate(strategies.degrees.sharding(self.problem)):
            trains, is_expert = sharding.recipe.trains, sharding.divided > 1
            is_frozen = place >= (1 if self.problem.ep == 1 else 2)  # frozen ones come behind the others
            others = experts if is_expert else dense + tied
            parameters = frozen[is_expert] if is_frozen else others
            untied = parameters if is_expert or is_frozen else dense
            starts_gather = (parameters > 0) & ((not is_frozen) | (others <= 0))  # both of a layer are gathered at once
            prices = self.data_prices(strategies, experts=is_expert)
            gather, scatter, reduce, gather_latency_s, scatter_latency_s, reduce_latency_s = prices
            gathered_bytes, scattered_bytes = sharding.gathered_bytes_per_pass, sharding.scattered_bytes_per_backward
            has_parameters, reduction = parameters > 0, sharding.recipe.reduction_bytes * reduce
            total += _DataTerms(
                gathered_s=parameters * (gathered_bytes * gather)
                + starts_gather * (gathered_bytes > 0) * gather_latency_s,
                scattered_s=parameters * (scattered_bytes * scatter)
                + has_parameters * (scattered_bytes > 0) * scatter_latency_s,
                reduced_s=untied * reduction + (untied > 0) * trains * reduce_latency_s,
                finish_s=parameters
                * (self.update_s * trains / sharding.optimizer_shards + sharding.gathered_bytes_per_batch * gather)
                + (parameters - untied) * reduction,
                held_bytes=parameters * sharding.held_bytes_per_parameter,
                buffer_bytes=parameters * sharding.buffer_bytes,
            )
        return total

    def terms(self, strategies: ParallelismTable) -> LayerTerms:
        """What a layer of each kind adds to a stage under each strategy."""
        tp_index, kinds = np.searchsorted(self.tp_degrees, strategies.tp), self.kinds
        forward, to_inputs, to_weights = (
            table[:, kinds][tp_index].T for table in (self.forward_s, self.input_s, self.weight_s)
        )
        counts = np.bincount(self.kind_of_layer).astype(float)[:, None]
        data = self._data_terms(strategies)
        is_split = np.isin(strategies.schedule, SPLIT_SCHEDULES)
        overlap = self.problem.calibration.hidden_share
        run = _overlapped_over_model(forward, data.gathered_s, counts, overlap)
        back = _overlapped_over_model(
            np.where(is_split, to_inputs, to_inputs + to_weights),
            data.gathered_s + np.where(is_split, 0.0, data.scattered_s),
            counts,
            overlap,
        )
        finish = data.finish_s + (1 - overlap) * data.reduced_s
        between_stages = self.problem.recipe.reduction_bytes * self.network.least_s_per_byte
        reduces_ends = (strategies.pp > 1) & ~np.isin(strategies.schedule, V_SCHEDULES)
        finish[[0, -1]] += np.where(reduces_ends, between_stages, 0.0) * self.tied_ends[:, tp_index]
        again, stash, working = (
            table[:, :, kinds][:, tp_index].transpose(0, 2, 1)
            for table in (self.recompute_s, self.stash_bytes, self.peak_bytes)
        )
        least_used = strategies.tp * strategies.least_dp * self.problem.cp * strategies.pp
        between_s = self.network.least_s_per_byte_between(least_used)
        return LayerTerms(
            kind_of_layer=self.kind_of_layer,
            counts=counts[:, 0],
            run_s=run,
            through_s=run + back,
            weight_s=np.where(is_split, _overlapped_over_model(to_weights, data.scattered_s, counts, overlap), 0.0),
            finish_s=finish,
            reduced_s=overlap * data.reduced_s,
            hidden_s=overlap * np.where(is_split, to_weights, to_inputs + to_weights),
            held_bytes=data.held_bytes,
            buffer_bytes=data.buffer_bytes,
            again_s=again,
            stash_bytes=stash,
            working_bytes=working,
            hidden_elsewhere_s=overlap * self.left_out_backward_s[tp_index],
            cut_s=np.maximum(self.least_cut_s[tp_index], between_s * self.least_sent_bytes[tp_index]),
        )

    def _tied(self, strategies: ParallelismTable) -> FloatArray:
        """Per (kind, strategy): tied parameters, on the last layer too where it cannot lie beside the first."""
        tp_index = np.searchsorted(self.tp_degrees, strategies.tp)
        tied = self.tied[:, self.kinds][tp_index].T.copy()
        tied[-1] += np.where(strategies.pp > 1, self.tied_ends[1, tp_index], 0.0)
        return tied


def _overlapped_over_model(
    layers_s: FloatArray, collectives_s: FloatArray, counts: FloatArray, overlap: float
) -> FloatArray:
    """A pass and the collectives behind it, per (kind, strategy): the longer, and what of the shorter is not hidden.

    A stage takes ``overlap`` times the longer of the two and the rest of both, as `stage_costs.py` prices it. Which of
    the two is longer is asked of the whole model.
    """
    longer = np.where((counts * layers_s).sum(axis=0) >= (counts * collectives_s).sum(axis=0), layers_s, collectives_s)
    return np.asarray(overlap * longer + (1 - overlap) * (layers_s + collectives_s))


def build_layer_table(
    problem: PlacementProblem, space: StageSpace, network: Network, update_s: float, use_bounds: bool
) -> LayerTable:
    """The layers of a problem, with the profiles' values or their lower bounds."""
    layers = list(range(space.layers)) if space.is_chain else _backbone(space)
    value_or_bound = "bound" if use_bounds else "value"

    def by_mode(read: Callable[[LayerProfile], float]) -> FloatArray:
        return np.array(
            [
                [[read(problem.profile(layer, tp, mode)) for layer in layers] for tp in problem.tp_degrees]
                for mode in problem.choices.recompute
            ]
        )

    def seconds(name: str) -> FloatArray:
        return by_mode(lambda profile: float(getattr(getattr(profile, name), value_or_bound)[problem.accelerator]))

    stash, peak = by_mode(lambda profile: profile.stashed_bytes), by_mode(lambda profile: profile.peak_working_bytes)
    untied = by_mode(lambda profile: profile.parameters - sum(profile.tied_parameters.values()))
    untied[..., problem.stage_sharded_layers[layers]] = 0.0
    tied, tied_ends = _tied_parameters(problem, layers, space)
    least_cut_bytes, least_sent_bytes = np.array([_least_cut_bytes(problem, space, tp) for tp in problem.tp_degrees]).T
    recompute, experts = seconds("recompute_s"), by_mode(lambda profile: profile.expert_parameters * (problem.ep > 1))
    frozen = frozen_by_layer(problem, layers)
    passes = [seconds(name) for name in ("forward_s", "backward_input_s", "backward_weight_s")]
    kinds, kind_of_layer = _kinds_of_layers([*passes, recompute, stash, peak, untied, experts, tied, frozen])
    return LayerTable(
        tp_degrees=problem.tp_degrees,
        prices=np.array([_recompute_prices(problem, tp, layers) for tp in problem.tp_degrees]).T,
        recompute_s=recompute,
        stash_bytes=stash,
        peak_bytes=peak,
        least_cut_s=least_cut_bytes * network.least_s_per_byte,
        least_sent_bytes=least_sent_bytes,
        kinds=kinds,
        kind_of_layer=kind_of_layer,
        left_out=space.layers - len(layers),
        left_out_backward_s=_longest_backward_s(
            problem, [layer for layer in range(space.layers) if layer not in layers]
        ),
        forward_s=passes[0].min(axis=0),
        input_s=passes[1].min(axis=0),
        weight_s=passes[2].min(axis=0),
        untied=untied.min(axis=0),
        experts=experts.min(axis=0),
        frozen=frozen,
        tied=tied,
        tied_ends=tied_ends,
        stashed_bytes=stash.min(axis=0),
        working_bytes=peak.min(axis=0),
        problem=problem,
        network=network,
        mixed_tp=frozenset(tp for tp in problem.tp_degrees if _is_mixed(problem, tp)),
        most_used=problem.cluster.device_count,
        update_s=update_s,
    )


def _kinds_of_layers(tables: Sequence[FloatArray]) -> tuple[IntArray, IntArray]:
    """`LayerTable.kinds` and `LayerTable.kind_of_layer`, from tables whose last axis is the layers."""
    layers = tables[0].shape[-1]
    columns = np.concatenate([table.reshape(table.size // max(layers, 1), layers) for table in tables])
    first_of_kind: dict[tuple[int, bytes], int] = {}
    firsts = [
        first_of_kind.setdefault((layer if layer in (0, layers - 1) else -1, columns[:, layer].tobytes()), layer)
        for layer in range(layers)
    ]
    kinds = np.unique(np.array(firsts, dtype=np.int64))
    return kinds, np.searchsorted(kinds, firsts)


def _backbone(space: StageSpace) -> list[int]:
    """The most layers of which each stands behind the one before, in their order."""
    inside = space.inside.astype(np.int64)
    needs = (inside.T @ (1 - inside)) == 0  # per (later, earlier): never placed without the earlier one
    np.fill_diagonal(needs, val=False)
    longest: dict[int, list[int]] = {}  # per layer, the longest chain that ends with it
    for layer in np.argsort(needs.sum(axis=1), kind="stable").tolist():
        before = max((longest[earlier] for earlier in np.flatnonzero(needs[layer]).tolist()), key=len, default=[])
        longest[layer] = [*before, layer]
    return max(longest.values(), key=len)


def _longest_backward_s(problem: PlacementProblem, layers: list[int]) -> FloatArray:
    """Per tp: seconds of backward of some layers, each with the mode in which it takes longest."""

    def backward_s(layer: int, tp: int, mode: RecomputeMode) -> float:
        profile = problem.profile(layer, tp, mode)
        return float((profile.backward_input_s.value + profile.backward_weight_s.value)[problem.accelerator])

    modes = problem.choices.recompute
    longest = [[max(backward_s(layer, tp, mode) for mode in modes) for layer in layers] for tp in problem.tp_degrees]
    return np.asarray(np.array(longest).reshape(len(problem.tp_degrees), -1).sum(axis=1))


def _is_mixed(problem: PlacementProblem, tp: int) -> bool:
    """Whether a stage of layers that are not sliced at this tp may take a single device."""
    mode = problem.choices.recompute[0]
    return problem.capabilities.allows_mixed_tp and not all(
        problem.profile(layer, tp, mode).is_tensor_parallel for layer in range(len(problem.graph.layers))
    )


def _tied_parameters(problem: PlacementProblem, layers: list[int], space: StageSpace) -> tuple[FloatArray, FloatArray]:
    """`LayerTable.tied` per (tp, layer), and `LayerTable.tied_ends` per (first or last, tp)."""
    tied, ends = np.zeros((len(problem.tp_degrees), len(layers))), np.zeros((2, len(problem.tp_degrees)))
    if not layers or problem.stage_sharded_layers.any():
        return tied, ends
    for name, all_members in problem.graph.ties.items():
        members = [layer for layer in layers if layer in all_members]
        for row, tp in enumerate(problem.tp_degrees if members else ()):
            sizes = [
                problem.profile(layer, tp, problem.choices.recompute[0]).tied_parameters.get(name, 0.0)
                for layer in members
            ]
            tied[row, layers.index(members[0])] += sizes[0]
            if space.is_chain and len(layers) > 1 and (members[0], members[-1]) == (layers[0], layers[-1]):
                ends[:, row] += sizes[0], sizes[-1]
    return tied, ends


def _least_cut_bytes(problem: PlacementProblem, space: StageSpace, tp: int) -> tuple[float, float]:
    """Bytes that cross the cheapest cut: all of them, and those that are sent if what is whole is sent in parts."""
    if space.layers == 1:
        return 0.0, 0.0
    profiles = [problem.profile(layer, tp, problem.choices.recompute[0]) for layer in range(space.layers)]
    cut, whole = (cut_bytes(problem, space, profiles, only_whole=only)[1:-1] for only in (False, True))
    return float(cut.min()), float((cut - whole * (1 - 1 / tp)).min())


def _recompute_prices(problem: PlacementProblem, tp: int, layers: list[int]) -> list[float]:
    """For each recompute mode after the first: what it costs over the one before it per byte of stash saved."""
    prices = []
    for before, after in pairwise(problem.choices.recompute):
        spent = saved = 0.0
        for layer in layers:
            old, new = problem.profile(layer, tp, before), problem.profile(layer, tp, after)
            spent += float((new.recompute_s.value - old.recompute_s.value)[problem.accelerator])
            saved += old.stashed_bytes - new.stashed_bytes
        prices.append(spent / saved if spent > 0 and saved > 0 else 0.0)
    return prices
