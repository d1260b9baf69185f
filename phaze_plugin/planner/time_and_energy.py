"""Where the time and the energy of a plan's step go: layers with their passes and ops, and items of energy.

`layer_kinds` gives each distinct layer of a plan with its passes and the ops in them, as scheduled.

`step_energy` gives the energy of one step over all devices of the cluster. The items that it adds up are these:

compute        every pass of every microbatch on every device of its stage, what is recomputed included
communication  bytes that devices send (tensor-parallel collectives, gradients, gathered parameters, boundaries, and
               what they exchange with their hosts)
update         the optimizer on every shard
static         leakage and clocks of all devices of the cluster for the whole step

`EnergyFloor` says what no plan of a slicing falls below: its layers without recompute that memory does not force, each
op on the cores that take least, and for a strategy its update, its gradients and its gathered parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from phaze.cost import price_works, update_work
from phaze.hardware import AcceleratorArray, energy_model
from phaze.ir import RecomputeMode
from phaze.parallelism import Parallelism
from phaze.place import Flow, PlacedStage, PlacementProblem
from phaze.place.model.zero_sharding import ZeroSharding
from phaze.plan.plan import LayerKind, OpTime
from phaze.planner.strategy_search import Answer
from phaze.profile.layer_passes import PassReport
from phaze.profile.model_profiles import ModelProfiles
from phaze.question import Question

__all__ = ["EnergyFloor", "LayerKinds", "layer_kinds", "static_power_w", "step_energy", "update_j_per_parameter"]


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """The distinct layers of a plan, and the number of each by its key and recompute mode."""

    slices: ModelProfiles
    listed: tuple[LayerKind, ...]
    numbers: dict[tuple[str, RecomputeMode], int]

    def number(self, layer: int, mode: RecomputeMode) -> int:
        """The position in `listed` of a layer under a recompute mode."""
        return self.numbers[self.slices.placement.layers[layer].key, mode]


def layer_kinds(answer: Answer) -> LayerKinds:
    """Every distinct layer under every recompute mode that the plan uses, in the order of the stages."""
    slices, listed, numbers = answer.candidate.slices, list[LayerKind](), dict[tuple[str, RecomputeMode], int]()
    for stage in answer.placement.stages:
        for layer in stage.layers:
            key = (slices.placement.layers[layer].key, stage.recompute)
            if key not in numbers:
                numbers[key] = len(listed)
                listed.append(_kind(slices, layer, stage.recompute))
    return LayerKinds(slices, tuple(listed), numbers)


def _kind(slices: ModelProfiles, layer: int, mode: RecomputeMode) -> LayerKind:
    report, name = slices.report(layer, mode), slices.graph.layers[layer].name
    passes = {"forward": report.forward, "backward": report.backward, "recompute": report.recompute}
    return LayerKind(
        name=name,
        recompute=mode.value,
        forward_s=report.forward.time_s,
        backward_s=report.backward.time_s,
        recompute_s=report.recompute.time_s,
        kept=report.kept,
        ops=tuple(op for phase, layer_pass in passes.items() for op in _ops(phase, layer_pass)),
    )


def _ops(phase: str, layer_pass: PassReport) -> Iterator[OpTime]:
    """The ops of a pass that take time, by their start."""
    schedule = layer_pass.schedule
    if schedule is None:
        return
    for entry in sorted(schedule.jobs, key=lambda entry: (entry.start_s, entry.job)):
        job = schedule.problem.jobs[entry.job]
        if entry.end_s > entry.start_s:
            yield OpTime(
                name=job.name,
                phase=phase,
                start_s=entry.start_s,
                seconds=entry.end_s - entry.start_s,
                binding=job.binding,
            )


def step_energy(question: Question, answer: Answer, tokens: float) -> dict[str, float]:
    """Joules by item, in all, and per token."""
    placement = answer.placement
    problem, parallelism, update_j = answer.candidate.problem, placement.parallelism, update_j_per_parameter(question)
    compute = links = update = sent = 0.0
    batches = float(problem.micro_batches)
    for stage in placement.stages:
        passes, devices = list(_passes(answer, stage)), stage.tp * parallelism.cp
        compute += devices * batches * sum(energy for energy, _ in passes)
        links += devices * batches * sum(energy for _, energy in passes)
        sent += devices * batches * 2 * _received_bytes(answer, stage)
        updated, sent_bytes = _of_parameters(problem, parallelism, stage.layers, stage.tp)
        update, sent = update + updated * update_j, sent + sent_bytes
        moved = sum(problem.profile(layer, parallelism.tp, stage.recompute).host_bytes for layer in stage.layers)
        sent += devices * batches * 2 * moved  # activations go to the host and come back
    sent += _sent_of_spread(question, answer)
    items = {
        "compute_j": compute,
        "communication_j": links + sent * energy_model().link_j_per_byte,
        "update_j": update,
        "static_j": static_power_w(question) * question.cluster.device_count * placement.time_s,
    }
    total = sum(items.values())
    return {**items, "total_j": total, "per_token_j": total / tokens}


def static_power_w(question: Question) -> float:
    """Watts that one device takes whatever it does."""
    return float(energy_model().static_power_w(AcceleratorArray.of([question.cluster.accelerator]))[0])


@dataclass(frozen=True, slots=True)
class EnergyFloor:
    """Joules of a step of one slicing that no plan falls below, beside what devices take for as long as it lasts."""

    question: Question
    slices: ModelProfiles
    problem: PlacementProblem

    def of_passes(self) -> float:
        """Joules of all passes of all microbatches, in the recompute mode that takes least."""
        devices, modes = self.slices.tp * self.slices.cp, self.problem.choices.recompute
        least = 0.0
        for layer in range(len(self.problem.graph.layers)):
            reports = [self.slices.report(layer, mode) for mode in modes]
            passes = [reports[0].forward, reports[0].backward]
            again = min(_least_j(report.recompute) for report in reports)
            least += sum(map(_least_j, passes)) + again
        return least * devices * self.problem.micro_batches

    def of_strategy(self, parallelism: Parallelism) -> float:
        """Joules of a strategy's update and of what it sends for gradients and parameters, however layers are cut."""
        layers = range(len(self.problem.graph.layers))
        updated, sent_bytes = _of_parameters(self.problem, parallelism, layers, parallelism.tp)
        return updated * update_j_per_parameter(self.question) + sent_bytes * energy_model().link_j_per_byte


