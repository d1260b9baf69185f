"""Gradients of one step on every device: microbatches, and the reduction that the plan's ZeRO stage asks for.

ZeRO-0 reduces gradients once; ZeRO-1 scatters them once; ZeRO-2 scatters after every microbatch; ZeRO-3 stores shards
of the parameters, and the gathers of the passes scatter gradients by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phaze.backends.jax.collectives import gathered, scattered
from phaze.backends.jax.losses import Arrangement, micro_batch_loss
from phaze.backends.jax.micro_batches import MicroBatches, Share, cut
from phaze.backends.jax.pipeline import pipelined_loss
from phaze.backends.jax.stored import Stored

__all__ = ["StepRules", "local_gradients"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRules:
    """How the devices of a mesh divide a step."""

    how: Arrangement
    data: int
    stages: int
    zero: int
    micro_batch_size: int
    shares: tuple[Share, ...]
    batch_dtypes: tuple[Any, ...]
    compute_dtype: Any
    gradient_dtype: Any


def local_gradients(rules: StepRules, parameters: Sequence[Any], batch: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The mean loss of the whole batch in fp32, and this device's part of its gradients."""
    import jax
    import jax.numpy as jnp

    parts = cut(batch, rules.shares, rules.micro_batch_size, rules.data, rules.batch_dtypes)
    loss, gradients = (_pipelined if rules.stages > 1 else _accumulated)(rules, parameters, parts)
    reduced = [_reduced(rules, how, one) for how, one in zip(rules.how.stored, gradients, strict=True)]
    scale = 1 / rules.data
    return jax.lax.psum(loss, "dp") * scale, [one * jnp.asarray(scale, one.dtype) for one in reduced]


def _pipelined(rules: StepRules, parameters: Sequence[Any], parts: MicroBatches) -> tuple[Any, list[Any]]:
    """Microbatches through all stages; their gradients are added up in the type of gradients.

    For that, parameters enter in that type and every tick reads them in the compute type again.
    """
    import jax

    stored = rules.how.stored
    own = [v if how.is_stacked else gathered(how, v, "pp") for how, v in zip(stored, parameters, strict=True)]

    def loss(exact: Sequence[Any]) -> Any:
        return pipelined_loss(rules.how, exact, rules.compute_dtype, parts, rules.stages)

    found, gradients = jax.value_and_grad(loss)([value.astype(rules.gradient_dtype) for value in own])
    return jax.lax.psum(found, "pp"), [_kept(rules, how, one) for how, one in zip(stored, gradients, strict=True)]


def _accumulated(rules: StepRules, parameters: Sequence[Any], parts: MicroBatches) -> tuple[Any, list[Any]]:
    """Losses and gradients of microbatches, one after the other; means."""
    import jax
    import jax.numpy as jnp

    def once(number: Any) -> tuple[Any, list[Any]]:
        batch = parts.at(number)
        loss, gradients = jax.value_and_grad(lambda own: micro_batch_loss(rules.how, own, batch))(list(parameters))
        kept = [_kept(rules, how, one) for how, one in zip(rules.how.stored, gradients, strict=True)]
        return loss.astype(jnp.float32), kept

    if parts.count == 1:
        return once(0)

    def add(sums: tuple[Any, list[Any]], number: Any) -> tuple[tuple[Any, list[Any]], None]:
        loss, gradients = once(number)
        return (sums[0] + loss, [a + b for a, b in zip(sums[1], gradients, strict=True)]), None

    shapes = jax.eval_shape(lambda: once(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    kept = [_laid_out(rules, how, one) for how, one in zip(rules.how.stored, zeros[1], strict=True)]
    (loss, gradients), _ = jax.lax.scan(add, (zeros[0], kept), jnp.arange(parts.count))
    return loss / parts.count, [one / parts.count for one in gradients]


def _kept(rules: StepRules, how: Stored, gradient: Any) -> Any:
    """A gradient as it is added up: in the type of gradients; with ZeRO-2 this device's shard of the sum."""
    own = _laid_out(rules, how, gradient.astype(rules.gradient_dtype))
    return scattered(how, own) if rules.zero == 2 else own


def _laid_out(rules: StepRules, how: Stored, value: Any) -> Any:
    import jax

    if rules.how.tensor == 1:
        return value
    return jax.lax.with_sharding_constraint(value, how.spec(tensor="tp"))


def _reduced(rules: StepRules, how: Stored, gradient: Any) -> Any:
    """What is left to add up over stages and copies."""
    import jax

    if rules.stages > 1 and not how.is_stacked:
        gradient = scattered(how, gradient, "pp")
    if rules.data == 1:
        return gradient
    if rules.zero == 0 or (rules.zero == 3 and how.shard_dim is None):
        return jax.lax.psum(gradient, "dp")
    return scattered(how, gradient) if rules.zero == 1 else gradient
