"""Pipelines of equal stages over a scan of layers, in GPipe's order (Huang et al., arXiv:1811.06965).

All devices run the same program. In tick t stage s has microbatch t - s: the first stage makes what enters the layers,
the others take what they were sent, the last computes the loss. With m microbatches and p stages there are m + p - 1
ticks; a stage without a microbatch does nothing. Backward runs the same ticks in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phaze.backends.jax.losses import Arrangement, after_layers, before_layers, run_layers

__all__ = ["pipelined_loss"]


def pipelined_loss(
    how: Arrangement, parameters: Sequence[Any], micro_batches: Sequence[Any], is_whole: Sequence[bool], stages: int
) -> Any:
    """The mean loss of all microbatches on the last stage, zero on the others.

    `micro_batches` have a leading axis of microbatches, but for those that are whole.
    """
    import jax
    import jax.numpy as jnp

    scan = how.traced.scan
    assert scan is not None
    stage = jax.lax.axis_index("pp")
    count = next(leaf.shape[0] for leaf, whole in zip(micro_batches, is_whole, strict=True) if not whole)
    stacked = [parameters[scan.stacked[place]] for place in sorted(scan.stacked)]
    dtype = how.traced.loss.aval.dtype
    following = [(one, one + 1) for one in range(stages - 1)]

    def batch_of(number: Any) -> list[Any]:
        at = jnp.clip(number, 0, count - 1)
        pairs = zip(micro_batches, is_whole, strict=True)
        return [leaf if whole else jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False) for leaf, whole in pairs]

    def settled(values: Sequence[Any]) -> list[Any]:
        return [how.at_boundary(value) for value in values]

    def tick(received: list[Any], time: Any) -> tuple[list[Any], Any]:
        is_busy = (time >= stage) & (time - stage < count)
        carried, loss = jax.lax.cond(
            is_busy, lambda: work(received, time - stage), lambda: (list(received), jnp.zeros((), dtype))
        )
        return settled(carried), loss

    def work(received: list[Any], number: Any) -> tuple[list[Any], Any]:
        batch = batch_of(number)
        constants, _ = before_layers(how, scan, parameters, batch)
        entering = jax.lax.cond(
            stage == 0, lambda: before_layers(how, scan, parameters, batch)[1], lambda: list(received)
        )
        carried, _ = run_layers(how, scan, constants, settled(entering), stacked)
        results = dict(zip(scan.results, carried, strict=True))
        loss = jax.lax.cond(
            stage == stages - 1,
            lambda: after_layers(how, scan, parameters, batch, results),
            lambda: jnp.zeros((), dtype),
        )
        return carried, loss

    def tick_and_send(received: list[Any], time: Any) -> tuple[list[Any], Any]:
        carried, loss = tick(received, time)
        return settled([jax.lax.ppermute(value, "pp", following) for value in carried]), loss

    nothing = [jnp.zeros(variable.aval.shape, variable.aval.dtype) for variable in scan.carried]
    ticks = count + stages - 1
    received, losses = jax.lax.scan(tick_and_send, nothing, jnp.arange(ticks - 1))
    _, last = tick(received, ticks - 1)
    return (losses.sum() + last) / count
