"""Designs as results tell them: an accelerator with its memory, its fields, and the plan of each model on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phaze.explore.design_bounds import Slicing
from phaze.explore.search_result import Design, Explored, ModelRow
from phaze.explore.search_state import EvaluatedDesign, SearchState
from phaze.explore.utilisations import Utilisation, average_utilisation, peak_utilisation
from phaze.explore.worker_tasks import Evaluation
from phaze.hardware import Accelerator, AcceleratorArray
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS
from phaze.question import Question
from phaze.space import powers_w

__all__ = ["plans_fit", "reported_design", "with_plans"]

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
