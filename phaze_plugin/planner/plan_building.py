"""From the planner's answer to a `Plan`: every number that a plan shows is settled here, and nowhere else.

`landscape` keeps the strategies that the search met: what was simulated, and what its bound ruled out. `build_plan`
puts it together with everything else that a plan says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

import phaze
from phaze.cost.calibration import comparable_runs
from phaze.hardware.hardware_files import cluster_to_json
from phaze.ir import RecomputeMode
from phaze.ir.layers import Boundary
from phaze.json_documents import from_document, to_document
from phaze.objective import ObjectiveKind, ObjectiveValue
from phaze.parallelism import Parallelism
from phaze.place import DeviceMemory, Fit, Placement, PreparedProblem
from phaze.place.simulation.placement import memory_of_devices
from phaze.plan.plan import (
    Hashes,
    Landscape,
    Layouts,
    ModelFacts,
    Plan,
    PlanStatus,
    Provenance,
    QuestionFacts,
    SplitDim,
    Stage,
    StageLayer,
    TimeSplit,
)
from phaze.plan.plan_integrity import MEMORY_ITEMS, objective_gap, proven_status
from phaze.planner.candidate_slicings import least_time_s, least_value, step_flops
from phaze.planner.strategy_search import Answer, Candidate
from phaze.planner.time_and_energy import LayerKinds, layer_kinds, step_energy
from phaze.profile.local_graphs import key_exchanges
from phaze.profile.model_profiles import ModelProfiles, expert_tp_of, sequence_parallel_of
from phaze.question import Question, content_hash
from phaze.shard import Layout, ShardedModel
from phaze.tolerances import EQUAL_RESULTS

__all__ = ["PROVEN_GAP", "build_plan", "complete_strategy", "landscape", "question_facts", "strategy_of"]

_MOST_SIMULATED = 40
"""Simulated strategies of one microbatch size and tp that are listed: the memory of each takes its prices."""

_MOST_BOUNDED = 600
"""Strategies in all that are listed by their bound: enough to see where they lie, in a file of some hundred KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Met:
    """One strategy that the search met, with the columns of `Landscape`."""

    dp: int
    cp: int
    ep: int
    shard: int
    tp: int
    pp: int
    chunks: int
    zero: int
    micro_batch_size: int
    schedule: str
    state: str
    seconds: float
    memory_bytes: float


def landscape(answer: Answer) -> Landscape:
    """Every simulated strategy, and the most promising of those that were only bounded."""
    simulated = [met for candidate in answer.candidates for met in _simulated(candidate)]
    known = {_degrees(met) for met in simulated}
    bounded = [
        met
        for candidate in answer.candidates
        for met in _bounded(candidate, answer.placement.time_s)
        if _degrees(met) not in known
    ]
    searches = [candidate.result.search for candidate in answer.candidates if candidate.result.search is not None]
    only_bounded = sum(search.bounded_count for search in searches)
    listed = [*sorted(simulated, key=_order), *sorted(bounded, key=_order)[:_MOST_BOUNDED]]
    columns = {field.name: tuple(getattr(met, field.name) for met in listed) for field in fields(_Met)}
    return Landscape(met=max(len(simulated) + only_bounded, len(listed)), **columns)


def _degrees(met: _Met) -> tuple[object, ...]:
    axes = (met.dp, met.cp, met.ep, met.shard, met.tp, met.pp)
    return (*axes, met.chunks, met.zero, met.micro_batch_size, met.schedule)


def _order(met: _Met) -> tuple[object, ...]:
    return (met.seconds, *_degrees(met))


def _simulated(candidate: Candidate) -> Iterator[_Met]:
    """The strategies of one microbatch size and tp whose best stages were found, and their memory."""
    search = candidate.result.search
    if search is None:
        return
    prepared = PreparedProblem.of(candidate.problem)
    for plan in search.solved[:_MOST_SIMULATED]:
        memories = memory_of_devices(prepared, plan.parallelism, plan.stages)
        fullest_bytes = max(memory.total_bytes + memory.reserved_bytes for memory in memories)
        yield _met(candidate, plan.parallelism, "simulated", plan.time_s, fullest_bytes)


