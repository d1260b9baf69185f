"""What JAX users bring along, on eight host devices; started by the tests as `... FOLDER CASE...`, one JSON per case.

Each case is compared with the same in one process on one device. Started as `... FOLDER --process RANK PORT` it is one
of two processes that train together.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax_dividing as small
import jax_training as models
import numpy as np
import optax
import orbax.checkpoint
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_models import attend, cross_entropy
from rare_collections import collect_rarely

import phaze
from phaze.ir import Graph
from phaze.plan.plan import Plan

BATCH = 16
FIXED = {"schedule": "none", "chunks": 1, "recompute": "none", "pp": 1}
STEPS = 3


def planned(
    model: Any, inputs: Any, *, dp: int, tp: int = 1, zero: int = 0, micro_batch_size: int | None = None, **options: Any
) -> Plan:
    strategy = {**FIXED, "dp": dp, "tp": tp, "zero": zero, "micro_batch_size": micro_batch_size or BATCH // dp}
    if tp > 1:
        strategy["sequence_parallel"] = False
    question = {"cluster": "cpu:8", "global_batch_size": BATCH, "precision": "fp32", "compares": False}
    if model is models.fused_loss:
        return phaze.evaluate(fused_graph(), strategy=strategy, target="jax", **question, **options).plan
    return phaze.evaluate(model, inputs, strategy=strategy, **question, **options).plan


@cache
def fused_graph() -> Graph:
    """The graph of the loss that most cases have, imported once."""
    state, batch = fused_state()
    return phaze.import_graph(models.fused_loss, (state.params, batch))


def optimizer() -> optax.GradientTransformation:
    """Clipping over all parameters, a schedule, and weight decay of matrices only."""

    def is_matrix(params: Any) -> Any:
        return jax.tree.map(lambda value: value.ndim > 1, params)

    rate = optax.linear_schedule(1e-2, 1e-3, 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, eps=1e-3, weight_decay=0.1, mask=is_matrix))


def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
    """A step as flax users write it, with metrics."""
    loss, gradients = jax.value_and_grad(state.apply_fn)(state.params, batch)
    metrics = {"loss": loss, "norm": optax.global_norm(gradients)}
    return state.apply_gradients(grads=gradients), metrics


def fused_state() -> tuple[TrainState, Any]:
    weights = models.weights(models.fused_shapes())
    return TrainState.create(apply_fn=models.fused_loss, params=weights, tx=optimizer()), models.batch(BATCH)


def steps(run: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, list[float]]:
    losses = []
    for _ in range(STEPS):
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def compared(run: Callable[..., Any], step: Callable[..., Any], state: Any, batch: Any) -> dict[str, Any]:
    """Some steps on the mesh and on one device; states are compared whole."""
    on_mesh, losses = steps(run, state, batch)
    alone, expected = steps(jax.jit(step), state, batch)
    return {"losses": losses, "expected": expected, "error": error(on_mesh, alone), "state": on_mesh}


def error(measured: Any, expected: Any) -> float:
    """The largest over arrays of max|a - b|, relative to the largest number there is."""
    pairs = list(zip(jax.tree.leaves(measured), jax.tree.leaves(expected), strict=True))
    largest = max(float(np.abs(np.asarray(b)).max()) for _, b in pairs)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs) / largest


def whole_step() -> dict[str, Any]:
    """A whole step of flax and optax."""
    state, batch = fused_state()
    plan = planned(train_step, (state, batch), dp=2, tp=4, zero=1)
    run = plan.apply(train_step, inputs=(state, batch))
    measured = compared(run, train_step, state, batch)
    after = measured.pop("state")
    projection, moment = after.params["layers"][0]["qkv"], after.opt_state[1][0].mu["layers"][0]["qkv"]
    return {
        **measured,
        "compilations": run.compiled._cache_size(),
        "parameter": str(projection.sharding.spec),
        "moment": str(moment.sharding.spec),
        "steps": int(after.step),
    }


def hand_written() -> dict[str, Any]:
    """The plan of a loss, as specs in a jit of the user's own, and the user's own tree laid out by them."""
    state, batch = fused_state()
    params, opt_state = state.params, state.opt_state
    plan = planned(models.fused_loss, (params, batch), dp=2, tp=4, zero=1)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(models.fused_loss)(params, batch)
        updates, opt_state = optimizer().update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    mesh, specs = plan.mesh(), plan.specs(params, opt_state, batch)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    compiled = jax.jit(step, in_shardings=shardings, out_shardings=(*shardings[:2], None))
    results = compiled(*jax.device_put((params, opt_state, batch), shardings))
    run = plan.apply(models.fused_loss, inputs=(params, batch))
    placed = jax.device_put(params, run.shardings)
    explicit = plan.mesh(explicit=True)
    with jax.set_mesh(explicit):
        on_explicit = jax.tree.map(lambda spec: NamedSharding(explicit, spec), specs)
        arguments = jax.device_put((params, opt_state, batch), on_explicit)
        whole = PartitionSpec()
        divided = jax.sharding.auto_axes(step, axes=explicit.axis_names, out_sharding=(*specs[:2], whole))
        explicit_results = jax.jit(divided)(*arguments)
    return {
        "explicit_error": error(explicit_results, results),
        "explicit_type": str(jax.typeof(explicit_results[0]["layers"][0]["gate_up"])),
        "error": error(results, jax.jit(step)(params, opt_state, batch)),
        "placed_error": error(run.parameters(run.start(placed)), params),
        "projection": str(placed["layers"][0]["qkv"].sharding.spec),
        "specs_are_equal": run.specs == specs[0],
        "batch": str(specs[2]["ids"]),
        "activations": str(plan.constraints()["activations"]),
    }


def own_mesh() -> dict[str, Any]:
    """A mesh with the user's own names, in another order than the plan's."""
    state, batch = fused_state()
    plan = planned(models.fused_loss, (state.params, batch), dp=2, tp=4)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("model", "data"))
    run = plan.apply(models.fused_loss, mesh, inputs=(state.params, batch))
    loss, _ = run.gradients(run.start(jax.device_put(state.params, run.shardings)), batch)
    return {
        "loss": float(loss),
        "expected": float(jax.jit(models.fused_loss)(state.params, batch)),
        "spec": str(run.specs["layers"][0]["qkv"]),
    }


class Normalized(linen.Module):
    """A network with statistics of batches, and dropout."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        hidden = linen.relu(linen.BatchNorm(use_running_average=False, momentum=0.9)(linen.Dense(small.HIDDEN)(x)))
        return linen.Dense(small.OUT)(linen.Dropout(0.5, deterministic=False)(hidden))


