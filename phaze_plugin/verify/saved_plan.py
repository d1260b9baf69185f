"""Whether a plan still holds for a model and a cluster, and its strategy priced anew where it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from phaze.hardware.hardware_files import cluster_to_json
from phaze.ir import Graph
from phaze.json_records import to_document
from phaze.parallelism import read_limits
from phaze.plan.plan import Plan
from phaze.planner.progress import Watch
from phaze.question import Request, read_request, tokens_per_sample

__all__ = ["differences", "priced_anew", "request_of"]


def request_of(plan: Plan, model: object, inputs: object, cluster: object = None) -> Request:
    """The question that a plan answers, asked of a model and a cluster (the plan's own ones where None)."""
    from phaze.hooks import PluginManager

    question = plan.question
    return read_request(
        model,
        inputs,
        cluster=plan.cluster if cluster is None else cluster,
        global_batch_size=question.global_batch_size,
        optimizer="adamw",
        precision=question.precision,
        micro_batch_sizes=question.micro_batch_sizes,
        tensor_widths=question.tensor_widths,
        sequence_length=None,
        target=question.target,
        constraints=question.constraints,
        calibration=question.calibration,
        objective=question.objective,
        gap=question.gap,
        seed=question.seed,
        plugins=PluginManager.load(),
    )


def differences(plan: Plan, model: object, inputs: object, cluster: object) -> list[str]:
    """What differs between what the plan was made for and what is given; nothing where it still holds."""
    from phaze.hooks import PluginManager
    from phaze.question import settled_cluster

    found: list[str] = []
    if cluster is not None:
        devices = settled_cluster(cluster, PluginManager.load())
        now = to_document(cluster_to_json(devices))
        found += _changed("hardware", plan.hardware, now)
    if model is not None:
        request = request_of(plan, model, inputs)
        if request.graph_hash != plan.hashes.graph:
            facts = {"name": request.graph.name, "parameter_count": request.graph.parameter_count}
            facts["layers"] = len(request.graph.layers)
            facts["tokens_per_sample"] = tokens_per_sample(request.graph)
            before = {name: getattr(plan.model, name) for name in facts}
            known = [*_changed("model", before, facts), *_renamed(plan, request.graph)]
            found += known or ["model: the same layers and parameters with other operators or shapes inside"]
    return found


def _renamed(plan: Plan, graph: Graph) -> Iterator[str]:
    """The first layer that has another name, and the split parameters that are not there."""
    planned = (name.partition(":")[2] for stage in plan.stages for name in stage.layers)
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


def priced_anew(plan: Plan, model: object, inputs: object, cluster: object) -> Plan:
    """The plan's strategy and cuts on another model or cluster; its bound is its own time, for nothing was searched."""
    from phaze.planner.explanation import binding
    from phaze.planner.fixed_stages import priced
    from phaze.planner.plan_building import build_plan

    request = request_of(plan, model, inputs, cluster)
    strategy = _fixed(plan)
    anew = build_plan(request, priced(request, read_limits(strategy), Watch()), strategy)
    return replace(anew, binds=binding(anew))


def _fixed(plan: Plan) -> dict[str, object]:
    """The plan's strategy with its cuts, as `phaze.evaluate` takes it."""
    strategy = to_document(plan.strategy)
    if plan.strategy.tp == 1:
        strategy.pop("sequence_parallel")
    return {**strategy, "stages": [len(stage.layers) for stage in plan.stages]}
