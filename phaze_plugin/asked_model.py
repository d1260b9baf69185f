"""Import the model that a question is about, with the backward that training needs, or without one for inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from phaze.cost import AttentionMode, Calibration, planned_graph
from phaze.cost.stack_fusions import fuse_gates, fuses_gates, with_fused_gates
from phaze.errors import GraphError, QuestionError, shown
from phaze.ir import Graph, Phase
from phaze.model_import import import_with_plugins
from phaze.targets import ChosenTarget, find_target

if TYPE_CHECKING:
    from phaze.hooks import PluginManager
    from phaze.question import QuestionOptions

__all__ = ["as_stack_runs", "as_target_runs", "import_asked", "ready_to_plan"]


def import_asked(
    model: object,
    inputs: object,
    options: QuestionOptions,
    attention: AttentionMode,
    plugins: PluginManager,
    *,
    trains: bool,
    has_fused_loss: bool,
) -> tuple[Graph, ChosenTarget]:
    """The model's graph, ready to be planned, and the target that is to run it.

    `options` are those of a question; what stands in `frontend_options` goes to the frontend. Raises QuestionError
    where a model without a loss is to be trained.
    """
    given: dict[str, object] = {
        name: value
        for name, value in options.items()
        if name in ("sequence_length", "loss_fn", "targets") and value is not None
    }
    given |= _frontend_options(options)
    imported = import_with_plugins(plugins, model, inputs, frontend=None, options=given, needs_backward=not trains)
    graph = ready_to_plan(imported, attention, trains=trains, has_fused_loss=has_fused_loss)
    is_step = any(op.phase is Phase.UPDATE for op in imported.ops)
    return graph, find_target(options.get("target", "auto"), model, plugins, graph, is_step=is_step)


def _frontend_options(options: QuestionOptions) -> dict[str, object]:
    given = options.get("frontend_options")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise QuestionError(f"frontend_options is {shown(given)}; expected a mapping from names to values.")
    return {str(name): value for name, value in given.items()}


def ready_to_plan(graph: Graph, attention: AttentionMode, *, trains: bool, has_fused_loss: bool) -> Graph:
    """The graph as it is planned; raises QuestionError where there is no loss to train, which says what to pass."""
    try:
        return planned_graph(graph, attention, trains=trains, has_fused_loss=has_fused_loss)
    except GraphError as error:
        if any(op.phase is Phase.BACKWARD for op in graph.ops):
            raise
        raise QuestionError(
            f"{error} To train it, name the output that is its loss (loss_fn=, or --loss OUTPUT for a file); to plan "
            "the forward alone, ask for inference (optimizer='none', or --inference)."
        ) from error


def as_target_runs(
    graph: Graph, calibration: Calibration, target: ChosenTarget, *, trains: bool
) -> tuple[Graph, Calibration]:
    """The graph and the calibration with the ops that the target's own software fuses."""
    if trains and target.capabilities.fuses_gates:
        calibration = with_fused_gates(calibration)
    return as_stack_runs(graph, calibration, trains=trains), calibration


def as_stack_runs(graph: Graph, calibration: Calibration, *, trains: bool) -> Graph:
    """The graph with the gated activations that the calibration's stack fuses."""
    return fuse_gates(graph) if trains and fuses_gates(calibration) else graph
