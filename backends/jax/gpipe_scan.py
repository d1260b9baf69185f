"""Pipelines of equal stages over a scan of layers, in GPipe's order (Huang et al., arXiv:1811.06965).

All devices run the same program. In tick t stage s has microbatch t - s: the first stage makes what enters the layers,
the others take what they were sent, the last computes the loss. With m microbatches and p stages there are m + p - 1
ticks; a stage without a microbatch does nothing. Backward runs the same ticks in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from phaze.backends.jax.loss_function import MicroBatches
from phaze.backends.jax.micro_batch_loss import (
    ArrangedLoss,
    after_layers,
    before_layers,
    run_layers,
    slices_beside_parameters,
)

__all__ = ["pipelined_loss"]


def pipelined_loss(
    arranged: ArrangedLoss,
    exact_parameters: Sequence[jax.Array],
    compute_dtype: DTypeLike,
    micro_batches: MicroBatches,
    pp: int,
) -> jax.Array:
    """The mean loss of all microbatches on the last of `pp` stages, zero on the others, in fp32.

    Every tick reads the exact parameters in the compute type, so that their gradients add up in the exact type.
    """
    scan = arranged.trace.scan
    assert scan is not None
    stage, count = jax.lax.axis_index("pp"), micro_batches.count
    no_loss = jnp.zeros((), jnp.float32)
    next_stages = [(sender, sender + 1) for sender in range(pp - 1)]

    def at_boundary(values: Sequence[jax.Array]) -> list[jax.Array]:
        return [arranged.at_boundary(value) for value in values]

    def tick(received: list[jax.Array], time: jax.Array | int) -> tuple[list[jax.Array], jax.Array]:
        is_busy = (time >= stage) & (time - stage < count)
        carried, loss = jax.lax.cond(is_busy, lambda: work(received, time - stage), lambda: (list(received), no_loss))
        return at_boundary(carried), loss

    def work(received: list[jax.Array], number: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        # An idle stage does not take this branch, but the compiler may evaluate it: its number is brought into range.
        batch = micro_batches.arguments_of(jnp.clip(number, 0, count - 1))
        parameters = [value.astype(compute_dtype) for value in exact_parameters]
        stacked = [parameters[scan.stacked[place]] for place in sorted(scan.stacked)]
        constants, _ = before_layers(arranged, scan, parameters, batch)
        entering = jax.lax.cond(
            stage == 0, lambda: before_layers(arranged, scan, parameters, batch)[1], lambda: list(received)
        )
        layers = scan.length // pp
        others = [
            jax.lax.dynamic_slice_in_dim(value, stage * layers, layers)
            for value in slices_beside_parameters(arranged, scan, parameters, batch)
        ]
        carried, _ = run_layers(arranged, scan, constants, at_boundary(entering), stacked, others)
        results = dict(zip(scan.results, carried, strict=True))
        loss = jax.lax.cond(
            stage == pp - 1,
            lambda: after_layers(arranged, scan, parameters, batch, results).astype(jnp.float32),
            lambda: no_loss,
        )
        return carried, loss

    def tick_and_send(received: list[jax.Array], time: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        carried, loss = tick(received, time)
        return at_boundary([jax.lax.ppermute(value, "pp", next_stages) for value in carried]), loss

    nothing = [jnp.zeros(variable.aval.shape, variable.aval.dtype) for variable in scan.carried]
    ticks = count + pp - 1
    received, losses = jax.lax.scan(tick_and_send, nothing, jnp.arange(ticks - 1))
    # The last tick stands behind the scan because nothing is sent after it.
    _, last_loss = tick(received, ticks - 1)
    return (losses.sum() + last_loss) / count
