"""The energy of one step of a plan, over all devices of the cluster.

The items that `step_energy` adds up are these:

compute        every pass of every microbatch on every device of its stage, what is recomputed included
communication  bytes that devices send (tensor-parallel collectives, gradients, gathered parameters, boundaries)
update         the optimizer on every shard
static         leakage and clocks of all devices of the cluster for the whole step
"""

from __future__ import annotations

from collections.abc import Iterator

from phaze.cost import price_works, update_work
from phaze.hardware import AcceleratorArray, energy_model
from phaze.place import Flow, PlacedStage
from phaze.planner.strategy_search import Answer
from phaze.question import Question

__all__ = ["step_energy"]


def step_energy(question: Question, answer: Answer, tokens: float) -> dict[str, float]:
    """Joules by item, in all, and per token."""
    placement, model = answer.placement, energy_model()
    compute = links = update = sent = 0.0
    batches = float(answer.candidate.problem.micro_batches)
    for stage in placement.stages:
        passes = list(_passes(answer, stage))
        compute += stage.tp * batches * sum(energy for energy, _ in passes)
        links += stage.tp * batches * sum(energy for _, energy in passes)
        parameters = sum(
            answer.candidate.problem.profile(layer, placement.parallelism.tp, stage.recompute).parameters
            for layer in stage.layers
        )
        copies = placement.parallelism.dp
        shards = copies if placement.parallelism.zero else 1
        update += stage.tp * copies / shards * parameters * _update_j_per_parameter(question)
        sent += stage.tp * _sent_over_copies(question, answer, parameters)
        sent += stage.tp * batches * 2 * _received_bytes(answer, stage)
    sent += _sent_of_spread(question, answer)
    power = float(model.static_power_w(AcceleratorArray.of([question.cluster.accelerator]))[0])
    items = {
        "compute_j": compute,
        "communication_j": links + sent * model.link_j_per_byte,
        "update_j": update,
        "static_j": power * question.cluster.device_count * placement.time_s,
    }
    total = sum(items.values())
    return {**items, "total_j": total, "per_token_j": total / tokens}


def _passes(answer: Answer, stage: PlacedStage) -> Iterator[tuple[float, float]]:
    """Energy of the cores and of the links, pass by pass."""
    for layer in stage.layers:
        report = answer.candidate.slices.report(layer, stage.recompute)
        for layer_pass in (report.forward, report.backward, report.recompute):
            yield layer_pass.energy_j, layer_pass.link_energy_j


def _update_j_per_parameter(question: Question) -> float:
    """Joules of the optimizer's update per parameter, from the price of an update that is large enough to be linear."""
    probe = 1 << 30
    estimate = price_works(
        [update_work(question.recipe, probe, stack=question.calibration.stack)], question.cluster.accelerator
    )
    return float(estimate.spread_energy_j[0, 0]) / probe


def _sent_over_copies(question: Question, answer: Answer, parameters: float) -> float:
    """Bytes that all copies of one device of a stage send for gradients and gathered parameters, in one step."""
    parallelism, recipe = answer.placement.parallelism, question.recipe
    copies, batches = parallelism.dp, float(answer.candidate.problem.micro_batches)
    gradient, weight = recipe.reduction_bytes * parameters, recipe.parameter_bytes * parameters
    once = copies - 1.0  # a ring sends (copies - 1) / copies of the tensor from each of the copies
    match parallelism.zero:
        case 0:
            return once * 2 * gradient
        case 1:
            return once * (gradient + weight)
        case 2:
            return once * (batches / copies * gradient + weight)
        case _:
            return once * batches / copies * (gradient + 2 * weight)


def _sent_of_spread(question: Question, answer: Answer) -> float:
    """Bytes that all devices send for parameters which stages hold in parts, gathered and scattered once."""
    problem, parallelism = answer.candidate.problem, answer.placement.parallelism
    if parallelism.pp == 1:
        return 0.0
    profiles = [
        problem.profile(layer, parallelism.tp, problem.choices.recompute[0])
        for layer in range(len(problem.graph.layers))
    ]
    parameters = sum(
        profile.parameters
        for profile, is_spread in zip(profiles, problem.stage_sharded_layers, strict=True)
        if is_spread
    )
    each = (question.recipe.parameter_bytes + question.recipe.reduction_bytes) * parameters
    return parallelism.tp * parallelism.dp * (parallelism.pp - 1) * each


def _received_bytes(answer: Answer, stage: PlacedStage) -> float:
    """Bytes that one device of a stage receives for one forward."""
    problem, tp = answer.candidate.problem, answer.placement.parallelism.tp
    first = min(stage.layers)
    stage_layers = set(stage.layers)

    def crosses(flow: Flow) -> bool:
        later = [layer for layer in flow.consumers if layer in stage_layers or layer > first]
        return flow.producer not in stage_layers and flow.producer < first and bool(later)

    return sum(
        problem.profile(flow.producer, tp, stage.recompute).outputs[flow.output].size_bytes
        for flow in problem.graph.flows
        if crosses(flow)
    )