def _bounded(candidate: Candidate, best_s: float) -> Iterator[_Met]:
    """The most promising strategies of one microbatch size and tp that have only a bound."""
    search = candidate.result.search
    if search is None:
        return
    table = search.bounded
    finite = np.flatnonzero(np.isfinite(table.bound_s))
    for index in finite[np.argsort(table.bound_s[finite], kind="stable")][:_MOST_BOUNDED].tolist():
        bound_s = float(table.bound_s[index])
        state = "open" if bound_s < best_s else "pruned"
        yield _met(
            candidate,
            table.parallelism(index, candidate.problem),
            state,
            bound_s,
            float(table.least_bytes[index]),
        )


def _met(candidate: Candidate, parallelism: Parallelism, state: str, seconds: float, memory_bytes: float) -> _Met:
    return _Met(
        dp=parallelism.dp,
        cp=parallelism.cp,
        ep=parallelism.ep,
        shard=parallelism.shard_devices if parallelism.zero else 1,
        tp=parallelism.tp,
        pp=parallelism.pp,
        chunks=parallelism.chunks,
        zero=parallelism.zero,
        micro_batch_size=candidate.slices.micro_batch_size,
        schedule=parallelism.schedule.value,
        state=state,
        seconds=seconds,
        memory_bytes=memory_bytes,
    )


PROVEN_GAP = 0.01
"""A schedule counts as proven if its makespan is within this share of its lower bound."""


def build_plan(question: Question, answer: Answer) -> Plan:
    """The plan of an answer to a question.

    Of a search that was interrupted it says only what follows from the question and the strategy, whenever that was:
    no plan is faster than the peak allows.
    """
    placement = answer.placement
    if answer.is_interrupted:
        answer = replace(answer, candidates=(), pruned=(), refused={}, bound_s=least_time_s(question))
        answer = replace(answer, bound_value=least_value(question))
    else:
        question = replace(question, choices=answer.question.choices)  # the sizes and tp that were looked at
    tokens = question.graph.tokens_per_sample
    seconds = placement.time_s
    samples_per_s = question.global_batch_size / seconds
    bound_s = min(answer.bound_s, seconds)
    energy = step_energy(question, answer, float(question.global_batch_size * tokens))
    value = _value(question, answer, bound_s, energy["per_token_j"])
    gap = objective_gap(question.objective, value, (seconds - bound_s) / seconds)
    kinds = layer_kinds(answer)
    # A plan keeps what its JSON keeps, so that a saved plan equals the one in memory.
    facts = from_document(QuestionFacts, to_document(question_facts(question)), "question")
    peak = question.cluster.accelerator.peak_flops_per_s(question.recipe.compute_dtype) * question.cluster.device_count
    return Plan(
        model=ModelFacts(
            name=question.graph.name,
            parameter_count=question.graph.parameter_count,
            layers=len(question.graph.layers),
            tokens_per_sample=tokens,
            matmul_flops_per_sample=step_flops(question) / question.global_batch_size,
            mixes_samples=question.graph.mixes_samples,
            averages_samples=question.graph.averages_samples,
        ),
        hardware=to_document(cluster_to_json(question.cluster)),
        question=facts,
        status=_status(answer, gap, question.gap),
        strategy=strategy_of(answer.candidate, placement),
        stages=_stages(answer, kinds),
        layouts=_layouts(answer),
        step_time_s=seconds,
        step_time_parts=time_split(answer),
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * tokens,
        mfu=step_flops(question) / seconds / peak,
        energy=energy,
        bound_s=bound_s,
        value=value,
        gap=gap,
        provenance=_provenance(question, answer),
        hashes=Hashes(
            graph=question.graph_hash,
            hardware=question.hardware_hash,
            question=content_hash(json.dumps(to_document(facts), sort_keys=True)),
            version=phaze.__version__,
        ),
        layer_kinds=kinds.listed,
        landscape=landscape(answer),
    )


