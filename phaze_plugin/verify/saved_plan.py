"""`phaze.load_plan`: whether a saved plan still belongs to a model and a cluster, what differs, and pricing it anew."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from phaze.asked_model import as_stack_runs, ready_to_plan
from phaze.cost import fuses_loss
from phaze.errors import PhazeError, PlanError, explained_by, shown
from phaze.hardware import Cluster
from phaze.hardware.hardware_files import cluster_to_json
from phaze.installed import installed_plugins
from phaze.ir import Graph
from phaze.json_documents import to_document
from phaze.model_import import import_with_plugins
from phaze.plan.plan import Plan, read_plan
from phaze.planner.candidate_slicings import as_first_asked
from phaze.planner.device_counts import answered_question, price_given_stages
from phaze.planner.explainer import FoundSearch, PlanExplainer, found_search
from phaze.planner.explanation import binding
from phaze.planner.fixed_stages import strategy_with_stages
from phaze.planner.plan_building import build_plan
from phaze.planner.progress import Watch
from phaze.question import Question, QuestionOptions, ask, hash_graph, settled_cluster

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["differences", "load_plan", "model_differences", "priced_anew", "question_for"]


@explained_by("files")
def load_plan(
    path: str | os.PathLike[str],
    model: object = None,
    inputs: object = None,
    *,
    cluster: str | Cluster | None = None,
    reprice: bool = False,
    plugins: PluginManager | None = None,
) -> Plan:
    """Load the plan that `Plan.save` wrote.

    With a `model` or a `cluster` it must still hold for them: a plan for another graph or other hardware is refused
    with what differs, or with `reprice` its strategy is priced anew on what was given.

    Raises FormatError for a damaged file, PlanError for a plan of something else.
    """
    plugins = plugins or installed_plugins()
    plan = _with_explainer(read_plan(path), model, inputs, plugins)
    if model is None and cluster is None:
        return plan
    differing = differences(plan, model, inputs, cluster, plugins)
    if differing and reprice:
        if model is None:
            raise PlanError("a plan is priced anew on a model; pass a model as well.")
        return priced_anew(plan, model, inputs, cluster, plugins)
    if differing:
        listed = "\n  ".join(differing)
        raise PlanError(
            f"{os.fspath(path)} is a plan for something else:\n  {listed}\n"
            "Make a new plan, or pass reprice=True to price its strategy on what is given now."
        )
    return plan


def _with_explainer(plan: Plan, model: object, inputs: object, plugins: PluginManager) -> Plan:
    """The plan with the means to explain itself: its question is asked of its model again."""

    def find(asked_model: object, asked_inputs: object) -> FoundSearch | str:
        named = model if asked_model is None else asked_model
        try:
            search_model = plan.model.name if named is None else named
            question = question_for(plan, search_model, inputs if asked_inputs is None else asked_inputs, plugins)
        except (PhazeError, OSError) as error:
            return f"the plan was saved without its explanation, and its model cannot be had again ({error}) {_PASS}"
        if question.graph_hash != plan.hashes.graph:
            return f"the plan was saved without its explanation, and {shown(search_model)} is another model; {_PASS}"
        return found_search(as_first_asked(question, plan.question.left_open), Watch())

    return replace(plan, explainer=PlanExplainer(find))


_PASS = "pass its model, plan.explain(model), or `phaze explain PLAN --model MODEL`"


def question_for(
    plan: Plan, model: object, inputs: object, plugins: PluginManager, cluster: str | Cluster | None = None
) -> Question:
    """The question that a plan answers, asked of a model and a cluster (the plan's own ones where None)."""
    facts = plan.question
    options: QuestionOptions = {
        "cluster": _asked_cluster(plan) if cluster is None else cluster,
        "global_batch_size": facts.global_batch_size,
        "precision": facts.precision,
        "micro_batch_size": facts.micro_batch_size,
        "tp": facts.tp,
        "cp": facts.cp,
        "ep": facts.ep,
        "recompute": facts.recompute,
        "target": facts.target,
        "constraints": facts.constraints,
        "calibration": facts.calibration,
        "attention": facts.attention,
        "expert_imbalance": facts.expert_imbalance,
        "objective": facts.objective.kind.value,
        "price": facts.objective.price,
        "step_time": facts.objective.step_time_s,
        "gap": facts.gap,
        "solver": facts.solver,
    }
    return ask(model, inputs, options, plugins)


def _asked_cluster(plan: Plan) -> Cluster:
    """The devices that a plan was chosen from."""
    return replace(plan.cluster, device_count=plan.question.most_devices)


def differences(
    plan: Plan, model: object, inputs: object, cluster: str | Cluster | None, plugins: PluginManager
) -> list[str]:
    """What differs between what the plan was made for and what is given; nothing where it still holds."""
    differing: list[str] = []
    if cluster is not None:
        now, planned = to_document(cluster_to_json(settled_cluster(cluster, plugins))), plan.hardware
        if now != planned:  # a plan that takes fewer devices was made for all of them, too
            planned = to_document(cluster_to_json(_asked_cluster(plan)))
        differing += _changed("hardware", planned, now)
    if model is not None:
        differing += model_differences(plan, import_with_plugins(plugins, model, inputs, frontend=None, options={}))
    return differing


def model_differences(plan: Plan, graph: Graph) -> list[str]:
    """What differs between the model that the plan was made for and an imported one; nothing where it still holds."""
    question = plan.question
    has_fused_loss = fuses_loss(_asked_cluster(plan).accelerator, question.calibration)
    trains = question.precision.trains
    graph = ready_to_plan(graph, question.attention, trains=trains, has_fused_loss=has_fused_loss)
    graph = as_stack_runs(graph, question.calibration, trains=trains)
    if hash_graph(graph) == plan.hashes.graph:
        return []
    facts = {
        "name": graph.name,
        "parameter_count": graph.parameter_count,
        "layers": len(graph.layers),
        "tokens_per_sample": graph.tokens_per_sample,
    }
    planned = {name: getattr(plan.model, name) for name in facts}
    known = [*_changed("model", planned, facts), *_renamed(plan, graph)]
    return known or ["model: the same layers and parameters with other operators or shapes inside"]


def _renamed(plan: Plan, graph: Graph) -> Iterator[str]:
    """The first layer that has another name, and the split parameters that are not there."""
    planned = (layer.path for stage in plan.stages for layer in stage.layers)
    for index, (before, layer) in enumerate(zip(planned, graph.layers, strict=False)):
        if before != layer.name:
            yield f"model.layers[{index}]: {before!r} in the plan, {layer.name!r} now"
            break
    for name in plan.layouts.parameters:
        if name not in graph.tensors:
            yield f"model: no parameter {name!r} now, which the plan splits"


def _changed(where: str, before: object, now: object) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys((*before, *now)):
            yield from _changed(f"{where}.{name}", before.get(name), now.get(name))
    elif before != now:
        yield f"{where}: {before!r} in the plan, {now!r} now"


def priced_anew(
    plan: Plan, model: object, inputs: object, cluster: str | Cluster | None, plugins: PluginManager
) -> Plan:
    """The plan's strategy and cuts on another model or cluster; its bound is its own time, for nothing was searched."""
    question = question_for(plan, model, inputs, plugins, cluster).with_strategy(strategy_with_stages(plan))
    answer = price_given_stages(question, Watch())
    anew = build_plan(answered_question(question, answer), answer)
    return replace(anew, binds=binding(anew))
