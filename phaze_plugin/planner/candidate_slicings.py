"""One slicing of a question before it is searched: how fast its best plan may be, and how fast it probably is.

A slicing of a microbatch size and a tp gets quick profiles first: list schedules with closed-form bounds
(`ProfileOptions.is_quick`). On them stand

- a bound (`CandidateSlicing.bounded_below`): placement's closed forms and stage filling on the profiles' lower bounds,
  with bubbles, collectives, the update and what memory forces to be recomputed, prove that no plan beats a time;
- an estimate (`CandidateSlicing.estimate_s`), which proves nothing: it says what to look at first, so that a good time
  is known early and rules out most of the others.

What is left is scheduled to the gap that was asked for (`CandidateSlicing.scheduled`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phaze.place import BoundedStrategies, PlacementProblem, PreparedProblem
from phaze.place.model.network_prices import Network
from phaze.place.search.parallelism_search import refuted_below
from phaze.place.search.parallelism_table import ParallelismTable
from phaze.place.search.step_estimates import estimated_step_s
from phaze.profile.layer_passes import ProfileOptions
from phaze.profile.model_profiles import ModelProfiles, profile_model
from phaze.shard import ShardedModel
from phaze.tolerances import EQUAL_RESULTS

__all__ = ["CandidateSlicing", "quick_profiles"]

MOST_KEPT_STRATEGIES = 100_000
"""Rows of a table that is kept, about 10 MB: more than any question on 16,384 devices with 126 layers has."""


def quick_profiles(model: ShardedModel, options: ProfileOptions) -> ModelProfiles:
    """The profiles of a slicing by list schedules, with bounds that hold for every schedule."""
    return profile_model(model, replace(options, is_quick=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CandidateSlicing:
    """A slicing that waits to be searched.

    Attributes:
        slices: its quick profiles.
        bounded: its placement problem on their lower bounds.
        estimate_s: a guess at the step time of its best plan; infinite where nothing seems to fit.
        kept: all strategies, with a closed-form bound under each; None where they are so many that they are listed
            anew when they are needed, so that memory does not grow with slicings times devices times layers.
    """

    slices: ModelProfiles
    bounded: PreparedProblem
    estimate_s: float
    kept: ParallelismTable | None

    @classmethod
    def of(cls, slices: ModelProfiles, problem: PlacementProblem, network: Network) -> CandidateSlicing:
        """A slicing with quick profiles, within what a question allows."""
        bounded = PreparedProblem.of(problem, use_bounds=True, network=network)
        strategies = bounded.strategies()
        return cls(
            slices=slices,
            bounded=bounded,
            estimate_s=estimated_step_s(bounded, strategies),
            kept=strategies if len(strategies) <= MOST_KEPT_STRATEGIES else None,
        )

    @property
    def strategies(self) -> ParallelismTable:
        """All strategies, with a closed-form bound under each."""
        return self.bounded.strategies() if self.kept is None else self.kept

    @property
    def micro_batch_size(self) -> int:
        """Sequences in a microbatch."""
        return self.slices.micro_batch_size

    @property
    def tp(self) -> int:
        """Devices that share a layer."""
        return self.slices.tp

    @property
    def cp(self) -> int:
        """Devices that share a sequence."""
        return self.slices.cp

    @property
    def ep(self) -> int:
        """Devices that experts are divided over."""
        return self.slices.ep

    def bounded_below(self, step_time_s: float) -> BoundedStrategies:
        """All strategies, with the step time as bound where provably no plan of theirs takes less."""
        strategies = refuted_below(self.bounded, self.strategies, step_time_s)
        return BoundedStrategies(prepared=self.bounded, strategies=strategies, target_s=step_time_s)

    def scheduled(self, options: ProfileOptions) -> ModelProfiles:
        """The profiles with schedules to the gap of the options: these ones, if they happen to be within it."""
        if max(report.gap for report in self.slices.reports.values()) <= options.gap + EQUAL_RESULTS:
            return self.slices
        return profile_model(self.slices.sharded, options)
