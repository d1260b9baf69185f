"""One training step on every device: microbatches, reduction of gradients, the update of the shards that it holds.

ZeRO-0 reduces gradients once and updates everything everywhere; ZeRO-1 scatters them once, updates shards and gathers
the parameters; ZeRO-2 scatters after every microbatch; ZeRO-3 stores shards of the parameters, and the gathers of the
passes scatter gradients by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from phaze.backends.jax.collectives import gathered, own_shard, scattered
from phaze.backends.jax.losses import Arrangement, micro_batch_loss
from phaze.backends.jax.optimizers import Optimizer
from phaze.backends.jax.pipeline import pipelined_loss
from phaze.backends.jax.stored import Stored

__all__ = ["StepRules", "TrainState", "local_gradients", "local_step"]


class TrainState(NamedTuple):
    """What a step takes and returns: parameters as they are stored, the optimizer's state, and the master copy.

    `parameters` and `master` are flat, in the order of the user's leaves; `master` is empty where the optimizer updates
    the parameters themselves.
    """

    parameters: list[Any]
    optimizer: Any
    master: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRules:
    """How the devices of a mesh divide a step."""

    how: Arrangement
    optimizer: Optimizer
    data: int
    stages: int
    zero: int
    micro_batch_size: int
    is_whole: tuple[bool, ...]
    gradient_dtype: Any


def local_gradients(rules: StepRules, parameters: Sequence[Any], batch: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The mean loss of the whole batch, and this device's part of its gradients."""
    import jax
    import jax.numpy as jnp

    pairs = list(zip(batch, rules.is_whole, strict=True))
    rows = next(leaf.shape[0] for leaf, whole in pairs if not whole)
    count = rows // rules.micro_batch_size
    cut = [leaf if whole else leaf.reshape(count, rules.micro_batch_size, *leaf.shape[1:]) for leaf, whole in pairs]
    if rules.stages > 1:
        outside = [
            value if how.is_stacked else gathered(how, value, "pp")
            for how, value in zip(rules.how.stored, parameters, strict=True)
        ]
        loss, gradients = jax.value_and_grad(
            lambda own: pipelined_loss(rules.how, own, cut, rules.is_whole, rules.stages)
        )(outside)
        gradients = [_kept(rules, how, one) for how, one in zip(rules.how.stored, gradients, strict=True)]
        loss = jax.lax.psum(loss, "pp")
    else:
        loss, gradients = _accumulated(rules, parameters, cut, count)
    reduced = [_reduced(rules, how, one) for how, one in zip(rules.how.stored, gradients, strict=True)]
    scale = 1 / rules.data
    return jax.lax.psum(loss, "dp") * scale, [one * jnp.asarray(scale, one.dtype) for one in reduced]


def _accumulated(rules: StepRules, parameters: Sequence[Any], cut: Sequence[Any], count: int) -> tuple[Any, list[Any]]:
    """Losses and gradients of microbatches, one after the other; means."""
    import jax
    import jax.numpy as jnp

    def once(batch: Sequence[Any]) -> tuple[Any, list[Any]]:
        loss, gradients = jax.value_and_grad(lambda own: micro_batch_loss(rules.how, own, batch))(list(parameters))
        return loss, [_kept(rules, how, one) for how, one in zip(rules.how.stored, gradients, strict=True)]

    def batch_at(number: Any) -> list[Any]:
        pairs = zip(cut, rules.is_whole, strict=True)
        return [leaf if whole else jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False) for leaf, whole in pairs]

    if count == 1:
        return once([leaf if whole else leaf[0] for leaf, whole in zip(cut, rules.is_whole, strict=True)])

    def add(sums: tuple[Any, list[Any]], number: Any) -> tuple[tuple[Any, list[Any]], None]:
        loss, gradients = once(batch_at(number))
        return (sums[0] + loss, [a + b for a, b in zip(sums[1], gradients, strict=True)]), None

    shapes = jax.eval_shape(lambda: once(batch_at(0)))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    kept = [_laid_out(rules, how, one) for how, one in zip(rules.how.stored, zeros[1], strict=True)]
    (loss, gradients), _ = jax.lax.scan(add, (zeros[0], kept), jnp.arange(count))
    return loss / count, [one / count for one in gradients]


def _kept(rules: StepRules, how: Stored, gradient: Any) -> Any:
    """A microbatch's gradient as it is added up: in the type of gradients; with ZeRO-2 this device's shard of the sum.

    Pipelines add their microbatches up by themselves.
    """
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


def local_step(rules: StepRules, state: TrainState, batch: Sequence[Any]) -> tuple[TrainState, Any]:
    """The next state, and the loss of this one."""
    loss, gradients = local_gradients(rules, state.parameters, batch)
    stored = rules.how.stored
    owned = state.master or [
        own_shard(how, value, rules.data) if rules.zero in (1, 2) else value
        for how, value in zip(stored, state.parameters, strict=True)
    ]
    changes, optimizer = rules.optimizer.update(gradients, state.optimizer, owned)
    updated = [value + change.astype(value.dtype) for value, change in zip(owned, changes, strict=True)]
    cast = [new.astype(old.dtype) for new, old in zip(updated, state.parameters, strict=True)]
    if rules.zero in (1, 2):
        cast = [gathered(how, value) for how, value in zip(stored, cast, strict=True)]
    parameters = [_laid_out(rules, how, value) for how, value in zip(stored, cast, strict=True)]
    return TrainState(parameters, optimizer, updated if state.master else []), loss
