"""The energy of one step of a plan, over all devices of the cluster.

The items that `step_energy` adds up are these:

compute        every pass of every microbatch on every device of its stage, what is recomputed included
communication  bytes that devices send (tensor-parallel collectives, gradients, gathered parameters, boundaries)
update         the optimizer on every shard
static         leakage and clocks of all devices of the cluster for the whole step
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from phaze.cost import price_works, update_work
from phaze.hardware import AcceleratorArray, energy_model
from phaze.place import Flow, PlacedStage
from phaze.place.model.zero_sharding import ZeroSharding
from phaze.planner.strategy_search import Answer
from phaze.question import Question

__all__ = ["step_energy"]


def step_energy(question: Question, answer: Answer, tokens: float) -> dict[str, float]:
    """Joules by item, in all, and per token."""
    placement, model = answer.placement, energy_model()
    problem, parallelism, update_j = answer.candidate.problem, placement.parallelism, _update_j_per_parameter(question)
    compute = links = update = sent = 0.0
    batches = float(problem.micro_batches)
    sharding = ZeroSharding(question.recipe, parallelism.zero, parallelism.shard_devices, parallelism.shard_groups)
    for stage in placement.stages:
        passes, devices = list(_passes(answer, stage)), stage.tp * parallelism.cp
        compute += devices * batches * sum(energy for energy, _ in passes)
        links += devices * batches * sum(energy for _, energy in passes)
        sent += devices * batches * 2 * _received_bytes(answer, stage)
        profiles = [problem.profile(layer, parallelism.tp, stage.recompute) for layer in stage.layers]
        experts = sum(profile.expert_parameters for profile in profiles) if problem.ep > 1 else 0.0
        dense = sum(profile.parameters for profile in profiles) - experts
        for part, parameters in zip(sharding.by_kind(problem.ep), (dense, experts), strict=False):
            on_devices = stage.tp * parallelism.replicas * parameters
            update += on_devices / float(part.optimizer_shards) * update_j
            sent += on_devices * _sent_bytes_per_parameter(part, batches / parallelism.dp)
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


def _sent_bytes_per_parameter(sharding: ZeroSharding, micro_batches: float) -> float:
    """Bytes that a device sends for gradients and gathered parameters in one step, for each parameter that it runs."""
    within = 1 - 1 / int(sharding.shard)  # a ring sends this part of the tensor from each of its devices
    per_batch = 2 * sharding.gathered_bytes_per_pass + sharding.scattered_bytes_per_backward
    reduced = sharding.least_reduced_share(np.asarray(int(sharding.shard) * int(sharding.groups)))
    return float(
        within * (micro_batches * per_batch + sharding.gathered_bytes_per_batch)
        + reduced * sharding.recipe.reduction_bytes
    )


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
    return parallelism.tp * parallelism.replicas * (parallelism.pp - 1) * each


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
