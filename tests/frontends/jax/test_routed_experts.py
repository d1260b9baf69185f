"""In traced models, the ops that bring tokens to experts are found; heads and dense mixtures are not taken for them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax_models import ids, shape

import phaze
from phaze.shard.expert_slicing import expert_counts, expert_dims

WIDTH, LENGTH, EXPERTS, ROOM, WORDS = 12, 16, 4, 6, 20


def by_mask(w: Any, x: Any) -> Any:
    """Switch: each expert takes the first tokens of a sample that choose it."""
    gates = jax.nn.softmax(x @ w["router"])
    chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS)
    place = (jnp.cumsum(chosen, axis=1) * chosen - 1).astype(jnp.int32)
    mask = jax.nn.one_hot(place, ROOM) * chosen[..., None]
    hidden = jax.nn.gelu(jnp.einsum("bsec,bsi,eij->becj", mask, x, w["up"]))
    return jnp.einsum("becj,eji,bsec,bse->bsi", hidden, w["down"], mask, gates)


def by_experts_choice(w: Any, x: Any) -> Any:
    """Each expert takes the tokens that it scores highest, looked up by their numbers."""
    scores = jax.nn.softmax(x @ w["router"]).swapaxes(1, 2)
    values, places = jax.lax.top_k(scores, ROOM)
    rows = jnp.take_along_axis(x[:, None], places[..., None], axis=2)
    results = jax.nn.gelu(rows @ w["up"]) @ w["down"]
    return jnp.einsum("beci,becs,bec->bsi", results, jax.nn.one_hot(places, LENGTH), values)


def dense(w: Any, x: Any) -> Any:
    """All experts on all tokens."""
    values, places = jax.lax.top_k(jax.nn.softmax(x @ w["router"]), 2)
    gates = (jax.nn.one_hot(places, EXPERTS) * values[..., None]).sum(-2)
    return jnp.einsum("bsef,efi,bse->bsi", jax.nn.gelu(jnp.einsum("bsi,eif->bsef", x, w["up"])), w["down"], gates)


def latent_heads(w: Any, x: Any) -> Any:
    """Attention to keys that all heads share, with a matrix of each head's own before and behind."""
    query = jnp.einsum("bsi,eij->besj", x, w["up"])
    weights = jax.nn.softmax(jnp.einsum("besj,btj->best", query, jnp.concatenate([x, x], -1)))
    context = jnp.einsum("best,btj->besj", weights, jnp.concatenate([x, x], -1))
    return jnp.einsum("besj,eji->besi", context, w["down"]).sum(1)


def imported(block: Callable[[Any, Any], Any]) -> phaze.Graph:
    def loss(params: Any, batch: Any) -> Any:
        x = params["embed"][batch]
        for w in params["layers"]:
            x = x + block(w, x)
        return ((x @ params["embed"].T) ** 2).mean()

    layer = {
        "router": shape(WIDTH, EXPERTS),
        "up": shape(EXPERTS, WIDTH, 2 * WIDTH),
        "down": shape(EXPERTS, 2 * WIDTH, WIDTH),
    }
    return phaze.import_graph(loss, ({"embed": shape(WORDS, WIDTH), "layers": [layer, layer]}, ids(4)))


@pytest.mark.parametrize("block", [by_mask, by_experts_choice])
def test_rows_that_a_choice_made_belong_to_experts(block: Callable[[Any, Any], Any]) -> None:
    graph = imported(block)
    assert list(expert_counts(graph).values()) == [EXPERTS, EXPERTS]
    assert expert_dims(graph) == {f"params.layers.{layer}.{name}": 0 for layer in (0, 1) for name in ("up", "down")}
    assert expert_counts(graph.with_micro_batch(1)) == expert_counts(graph)


@pytest.mark.parametrize("block", [dense, latent_heads])
def test_experts_on_all_tokens_and_heads_are_not_divided(block: Callable[[Any, Any], Any]) -> None:
    assert not expert_counts(imported(block))
