"""Losses that microbatches may average are told from those that they may not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_dividing as dividing
import numpy as np
import pytest

from phaze.backends.jax.loss_function import BatchShare
from phaze.backends.jax.mean_over_samples import read_weighting
from phaze.backends.jax.traced_loss import TracedLoss, trace_loss
from phaze.errors import PlanError

Loss = Callable[[Any, Any, Any], Any]


def net(w: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ w)


def with_auxiliary(w: Any, x: Any, y: Any) -> Any:
    def layer(carried: Any, weight: Any) -> Any:
        hidden = net(weight, carried[0])
        return (hidden, carried[1] + 0.01 * (hidden**2).mean()), None

    (hidden, auxiliary), _ = jax.lax.scan(layer, (x, 0.0), jnp.stack([w, w]))
    return hidden.mean() + auxiliary


MEANS: dict[str, Loss] = {
    "mean": lambda w, x, y: (net(w, x) ** 2).mean(),
    "sum over a number": lambda w, x, y: (net(w, x) ** 2).sum() / x.shape[0],
    "sum over a counted number": lambda w, x, y: net(w, x).mean(-1).sum() / jnp.ones(y.shape).sum(),
    "regularised": lambda w, x, y: (net(w, x) ** 2).mean() + 0.1 * (w**2).sum(),
    "mapped": lambda w, x, y: jax.vmap(lambda sample: (net(w, sample) ** 2).mean())(x).mean(),
    "one after the other": lambda w, x, y: jax.lax.map(lambda sample: (net(w, sample) ** 2).mean(), x).mean(),
    "checkpointed": lambda w, x, y: jax.checkpoint(lambda weight: (net(weight, x) ** 2).mean())(w),
    "cross entropy": lambda w, x, y: -jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[..., None], -1).mean(),
    "auxiliary losses of layers": with_auxiliary,
    "associative": lambda w, x, y: jax.lax.associative_scan(jnp.add, net(w, x[:, :4]), axis=1).mean(),
}
OTHERS: dict[str, tuple[Loss, str]] = {
    "weighted by itself": (lambda w, x, y: net(w, x).sum() / (net(w, x) ** 2).sum(), "divides by a sum over samples"),
    "variance of inputs": (lambda w, x, y: net(w, x / x.std(0)).mean(), "counts what depends on another count"),
    "batch norm": (lambda w, x, y: (x @ w - (x @ w).mean(0)).mean(), "as batch normalisation does"),
    "root": (lambda w, x, y: jnp.sqrt(((x @ w) ** 2).mean()), "takes sqrt of a sum"),
    "contrast": (lambda w, x, y: jax.nn.log_softmax(jnp.einsum("bsd,csd->bc", x @ w, x)).mean(), "compares samples"),
    "largest": (lambda w, x, y: (x @ w).max(), "takes reduce_max over the samples"),
    "running": (lambda w, x, y: jnp.cumsum(x @ w, 0).mean(), "cumsum runs along the samples"),
    "learned and counted": (
        lambda w, x, y: net(w, x).sum() / (jnp.exp(w[0, 0]) * len(x)),
        "a factor of it is made of parameters and of the number of samples",
    ),
    "divided regulariser": (lambda w, x, y: ((x @ w).sum() + w.sum()) / len(x), "takes add of a sum"),
}


COUNTED: dict[str, Loss] = {
    "sum": lambda w, x, y: (net(w, x) ** 2).sum(),
    "masked": lambda w, x, y: (net(w, x).mean(-1) * (y > 0)).sum() / (y > 0).sum(),
    "guarded": lambda w, x, y: (net(w, x).mean(-1) * (y > 3)).sum() / jnp.maximum((y > 3).sum(), 1),
    "mean where": lambda w, x, y: jnp.mean(net(w, x).mean(-1), where=y > 0),
    "weights": lambda w, x, y: (net(w, x).mean(-1) * ((y > 0) / (y > 0).sum())).sum(),
    "mean over mean": lambda w, x, y: (net(w, x).mean(-1) * (y > 0)).mean() / (y > 0).mean(),
    "normal inputs": lambda w, x, y: (net(w, x - x.mean(0)) ** 2).mean(),
    "regularised by a count": lambda w, x, y: (net(w, x) ** 2).mean() + (w**2).sum() / (y > 0).sum(),
}


def traces(loss: Loss) -> tuple[TracedLoss, TracedLoss]:
    def trace_at(size: int) -> TracedLoss:
        batch = [jax.ShapeDtypeStruct((size, 5, 8), jnp.float32), jax.ShapeDtypeStruct((size, 5), jnp.int32)]
        return trace_loss(
            lambda weights, batch: loss(weights[0], *batch), [jax.ShapeDtypeStruct((8, 8), jnp.float32)], batch
        )

    return trace_at(3), trace_at(6)


@pytest.mark.parametrize("name", MEANS)
def test_means_over_samples_are_seen(name: str) -> None:
    read_weighting(*traces(MEANS[name]), (BatchShare.ROWS, BatchShare.ROWS))


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_are_refused_with_the_reason(name: str) -> None:
    loss, reason = OTHERS[name]
    with pytest.raises(PlanError, match=f"no mean or sum over samples: .*{reason}.*takes_mean=True"):
        read_weighting(*traces(loss), (BatchShare.ROWS, BatchShare.ROWS))


@pytest.mark.parametrize("name", COUNTED)
def test_sums_and_means_over_counted_samples_are_weighted_as_in_the_whole_batch(name: str) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((dividing.ROWS, 5, 8)).astype(np.float32)
    inputs = (random.standard_normal((8, 8)).astype(np.float32), x, random.integers(-3, 5, (dividing.ROWS, 5)))
    inputs = (*inputs[:2], np.where(np.arange(dividing.ROWS)[:, None] < 3, 0, inputs[2]).astype(np.int32))
    value, gradients = dividing.divided(COUNTED[name], inputs)
    expected, expected_gradients = jax.jit(jax.value_and_grad(COUNTED[name]))(*inputs)
    assert value == pytest.approx(float(expected), rel=1e-6)
    assert dividing.largest_error(gradients, expected_gradients) < 2e-6
