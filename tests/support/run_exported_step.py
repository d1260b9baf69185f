"""Runs programs that `plan.export("pjit")` wrote, where phaze cannot be imported; started as `... FOLDER`.

FOLDER has the files for a scan over stacked layers ("scanned") and for layers with fused projections ("fused"); what
came out is written to found.json.
"""

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import jax_training as models
import numpy as np
from jax_models import cross_entropy, layer_norm


def update(params: Any, gradients: Any, state: Any) -> Any:
    """Gradient descent with momentum."""
    state = jax.tree.map(lambda m, g: 0.9 * m + g, state, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, state), state


def load(folder: Path) -> tuple[ModuleType, ModuleType]:
    """The program of a folder, and its data."""
    sys.path.insert(0, str(folder))
    for name in ("sharding", "train_step"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    program, data = (importlib.import_module(name) for name in ("train_step", "sharding"))
    sys.path.pop(0)
    return program, data


def scanned_loss(program: ModuleType) -> Any:
    """The scan over layers, with activations kept in place between them and a scalar of the batch in the loss."""

    def loss(params: Any, batch: Any) -> Any:
        x = program.constrain(params["embed"][batch["ids"]])
        x, _ = jax.lax.scan(lambda x, p: (program.constrain(models.block(p, x)), None), x, params["layers"])
        return batch["scale"] * cross_entropy(layer_norm(x, params["norm"]) @ params["head"], batch["labels"])

    return loss


def specs_differ(specs: dict[str, Any], tree: Any, *, is_whole: bool) -> list[str]:
    """The arrays of a tree that do not lie as the data say; unless they are whole, they do not know what ZeRO cuts."""
    differing = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = ".".join(re.findall(r"\w+", jax.tree_util.keystr(path)))
        said = [*specs.get(name, ()), *[None] * leaf.ndim][: leaf.ndim]
        lies = [axes if is_whole or axes not in ("dp", "shard") else None for axes in leaf.sharding.spec]
        if lies != said or (is_whole and name not in specs):
            differing.append(f"{name}: {leaf.sharding.spec}, said {said}")
    return differing


def run(folder: Path, weights: Any, loss_of: Any, alone: Any, *, is_whole: bool) -> dict[str, object]:
    """Three steps on eight devices and on one."""
    program, data = load(folder)
    batch = {**models.batch(16), "scale": np.float32(0.5)}
    zeros = jax.tree.map(jnp.zeros_like, weights)
    params, state = program.place(weights, zeros)
    step = program.make_step(loss_of(program), update, params, state, batch).lower(params, state, batch).compile()
    losses, expected = [], []
    for _ in range(3):
        params, state, value = step(params, state, jax.device_put(batch, program.batch_shardings(batch)))
        losses.append(float(value))
    differing = specs_differ(data.PARAMETERS, params, is_whole=is_whole)
    differing += specs_differ(data.STATE, state, is_whole=is_whole)
    devices = len(jax.tree.leaves(params)[0].sharding.device_set)
    params, state = weights, zeros
    gradient = jax.jit(jax.value_and_grad(alone))
    for _ in range(3):
        value, gradients = gradient(params, batch)
        params, state = update(params, gradients, state)
        expected.append(float(value))
    return {"losses": losses, "expected": expected, "devices": devices, "differing": differing}


def scaled(loss: Any) -> Any:
    """A loss that reads the batch's scalar."""
    return lambda params, batch: batch["scale"] * loss(params, batch)


def main(folder: Path) -> None:
    """Both programs."""
    weights, fused = models.weights(models.shapes(stacked=True)), scaled(models.fused_loss)
    fused_weights = models.weights(models.fused_shapes())
    found = {
        "scanned": run(folder / "scanned", weights, scanned_loss, scaled(models.scanned_loss), is_whole=True),
        "fused": run(folder / "fused", fused_weights, lambda _: fused, fused, is_whole=False),
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.modules["phaze"] = None  # type: ignore[assignment]
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    main(Path(sys.argv[1]))
