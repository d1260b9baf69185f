"""JAX models for tests, as shapes without weights, and what their jaxprs count."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

LENGTH, WIDTH, HEADS, LAYERS, WORDS = 16, 48, 3, 3, 101
"""Those of the tiny GPT-2 among the torch models."""

Tree = Any


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def ids(batch: int = 2, length: int = LENGTH) -> jax.ShapeDtypeStruct:
    return shape(batch, length, dtype=jnp.int32)


def tokens(batch: int = 2) -> Tree:
    return {"ids": ids(batch), "labels": ids(batch)}


def layer_norm(x: jax.Array, p: Tree) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True)
    variance = (centered**2).mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention of [b, s, h, d]."""
    scores = jnp.einsum("bshd,bthd->bhst", query, key) * query.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((query.shape[1], key.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    return jnp.einsum("bhst,bthd->bshd", weights, value)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -chosen.mean()


def linear(x: jax.Array, p: Tree) -> jax.Array:
    return x @ p["w"] + p["b"]


def gpt_block(p: Tree, x: jax.Array) -> jax.Array:
    b, s, width = x.shape
    query, key, value = (
        part.reshape(b, s, HEADS, width // HEADS)
        for part in jnp.split(linear(layer_norm(x, p["ln_1"]), p["attn"]["qkv"]), 3, axis=-1)
    )
    x = x + linear(attend(query, key, value).reshape(b, s, width), p["attn"]["out"])
    return x + linear(jax.nn.gelu(linear(layer_norm(x, p["ln_2"]), p["mlp"]["up"])), p["mlp"]["down"])


def gpt_parameters(layers: int = LAYERS, *, stacked: bool = False) -> Tree:
    lead = (layers,) if stacked else ()

    def norm() -> Tree:
        return {"scale": shape(*lead, WIDTH), "bias": shape(*lead, WIDTH)}

    def dense(rows: int, columns: int) -> Tree:
        return {"w": shape(*lead, rows, columns), "b": shape(*lead, columns)}

    def block() -> Tree:
        return {
            "ln_1": norm(),
            "attn": {"qkv": dense(WIDTH, 3 * WIDTH), "out": dense(WIDTH, WIDTH)},
            "ln_2": norm(),
            "mlp": {"up": dense(WIDTH, 4 * WIDTH), "down": dense(4 * WIDTH, WIDTH)},
        }

    return {
        "wte": shape(WORDS, WIDTH),
        "wpe": shape(LENGTH, WIDTH),
        "h": block() if stacked else [block() for _ in range(layers)],
        "ln_f": {"scale": shape(WIDTH), "bias": shape(WIDTH)},
    }


def gpt_loss(params: Tree, batch: Tree, *, stacked: bool = False, remat: bool = False) -> jax.Array:
    """A GPT-2 with tied logits; blocks one after another, or as a scan over stacked parameters."""
    block: Callable[..., jax.Array] = jax.checkpoint(gpt_block) if remat else gpt_block
    x = params["wte"][batch["ids"]] + params["wpe"][jnp.arange(batch["ids"].shape[1])]
    if stacked:
        x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params["h"])
    else:
        for p in params["h"]:
            x = block(p, x)
    return cross_entropy(layer_norm(x, params["ln_f"]) @ params["wte"].T, batch["labels"])


gpt_scan = partial(gpt_loss, stacked=True)


def adam_step(params: Tree, state: Tree, batch: Tree, *, loss_fn: Callable[..., Any] = gpt_loss) -> Any:
    """A whole train step with weight decay, and a metric beside the loss."""
    loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["second"], gradients)
    count = state["count"] + 1
    rate = 1e-3 / (1 - 0.9**count)
    params = jax.tree.map(lambda p, m, v: p - rate * (m / (jnp.sqrt(v) + 1e-8) + 0.01 * p), params, first, second)
    return params, {"first": first, "second": second, "count": count}, {"loss": loss, "perplexity": jnp.exp(loss)}


def adam_state(params: Tree) -> Tree:
    return {"first": params, "second": params, "count": shape(dtype=jnp.int32)}


class LinenBlock(linen.Module):
    """A block of GPT-2."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        b, s, width = x.shape
        y = linen.Dense(3 * width)(linen.LayerNorm()(x))
        query, key, value = (part.reshape(b, s, HEADS, width // HEADS) for part in jnp.split(y, 3, axis=-1))
        x = x + linen.Dense(width)(attend(query, key, value).reshape(b, s, width))
        return x + linen.Dense(width)(linen.gelu(linen.Dense(4 * width)(linen.LayerNorm()(x))))


class LinenGPT(linen.Module):
    """GPT-2 in linen."""

    @linen.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        table = linen.Embed(WORDS, WIDTH)
        x = table(ids) + linen.Embed(LENGTH, WIDTH)(jnp.arange(ids.shape[1]))
        for _ in range(LAYERS):
            x = LinenBlock()(x)
        return table.attend(linen.LayerNorm()(x))


class NnxBlock(nnx.Module):
    """A block of GPT-2."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv, self.out = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        b, s, width = x.shape
        parts = jnp.split(self.qkv(self.norm_1(x)), 3, axis=-1)
        query, key, value = (part.reshape(b, s, HEADS, width // HEADS) for part in parts)
        x = x + self.out(attend(query, key, value).reshape(b, s, width))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class NnxGPT(nnx.Module):
    """GPT-2 in nnx."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.wte, self.wpe = nnx.Embed(WORDS, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.h = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.ln_f = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.wte(ids) + self.wpe(jnp.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.wte.attend(self.ln_f(x))


def nnx_gpt() -> NnxGPT:
    return nnx.eval_shape(lambda: NnxGPT(nnx.Rngs(0)))


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10000 ** (jnp.arange(half) / half)
    cos, sin = (f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


LLAMA = {"width": 48, "heads": 6, "groups": 2, "size": 8, "mlp": 80, "words": 101, "layers": 4}


def llama_parameters(dtype: Any = jnp.bfloat16) -> Tree:
    n, w = LLAMA, LLAMA["width"]
    stacked = partial(shape, n["layers"], dtype=dtype)
    return {
        "embed": shape(n["words"], w, dtype=dtype),
        "layers": {
            "norm_1": stacked(w),
            "q": stacked(w, n["heads"], n["size"]),
            "k": stacked(w, n["groups"], n["size"]),
            "v": stacked(w, n["groups"], n["size"]),
            "o": stacked(n["heads"], n["size"], w),
            "norm_2": stacked(w),
            "gate": stacked(w, n["mlp"]),
            "up": stacked(w, n["mlp"]),
            "down": stacked(n["mlp"], w),
        },
        "norm": shape(w, dtype=dtype),
        "head": shape(w, n["words"], dtype=dtype),
    }


def llama_loss(
    params: Tree, ids: jax.Array, labels: jax.Array, *, remat: bool = True, positions: slice = slice(None)
) -> jax.Array:
    """Grouped attention, rotary positions, gated MLP, a scan over layers, which are checkpointed.

    The labels are those of some positions.
    """

    def layer(x: jax.Array, p: Tree) -> jax.Array:
        y = rms_norm(x, p["norm_1"])
        query, key = (rotated(jnp.einsum("bsi,ihd->bshd", y, p[name])) for name in ("q", "k"))
        value = jnp.einsum("bsi,ihd->bshd", y, p["v"])
        key, value = (jnp.repeat(part, LLAMA["heads"] // LLAMA["groups"], axis=2) for part in (key, value))
        x = x + jnp.einsum("bshd,hdi->bsi", attend(query, key, value), p["o"])
        y = rms_norm(x, p["norm_2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    body = jax.checkpoint(layer) if remat else layer
    x, _ = jax.lax.scan(lambda x, p: (body(x, p), None), params["embed"][ids], params["layers"])
    logits = (rms_norm(x, params["norm"]) @ params["head"])[:, positions]
    return cross_entropy(logits.astype(jnp.float32), labels)


EXPERTS, CAPACITY = 4, 8


def moe_parameters(layers: int = 3) -> Tree:
    def block() -> Tree:
        return {
            "norm": shape(WIDTH),
            "router": shape(WIDTH, EXPERTS),
            "up": shape(EXPERTS, WIDTH, 64),
            "down": shape(EXPERTS, 64, WIDTH),
        }

    return {"embed": shape(WORDS, WIDTH), **{f"layer_{i}": block() for i in range(layers)}, "head": shape(WIDTH, WORDS)}


def moe_loss(params: Tree, ids: jax.Array, labels: jax.Array) -> jax.Array:
    """Experts with einsum dispatch (GShard, arXiv:2006.16668, algorithm 1, one expert a token)."""
    x = params["embed"][ids]
    for index in range(sum(name.startswith("layer_") for name in params)):
        with jax.named_scope(f"layer_{index}"):
            p = params[f"layer_{index}"]
            y = rms_norm(x, p["norm"])
            gates = jax.nn.softmax(y @ p["router"], axis=-1)
            chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), EXPERTS)
            place = jnp.cumsum(chosen, axis=1) * chosen
            dispatch = jax.nn.one_hot(place.astype(jnp.int32) - 1, CAPACITY) * chosen[..., None]
            combine = dispatch * gates[..., None]
            rows = jnp.einsum("bsec,bsi->ebci", dispatch, y)
            rows = jnp.einsum("ebcf,efi->ebci", jax.nn.relu(jnp.einsum("ebci,eif->ebcf", rows, p["up"])), p["down"])
            x = x + jnp.einsum("bsec,ebci->bsi", combine, rows)
    return cross_entropy(x @ params["head"], labels)


def conv_parameters() -> Tree:
    stages = {"conv_0": (3, 3, 3, 8), "conv_1": (3, 3, 8, 16), "conv_2": (3, 3, 16, 16)}
    kernels = {name: {"kernel": shape(*sizes), "bias": shape(sizes[-1])} for name, sizes in stages.items()}
    return {**kernels, "depthwise": shape(3, 3, 1, 16), "head": shape(4 * 4 * 16, 10)}


def conv_loss(params: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Convolutions (one with stride 2, one in groups), max and mean pooling, a linear head."""
    layout = ("NHWC", "HWIO", "NHWC")
    x = images
    for index, stride in enumerate((1, 2, 1)):
        p = params[f"conv_{index}"]
        x = jax.lax.conv_general_dilated(x, p["kernel"], (stride, stride), "SAME", dimension_numbers=layout)
        x = jax.nn.relu(x + p["bias"])
    x = linen.max_pool(x, (2, 2), strides=(2, 2))
    x = jax.lax.conv_general_dilated(
        x, params["depthwise"], (1, 1), "SAME", dimension_numbers=layout, feature_group_count=16
    )
    return cross_entropy(x.reshape(x.shape[0], -1) @ params["head"], labels)


def count(tree: Tree) -> int:
    """Scalars in a pytree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def jaxpr_flops(function: Callable[..., Any], *args: Any) -> int:
    """Flops of products and convolutions over a function's jaxpr, those inside scans times their length.

    Zeros that a dilated convolution puts between the elements of its input are not multiplied.
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def _flops(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        name, params = str(equation.primitive), equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
            taps = math.prod(kernel) // outputs
            total += 2 * math.prod(equation.outvars[0].aval.shape) * taps // math.prod(params["lhs_dilation"])
        inner = [
            getattr(item, "jaxpr", item)
            for value in params.values()
            for item in (value if isinstance(value, tuple | list) else (value,))
        ]
        times = params["length"] if name == "scan" else 1
        total += times * sum(_flops(one) for one in inner if hasattr(one, "eqns"))
    return total
