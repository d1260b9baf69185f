"""The bound of a plan derived again by plain code, over everything that its question offered, for any objective.

For every microbatch size, tp, cp and ep the layers are sliced and their passes bounded as in planning: slices, prices
of single ops and collectives, and the least seconds of a layer's pass are shared with it. Everything above the layers
is shown by `plain_bound.py`: that no strategy with any stages takes less than the claimed bound, or that none fits.

Under an objective other than time, the bound is one under what plans are worth (`derive_value_bound`), which is written
a second time here, one strategy and layer at a time. The value of a plan on n devices with a step of T seconds is n x T
for cost, n for devices, and for energy

    static watts x n x T
    + joules of every pass of every layer, each op on the cores that take least, in the mode that recomputes least
    + joules of the update of every parameter on every device that updates it
    + joules of the bytes that devices send for gradients and parameters

so that a value is reached in a time that is another one for each strategy (`plain_times_below`). The bytes of ZeRO's
collectives are those of rings: of s devices each sends (s-1)/s of the tensor for a gather or a scatter, twice as much
for an all-reduce. Prices of single ops and of the update, and static watts, are shared with planning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from phaze.errors import ShardError
from phaze.hardware.accelerator import energy_model
from phaze.objective import ObjectiveKind
from phaze.parallelism import Parallelism
from phaze.place import PlacementProblem
from phaze.planner.candidate_slicings import quick_profiles
from phaze.planner.device_counts import on_any_devices
from phaze.planner.progress import Watch
from phaze.planner.strategy_search import narrowed_problem
from phaze.planner.time_and_energy import static_power_w, update_j_per_parameter
from phaze.profile.layer_passes import PassReport
from phaze.profile.local_graphs import LocalGraphs
from phaze.profile.model_profiles import ModelProfiles, profile_model, profile_options, profiled_modes, slicings
from phaze.question import Question
from phaze.verify.plain_bound import PlainEffort, PlainProof, prove_plainly

__all__ = ["BoundProof", "derive_bound", "derive_value_bound", "plain_times_below"]


def plain_times_below(
    question: Question, slices: ModelProfiles, problem: PlacementProblem, value: float
) -> Callable[[Parallelism], float]:
    """For a strategy, the seconds that one of its plans must beat to have less than a value."""
    objective = question.objective
    if objective.kind is ObjectiveKind.DEVICES:
        limit_s = math.inf if objective.step_time_s is None else objective.step_time_s
        return lambda strategy: limit_s if _devices(strategy) < value else 0.0
    if objective.kind is ObjectiveKind.COST:
        return lambda strategy: value / _devices(strategy)
    passes_j, update_j = _passes_j(slices, problem), update_j_per_parameter(question)
    static_w, sent_j = static_power_w(question), energy_model().link_j_per_byte

    def time_s(strategy: Parallelism) -> float:
        work_j = passes_j
        for count, experts_over, is_trained in _parameters(problem, strategy):
            updated, sent_bytes = _per_parameter(problem, strategy, experts_over, is_trained)
            if "optimizer" in problem.offload:  # states come from the host and go back
                sent_bytes += 2 * updated * problem.recipe.optimizer_bytes
            work_j += count * strategy.tp * strategy.dp * strategy.cp * (updated * update_j + sent_bytes * sent_j)
        return max(0.0, value - work_j) / (static_w * _devices(strategy))

    return time_s


def _devices(strategy: Parallelism) -> int:
    return strategy.dp * strategy.cp * strategy.tp * strategy.pp


def _passes_j(slices: ModelProfiles, problem: PlacementProblem) -> float:
    """Joules of all passes of a batch on all devices of its pipelines."""
    total = 0.0
    for layer in range(len(problem.graph.layers)):
        reports = [slices.report(layer, mode) for mode in problem.choices.recompute]
        total += _pass_j(reports[0].forward) + _pass_j(reports[0].backward)
        total += min(_pass_j(report.recompute) for report in reports)
    return total * slices.tp * slices.cp * problem.micro_batches


def _pass_j(report: PassReport) -> float:
    if report.schedule is None:
        return report.link_energy_j
    cores_j = [min(job.energy_j, job.spread_energy_j) for job in report.schedule.problem.jobs]
    return math.fsum(cores_j) + report.link_energy_j


def _parameters(problem: PlacementProblem, strategy: Parallelism) -> list[tuple[float, int, bool]]:
    """Parameters on a device of all layers: how many, the devices experts are over, and whether they are trained."""
    mode = problem.choices.recompute[0]
    profiles = [problem.profile(layer, strategy.tp, mode) for layer in range(len(problem.graph.layers))]
    total = sum(profile.parameters for profile in profiles)
    experts = sum(profile.expert_parameters for profile in profiles) if problem.ep > 1 else 0.0
    frozen = sum(profile.frozen_parameters for profile in profiles)
    frozen_experts = sum(profile.frozen_expert_parameters for profile in profiles) if problem.ep > 1 else 0.0
    return [
        (total - experts, 1, True),
        (experts, problem.ep, True),
        (frozen - frozen_experts, 1, False),
        (frozen_experts, problem.ep, False),
    ]


def _per_parameter(
    problem: PlacementProblem, strategy: Parallelism, experts_over: int, is_trained: bool
) -> tuple[float, float]:
    """Of one parameter on one device: the part that it updates, and bytes that it sends in a step."""
    copies = strategy.dp * strategy.cp
    group = copies if isinstance(strategy.shard, str) else strategy.shard
    shard = max(group // experts_over, 1)
    copies //= experts_over
    recipe, batches = problem.recipe, problem.micro_batches / strategy.dp
    gradient, parameter = recipe.reduction_bytes, recipe.parameter_bytes
    within, between = (shard - 1) / shard, 2 * (1 / shard - 1 / copies)
    if not is_trained or not recipe.trains:  # gathered in both passes, and nothing else
        return 0.0, within * batches * 2 * parameter if strategy.zero == 3 else 0.0
    match strategy.zero:
        case 0:
            return 1.0, 2 * (1 - 1 / copies) * gradient
        case 1:
            return 1 / shard, within * parameter + max(1 - 1 / copies, within + between) * gradient
        case 2:
            return 1 / shard, within * (batches * gradient + parameter) + max(between, 0.0) * gradient
        case _:
            return 1 / shard, within * batches * (2 * parameter + gradient) + max(between, 0.0) * gradient


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

    The value is in device-seconds of a step, joules of a step, or devices; see `plain_times_below`.
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

    A cp and a number of sequences in a microbatch are left out where the same part of both is offered: as many more
    copies do the same with longer parts of sequences.
    """
    graphs, options = LocalGraphs(question), profile_options(question, profiled_modes(question))
    sizes, device_count = question.micro_batch_sizes, question.cluster.device_count
    for size, tp, cp, ep in product(sizes, question.tp_degrees, question.cp_degrees, question.ep_degrees):
        smaller = [(cp // part, size // part) for part in range(2, cp + 1) if cp % part == size % part == 0]
        may_copy = question.choices.dp is None
        if may_copy and any(less in product(question.cp_degrees, sizes) for less in smaller):
            continue
        if tp * max(cp, ep) > device_count:
            continue
        watch.report(f"microbatch {size}: slicing layers {tp} ways again")
        try:
            models = slicings(question, graphs.at(size, tp=tp, cp=cp, ep=ep), tp, cp=cp, ep=ep)
        except ShardError:  # no plan can have these degrees
            continue
        for model, kept in product(models, question.choices.offload):
            yield replace(quick_profiles(model, options), offload=kept)
