"""What a plan sends in one step, by mesh axis: the collectives behind its times, counted instead of priced.

An all-reduce counts as what it is made of, a reduce-scatter and an all-gather: twice its tensor. Others count their
tensor once, an all-to-all the part of it that a device holds, a send between stages what is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from phaze.cost import Collective
from phaze.hardware.precision import cast_graph
from phaze.hooks import PluginManager
from phaze.ir import Graph, Op, OpKind, RecomputeMode, recomputed_ops
from phaze.ir.layers import single_layer
from phaze.plan.plan import Plan
from phaze.planner.strategy_search import graph_at
from phaze.profile.layer_passes import placement_graph
from phaze.profile.local_graphs import LocalGraphs
from phaze.profile.model_profiles import repeated_layers, slice_model
from phaze.question import Question
from phaze.shard import WHOLE, ShardedModel, slice_layer
from phaze.shard.context_slicing import KeyExchange, key_attentions
from phaze.shard.device_graph import device_graph
from phaze.shard.expert_slicing import DIVIDED_OVER
from phaze.shard.mesh_axes import EXPERT_AXIS, axis_of, is_ring
from phaze.verify.saved_plan import question_for

__all__ = ["StageTraffic", "planned_context_bytes", "planned_exchanges", "planned_traffic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTraffic:
    """Bytes of one step on one device of a stage: between tensor-parallel devices, copies, stages, owners of experts.

    To the last belong what is sent to the next stage and comes back, and what is spread over all of them.
    """

    tp_bytes: float
    dp_bytes: float
    pp_bytes: float
    ep_bytes: float


def planned_exchanges(plan: Plan, model: object, inputs: object = None) -> float:
    """Bytes of one step that a device of a single stage exchanges with others of contexts and experts, and in rings.

    Of an all-to-all it is what a device holds, and of a ring what it hands on.
    """
    question, chosen = question_for(plan, model, inputs, PluginManager.load()), plan.strategy
    graph = _device_graph(plan, question)
    exchanges = [op for op in graph.ops if op.kind is OpKind.COLLECTIVE and op.function == "all_to_all"]
    batches = plan.question.global_batch_size // (chosen.dp * chosen.micro_batch_size)
    held = sum(graph.tensors[op.inputs[0]].size_bytes for op in exchanges)
    parts = (
        min(graph.tensors[name].size_bytes for name in (op.inputs[0], op.outputs[0]))
        for op in filter(is_ring, graph.ops)
    )
    return batches * (held + (chosen.cp - 1) * sum(parts)) / chosen.tp


def _device_graph(plan: Plan, question: Question) -> Graph:
    """The graph of one device whose attentions get their keys as the plan says, by their modules."""
    chosen, ways = plan.strategy, plan.layouts.key_exchanges
    exchanges = {op.id: KeyExchange(ways.get(op.module, "all_gather")) for op in key_attentions(question.graph)}
    local = device_graph(
        question.graph,
        cp=chosen.cp,
        ep=chosen.ep,
        exchanges=exchanges,
        keeps_gathered=question.capabilities.keeps_gathered_keys,
    )
    return cast_graph(local.with_micro_batch(chosen.micro_batch_size), question.recipe)


def planned_context_bytes(plan: Plan, model: object, inputs: object = None) -> float:
    """Bytes of one step that a device of a single stage sends to others of its context, however keys are exchanged.

    Gathers and scatters count their whole tensor; of others see `planned_exchanges`.
    """
    question, chosen = question_for(plan, model, inputs, PluginManager.load()), plan.strategy
    graph = _device_graph(plan, question)
    whole = ("all_gather", "reduce_scatter")
    links = [op for op in graph.ops if op.kind is OpKind.COLLECTIVE and op.function in whole and not is_ring(op)]
    sizes = (max(graph.tensors[name].size_bytes for name in (op.inputs[0], op.outputs[0])) for op in links)
    batches = plan.question.global_batch_size // (chosen.dp * chosen.micro_batch_size)
    return planned_exchanges(plan, model, inputs) + batches * sum(sizes) / chosen.tp


def planned_traffic(
    plan: Plan, model: object, inputs: object = None, *, least_bytes: int = 0
) -> tuple[StageTraffic, ...]:
    """The traffic of every stage of a plan for this model; tensors of less than `least_bytes` do not count."""
    question = question_for(plan, model, inputs, PluginManager.load())
    chosen = plan.strategy
    graph = graph_at(question, chosen.micro_batch_size)
    if chosen.ep > 1 or chosen.cp > 1:
        graph = LocalGraphs(question).at(chosen.micro_batch_size, tp=chosen.tp, cp=chosen.cp, ep=chosen.ep)
    sharded = slice_model(
        question, graph, chosen.tp, sequence_parallel=chosen.sequence_parallel, cp=chosen.cp, ep=chosen.ep
    )
    experts = _experts(graph)
    batches = plan.question.global_batch_size // (chosen.dp * chosen.micro_batch_size)
    spread = _spread_names(question, sharded) if len(plan.stages) > 1 else frozenset()
    parameters = _parameters(sharded, range(len(sharded.layers)))
    ends_bytes = sum(_end_bytes(plan, parameters[name], least_bytes) for name in spread)
    has_one_program = question.capabilities.spreads_ends  # which sends while its pipeline fills and drains, too
    sends = batches + len(plan.stages) - 2 if has_one_program else batches
    repeated, is_trimmed = repeated_layers(sharded), question.capabilities.trims_recompute
    found, first = [], 0
    for number, stage in enumerate(plan.stages):
        layers = range(first, first + len(stage.layers))
        first += len(stage.layers)
        mode = RecomputeMode(stage.recompute)
        width_bytes, exchanged_bytes = 0.0, 0.0
        for layer in layers:
            local = slice_layer(sharded.layers[layer])
            again = mode if sharded.graph.layers[layer].key in repeated else RecomputeMode.NONE
            width_bytes += _layer_bytes(local, again, sharded.axis.tp, is_trimmed, least_bytes)
            exchanged_bytes += _exchanged_bytes(local, again, is_trimmed)
        sent = _sent_bytes(sharded, first) if number + 1 < len(plan.stages) else 0.0
        held = {name: size for name, size in _parameters(sharded, layers).items() if name not in spread}
        held |= {name: parameters[name] / len(plan.stages) for name in spread}
        found.append(
            StageTraffic(
                tp_bytes=batches * width_bytes,
                dp_bytes=sum(
                    _copy_bytes(plan, size, batches, least_bytes, chosen.ep if name in experts else 1)
                    for name, size in held.items()
                ),
                pp_bytes=2 * sends * sent + ends_bytes,
                ep_bytes=batches * exchanged_bytes,
            )
        )
    return tuple(found)


def _layer_bytes(local: Graph, mode: RecomputeMode, tp: int, is_trimmed: bool, least_bytes: int) -> float:
    """Forward, backward and what is computed again of one layer's slice and one microbatch."""
    ops = (*local.ops, *recomputed_ops(local, single_layer(local), mode, is_trimmed=is_trimmed))
    links = [op for op in ops if op.kind is OpKind.COLLECTIVE]
    return sum(_weighed(op, tp) for op in links if float(op.collective_bytes) >= least_bytes)


