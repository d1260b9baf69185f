"""Small models of many kinds for `jax_zoo.py`, written in plain JAX; those in modules are in `jax_zoo_modules.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

__all__ = [
    *("BATCH", "FUNCTIONS", "HEADS", "HIDDEN", "LENGTH", "WIDTH", "WORDS", "Tree", "ZooModel", "cross_entropy"),
    *("images", "optimizer", "words"),
]

BATCH, LENGTH, WIDTH, HEADS, HIDDEN, WORDS, EXPERTS = 16, 16, 32, 8, 64, 64, 4
SIZE = WIDTH // HEADS
Tree = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A model and what it is trained on.

    Attributes:
        model: a loss of (parameters, *batch), a linen or nnx module that returns it, or a step of (state, *batch).
        start: parameters, an nnx module, or the state of a step.
        batch: the arguments behind them.
        loss: the loss of parameters, where the model is a module.
        is_step: whether the model is a whole step, which returns (state, loss).
        takes_mean: whether the loss is a mean over samples although its trace does not show it.
    """

    model: Any
    start: Tree
    batch: tuple[Tree, ...]
    loss: Callable[..., jax.Array] | None = None
    is_step: bool = False
    takes_mean: bool = False

    @property
    def inputs(self) -> tuple[Tree, ...]:
        """What planning and `apply` take."""
        return self.batch if self.loss is not None else (self.start, *self.batch)


def optimizer() -> optax.GradientTransformation:
    """SGD, whose steps are as exact as the gradients; Adam's divide gradients that are nothing but rounding."""
    return optax.sgd(0.02, momentum=0.9)


def words(seed: int = 1, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Ids and labels."""
    random = np.random.default_rng(seed)
    return {name: random.integers(0, WORDS, (BATCH, length), dtype=np.int32) for name in ("ids", "labels")}


def images() -> tuple[np.ndarray, np.ndarray]:
    """Images and their kinds."""
    random = np.random.default_rng(1)
    return random.standard_normal((BATCH, 16, 16, 3)).astype("f"), random.integers(0, 10, BATCH, dtype=np.int32)


def weights(sizes: Tree) -> Tree:
    """Random numbers as large as one over the root of what they are summed over; scales near one."""
    named, tree = jax.tree_util.tree_flatten_with_path(sizes, is_leaf=lambda size: isinstance(size, tuple))
    random = np.random.default_rng(0)

    def made(path: Any, size: tuple[int, ...]) -> jax.Array:
        scale = 1.0 if "norm" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(scale + random.standard_normal(size) / math.sqrt(WIDTH), jnp.float32)

    return jax.tree.unflatten(tree, [made(path, size) for path, size in named])


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all tokens."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide by the root of the mean of squares."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def attend(query: jax.Array, key: jax.Array, value: jax.Array, *, bias: Any = 0.0, is_causal: bool = True) -> jax.Array:
    """Attention of (samples, sequence, heads, size)."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1]) + bias
    if is_causal:
        mask = jnp.tril(jnp.ones((query.shape[1], key.shape[1]), bool))
        scores = jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 100.0 ** (jnp.arange(half) / half)
    cosine, sine = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)


def gpt_shapes(layers: int = 2) -> Tree:
    """GPT-2: learned positions, one projection for query, key and value, biases."""
    block = {
        "norm_1": (WIDTH,),
        "qkv": (WIDTH, 3 * WIDTH),
        "qkv_bias": (3 * WIDTH,),
        "out": (WIDTH, WIDTH),
        "norm_2": (WIDTH,),
        "up": (WIDTH, HIDDEN),
        "up_bias": (HIDDEN,),
        "down": (HIDDEN, WIDTH),
        "down_bias": (WIDTH,),
    }
    return {"embed": (WORDS, WIDTH), "positions": (LENGTH, WIDTH), "blocks": [block] * layers, "norm": (WIDTH,)}


def gpt_block(p: Tree, x: jax.Array) -> jax.Array:
    """One layer."""
    parts = jnp.split(rms_norm(x, p["norm_1"]) @ p["qkv"] + p["qkv_bias"], 3, axis=-1)
    query, key, value = (part.reshape(*x.shape[:2], HEADS, SIZE) for part in parts)
    x = x + attend(query, key, value).reshape(x.shape) @ p["out"]
    hidden = jax.nn.gelu(rms_norm(x, p["norm_2"]) @ p["up"] + p["up_bias"])
    return x + hidden @ p["down"] + p["down_bias"]


