"""Configs that others published, priced from their own settings, with what to change in each tool's words.

    python benchmarks/public_configs.py [--only NAME] [--alone] [--time-limit S]

Every case holds the settings of a public file that say how a batch is divided, written anew in the file's format, with
the repository and path that they were read from. Steps were not measured there: these are prices, not errors.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from phaze.planner.plan_comparison import evaluate_file
from phaze.strategy_files import find_source


@dataclass(frozen=True)
class Case:
    """A public config: where it stands, the cluster that it is for, its model, and its settings."""

    source: str
    file: str
    cluster: str
    model: str | None
    text: str
    global_batch_size: int | None = None


CASES = {
    "torchtitan": Case(
        source="pytorch/torchtitan, torchtitan/models/llama3/train_configs/llama3_405b.toml at 01424cb (128 H100)",
        file="llama3_405b.toml",
        cluster="h100:128",
        model="llama3.1-405b",
        text="""[model]
name = "llama3"
flavor = "405B"
converters = "float8"

[training]
batch_size = 2
seq_len = 8192

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
pipeline_parallel_degree = 1
context_parallel_degree = 1

[activation_checkpoint]
mode = "full"
""",
    ),
    "megatron-lm": Case(
        source="NVIDIA/Megatron-LM, examples/academic_paper_scripts/sc21/run_figure_13.sh at bae83e4, with CONFIG.sh",
        file="run_figure_13.sh",
        cluster="a100-80gb:64",
        model=None,
        text="""PP=2
GBS=32
TP=$((64/PP))
ARGUMENTS="--activations-checkpoint-method uniform --tensor-model-parallel-size ${TP} \\
 --pipeline-model-parallel-size ${PP} --micro-batch-size 1 --global-batch-size ${GBS} \\
 --num-layers 32 --hidden-size 20480 --num-attention-heads 128 --DDP-impl local --seq-length 2048 \\
 --max-position-embeddings 2048 --fp16"
""",
    ),
    "nemo": Case(
        source="NVIDIA/NeMo 2.7.3, nemo/collections/llm/recipes/llama3_70b.py (trainer, pretrain_recipe)",
        file="llama3_70b.py",
        cluster="h100:64",
        model="llama3-70b",
        text="""def trainer(tensor_parallelism=4, pipeline_parallelism=4, virtual_pipeline_parallelism=5,
            context_parallelism=2, sequence_parallelism=True, num_nodes=4, num_gpus_per_node=8):
    pass


data = run.Config(MockDataModule, seq_length=8192, global_batch_size=512, micro_batch_size=1)
""",
    ),
    "maxtext": Case(
        source="AI-Hypercomputer/maxtext, MaxText/configs/v5p/llama2_70b.sh at ad10ed0 (v5p-512: 256 chips)",
        file="llama2_70b.sh",
        cluster="tpuv5p:256",
        model="llama2-70b",
        text="""python MaxText/train.py MaxText/configs/base.yml model_name=llama2-70b \\
  remat_policy=save_dot_except_mlpwi per_device_batch_size=4 max_target_length=4096
""",
    ),
    "deepspeed": Case(
        source="DeepSpeedExamples, training/tensor_parallel/hf_integration/configs/ds_config.json at ff01ee0",
        file="ds_config.json",
        cluster="a100-80gb:8",
        model="llama2-7b",
        text="""{
  "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 2, "gather_16bit_weights_on_model_save": true},
  "tensor_parallel": {"autotp_size": 4},
  "gradient_accumulation_steps": "auto",
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto"
}
""",
        global_batch_size=64,
    ),
}


def main() -> None:
    """Price every case, and print what the command line would."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=sorted(CASES))
    parser.add_argument("--alone", action="store_true", help="price the configs, and look for no better plan")
    parser.add_argument("--time-limit", type=float, metavar="S", help="of each case")
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else CASES:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / case.file
            path.write_text(case.text)
            priced = evaluate_file(
                find_source(path),
                case.model,
                cluster=case.cluster,
                global_batch_size=case.global_batch_size,
                compares=not arguments.alone,
                time_limit_s=arguments.time_limit,
            )
        print(f"== {name}: {case.source}, on {case.cluster}\n{priced}\n", flush=True)


if __name__ == "__main__":
    main()
