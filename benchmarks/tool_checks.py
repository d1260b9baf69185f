"""What `tools.py` runs in the environment with the real packages: every written file is given to the tool's own code.

Each check takes the folder with the files and what the plan says (`expected.json`), and returns what it showed, in the
words with which `phaze export --list` says it. Checks of meshes start 2 to 8 processes of gloo; the steps that tools
run there stand in `tool_steps.py`. Of Phaze itself only `phaze.backends.accelerate` is imported, in a step.
"""

import dataclasses
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tool_steps
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from tool_steps import group_of, load


def in_processes(count: int, port: int, function: Callable[..., None], *arguments: Any) -> None:
    """Run a function on so many processes of gloo; any that fails fails here."""
    # Forked, because importing a tool takes longer than most checks: what a check imports first is imported once.
    multiprocessing.start_processes(_process, (count, port, function, arguments), nprocs=count, start_method="fork")


def import_first(*names: str) -> None:
    """Import modules that the processes of a check would otherwise import each."""
    for name in names:
        importlib.import_module(name)


def _process(rank: int, count: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ.update(environment, LOCAL_RANK=str(rank), ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    dist.init_process_group("gloo", rank=rank, world_size=count)
    function(rank, *arguments)
    dist.destroy_process_group()


def torchtitan(folder: Path, expected: dict[str, Any]) -> tuple[str, ...]:
    """The module by torchtitan's ConfigManager, as `--module torchtitan_plan --config planned` names it; its mesh.

    Its own code then cuts and shards one of its debug models on the mesh. Those have flex attention, which has no
    backward on CPUs: those that take a step have its other attention, torch's own.
    """
    config = _torchtitan_config(folder)
    degrees = expected["mesh"]
    parallelism = config.parallelism
    assert parallelism.tensor_parallel_degree == degrees["tp"]
    assert parallelism.pipeline_parallel_degree == degrees["pp"]
    assert parallelism.data_parallel_shard_degree == degrees["dp_shard"]
    assert parallelism.data_parallel_replicate_degree == degrees["dp_replicate"]
    assert parallelism.context_parallel_degree == degrees["cp"]
    assert parallelism.expert_parallel_degree == expected["ep"]
    assert config.training.global_batch_size == expected["global_batch_size"]
    if expected["is_fp8"]:
        assert "Float8Linear" in repr(config.model_spec.model)
    import_first("torchtitan.distributed.parallel_dims", "torchtitan.models.llama3", "torchtitan.models.qwen3")
    in_processes(expected["devices"], 29611, _torchtitan_mesh, folder, expected)
    shown = (
        "parsed by torchtitan 0.3.0's ConfigManager",
        "the mesh of its ParallelDims on 8 processes of gloo is the plan's",
        "its own functions cut its debug models into the plan's stages and shards",
    )
    if degrees["pp"] * degrees["cp"] * expected["ep"] > 1:
        return shown
    step = "losses and gradients of a debug model that they shard (dp, tp), with torch's attention, are one process's"
    return (*shown, step)


def _torchtitan_config(folder: Path) -> Any:
    """The config as torchtitan's command line makes it, on CPUs."""
    import torch
    from torchtitan.tools import utils

    # torchtitan takes cuda where it sees no accelerator; this comes before its other modules copy it.
    utils.device_type, utils.device_module = "cpu", torch.cpu
    from torchtitan.components.quantization import float8
    from torchtitan.config.manager import ConfigManager

    float8.has_cuda_capability = lambda major, minor: True  # fp8 is parsed as on an H100
    sys.path.insert(0, str(folder))
    return ConfigManager().parse_args(["--module", "torchtitan_plan", "--config", "planned"])


def _torchtitan_mesh(rank: int, folder: Path, expected: dict[str, Any]) -> None:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (the backend of torchtitan's axes of size 1)

    config, degrees, ep = _torchtitan_config(folder), expected["mesh"], expected["ep"]
    from torchtitan.distributed.parallel_dims import ParallelDims

    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    dims.build_mesh()
    for axis in ("pp", "tp", "cp", "dp_replicate", "dp_shard"):
        if degrees[axis] > 1:
            ranks = dist.get_process_group_ranks(dims.get_mesh(axis).get_group())
            assert ranks == group_of(rank, degrees, axis), (rank, axis, ranks)
    if ep > 1:  # experts are divided over neighbours among the copies
        ranks = dist.get_process_group_ranks(dims.get_mesh("ep").get_group())
        assert ranks == list(range(rank // ep * ep, rank // ep * ep + ep)), (rank, ranks)
    config.parallelism.spmd_backend = "partial_dtensor"  # its newer ones shard with a torch newer than 2.13
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    dims.build_mesh()
    _torchtitan_shards(rank, config, dims, expected)


def _torchtitan_shards(rank: int, config: Any, dims: Any, expected: dict[str, Any]) -> None:
    """A debug model with the plan's blocks, cut into stages and sharded by torchtitan's own functions."""
    import torch
    from torchtitan.distributed import utils
    from torchtitan.models.common.attention import ScaledDotProductAttention

    degrees, ep, base = expected["mesh"], expected["ep"], sys.modules["torchtitan_plan"].BASE
    registry = importlib.import_module(f"torchtitan.models.{base['module']}").model_registry
    spec = config.model_spec = registry("debugmodel_moe" if ep > 1 else "debugmodel")
    config.compile.enable = False
    utils.set_spmd_backend(config.parallelism.spmd_backend)
    spec.model.layers = spec.model.layers[: expected["blocks"]]
    if degrees["pp"] * degrees["cp"] * ep == 1:  # these take a step: flex attention has no backward on CPUs
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        config.training.mixed_precision_param = "float32"
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    settings = {"training": config.training, "parallelism": config.parallelism, "compile_config": config.compile}
    settings |= {"parallel_dims": dims, "ac_config": config.activation_checkpoint, "dump_folder": "."}
    parts = [model]
    if degrees["pp"] > 1:
        more = {"model_config": spec.model, "parallelize_fn": spec.parallelize_fn, "device": torch.device("cpu")}
        schedule, parts, *_ = spec.pipelining_fn(model, **settings, **more, loss_fn=torch.sum)
        assert schedule._n_microbatches == expected["micro_batches"]
        stage = rank * degrees["pp"] // dist.get_world_size()
        names = [name for part in parts for name in part.layers]
        first = sum(expected["stage_blocks"][:stage])
        assert names == [str(first + index) for index in range(expected["stage_blocks"][stage])], (rank, names)
    else:
        spec.parallelize_fn(model, **settings)
    shards = degrees["dp_shard"] * degrees["cp"]
    for name, parameter in (item for part in parts for item in part.named_parameters()):
        axes = dict(zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True))
        is_expert = "experts" in name and "shared" not in name and ep > 1
        ways = shards if is_expert else shards * (degrees["tp"] if "norm" not in name else 1)
        assert parameter.to_local().numel() * ways == parameter.numel(), (name, axes, parameter.shape)
        assert not is_expert or axes["ep"].is_shard(0), (name, axes)
    if degrees["pp"] * degrees["cp"] * ep == 1:
        tool_steps.torchtitan_step(rank, model, spec.model, expected)


def megatron_lm(folder: Path, expected: dict[str, Any]) -> tuple[str, ...]:
    """The arguments as fields of TransformerConfig and DistributedDataParallelConfig; the groups of parallel_state."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    script = f'source "{folder}/megatron_lm.sh"; printf "%s\\n" "${{PLANNED[@]}}"'
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    options: dict[str, Any] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            value: Any = True if following.startswith("--") else following
            options[word[2:].replace("-", "_")] = int(value) if re.fullmatch(r"\d+", str(value)) else value
    model = {field.name for field in dataclasses.fields(TransformerConfig)}
    sharding = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    others = {"micro_batch_size", "global_batch_size", "seq_length", "bf16", "fp8_format"}
    unknown = options.keys() - model - sharding - others
    assert not unknown, unknown
    chosen = {key: value for key, value in options.items() if key in model}
    chosen |= {"recompute_modules": [chosen["recompute_modules"]]} if "recompute_modules" in chosen else {}
    if expected["chunks"] > 1:
        chosen["virtual_pipeline_model_parallel_size"] = expected["chunks"]
    chosen |= {"fp8": options["fp8_format"]} if expected["is_fp8"] else {}
    chosen |= {"num_moe_experts": 4, "add_bias_linear": False} if expected["ep"] > 1 else {}
    config = TransformerConfig(
        num_layers=expected["blocks"],
        hidden_size=64,
        num_attention_heads=8,
        use_cpu_initialization=True,
        pipeline_dtype=__import__("torch").bfloat16,
        **chosen,
    )
    if expected["mesh"]["pp"] > 1:
        layout = config.pipeline_model_parallel_layout
        assert layout.virtual_pipeline_model_parallel_size in (None, expected["chunks"])
    DistributedDataParallelConfig(**{key: value for key, value in options.items() if key in sharding})
    over_experts = config.expert_model_parallel_size * config.expert_tensor_parallel_size
    assert over_experts == expected["ep"] * expected["mesh"]["tp"]
    import_first("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.pipeline_parallel")
    in_processes(expected["devices"], 29612, _megatron_groups, options, expected["mesh"])
    shown = (
        "values accepted by megatron-core 0.16.1's TransformerConfig and DistributedDataParallelConfig",
        "groups of its parallel_state on 8 processes of gloo are the plan's",
    )
    degrees, ep = expected["mesh"], expected["ep"]
    if degrees["pp"] > 1:
        layout = str(options["pipeline_model_parallel_layout"])
        in_processes(degrees["pp"], 29617, tool_steps.megatron_pipeline, layout, expected)
        step = "losses and gradients of its pipeline schedules over the layout's stages on CPUs are one process's"
    elif ep > 1:
        in_processes(ep, 29619, tool_steps.megatron_experts, ep)
        step = "loss and gradients of its mixture with experts over ep 2 on CPUs are those at ep 1"
    elif degrees["tp"] > 1:
        in_processes(degrees["tp"], 29620, tool_steps.megatron_tensor_parallel, degrees["tp"])
        step = "loss and gradients of its GPTModel at tp 2 on CPUs are those at tp 1"
    else:
        return shown
    return (*shown, step)


def _megatron_groups(rank: int, options: dict[str, Any], degrees: dict[str, int]) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options["tensor_model_parallel_size"],
        pipeline_model_parallel_size=options["pipeline_model_parallel_size"],
        context_parallel_size=options["context_parallel_size"],
        expert_model_parallel_size=options["expert_model_parallel_size"],
        num_distributed_optimizer_instances=options.get("num_distributed_optimizer_instances", 1),
    )
    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
    }
    for axis, group in groups.items():
        assert dist.get_process_group_ranks(group) == group_of(rank, degrees, axis), (rank, axis)
    if degrees["dp_replicate"] > 1 and options.get("num_distributed_optimizer_instances", 1) > 1:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
        assert dist.get_process_group_ranks(group) == group_of(rank, degrees, "dp_shard"), rank
    ep = options["expert_model_parallel_size"]
    if ep > 1:  # experts are divided over neighbours among the copies, beside the same tp
        tp = degrees["tp"]
        first = rank // (ep * tp) * ep * tp + rank % tp
        group = parallel_state.get_expert_model_parallel_group()
        assert dist.get_process_group_ranks(group) == list(range(first, first + ep * tp, tp)), rank


def megatron_bridge(folder: Path, expected: dict[str, Any]) -> tuple[str, ...]:
    """Every key is a field of one of megatron-bridge's or megatron-core's config classes, read from their source."""
    import yaml
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    spec = importlib.util.find_spec("megatron.bridge")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(next(iter(spec.submodule_search_locations)))
    source = (root / "training" / "config.py").read_text()
    fields = {
        "model": {field.name for field in dataclasses.fields(TransformerConfig)} | {"seq_length"},
        "ddp": {field.name for field in dataclasses.fields(DistributedDataParallelConfig)},
        "train": set(re.findall(r"^    (\w+):", source[source.index("class TrainingConfig") :], re.MULTILINE)),
    }
    precisions = set(
        re.findall(r"^def (\w+_mixed)\(", (root / "training" / "mixed_precision.py").read_text(), re.MULTILINE)
    )
    overrides = yaml.safe_load((folder / "megatron_bridge.yaml").read_text())
    assert overrides.pop("mixed_precision") in precisions
    for section, settings in overrides.items():
        assert not settings.keys() - fields[section], (section, settings.keys() - fields[section])
    return ("keys found in the config classes of megatron-bridge 0.3.1 by reading them",)


def deepspeed(folder: Path, expected: dict[str, Any]) -> tuple[str, ...]:
    """The config by DeepSpeedConfig on as many processes as the plan has devices, and a step of its engine there."""
    path, degrees = str(folder / "ds_config.json"), expected["mesh"]
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_first("deepspeed.pipe", "deepspeed.sequence.layer", "transformers.models.llama.modeling_llama")
    in_processes(expected["devices"], 29613, _deepspeed_config, path, expected)
    parsed = "parsed by deepspeed 0.19.8's DeepSpeedConfig, which settles the plan's batch, ZeRO stage and degrees"
    if degrees["pp"] > 1:
        return parsed, "a batch of its PipelineEngine on 4 CPU processes, over the plan's stages, is one process's"
    if degrees["tp"] > 1:
        return parsed, "losses of its AutoTP on 4 CPU processes, with the plan's groups and shards, are one process's"
    if degrees["cp"] > 1:
        return parsed, "its DistributedAttention on the plan's groups of 2 CPU processes is whole attention"
    return parsed, "a step of its engine with ZeRO 1, 2 and 3 on CPU processes is one process's, with the plan's shards"


def _deepspeed_config(rank: int, path: str, expected: dict[str, Any]) -> None:
    import deepspeed.comm
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    degrees = expected["mesh"]
    copies = degrees["dp_replicate"] * degrees["dp_shard"]

    mesh = None
    if degrees["cp"] > 1:  # what deepspeed.initialize does with both sizes, as a mesh of its own
        sizes = json.loads(Path(path).read_text())
        shape = (sizes["data_parallel_size"], sizes["sequence_parallel_size"])
        mesh = deepspeed.comm.initialize_mesh_device(shape, ("data_parallel", "sequence_parallel"))
        ranks = dist.get_process_group_ranks(mesh.get_group("sequence_parallel"))
        assert ranks == group_of(rank, degrees, "cp"), (rank, ranks)

    # A PipelineModule tells DeepSpeed how many processes hold copies; AutoTP has nobody that does.
    class Units:
        def get_data_parallel_world_size(self) -> int:
            return copies

    config = DeepSpeedConfig(path, mpu=Units() if degrees["pp"] > 1 else None, mesh_device=mesh)
    assert config.train_batch_size == expected["global_batch_size"] * degrees["tp"]  # it counts tp devices as copies
    assert config.train_micro_batch_size_per_gpu == expected["micro_batch_size"]
    assert config.gradient_accumulation_steps == expected["micro_batches"]
    assert int(config.zero_optimization_stage) == expected["zero"]
    assert config.bfloat16_config.enabled
    if degrees["pp"] > 1:
        tool_steps.deepspeed_pipeline(rank, path, expected)
    elif degrees["tp"] > 1:
        tool_steps.deepspeed_tensor_parallel(rank, path, expected)
    elif degrees["cp"] > 1:
        tool_steps.deepspeed_contexts(rank, mesh, expected)
    else:
        tool_steps.deepspeed_zero(rank, path, expected)


def accelerate(folder: Path, expected: dict[str, Any]) -> tuple[str, ...]:
    """The config by accelerate's own loader and launcher; a step of FSDP2 through `phaze.backends.accelerate`."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path = folder / "accelerate.yaml"
    config = load_config_from_file(str(path))
    assert config.num_processes == expected["devices"]
    parser = launch_command_parser()
    arguments = parser.parse_args(["--config_file", str(path), "--cpu", "script.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    assert arguments.use_fsdp
    assert arguments.parallelism_config_dp_shard_size == expected["mesh"]["dp_shard"]
    import_first("accelerate.utils.fsdp_utils", "transformers.models.llama.modeling_llama", "phaze.plan.plan")
    in_processes(expected["devices"], 29614, tool_steps.accelerate_step, str(folder / "plan.json"), expected)
    shown = (
        "parsed by accelerate 1.15.0's launch code",
        "the mesh of its ParallelismConfig on 4 processes of gloo is the plan's",
    )
    if expected["mesh"]["cp"] > 1:
        return shown
    return (
        *shown,
        "a step of its own FSDP2 on CPUs, by the two lines, has one process's gradients and the plan's shards",
    )


def lightning(folder: Path, expected: dict[str, Any]) -> tuple[str, ...]:
    """The module's Trainer and strategy are built; its `shard` on the strategy's mesh makes the plan's shards."""
    module = load(folder / "lightning_plan.py")
    trainer = module.trainer(accelerator="cpu", logger=False, enable_checkpointing=False, precision="32-true")
    assert trainer.accumulate_grad_batches == expected["micro_batches"]
    assert trainer.strategy._data_parallel_size == expected["mesh"]["dp_shard"]
    in_processes(expected["devices"], 29615, tool_steps.lightning_loop, str(folder / "lightning_plan.py"), expected)
    return (
        "imported, and its Trainer and ModelParallelStrategy built, by lightning 2.6.6",
        "Trainer.fit on 4 CPU processes has the plan's shards and ends at one process's parameters",
    )


def maxtext(folder: Path, expected: dict[str, Any]) -> tuple[str, ...]:
    """The file by MaxText's own config code; its model on 8 devices of a host, in a process of jax."""
    program = [sys.executable, Path(__file__).with_name("maxtext_step.py"), folder]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    shown = (
        "parsed by maxtext 0.2.3's pyconfig, which settles the plan's batch",
        "axes of its mesh and shards of its model on 8 devices of a host are the plan's",
    )
    if expected["mesh"]["pp"] > 1:
        return shown
    return (*shown, "loss and gradients of its model there are one device's")


def torchrun(folder: Path, expected: dict[str, Any]) -> tuple[str, ...]:
    """The mesh that torch makes of `mesh.json` has the plan's ranks."""
    in_processes(expected["devices"], 29616, _torch_mesh, str(folder / "mesh.json"))
    return ("the mesh that init_device_mesh of torch 2.13 makes of mesh.json on 8 processes has the plan's ranks",)


def _torch_mesh(rank: int, path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    data = json.loads(Path(path).read_text())
    degrees = data["mesh"]
    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    stage = mesh.get_coordinate()[0]
    assert rank in data["stage_ranks"][stage]
    for axis in degrees:
        assert dist.get_process_group_ranks(mesh[axis].get_group()) == group_of(rank, degrees, axis)


CHECKS = {
    "torchtitan": torchtitan,
    "megatron-lm": megatron_lm,
    "megatron-bridge": megatron_bridge,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "lightning": lightning,
    "maxtext": maxtext,
    "torchrun": torchrun,
}


def main() -> None:
    """Check the folder that the arguments name: one line of JSON with what was shown, or a traceback."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    print(json.dumps(CHECKS[name](folder, json.loads((folder / "expected.json").read_text()))))


if __name__ == "__main__":
    main()