def gpt_logits(params: Tree, ids: jax.Array) -> jax.Array:
    """The head is the embedding."""
    x = params["embed"][ids] + params["positions"]
    for p in params["blocks"]:
        x = gpt_block(p, x)
    return rms_norm(x, params["norm"]) @ params["embed"].T


def gpt_loss(params: Tree, batch: Tree) -> jax.Array:
    """GPT-2's loss."""
    return cross_entropy(gpt_logits(params, batch["ids"]), batch["labels"])


def gpt() -> ZooModel:
    """Plain JAX, blocks one after the other."""
    return ZooModel(model=gpt_loss, start=weights(gpt_shapes()), batch=(words(),))


def llama_shapes(*lead: int) -> Tree:
    """A block of Llama with two keys for every four queries."""
    return {
        "norm_1": (*lead, WIDTH),
        "q": (*lead, WIDTH, HEADS, SIZE),
        "k": (*lead, WIDTH, HEADS // 2, SIZE),
        "v": (*lead, WIDTH, HEADS // 2, SIZE),
        "o": (*lead, HEADS, SIZE, WIDTH),
        "norm_2": (*lead, WIDTH),
        "gate": (*lead, WIDTH, HIDDEN),
        "up": (*lead, WIDTH, HIDDEN),
        "down": (*lead, HIDDEN, WIDTH),
    }


def llama_attention(p: Tree, x: jax.Array) -> jax.Array:
    """Grouped queries and rotary positions."""
    y = rms_norm(x, p["norm_1"])
    query, key, value = (jnp.einsum("bsi,ihd->bshd", y, p[name]) for name in ("q", "k", "v"))
    key, value = (jnp.repeat(part, 2, axis=2) for part in (rotated(key), value))
    return x + jnp.einsum("bshd,hdi->bsi", attend(rotated(query), key, value), p["o"])


def llama_block(p: Tree, x: jax.Array) -> jax.Array:
    """One layer."""
    x = llama_attention(p, x)
    y = rms_norm(x, p["norm_2"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def llama_loss(params: Tree, batch: Tree, *, block: Callable[[Tree, jax.Array], jax.Array] = llama_block) -> jax.Array:
    """Blocks in a list, or stacked for a scan."""
    x = params["embed"][batch["ids"]]
    if isinstance(params["blocks"], list):
        for p in params["blocks"]:
            x = block(p, x)
    else:
        x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params["blocks"])
    return cross_entropy(rms_norm(x, params["norm"]) @ params["head"], batch["labels"])


def llama_ends() -> Tree:
    """What lies outside of the blocks."""
    return {"embed": (WORDS, WIDTH), "norm": (WIDTH,), "head": (WIDTH, WORDS)}


def llama_scan() -> ZooModel:
    """Plain JAX, a scan over four stacked blocks that are checkpointed."""
    loss = partial(llama_loss, block=jax.checkpoint(llama_block))
    return ZooModel(model=loss, start=weights({**llama_ends(), "blocks": llama_shapes(4)}), batch=(words(),))


def llama() -> ZooModel:
    """Plain JAX, four blocks one after the other."""
    params = weights({**llama_ends(), "blocks": [llama_shapes()] * 4})
    return ZooModel(model=llama_loss, start=params, batch=(words(),))


def padded() -> ZooModel:
    """A scanned Llama whose loss is the mean over those tokens that are no padding."""

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, p: (llama_block(p, x), None), params["embed"][batch["ids"]], params["blocks"])
        logits = rms_norm(x, params["norm"]) @ params["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return (losses * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)

    mask = (np.arange(LENGTH) < np.random.default_rng(3).integers(2, LENGTH, (BATCH, 1))).astype("f")
    return ZooModel(
        model=loss, start=weights({**llama_ends(), "blocks": llama_shapes(4)}), batch=({**words(), "mask": mask},)
    )


def shifted() -> ZooModel:
    """A Llama in which every token says the next one: logits without the last, against labels without the first."""

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = params["embed"][batch["ids"]]
        for p in params["blocks"]:
            x = llama_block(p, x)
        logits, labels = (rms_norm(x, params["norm"]) @ params["head"])[:, :-1], batch["ids"][:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels) * (labels > 3)
        return losses.sum() / (labels > 3).sum()

    return ZooModel(model=loss, start=weights({**llama_ends(), "blocks": [llama_shapes()] * 2}), batch=(words(),))


def t5() -> ZooModel:
    """An encoder and a decoder with relative positions and attention to the encoder."""
    attention = dict.fromkeys(("q", "k", "v"), (WIDTH, HEADS, SIZE)) | {"o": (HEADS, SIZE, WIDTH), "norm": (WIDTH,)}
    feed = {"norm": (WIDTH,), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    shapes = {
        "embed": (WORDS, WIDTH),
        "bias": {"encoder": (2 * LENGTH, HEADS), "decoder": (2 * LENGTH, HEADS)},
        "encoder": [{"self": attention, "feed": feed}] * 2,
        "decoder": [{"self": attention, "cross": attention, "feed": feed}] * 2,
        "norms": {"encoder_norm": (WIDTH,), "decoder_norm": (WIDTH,)},
    }
    places = np.arange(LENGTH)[:, None] - np.arange(LENGTH) + LENGTH

    def attended(p: Tree, x: jax.Array, source: jax.Array | None, bias: Any, *, is_causal: bool) -> jax.Array:
        y = rms_norm(x, p["norm"])
        read = y if source is None else source
        query, key, value = (jnp.einsum("bsi,ihd->bshd", z, p[n]) for z, n in ((y, "q"), (read, "k"), (read, "v")))
        return x + jnp.einsum("bshd,hdi->bsi", attend(query, key, value, bias=bias, is_causal=is_causal), p["o"])

    def fed(p: Tree, x: jax.Array) -> jax.Array:
        return x + jax.nn.relu(rms_norm(x, p["norm"]) @ p["up"]) @ p["down"]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        biases = {name: params["bias"][name][places].transpose(2, 0, 1) for name in ("encoder", "decoder")}
        x = params["embed"][batch["ids"]]
        for p in params["encoder"]:
            x = fed(p["feed"], attended(p["self"], x, None, biases["encoder"], is_causal=False))
        source = rms_norm(x, params["norms"]["encoder_norm"])
        y = params["embed"][jnp.roll(batch["labels"], 1, axis=1)]
        for p in params["decoder"]:
            y = attended(p["self"], y, None, biases["decoder"], is_causal=True)
            y = fed(p["feed"], attended(p["cross"], y, source, 0.0, is_causal=False))
        y = rms_norm(y, params["norms"]["decoder_norm"])
        return cross_entropy(y @ params["embed"].T / math.sqrt(WIDTH), batch["labels"])

    return ZooModel(model=loss, start=weights(shapes), batch=(words(),))


def moe_shapes(*lead: int) -> Tree:
    """Attention and experts."""
    dense = {name: size for name, size in llama_shapes(*lead).items() if name not in ("gate", "up", "down")}
    experts = {"up": (*lead, EXPERTS, WIDTH, HIDDEN), "down": (*lead, EXPERTS, HIDDEN, WIDTH)}
    return {**dense, "router": (*lead, WIDTH, EXPERTS), "experts": experts}


def chosen_experts(p: Tree, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two experts for each token, and their weights."""
    values, places = jax.lax.top_k(jax.nn.softmax(y @ p["router"]), 2)
    return values / values.sum(-1, keepdims=True), places


def einsum_block(p: Tree, x: jax.Array) -> jax.Array:
    """All experts on all tokens, weighted."""
    x = llama_attention(p, x)
    y = rms_norm(x, p["norm_2"])
    values, places = chosen_experts(p, y)
    gates = jnp.einsum("bsk,bske->bse", values, jax.nn.one_hot(places, EXPERTS))
    hidden = jax.nn.silu(jnp.einsum("bsi,eif->bsef", y, p["experts"]["up"]))
    return x + jnp.einsum("bsef,efi,bse->bsi", hidden, p["experts"]["down"], gates)


def ragged_block(p: Tree, x: jax.Array) -> jax.Array:
    """Tokens sorted by experts, as dropless mixtures do."""
    x = llama_attention(p, x)
    y = rms_norm(x, p["norm_2"])
    values, places = chosen_experts(p, y)
    rows, flat = y.reshape(-1, WIDTH), places.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=EXPERTS).astype(jnp.int32)
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows[order // 2], p["experts"]["up"], sizes))
    sorted_results = jax.lax.ragged_dot(hidden, p["experts"]["down"], sizes)
    results = jnp.zeros_like(sorted_results).at[order].set(sorted_results).reshape(*places.shape, WIDTH)
    return x + (results * values[..., None]).sum(-2)


def capacity_block(p: Tree, x: jax.Array) -> jax.Array:
    """GShard's dispatch in each sample: experts with room for so many tokens; others are dropped."""
    x = llama_attention(p, x)
    y = rms_norm(x, p["norm_2"])
    gates = jax.nn.softmax(y @ p["router"])
    chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS)
    place = jnp.cumsum(chosen, axis=1) * chosen - 1
    room = LENGTH // 2
    dispatch = jax.nn.one_hot(place.astype(jnp.int32), room) * chosen[..., None]
    entering = jnp.einsum("bsec,bsi->ebci", dispatch, y)
    hidden = jax.nn.silu(jnp.einsum("ebci,eif->ebcf", entering, p["experts"]["up"]))
    results = jnp.einsum("ebcf,efi->ebci", hidden, p["experts"]["down"])
    return x + jnp.einsum("bsec,ebci,bse->bsi", dispatch, results, gates)


def mixture(block: Callable[[Tree, jax.Array], jax.Array], *, takes_mean: bool = False) -> ZooModel:
    """A scanned mixture."""
    params = weights({**llama_ends(), "blocks": moe_shapes(2)})
    model = partial(llama_loss, block=block)
    return ZooModel(model=model, start=params, batch=(words(),), takes_mean=takes_mean)


def lora() -> ZooModel:
    """A frozen Llama with small products beside its query and value projections, which alone are trained."""
    base = weights({**llama_ends(), "blocks": [llama_shapes()] * 2})
    small = [{name: {"a": (WIDTH, 4), "b": (4, WIDTH)} for name in ("q", "v_wide")}] * 2

    def loss(adapters: Tree, base: Tree, batch: Tree) -> jax.Array:
        x = base["embed"][batch["ids"]]
        for p, adapter in zip(base["blocks"], adapters, strict=True):
            change = (adapter["q"]["a"] @ adapter["q"]["b"]).reshape(WIDTH, HEADS, SIZE)
            wide = (adapter["v_wide"]["a"] @ adapter["v_wide"]["b"])[:, : WIDTH // 2].reshape(WIDTH, HEADS // 2, SIZE)
            x = llama_block({**p, "q": p["q"] + change, "v": p["v"] + wide}, x)
        return cross_entropy(rms_norm(x, base["norm"]) @ base["head"], batch["labels"])

    return ZooModel(model=loss, start=weights(small), batch=(base, words()))


def several_losses() -> ZooModel:
    """Words, the kind of each sequence, and a penalty on logits, weighted."""
    shapes = {**gpt_shapes(), "kind": (WIDTH, 4)}

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = params["embed"][batch["ids"]] + params["positions"]
        for p in params["blocks"]:
            x = gpt_block(p, x)
        x = rms_norm(x, params["norm"])
        logits = x @ params["embed"].T
        kinds = cross_entropy(x.mean(1) @ params["kind"], batch["kind"])
        penalty = (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()
        return cross_entropy(logits, batch["labels"]) + 0.3 * kinds + 1e-3 * penalty

    kind = np.random.default_rng(5).integers(0, 4, BATCH, dtype=np.int32)
    return ZooModel(model=loss, start=weights(shapes), batch=({**words(), "kind": kind},))


def recurrent() -> ZooModel:
    """A gated recurrent network: a scan over time inside of each layer."""
    layer = {"read": (WIDTH, 3 * WIDTH), "keep": (WIDTH, 3 * WIDTH), "bias": (3 * WIDTH,)}

    def run(p: Tree, x: jax.Array) -> jax.Array:
        def step(state: jax.Array, read: jax.Array) -> tuple[jax.Array, jax.Array]:
            reset, update, new = jnp.split(read, 3, -1)
            old_reset, old_update, old_new = jnp.split(state @ p["keep"] + p["bias"], 3, -1)
            update = jax.nn.sigmoid(update + old_update)
            candidate = jnp.tanh(new + jax.nn.sigmoid(reset + old_reset) * old_new)
            state = update * state + (1 - update) * candidate
            return state, state

        _, states = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), (x @ p["read"]).swapaxes(0, 1))
        return states.swapaxes(0, 1)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = params["embed"][batch["ids"]]
        for p in params["layers"]:
            x = run(p, x)
        return cross_entropy(x @ params["head"], batch["labels"])

    shapes = {"embed": (WORDS, WIDTH), "layers": [layer] * 2, "head": (WIDTH, WORDS)}
    return ZooModel(model=loss, start=weights(shapes), batch=(words(),))


def state_space() -> ZooModel:
    """A selective state space as Mamba's, by an associative scan over time, stacked layers scanned."""
    block = {
        "norm": (2, WIDTH),
        "enter": (2, WIDTH, 2 * HIDDEN),
        "decay": (2, HIDDEN, HIDDEN),
        "leave": (2, HIDDEN, WIDTH),
    }

    def run(p: Tree, x: jax.Array) -> jax.Array:
        value, gate = jnp.split(rms_norm(x, p["norm"]) @ p["enter"], 2, -1)
        keep = jax.nn.sigmoid(value @ p["decay"])

        def join(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return a[0] * b[0], a[1] * b[0] + b[1]

        _, states = jax.lax.associative_scan(join, (keep, (1 - keep) * value), axis=1)
        return x + (states * jax.nn.silu(gate)) @ p["leave"]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, p: (run(p, x), None), params["embed"][batch["ids"]], params["blocks"])
        return cross_entropy(x @ params["head"], batch["labels"])

    shapes = {"embed": (WORDS, WIDTH), "blocks": block, "head": (WIDTH, WORDS)}
    return ZooModel(model=loss, start=weights(shapes), batch=(words(),))


def by_samples() -> ZooModel:
    """A loss of one sample under `vmap`, with an activation whose gradient is written by hand."""

    @jax.custom_vjp
    def squared(x: jax.Array) -> jax.Array:
        return jax.nn.relu(x) ** 2

    squared.defvjp(lambda x: (squared(x), x), lambda x, g: (2 * jax.nn.relu(x) * g,))

    def loss_of_sample(params: Tree, ids: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["embed"][ids]
        for p in params["blocks"]:
            x = x + squared(rms_norm(x, p["norm"]) @ p["up"]) @ p["down"]
        return cross_entropy(x @ params["head"], labels)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        return jax.vmap(loss_of_sample, in_axes=(None, 0, 0))(params, batch["ids"], batch["labels"]).mean()

    block = {"norm": (WIDTH,), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    shapes = {"embed": (WORDS, WIDTH), "blocks": [block] * 2, "head": (WIDTH, WORDS)}
    return ZooModel(model=loss, start=weights(shapes), batch=(words(),))


def optax_step() -> ZooModel:
    """A scanned Llama in a whole step: clipping, a schedule, weight decay of matrices, and a frozen embedding."""
    params = weights({**llama_ends(), "blocks": llama_shapes(2)})
    rates = optax.linear_schedule(0.05, 0.01, 10)
    decay = optax.add_decayed_weights(0.1, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree))
    trained = optax.chain(optax.clip_by_global_norm(1.0), decay, optax.sgd(rates, momentum=0.9))
    labels = {name: "frozen" if name == "embed" else "trained" for name in params}
    transform = optax.multi_transform({"trained": trained, "frozen": optax.set_to_zero()}, labels)
    state = TrainState.create(apply_fn=llama_loss, params=params, tx=transform)

    def step(state: TrainState, batch: Tree) -> tuple[TrainState, jax.Array]:
        loss, gradients = jax.value_and_grad(state.apply_fn)(state.params, batch)
        return state.apply_gradients(grads=gradients), loss

    return ZooModel(model=step, start=state, batch=(words(),), is_step=True)


FUNCTIONS: dict[str, Callable[[], ZooModel]] = {
    "gpt": gpt,
    "llama": llama,
    "llama, scanned": llama_scan,
    "llama, padded batch": padded,
    "llama, shifted labels": shifted,
    "llama, optax step": optax_step,
    "t5": t5,
    "moe by einsum": partial(mixture, einsum_block),
    "moe with capacity": partial(mixture, capacity_block),
    "moe by ragged dot": partial(mixture, ragged_block, takes_mean=True),
    "lora": lora,
    "several losses": several_losses,
    "recurrent": recurrent,
    "state space": state_space,
    "vmap, custom_vjp": by_samples,
}
"""By the names of the zoo's rows."""
