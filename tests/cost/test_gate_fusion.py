"""Gated activations as one kernel: what that leaves out, and which plans count it."""

from typing import Any

import pytest
from graphs import tiny_graph

import phaze
from phaze.cost import LIBRARY_STACK, PERFECT_STACK, Calibration, Fusion
from phaze.cost.stack_fusions import fuse_gates, fuses_gates, with_fused_gates
from phaze.ir import Graph, OpKind, Phase, RecomputeMode, kept_tensors


def kept_bytes(graph: Graph) -> int:
    """What a block in the middle keeps between forward and backward."""
    layer = graph.layers[2]
    return sum(graph.tensors[name].size_bytes for name in kept_tensors(graph, layer, RecomputeMode.NONE))


@pytest.mark.parametrize(("name", "width"), [("llama2-7b", 11008), ("qwen3-0.6b", 3072), ("gemma-2b", 16384)])
def test_a_fused_gate_keeps_its_operands_and_not_what_was_activated(name: str, width: int) -> None:
    graph = phaze.import_graph(name, sequence_length=16)
    fused = fuse_gates(graph)
    assert kept_bytes(graph) - kept_bytes(fused) == 2 * 16 * width * graph.micro_batch_size
    assert fused.matmul_flops("backward") == graph.matmul_flops("backward")
    assert len(fused.layers) == len(graph.layers)
    backward = [op for op in fused.ops if op.phase is Phase.BACKWARD and op.function == "fused_backward"]
    assert all(op.kind is OpKind.ELEMENTWISE and len(op.inputs) == 3 and len(op.outputs) == 2 for op in backward)
    assert fuse_gates(fused) is fused


def test_a_model_without_gates_stays_as_it_is() -> None:
    graph = tiny_graph("gpt2")
    assert fuse_gates(graph) is graph


def test_gates_are_fused_where_the_stack_runs_chains_and_says_so() -> None:
    library = Calibration(stack=LIBRARY_STACK)
    assert not fuses_gates(library)
    assert with_fused_gates(library).stack.fusion is Fusion.CHAINS_AND_GATES
    assert fuses_gates(with_fused_gates(library))
    perfect = Calibration(stack=PERFECT_STACK)
    assert with_fused_gates(perfect) is perfect


def test_plans_for_megatron_keep_no_activated_gate_and_are_verified() -> None:
    asked: dict[str, Any] = {"cluster": "h100:8", "global_batch_size": 32, "sequence_length": 512}
    strategy = {"dp": 4, "tp": 2, "zero": 1, "micro_batch_size": 2, "sequence_parallel": True, "recompute": "none"}
    before, after = (
        phaze.evaluate("qwen3-0.6b", strategy=strategy, target=target, compares=False, **asked).plan
        for target in (None, "megatron-lm")
    )
    blocks, activated = 28, 2 * 512 * 3072 // 2 * 2
    saved = before.stages[0].memory_bytes["activations"] - after.stages[0].memory_bytes["activations"]
    assert saved == pytest.approx(blocks * activated)
    assert after.question.calibration.stack.fusion is Fusion.CHAINS_AND_GATES
    from phaze.verify.plan_checks import check_plan

    model = phaze.import_graph("qwen3-0.6b", sequence_length=512)
    assert [finding for finding in check_plan(after, model) if not finding.holds] == []
