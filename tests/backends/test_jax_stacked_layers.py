"""Layers that a JAX loss runs one after the other become one scan over a stack, which computes the same."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phaze.backends.jax.parameter_storage import ParameterStorage
from phaze.backends.jax.stacked_layers import EMPTY_SHAPE, LayerStacks, stack_equal_layers
from phaze.backends.jax.traced_loss import trace_loss
from phaze.backends.jax.train_state import Adam, asks_for_shapes
from phaze.errors import PlanError

WIDTH, LAYERS = 4, 3
Loss = Callable[[list[jax.Array], list[jax.Array]], jax.Array]
STACKS = ((1, 3, 5), (2, 4, 6))
"""The weights and the biases of the three layers."""


def parameters() -> list[jax.Array]:
    """An embedding, a weight and a bias for each layer, a head."""
    random = np.random.default_rng(0)
    shapes = [(WIDTH, WIDTH), *[(WIDTH, WIDTH), (WIDTH,)] * LAYERS, (WIDTH, WIDTH)]
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]


def batch() -> list[jax.Array]:
    return [jnp.asarray(np.random.default_rng(1).standard_normal((2, WIDTH)), jnp.float32), jax.random.key(0)]


def model(run: Callable[[Any, int, Any, Any, Any], Any]) -> Loss:
    """A loss of layers `run(x, number, weight, bias, context)`; context has what enters, keys and the embedding."""

    def loss(flat: list[jax.Array], given: list[jax.Array]) -> jax.Array:
        x = given[0] @ flat[0]
        context = (x, jax.random.split(given[1], LAYERS), flat[0])
        for number in range(LAYERS):
            x = run(x, number, flat[1 + 2 * number], flat[2 + 2 * number], context)
        return ((x @ flat[-1]) ** 2).mean()

    return loss


@jax.custom_vjp
def cubed(x: jax.Array) -> jax.Array:
    return x**3


cubed.defvjp(lambda x: (x**3, x), lambda x, gradient: (3 * x**2 * gradient,))


@jax.custom_vjp
def cubed_with_other_gradients(x: jax.Array) -> jax.Array:
    return x**3


cubed_with_other_gradients.defvjp(lambda x: (x**3, x), lambda x, gradient: (gradient,))

EQUAL: dict[str, Loss] = {
    "plain": model(lambda x, number, weight, bias, context: x + jnp.tanh(x @ weight + bias)),
    "activation behind": model(lambda x, number, weight, bias, context: jax.nn.relu(x @ weight + bias)),
    "a number of each layer": model(lambda x, number, weight, bias, context: x + 0.5**number * (x @ weight + bias)),
    "a key of each layer": model(
        lambda x, number, weight, bias, context: (
            x + jax.random.normal(context[1][number], x.shape) * (x @ weight + bias)
        )
    ),
    "what enters the first": model(lambda x, number, weight, bias, context: context[0] + jnp.tanh(x @ weight + bias)),
    "a parameter that all read": model(
        lambda x, number, weight, bias, context: x + jnp.tanh(x @ weight + bias) @ context[2]
    ),
    "gradients by hand": model(lambda x, number, weight, bias, context: x + cubed(x @ weight + bias)),
}


def stacked(loss: Loss, layers: range = range(1, 1 + LAYERS)) -> tuple[Any, LayerStacks]:
    shapes, rows = jax.eval_shape(lambda: (parameters(), batch()))
    trace = trace_loss(loss, shapes, rows)
    return stack_equal_layers(trace, [0, 1, 1, 2, 2, 3, 3, 4], layers)


@pytest.mark.parametrize("name", EQUAL)
def test_the_scan_has_the_loss_and_the_gradients_of_the_layers(name: str) -> None:
    trace, stacks = stacked(EQUAL[name])
    assert sorted(stacks.stacks) == list(STACKS)
    assert trace.scan is not None
    assert trace.scan.length == LAYERS

    def scanned(flat: list[jax.Array], given: list[jax.Array]) -> jax.Array:
        values = stacks.stacked(dict(enumerate(flat)))
        (loss,) = jax.core.eval_jaxpr(trace.flat.jaxpr, trace.flat.consts, *values.values(), *given)
        return loss

    expected, gradients = jax.value_and_grad(EQUAL[name])(parameters(), batch())
    measured, measured_gradients = jax.value_and_grad(scanned)(parameters(), batch())
    assert float(measured) == pytest.approx(float(expected), rel=1e-6)
    for value, gradient in zip(measured_gradients, gradients, strict=True):
        np.testing.assert_allclose(value, gradient, rtol=1e-5, atol=1e-5)


def wide(x: jax.Array, number: int, weight: jax.Array, bias: jax.Array, context: Any) -> jax.Array:
    return x + (jnp.tanh if number == 1 else jnp.sin)(x @ weight + bias)


def by_hand(x: jax.Array, number: int, weight: jax.Array, bias: jax.Array, context: Any) -> jax.Array:
    return x + (cubed if number else cubed_with_other_gradients)(x @ weight + bias)


def test_layers_that_compute_something_else_are_refused() -> None:
    with pytest.raises(PlanError, match=r"not equal as JAX traces them: tanh stands beside sin"):
        stacked(model(wide))


def test_layers_with_other_rules_for_gradients_are_refused() -> None:
    with pytest.raises(PlanError, match=r"custom_vjp_call stands beside custom_vjp_call in another way"):
        stacked(model(by_hand))


def test_a_loss_that_reads_from_single_layers_is_refused() -> None:
    def loss(flat: list[jax.Array], given: list[jax.Array]) -> jax.Array:
        x = given[0] @ flat[0]
        made = []
        for number in range(LAYERS):
            x = x + jnp.tanh(x @ flat[1 + 2 * number] + flat[2 + 2 * number])
            made.append(x)
        return (jnp.concatenate(made) @ flat[-1]).mean()

    with pytest.raises(PlanError, match="the plan has several stages, and"):
        stacked(loss)


def test_what_is_stacked_comes_apart_again() -> None:
    stacks = LayerStacks(STACKS)
    values = dict(enumerate(parameters()))
    together = stacks.stacked(values)
    assert together[1].shape == (LAYERS, WIDTH, WIDTH)
    assert together[3].shape == EMPTY_SHAPE
    for number, value in stacks.unstacked(together).items():
        assert bool((value == values[number]).all())


def sees_user_shapes(optimizer: Any) -> bool:
    """Whether an optimizer is given single layers, and not stacks of them."""
    stacks = LayerStacks(STACKS)
    storages = [ParameterStorage(name="", shape=value.shape) for value in parameters()]
    together = jax.eval_shape(stacks.stacked, dict(enumerate(parameters())))
    stored = [ParameterStorage(name="", shape=value.shape) for value in together.values()]
    return asks_for_shapes(optimizer, stored, storages, stacks, jax.tree.structure(parameters()))


def test_an_optimizer_that_treats_layers_alike_sees_stacks_and_others_see_layers() -> None:
    def of_first_layer(tree: Any) -> Any:
        return [number in (1, 2) for number in range(len(tree))]

    assert not sees_user_shapes(Adam())
    assert not sees_user_shapes(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    assert sees_user_shapes(optax.lamb(1e-3))
    # As many stacks have two dimensions (those of the biases) as there are single matrices among the layers.
    assert sees_user_shapes(optax.adamw(1e-3, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)))
    assert sees_user_shapes(optax.masked(optax.add_decayed_weights(0.1), of_first_layer))
    assert sees_user_shapes(optax.chain(optax.masked(optax.scale(0.5), of_first_layer), optax.sgd(0.1)))
