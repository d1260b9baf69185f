"""The loss as one kernel: where stacks have one, what it leaves out, and what plans then count."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graphs import argument_values, tiny_graph
from oracles.numpy_reference import evaluate_graph

import phaze
from phaze.cost import IDEAL, LIBRARY_STACK, AttentionMode, Fusion, calibration_of, fuses_loss, planned_graph
from phaze.cost.stack_fusions import fuse_loss
from phaze.hardware import preset
from phaze.ir import DType, Graph, RecomputeMode, kept_tensors


def logits_bytes(graph: Graph) -> float:
    """Bytes for each logit that the last layer keeps between forward and backward."""
    layer = graph.layers[-1]
    vocabulary = max(
        graph.tensors[name].shape[-1] for op in layer.forward for name in op.outputs if graph.tensors[name].shape
    )
    kept = [graph.tensors[name] for name in kept_tensors(graph, layer, RecomputeMode.NONE)]
    wide = [tensor for tensor in kept if tensor.shape and tensor.shape[-1] == vocabulary]
    return sum(tensor.size_bytes for tensor in wide) / wide[0].elements


@pytest.mark.parametrize("name", ["gpt2", "llama2-7b", "qwen3-0.6b", "t5-large"])
def test_a_fused_loss_keeps_logits_in_their_own_type_and_writes_their_gradient_in_it(name: str) -> None:
    graph = phaze.import_graph(name, sequence_length=16)
    fused = fuse_loss(graph)
    assert logits_bytes(graph) == 4
    assert logits_bytes(fused) == 2
    gradient = next(op for op in fused.ops if op.function == "cross_entropy_backward")
    assert fused.tensors[gradient.outputs[0]].dtype is DType.BFLOAT16
    assert fused.matmul_flops("backward") == graph.matmul_flops("backward")
    assert len(fused.layers) == len(graph.layers)
    assert fuse_loss(fused) is fused


def test_a_fused_loss_computes_the_same() -> None:
    graph = tiny_graph("llama")
    values = argument_values(graph)
    fused = fuse_loss(graph)
    before, after = evaluate_graph(graph, values), evaluate_graph(fused, values)
    assert after[fused.outputs[0]] == pytest.approx(before[graph.outputs[0]])
    for (name, gradient), (_, expected) in zip(fused.gradients, graph.gradients, strict=True):
        assert np.allclose(after[gradient], before[expected]), name


@pytest.mark.parametrize(
    ("chip", "is_fused"),
    [
        ("tpuv5e", True),
        ("tpuv5p", True),
        ("tpu7x", True),
        ("a100-80gb", False),
        ("h100", False),
        ("tpuv4-paper", False),
    ],
)
def test_tpus_fuse_the_loss_and_libraries_only_where_they_say_so(chip: str, is_fused: bool) -> None:
    accelerator = preset(chip).accelerator
    assert fuses_loss(accelerator, calibration_of(accelerator)) is is_fused
    said = replace(IDEAL, stack=replace(LIBRARY_STACK, fusion=Fusion.CHAINS_AND_LOSS))
    assert fuses_loss(accelerator, said)


def test_plans_with_a_stack_that_fuses_the_loss_need_less_memory_and_are_verified() -> None:
    asked: dict[str, Any] = {"cluster": "a100-80gb:1", "global_batch_size": 8, "sequence_length": 256, "target": None}
    strategy = {"dp": 1, "micro_batch_size": 8}
    plain = calibration_of(preset("a100-80gb").accelerator)
    fusing = replace(plain, stack=replace(plain.stack, fusion=Fusion.CHAINS_AND_LOSS))
    before, after = (
        phaze.evaluate("gpt2", strategy=strategy, calibration=calibration, compares=False, **asked).plan
        for calibration in (plain, fusing)
    )
    logits = 8 * 256 * 50257
    saved = before.stages[0].memory_bytes["activations"] - after.stages[0].memory_bytes["activations"]
    assert saved == pytest.approx(2 * logits)
    assert after.step_time_s < before.step_time_s
    from phaze.verify.plan_checks import check_plan

    asked_again = phaze.import_graph("gpt2", sequence_length=256)
    assert [finding for finding in check_plan(after, asked_again) if not finding.holds] == []


def test_a_loss_whose_logits_nothing_copies_stays_as_it_is() -> None:
    graph = fuse_loss(tiny_graph("llama"))
    assert planned_graph(graph, AttentionMode.UNFUSED, has_fused_loss=True) == graph