def _least_j(report: PassReport) -> float:
    """Joules of a pass whose ops run on the cores, one or all, that take least."""
    jobs = () if report.schedule is None else report.schedule.problem.jobs
    return sum(min(job.energy_j, job.spread_energy_j) for job in jobs) + report.link_energy_j


def _of_parameters(
    problem: PlacementProblem, parallelism: Parallelism, layers: Sequence[int], tp: int
) -> tuple[float, float]:
    """Parameters of some layers that all devices together update, and bytes that they send for them in a step."""
    sharding = ZeroSharding(problem.recipe, parallelism.zero, parallelism.shard_devices, parallelism.shard_groups)
    profiles = [problem.profile(layer, parallelism.tp, problem.choices.recompute[0]) for layer in layers]
    counts = []
    for all_parameters, of_experts in (
        ("parameters", "expert_parameters"),
        ("frozen_parameters", "frozen_expert_parameters"),
    ):
        experts = sum(getattr(profile, of_experts) for profile in profiles) if problem.ep > 1 else 0.0
        dense = sum(getattr(profile, all_parameters) for profile in profiles) - experts
        counts += [dense] if problem.ep == 1 else [dense, experts]
    batches, updated, sent = problem.micro_batches / parallelism.dp, 0.0, 0.0
    for part, parameters in zip(sharding.by_kind(problem.ep, has_frozen=True), counts, strict=True):
        on_devices = tp * parallelism.replicas * parameters
        updated += on_devices / float(part.optimizer_shards) * part.recipe.trains
        sent += on_devices * _sent_bytes_per_parameter(part, batches)
    if problem.offload.moves_states:  # states come from the host and go back
        sent += 2 * updated * problem.recipe.optimizer_bytes
    return updated, sent


def _passes(answer: Answer, stage: PlacedStage) -> Iterator[tuple[float, float]]:
    """Energy of the cores and of the links, pass by pass."""
    for layer in stage.layers:
        report = answer.candidate.slices.report(layer, stage.recompute)
        for layer_pass in (report.forward, report.backward, report.recompute):
            yield layer_pass.energy_j, layer_pass.link_energy_j


def update_j_per_parameter(question: Question) -> float:
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