def _value(question: Question, answer: Answer, bound_s: float, per_token_j: float) -> ObjectiveValue:
    """What the plan reaches of what was made small, and the bound under it."""
    objective, devices, seconds = question.objective, question.cluster.device_count, answer.placement.time_s
    tokens = float(question.global_batch_size * question.graph.tokens_per_sample)
    least = answer.bound_value
    match objective.kind:
        case ObjectiveKind.THROUGHPUT:
            return ObjectiveValue(reached=seconds, bound=bound_s)
        case ObjectiveKind.COST:
            reached = objective.money(devices * seconds, tokens)
            bound = reached if least is None else objective.money(least, tokens)
        case ObjectiveKind.ENERGY:
            reached, bound = per_token_j, per_token_j if least is None else least / tokens
        case ObjectiveKind.DEVICES:
            reached, bound = float(devices), float(devices) if least is None else least
    assert reached is not None
    assert bound is not None
    return ObjectiveValue(reached=reached, bound=min(reached, bound))


def question_facts(question: Question) -> QuestionFacts:
    """What was asked, as a plan keeps it."""
    return QuestionFacts(
        global_batch_size=question.global_batch_size,
        micro_batch_size=question.micro_batch_sizes,
        tp=question.tp_degrees,
        cp=question.cp_degrees,
        ep=question.ep_degrees,
        recompute=question.offered.recompute,
        has_shard_groups=question.capabilities.allows_shard_groups,
        left_open=tuple(sorted(question.grows)),
        precision=question.recipe,
        calibration=question.calibration,
        attention=question.attention,
        expert_imbalance=question.expert_imbalance,
        objective=question.objective,
        most_devices=question.most_devices or question.cluster.device_count,
        target=question.target.name,
        gap=question.gap,
        solver=None if question.solver is None else question.solver.solvers[0].name,
        constraints=question.constraints,
        strategy=to_document(question.strategy),
    )


def _status(answer: Answer, gap: float, asked_gap: float) -> PlanStatus:
    if not answer.is_feasible:
        return PlanStatus.DOES_NOT_FIT
    if answer.is_interrupted:
        return PlanStatus.INTERRUPTED
    return proven_status(gap, asked_gap)


def strategy_of(candidate: Candidate, placement: Placement) -> Parallelism:
    """A placement's complete strategy."""
    return complete_strategy(candidate.slices, placement.parallelism, [stage.recompute for stage in placement.stages])


def complete_strategy(
    slices: ModelProfiles, parallelism: Parallelism, recompute: Sequence[RecomputeMode]
) -> Parallelism:
    """What placement searched, with what slices and stages add."""
    return replace(
        parallelism,
        micro_batch_size=slices.micro_batch_size,
        expert_tp=expert_tp_of(slices.sharded, parallelism.tp),
        sequence_parallel=sequence_parallel_of(slices.sharded),
        recompute=tuple(recompute),
    )


def _stages(answer: Answer, kinds: LayerKinds) -> tuple[Stage, ...]:
    placement, layers = answer.placement, answer.candidate.slices.graph.layers
    ranks = _ranks(placement)
    return tuple(
        Stage(
            layers=tuple(
                StageLayer(layer, layers[layer].name, kinds.number(layer, stage.recompute)) for layer in stage.layers
            ),
            place=stage.device,
            chunk=stage.chunk,
            tp=stage.tp,
            devices=ranks[stage.device],
            recompute=stage.recompute.value,
            forward_s=stage.forward_s,
            backward_s=stage.backward_s,
            memory_bytes=_memory(placement.memory[stage.device]),
            fit=placement.memory[stage.device].fit.value,
            passes=stage.passes,
        )
        for stage in placement.stages
    )


def _ranks(placement: Placement) -> list[tuple[int, ...]]:
    """The ranks of each place: stages one after the other, in each the copies, in each the parts of a sequence."""
    ranks, first = [], 0
    for place in range(len(placement.memory)):
        tp = max(stage.tp for stage in placement.stages if stage.device == place)
        count = placement.parallelism.replicas * tp
        ranks.append(tuple(range(first, first + count)))
        first += count
    return ranks


def _memory(memory: DeviceMemory) -> dict[str, float]:
    items = {item: getattr(memory, f"{item}_bytes") for item in MEMORY_ITEMS}
    if memory.reserved_bytes:
        items["reserved"] = memory.reserved_bytes
    if memory.host_bytes:
        items["host"] = memory.host_bytes
    return {**items, "total": memory.total_bytes + memory.reserved_bytes, "capacity": memory.capacity_bytes}


