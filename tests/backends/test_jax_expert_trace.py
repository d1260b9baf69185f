"""A loss rewritten for one of the devices that experts are divided over gives, on all of them, what the whole gives."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from phaze.backends.jax.expert_trace import AXIS, loss_of_experts
from phaze.backends.jax.trace_rewriting import inner_traces
from phaze.backends.jax.traced_loss import TracedLoss, trace_loss

SAMPLES, LENGTH, WIDTH, EXPERTS, EP = 2, 6, 4, 8, 2
QUICKLY = {"xla_llvm_disable_expensive_passes": True, "xla_backend_optimization_level": 0}
"""Options with which small programs are compiled sooner."""


def rows_of(w: Any, x: Any) -> tuple[Any, Any]:
    """The tokens of each sample that choose each expert, [b, e, c, i], and the mask that says which these are."""
    chosen = jax.nn.one_hot((x @ w["router"]).argmax(-1), EXPERTS)
    place = (jnp.cumsum(chosen, axis=1) * chosen - 1).astype(jnp.int32)
    mask = jax.nn.one_hot(place, LENGTH // 2) * chosen[..., None]
    return jnp.einsum("bsec,bsi->beci", mask, x), mask


def with_own_derivative(w: Any, rows: Any) -> Any:
    return jnp.einsum("beci,eij->becj", jax.nn.relu(rows), w["experts"])


def scaled_by_own_tokens(w: Any, rows: Any) -> Any:
    """What is multiplied by something of each sample that has no experts."""
    hidden = jnp.einsum("beci,eij->becj", rows, w["experts"])
    return hidden * jnp.abs(rows).max((1, 2, 3), keepdims=True)


def of_all_experts(w: Any, rows: Any) -> Any:
    """What is summed over experts, and comes to each of them again."""
    hidden = jnp.einsum("beci,eij->becj", rows, w["experts"])
    return hidden + hidden.sum(1, keepdims=True)


EXPERTS_DO: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "a product": (2, lambda w, rows: jnp.einsum("beci,eij->becj", rows, w["experts"])),
    "experts first": (2, lambda w, rows: jnp.einsum("beci,eij->ebcj", rows, w["experts"]).swapaxes(0, 1)),
    "a bias": (2, lambda w, rows: jnp.einsum("beci,eij->becj", rows, w["experts"]) + w["experts"][:, :1]),
    "a function of its own": (2, with_own_derivative),
    "gates": (2, lambda w, rows: jax.nn.silu(rows @ w["experts"]) * (rows @ w["experts"].swapaxes(1, 2))),
    "matrices that all share": (2, lambda w, rows: jnp.einsum("beci,eij->becj", rows, w["experts"]) @ w["shared"]),
    "halves": (2, lambda w, rows: jnp.concatenate(jnp.split(rows @ w["shared"], 2, -1)[::-1], -1) @ w["experts"]),
    "something of a sample": (2, scaled_by_own_tokens),
    "something of all experts": (2, of_all_experts),
    "all of them for all tokens": (0, lambda w, rows: rows + jnp.einsum("beci,fij->becj", rows, w["experts"])),
}
"""What experts do with their rows, and how often rows are exchanged forward."""


def parameters() -> dict[str, Any]:
    random = np.random.default_rng(0)
    sizes = {"experts": (EXPERTS, WIDTH, WIDTH), "router": (WIDTH, EXPERTS), "shared": (WIDTH, WIDTH)}
    return {name: jnp.asarray(random.standard_normal(size), jnp.float32) for name, size in sizes.items()}


def count(trace: TracedLoss, name: str) -> int:
    def counted(jaxpr: core.Jaxpr) -> Counter[str]:
        inside = (counted(inner) for equation in jaxpr.eqns for inner in inner_traces(equation))
        return sum(inside, Counter(str(equation.primitive) for equation in jaxpr.eqns))

    return counted(trace.flat.jaxpr)[name]


DEFAULT = (("a function of its own", 1), ("something of a sample", 1), ("something of all experts", 1), ("gates", 2))


@pytest.mark.parametrize(
    ("name", "tiles"),
    [*DEFAULT, *(pytest.param(name, 2, marks=pytest.mark.exhaustive) for name in EXPERTS_DO)],
)
def test_losses_and_gradients_of_all_devices_are_those_of_the_whole(name: str, tiles: int) -> None:
    exchanges, work = EXPERTS_DO[name]

    def loss(w: Any, x: Any) -> Any:
        rows, mask = rows_of(w, x)
        return (jnp.einsum("bsec,beci->bsi", mask, work(w, rows)) ** 2).mean()

    weights = parameters()
    flat, structure = jax.tree.flatten(weights)
    samples = jnp.asarray(np.random.default_rng(1).standard_normal((EP, SAMPLES, LENGTH, WIDTH)), jnp.float32)
    shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in flat]
    one = jax.ShapeDtypeStruct(samples.shape[1:], samples.dtype)
    trace = trace_loss(lambda given, batch: loss(jax.tree.unflatten(structure, given), batch[0]), shapes, [one])
    rewritten = loss_of_experts(trace, {0: 0}, EP, tiles)
    assert count(rewritten, "all_to_all") == exchanges or name.startswith("something")

    # Experts in tiles: device d has the d-th run of each of the parts that a tensor axis would make of them.
    tiled = flat[0].reshape(tiles, EP, -1, WIDTH, WIDTH).swapaxes(0, 1).reshape(EP, -1, WIDTH, WIDTH)

    def on_devices(experts: Any, others: Any) -> Any:
        run = core.jaxpr_as_fun(rewritten.flat)
        return jax.vmap(lambda own, x: run(own, *others, x)[0], axis_name=AXIS)(experts, samples).sum()

    both = jax.jit(
        lambda w, experts, others: (
            jax.value_and_grad(lambda w: sum(loss(w, x) for x in samples))(w),
            jax.value_and_grad(on_devices, argnums=(0, 1))(experts, others),
        ),
        compiler_options=QUICKLY,
    )
    (expected, gradients), (measured, (own, others)) = both(weights, tiled, flat[1:])
    whole = own.reshape(EP, tiles, -1, WIDTH, WIDTH).swapaxes(0, 1).reshape(flat[0].shape)
    assert float(measured) == pytest.approx(float(expected), rel=1e-5)
    for actual, wanted in zip([whole, *others], jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)
