from pathlib import Path

import numpy as np
import pytest
from graphs import TINY_CONFIGS, argument_values, tiny_graph

import phaze
from phaze.cost import fuse_attention, price_ops
from phaze.errors import CostError
from phaze.hardware import preset
from phaze.ir import OpKind, Phase, stashed_bytes
from phaze.ir.reference import evaluate_graph
from phaze.ir.text import format_graph

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
WITHOUT_BIAS = [name for name in TINY_CONFIGS if not name.startswith("t5")]


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


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma", "qwen2"])
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
    from dataclasses import replace

    graph = tiny_graph("llama")
    last = replace(graph.ops[-1], phase=Phase.UPDATE)
    with pytest.raises(CostError, match="holds update ops"):
        fuse_attention(replace(graph, ops=(*graph.ops[:-1], last)))
