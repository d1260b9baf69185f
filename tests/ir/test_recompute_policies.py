"""Recompute policies by the names of tools: what each keeps of a block, and which are refused."""

import pytest
from graphs import tiny_graph

from phaze.cost import fuse_attention
from phaze.errors import QuestionError
from phaze.hardware import parse_cluster
from phaze.ir import Graph, Layer, OpKind, RecomputeMode, kept_tensors, recomputed_ops
from phaze.ir.kept_activations import MAXTEXT_POLICIES, recompute_mode
from phaze.ir.layers import single_layer
from phaze.shard import Axis, shard_model, slice_layer


def llama_block() -> tuple[Graph, Layer]:
    graph = fuse_attention(tiny_graph("llama").with_backward())
    return graph, next(layer for layer in graph.layers if layer.name.endswith(".0"))


KEPT = {
    "none": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "context"},
    "minimal_with_context": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "context"},
    "minimal": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"},
    "save_dot_except_mlp": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "save_qkv_proj": {"q_proj", "k_proj", "v_proj"},
    "save_out_proj": {"o_proj"},
    "full": set[str](),
}
"""Of MaxText's names (layers/decoders.py); the result of the last product, `down_proj`, nobody reads."""


@pytest.mark.parametrize("policy", MAXTEXT_POLICIES)
def test_a_policy_of_maxtext_keeps_the_tensors_that_it_names(policy: str) -> None:
    graph, block = llama_block()
    mode = recompute_mode(policy)
    kept = set(kept_tensors(graph, block, mode))
    producers = [op for op in block.forward if kept & set(op.outputs)]
    products = {op.id.split(".")[-2] for op in producers if op.kind is OpKind.CONTRACTION}
    contexts = {"context" for op in producers if op.kind is OpKind.ATTENTION}
    if policy == "none":
        # Without recompute, rotated queries and keys are kept in the place of plain ones.
        assert contexts == {"context"}
        assert recomputed_ops(graph, block, mode) == ()
    else:
        assert products | contexts == KEPT[policy]


@pytest.mark.parametrize("policy", [name for name in MAXTEXT_POLICIES if name not in ("none", "full")])
def test_what_a_policy_keeps_does_not_run_again(policy: str) -> None:
    graph, block = llama_block()
    again = recomputed_ops(graph, block, recompute_mode(policy))
    products = {op.id.split(".")[-2] for op in again if op.kind is OpKind.CONTRACTION}
    assert products.isdisjoint(KEPT[policy])
    reruns_attention = any(op.kind is OpKind.ATTENTION for op in again)
    assert reruns_attention == ("context" not in KEPT[policy])


def test_modes_are_listed_from_the_one_that_keeps_most_to_the_one_that_keeps_least() -> None:
    """As placement and exports take them; `products` of torchtitan stands between two of MaxText's."""
    graph, block = llama_block()
    sizes = {
        mode: sum(graph.tensors[name].size_bytes for name in kept_tensors(graph, block, mode))
        for mode in RecomputeMode
        if mode.budget is None
    }
    assert sizes[RecomputeMode.NONE] == sizes[RecomputeMode.SELECTIVE]
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)


def test_devices_that_share_a_product_keep_its_sum_and_not_its_parts() -> None:
    """With sequences split, the sum of a row-parallel product is a tp-th of each of its parts."""
    graph, block = llama_block()
    sharded = shard_model(graph, Axis(parse_cluster("h100:2"), 2)).layers[block.index]
    local = slice_layer(sharded)
    layer = single_layer(local)
    kept = kept_tensors(local, layer, RecomputeMode.DOTS)
    sums = [op for op in layer.forward if op.function in ("all_reduce", "reduce_scatter")]
    partial = {op.inputs[0] for op in sums}
    assert sums
    assert partial.isdisjoint(kept)
    again = {op.id for op in recomputed_ops(local, layer, RecomputeMode.DOTS)}
    assert again.isdisjoint(op.id for op in sums if op.outputs[0] in kept)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("dots_with_no_batch_dims_saveable", "dots"),
        ("nothing_saveable", "full"),
        ("everything_saveable", "none"),
        ("selective-op", "products"),
        ("core_attn", "selective"),
        ("minimal_flash", "dots+context"),
        ("Full", "full"),
        ("save-qkv-proj", "qkv"),
    ],
)
def test_names_of_other_tools_mean_modes(name: str, mode: str) -> None:
    assert recompute_mode(name) is RecomputeMode(mode)


def test_offloaded_and_unknown_policies_are_refused_by_name() -> None:
    with pytest.raises(QuestionError, match="'dots'; write that, and offload=activations in the strategy"):
        recompute_mode("minimal_offloaded")
    with pytest.raises(QuestionError, match=r"recompute 'save_qkv'; expected .* Did you mean save_qkv_proj"):
        recompute_mode("save_qkv")
    with pytest.raises(QuestionError, match=r"recompute 'dots_saveable'; expected .* Did you mean dots\+context"):
        recompute_mode("dots_saveable")