def _layouts(answer: Answer) -> Layouts:
    """What is split; stages that take one device hold their tensors whole."""
    placement, slices = answer.placement, answer.candidate.slices
    model = slices.sharded
    wide = {layer for stage in placement.stages if stage.tp > 1 for layer in stage.layers}
    parameters: dict[str, tuple[SplitDim, ...]] = {}
    boundaries: dict[str, tuple[SplitDim, ...]] = {}
    for layer in slices.graph.layers:
        if layer.index not in wide:
            continue
        for name in layer.parameters:
            layout = model.parameters.get(name)
            if layout is not None and layout.splits:
                parameters[name] = _splits(layout)
    for boundary in slices.graph.layer_graph.boundaries:
        if boundary.producer in wide and (layout := _boundary_layout(slices, model, boundary)) is not None:
            boundaries[boundary.tensor] = _splits(layout)
    return Layouts(parameters=parameters, boundaries=boundaries, key_exchanges=key_exchanges(slices.graph))


def _boundary_layout(slices: ModelProfiles, model: ShardedModel, boundary: Boundary) -> Layout | None:
    """The layout in which a tensor leaves its layer; equal layers share one answer, which names its own tensors."""
    outputs = slices.graph.layers[boundary.producer].outputs
    task = model.layers[boundary.producer].problem
    return task.layouts.get(task.layer.outputs[outputs.index(boundary.tensor)])


def _splits(layout: Layout) -> tuple[SplitDim, ...]:
    return tuple(
        SplitDim(dim=split.dim, outer=split.outer, chunk=split.chunk, ways=split.ways, stride=split.stride)
        for split in layout.splits
    )


def time_split(answer: Answer) -> TimeSplit:
    """The parts of the step on the device that ends last; links that layers wait for count as communication."""
    placement, parts = answer.placement, answer.placement.parts
    events = placement.timeline.table
    last = int(events.device[events.end_s >= placement.time_s].min())
    waiting = 0.0
    for stage in placement.stages:
        if stage.device == last:
            for layer in stage.layers:
                report = answer.candidate.slices.report(layer, stage.recompute)
                passes = (report.forward, report.backward, report.recompute)
                waiting += sum(layer_pass.exposed_link_s for layer_pass in passes)
    sent = parts.transfer_s + parts.collective_s + parts.reduction_s + waiting * placement.micro_batches
    least = EQUAL_RESULTS * placement.time_s
    sent, bubble, update = (part if part > least else 0.0 for part in (sent, parts.bubble_s, parts.update_s))
    return TimeSplit(
        compute_s=placement.time_s - sent - bubble - update,
        exposed_communication_s=sent,
        bubble_s=bubble,
        update_s=update,
    )


def _provenance(question: Question, answer: Answer) -> Provenance:
    passes = [
        layer_pass
        for candidate in answer.candidates
        for report in candidate.slices.reports.values()
        for layer_pass in (report.forward, report.backward, report.recompute)
        if layer_pass.ops
    ]
    proven = sum(
        layer_pass.time_s - layer_pass.bound_s <= PROVEN_GAP * layer_pass.time_s * (1 + EQUAL_RESULTS)
        for layer_pass in passes
    )
    coverage = question.graph.coverage()
    scheduling = "exact schedule" if question.solver is None else "the paper's integer program on the named solver"
    refused = [f"{degrees} is left out: {reason}" for degrees, reason in answer.refused.items()]
    return Provenance(
        prices=question.calibration.name,
        comparable=comparable_runs(question.calibration, question.cluster, question.recipe),
        target=str(question.target),
        method=f"integer program per layer, {scheduling} per pass, placement by bounded search, event simulation",
        schedules=len(passes),
        schedules_proven=proven,
        coverage_flops=coverage.flops_share,
        coverage_bytes=coverage.bytes_share,
        unrestricted_step_time_s=None,
        notes=(*question.notes, *question.target.notes, *refused, *_marginal(answer)),
    )


def _marginal(answer: Answer) -> list[str]:
    is_marginal = any(memory.fit is Fit.MARGINAL for memory in answer.placement.memory)
    return ["some device uses the memory that is kept free as a margin"] if is_marginal else []
