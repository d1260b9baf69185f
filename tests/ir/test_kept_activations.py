"""What a layer keeps for backward, with and without recomputation, against published counts."""

import pytest
from graphs import kept_bytes, tiny_graph

from phaze.cost import fuse_attention
from phaze.frontends.transformer_config import graph_from_config
from phaze.ir import (
    GraphBuilder,
    OpKind,
    Phase,
    RecomputeMode,
    Role,
    kept_tensors,
    recomputed_ops,
    stashed_bytes,
    stashed_tensors,
)
from phaze.ir.graph_builder import elementwise_rule


@pytest.mark.parametrize("family", ["gpt2", "megatron-gpt"])
def test_selective_recomputation_keeps_34_and_full_2_bytes_an_element(family: str) -> None:
    """arXiv:2205.05198, table 2: 34 s b h with selective recomputation, 2 s b h with full."""
    graph = tiny_graph(family, 2)
    layer, elements = graph.layers[1], 2 * 8 * 12
    assert kept_bytes(graph, layer, RecomputeMode.SELECTIVE) == 34 * elements
    assert kept_bytes(graph, layer, RecomputeMode.FULL) == 2 * elements
    assert kept_tensors(graph, layer, RecomputeMode.NONE) == stashed_tensors(graph, layer)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5", "mixtral"])
def test_selective_recomputation_runs_scores_softmax_and_dropout_again(family: str) -> None:
    graph = tiny_graph(family)
    block = next(layer for layer in graph.layers if layer.name.endswith(".0"))
    again = [op.id.rsplit(".", 1)[-1] for op in recomputed_ops(graph, block, RecomputeMode.SELECTIVE)]
    assert again[:2] == ["scores", "softmax"]
    assert set(again) <= {"scores", "softmax", "dropout"}


def test_every_other_product_of_a_llama_block_is_kept_and_the_rest_runs_again() -> None:
    """Of q, k, v, o, gate, up and down the results of k, o and up are made again; that of down nobody reads."""
    graph = fuse_attention(tiny_graph("llama"))
    block = next(layer for layer in graph.layers if layer.name.endswith(".0"))
    kept = kept_tensors(graph, block, RecomputeMode.PRODUCTS)
    again = recomputed_ops(graph, block, RecomputeMode.PRODUCTS)
    products = [op.id.rsplit(".", 2)[-2] for op in again if op.kind is OpKind.CONTRACTION]
    assert products == ["k_proj", "o_proj", "up_proj"]
    assert [name.rsplit(".", 2)[-2] for name in kept if name.endswith("matmul")] == ["gate_proj", "v_proj", "q_proj"]
    assert "attention" not in {op.function for op in again}


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5", "mixtral"])
@pytest.mark.parametrize("mode", [mode for mode in RecomputeMode if mode.budget is None])
def test_what_is_kept_and_what_runs_again_give_backward_all_that_it_reads(family: str, mode: RecomputeMode) -> None:
    graph = tiny_graph(family)
    for layer in graph.layers:
        there = set(kept_tensors(graph, layer, mode))
        made = {name for op in layer.forward for name in op.outputs}
        for op in recomputed_ops(graph, layer, mode):
            assert all(graph.storage(name) in there or name in there for name in op.inputs if name in made)
            there.update(op.outputs)
        assert {name for name in stashed_tensors(graph, layer) if name in made} <= there


def test_full_recomputation_runs_the_forward_again() -> None:
    graph = tiny_graph("gpt2")
    assert recomputed_ops(graph, graph.layers[1], RecomputeMode.FULL) == graph.layers[1].forward
    assert recomputed_ops(graph, graph.layers[1], RecomputeMode.NONE) == ()


def test_trimmed_recomputation_leaves_out_what_backward_does_not_read() -> None:
    graph = tiny_graph("llama")
    block = next(layer for layer in graph.layers if layer.name.endswith(".0"))
    trimmed = recomputed_ops(graph, block, RecomputeMode.FULL, is_trimmed=True)
    made = {graph.storage(name) for op in trimmed for name in op.outputs}
    assert set(stashed_tensors(graph, block)) <= made | {graph.storage(name) for name in block.inputs}
    left_out = [op.id.rsplit(".", 1)[-1] for op in block.forward if op not in trimmed]
    assert left_out[-1].startswith(("add", "residual")), left_out
    assert trimmed == tuple(op for op in block.forward if op in trimmed)


def test_a_relayed_tensor_that_enters_is_kept_under_full_recomputation() -> None:
    config = {"model_type": "t5", "num_layers": 3, "d_model": 8, "d_kv": 4, "num_heads": 2, "d_ff": 8, "vocab_size": 9}
    graph = graph_from_config(config, name="t5", sequence_length=4)
    decoder = next(layer for layer in graph.layers if layer.name == "decoder.block.1")
    assert "encoder.final_layer_norm.dropout" in kept_tensors(graph, decoder, RecomputeMode.FULL)


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
    fused = fuse_attention(graph)
    assert [stashed_bytes(fused, layer) for layer in fused.layers[1:-1]] == [34 * length * batch * hidden] * 2


def test_a_llama_layer_with_fused_attention_keeps_its_closed_form() -> None:
    """Inputs of two norms and of the seven products, queries and keys rotated, values, context, gate, up and product.

    In bytes: 2 s b (2 h + 2 h + (a + 2 g) d + a d + 4 f); rotated queries and keys are kept instead of plain ones.
    """
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 80}
    config = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 9, **sizes}
    graph = fuse_attention(graph_from_config(config, name="llama", micro_batch_size=3, sequence_length=32))
    elements = 2 * 48 + 2 * 48 + (6 + 2 * 2) * 8 + 6 * 8 + 4 * 80
    assert [stashed_bytes(graph, layer) for layer in graph.layers[1:-1]] == [2 * 3 * 32 * elements] * 2


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