class NormalizedState(TrainState):
    """A state with statistics of batches and a key, as flax's guides have it."""

    batch_stats: Any
    key: Any


def normalized_step(state: NormalizedState, batch: Any) -> tuple[NormalizedState, dict[str, Any]]:
    """A step with a mutable collection, a key folded with the step's number, and rows that count."""
    key = jax.random.fold_in(state.key, state.step)

    def loss_fn(params: Any) -> tuple[Any, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        output, updates = Normalized().apply(variables, batch["x"], mutable=["batch_stats"], rngs={"dropout": key})
        errors = ((output - batch["y"]) ** 2).mean(-1)
        return (errors * batch["mask"]).sum() / batch["mask"].sum(), updates

    (loss, updates), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=gradients)
    return state.replace(batch_stats=updates["batch_stats"]), {"loss": loss}


def statistics() -> dict[str, Any]:
    """Statistics of batches, dropout and a mask in a whole step over eight copies."""
    x, y = small.rows()
    mask = np.random.default_rng(2).integers(0, 2, BATCH).astype(np.float32)
    variables = Normalized().init({"params": jax.random.key(0), "dropout": jax.random.key(0)}, x)
    state = NormalizedState.create(
        apply_fn=None,
        params=variables["params"],
        tx=optimizer(),
        batch_stats=variables["batch_stats"],
        key=jax.random.PRNGKey(3),
    )
    batch = {"x": x, "y": y, "mask": mask}
    run = planned(normalized_step, (state, batch), dp=8, zero=3).apply(normalized_step, inputs=(state, batch))
    measured = compared(run, normalized_step, state, batch)
    del measured["state"]
    return measured


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Perceptron:
    """A module as Equinox has them: a tree that can be called, with leaves that are no arrays."""

    up: Any
    down: Any
    scales: Any
    activation: Any

    def __call__(self, x: Any) -> Any:
        return self.activation(x @ self.up) * self.scales @ self.down


