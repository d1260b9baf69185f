"""A prepared problem: tables per width, prices, and what a choice of degrees needs to be searched or simulated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from phaze.hardware import Cluster
from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place.bounds.interleaved_bounds import InterleavedBounds
from phaze.place.bounds.layer_table import LayerTable, build_layer_table
from phaze.place.bounds.partial_pipeline_bounds import PathBounds, PeakBounds, StageBounds
from phaze.place.model.network_prices import Network
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_costs import StageCosts, build_stage_costs, update_s_per_parameter
from phaze.place.model.stage_space import FloatArray, IntArray, StageSpace, build_stage_space
from phaze.place.model.stage_sums import StageSums, build_stage_sums
from phaze.place.search.candidate_stages import CandidateStages, build_candidates
from phaze.place.search.parallelism_table import chunk_sizes
from phaze.place.search.stage_search import StageSearch
from phaze.place.simulation.event_simulation import Program, compile_order, simulate
from phaze.place.simulation.pass_orders import pipeline_order

__all__ = ["PreparedProblem"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedProblem:
    """What all choices of one problem share; programs are made when first needed."""

    problem: PlacementProblem
    space: StageSpace
    stage_sums: dict[int, StageSums]
    network: Network
    layer_table: LayerTable
    update_s: float
    programs: dict[tuple[object, ...], Program] = field(default_factory=dict)

    @classmethod
    def of(
        cls, problem: PlacementProblem, *, use_bounds: bool = False, network: Network | None = None
    ) -> PreparedProblem:
        """Prepare a problem, with its profiles' values or with their lower bounds.

        ``network`` is that of a problem on as many devices with the same links and calibration: its prices serve again.
        """
        space = build_stage_space(problem.graph)
        network, update_s = network or Network(problem.cluster, problem.calibration), update_s_per_parameter(problem)
        return cls(
            problem=problem,
            space=space,
            stage_sums={tp: build_stage_sums(problem, space, tp, use_bounds) for tp in problem.tp_degrees},
            network=network,
            layer_table=build_layer_table(problem, space, network, update_s, use_bounds),
            update_s=update_s,
        )

    def with_bounds(self) -> PreparedProblem:
        """The same problem with the profiles' lower bounds for their values."""
        problem, space = self.problem, self.space
        return replace(
            self,
            stage_sums={tp: build_stage_sums(problem, space, tp, use_bounds=True) for tp in problem.tp_degrees},
            layer_table=build_layer_table(problem, space, self.network, self.update_s, use_bounds=True),
        )

    def with_problem(self, problem: PlacementProblem) -> PreparedProblem:
        """The same layers under other choices; tables are made anew only where modes or widths differ."""
        mine = self.problem
        shared = ("graph", "profiles", "cluster", "recipe", "capabilities", "calibration")
        is_shared = all(getattr(problem, name) is getattr(mine, name) for name in shared)
        is_equal = (
            problem.choices.recompute == mine.choices.recompute
            and problem.tp_degrees == mine.tp_degrees
            and problem.accelerator == mine.accelerator
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

    def stage_costs(self, parallelism: Parallelism, stages: IntArray | None = None) -> StageCosts:
        """Times and memory of all stages, or of some, under some degrees."""
        tp, space = self.stage_sums[parallelism.tp], self.space
        if stages is not None:
            tp, space = tp.take(stages), space.take(stages)
        return build_stage_costs(
            self.problem,
            space,
            tp,
            self.network,
            dp=parallelism.dp,
            zero=parallelism.zero,
            stages=parallelism.pp,
            update_s=self.update_s,
            mixes_tp=self.problem.capabilities.allows_mixed_tp and parallelism.chunks == 1,
            splits_backward=parallelism.schedule is PipelineSchedule.ZERO_BUBBLE,
        )

    def program(self, parallelism: Parallelism, most_rounds: int | None = None) -> Program:
        """The order of passes under some degrees, of all microbatches or of the first ones."""
        rounds = parallelism.micro_batches_per_pipeline(self.problem.micro_batches)
        rounds = rounds if most_rounds is None else min(rounds, most_rounds)
        key = (parallelism.schedule, parallelism.pp, rounds, parallelism.chunks)
        if key not in self.programs:
            schedule = parallelism.schedule
            self.programs[key] = compile_order(pipeline_order(schedule, parallelism.pp, rounds, parallelism.chunks))
        return self.programs[key]

    def candidates(self, parallelism: Parallelism, cutoff_s: float) -> CandidateStages:
        """The stages to choose from under some degrees, without those that alone take longer than the cutoff.

        Interleaved pipelines have chunks of nearly equal length.
        """
        table = self.stage_sums[parallelism.tp]
        usable = parallelism.micro_batches_per_pipeline(self.problem.micro_batches) * table.least_s < cutoff_s
        if parallelism.chunks > 1:
            usable &= np.isin(self.space.sizes, chunk_sizes(self.space.layers, parallelism.stages))
        stages = np.flatnonzero(usable)
        part = self.stage_costs(parallelism, stages)
        return build_candidates(self.problem, self.space, table, part, parallelism, stages)

    def singles(self, parallelism: Parallelism) -> tuple[int, int | None]:
        """How many stages must take a single device, and how many exactly if no device may idle."""
        count = self.problem.cluster.device_count // parallelism.dp
        too_many = parallelism.tp * parallelism.pp - count
        if parallelism.tp == 1:
            return 0, None
        needed = max(0, -(-too_many // (parallelism.tp - 1)))
        if self.problem.capabilities.allows_idle_devices:
            return needed, None
        return needed, needed if too_many == needed * (parallelism.tp - 1) else -1

    def bounds(self, candidates: CandidateStages, parallelism: Parallelism, needed: int) -> StageBounds:
        """Bounds under the pipelines of some degrees."""
        rounds, states = parallelism.micro_batches_per_pipeline(self.problem.micro_batches), self.space.states
        match parallelism.schedule:
            case PipelineSchedule.GPIPE:
                return PeakBounds(candidates, parallelism, rounds, states, needed)
            case PipelineSchedule.INTERLEAVED:
                prices = self.stage_sums[parallelism.tp].recompute_s_per_byte
                return InterleavedBounds(candidates, parallelism, rounds, states, self.problem.usable_bytes, prices)
            case _:
                return PathBounds(candidates, parallelism, rounds, states, needed)

    def search(self, parallelism: Parallelism, cutoff_s: float) -> StageSearch | None:
        """What branch and bound below the cutoff needs, or None if the devices cannot be divided so."""
        needed, singles = self.singles(parallelism)
        if singles == -1 or (parallelism.chunks > 1 and needed):
            return None
        return self.stage_search(parallelism, self.candidates(parallelism, cutoff_s), needed, singles)

    def stage_search(
        self, parallelism: Parallelism, candidates: CandidateStages, needed: int = 0, singles: int | None = None
    ) -> StageSearch:
        """Branch and bound over some candidates."""

        def simulated(picks: IntArray) -> FloatArray:
            return simulate(self.program(parallelism), candidates.times(picks, parallelism.pp)).time_s

        def estimated(picks: IntArray) -> FloatArray:
            program, times = self.program(parallelism, 3 * parallelism.pp), candidates.times(picks, parallelism.pp)
            left = parallelism.micro_batches_per_pipeline(self.problem.micro_batches) - program.order.micro_batches
            busiest = (times.forward_s + times.backward_s + times.weight_s).sum(axis=2).max(axis=1)
            return np.asarray(simulate(program, times).time_s + left * busiest)

        return StageSearch(
            candidates=candidates,
            bounds=self.bounds(candidates, parallelism, needed),
            simulated=simulated,
            estimated=estimated,
            stages=parallelism.stages,
            full=self.space.states - 1,
            needed=needed,
            singles=singles,
        )
