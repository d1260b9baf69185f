"""Designs as results tell them: an accelerator with its memory, its fields, and the plan of each model on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phaze.cost.operator_work import op_work
from phaze.explore.search_result import Design, ModelRow
from phaze.explore.search_state import EvaluatedDesign, SearchState
from phaze.explore.worker_tasks import Evaluation
from phaze.hardware import Accelerator, AcceleratorArray
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS
from phaze.ir import Phase
from phaze.planner.least_step_time import step_flops
from phaze.question import Question
from phaze.space import powers_w

__all__ = ["chip_fields", "plans_fit", "reported_design", "utilisations"]

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
        fields=chip_fields(chip),
        power_w=float(powers_w(AcceleratorArray.of([chip]))[0]),
        models=tuple(
            _model_row(
                name,
                replace(model_question, cluster=replace(model_question.cluster, accelerator=chip)),
                evaluation,
                ratio,
            )
            for name, model_question, evaluation, ratio in zip(
                question.names, question.questions, evaluations, ratios, strict=True
            )
        ),
    )


def chip_fields(chip: Accelerator) -> dict[str, object]:
    """The cores, sizes, clock and bandwidth of a design."""
    return {name: getattr(chip, name) for name in (*INTEGER_FIELDS, *REAL_FIELDS)}


def utilisations(model_question: Question, step_time_s: float) -> tuple[float, float]:
    """The parts of a step in which the tensor and the vector units of all devices have work, as averages.

    It is the work of forward and backward over what all units could do in that time; what is computed again, fill,
    padding and waiting count as idle.
    """
    chip, graph = model_question.cluster.accelerator, model_question.graph
    devices = model_question.cluster.device_count
    tensors = graph.tensors
    operations = sum(op_work(op, tensors).vector_operations for op in graph.ops if op.phase is not Phase.UPDATE)
    lane_operations = operations * model_question.global_batch_size / graph.micro_batch_size
    peak = chip.peak_flops_per_s(model_question.recipe.compute_dtype)
    lanes_per_s = chip.vector_cores * chip.vector_lanes * chip.clock_hz
    available_s = devices * step_time_s
    return step_flops(model_question) / (peak * available_s), lane_operations / (lanes_per_s * available_s)


def _model_row(name: str, model_question: Question, evaluation: Evaluation, ratio: float | None) -> ModelRow:
    time_s, samples = evaluation.time_s, model_question.global_batch_size
    assert time_s is not None
    tensor, vector = utilisations(model_question, time_s)
    return ModelRow(
        model=name,
        samples_per_s=samples / time_s,
        step_time_s=time_s,
        bound_s=time_s if evaluation.bound_s is None else min(evaluation.bound_s, time_s),
        joules_per_sample=None if evaluation.energy_j is None else evaluation.energy_j / samples,
        strategy=evaluation.strategy(),
        needed_bytes=evaluation.needed_bytes,
        tensor_utilisation=tensor,
        vector_utilisation=vector,
        ratio=ratio,
    )
