"""Strategies of other tools' files: what each key becomes, and what is refused."""

from pathlib import Path

import pytest

from phaze.errors import FormatError
from phaze.parallelism import read_strategy
from phaze.strategy_files import read_strategy_file

TORCHTITAN = """
[training]
local_batch_size = 2
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "full"
"""
MEGATRON = """#!/bin/bash
GPUS=64
torchrun pretrain_gpt.py \\
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size=4 --num-layers 32 \\
  --num-layers-per-virtual-pipeline-stage 2 --micro-batch-size 1 --global-batch-size 512 \\
  --use-distributed-optimizer --sequence-parallel --recompute-activations  # and more
"""
ACCELERATE = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n"


@pytest.mark.parametrize(
    ("name", "text", "tool", "expected", "batch"),
    [
        (
            "job.toml",
            TORCHTITAN,
            "torchtitan",
            {"dp": 4, "tp": 8, "pp": 2, "zero": 3, "schedule": "interleaved-1f1b", "recompute": "full"},
            8,
        ),
        (
            "run.sh",
            MEGATRON,
            "megatron-lm",
            {"dp": 2, "tp": 8, "pp": 4, "zero": 1, "chunks": 4, "recompute": "selective", "sequence_parallel": True},
            512,
        ),
        (
            "ds.json",
            '{"train_batch_size": 256, "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}',
            "deepspeed",
            {"dp": 64, "zero": 2},
            256,
        ),
        ("accelerate.yaml", ACCELERATE, "accelerate", {"dp": 8, "zero": 2}, None),
    ],
)
def test_a_tools_file_becomes_a_strategy(
    tmp_path: Path, name: str, text: str, tool: str, expected: dict[str, object], batch: int | None
) -> None:
    (tmp_path / name).write_text(text)
    file = read_strategy_file(tmp_path / name, devices=64)
    assert file.tool == tool
    assert {key: file.strategy[key] for key in expected} == expected
    assert file.global_batch_size == batch
    assert read_strategy(file.strategy)["dp"] == expected["dp"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("job.toml", "[training", "is damaged"),
        ("ds.json", "{}", "is no strategy that Phaze reads"),
        ("ds.json", "[1, 2", "is damaged"),
        ("notes.txt", "nothing of the kind", "is no strategy that Phaze reads"),
        ("run.sh", "--tensor-model-parallel-size many", "is damaged"),
    ],
)
def test_any_other_file_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=message):
        read_strategy_file(tmp_path / name, devices=8)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot read"):
        read_strategy_file(tmp_path / "none.toml", devices=8)
