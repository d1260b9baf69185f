"""What ZeRO gathers at once: a layer in torch, one operand of a product under XLA."""

from typing import Any

import pytest

import phaze
from phaze.verify.plan_checks import check_plan


@pytest.mark.parametrize(("chip", "is_by_matrix"), [("tpuv5p", True), ("h100", False)])
def test_buffers_of_zero_3_hold_a_layer_or_under_xla_its_largest_matrix(chip: str, is_by_matrix: bool) -> None:
    asked: dict[str, Any] = {"cluster": f"{chip}:8", "global_batch_size": 32, "target": None}
    strategy = {"dp": 8, "zero": 3, "micro_batch_size": 1}
    config = {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 1024,
    }
    model = phaze.import_graph(config, sequence_length=128)
    plan = phaze.evaluate(model, strategy=strategy, compares=False, **asked).plan
    matrix, layer = 1024 * 4096, 4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024
    gathered, scattered = 2 * plan.question.precision.parameter_bytes, plan.question.precision.reduction_bytes
    moved = matrix if is_by_matrix else layer
    assert plan.stages[0].memory_bytes["buffers"] == pytest.approx(moved * (gathered + scattered))
    assert [finding for finding in check_plan(plan, model) if not finding.holds] == []
