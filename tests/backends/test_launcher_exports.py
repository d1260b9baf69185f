"""Texts for torchtitan and Megatron-LM: golden, with what they cannot express refused."""

from typing import Any

import pytest
from plans import small_cluster, small_graph

import phaze
from phaze.errors import PlanError
from phaze.plan.plan import Plan

FIXED = {"schedule": "none", "chunks": 1, "recompute": "none", "pp": 1, "tp": 1, "dp": 8, "zero": 0}


def plan_of(**strategy: Any) -> Plan:
    chosen = {**FIXED, "micro_batch_size": 2, **strategy}
    question = {"global_batch_size": 32, "tp": (chosen["tp"],), "target": None}
    return phaze.evaluate(small_graph(), cluster=small_cluster(), strategy=chosen, compares=False, **question).plan


def uneven_pipeline(**changes: Any) -> Plan:
    return plan_of(dp=2, tp=2, pp=2, schedule="1f1b", stages=[2, 4], recompute="full", **changes)


TITAN = """\
# Written by Phaze: the settings that a plan decides.
#
# For torchtitan 0.3.0: small-gpt on 8 x ideal-a100, by Phaze.
# Checked: parsed by torchtitan 0.3.0's ConfigManager, ...

BASE = {
    'module': 'llama3',
    'config': 'llama3_8b',
    'flavor': '8B',
}

TRAINING = {
    'seq_len': 256,
    'local_batch_size': 16,
    'global_batch_size': 32,
    'mixed_precision_param': 'bfloat16',
    'disable_cuda_graphs': True,
}

PARALLELISM = {
    'data_parallel_replicate_degree': 1,
    'data_parallel_shard_degree': 2,
    'tensor_parallel_degree': 2,
    'enable_sequence_parallel': False,
    'context_parallel_degree': 1,
    'expert_parallel_degree': 1,
    'pipeline_parallel_degree': 2,
    'fsdp_reshard_after_forward': 'never',
    'pipeline_parallel_schedule': '1F1B',
    'pipeline_parallel_microbatch_size': 2,
    'module_fqns_per_model_part': STAGES,
}

ACTIVATION_CHECKPOINT = {
    'mode': 'full',
}

QUANTIZATION = {
    'float8': False,
}
"""

MEGATRON = """\
# For Megatron-LM core_v0.16: small-gpt on 8 x ideal-a100, by Phaze.
# Checked: values accepted by megatron-core 0.16.1's TransformerConfig ...
PLANNED=(
  --tensor-model-parallel-size 2
  --pipeline-model-parallel-size 2
  --context-parallel-size 1
  --expert-model-parallel-size 1
  --micro-batch-size 2
  --global-batch-size 32
  --seq-length 256
  --bf16
  --sequence-parallel
  --use-distributed-optimizer
  --pipeline-model-parallel-layout 'Et|t*3L'
  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1
)
"""


def shortened(text: str) -> list[str]:
    """The lines of a file, that which says how it was checked cut behind its first words."""
    lines = text.splitlines()
    return [" ".join(line.split()[:6]) if line.startswith("# Checked") else line for line in lines]


def test_torchtitan_gets_a_module_of_settings() -> None:
    files = uneven_pipeline(zero=2, sequence_parallel=False).export("torchtitan")
    settings, _, program = files["torchtitan_plan.py"].partition("\n\ndef planned():")
    stages = "[['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'layers.3', 'norm', 'lm_head']]"
    assert shortened(settings) == shortened(TITAN.replace("STAGES", stages))
    assert "return config" in program
    assert "torchtitan.toml" not in files  # version 0.2 splits sequences wherever there is tp


def test_torchtitan_0_2_gets_its_sections() -> None:
    text = uneven_pipeline(zero=2, sequence_parallel=True).export("torchtitan")["torchtitan.toml"]
    for line in (
        "[parallelism]",
        "data_parallel_shard_degree = 2",
        'module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "layers.3", "norm", '
        '"output"]]',
    ):
        assert line in text.splitlines()
    assert "enable_sequence_parallel" not in text


def test_torchtitan_gets_one_microbatch_at_a_time_without_a_pipeline() -> None:
    text = plan_of(zero=3, recompute="products").export("torchtitan")["torchtitan.toml"]
    for line in (
        "local_batch_size = 2",
        "data_parallel_shard_degree = 8",
        'fsdp_reshard_after_forward = "always"',
        'mode = "selective"',
        'selective_ac_option = "op"',
    ):
        assert line in text.splitlines()
    assert "data_parallel_replicate_degree = 8" in plan_of().export("torchtitan")["torchtitan.toml"].splitlines()


def test_every_other_product_kept_is_torchtitans_selective_mode_and_none_of_megatrons() -> None:
    plan = plan_of(zero=3, recompute="products")
    with pytest.raises(PlanError, match="cannot run this plan: it has recompute mode products"):
        plan.export("megatron-lm")
    with pytest.raises(PlanError, match="cannot run this plan: it has recompute mode selective"):
        plan_of(zero=3, recompute="selective").export("torchtitan")


def test_megatron_gets_its_arguments() -> None:
    text = uneven_pipeline(zero=1, sequence_parallel=True).export("megatron-lm")["megatron_lm.sh"]
    assert shortened(text) == shortened(MEGATRON)


def test_megatron_shards_parameters_by_its_own_fsdp() -> None:
    text = plan_of(zero=3, recompute="selective").export("megatron-lm")["megatron_lm.sh"]
    assert "  --data-parallel-sharding-strategy optim_grads_params" in text.splitlines()
    assert "  --recompute-modules core_attn" in text.splitlines()


def test_chunks_of_a_device_go_round_the_devices() -> None:
    plan = plan_of(dp=4, pp=2, schedule="interleaved-1f1b", chunks=2, stages=[2, 1, 1, 2])
    assert "--pipeline-model-parallel-layout 'Et|t|t|tL'" in plan.export("megatron-lm")["megatron_lm.sh"]
    text = plan_of(dp=1, tp=4, pp=2, schedule="interleaved-1f1b", chunks=2, stages=[2, 1, 1, 2]).export("torchtitan")
    assert "'pipeline_parallel_schedule': 'Interleaved1F1B'," in text["torchtitan_plan.py"]


@pytest.mark.parametrize(
    ("target", "strategy", "message"),
    [
        ("torchtitan", {"zero": 1}, r"cannot run this plan: it has ZeRO stage 1. Plan with target='torchtitan'"),
        ("torchtitan", {"dp": 4, "pp": 2, "schedule": "zero-bubble"}, "a pipeline with schedule zero-bubble"),
        ("megatron-lm", {"dp": 4, "pp": 2, "schedule": "gpipe"}, "a pipeline with schedule gpipe"),
        ("megatron-lm", {"dp": 4, "pp": 2, "schedule": "1f1b", "zero": 2}, "1f1b together with ZeRO stage 2"),
    ],
)
def test_what_a_launcher_does_not_run_is_refused_with_what_to_do(
    target: str, strategy: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(**strategy).export(target)
