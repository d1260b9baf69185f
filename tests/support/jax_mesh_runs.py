"""Plans applied on eight host devices; started by the tests as `... FOLDER CASE...`, with one JSON file per case.

Every case is one compiled step, taken once or often, against the same in one process on one device.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax_training as models
import numpy as np
from hlo_traffic import LEAST_BYTES, axis_traffic
from oracles.traffic_count import planned_traffic
from rare_collections import collect_rarely

import phaze
from phaze.backends.jax.train_state import Adam, TrainState
from phaze.hardware import Cluster, find_accelerator, parse_cluster
from phaze.ir import Graph
from phaze.json_documents import to_document
from phaze.plan.plan import Plan

BATCH = 16
COUNT_BYTES = 4
"""The optimizer's count of steps; recorded gradients are written and never read, so they are no argument."""
FIXED = {"schedule": "none", "chunks": 1, "zero": 0, "recompute": "none", "pp": 1, "dp": 1, "tp": 1}
FORCED: dict[str, tuple[str, dict[str, Any]]] = {
    f"{model} {name}": (model, {**FIXED, **strategy})
    for model in ("pure", "linen", "scanned")
    for name, strategy in {
        "dp8": {"dp": 8, "micro_batch_size": 1},
        "tp8": {"tp": 8, "micro_batch_size": 8},
        "dp2 tp4": {"dp": 2, "tp": 4, "micro_batch_size": 8},
    }.items()
}
FORCED |= {
    "scanned dp8 zero2": ("scanned", {**FIXED, "dp": 8, "micro_batch_size": 1, "zero": 2}),
    "scanned dp8 zero3": ("scanned", {**FIXED, "dp": 8, "micro_batch_size": 1, "zero": 3}),
    "scanned dp4 tp2 zero1 selective": (
        "scanned",
        {**FIXED, "dp": 4, "tp": 2, "micro_batch_size": 2, "zero": 1, "recompute": "selective"},
    ),
    **{
        f"pure pp2 dp2 tp2 selective {schedule}": (
            "pure",
            {
                **FIXED,
                "dp": 2,
                "tp": 2,
                "pp": 2,
                "micro_batch_size": 2,
                "schedule": schedule,
                "recompute": "selective",
            },
        )
        for schedule in ("gpipe", "eager-1f1b")
    },
    "linen dp2 tp4 selective": ("linen", {**FIXED, "dp": 2, "tp": 4, "micro_batch_size": 8, "recompute": "selective"}),
    "scanned dp2 tp4 dots": ("scanned", {**FIXED, "dp": 2, "tp": 4, "micro_batch_size": 8, "recompute": "dots"}),
    "scanned dp2 tp4 full": ("scanned", {**FIXED, "dp": 2, "tp": 4, "micro_batch_size": 8, "recompute": "full"}),
    "deep dp2 tp4 sequence": (
        "deep",
        {**FIXED, "dp": 2, "tp": 4, "micro_batch_size": 8, "sequence_parallel": True},
    ),
    "scanned pp2 dp2 tp2": (
        "scanned",
        {**FIXED, "dp": 2, "tp": 2, "pp": 2, "micro_batch_size": 2, "schedule": "gpipe", "stages": [2, 2]},
    ),
    **{
        f"pure pp2 dp2 tp2 {schedule}": (
            "pure",
            {**FIXED, "dp": 2, "tp": 2, "pp": 2, "micro_batch_size": 2, "schedule": schedule, "stages": [2, 2]},
        )
        for schedule in ("gpipe", "eager-1f1b")
    },
    **{
        f"deep pp2 many {recompute} {schedule}": (
            "deep",
            {**FIXED, "pp": 2, "micro_batch_size": 1, "schedule": schedule, "recompute": recompute},
        )
        for recompute in ("none", "full")
        for schedule in ("gpipe", "eager-1f1b")
    },
    "pure cp2 pp2 dp2 eager": (
        "pure",
        {**FIXED, "dp": 2, "cp": 2, "pp": 2, "micro_batch_size": 2, "schedule": "eager-1f1b", "recompute": "full"},
    ),
    "deep pp4 dp2": (
        "deep",
        {**FIXED, "dp": 2, "pp": 4, "micro_batch_size": 2, "schedule": "gpipe", "stages": [2, 1, 1, 2]},
    ),
    "scanned pp2 dp2 tp2 mixed": (
        "scanned",
        {**FIXED, "dp": 2, "tp": 2, "pp": 2, "micro_batch_size": 2, "schedule": "gpipe", "stages": [2, 2], "zero": 1},
    ),
    "scanned dp4 tp2 zero2 mixed": ("scanned", {**FIXED, "dp": 4, "tp": 2, "micro_batch_size": 2, "zero": 2}),
    "scanned dp8 zero2 clipped": ("scanned", {**FIXED, "dp": 8, "micro_batch_size": 1, "zero": 2}),
    "scanned hybrid 2 x 4": ("scanned", {**FIXED, "dp": 8, "shard": 4, "micro_batch_size": 2, "zero": 3}),
    "scanned cp2 tp2 dp2 zero1": ("scanned", {**FIXED, "dp": 2, "cp": 2, "tp": 2, "micro_batch_size": 8, "zero": 1}),
    "pure cp2 tp2 dp2": ("pure", {**FIXED, "dp": 2, "cp": 2, "tp": 2, "micro_batch_size": 4}),
    "scanned cp2 pp2 dp2": (
        "scanned",
        {**FIXED, "dp": 2, "cp": 2, "pp": 2, "micro_batch_size": 2, "schedule": "gpipe", "stages": [2, 2]},
    ),
    "scanned hybrid 2 x 4 cp2 zero2": (
        "scanned",
        {**FIXED, "dp": 4, "cp": 2, "shard": 4, "micro_batch_size": 2, "zero": 2},
    ),
    "odd dp2 tp4": ("odd", {**FIXED, "dp": 2, "tp": 4, "micro_batch_size": 8}),
    "uneven dp2 tp4": ("uneven", {**FIXED, "dp": 2, "tp": 4, "micro_batch_size": 8}),
    "pure dp2 tp4 full": ("pure", {**FIXED, "dp": 2, "tp": 4, "micro_batch_size": 8, "recompute": "full"}),
    "fused dp2 tp4": ("fused", {**FIXED, "dp": 2, "tp": 4, "micro_batch_size": 8}),
    "fused dp4 tp2 zero1 full": (
        "fused",
        {**FIXED, "dp": 4, "tp": 2, "micro_batch_size": 4, "zero": 1, "recompute": "full"},
    ),
}
FORCED |= {
    "mixture ep2 dp4 tp2 zero1": ("mixture", {**FIXED, "dp": 4, "ep": 2, "tp": 2, "micro_batch_size": 2, "zero": 1}),
    "mixture ep8 dp8": ("mixture", {**FIXED, "dp": 8, "ep": 8, "micro_batch_size": 2}),
    "mixture ep4 dp8 full": ("mixture", {**FIXED, "dp": 8, "ep": 4, "micro_batch_size": 1, "recompute": "full"}),
    "mixture ep2 dp4 tp2 sequence": (
        "mixture",
        {**FIXED, "dp": 4, "ep": 2, "tp": 2, "micro_batch_size": 2, "sequence_parallel": True},
    ),
    "linen mixture ep4 dp8 zero1": ("linen mixture", {**FIXED, "dp": 8, "ep": 4, "micro_batch_size": 1, "zero": 1}),
    "mixture ep2 dp8 zero3": ("mixture", {**FIXED, "dp": 8, "ep": 2, "micro_batch_size": 1, "zero": 3}),
    "listed mixture ep2 hybrid 2 x 4": (
        "listed mixture",
        {**FIXED, "dp": 8, "ep": 2, "shard": 4, "micro_batch_size": 2, "zero": 3},
    ),
    **{
        f"plain mixture ep2 pp2 dp2 tp2 {schedule}": (
            "plain mixture",
            {**FIXED, "dp": 2, "ep": 2, "tp": 2, "pp": 2, "micro_batch_size": 2, "schedule": schedule},
        )
        for schedule in ("gpipe", "eager-1f1b")
    },
    "plain mixture ep2 pp2 dp4 zero1": (
        "plain mixture",
        {**FIXED, "dp": 4, "ep": 2, "pp": 2, "micro_batch_size": 2, "schedule": "gpipe", "zero": 1},
    ),
    "listed mixture ep2 dp4 zero2": ("listed mixture", {**FIXED, "dp": 4, "ep": 2, "micro_batch_size": 2, "zero": 2}),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A model with its inputs, weights and batch, and the same as a function."""

    model: Any
    inputs: tuple[Any, ...]
    weights: Any
    loss: Callable[..., Any]
    batch: Any


@cache
def subject(kind: str) -> Subject:
    if kind.startswith("linen"):
        module = models.LinenLoss() if kind == "linen" else models.LinenMixture()
        batch = models.batch(BATCH)
        shapes = jax.eval_shape(module.init, jax.random.key(0), batch)["params"]
        weights = models.weights(jax.tree.map(lambda leaf: leaf.shape, shapes))
        return Subject(
            model=module,
            inputs=(batch,),
            weights=weights,
            loss=lambda params, batch: module.apply({"params": params}, batch),
            batch=batch,
        )
    words = models.WORDS - 3 if kind == "uneven" else models.WORDS
    batch = models.batch(BATCH, words)
    if kind == "odd":
        batch = {name: rows[:, : models.LENGTH - 1] for name, rows in batch.items()}
    if kind.endswith("mixture"):
        stacked = kind == "mixture"
        weights, loss = (
            models.weights(models.mixture_shapes(stacked=stacked)),
            partial(models.mixture_loss, stacked=stacked, is_balanced=kind != "plain mixture"),
        )
    elif kind == "fused":
        weights, loss = models.weights(models.fused_shapes()), models.fused_loss
    elif kind == "deep":
        weights, loss = models.weights(models.shapes(layers=4, stacked=True)), models.scanned_loss
    else:
        weights = models.weights(models.shapes(words=words, stacked=kind == "scanned"))
        loss = models.scanned_loss if kind == "scanned" else models.loss
    return Subject(model=loss, inputs=(weights, batch), weights=weights, loss=loss, batch=batch)


@dataclass(frozen=True)
class ClippedAdam(Adam):
    """Adam on gradients whose norm over all parameters is at most one half."""

    def update(self, gradients: Any, state: Any, parameters: Any) -> tuple[Any, Any]:
        norm = jax.numpy.sqrt(sum((gradient**2).sum() for gradient in jax.tree.leaves(gradients)))
        scale = jax.numpy.minimum(1, 0.5 / norm)
        return Adam.update(self, jax.tree.map(lambda gradient: gradient * scale, gradients), state, parameters)


class Recording:
    """Adam that keeps the last gradients beside its own state, so that one compiled step shows everything."""

    def __init__(self, kind: type[Adam]) -> None:
        self.adam = kind(learning_rate=1e-2, weight_decay=0.01, epsilon=1e-3)

    def init(self, parameters: Any) -> Any:
        return {"adam": self.adam.init(parameters), "gradients": jax.tree.map(jax.numpy.zeros_like, parameters)}

    def update(self, gradients: Any, state: Any, parameters: Any) -> tuple[Any, Any]:
        changes, after = self.adam.update(gradients, state["adam"], parameters)
        return changes, {"adam": after, "gradients": gradients}


def error(measured: Any, expected: Any) -> float:
    """The largest over arrays of max|a - b| / max|b|."""
    pairs = zip(jax.tree.leaves(measured), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max()) for a, b in pairs)


def forced(name: str) -> dict[str, Any]:
    """One step of a strategy that is given."""
    kind, wanted = FORCED[name]
    if wanted["tp"] > 1:
        wanted = {"sequence_parallel": False, **wanted}
    case = subject(kind)
    question = {"cluster": "cpu:8", "global_batch_size": BATCH, "precision": "fp32"}
    if name.endswith("sequence") or kind in ("mixture", "plain mixture"):
        question["cluster"] = "cpu:8@paper"
    if name.endswith("mixed"):
        question["precision"] = "bf16-adam"
    graph = imported(kind)
    plan = phaze.evaluate(graph, strategy=wanted, compares=False, target="jax", **question).plan
    optimizer = Recording(ClippedAdam if name.endswith("clipped") else Adam)
    run = plan.apply(case.model, inputs=case.inputs, optimizer=optimizer)
    state = run.start(case.weights)
    compiled = run.step.lower(state, case.batch).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    after, loss = compiled(state, jax.tree.leaves(case.batch))
    gradients = run.parameters(TrainState(after.optimizer["gradients"], (), None))
    expected_loss, expected, updated = on_one_device(case, optimizer.adam, jax.numpy.float32)
    strategy = plan.strategy
    mesh = dict(run.mesh.shape)
    return {
        "strategy": to_document(strategy),
        "loss_error": abs(float(loss) - float(expected_loss)) / float(expected_loss),
        "gradient_error": error(gradients, expected),
        "rounding_error": rounding_error(case, optimizer.adam) if name.endswith("mixed") else 0.0,
        "parameter_error": error(run.parameters(after), updated),
        "structure_is_equal": jax.tree.structure(run.shardings) == jax.tree.structure(case.weights),
        "argument_bytes": memory.argument_size_in_bytes - COUNT_BYTES - _local_bytes(case.batch) // strategy.replicas,
        "is_cast_from_master": _is_cast_from_master(after),
        "live_bytes": _live_bytes((after.parameters, after.master, after.optimizer)) - COUNT_BYTES,
        "planned_live_bytes": [_planned_live_bytes(stage.memory_bytes) for stage in plan.stages],
        "temporary_bytes": memory.temp_size_in_bytes,
        "planned_bytes": [stage.memory_bytes["parameters"] + stage.memory_bytes["optimizer"] for stage in plan.stages],
        "planned_activation_bytes": [stage.memory_bytes["activations"] for stage in plan.stages],
        "traffic_bytes": axis_traffic(text, mesh, _shares(plan)),
        "array_bytes": [leaf.nbytes for leaf in jax.tree.leaves(case.weights)],
        "planned_traffic": [
            {"pp": stage.pp_bytes, "dp": stage.dp_bytes, "tp": stage.tp_bytes, "ep": stage.ep_bytes}
            for stage in planned_traffic(plan, graph, least_bytes=LEAST_BYTES)
        ],
        "strided": [name for name, splits in plan.layouts.parameters.items() if any(s.outer > 1 for s in splits)],
    }


@cache
def imported(kind: str) -> Graph:
    """The graph of a model, which all of its cases are planned from."""
    case = subject(kind)
    return phaze.import_graph(case.model, case.inputs)


def rounding_error(case: Subject, adam: Adam) -> float:
    """How far gradients in bf16 are from those in fp32, both on one device."""
    return error(*(on_one_device(case, adam, dtype)[1] for dtype in (jax.numpy.bfloat16, jax.numpy.float32)))


@cache
def on_one_device(case: Subject, adam: Adam, dtype: Any) -> tuple[Any, Any, Any]:
    """The loss, its gradients, and the parameters after one step; loss and gradients are computed in `dtype`."""

    @jax.jit
    def step(weights: Any, batch: Any) -> tuple[Any, Any, Any]:
        cast = jax.tree.map(lambda weight: jax.numpy.asarray(weight, dtype), weights)
        loss, gradients = jax.value_and_grad(case.loss)(cast, batch)
        gradients = jax.tree.map(lambda gradient: gradient.astype(jax.numpy.float32), gradients)
        changes, _ = adam.update(gradients, adam.init(weights), weights)
        return loss, gradients, jax.tree.map(jax.numpy.add, weights, changes)

    return step(case.weights, case.batch)  # type: ignore[no-any-return]


def _shares(plan: Plan) -> tuple[float, ...]:
    """Of the ticks of a pipeline a stage is busy in those of its microbatches; its ends are on one stage each."""
    count = BATCH // plan.strategy.dp // plan.strategy.micro_batch_size
    further = (plan.strategy.pp - 1) * (2 if plan.strategy.schedule == "eager-1f1b" else 1)
    return (count / (count + further), 1 / plan.strategy.pp)


def _is_cast_from_master(state: TrainState) -> bool:
    """Whether parameters are the master copy in another type; True where there is none."""
    pairs = zip(jax.tree.leaves(state.parameters), jax.tree.leaves(state.master), strict=state.master is not None)
    return all(bool((parameter == exact.astype(parameter.dtype)).all()) for parameter, exact in pairs)


def _live_bytes(tree: Any) -> int:
    """What the first device holds."""
    first = jax.devices()[0]
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards if shard.device == first]
    return sum(shard.data.nbytes for shard in shards)


def _planned_live_bytes(memory_bytes: Any) -> float:
    return float(sum(memory_bytes[item] for item in ("parameters", "gradients", "optimizer")))


def _local_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def tight_cluster(memory_bytes: int) -> Cluster:
    """Eight host devices with little memory."""
    chip = replace(find_accelerator("cpu"), hbm_bytes=memory_bytes)
    return replace(parse_cluster("cpu:8"), accelerator=chip)


UNFORCED = {"unforced 500 KB": 500_000, "unforced 300 KB": 300_000, "unforced 230 KB": 230_000}


def unforced(name: str) -> dict[str, Any]:
    """Twenty steps of the plan that `optimize` returns under a limit of memory."""
    case = subject("scanned")
    question = {"cluster": tight_cluster(UNFORCED[name]), "global_batch_size": BATCH, "precision": "fp32"}
    plan = phaze.optimize(case.model, case.inputs, tp=(1, 2), micro_batch_size=(1, 2), **question)
    run = plan.apply(case.model, inputs=case.inputs, optimizer=Adam(learning_rate=1e-2))
    state, losses, batches = run.start(case.weights), [], [models.batch(BATCH, seed=seed) for seed in range(20)]
    for batch in batches:
        state, loss = run.step(state, batch)
        losses.append(float(loss))
    return {
        "strategy": to_document(plan.strategy),
        "target": plan.provenance.target,
        "losses": losses,
        "expected": alone(case, batches),
    }


def alone(case: Subject, batches: list[Any]) -> list[float]:
    """The same steps in one process on one device."""
    adam = Adam(learning_rate=1e-2)

    @jax.jit
    def step(weights: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(case.loss)(weights, batch)
        changes, state = adam.update(gradients, state, weights)
        return jax.tree.map(jax.numpy.add, weights, changes), state, loss

    weights, state, losses = case.weights, adam.init(case.weights), []
    for batch in batches:
        weights, state, loss = step(weights, state, batch)
        losses.append(float(loss))
    return losses


def main(folder: Path, names: list[str]) -> None:
    """Run some cases, one after the other."""
    collect_rarely()
    jax.config.update("jax_disable_most_optimizations", True)
    runs = {name: partial(forced, name) for name in FORCED} | {name: partial(unforced, name) for name in UNFORCED}
    for name in names:
        (folder / f"{name}.json").write_text(json.dumps(runs[name](), indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
