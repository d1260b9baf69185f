"""Small JAX losses with real weights: a transformer written plainly, in linen, and as a scan over stacked layers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax_models import attend, cross_entropy, layer_norm

LENGTH, WIDTH, HEADS, SIZE, HIDDEN, WORDS, LAYERS = 16, 32, 8, 8, 128, 64, 2

Tree = Any


def block(p: Tree, x: jax.Array) -> jax.Array:
    """Attention with separate projections, and an MLP with biases."""
    y = layer_norm(x, p["norm_1"])
    query, key, value = (jnp.einsum("bsi,ihd->bshd", y, p[name]) for name in ("q", "k", "v"))
    x = x + jnp.einsum("bshd,hdi->bsi", attend(query, key, value), p["o"])
    hidden = jax.nn.gelu(layer_norm(x, p["norm_2"]) @ p["up"] + p["up_bias"])
    return x + hidden @ p["down"] + p["down_bias"]


def shapes(*, words: int = WORDS, layers: int = LAYERS, stacked: bool = False) -> Tree:
    """The parameters' shapes."""
    lead = (layers,) if stacked else ()

    def norm(*lead: int) -> Tree:
        return {"scale": (*lead, WIDTH), "bias": (*lead, WIDTH)}

    def layer_shapes() -> Tree:
        return {
            "norm_1": norm(*lead),
            "norm_2": norm(*lead),
            **dict.fromkeys(("q", "k", "v"), (*lead, WIDTH, HEADS, SIZE)),
            "o": (*lead, HEADS, SIZE, WIDTH),
            "up": (*lead, WIDTH, HIDDEN),
            "up_bias": (*lead, HIDDEN),
            "down": (*lead, HIDDEN, WIDTH),
            "down_bias": (*lead, WIDTH),
        }

    body = layer_shapes() if stacked else [layer_shapes() for _ in range(layers)]
    return {"embed": (words, WIDTH), "layers": body, "norm": norm(), "head": (WIDTH, words)}


def weights(sizes: Tree) -> Tree:
    """Small random numbers; scales near one."""
    named, tree = jax.tree_util.tree_flatten_with_path(sizes, is_leaf=lambda size: isinstance(size, tuple))
    random = np.random.default_rng(0)
    values = [
        (0.2 * random.standard_normal(size) + ("scale" in jax.tree_util.keystr(path))).astype(np.float32)
        for path, size in named
    ]
    return jax.tree.unflatten(tree, values)


def batch(size: int, words: int = WORDS, seed: int = 1) -> Tree:
    """Random tokens and labels."""
    random = np.random.default_rng(seed)
    return {name: random.integers(0, words, (size, LENGTH), dtype=np.int32) for name in ("ids", "labels")}


def loss(params: Tree, batch: Tree, *, stacked: bool = False) -> jax.Array:
    """The plain model."""
    x = params["embed"][batch["ids"]]
    if stacked:
        x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params["layers"])
    else:
        for p in params["layers"]:
            x = block(p, x)
    return cross_entropy(layer_norm(x, params["norm"]) @ params["head"], batch["labels"])


scanned_loss = partial(loss, stacked=True)


EXPERTS, ROOM = 8, 4
"""How many experts a mixture has, and how many tokens of a sample each of them takes at most."""


def mixture_shapes(*, stacked: bool) -> Tree:
    """Layers whose MLPs are experts with biases, gates and up-projections beside each other, (2 f)."""
    whole = shapes(stacked=stacked)
    lead = (LAYERS,) if stacked else ()
    experts = {
        "gate_up": (*lead, EXPERTS, WIDTH, 2 * HIDDEN),
        "up_bias": (*lead, EXPERTS, 2 * HIDDEN),
        "down": (*lead, EXPERTS, HIDDEN, WIDTH),
    }

    def with_experts(layer: Tree) -> Tree:
        dense = {name: size for name, size in layer.items() if name not in ("up", "up_bias", "down", "down_bias")}
        return {**dense, "router": (*lead, WIDTH, EXPERTS), "experts": experts}

    layers = with_experts(whole["layers"]) if stacked else [with_experts(layer) for layer in whole["layers"]]
    return {**whole, "layers": layers}


