"""Fused parameters are seen as parts side by side by all that can read them so; layers are cut where least crosses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phaze.backends.jax.segments import segments
from phaze.backends.jax.traced import evaluate, trace
from phaze.backends.jax.views import View, with_views

Take = Callable[[Any], list[Any]]

FORMS: dict[str, Take] = {
    "split": lambda x: jnp.split(x, 3, axis=-1),
    "slice": lambda x: [x[..., :4], x[..., 4:8], x[..., 8:]],
    "reshape": lambda x: [x.reshape(2, 5, 3, 2, 2)[:, :, 1]],
    "elementwise": lambda x: jnp.split(jnp.exp(-x) * 2, 3, axis=-1),
    "other slices": lambda x: [x[..., :3], x[..., 2:7:2]],
    "other splits": lambda x: jnp.split(x, [2, 9], axis=-1),
    "other reshapes": lambda x: [x.reshape(2, 5, 2, 6)[..., 0]],
    "sums": lambda x: [jnp.cumsum(x, axis=-1)[..., 4]],
    "products": lambda x: [x @ jnp.arange(12.0)],
}


@pytest.mark.parametrize("form", FORMS)
def test_views_give_what_flat_parameters_give(form: str) -> None:
    def loss(parameters: Any, batch: Any) -> Any:
        made = batch[0] @ parameters[0] + parameters[1]
        return sum((index + 1) * (part**2).sum() for index, part in enumerate(FORMS[form](made)))

    random = np.random.default_rng(0)
    weight, bias, x = (jnp.asarray(random.standard_normal(size), "f") for size in ((6, 12), (12,), (2, 5, 6)))
    traced = trace(loss, [weight, bias], [x])
    first, second = traced.parameters
    equations = with_views(traced.equations, {first: View(1, 3), second: View(0, 3)})
    seen = {first: weight.reshape(6, 3, 4), second: bias.reshape(3, 4)}
    (found,) = evaluate(equations, [traced.loss], traced.start([x]), seen.__getitem__)
    np.testing.assert_allclose(found, loss([weight, bias], [x]), rtol=1e-5)


def test_a_norm_belongs_to_the_layer_that_reads_it() -> None:
    def loss(parameters: Any, batch: Any) -> Any:
        x = batch[0]
        for weight in parameters:
            normal = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)
            x = x + jax.nn.relu(normal @ weight)
        return x.mean()

    weights, x = [jnp.ones((4, 4))] * 3, jnp.ones((2, 4))
    traced = trace(loss, weights, [x])
    assert [len(segment.leaves) for segment in segments(traced, (0, 1, 2))] == [1, 1, 1]