def module() -> dict[str, Any]:
    """A module with a function and whole numbers among its leaves; rows that count, eight copies, two microbatches."""
    weights, scales = small.weights(), jnp.arange(small.HIDDEN)
    model = Perceptron(weights["up"], weights["down"], scales, jax.nn.relu)

    def loss(model: Perceptron, x: Any, y: Any) -> Any:
        counts = (y[:, 0] > 0).astype(x.dtype)
        return (((model(x) - y) ** 2).mean(-1) * counts).sum() / counts.sum()

    inputs = (model, *small.rows())
    run = planned(loss, inputs, dp=8, zero=1, micro_batch_size=1).apply(loss, inputs=inputs, optimizer=optax.sgd(1e-3))
    state, value = run.step(run.start(model), *inputs[1:])
    trained = run.parameters(state)
    arrays = (model.up, model.down)
    gradients = jax.grad(lambda arrays: loss(Perceptron(*arrays, scales, jax.nn.relu), *inputs[1:]))(arrays)
    expected = jax.tree.map(lambda array, gradient: array - 1e-3 * gradient, arrays, gradients)
    return {
        "error": error([trained.up, trained.down], expected),
        "loss": float(value),
        "expected": float(loss(*inputs)),
        "is_callable": float(loss(trained, *inputs[1:])) < float(value),
    }


def checkpoint() -> dict[str, Any]:
    """A state saved by Orbax under one plan and restored under others goes on as it would have."""
    state, batch = fused_state()
    inputs = (state.params, batch)

    def run_of(**degrees: int) -> Any:
        return planned(models.fused_loss, inputs, **degrees).apply(
            models.fused_loss, inputs=inputs, optimizer=optimizer()
        )

    first, second = run_of(dp=2, tp=4, zero=1), run_of(dp=8, zero=3)
    trained, _ = first.step(first.start(state.params), batch)
    with tempfile.TemporaryDirectory() as folder, orbax.checkpoint.StandardCheckpointer() as library:
        library.save(Path(folder) / "step", first.checkpoint(trained))
        library.wait_until_finished()
        restored = second.resume(library.restore(Path(folder) / "step", second.checkpoint_shapes()))
    expected, loss = first.step(trained, batch)
    resumed, resumed_loss = second.step(restored, batch)
    return {
        "error": error(second.parameters(resumed), first.parameters(expected)),
        "state_error": error(second.checkpoint(resumed).optimizer, first.checkpoint(expected).optimizer),
        "loss": float(resumed_loss),
        "expected": float(loss),
        "moment": str(restored.optimizer[1][0].mu["layers"][0]["qkv"].sharding.spec),
    }


