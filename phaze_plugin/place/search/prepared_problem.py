"""A placement problem with its tables: everything that the strategies of one problem share, computed once.

`PreparedProblem` holds the sums over stages by tp, the prices of links and the layer table. From them it makes, for one
strategy, the costs of its stages, the order of its passes, its candidate stages, their bounds and the stage search.

`estimated_step_s` guesses the step time of the best plan of a problem from these tables, in a millisecond; it orders
problems and proves nothing. Every strategy is taken with equal stages: its closed-form bound, and the recompute of the
cheapest mode with which the fullest device seems to hold its share of the model. The most promising ones are priced
once more with the collectives of their own links. The guess is the least of these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from phaze.hardware import Cluster
from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place.bounds.interleaved_bounds import InterleavedBounds
from phaze.place.bounds.layer_table import LayerTable, build_layer_table
from phaze.place.bounds.path_bounds import PathBounds, PeakBounds, StageBounds
from phaze.place.model.network_prices import LinkPrices, Network
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_costs import StageCosts, build_stage_costs, update_s_per_parameter
from phaze.place.model.stage_space import FloatArray, IntArray, StageSpace, build_stage_space
from phaze.place.model.stage_sums import StageSums, StageSumsByTp
from phaze.place.search.candidate_stages import CandidateStages, build_candidates
from phaze.place.search.parallelism_table import SCHEDULES, ParallelismTable, chunk_sizes, list_parallelisms
from phaze.place.search.stage_search import SingleDeviceStages, StageSearch
from phaze.place.simulation.event_simulation import Program, StageTimes, compile_order, simulated_s
from phaze.place.simulation.pass_orders import pipeline_order

__all__ = ["PreparedProblem", "estimated_step_s", "estimated_steps_s", "priced_steps_s"]

_ESTIMATED_GROUPS = 3
"""An estimate simulates so many microbatches per stage of the pipeline: one group fills it, one shows its steady state,
one drains it. More cost time in proportion and change the estimate little."""

_NO_SINGLES = SingleDeviceStages()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedProblem:
    """A problem with its tables.

    Attributes:
        problem: what is placed.
        space: every stage that the layer graph allows.
        stage_sums: sums over every stage, by tp.
        ends: the stages that end the model, the whole model among them; all that closed-form bounds read.
        end_sums: sums over these, by tp.
        network: prices of links.
        layer_table: layers of a chain, for bounds on many strategies at once.
        update_s: seconds of updating one parameter.
        programs: orders of passes that were needed so far, by schedule, pp, microbatches and chunks.
    """

    problem: PlacementProblem
    space: StageSpace
    stage_sums: Mapping[int, StageSums]
    ends: StageSpace
    end_sums: Mapping[int, StageSums]
    network: Network
    layer_table: LayerTable
    update_s: float
    programs: dict[tuple[PipelineSchedule, int, int, int], Program] = field(default_factory=dict)

    @classmethod
    def of(
        cls, problem: PlacementProblem, *, use_bounds: bool = False, network: Network | None = None
    ) -> PreparedProblem:
        """Prepare a problem, with its profiles' values or with their lower bounds.

        ``network`` is that of a problem on as many devices with the same links and calibration: its prices serve again.
        """
        space = build_stage_space(problem.graph)
        ends = space.take(np.flatnonzero(space.target == space.states - 1))
        network, update_s = network or Network(problem.cluster, problem.calibration), update_s_per_parameter(problem)
        return cls(
            problem=problem,
            space=space,
            stage_sums=StageSumsByTp(problem, space, use_bounds),
            ends=ends,
            end_sums=StageSumsByTp(problem, ends, use_bounds),
            network=network,
            layer_table=build_layer_table(problem, space, network, update_s, use_bounds),
            update_s=update_s,
        )

    def with_bounds(self) -> PreparedProblem:
        """The same problem with the profiles' lower bounds for their values."""
        return self._reading(use_bounds=True)

    def with_values(self) -> PreparedProblem:
        """The same problem with the profiles' values."""
        return self._reading(use_bounds=False)

    def _reading(self, *, use_bounds: bool) -> PreparedProblem:
        problem, space = self.problem, self.space
        return replace(
            self,
            stage_sums=StageSumsByTp(problem, space, use_bounds=use_bounds),
            end_sums=StageSumsByTp(problem, self.ends, use_bounds=use_bounds),
            layer_table=build_layer_table(problem, space, self.network, self.update_s, use_bounds=use_bounds),
        )

    def with_problem(self, problem: PlacementProblem) -> PreparedProblem:
        """The same layers under other choices; tables are made anew only where recompute modes or tp differ."""
        old = self.problem
        shared = ("graph", "profiles", "cluster", "recipe", "capabilities", "calibration")
        is_shared = all(getattr(problem, name) is getattr(old, name) for name in shared)
        is_equal = (
            problem.choices.recompute == old.choices.recompute
            and problem.tp_degrees == old.tp_degrees
            and (problem.accelerator, problem.cp, problem.ep) == (old.accelerator, old.cp, old.ep)
        )
        if not is_shared or not is_equal:
            return PreparedProblem.of(problem)
        return replace(self, problem=problem, layer_table=replace(self.layer_table, problem=problem))

    def with_cluster(self, cluster: Cluster) -> PreparedProblem:
        """The same problem on other devices; what does not depend on them is kept."""
        problem = replace(self.problem, cluster=cluster)
        network = Network(cluster, problem.calibration, self.network.energy)
        layer_table = replace(self.layer_table, problem=problem, network=network, most_used=cluster.device_count)
        return replace(
            self,
            problem=problem,
            network=network,
            layer_table=layer_table,
            update_s=update_s_per_parameter(problem),
            programs={},
        )

    def strategies(self) -> ParallelismTable:
        """All strategies; those that differ only in dp and shard, and not in their microbatches, share a row."""
        return list_parallelisms(self.problem, self.ends, self.end_sums, self.network, self.update_s, joins_rows=True)

    def stage_costs(
        self, parallelism: Parallelism, stages: IntArray | None = None, prices: LinkPrices | None = None
    ) -> StageCosts:
        """Times and memory of all stages, or of some, under a strategy, and at other ``prices`` of links if given."""
        sums, space = self.stage_sums[parallelism.tp], self.space
        if stages is not None:
            sums, space = sums.take(stages), space.take(stages)
        return build_stage_costs(
            self.problem,
            space,
            sums,
            prices or self.network,
            parallelism,
            update_s=self.update_s,
            mixes_tp=self.problem.capabilities.allows_mixed_tp and parallelism.chunks == 1,
        )

    def micro_batches(self, parallelism: Parallelism) -> int:
        """Microbatches of the fullest pipeline under a strategy."""
        return parallelism.micro_batches_per_pipeline(self.problem.micro_batches)

    def program(self, parallelism: Parallelism, most_micro_batches: int | None = None) -> Program:
        """The order of passes under a strategy, of all microbatches or of the first ones."""
        micro_batches = self.micro_batches(parallelism)
        micro_batches = micro_batches if most_micro_batches is None else min(micro_batches, most_micro_batches)
        key = (parallelism.schedule, parallelism.pp, micro_batches, parallelism.chunks)
        if key not in self.programs:
            self.programs[key] = compile_order(pipeline_order(*key))
        return self.programs[key]

    def candidates(
        self,
        parallelism: Parallelism,
        cutoff_s: float,
        *,
        keeps_all_modes: bool = False,
        prices: LinkPrices | None = None,
    ) -> CandidateStages:
        """The stages to choose from under a strategy, without those that alone take longer than the cutoff.

        Interleaved pipelines have chunks of nearly equal length. ``prices`` are those of links, if not the network's.
        """
        sums = self.stage_sums[parallelism.tp]
        is_listed = self.micro_batches(parallelism) * sums.least_s < cutoff_s
        if parallelism.chunks > 1:
            is_listed &= np.isin(self.space.sizes, chunk_sizes(self.space.layers, parallelism.stages))
        stages = np.flatnonzero(is_listed)
        costs = self.stage_costs(parallelism, stages, prices)
        return build_candidates(
            self.problem, self.space, sums, costs, parallelism, stages, keeps_all_modes=keeps_all_modes
        )

    def single_device_stages(self, parallelism: Parallelism) -> SingleDeviceStages | None:
        """How many stages take a single device so that the devices suffice; None if they cannot be divided so.

        A stage that takes one device instead of tp, for each part of a sequence, frees tp - 1.
        """
        devices_each = self.problem.cluster.device_count // parallelism.replicas
        missing = parallelism.tp * parallelism.pp - devices_each
        if parallelism.tp == 1:
            return SingleDeviceStages()
        least = max(0, -(-missing // (parallelism.tp - 1)))
        if least and parallelism.chunks > 1:
            return None
        if self.problem.capabilities.allows_idle_devices:
            return SingleDeviceStages(least)
        return SingleDeviceStages(least, least) if missing == least * (parallelism.tp - 1) else None

    def bounds(self, candidates: CandidateStages, parallelism: Parallelism, singles_needed: int) -> StageBounds:
        """Bounds under the partial pipelines of a strategy."""
        micro_batches, states = self.micro_batches(parallelism), self.space.states
        if parallelism.schedule is PipelineSchedule.GPIPE:
            return PeakBounds(candidates, parallelism, micro_batches, states, singles_needed)
        if parallelism.schedule.has_chunks:
            prices = self.stage_sums[parallelism.tp].recompute_s_per_byte
            usable_bytes = self.problem.usable_bytes
            return InterleavedBounds(candidates, parallelism, micro_batches, usable_bytes, prices, self.space)
        return PathBounds(candidates, parallelism, micro_batches, states, singles_needed)

    def stage_search_below(self, parallelism: Parallelism, cutoff_s: float) -> StageSearch | None:
        """The search for a strategy's best stages below the cutoff, or None if the devices cannot be divided so."""
        singles = self.single_device_stages(parallelism)
        if singles is None:
            return None
        return self.stage_search(parallelism, self.candidates(parallelism, cutoff_s), singles)

    def stage_search(
        self,
        parallelism: Parallelism,
        candidates: CandidateStages,
        singles: SingleDeviceStages = _NO_SINGLES,
    ) -> StageSearch:
        """The search for the best stages among some candidates."""

        def timed(times: StageTimes) -> FloatArray:
            return simulated_s(self.program(parallelism), times)

        def simulated(pipelines: IntArray) -> FloatArray:
            return timed(candidates.times(pipelines, parallelism))

        def estimated(pipelines: IntArray) -> FloatArray:
            program = self.program(parallelism, _ESTIMATED_GROUPS * parallelism.pp)
            times = candidates.times(pipelines, parallelism)
            micro_batches_left = self.micro_batches(parallelism) - program.order.micro_batches
            busiest = (times.forward_s + times.backward_s + times.weight_s).sum(axis=2).max(axis=1)
            return np.asarray(simulated_s(program, times) + micro_batches_left * busiest)

        return StageSearch(
            candidates=candidates,
            bounds=self.bounds(candidates, parallelism, singles.least),
            simulated=simulated,
            timed=timed,
            estimated=estimated,
            stages=parallelism.stages,
            last_state=self.space.states - 1,
            singles=singles,
        )


_PRICED_EXACTLY = 64
"""How many of the most promising strategies are priced on their own links instead of the fastest ones: enough that one
which is not slowed down by its links is among them, in a millisecond."""


def estimated_step_s(prepared: PreparedProblem, strategies: ParallelismTable) -> float:
    """A guess at the least step time of some strategies of a problem; infinite where none seems to fit."""
    step_s, again_s = estimated_steps_s(prepared, strategies)
    if not np.isfinite(step_s).any():
        return math.inf
    best = np.argsort(step_s, kind="stable")[:_PRICED_EXACTLY]
    priced_s = priced_steps_s(prepared, strategies.take(best).narrowed()) + again_s[best]
    return float(np.maximum(step_s[best], priced_s).min())


def estimated_steps_s(prepared: PreparedProblem, strategies: ParallelismTable) -> tuple[FloatArray, FloatArray]:
    """A guess at each step time, and at what of it is recomputed; both are infinite where nothing seems to fit."""
    layers, usable_bytes = prepared.layer_table, prepared.problem.usable_bytes
    tp_index = np.searchsorted(layers.tp_degrees, strategies.tp)
    again_s, stash_bytes = (table.sum(axis=2)[:, tp_index] for table in (layers.recompute_s, layers.stash_bytes))
    working_bytes = layers.peak_bytes.max(axis=2)[:, tp_index]
    held_bytes = layers.held_by_model_bytes(strategies)
    fullest_bytes = (held_bytes + _in_flight(strategies) * stash_bytes) / strategies.pp + working_bytes
    least_again_s = np.where(fullest_bytes <= usable_bytes, _rounds(strategies) * again_s, np.inf).min(axis=0)
    return strategies.bound_s + least_again_s, least_again_s


def priced_steps_s(prepared: PreparedProblem, strategies: ParallelismTable) -> FloatArray:
    """The step time of each strategy in equal stages that recompute nothing, with collectives on their own links."""
    terms = prepared.layer_table.terms(strategies)
    passes_s = _rounds(strategies) * terms.over_model(terms.through_s + terms.weight_s)
    return np.asarray(passes_s + terms.over_model(terms.finish_s) / strategies.pp)


def _rounds(strategies: ParallelismTable) -> FloatArray:
    """How many microbatches of a stage a step takes as long as, where all stages are equal."""
    return np.asarray((strategies.micro_batches + strategies.pp - 1) / strategies.pp)


def _in_flight(strategies: ParallelismTable) -> FloatArray:
    """Microbatches that the first stage of each strategy keeps at once."""
    pp, micro_batches, chunks = strategies.pp, strategies.micro_batches, strategies.chunks
    is_gpipe = strategies.schedule == SCHEDULES.index(PipelineSchedule.GPIPE)
    early = pp * (1 + (pp - 1) / (pp * chunks) * (chunks > 1))
    is_eager = strategies.schedule == SCHEDULES.index(PipelineSchedule.EAGER)
    early = np.where(is_eager, 2 * pp - 1, early)
    return np.asarray(np.where(is_gpipe, micro_batches, np.minimum(micro_batches, early)))
