"""A traced loss is cut into layers where least crosses."""

from typing import Any

import jax
import jax.numpy as jnp

from phaze.backends.jax.traced_loss import cut_into_layers, trace_loss


def test_a_norm_belongs_to_the_layer_that_reads_it() -> None:
    def loss(parameters: Any, batch: Any) -> Any:
        x = batch[0]
        for weight in parameters:
            normal = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)
            x = x + jax.nn.relu(normal @ weight)
        return x.mean()

    weights, x = [jnp.ones((4, 4))] * 3, jnp.ones((2, 4))
    trace = trace_loss(loss, weights, [x])
    assert [len(segment.leaving) for segment in cut_into_layers(trace, (0, 1, 2))] == [1, 1, 1]
