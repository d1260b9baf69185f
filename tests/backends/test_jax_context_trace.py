"""A loss rewritten for one of the devices of a sequence gives, on all of them together, what the whole loss gives."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from phaze.backends.jax.context_trace import AXIS, SequenceInput, loss_of_context, sequence_inputs
from phaze.backends.jax.trace_rewriting import inner_traces
from phaze.backends.jax.traced_loss import TracedLoss, trace_loss

SAMPLES, LENGTH, WIDTH, HEADS, WORDS = 3, 8, 8, 4, 7
QUICKLY = {"xla_llvm_disable_expensive_passes": True, "xla_backend_optimization_level": 0}
"""Options with which small programs are compiled sooner."""
Loss = Callable[[Any, Any], Any]


def attention(w: Any, x: Any, *, groups: int = 1) -> Any:
    """Causal attention whose keys have fewer heads than its queries."""
    heads = (*x.shape[:2], HEADS, -1)
    query, key, value = ((x @ w[name]).reshape(heads) for name in ("a", "b", "a"))
    key, value = (jnp.repeat(part[:, :, : HEADS // groups], groups, axis=2) for part in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) + w["a"][0, 0]
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value).reshape(x.shape)


def recurrent(w: Any, x: Any) -> Any:
    def step(state: Any, read: Any) -> Any:
        state = jnp.tanh(state @ w["a"] + read)
        return state, state

    return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def stacked(w: Any, x: Any) -> Any:
    """Layers in a scan, of which a carried sum begins whole and becomes a part, and another stays whole."""

    def layer(carried: Any, weight: Any) -> Any:
        x, total, mean = carried
        x = x + jax.nn.relu(x @ weight)
        return (x, total + x, mean + x.mean()), x[..., 0]

    weights = jnp.stack([w["a"], w["b"]])
    (x, total, mean), first = jax.lax.scan(layer, (x, jnp.zeros(x.shape), 0.0), weights)
    return x + total * mean + first.sum(0)[..., None]


@jax.custom_vjp
def clipped(x: Any) -> Any:
    """A function whose gradient is divided by its norm over everything."""
    return x * 1.0


clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (g / jnp.linalg.norm(g),))


def masked(w: Any, batch: Any) -> Any:
    x = w["table"][batch["ids"]]
    logits = x @ w["table"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1)[..., 0]
    mask = batch["labels"] > 2
    return -(picked * mask).sum() / mask.sum()


LAYERS: dict[str, Callable[[Any, Any], Any]] = {
    "dense": lambda w, x: jax.nn.gelu(x @ w["a"]) @ w["b"],
    "attention": attention,
    "grouped attention": lambda w, x: attention(w, x, groups=2),
    "keys first": lambda w, x: jnp.einsum("bkd,bqd->bkq", x @ w["a"], x) @ jax.nn.softmax(x),
    "softmax over positions": lambda w, x: jax.nn.softmax(x @ w["a"], axis=1),
    "positions": lambda w, x: x + jnp.arange(LENGTH)[:, None] * w["a"][0],
    "first position": lambda w, x: x + (x[:, :1] @ w["a"]),
    "shifted": lambda w, x: x @ w["a"] + jnp.roll(x, 1, axis=1),
    "running sum": lambda w, x: jnp.cumsum(x @ w["a"], axis=1),
    "running along the width": lambda w, x: jnp.cumsum(x @ w["a"], axis=2),
    "samples and positions as rows": lambda w, x: (x.reshape(-1, WIDTH) @ w["a"]).reshape(x.shape),
    "positions in pairs": lambda w, x: (x.reshape(SAMPLES, LENGTH // 2, 2 * WIDTH) * 2).reshape(x.shape) @ w["a"],
    "positions in the middle": lambda w, x: x.reshape(SAMPLES, 2, LENGTH // 2, WIDTH).sum(1, keepdims=True) @ w["a"],
    "largest": lambda w, x: jax.lax.top_k(x @ w["a"], 3)[0],
    "sorted positions": lambda w, x: jnp.sort(x @ w["a"], axis=1),
    "reversed": lambda w, x: (x @ w["a"])[:, ::-1] * x,
    "mixed positions": lambda w, x: jnp.einsum("bsd,st->btd", x @ w["a"], jnp.ones((LENGTH, LENGTH)) / 3),
    "sum over positions": lambda w, x: jnp.einsum("bsd,bse->bde", x @ w["a"], x),
    "concatenated": lambda w, x: jnp.concatenate([x @ w["a"], x], -1)[:, :, 2:12],
    "recurrent": recurrent,
    "stacked layers": stacked,
    "own derivative": lambda w, x: jax.nn.relu(x @ w["a"]) + jax.nn.relu6(x),
    "own gradient": lambda w, x: clipped(x @ w["a"]),
    "associative": lambda w, x: jax.lax.associative_scan(jnp.add, x @ w["a"], axis=1),
}


def loss_of(layer: Callable[[Any, Any], Any]) -> Loss:
    def loss(w: Any, batch: Any) -> Any:
        x = layer(w, w["table"][batch["ids"]])
        return (jnp.sin(x) ** 2).mean() + 0.1 * (w["b"] ** 2).sum()

    return loss


def shifted_labels(w: Any, batch: Any) -> Any:
    """Each position says the next id, as the losses of language models do; the last one says nothing."""
    logits = attention(w, w["table"][batch["ids"]]) @ w["table"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), batch["ids"][:, 1:, None], -1)
    return -(picked * jnp.arange(LENGTH - 1)[:, None]).mean()


def one_more_position(w: Any, batch: Any) -> Any:
    """Ids and labels are cut out of a sequence that is one longer, which no number of devices divides."""
    logits = attention(w, w["table"][batch["labels"][:, :-1]]) @ w["table"].T
    return -(jax.nn.log_softmax(logits) * jax.nn.one_hot(batch["labels"][:, 1:], WORDS)).sum() / 11


LOSSES: dict[str, Loss] = {
    **{name: loss_of(layer) for name, layer in LAYERS.items()},
    "counted tokens": masked,
    "shifted labels": shifted_labels,
    "one more position": one_more_position,
}
LONGER = {"one more position": LENGTH + 1}
"""Lengths of the labels that are not those of the ids."""


DEFAULT = (
    "grouped attention",
    "shifted",
    "samples and positions as rows",
    "own derivative",
    "own gradient",
    "recurrent",
    "shifted labels",
    "one more position",
)


def inputs(name: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    random = np.random.default_rng(0)
    sizes = {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH), "table": (WORDS, WIDTH)}
    # Small, so that the sine of what layers make is no more than rounding away from what it is in double precision.
    weights = {name: (0.4 * random.standard_normal(size)).astype("f") for name, size in sizes.items()}
    lengths = {"ids": LENGTH, "labels": LONGER.get(name, LENGTH)}
    return weights, {key: random.integers(0, WORDS, (SAMPLES, length)) for key, length in lengths.items()}


def rewritten(name: str, cp: int) -> tuple[TracedLoss, list[Any], list[Any]]:
    """The trace of one device, flat weights, and the batch as the devices get it."""
    weights, batch = inputs(name)
    (weight_leaves, weight_tree), (leaves, tree) = jax.tree.flatten(weights), jax.tree.flatten(batch)

    def flat(given: Any, rows: Any) -> Any:
        return LOSSES[name](jax.tree.unflatten(weight_tree, given), jax.tree.unflatten(tree, rows))

    trace = trace_loss(flat, weight_leaves, leaves)
    forms = sequence_inputs(trace, [True, True], cp)
    parts = [
        np.stack(np.split(leaf, cp, axis=1) if form is SequenceInput.PART else [leaf] * cp)
        for leaf, form in zip(leaves, forms, strict=True)
    ]
    return loss_of_context(trace, forms, cp), weight_leaves, parts


def check_equality(name: str, cp: int) -> None:
    trace, weights, parts = rewritten(name, cp)

    def on_one_device(weights: Any, *rows: Any) -> Any:
        return core.jaxpr_as_fun(trace.flat)(*weights, *rows)[0]

    on_all = jax.vmap(jax.value_and_grad(on_one_device), in_axes=(None, 0, 0), axis_name=AXIS)
    values, gradients = jax.jit(on_all, compiler_options=QUICKLY)(weights, *parts)
    expected, expected_gradients = jax.jit(jax.value_and_grad(LOSSES[name]), compiler_options=QUICKLY)(*inputs(name))
    np.testing.assert_allclose(values, np.full(cp, expected), rtol=2e-5)
    for gradient, whole in zip(gradients, jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(gradient.sum(0) / cp, whole, atol=2e-5 * float(np.abs(whole).max()))


@pytest.mark.parametrize("name", DEFAULT)
def test_parts_of_sequences_give_the_loss_and_gradients_of_whole_ones(name: str) -> None:
    check_equality(name, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_every_kind_give_the_loss_and_gradients_of_whole_ones(name: str, cp: int) -> None:
    check_equality(name, cp)


def collectives(trace: core.Jaxpr) -> Counter[tuple[str, tuple[int, ...]]]:
    """The collectives of a trace, with the shapes that they take."""
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for equation in trace.eqns:
        if str(equation.primitive) in ("all_gather", "psum", "psum2", "psum_invariant"):
            found[str(equation.primitive)[:4], equation.invars[0].aval.shape] += 1
        for inner in inner_traces(equation):
            found += collectives(inner)
    return found


def test_attention_gathers_keys_and_values_before_they_are_repeated_and_nothing_else() -> None:
    trace, _, _ = rewritten("grouped attention", 2)
    key = (SAMPLES, LENGTH // 2, HEADS // 2, WIDTH // HEADS)
    assert collectives(trace.flat.jaxpr) == {("all_", key): 2, ("psum", ()): 1}


@pytest.mark.parametrize("name", ["shifted labels", "one more position"])
def test_labels_of_the_next_position_gather_nothing_beside_keys_and_values(name: str) -> None:
    trace, _, _ = rewritten(name, 2)
    key = (SAMPLES, LENGTH // 2, WIDTH)
    assert collectives(trace.flat.jaxpr) == {("all_", key): 2, ("psum", ()): 1}


@pytest.mark.parametrize("name", ["dense", "positions", "own derivative", "running along the width", "stacked layers"])
def test_what_treats_positions_alike_gathers_nothing(name: str) -> None:
    trace, _, _ = rewritten(name, 2)
    assert {kind for kind, _ in collectives(trace.flat.jaxpr)} == {"psum"}
