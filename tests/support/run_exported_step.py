"""Runs the program that `plan.export("pjit")` wrote, where phaze cannot be imported; started as `... FOLDER`."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax_training as models


def update(params: Any, gradients: Any, state: Any) -> Any:
    """Gradient descent with momentum."""
    state = jax.tree.map(lambda m, g: 0.9 * m + g, state, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, state), state


def main(folder: Path) -> None:
    """Three steps on eight devices and on one."""
    spec = importlib.util.spec_from_file_location("train_step", folder / "train_step.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    weights, batch = models.weights(models.shapes(stacked=True)), models.batch(16)
    losses = []
    params, state = program.place(weights, jax.tree.map(jnp.zeros_like, weights))
    step = program.make_step(models.scanned_loss, update)
    for _ in range(3):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    devices = len(jax.tree.leaves(params)[0].sharding.device_set)
    expected, params, state = [], weights, jax.tree.map(jnp.zeros_like, weights)
    gradient = jax.jit(jax.value_and_grad(models.scanned_loss))
    for _ in range(3):
        loss, gradients = gradient(params, batch)
        params, state = update(params, gradients, state)
        expected.append(float(loss))
    (folder / "found.json").write_text(json.dumps({"losses": losses, "expected": expected, "devices": devices}))


if __name__ == "__main__":
    sys.modules["phaze"] = None  # type: ignore[assignment]
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    main(Path(sys.argv[1]))
