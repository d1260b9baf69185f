"""Designs as results tell them: accelerator and memory, the plan of each model, how busy it is, what a step changes.

*Utilisations* say how busy a plan keeps the tensor and the vector units of its chips. The average is the work of
forward and backward over what all units of all devices could do in a step; what is computed again, fill, padding and
waiting count as idle. The peak is the same for the pass of a layer, forward or backward, that keeps a kind of unit
busiest, with layers scheduled by lists: units that are idle even there are more than the model can use, whatever the
plan.

The *sensitivity* of a design (`sensitivity_rows`) is what one step along each axis of the space would change, either
way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phaze.cost.operator_work import op_work
from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.design_bounds import Slicing
from phaze.explore.search_result import Design, Explored, ModelRow, SensitivityRow
from phaze.explore.search_state import DIRECTIONS, EvaluatedDesign, SearchState, axes, neighbour
from phaze.explore.worker_tasks import Evaluation, on_accelerator
from phaze.hardware import Accelerator, AcceleratorArray
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS
from phaze.ir import Graph, Op, OpKind, Phase, RecomputeMode
from phaze.ir.layers import single_layer
from phaze.planner.candidate_slicings import step_flops
from phaze.profile.model_profiles import layer_variants, profile_model, profile_options
from phaze.question import Question
from phaze.shard import slice_layer
from phaze.space import powers_w

__all__ = [
    "Utilisation",
    "average_utilisation",
    "peak_utilisation",
    "plans_fit",
    "reported_design",
    "sensitivity_rows",
    "with_plans",
]


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
    profiles = profile_model(sharded, replace(profile_options(question), is_quick=True)).profiles
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


_GIB = 2**30


def plans_fit(state: SearchState, design: EvaluatedDesign, hbm_bytes: int) -> bool:
    """Whether the very plans of a design fit into some memory."""
    problem = state.slicings[0].slicing.problem
    cluster = replace(problem.cluster, accelerator=replace(problem.cluster.accelerator, hbm_bytes=hbm_bytes))
    usable_bytes = replace(problem, cluster=cluster).usable_bytes
    return all(evaluation.needed_bytes <= usable_bytes for evaluation in design.evaluations)


def reported_design(state: SearchState, point: int, evaluations: Sequence[Evaluation], hbm_bytes: int) -> Design:
    """A design as results tell it."""
    question, objective = state.question, state.objective
    chip = replace(question.points.at(point), hbm_bytes=hbm_bytes)
    judged = state.judge_alone(point, evaluations)
    assert judged.costs is not None
    ratios: list[float | None] = [None] * len(evaluations)
    if objective.reference_values:
        ratios = [
            objective.of_model(judged.costs, model) / reference
            for model, reference in enumerate(objective.reference_values)
        ]
    return Design(
        name=chip.name,
        hbm_gib=hbm_bytes / _GIB,
        area_mm2=float(state.areas_mm2[point]),
        value=judged.value,
        fields=_chip_fields(chip),
        power_w=float(powers_w(AcceleratorArray.of([chip]))[0]),
        models=tuple(
            _model_row(
                name,
                replace(model_question, cluster=replace(model_question.cluster, accelerator=chip)),
                _slicing_of(state, model, evaluation),
                evaluation,
                ratios[model],
            )
            for model, (name, model_question, evaluation) in enumerate(
                zip(question.names, question.questions, evaluations, strict=True)
            )
        ),
    )


def with_plans(state: SearchState, design: EvaluatedDesign, row: Explored) -> Explored:
    """An evaluated accelerator with its sizes, and with its plans where all models fit."""
    question = state.question
    chip = question.points.at(design.point)
    models: tuple[ModelRow, ...] = ()
    if design.costs is not None:
        models = reported_design(state, design.point, design.evaluations, question.hbm_bytes[-1]).models
    power_w = float(powers_w(AcceleratorArray.of([chip]))[0])
    return replace(row, fields=_chip_fields(chip), power_w=power_w, models=models)


def _chip_fields(chip: Accelerator) -> dict[str, object]:
    """The cores, sizes, clock and bandwidth of a design."""
    return {name: getattr(chip, name) for name in (*INTEGER_FIELDS, *REAL_FIELDS)}


def _slicing_of(state: SearchState, model: int, evaluation: Evaluation) -> Slicing | None:
    """The slicing of an evaluation's plan; None where there is none."""
    plan = evaluation.parallelism
    for index in state.slicings_of(model):
        slicing = state.slicings[index].slicing
        if plan is not None and (slicing.micro_batch_size, slicing.tp) == (plan.micro_batch_size, plan.tp):
            return slicing
    return None


def _model_row(
    name: str, model_question: Question, slicing: Slicing | None, evaluation: Evaluation, ratio: float | None
) -> ModelRow:
    time_s, samples = evaluation.time_s, model_question.global_batch_size
    assert time_s is not None
    average = average_utilisation(model_question, time_s)
    peak = Utilisation(0.0, 0.0) if slicing is None else peak_utilisation(model_question, slicing)
    return ModelRow(
        model=name,
        samples_per_s=samples / time_s,
        step_time_s=time_s,
        bound_s=time_s if evaluation.bound_s is None else min(evaluation.bound_s, time_s),
        joules_per_sample=None if evaluation.energy_j is None else evaluation.energy_j / samples,
        strategy=evaluation.strategy(),
        needed_bytes=evaluation.needed_bytes,
        tensor_utilisation=average.tensor,
        vector_utilisation=average.vector,
        peak_tensor_utilisation=peak.tensor,
        peak_vector_utilisation=peak.vector,
        ratio=ratio,
    )


def sensitivity_rows(best_first: BestFirstSearch) -> Iterator[SensitivityRow]:
    """A row for each axis and direction, each neighbour evaluated to the end with the largest memory."""
    points, best = best_first.question.points, best_first.state.best
    assert best is not None
    for field in axes(points):
        for direction in DIRECTIONS:
            point = neighbour(points, best.point, field, direction)
            value = None if point is None else best_first.tasks.value_of(point) or None
            yield SensitivityRow(
                field=field,
                direction=direction,
                name="" if point is None else points.names[point],
                area_mm2=None if point is None else float(best_first.state.areas_mm2[point]),
                value=value,
                change=None if value is None else value / best.value - 1,
            )
