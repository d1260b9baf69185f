"""How busy a plan keeps the tensor and the vector units of its chips: over a whole step, and in its busiest pass.

The average is the work of forward and backward over what all units of all devices could do in a step; what is computed
again, fill, padding and waiting count as idle. The peak is the same for the pass of a layer, forward or backward, that
keeps a kind of unit busiest, with layers scheduled by lists: units that are idle even there are more than the model can
use, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phaze.cost.operator_work import op_work
from phaze.explore.design_bounds import Slicing
from phaze.explore.worker_tasks import on_accelerator, schedule_options
from phaze.ir import Graph, Op, OpKind, Phase, RecomputeMode
from phaze.ir.layers import single_layer
from phaze.planner.least_step_time import step_flops
from phaze.profile.model_profiles import layer_variants, profile_model
from phaze.question import Question
from phaze.shard import slice_layer

__all__ = ["Utilisation", "average_utilisation", "peak_utilisation"]


@dataclass(frozen=True, slots=True)
class Utilisation:
    """The parts of the time in which all tensor units, and all vector units, would be busy with the work at hand."""

    tensor: float
    vector: float


def average_utilisation(question: Question, step_time_s: float) -> Utilisation:
    """Over a step of all devices; the question's cluster is made of the chip."""
    graph = question.graph
    works = [op_work(op, graph.tensors) for op in graph.ops if op.phase is not Phase.UPDATE]
    operations = sum(work.trips * work.vector_operations for work in works)
    lane_operations = operations * question.global_batch_size / graph.micro_batch_size
    busy = _of_units(question, step_flops(question), lane_operations, step_time_s)
    devices = question.cluster.device_count
    return Utilisation(busy.tensor / devices, busy.vector / devices)


def peak_utilisation(question: Question, slicing: Slicing) -> Utilisation:
    """In the busiest passes of one device; the question's cluster is made of the chip."""
    sharded = on_accelerator(slicing.sharded, question.cluster.accelerator)
    profiles = profile_model(sharded, replace(schedule_options(question), is_quick=True)).profiles
    most = Utilisation(0.0, 0.0)
    for key, layer in layer_variants(sharded).items():
        local, profile = slice_layer(layer), profiles[key, slicing.tp, RecomputeMode.NONE]
        whole = single_layer(local)
        backward_s = profile.backward_input_s.value[0] + profile.backward_weight_s.value[0]
        for busy in (
            *_of_pass(question, local, whole.forward, float(profile.forward_s.value[0])),
            *_of_pass(question, local, whole.backward, float(backward_s)),
        ):
            most = Utilisation(max(most.tensor, busy.tensor), max(most.vector, busy.vector))
    return most


def _of_pass(question: Question, local: Graph, ops: Sequence[Op], seconds: float) -> Iterator[Utilisation]:
    """One pass of a layer; nothing for one that takes no time."""
    if seconds > 0:
        works = [op_work(op, local.tensors) for op in ops if op.kind is not OpKind.COLLECTIVE]
        flops = sum(2 * work.trips * product.macs for work in works for product in work.products)
        yield _of_units(question, flops, sum(work.trips * work.vector_operations for work in works), seconds)


def _of_units(question: Question, flops: float, lane_operations: float, seconds: float) -> Utilisation:
    """Work over what the units of one chip could do in some seconds."""
    chip = question.cluster.accelerator
    lanes_per_s = chip.vector_cores * chip.vector_lanes * chip.clock_hz
    peak = chip.peak_flops_per_s(question.recipe.compute_dtype)
    return Utilisation(flops / (peak * seconds), lane_operations / (lanes_per_s * seconds))