def _exchanged_bytes(local: Graph, mode: RecomputeMode, is_trimmed: bool) -> float:
    """What a device holds of what one layer exchanges between the owners of experts for one microbatch."""
    ops = (*local.ops, *recomputed_ops(local, single_layer(local), mode, is_trimmed=is_trimmed))
    exchanges = [op for op in ops if op.kind is OpKind.COLLECTIVE and axis_of(op) == EXPERT_AXIS]
    return float(sum(local.tensors[op.inputs[0]].size_bytes for op in exchanges))


def _experts(graph: Graph) -> frozenset[str]:
    """What ops read whose parameters are divided over the owners of experts."""
    divided = [op for op in graph.ops if op.attribute(DIVIDED_OVER) == EXPERT_AXIS]
    return frozenset(name for op in divided for name in op.inputs)


def _weighed(op: Op, tp: int) -> float:
    size = float(op.collective_bytes)
    match Collective(op.function):
        case Collective.ALL_REDUCE:
            return 2 * size
        case Collective.ALL_TO_ALL:
            return size / tp
        case _:
            return size


def _spread_names(question: Question, sharded: ShardedModel) -> frozenset[str]:
    """Parameters of which the target's stages hold equal parts: of layers unlike most, and tied ones."""
    if not question.capabilities.spreads_ends:
        return frozenset()
    body = placement_graph(sharded.graph).body
    ends = [layer for layer in range(len(body)) if not body[layer]]
    return frozenset({*_parameters(sharded, ends), *sharded.graph.layer_graph.tied_parameters}) if ends else frozenset()


def _end_bytes(plan: Plan, parameters: float, least_bytes: int) -> float:
    """What stages gather and scatter of a parameter that they share."""
    recipe = plan.question.precision
    moved = (recipe.parameter_bytes * parameters, recipe.reduction_bytes * parameters)
    return sum(size for size in moved if size >= least_bytes)


def _parameters(sharded: ShardedModel, layers: Iterable[int]) -> dict[str, float]:
    """Elements of every trained parameter on one device, tied ones once."""
    found: dict[str, float] = {}
    trained = {name for name, _ in sharded.graph.gradients}
    for layer in layers:
        for name in sharded.graph.layers[layer].parameters:
            shape = sharded.graph.tensors[name].shape
            if name in trained:
                found[name] = math.prod(sharded.parameters.get(name, WHOLE).local_shape(shape))
    return found


def _copy_bytes(plan: Plan, parameters: float, batches: int, least_bytes: int, ep: int) -> float:
    """The gradient of a parameter that copies reduce, and what of it they gather; experts have dp / ep copies."""
    chosen, recipe = plan.strategy, plan.question.precision
    gradients, gathered = recipe.reduction_bytes * parameters, recipe.parameter_bytes * parameters
    if chosen.dp == ep or gradients < least_bytes:
        return 0.0
    match chosen.zero:
        case 0:
            return 2 * gradients
        case 1:
            return gradients + gathered
        case 2:
            return batches * gradients + gathered
        case _:
            return batches * (gradients + 2 * gathered)


def _sent_bytes(sharded: ShardedModel, cut: int) -> float:
    """What crosses the cut before a layer, forward, from one device."""
    graph, total = sharded.graph, 0.0
    for boundary in graph.layer_graph.boundaries:
        if boundary.producer < cut <= max(boundary.consumers):
            size = graph.tensors[boundary.tensor].size_bytes
            total += size / sharded.axis.tp if sharded.is_sequence_split[boundary.producer] else size
    return total
