"""The bound of a plan derived again by plain code, over everything that the plan's question offered.

For every microbatch size, tp, cp and ep the layers are sliced and their passes bounded as in planning: slices, prices
of single ops and collectives, and the least seconds of a layer's pass are shared with it. Everything above the layers
is shown by `plain_bound.py`: that no strategy with any stages takes less than the claimed bound, or that none fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from phaze.errors import ShardError
from phaze.parallelism import Parallelism
from phaze.place import PlacementProblem
from phaze.planner.candidate_slicings import quick_profiles
from phaze.planner.device_counts import on_any_devices
from phaze.planner.progress import Watch
from phaze.planner.strategy_search import narrowed_problem
from phaze.profile.local_graphs import LocalGraphs
from phaze.profile.model_profiles import ModelProfiles, profile_model, profile_options, profiled_modes, slicings
from phaze.question import Question
from phaze.verify.plain_bound import PlainEffort, PlainProof, prove_plainly
from phaze.verify.plain_values import plain_times_below

__all__ = ["BoundProof", "derive_bound", "derive_value_bound"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundProof:
    """What the plain code shows of a bound.

    Attributes:
        time_s: the seconds that nothing beats, if the proof holds; infinite where it is that nothing fits.
        slicings: how many slicings of the model were looked at.
        proof: how many strategies were decided, and how.
        is_given: whether the user gave the stages, so that there was nothing to choose.
    """

    time_s: float
    slicings: int
    proof: PlainProof
    is_given: bool = False

    @property
    def faster(self) -> tuple[Parallelism, float] | None:
        """A strategy that refutes the bound, with its seconds."""
        return self.proof.faster

    def __str__(self) -> str:
        if self.is_given:
            return "its stages were given: there is nothing else that it could be compared with"
        if self.faster is not None:
            strategy, seconds = self.faster
            takes = "fits" if math.isinf(seconds) else f"may take {seconds:.9g} s"
            return f"dp {strategy.dp}, tp {strategy.tp}, pp {strategy.pp}, ZeRO-{strategy.zero} {takes}"
        proof = self.proof
        text = (
            f"{proof.strategies:,} strategies of {self.slicings} slicings: {proof.by_sums:,} by sums over layers, "
            f"{proof.by_stages:,} by filling stages, {proof.by_trying:,} by trying all stages"
        )
        return text + (f"; {proof.left_open:,} only by asking again" if proof.left_open else "")


def derive_bound(question: Question, time_s: float, watch: Watch, effort: PlainEffort | None = None) -> BoundProof:
    """Show that nothing that a question offers takes less than a time, or with an infinite time that nothing fits."""
    return _derived(question, time_s, lambda slices, problem: time_s, watch, effort)


def derive_value_bound(question: Question, value: float, watch: Watch, effort: PlainEffort | None = None) -> BoundProof:
    """Show that nothing on any number of the devices falls below a value of what the question makes small.

    The value is in device-seconds of a step, joules of a step, or devices; see `plain_values.py`.
    """

    def times_s(slices: ModelProfiles, problem: PlacementProblem) -> Callable[[Parallelism], float]:
        return plain_times_below(question, slices, problem, value)

    return _derived(on_any_devices(question), value, times_s, watch, effort)


_Time = float | Callable[[Parallelism], float]
"""Seconds that no strategy beats, or those of each strategy."""


def _derived(
    question: Question,
    bound: float,
    times_s: Callable[[ModelProfiles, PlacementProblem], _Time],
    watch: Watch,
    effort: PlainEffort | None,
) -> BoundProof:
    if question.choices.stages is not None:
        return BoundProof(time_s=bound, slicings=0, proof=PlainProof(), is_given=True)
    effort, proof, count = effort or PlainEffort(), PlainProof(), 0
    for slices in _sliced(question, watch):
        count += 1
        watch.report(f"microbatch {slices.micro_batch_size}: bounding strategies of tp {slices.tp} plainly")
        time_s = times_s(slices, narrowed_problem(question, slices))
        proof.add(_proof_of(question, slices, time_s, effort))
        if proof.faster is not None:
            break
    return BoundProof(time_s=bound, slicings=count, proof=proof)


def _proof_of(question: Question, slices: ModelProfiles, time_s: _Time, effort: PlainEffort) -> PlainProof:
    """The proof on quick bounds of the layers' passes where they suffice, else on those that planning schedules."""
    quick = prove_plainly(narrowed_problem(question, slices), time_s, effort)
    if quick.faster is None and not quick.left_open:
        return quick
    if effort.left <= 0 and quick.faster is None:
        return quick
    scheduled = profile_model(slices.sharded, profile_options(question, profiled_modes(question)))
    scheduled = replace(scheduled, offload=slices.offload)
    exact = prove_plainly(narrowed_problem(question, scheduled), time_s, effort)
    is_better = quick.faster is not None or exact.faster is not None or exact.left_open < quick.left_open
    return exact if is_better else quick


def _sliced(question: Question, watch: Watch) -> Iterator[ModelProfiles]:
    """Every slicing that the question offers, with quick bounds of its layers' passes.

    Split sequences come as few in a microbatch as are offered: that is what a search looks at, and says.
    """
    graphs, options = LocalGraphs(question), profile_options(question, profiled_modes(question))
    sizes, device_count = question.micro_batch_sizes, question.cluster.device_count
    for size, tp, cp, ep in product(sizes, question.tp_degrees, question.cp_degrees, question.ep_degrees):
        if (cp > 1 and size != min(sizes)) or tp * max(cp, ep) > device_count:
            continue
        watch.report(f"microbatch {size}: slicing layers {tp} ways again")
        try:
            models = slicings(question, graphs.at(size, tp=tp, cp=cp, ep=ep), tp, cp=cp, ep=ep)
        except ShardError:  # no plan can have these degrees
            continue
        for model, kept in product(models, question.choices.offload):
            yield replace(quick_profiles(model, options), offload=kept)
