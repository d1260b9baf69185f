"""Attention as frameworks trace it becomes one kernel in the graph that is planned, whatever form it was written in."""

import jax
import jax.numpy as jnp
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import phaze
from phaze.cost import AttentionMode, planned_graph
from phaze.ir import Graph, Op, OpKind, Phase, Role
from phaze.ir.backward import derive_backward

BATCH, LENGTH, HEADS, GROUPS, WIDTH = 3, 40, 4, 2, 16


def only_attention(graph: Graph) -> Op:
    """The one attention of a planned graph, whose backward is one op, too, and beside which no scores are left."""
    planned = planned_graph(graph, AttentionMode.FUSED)
    (forward,) = (op for op in planned.ops_of(Phase.FORWARD) if op.kind is OpKind.ATTENTION)
    (backward,) = (op for op in planned.ops_of(Phase.BACKWARD) if op.kind is OpKind.ATTENTION)
    assert backward.gradient_of == forward.id
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert planned.matmul_flops(phase) == derive_backward(graph).matmul_flops(phase)
    squares = [name for name, tensor in planned.tensors.items() if tensor.shape.count(LENGTH) > 1]
    assert not squares  # the kernel makes the mask
    return forward


def key_elements(op: Op) -> list[int]:
    return [op.elements_read[index] for index in (1, 2)]


@pytest.mark.parametrize(("implementation", "dropout"), [("eager", 0.1), ("sdpa", 0.0)])
def test_hugging_face_attention_is_one_kernel_on_keys_that_are_not_repeated(
    implementation: str, dropout: float
) -> None:
    config = LlamaConfig(
        hidden_size=HEADS * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        intermediate_size=96,
        vocab_size=101,
        attn_implementation=implementation,
        attention_dropout=dropout,
    )
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    graph = phaze.import_graph(LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens})
    attention = only_attention(graph)
    assert key_elements(attention) == [BATCH * GROUPS * LENGTH * WIDTH] * 2
    assert attention.attribute("probability") == (dropout or None)


class Attends(torch.nn.Module):
    """A module that calls torch's own attention, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).view(*x.shape[:2], 3, HEADS, WIDTH).transpose(1, 3).unbind(2)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.square().mean()


def test_a_causal_call_names_the_factor_of_its_query_positions() -> None:
    attention = only_attention(phaze.import_graph(Attends(), (torch.zeros(BATCH, LENGTH, HEADS * WIDTH),)))
    causal = attention.attribute("causal")
    assert isinstance(causal, str)
    assert [attention.rule.size(name) for name in causal.split()] == [LENGTH]
    assert attention.rule.operands[0][2].factors == tuple(causal.split())


def written_out(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    scores = jnp.einsum("bsgrd,btgd->bgrst", query.reshape(*query.shape[:2], GROUPS, -1, WIDTH), key) / WIDTH**0.5
    seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    return jnp.einsum("bgrst,btgd->bsgrd", weights, value)


def repeated(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    key, value = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (key, value))
    scores = 30.0 * jnp.tanh(jnp.einsum("bshd,bthd->bhst", query, key) / 30.0)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, axis=-1), value)


def library(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize("attend", [written_out, repeated, library])
def test_jax_attention_is_one_kernel(attend: object) -> None:
    def loss(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        query, key, value = (
            (x @ parameters[name]).reshape(*x.shape[:2], -1, WIDTH) for name in ("query", "key", "value")
        )
        return (attend(query, key, value).reshape(*x.shape[:2], -1) @ parameters["out"]).mean()  # type: ignore[operator]

    wide, narrow = HEADS * WIDTH, GROUPS * WIDTH
    shapes = {"query": (wide, wide), "key": (wide, narrow), "value": (wide, narrow), "out": (wide, wide)}
    parameters = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    graph = phaze.import_graph(loss, (parameters, jnp.zeros((BATCH, LENGTH, wide))))
    assert key_elements(only_attention(graph)) == [BATCH * GROUPS * LENGTH * WIDTH] * 2


def test_a_padding_mask_of_the_batch_is_read_by_the_kernel() -> None:
    def loss(parameters: jax.Array, x: jax.Array, lengths: jax.Array) -> jax.Array:
        y = (x @ parameters).reshape(*x.shape[:2], HEADS, WIDTH)
        seen = jnp.arange(LENGTH)[None, None, None, :] < lengths[:, None, None, None]
        scores = jnp.where(seen, jnp.einsum("bshd,bthd->bhst", y, y), -1e9)
        return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), y).mean()

    arguments = (jnp.zeros((64, 64)), jnp.zeros((BATCH, LENGTH, 64)), jnp.zeros(BATCH, jnp.int32))
    graph = phaze.import_graph(loss, arguments)
    attention = only_attention(graph)
    assert len(attention.inputs) == 4
    assert graph.tensors[attention.inputs[3]].role is not Role.OTHER
