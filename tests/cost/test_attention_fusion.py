from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graphs import TINY_CONFIGS, argument_values, tiny_graph
from oracles.numpy_reference import evaluate_graph

import phaze
from phaze.cost import fuse_attention, op_work, price_ops
from phaze.errors import CostError
from phaze.hardware import preset
from phaze.ir import Graph, GraphBuilder, OpKind, Phase, Role, stashed_bytes
from phaze.ir.graph import format_graph

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
# Position biases are not fused, and Mamba has no attention.
NOT_FUSED = ("t5", "mamba2")
WITHOUT_BIAS = [name for name in TINY_CONFIGS if not name.startswith(NOT_FUSED)]


def attentions(graph: object, phase: Phase) -> int:
    return sum(op.kind is OpKind.ATTENTION for op in graph.ops_of(phase))  # type: ignore[attr-defined]


def test_a_tiny_gpt_with_fused_attention_reads_as_its_golden_dump() -> None:
    fused = fuse_attention(tiny_graph("gpt2", 1).with_backward())
    assert format_graph(fused) == (GOLDEN / "tiny_gpt2_fused_attention.txt").read_text()


@pytest.mark.parametrize("name", WITHOUT_BIAS)
def test_every_attention_is_found_forward_and_backward(name: str) -> None:
    graph = tiny_graph(name).with_backward()
    fused = fuse_attention(graph)
    assert attentions(fused, Phase.FORWARD) == attentions(fused, Phase.BACKWARD) == 2
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert fused.matmul_flops(phase) == graph.matmul_flops(phase)
    assert dict(fused.gradients).keys() == dict(graph.gradients).keys()
    assert fused.parameter_count == graph.parameter_count


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma", "qwen2", "gemma2", "gpt_oss", "llama4_text", "deepseek_v3"]
)
def test_a_fused_model_computes_the_same_loss_and_gradients(name: str) -> None:
    graph = tiny_graph(name).with_backward()
    fused = fuse_attention(graph)
    before, after = (evaluate_graph(g, argument_values(g)) for g in (graph, fused))
    np.testing.assert_allclose(before[graph.outputs[0]], after[fused.outputs[0]], rtol=1e-10)
    for parameter in graph.parameters:
        apart, together = (
            sum(values[gradient] for owner, gradient in g.gradients if owner == parameter.id)
            for g, values in ((graph, before), (fused, after))
        )
        np.testing.assert_allclose(together, apart, rtol=1e-7, atol=1e-12)


def test_a_learned_bias_keeps_attention_apart() -> None:
    graph = tiny_graph("t5").with_backward()
    fused = fuse_attention(graph)
    biased = sum(op.function == "biased_softmax" for op in fused.ops_of(Phase.FORWARD))
    assert biased == sum(op.function == "biased_softmax" for op in graph.ops_of(Phase.FORWARD)) > 0
    assert dict(fused.gradients).keys() == dict(graph.gradients).keys()


def test_fused_attention_is_faster_and_keeps_less() -> None:
    graph = phaze.import_graph("gpt2", sequence_length=1024).with_backward()
    fused = fuse_attention(graph)
    chip = preset("h100").accelerator
    times = [price_ops(g, g.ops, chip, prices={}).spread_s.sum() for g in (graph, fused)]
    assert times[1] < 0.8 * times[0]
    kept = [stashed_bytes(g, g.layers[1]) for g in (graph, fused)]
    assert kept[1] < 0.5 * kept[0]


def test_a_graph_without_backward_gets_none() -> None:
    graph = tiny_graph("llama")
    forward = fuse_attention(graph)
    assert attentions(forward, Phase.FORWARD) == 2
    assert bool(forward.ops_of(Phase.BACKWARD)) == bool(graph.ops_of(Phase.BACKWARD))


def test_nothing_to_fuse_is_the_same_graph() -> None:
    fused = fuse_attention(tiny_graph("llama"))
    assert fuse_attention(fused) is fused