def grouped_loss(params: Any, batch: Any) -> Any:
    """A scanned transformer with two heads of keys for eight of queries."""

    def block(x: Any, p: Any) -> tuple[Any, None]:
        query, key, value = ((x @ p[name]).reshape(*x.shape[:2], -1, models.SIZE) for name in ("q", "k", "v"))
        key, value = (jnp.repeat(part, models.HEADS // 2, axis=2) for part in (key, value))
        return x + attend(query, key, value).reshape(*x.shape[:2], -1) @ p["o"], None

    x, _ = jax.lax.scan(block, params["embed"][batch["ids"]], params["layers"])
    return cross_entropy(x @ params["embed"].T, batch["labels"])


def grouped_heads() -> dict[str, Any]:
    """More tensor-parallel devices than heads of keys."""
    width, heads = models.WIDTH, {"q": models.HEADS, "k": 2, "v": 2}
    layers = {name: (2, width, count * models.SIZE) for name, count in heads.items()}
    layers |= {"o": (2, models.HEADS * models.SIZE, width)}
    inputs = (models.weights({"embed": (models.WORDS, width), "layers": layers}), models.batch(BATCH))
    columns = {"params.layers.k*": 1, "params.layers.v*": 1}
    plan = planned(grouped_loss, inputs, dp=2, tp=4, constraints=columns)
    run = plan.apply(grouped_loss, inputs=inputs, optimizer=optax.sgd(0.1))
    state, loss = run.step(run.start(inputs[0]), inputs[1])
    expected, gradients = jax.value_and_grad(grouped_loss)(*inputs)
    trained = jax.tree.map(lambda array, gradient: array - 0.1 * gradient, inputs[0], gradients)
    return {
        "error": error(run.parameters(state), trained),
        "loss": float(loss),
        "expected": float(expected),
        "key": str(run.specs["layers"]["k"]),
    }


class ListedBlocks(nnx.Module):
    """A module of nnx that returns predictions; blocks are one behind the other."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.enter = nnx.Linear(small.WIDTH, small.HIDDEN, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(small.HIDDEN, small.HIDDEN, rngs=rngs) for _ in range(2)])
        self.leave = nnx.Linear(small.HIDDEN, small.OUT, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.enter(x)
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.leave(x)


def squared_error(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    return ((predictions - targets) ** 2).mean()


@nnx.jit
def nnx_train_step(model: ListedBlocks, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    """A step that changes its arguments."""
    loss, gradients = nnx.value_and_grad(lambda model: squared_error(model(x), y))(model)
    optimizer.update(model, gradients)
    return loss


def nnx_step() -> dict[str, Any]:
    """The step of nnx, called with the module and the optimizer as before, on a mesh."""
    x, y = small.rows()
    objects = []
    for _ in range(2):
        model = ListedBlocks()
        objects.append((model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param)))
    run = planned(nnx_train_step, (*objects[0], x, y), dp=4, tp=2, zero=1).apply(
        nnx_train_step, inputs=(*objects[0], x, y)
    )
    pairs = zip((run, nnx_train_step), objects, strict=True)
    losses = [[float(step(*given, x, y)) for _ in range(STEPS)] for step, given in pairs]
    return {
        "losses": losses[0],
        "expected": losses[1],
        "error": error(*(nnx.state(model, nnx.Param) for model, _ in objects)),
        "steps": int(objects[0][1].step[...]),
        "parameter": str(objects[0][0].enter.kernel[...].sharding.spec),
    }


def without_loss() -> dict[str, Any]:
    """A module that returns no loss, in two stages: the loss and its targets are given beside it."""
    x, y = small.rows()
    model = ListedBlocks()
    strategy = {"dp": 2, "pp": 2, "tp": 1, "zero": 1, "schedule": "gpipe", "micro_batch_size": 4, "recompute": "none"}
    question = {"cluster": "cpu:4", "global_batch_size": BATCH, "precision": "fp32", "compares": False}
    plan = phaze.evaluate(model, (x,), strategy=strategy, loss_fn=squared_error, targets=y, **question).plan
    run = plan.apply(model, inputs=(x,), loss_fn=squared_error, targets=y, optimizer=optimizer())
    state = run.start(model)
    for _ in range(STEPS):
        state, loss = run.step(state, x, y)
    resumed, resumed_loss = run.step(run.resume(run.checkpoint(state)), x, y)
    alone = ListedBlocks()
    own = nnx.Optimizer(alone, optimizer(), wrt=nnx.Param)
    expected = [float(nnx_train_step(alone, own, x, y)) for _ in range(STEPS + 1)]
    return {
        "losses": [float(loss), float(resumed_loss)],
        "expected": expected[-2:],
        "error": error(run.parameters(resumed), nnx.state(alone, nnx.Param)),
    }


RUNS = {
    "whole step": whole_step,
    "nnx step": nnx_step,
    "without a loss": without_loss,
    "hand-written": hand_written,
    "own mesh": own_mesh,
    "statistics": statistics,
    "module": module,
    "grouped heads": grouped_heads,
    "checkpoint": checkpoint,
}


def in_two_processes(folder: Path, rank: int, port: str) -> None:
    """Some steps on the devices of two processes, under plans whose axes lie within and across them."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    state, batch = fused_state()
    inputs, losses = (state.params, batch), {}
    for name, degrees in {"dp2 tp4": {"dp": 2, "tp": 4, "zero": 1}, "dp8": {"dp": 8, "zero": 3}}.items():
        run = planned(models.fused_loss, inputs, **degrees).apply(
            models.fused_loss, inputs=inputs, optimizer=optimizer()
        )
        trained, losses[name] = run.start(state.params), []
        for _ in range(STEPS):
            trained, loss = run.step(trained, batch)
            losses[name].append(float(loss))
    _, expected = steps(jax.jit(train_step), state, batch)
    measured = {"losses": losses, "expected": expected, "devices": len(jax.devices()), "own": jax.local_device_count()}
    (folder / f"{rank}.json").write_text(json.dumps(measured))


def main(folder: Path, names: list[str]) -> None:
    """Run some cases, one after the other."""
    collect_rarely()
    jax.config.update("jax_disable_most_optimizations", True)
    if names[:1] == ["--process"]:
        in_two_processes(folder, int(names[1]), names[2])
        return
    for name in names or RUNS:
        (folder / f"{name}.json").write_text(json.dumps(RUNS[name](), indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
