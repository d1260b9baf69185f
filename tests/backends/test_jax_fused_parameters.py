"""Fused parameters are seen as parts side by side by all equations that can read them so."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from phaze.backends.jax.tensor_parts import FusedView, with_fused_views
from phaze.backends.jax.traced_loss import evaluate, trace_loss

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
    trace = trace_loss(loss, [weight, bias], [x])
    first, second = trace.parameters
    equations = with_fused_views(trace.equations, {first: FusedView(1, 3), second: FusedView(0, 3)})
    seen = {first: weight.reshape(6, 3, 4), second: bias.reshape(3, 4)}
    (loss_on_views,) = evaluate(equations, [trace.loss], trace.known_values([x]), seen.__getitem__)
    np.testing.assert_allclose(loss_on_views, loss([weight, bias], [x]), rtol=1e-5)
