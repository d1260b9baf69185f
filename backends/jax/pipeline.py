"""Pipelines of equal stages over a scan of layers, in GPipe's order (Huang et al., arXiv:1811.06965).

All devices run the same program. In tick t stage s has microbatch t - s: the first stage makes what enters the layers,
the others take what they were sent, the last computes the loss. With m microbatches and p stages there are m + p - 1
ticks; a stage without a microbatch does nothing. Backward runs the same ticks in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phaze.backends.jax.losses import Arrangement, after_layers, before_layers, run_layers
from phaze.backends.jax.micro_batches import MicroBatches

__all__ = ["pipelined_loss"]


def pipelined_loss(how: Arrangement, exact: Sequence[Any], dtype: Any, parts: MicroBatches, stages: int) -> Any:
    """The mean loss of all microbatches on the last stage, zero on the others, in fp32.

    Every tick reads the `exact` parameters in the compute type.
    """
    import jax
    import jax.numpy as jnp

    scan = how.traced.scan
    assert scan is not None
    stage, count = jax.lax.axis_index("pp"), parts.count
    zero = jnp.zeros((), jnp.float32)
    following = [(one, one + 1) for one in range(stages - 1)]

    def settled(values: Sequence[Any]) -> list[Any]:
        return [how.at_boundary(value) for value in values]

    def tick(received: list[Any], time: Any) -> tuple[list[Any], Any]:
        is_busy = (time >= stage) & (time - stage < count)
        carried, loss = jax.lax.cond(is_busy, lambda: work(received, time - stage), lambda: (list(received), zero))
        return settled(carried), loss

    def work(received: list[Any], number: Any) -> tuple[list[Any], Any]:
        batch = parts.at(jnp.clip(number, 0, count - 1))
        parameters = [value.astype(dtype) for value in exact]
        stacked = [parameters[scan.stacked[place]] for place in sorted(scan.stacked)]
        constants, _ = before_layers(how, scan, parameters, batch)
        entering = jax.lax.cond(
            stage == 0, lambda: before_layers(how, scan, parameters, batch)[1], lambda: list(received)
        )
        carried, _ = run_layers(how, scan, constants, settled(entering), stacked)
        results = dict(zip(scan.results, carried, strict=True))
        loss = jax.lax.cond(
            stage == stages - 1,
            lambda: after_layers(how, scan, parameters, batch, results).astype(jnp.float32),
            lambda: zero,
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
