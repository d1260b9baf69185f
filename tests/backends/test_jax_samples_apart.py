"""Losses that mix samples, or read their numbers in the batch, are told from those that treat samples apart."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_dividing as small
import numpy as np
import pytest

from phaze.backends.jax.samples_apart import check_samples_apart
from phaze.backends.jax.traced_loss import TracedLoss, trace_loss
from phaze.errors import PlanError

Loss = Callable[..., Any]
LENGTH, WIDTH = 5, 8


def of_both_views(w: Any, x: Any, y: Any, key: Any) -> Any:
    first, second = jnp.split(jnp.concatenate([x, 2 * x]) @ w, 2)
    return ((first - second) ** 2).mean()


def of_tokens(w: Any, x: Any, y: Any, key: Any) -> Any:
    rows = (x.reshape(-1, WIDTH) @ w).reshape(*y.shape, 2, -1)
    return (rows[:, :, 0] * y[..., None]).mean()


def of_pairs(w: Any, x: Any, y: Any, key: Any) -> Any:
    pairs = x.reshape(-1, 2, LENGTH, WIDTH)
    return ((pairs[:, 0] - pairs[:, 1]) @ w).mean()


def by_own_number(w: Any, x: Any, y: Any, key: Any) -> Any:
    log_probabilities = jax.nn.log_softmax((x @ w).mean(1))
    return -log_probabilities[jnp.arange(x.shape[0]), y[:, 0] % WIDTH].mean()


def with_keys_of_numbers(w: Any, x: Any, y: Any, key: Any) -> Any:
    draw = jax.vmap(lambda place: jax.random.normal(jax.random.fold_in(key, place), (WIDTH,)))
    return (x @ w + draw(jnp.arange(x.shape[0]))[:, None]).mean()


def scanned(w: Any, x: Any, y: Any, key: Any) -> Any:
    return jax.lax.scan(lambda hidden, _: (jnp.tanh(hidden @ w), None), x, None, length=2)[0].mean()


APART: dict[str, Loss] = {
    "two views": of_both_views,
    "tokens": of_tokens,
    "pairs": of_pairs,
    "own number": by_own_number,
    "keys of numbers": with_keys_of_numbers,
    "layers": scanned,
    "one by one": lambda w, x, y, key: jax.lax.map(lambda row: (row @ w).sum(), x).mean(),
    "noise": lambda w, x, y, key: (x @ w * jax.random.bernoulli(key, 0.5, x.shape)).mean(),
    "mirrored": lambda w, x, y, key: (x[:, ::-1] @ w + jnp.cumsum(x, 1)).mean(),
    "looked up": lambda w, x, y, key: (w[y % WIDTH] * jnp.take_along_axis(x, y[..., None] % WIDTH, 2)).mean(),
}
MIXED: dict[str, tuple[Loss, str]] = {
    "reversed": (lambda w, x, y, key: ((x + x[::-1]) @ w).mean(), "reverses the order of samples"),
    "shuffled": (lambda w, x, y, key: ((x + x[y[:, 0]]) @ w).mean(), "looks up samples of the batch"),
    "drawn order": (lambda w, x, y, key: (jax.random.permutation(key, x) @ w).mean(), "takes sort of"),
    "numbered": (lambda w, x, y, key: ((x @ w).mean((1, 2)) * jnp.arange(len(x))).mean(), "of the numbers of samples"),
    "half": (lambda w, x, y, key: jnp.where(jnp.arange(len(x)) < 4, (x @ w).mean((1, 2)), 0).mean(), "takes lt of"),
    "constant": (lambda w, x, y, key: ((x @ w).mean((1, 2)) * np.linspace(0, 1, len(x))).mean(), "other numbers for"),
    "line": (lambda w, x, y, key: ((x @ w).mean((1, 2)) * jnp.linspace(0, 1, len(x))).mean(), "of several parts"),
    "halves": (lambda w, x, y, key: (lambda a, b: (a @ w - b).mean())(*jnp.split(x, 2)), "some samples and not others"),
    "far pairs": (lambda w, x, y, key: (x.reshape(2, -1, WIDTH)[0] @ w).mean(), "are not neighbours"),
    "rolled": (lambda w, x, y, key: ((x + jnp.roll(x, 1, 0)) @ w).mean(), "some samples and not others"),
}


def check(loss: Loss) -> None:
    def trace_at(rows: int) -> TracedLoss:
        batch = [
            jax.ShapeDtypeStruct((rows, LENGTH, WIDTH), jnp.float32),
            jax.ShapeDtypeStruct((rows, LENGTH), "int32"),
        ]
        key = jax.eval_shape(lambda: jax.random.key(0))
        weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)]
        return trace_loss(lambda weights, batch: loss(weights[0], *batch), weights, [*batch, key])

    check_samples_apart(trace_at, 4, {LENGTH, WIDTH})


@pytest.mark.parametrize("name", APART)
def test_losses_that_treat_samples_apart_are_seen(name: str) -> None:
    check(APART[name])


@pytest.mark.parametrize("name", MIXED)
def test_losses_that_mix_or_number_samples_are_refused(name: str) -> None:
    loss, reason = MIXED[name]
    with pytest.raises(PlanError, match=f"does not treat samples apart: .*{reason}.*takes_mean=True"):
        check(loss)


def test_a_plan_whose_loss_mixes_its_batch_is_not_applied() -> None:
    def mixed(params: Any, x: Any, y: Any) -> Any:
        return small.error(params, small.hidden(params, 0.7 * x + 0.3 * x[::-1]), y)

    with pytest.raises(PlanError, match="reverses the order of samples"):
        small.divided(mixed, (small.weights(), *small.rows()))


def test_masked_means_of_single_samples_are_weighted_as_in_the_whole_batch() -> None:
    """JAX looks up labels of a single sample in other words than those of several."""

    def masked(params: Any, x: Any, y: Any, kinds: Any) -> Any:
        chosen = jnp.take_along_axis(small.hidden(params, x), kinds[:, None], 1)[:, 0]
        return (chosen * (kinds > 1)).sum() / (kinds > 1).sum()

    inputs = ({"up": small.weights()["up"]}, *small.rows(), np.arange(small.ROWS, dtype=np.int32) % 4)
    value, gradients = small.divided(masked, inputs, micro_batch_size=1)
    expected, expected_gradients = jax.value_and_grad(masked)(*inputs)
    assert value == pytest.approx(float(expected), rel=1e-6)
    assert small.largest_error(gradients, expected_gradients) < 2e-6
