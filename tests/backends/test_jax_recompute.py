"""What backward computes again stands among the equations of a trace in their order."""

from typing import Any

import jax
import jax.numpy as jnp

from phaze.backends.jax.recompute_in_backward import with_recomputed_attention
from phaze.backends.jax.traced_loss import read_variables, trace_loss


def test_recomputed_attention_stands_before_what_reads_it_and_behind_what_it_reads() -> None:
    def loss(parameters: Any, batch: Any) -> Any:
        x = batch[0]
        for p in parameters:
            query, key, value = (x @ p[name] for name in ("q", "k", "v"))
            x = x + (jax.nn.softmax(query @ key.swapaxes(1, 2)) @ value) @ p["o"]
        return x.mean()

    weights = [{name: jnp.ones((4, 4)) for name in ("q", "k", "v", "o")}] * 2
    structure = jax.tree.structure(weights)
    trace = trace_loss(
        lambda flat, batch: loss(jax.tree.unflatten(structure, flat), batch),
        jax.tree.leaves(weights),
        [jnp.ones((2, 3, 4))],
    )
    arranged = with_recomputed_attention(trace.equations, trace.parameters, [trace.loss])
    made = {*trace.parameters, *trace.batch, *trace.constants}
    for equation in arranged:
        assert made.issuperset(read_variables(equation))
        made.update(equation.outvars)
    assert trace.loss in made
    assert len(arranged) < len(trace.equations)