def routed(gates: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where two experts take each token, a mask [b, s, e, c]; its gates there; and how unevenly samples are divided."""
    values, places = jax.lax.top_k(gates, 2)
    chosen = jax.nn.one_hot(places, EXPERTS).sum(2)
    place = jnp.cumsum(chosen, axis=1) * chosen - 1
    mask = jax.nn.one_hot(place.astype(jnp.int32), ROOM) * chosen[..., None]
    weights = jax.nn.one_hot(places, EXPERTS) * (values / values.sum(-1, keepdims=True))[..., None]
    balance = EXPERTS * (chosen.mean(1) * gates.mean(1)).sum(-1).mean()
    return mask, weights.sum(2)[..., None] * mask, balance


def mixture_block(p: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention, and experts that each take a few tokens of a sample; with the loss of balance."""
    y = layer_norm(x, p["norm_1"])
    query, key, value = (jnp.einsum("bsi,ihd->bshd", y, p[name]) for name in ("q", "k", "v"))
    x = x + jnp.einsum("bshd,hdi->bsi", attend(query, key, value), p["o"])
    y = layer_norm(x, p["norm_2"])
    mask, weights, balance = routed(jax.nn.softmax(y @ p["router"]))
    rows = jnp.einsum("bsec,bsi->ebci", mask, y)
    both = jnp.einsum("ebci,eif->ebcf", rows, p["experts"]["gate_up"]) + p["experts"]["up_bias"][:, None, None]
    gate, up = jnp.split(both, 2, axis=-1)
    results = jnp.einsum("ebcf,efi->ebci", jax.nn.relu(gate) * up, p["experts"]["down"])
    return x + jnp.einsum("bsec,ebci->bsi", weights, results), balance


def mixture_loss(params: Tree, batch: Tree, *, stacked: bool, is_balanced: bool = True) -> jax.Array:
    """A mixture of experts, with the loss of balance of all layers, or without."""
    x, balance = params["embed"][batch["ids"]], jnp.zeros(())
    if stacked:
        x, balances = jax.lax.scan(lambda x, p: mixture_block(p, x), x, params["layers"])
        balance = balances.sum()
    else:
        for p in params["layers"]:
            x, own = mixture_block(p, x)
            balance = balance + own if is_balanced else balance
    return cross_entropy(layer_norm(x, params["norm"]) @ params["head"], batch["labels"]) + 0.01 * balance


def fused_shapes() -> Tree:
    """Three layers with projections as columns of one matrix, (3 h d), with a bias, and gates beside them, (2 f)."""
    layer = {
        "qkv": (WIDTH, 3 * HEADS * SIZE),
        "qkv_bias": (3 * HEADS * SIZE,),
        "o": (HEADS * SIZE, WIDTH),
        "gate_up": (WIDTH, 2 * HIDDEN),
        "down": (HIDDEN, WIDTH),
    }
    return {"embed": (WORDS, WIDTH), "layers": [layer] * 3, "head": (WIDTH, WORDS)}


def fused_loss(params: Tree, batch: Tree) -> jax.Array:
    """Layers that take fused projections apart in three ways: by splits, slices and reshapes."""
    x = params["embed"][batch["ids"]]
    for p, take in zip(params["layers"], (_by_split, _by_slice, _by_reshape), strict=True):
        query, key, value = take(_normal(x) @ p["qkv"] + p["qkv_bias"])
        x = x + attend(query, key, value).reshape(*x.shape[:2], HEADS * SIZE) @ p["o"]
        gate, up = jnp.split(_normal(x) @ p["gate_up"], 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ p["down"]
    return cross_entropy(_normal(x) @ params["head"], batch["labels"])


def _normal(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def _by_split(x: jax.Array) -> list[jax.Array]:
    return [part.reshape(*x.shape[:2], HEADS, SIZE) for part in jnp.split(x, 3, axis=-1)]


def _by_slice(x: jax.Array) -> list[jax.Array]:
    width = HEADS * SIZE
    return [x[..., part * width : (part + 1) * width].reshape(*x.shape[:2], HEADS, SIZE) for part in range(3)]


def _by_reshape(x: jax.Array) -> list[jax.Array]:
    parts = x.reshape(*x.shape[:2], 3, HEADS, SIZE)
    return [parts[:, :, part] for part in range(3)]


class LinenBlock(linen.Module):
    """A block in linen."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = linen.LayerNorm()(x)
        heads = (HEADS, SIZE)
        query, key, value = (linen.DenseGeneral(heads, use_bias=False, name=name)(y) for name in ("q", "k", "v"))
        x = x + linen.DenseGeneral(WIDTH, axis=(-2, -1), name="o")(attend(query, key, value))
        hidden = linen.gelu(linen.Dense(HIDDEN, name="up")(linen.LayerNorm()(x)))
        return x + linen.Dense(WIDTH, name="down")(hidden)


class LinenLoss(linen.Module):
    """The model in linen, with its loss."""

    @linen.compact
    def __call__(self, batch: Tree) -> jax.Array:
        x = linen.Embed(WORDS, WIDTH)(batch["ids"])
        for _ in range(LAYERS):
            x = LinenBlock()(x)
        return cross_entropy(linen.Dense(WORDS, name="head")(linen.LayerNorm()(x)), batch["labels"])


class LinenExperts(linen.Module):
    """Experts in linen, each with the tokens of a sample that chose it."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def matrices(name: str, *size: int) -> jax.Array:
            return self.param(name, linen.initializers.normal(), (EXPERTS, *size))

        mask, weights, _ = routed(jax.nn.softmax(linen.Dense(EXPERTS, use_bias=False, name="router")(x)))
        rows = jnp.einsum("bsec,bsi->beci", mask, x)
        hidden = linen.gelu(jnp.einsum("beci,eif->becf", rows, matrices("up", WIDTH, HIDDEN)))
        results = jnp.einsum("becf,efi->beci", hidden, matrices("down", HIDDEN, WIDTH))
        return jnp.einsum("bsec,beci->bsi", weights, results)


class LinenMixture(linen.Module):
    """Experts behind an embedding in linen, with its loss."""

    @linen.compact
    def __call__(self, batch: Tree) -> jax.Array:
        x = linen.Embed(WORDS, WIDTH)(batch["ids"])
        for _ in range(LAYERS):
            x = x + LinenExperts()(linen.LayerNorm()(x))
        return cross_entropy(linen.Dense(WORDS, name="head")(linen.LayerNorm()(x)), batch["labels"])
