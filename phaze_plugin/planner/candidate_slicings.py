"""One slicing of a question before it is searched: how fast its best plan may be, and how fast it probably is.

A slicing of a microbatch size and a tp gets quick profiles first: list schedules with closed-form bounds
(`ProfileOptions.is_quick`). On them stand

- a first bound (`CandidateSlicing.least_s`): the passes of all microbatches through all layers, divided over all
  devices without a gap. Most slicings that are far from the best are ruled out by it before anything is listed;
- a bound (`CandidateSlicing.bounded_below`): placement's closed forms and stage filling on the profiles' lower bounds,
  with bubbles, collectives, the update and what memory forces to be recomputed, prove that no plan beats a time;
- an estimate (`CandidateSlicing.estimate_s`), which proves nothing: it says what to look at first, so that a good time
  is known early and rules out most of the others.

What is left is scheduled to the gap that was asked for (`CandidateSlicing.scheduled`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush

from phaze.parallelism import Offload
from phaze.place import BoundedStrategies, PlacementProblem, PreparedProblem
from phaze.place.model.network_prices import Network
from phaze.place.search.parallelism_search import refuted_below
from phaze.place.search.parallelism_table import ParallelismTable
from phaze.place.search.step_estimates import estimated_step_s
from phaze.profile.layer_passes import ProfileOptions
from phaze.profile.model_profiles import ModelProfiles, least_pass_s, profile_model
from phaze.shard import ShardedModel
from phaze.tolerances import BOUND_MARGIN, EQUAL_RESULTS

__all__ = ["CandidateSlicing", "most_promising", "quick_profiles"]

MOST_KEPT_STRATEGIES = 100_000
"""Rows of a table that is kept, about 10 MB: more than any question on 16,384 devices with 126 layers has."""


def quick_profiles(model: ShardedModel, options: ProfileOptions) -> ModelProfiles:
    """The profiles of a slicing by list schedules, with bounds that hold for every schedule."""
    return profile_model(model, replace(options, is_quick=True))


@dataclass(frozen=True, eq=False)
class CandidateSlicing:
    """A slicing that waits to be searched; what is worth making only for some of them is made when it is asked for.

    Attributes:
        sharded: the layouts of every layer.
        options: how its passes are priced and scheduled in the end.
        micro_batches: how many microbatches all pipelines pass together.
        network: prices of links, which serve all slicings.
        problem_of: the placement problem of profiles, within what the question allows.
        offload: what its plans keep on the host.
    """

    sharded: ShardedModel
    options: ProfileOptions
    micro_batches: int
    network: Network
    problem_of: Callable[[ModelProfiles], PlacementProblem]
    offload: Offload = Offload.NONE

    @cached_property
    def least_s(self) -> float:
        """No plan of the slicing takes less: all passes of all microbatches, on all devices all the time."""
        axis = self.sharded.axis
        device_s = axis.tp * axis.cp * least_pass_s(self.sharded, replace(self.options, is_quick=True))
        return self.micro_batches * device_s / axis.cluster.device_count * (1 - BOUND_MARGIN)

    @cached_property
    def slices(self) -> ModelProfiles:
        """Its quick profiles."""
        return replace(quick_profiles(self.sharded, self.options), offload=self.offload)

    @cached_property
    def problem(self) -> PlacementProblem:
        """Its placement problem on these."""
        return self.problem_of(self.slices)

    @cached_property
    def bounded(self) -> PreparedProblem:
        """Its placement problem on lower bounds of its profiles."""
        return PreparedProblem.of(self.problem, use_bounds=True, network=self.network)

    @cached_property
    def _kept(self) -> ParallelismTable | None:
        """All strategies; None where they are so many that they are listed anew when they are needed.

        So memory does not grow with slicings times devices times layers.
        """
        strategies = self.bounded.strategies()
        return strategies if len(strategies) <= MOST_KEPT_STRATEGIES else None

    @cached_property
    def estimate_s(self) -> float:
        """A guess at the step time of its best plan; infinite where nothing seems to fit."""
        return estimated_step_s(self.bounded, self.strategies)

    @property
    def strategies(self) -> ParallelismTable:
        """All strategies, with a closed-form bound under each."""
        return self.bounded.strategies() if self._kept is None else self._kept

    @property
    def micro_batch_size(self) -> int:
        """Sequences in a microbatch."""
        return self.sharded.graph.micro_batch_size

    @property
    def tp(self) -> int:
        """Devices that share a layer."""
        return self.sharded.axis.tp

    @property
    def cp(self) -> int:
        """Devices that share a sequence."""
        return self.sharded.axis.cp

    @property
    def ep(self) -> int:
        """Devices that experts are divided over."""
        return self.sharded.axis.ep

    def bounded_below(self, step_time_s: float) -> BoundedStrategies:
        """All strategies, with the step time as bound where provably no plan of theirs takes less."""
        strategies = refuted_below(self.bounded, self.strategies, step_time_s)
        return BoundedStrategies(prepared=self.bounded, strategies=strategies, target_s=step_time_s)

    def scheduled(self, options: ProfileOptions) -> ModelProfiles:
        """The profiles with schedules to the gap of the options: these ones, if they happen to be within it."""
        if max(report.gap for report in self.slices.reports.values()) <= options.gap + EQUAL_RESULTS:
            return self.slices
        return replace(profile_model(self.sharded, options), offload=self.offload)


def most_promising(
    waiting: Sequence[CandidateSlicing], target_s: Callable[[], float]
) -> Iterator[tuple[CandidateSlicing, bool]]:
    """Slicings in the order of their estimates, and whether the first bound rules each out.

    An estimate is made only when no first bound of another slicing says that it comes earlier. `target_s` is what a
    plan must beat by then; a slicing whose first bound is not below it is ruled out, and never estimated.
    """
    queue = [(slicing.least_s, number, False) for number, slicing in enumerate(waiting)]
    heapify(queue)
    while queue:
        least_s, number, is_estimated = heappop(queue)
        slicing = waiting[number]
        is_ruled_out = slicing.least_s >= target_s()
        if is_estimated or is_ruled_out:
            yield slicing, is_ruled_out
        else:
            heappush(queue, (max(least_s, slicing.estimate_s), number, True))
