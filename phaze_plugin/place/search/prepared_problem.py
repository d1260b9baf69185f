"""A prepared problem: tables per width, prices, and what a choice of degrees needs to be searched or simulated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from phaze.capabilities import PipelineSchedule
from phaze.hardware import Cluster
from phaze.place.bounds.interleaved_bounds import ChunkBounds
from phaze.place.bounds.layer_table import Packing, build_packing
from phaze.place.bounds.partial_pipeline_bounds import PathBounds, PeakBounds, StageBounds
from phaze.place.model.network_prices import Network
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_costs import StageTable, build_stage_table, update_s_per_parameter
from phaze.place.model.stage_space import FloatArray, IntArray, StageSpace, build_stage_space
from phaze.place.model.stage_sums import WidthTable, build_width_table
from phaze.place.search.candidate_stages import Candidates, build_candidates
from phaze.place.search.parallelism_table import Degrees, chunk_sizes
from phaze.place.search.stage_branch_and_bound import SplitSearch
from phaze.place.simulation.event_simulation import Program, compile_order, simulate
from phaze.place.simulation.pass_orders import pipeline_order

__all__ = ["Ground"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ground:
    """What all choices of one problem share; programs are made when first needed."""

    problem: PlacementProblem
    space: StageSpace
    widths: dict[int, WidthTable]
    network: Network
    packing: Packing
    update_s: float
    programs: dict[tuple[object, ...], Program] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: PlacementProblem, *, use_bounds: bool = False, network: Network | None = None) -> Ground:
        """Prepare a problem, with its profiles' values or with their lower bounds.

        ``network`` is that of a problem on as many devices with the same links and calibration: its prices serve again.
        """
        space = build_stage_space(problem.graph)
        network, update_s = network or Network(problem.cluster, problem.calibration), update_s_per_parameter(problem)
        return cls(
            problem=problem,
            space=space,
            widths={width: build_width_table(problem, space, width, use_bounds) for width in problem.widths},
            network=network,
            packing=build_packing(problem, space, network, update_s, use_bounds),
            update_s=update_s,
        )

    def with_bounds(self) -> Ground:
        """The same problem with the profiles' lower bounds for their values."""
        problem, space = self.problem, self.space
        return replace(
            self,
            widths={width: build_width_table(problem, space, width, use_bounds=True) for width in problem.widths},
            packing=build_packing(problem, space, self.network, self.update_s, use_bounds=True),
        )

    def with_choices(self, problem: PlacementProblem) -> Ground:
        """The same layers under other choices; tables are made anew only where modes or widths differ."""
        mine = self.problem
        shared = ("graph", "profiles", "cluster", "recipe", "capabilities", "calibration")
        is_shared = all(getattr(problem, name) is getattr(mine, name) for name in shared)
        equal = ("recompute_modes", "widths", "accelerator")
        if not is_shared or any(getattr(problem, name) != getattr(mine, name) for name in equal):
            return Ground.of(problem)
        return replace(self, problem=problem, packing=replace(self.packing, problem=problem))

    def with_cluster(self, cluster: Cluster) -> Ground:
        """The same problem on other devices; what does not depend on them is kept."""
        problem = replace(self.problem, cluster=cluster)
        network = Network(cluster, problem.calibration, self.network.energy)
        packing = replace(self.packing, problem=problem, network=network, most_used=cluster.device_count)
        return replace(
            self,
            problem=problem,
            network=network,
            packing=packing,
            update_s=update_s_per_parameter(problem),
            programs={},
        )

    def stage_table(self, degrees: Degrees, stages: IntArray | None = None) -> StageTable:
        """Times and memory of all stages, or of some, under some degrees."""
        width, space = self.widths[degrees.width], self.space
        if stages is not None:
            width, space = width.take(stages), space.take(stages)
        return build_stage_table(
            self.problem,
            space,
            width,
            self.network,
            pipelines=degrees.pipelines,
            zero_stage=degrees.zero_stage,
            stages=degrees.devices,
            update_s=self.update_s,
            mixes_widths=self.problem.capabilities.allows_mixed_widths and degrees.chunks == 1,
            splits_backward=degrees.schedule is PipelineSchedule.ZERO_BUBBLE,
        )

    def program(self, degrees: Degrees, most_rounds: int | None = None) -> Program:
        """The order of passes under some degrees, of all microbatches or of the first ones."""
        rounds = degrees.rounds(self.problem.micro_batches)
        rounds = rounds if most_rounds is None else min(rounds, most_rounds)
        key = (degrees.schedule, degrees.devices, rounds, degrees.chunks)
        if key not in self.programs:
            schedule = degrees.schedule or PipelineSchedule.ONE_F_ONE_B
            self.programs[key] = compile_order(pipeline_order(schedule, degrees.devices, rounds, degrees.chunks))
        return self.programs[key]

    def candidates(self, degrees: Degrees, cutoff_s: float) -> Candidates:
        """The stages to choose from under some degrees, without those that alone take longer than the cutoff.

        Interleaved pipelines have chunks of nearly equal length.
        """
        table = self.widths[degrees.width]
        usable = degrees.rounds(self.problem.micro_batches) * table.least_s < cutoff_s
        if degrees.chunks > 1:
            usable &= np.isin(self.space.sizes, chunk_sizes(self.space.layers, degrees.stages))
        stages = np.flatnonzero(usable)
        part = self.stage_table(degrees, stages)
        return build_candidates(self.problem, self.space, table, part, degrees, stages)

    def singles(self, degrees: Degrees) -> tuple[int, int | None]:
        """How many stages must take a single device, and how many exactly if no device may idle."""
        count = self.problem.cluster.device_count // degrees.pipelines
        too_many = degrees.width * degrees.devices - count
        if degrees.width == 1:
            return 0, None
        needed = max(0, -(-too_many // (degrees.width - 1)))
        if self.problem.capabilities.allows_idle_devices:
            return needed, None
        return needed, needed if too_many == needed * (degrees.width - 1) else -1

    def bounds(self, candidates: Candidates, degrees: Degrees, needed: int) -> StageBounds:
        """Bounds under the pipelines of some degrees."""
        rounds, states = degrees.rounds(self.problem.micro_batches), self.space.states
        match degrees.schedule:
            case PipelineSchedule.GPIPE:
                return PeakBounds(candidates, degrees, rounds, states, needed)
            case PipelineSchedule.INTERLEAVED:
                prices = self.widths[degrees.width].recompute_s_per_byte
                return ChunkBounds(candidates, degrees, rounds, states, self.problem.usable_bytes, prices)
            case _:
                return PathBounds(candidates, degrees, rounds, states, needed)

    def search(self, degrees: Degrees, cutoff_s: float) -> SplitSearch | None:
        """What branch and bound below the cutoff needs, or None if the devices cannot be divided so."""
        needed, singles = self.singles(degrees)
        if singles == -1 or (degrees.chunks > 1 and needed):
            return None
        return self.split_search(degrees, self.candidates(degrees, cutoff_s), needed, singles)

    def split_search(
        self, degrees: Degrees, candidates: Candidates, needed: int = 0, singles: int | None = None
    ) -> SplitSearch:
        """Branch and bound over some candidates."""

        def simulated(picks: IntArray) -> FloatArray:
            return simulate(self.program(degrees), candidates.times(picks, degrees.devices)).time_s

        def estimated(picks: IntArray) -> FloatArray:
            program, times = self.program(degrees, 3 * degrees.devices), candidates.times(picks, degrees.devices)
            left = degrees.rounds(self.problem.micro_batches) - program.order.micro_batches
            busiest = (times.forward_s + times.backward_s + times.weight_s).sum(axis=2).max(axis=1)
            return np.asarray(simulate(program, times).time_s + left * busiest)

        return SplitSearch(
            candidates=candidates,
            bounds=self.bounds(candidates, degrees, needed),
            simulated=simulated,
            estimated=estimated,
            stages=degrees.stages,
            full=self.space.states - 1,
            needed=needed,
            singles=singles,
        )
