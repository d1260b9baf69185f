"""Losses of a small regression that draw, recompute, constrain and count, for tests of how JAX batches are divided."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import phaze

Tree = Any

ROWS, WIDTH, HIDDEN, OUT = 16, 8, 12, 4
ALONE = {"schedule": "none", "chunks": 1, "recompute": "none", "pp": 1, "zero": 0, "tp": 1}


def weights() -> Tree:
    random = np.random.default_rng(0)
    sizes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, OUT)}
    return {name: random.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


def rows() -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    return tuple(random.standard_normal((ROWS, width)).astype(np.float32) for width in (WIDTH, OUT))  # type: ignore[return-value]


def error(params: Tree, hidden: jax.Array, y: jax.Array) -> jax.Array:
    return ((hidden @ params["down"] - y) ** 2).mean()


def hidden(params: Tree, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["up"])


def divided(loss: Any, inputs: tuple[Any, ...], *, dp: int = 1, micro_batch_size: int = 2) -> tuple[Any, Any]:
    """Loss and gradients of a loss whose batch is divided by copies and microbatches."""
    strategy = {**ALONE, "dp": dp, "micro_batch_size": micro_batch_size}
    plan = phaze.evaluate(
        loss,
        inputs,
        cluster=f"cpu:{dp}",
        strategy=strategy,
        global_batch_size=ROWS,
        precision="fp32",
        compares=False,
    ).plan
    run = plan.apply(loss, inputs=inputs)
    return run.gradients(run.start(inputs[0]), *inputs[1:])  # type: ignore[no-any-return]


def largest_error(measured: Any, expected: Any) -> float:
    """The largest over arrays of max|a - b| / max|b|."""
    pairs = zip(jax.tree.leaves(measured), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