def test_phases_that_cannot_be_derived_again_are_refused() -> None:
    graph = tiny_graph("llama")
    last = replace(graph.ops[-1], phase=Phase.UPDATE)
    with pytest.raises(CostError, match="holds update ops"):
        fuse_attention(replace(graph, ops=(*graph.ops[:-1], last)))


def product(
    builder: GraphBuilder, name: str, text: str, sizes: dict[str, int], inputs: tuple[str, str], **marks: str
) -> None:
    builder.add(name, OpKind.CONTRACTION, "einsum", builder.rule(text, sizes, **marks), inputs)


def weighted(scores: str, key: tuple[str, ...], key_role: Role, context: str, value: tuple[str, ...]) -> Graph:
    """x with a key, softmax over e, and a second product of the weights with a value."""
    sizes = {"b": 2, "s": 64, "i": 32, "e": 8, "d": 16}
    builder = GraphBuilder("weighted")
    for name, dims, role in (("x", ("b", "s", "i"), Role.BATCH), ("key", key, key_role), ("value", value, Role.BATCH)):
        builder.argument(name, tuple(sizes[dim] for dim in dims), role)
    product(builder, "scores", scores, sizes, ("x", "key"))
    rule = builder.rule("b s e -> b s e", sizes, normalized="e")
    builder.add("weights", OpKind.SOFTMAX, "softmax", rule, ("scores",))
    product(builder, "mix", context, sizes, ("weights", "value"))
    return builder.build(("mix",))


@pytest.mark.parametrize(
    "graph",
    [
        weighted("b s i, e i -> b s e", ("e", "i"), Role.PARAMETER, "b s e, b e d -> b s d", ("b", "e", "d")),
        weighted("b s i, e i -> b s e", ("e", "i"), Role.PARAMETER, "b s e, b s e d -> b s d", ("b", "s", "e", "d")),
        weighted("b s i, b e i -> b s e", ("b", "e", "i"), Role.BATCH, "b s e, b s e d -> b s d", tuple("bsed")),
        weighted("b s i, b e i -> b s e", ("b", "e", "i"), Role.BATCH, "b s e, b e d -> b s e d", ("b", "e", "d")),
    ],
    ids=["a router over experts", "a router of tokens' own experts", "values of each query", "nothing summed"],
)
def test_what_only_looks_like_attention_stays_apart(graph: Graph) -> None:
    assert fuse_attention(graph) is graph


def test_the_same_form_with_keys_and_values_of_the_batch_is_attention() -> None:
    graph = weighted("b s i, b e i -> b s e", ("b", "e", "i"), Role.BATCH, "b s e, b e d -> b s d", ("b", "e", "d"))
    fused = fuse_attention(graph)
    assert attentions(fused, Phase.FORWARD) == 1
    assert fused.matmul_flops(Phase.FORWARD) == graph.matmul_flops(Phase.FORWARD)


def test_fusing_leaves_notes_of_others_alone() -> None:
    graph = replace(tiny_graph("gpt2"), notes=("captured without backward",)).with_backward()
    notes = fuse_attention(graph).notes
    assert "captured without backward" in notes
    assert notes.count("backward derived by rule") == 1


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_fused_vector_work_is_at_least_that_of_its_parts(phase: Phase) -> None:
    """Softmax and dropout of gpt2 are all inside attention, but for the dropouts after it."""
    graph = tiny_graph("gpt2", 1).with_backward()
    fused = fuse_attention(graph)
    inside = {OpKind.SOFTMAX, OpKind.DROPOUT}
    parts = sum(op_work(op, graph.tensors).vector_operations for op in graph.ops_of(phase) if op.kind in inside)
    whole = sum(
        op_work(op, fused.tensors).vector_operations
        for op in fused.ops_of(phase)
        if op.kind in inside | {OpKind.ATTENTION}
    )
    assert any(op.attribute("probability") for op in fused.ops_of(phase) if op.kind is OpKind.ATTENTION)
    assert whole >= parts if phase is Phase.BACKWARD else whole == parts
