"""Small models for `jax_zoo.py` as modules of linen, nnx and Equinox, and the list of all models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax_zoo_models import (
    FUNCTIONS,
    HEADS,
    HIDDEN,
    LENGTH,
    WIDTH,
    WORDS,
    Tree,
    ZooModel,
    cross_entropy,
    images,
    optimizer,
    words,
)

__all__ = ["MODELS"]


class LinenBlock(linen.Module):
    """A layer of linen's own parts."""

    dropout: float = 0.0
    is_causal: bool = True

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = linen.make_causal_mask(x[..., 0]) if self.is_causal else None
        y = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(HEADS)(y, mask=mask)
        hidden = linen.gelu(linen.Dense(HIDDEN)(linen.LayerNorm()(x)))
        return x + linen.Dropout(self.dropout, deterministic=self.dropout == 0)(linen.Dense(WIDTH)(hidden))


class LinenGpt(linen.Module):
    """GPT in linen, with its loss."""

    dropout: float = 0.0

    @linen.compact
    def __call__(self, batch: Tree) -> jax.Array:
        x = linen.Embed(WORDS, WIDTH)(batch["ids"])
        for _ in range(2):
            x = LinenBlock(self.dropout)(x)
        return cross_entropy(linen.Dense(WORDS)(linen.LayerNorm()(x)), batch["labels"])


class LinenScan(linen.Module):
    """The same, its checkpointed blocks as one scan."""

    @linen.compact
    def __call__(self, batch: Tree) -> jax.Array:
        class Carried(linen.Module):
            @linen.compact
            def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
                return LinenBlock()(x), None

        scanned = linen.scan(linen.remat(Carried), variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        x, _ = scanned()(linen.Embed(WORDS, WIDTH)(batch["ids"]), None)
        return cross_entropy(linen.Dense(WORDS)(linen.LayerNorm()(x)), batch["labels"])


class LinenVit(linen.Module):
    """A vision transformer: patches by a convolution, a token of its own for the kind."""

    @linen.compact
    def __call__(self, pixels: jax.Array, kinds: jax.Array) -> jax.Array:
        x = linen.Conv(WIDTH, (4, 4), strides=(4, 4))(pixels).reshape(pixels.shape[0], -1, WIDTH)
        token = self.param("token", linen.initializers.normal(0.1), (1, 1, WIDTH))
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, WIDTH)), x], 1)
        x = x + self.param("positions", linen.initializers.normal(0.1), x.shape[1:])
        for _ in range(2):
            x = LinenBlock(is_causal=False)(x)
        return cross_entropy(linen.Dense(10)(linen.LayerNorm()(x)[:, 0]), kinds)


def linen_model(module: linen.Module, *batch: Tree) -> ZooModel:
    """A linen module with its loss."""
    params = jax.jit(module.init)(jax.random.key(0), *batch)["params"]
    return ZooModel(
        model=module, start=params, batch=batch, loss=lambda params, *batch: module.apply({"params": params}, *batch)
    )


def linen_dropout() -> ZooModel:
    """GPT in linen as a loss that takes the key of its dropout."""
    module = LinenGpt(0.2)
    key = jax.random.key(7)
    params = jax.jit(module.init)({"params": key, "dropout": key}, words())["params"]

    def loss(params: Tree, key: jax.Array, batch: Tree) -> jax.Array:
        return module.apply({"params": params}, batch, rngs={"dropout": key})

    return ZooModel(model=loss, start=params, batch=(jax.random.PRNGKey(7), words()))


class Residual(linen.Module):
    """A small residual network with batch norms."""

    @linen.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        x = linen.Conv(WIDTH, (3, 3))(pixels)
        for stride in (1, 2):
            y = linen.Conv(WIDTH, (3, 3), strides=(stride, stride), use_bias=False)(x)
            y = linen.relu(linen.BatchNorm(use_running_average=False, momentum=0.9)(y))
            y = linen.BatchNorm(use_running_average=False)(linen.Conv(WIDTH, (3, 3), use_bias=False)(y))
            shortcut = x if stride == 1 else linen.Conv(WIDTH, (1, 1), strides=(2, 2))(x)
            x = linen.relu(shortcut + y)
        return linen.Dense(10)(x.mean((1, 2)))


