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
            {"dp": 4, "tp": 8, "pp": 2, "zero": 2, "shard": 2, "schedule": "interleaved-1f1b", "recompute": "full"},
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
    planned = {key: value for key, value in file.strategy.items() if key not in ("shard", "cp", "ep")}
    assert read_strategy(planned)["dp"] == expected["dp"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("job.toml", "[training", "job.toml: this is no TOML"),
        ("ds.json", "{}", "is no strategy that Phaze reads"),
        ("ds.json", '["train_batch_size"', "ds.json: this is not a config in JSON"),
        ("ds.json", '["train_batch_size"]', "this JSON is a list; expected an object"),
        ("accelerate.yaml", "distributed_type: [", "this is no YAML"),
        ("recipe.py", "tensor_model_parallel_size =", "this is no Python"),
        ("notes.txt", "nothing of the kind", "is no strategy that Phaze reads"),
    ],
)
def test_any_other_file_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=message):
        read_strategy_file(tmp_path / name, devices=8)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot read"):
        read_strategy_file(tmp_path / "none.toml", devices=8)


def test_small_files_that_say_endlessly_much_are_refused(tmp_path: Path) -> None:
    levels = "\n".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 40))
    (tmp_path / "accelerate.yaml").write_text(f"distributed_type: FSDP\na0: &a0 {{x: 1}}\n{levels}\n")
    with pytest.raises(FormatError, match="more than 100,000 settings"):
        read_strategy_file(tmp_path / "accelerate.yaml", devices=8)


def test_a_script_s_own_variables_are_followed_and_others_are_left_to_the_search(tmp_path: Path) -> None:
    script = """#!/bin/bash
PP=2
TP=$((64/PP))   # of 64
export ARGUMENTS=" --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} \\
  --micro-batch-size $MBS --num-layers ${LAYERS:-24} --fp16 --made-up-option 3"
"""
    (tmp_path / "run.sh").write_text(script)
    file = read_strategy_file(tmp_path / "run.sh", devices=64)
    assert {key: file.strategy[key] for key in ("dp", "tp", "pp")} == {"dp": 1, "tp": 32, "pp": 2}
    assert "micro_batch_size" not in file.strategy
    assert file.notes == ("--micro-batch-size is $MBS, which this file does not set: it is left to the search",)
    assert file.ignored == ("--made-up-option",)
    assert file.precision == "fp16"


def test_a_python_recipe_is_read_without_being_run(tmp_path: Path) -> None:
    recipe = """
def one():
    cfg.model.tensor_model_parallel_size = 2
def two():
    raise SystemExit("recipes are not run")
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.context_parallel_size = 2
    cfg.train.global_batch_size = 512
    cfg.ddp.use_distributed_optimizer = True
"""
    (tmp_path / "recipes.py").write_text(recipe)
    file = read_strategy_file(f"{tmp_path / 'recipes.py'}:two", devices=64)
    assert {key: file.strategy[key] for key in ("dp", "tp", "cp", "zero")} == {"dp": 8, "tp": 4, "cp": 2, "zero": 1}
    with pytest.raises(FormatError, match=r"recipes.py: this file has no function 'three'; it has one, two"):
        read_strategy_file(f"{tmp_path / 'recipes.py'}:three", devices=64)


UNKNOWN_KEYS = {
    "job.toml": (
        "[parallelism]\ntensor_parallel_degree = 2\ntensor_paralel_degree = 4\n[metrics]\nlog_freq=1\n[later]\nx=1\n",
        ("metrics.log_freq",),
        ("parallelism.tensor_paralel_degree (meant: parallelism.tensor_parallel_degree?)", "later.x"),
    ),
    "ds_config.json": (
        '{"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "stge": 3}, "zzz": 1}',
        ("gradient_clipping",),
        ("zero_optimization.stge (meant: zero_optimization.stage?)", "zzz"),
    ),
    "accelerate.yaml": (
        "distributed_type: FSDP\nsame_network: true\nfsdp_config:\n  fsdp_verson: 2\n",
        ("same_network",),
        ("fsdp_config.fsdp_verson (meant: fsdp_config.fsdp_version?)",),
    ),
    "maxtext.yml": (
        "per_device_batch_size: 4\nlearning_rate: 0.1\nici_tensr_parallelism: 4\n",
        ("learning_rate",),
        ("ici_tensr_parallelism (meant: ici_tensor_parallelism?)",),
    ),
    "run.sh": (
        "python pretrain_gpt.py --tensor-model-parallel-size 2 --lr 0.1 --tensor-model-paralel-size 4\n",
        ("--lr",),
        ("--tensor-model-paralel-size (meant: --tensor-model-parallel-size?)",),
    ),
}


@pytest.mark.parametrize("name", sorted(UNKNOWN_KEYS))
def test_unknown_keys_are_named_apart_from_those_that_no_plan_decides(name: str, tmp_path: Path) -> None:
    text, ignored, unknown = UNKNOWN_KEYS[name]
    (tmp_path / name).write_text(text)
    file = read_strategy_file(tmp_path / name, devices=8)
    assert (file.ignored, file.unknown) == (ignored, unknown)
    assert file.strategy["dp"]
