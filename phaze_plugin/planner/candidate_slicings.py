"""Which slicings a search looks at: the sizes and degrees to try next, and how fast the best plan of a slicing may be.

The least that any step takes is the time of its matrix products at peak speed on all devices (`least_time_s`).

Microbatch sizes and degrees grow beyond those that are offered at first: `next_size`, `next_tp`, `next_cp` and
`next_ep` say the next one to try, if there is one. A search that begins with fewer of them meets other strategies on
its way than one that may choose from all at once; `as_first_asked` is for those who ask a plan's question again.

A slicing of a microbatch size and a tp gets quick profiles before it is searched: list schedules with closed-form
bounds (`ProfileOptions.is_quick`). On them stand

- a first bound (`CandidateSlicing.least_s`): the passes of all microbatches through all layers, divided over all
  devices without a gap. Most slicings that are far from the best are ruled out by it before anything is listed;
- a bound (`CandidateSlicing.bounded_below`): placement's closed forms and stage filling on the profiles' lower bounds,
  with bubbles, collectives, the update and what memory forces to be recomputed, prove that no plan beats a time;
- an estimate (`CandidateSlicing.estimate_s`), which proves nothing: it says what to look at first, so that a good time
  is known early and rules out most of the others.

What is left is scheduled to the gap that was asked for (`CandidateSlicing.scheduled`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush

from phaze.ir import Phase
from phaze.ir.factor_following import token_lengths
from phaze.objective import ObjectiveKind
from phaze.offered_choices import offered_cp, offered_ep, offered_sizes, offered_tp
from phaze.parallelism import Offload
from phaze.place import BoundedStrategies, PlacementProblem, PreparedProblem
from phaze.place.model.network_prices import Network
from phaze.place.search.parallelism_search import refuted_below
from phaze.place.search.parallelism_table import ParallelismTable
from phaze.place.search.prepared_problem import estimated_step_s
from phaze.profile.layer_passes import ProfileOptions
from phaze.profile.model_profiles import ModelProfiles, least_pass_s, profile_model
from phaze.question import Question
from phaze.shard import ShardedModel
from phaze.shard.expert_slicing import expert_counts
from phaze.tolerances import BOUND_MARGIN, EQUAL_RESULTS

__all__ = [
    "CandidateSlicing",
    "as_first_asked",
    "degrees_in_words",
    "has_fewer_sequences",
    "least_time_s",
    "least_value",
    "most_promising",
    "next_cp",
    "next_ep",
    "next_size",
    "next_tp",
    "offering",
    "quick_profiles",
    "slicing_in_words",
    "step_flops",
]


def step_flops(question: Question) -> float:
    """Matrix flops of one step: forward and backward of the whole batch, without anything recomputed."""
    graph = question.graph
    once = graph.matmul_flops(Phase.FORWARD) + graph.matmul_flops(Phase.BACKWARD)
    return once / graph.micro_batch_size * question.global_batch_size


def least_time_s(question: Question) -> float:
    """Seconds that no plan beats: the matrix products of a step at peak speed on all devices."""
    accelerator = question.cluster.accelerator
    return step_flops(question) / (
        accelerator.peak_flops_per_s(question.recipe.compute_dtype) * question.cluster.device_count
    )


def least_value(question: Question) -> float | None:
    """What no plan on any number of the devices falls below: device-seconds, joules or devices, as is made small.

    Devices at peak speed take as many device-seconds however many they are. None for throughput.
    """
    match question.objective.kind:
        case ObjectiveKind.THROUGHPUT:
            return None
        case ObjectiveKind.COST:
            return least_time_s(question) * question.cluster.device_count
        case ObjectiveKind.ENERGY:
            return 0.0
        case ObjectiveKind.DEVICES:
            return 1.0


_SPLITTABLE_SEQUENCE = 4_096
"""The shortest sequence that is split where nothing fits otherwise, or the best plan recomputes: of shorter ones
activations are seldom the most."""


def next_size(question: Question) -> int | None:
    """The microbatch size to offer after the largest one; None where there is none, or the user said which."""
    size = 2 * max(question.micro_batch_sizes)
    dp = 1 if question.choices.dp is None else question.choices.dp[0]
    is_possible = question.global_batch_size % size == 0 and question.global_batch_size // size >= dp
    return size if is_possible and "micro_batch_size" in question.grows - question.fixed.keys() else None


def next_tp(question: Question) -> int | None:
    """The tp to offer after the largest one; None beyond a node, or where the user said which."""
    cluster, tp = question.cluster, 2 * max(question.tp_degrees)
    node = cluster.levels[0].size if cluster.levels else 1
    is_possible = tp <= min(node, cluster.device_count)
    return tp if is_possible and "tp" in question.grows - question.fixed.keys() else None


def next_cp(question: Question) -> int | None:
    """The cp to offer after the largest one; None where sequences are short or the target does not split them."""
    lengths, cp = token_lengths(question.graph).values(), 2 * max(question.cp_degrees)
    is_possible = max(lengths, default=0) >= _SPLITTABLE_SEQUENCE and not any(length % cp for length in lengths)
    is_run = question.capabilities.allows_context_parallel and cp <= question.cluster.device_count
    return cp if is_possible and is_run and "cp" in question.grows - question.fixed.keys() else None


def next_ep(question: Question) -> int | None:
    """The ep to offer after the largest one; None where that does not divide the experts or the target has no ep."""
    experts, ep = math.gcd(*expert_counts(question.graph).values()), 2 * max(question.ep_degrees)
    is_possible = experts and experts % ep == 0 and ep <= question.cluster.device_count
    is_run = question.capabilities.allows_expert_parallel
    return ep if is_possible and is_run and "ep" in question.grows - question.fixed.keys() else None


def offering(question: Question, name: str, degree: int) -> Question:
    """The same question with a further microbatch size (or tp, cp or ep) to choose from."""
    offered = getattr(question.choices, name) or (1,)
    return replace(question, choices=replace(question.choices, **{name: (*offered, degree)}))  # type: ignore[arg-type]


def has_fewer_sequences(question: Question, size: int, cp: int) -> bool:
    """Whether f times as many copies with 1/f of the cp and of the sequences in a microbatch are offered.

    Each device then has the same tokens, states and number of microbatches, in longer parts of sequences that it
    exchanges with fewer others: nothing is faster with the larger cp and size.
    """
    if question.choices.dp is not None:
        return False
    cps, sizes = question.cp_degrees, question.micro_batch_sizes
    factors = (factor for factor in range(2, math.gcd(size, cp) + 1) if size % factor == cp % factor == 0)
    return any(cp // factor in cps and size // factor in sizes for factor in factors)


def as_first_asked(question: Question, left_open: Collection[str]) -> Question:
    """The question before more of what was left open was offered: what was offered at first, free to grow."""
    cluster, graph, target = question.cluster, question.graph, question.target
    at_first = {
        "micro_batch_size": offered_sizes(None, question.global_batch_size, graph, [], cluster, target),
        "tp": offered_tp(None, cluster),
        "cp": offered_cp(None, cluster, graph, target),
        "ep": offered_ep(None, cluster, graph, target),
    }
    grows = frozenset(at_first.keys() & set(left_open))
    offered = replace(question.offered, **{name: at_first[name] for name in grows})  # type: ignore[arg-type]
    return replace(question, offered=offered, grows=grows).with_strategy(question.strategy)


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


def slicing_in_words(tp: int, cp: int, ep: int) -> str:
    """In how many ways layers are sliced, for those who watch."""
    sequences = f", sequences {cp} ways" if cp > 1 else ""
    return f"{tp} ways{sequences}" + (f", experts {ep} ways" if ep > 1 else "")


def degrees_in_words(tp: int, cp: int, ep: int) -> str:
    """The degrees that a refusal is about."""
    told = [f"{name} {degree}" for name, degree in (("tp", tp), ("cp", cp), ("ep", ep)) if degree > 1]
    return ", ".join(told) or "tp 1"