class StatisticsState(TrainState):
    """A state with statistics of batches."""

    batch_stats: Any


def batch_norms() -> ZooModel:
    """The residual network as a whole step."""
    module, (pixels, kinds) = Residual(), images()
    variables = jax.jit(module.init)(jax.random.key(0), pixels)
    state = StatisticsState.create(
        apply_fn=module.apply, params=variables["params"], tx=optimizer(), batch_stats=variables["batch_stats"]
    )

    def step(state: StatisticsState, pixels: jax.Array, kinds: jax.Array) -> tuple[StatisticsState, jax.Array]:
        def loss_of(params: Tree) -> tuple[jax.Array, Tree]:
            given = {"params": params, "batch_stats": state.batch_stats}
            logits, changed = state.apply_fn(given, pixels, mutable=["batch_stats"])
            return cross_entropy(logits, kinds), changed

        (loss, changed), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients).replace(batch_stats=changed["batch_stats"]), loss

    return ZooModel(model=step, start=state, batch=(pixels, kinds), is_step=True)


class NnxBlock(nnx.Module):
    """A layer of nnx's own parts."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class NnxGpt(nnx.Module):
    """GPT in nnx, with its loss."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, batch: Tree) -> jax.Array:
        x = self.embed(batch["ids"])
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x), batch["labels"])


def nnx_gpt() -> ZooModel:
    """An nnx module, given as it is."""
    module = NnxGpt(nnx.Rngs(0))
    definition, state, rest = nnx.split(module, nnx.Param, ...)
    return ZooModel(
        model=module,
        start=state,
        batch=(words(),),
        loss=lambda given, *batch: nnx.merge(definition, given, rest)(*batch),
    )


def equinox_gpt() -> ZooModel:
    """A module of Equinox, whose leaves are arrays and functions, and a loss by `vmap` over samples."""
    import equinox as eqx  # here, because the other models do without

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        feed: eqx.nn.MLP
        norms: list[eqx.nn.LayerNorm]

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
            self.feed = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, jax.nn.gelu, key=keys[1])
            self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]

        def __call__(self, x: jax.Array) -> jax.Array:
            y = jax.vmap(self.norms[0])(x)
            x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((LENGTH, LENGTH), bool)))
            return x + jax.vmap(lambda row: self.feed(self.norms[1](row)))(x)

    class Gpt(eqx.Module):
        embed: eqx.nn.Embedding
        blocks: list[Block]
        head: eqx.nn.Linear

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key, 4)
            self.embed = eqx.nn.Embedding(WORDS, WIDTH, key=keys[0])
            self.blocks = [Block(keys[1]), Block(keys[2])]
            self.head = eqx.nn.Linear(WIDTH, WORDS, key=keys[3])

        def __call__(self, ids: jax.Array) -> jax.Array:
            x = jax.vmap(self.embed)(ids)
            for block in self.blocks:
                x = block(x)
            return jax.vmap(self.head)(x)

    def loss(model: Gpt, batch: Tree) -> jax.Array:
        return cross_entropy(jax.vmap(model)(batch["ids"]), batch["labels"])

    return ZooModel(model=loss, start=Gpt(jax.random.key(0)), batch=(words(),))


MODELS: dict[str, Callable[[], ZooModel]] = {
    **FUNCTIONS,
    "linen gpt": lambda: linen_model(LinenGpt(), words()),
    "linen, scanned": lambda: linen_model(LinenScan(), words()),
    "linen, dropout": linen_dropout,
    "linen vit": lambda: linen_model(LinenVit(), *images()),
    "linen cnn, batch norms": batch_norms,
    "nnx gpt": nnx_gpt,
    "equinox gpt": equinox_gpt,
}
"""By the names of the zoo's rows."""
