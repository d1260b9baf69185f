"""What a layer keeps for backward, against published counts."""

import pytest
from graphs import tiny_graph

from phaze.frontends.transformer_config import graph_from_config
from phaze.ir import GraphBuilder, OpKind, Phase, Role, stashed_bytes, stashed_tensors
from phaze.ir.shape_rules import elementwise_rule


@pytest.mark.parametrize("family", ["gpt2", "megatron-gpt"])
@pytest.mark.parametrize(("batch", "length", "hidden", "heads"), [(1, 16, 8, 2), (4, 32, 24, 3), (2, 2048, 6144, 64)])
def test_a_gpt_layer_keeps_what_korthikanti_et_al_count(
    family: str, batch: int, length: int, hidden: int, heads: int
) -> None:
    """s b h (34 + 5 a s / h): arXiv:2205.05198 (Reducing Activation Recomputation), equation 1."""
    names = {"gpt2": ("n_layer", "n_embd", "n_head", "n_positions")}.get(
        family, ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    )
    sizes = dict(zip(names, (2, hidden, heads, length), strict=True))
    graph = graph_from_config({"model_type": family, "vocab_size": 9, **sizes}, name="gpt", micro_batch_size=batch)
    expected = 34 * length * batch * hidden + 5 * heads * length**2 * batch
    assert [stashed_bytes(graph, layer) for layer in graph.layers[1:-1]] == [expected, expected]


def test_parameters_and_constants_are_not_kept_twice() -> None:
    graph = tiny_graph("llama")
    kept = {tensor_id for layer in graph.layers for tensor_id in stashed_tensors(graph, layer)}
    assert not kept & {tensor.id for tensor in graph.parameters}
    assert not kept & {"rotary_cosine", "rotary_sine"}


def test_views_are_kept_as_the_tensor_whose_memory_they_are() -> None:
    graph = tiny_graph("gpt2")
    kept = stashed_tensors(graph, graph.layers[1])
    assert "transformer.h.0.attn.c_attn.bias_add" in kept
    assert not any(".split" in tensor_id for tensor_id in kept)


def test_what_recomputation_reads_is_kept_instead_of_what_it_makes() -> None:
    builder = GraphBuilder("checkpointed")
    x = builder.argument("x", (4,), Role.BATCH)
    rule = elementwise_rule((4,), (4,))
    (y,) = builder.add("y", OpKind.ELEMENTWISE, "exp", rule, (x,))
    (z,) = builder.add("z", OpKind.ELEMENTWISE, "exp", rule, (y,))
    (again,) = builder.add("z2", OpKind.ELEMENTWISE, "exp", rule, (y,), phase=Phase.RECOMPUTE)
    builder.add("dz", OpKind.ELEMENTWISE, "exp", rule, (again,), phase=Phase.BACKWARD)
    graph = builder.build((z,))
    assert [stashed_tensors(graph, layer) for layer in graph.layers] == [("y",)]
