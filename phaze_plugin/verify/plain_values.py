"""What plans are worth under an objective, written a second time, for verification: one strategy and layer at a time.

The value of a plan on n devices with a step of T seconds is n x T for cost, n for devices, and for energy

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
from collections.abc import Callable

from phaze.hardware.area_energy import energy_model
from phaze.objective import ObjectiveKind
from phaze.parallelism import Parallelism
from phaze.place import PlacementProblem
from phaze.planner.plan_energy import static_power_w, update_j_per_parameter
from phaze.profile.layer_passes import PassReport
from phaze.profile.model_profiles import ModelProfiles
from phaze.question import Question

__all__ = ["plain_times_below"]


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
