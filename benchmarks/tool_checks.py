"""What `tools.py` runs in the environment with the real packages: every written file is given to the tool's own code.

Each check takes the folder with the files and what the plan says (`expected.json`), and returns what it showed, in the
words with which `phaze export --list` says it. Checks of meshes start 4 or 8 processes of gloo. This file imports no
part of Phaze but `phaze.backends.accelerate`.
"""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def in_processes(count: int, port: int, function: Callable[..., None], *arguments: Any) -> None:
    """Run a function on so many processes of gloo; any that fails fails here."""
    multiprocessing.spawn(_process, (count, port, function, arguments), nprocs=count)


def _process(rank: int, count: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ.update(environment, LOCAL_RANK=str(rank), ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    dist.init_process_group("gloo", rank=rank, world_size=count)
    function(rank, *arguments)
    dist.destroy_process_group()


def group_of(rank: int, degrees: dict[str, int], axis: str) -> list[int]:
    """The ranks that differ from this one on one axis alone; axes are ordered from the outermost."""
    names = list(degrees)
    strides = {name: _product(degrees[inner] for inner in names[index + 1 :]) for index, name in enumerate(names)}
    own = rank // strides[axis] % degrees[axis]
    return [rank + (other - own) * strides[axis] for other in range(degrees[axis])]


def _product(values: Any) -> int:
    result = 1
    for value in values:
        result *= value
    return result


def load(path: Path) -> Any:
    """A module from its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def torchtitan(folder: Path, expected: dict[str, Any]) -> tuple[str, ...]:
    """The module by torchtitan's ConfigManager, as `--module torchtitan_plan --config planned` names it; its mesh.

    Its own code then cuts and shards one of its debug models on the mesh. A step of that model cannot be run here: its
    language models have flex attention only, and torch has no backward of it on CPUs.
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
    in_processes(expected["devices"], 29611, _torchtitan_mesh, folder, expected)
    return (
        "parsed by torchtitan 0.3.0's ConfigManager",
        "the mesh of its ParallelDims on 8 processes of gloo is the plan's",
        "its own functions cut its debug models into the plan's stages and shards",
    )


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

    degrees, ep, base = expected["mesh"], expected["ep"], sys.modules["torchtitan_plan"].BASE
    registry = importlib.import_module(f"torchtitan.models.{base['module']}").model_registry
    spec = config.model_spec = registry("debugmodel_moe" if ep > 1 else "debugmodel")
    config.compile.enable = False
    utils.set_spmd_backend(config.parallelism.spmd_backend)
    spec.model.update_from_config(config=config)
    spec.model.layers = spec.model.layers[: expected["blocks"]]
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
    assert config.expert_model_parallel_size == expected["ep"]
    in_processes(expected["devices"], 29612, _megatron_groups, options, expected["mesh"])
    shown = (
        "values accepted by megatron-core 0.16.1's TransformerConfig and DistributedDataParallelConfig",
        "groups of its parallel_state on 8 processes of gloo are the plan's",
    )
    if expected["mesh"]["tp"] * expected["mesh"]["dp_shard"] < expected["devices"] or expected["ep"] > 1:
        return shown
    in_processes(expected["devices"], 29617, _megatron_step, expected["mesh"]["tp"])
    return (*shown, "loss and gradients of its GPTModel at tp 2 on CPUs are those at tp 1")


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


def _megatron_step(rank: int, planned_tp: int) -> None:
    """A GPTModel of the local layers: its loss and gradients as the plan divides it, against those at tp 1.

    Sequences stay whole: the local layers' norm is torch's, and splits none.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import TransformerConfig
    from megatron.core.utils import GlobalMemoryBuffer

    GlobalMemoryBuffer.get_tensor = lambda self, shape, dtype, *_: torch.empty(shape, dtype=dtype)  # its own is on CUDA
    initialize_rng_tracker(inference_rng_tracker=True)  # the other one forks the state of CUDA's generator
    tokens = torch.arange(64).reshape(2, 32)
    positions, mask = torch.arange(32).repeat(2, 1), torch.triu(torch.ones(1, 1, 32, 32), 1).bool()
    measured = []
    plain = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "gradient_accumulation_fusion": False}
    for tp in (1, planned_tp):
        parallel_state.initialize_model_parallel(tp)
        torch.manual_seed(0)
        sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "use_cpu_initialization": True}
        config = TransformerConfig(**sizes, **plain, tensor_model_parallel_size=tp)
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=32)
        loss = model(tokens, positions, mask, labels=tokens.roll(1, 1)).mean()
        loss.backward()
        measured.append((loss.detach(), model.decoder.layers[0].mlp.linear_fc1.weight.grad))
        parallel_state.destroy_model_parallel()
    (whole_loss, whole), (loss, part) = measured
    torch.testing.assert_close(loss, whole_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(part, whole.chunk(planned_tp)[rank % planned_tp], rtol=1e-4, atol=1e-6)


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
    """The config by DeepSpeedConfig, on as many processes as the plan has devices; a step where it is ZeRO alone."""
    path, degrees = str(folder / "ds_config.json"), expected["mesh"]
    os.environ["DS_ACCELERATOR"] = "cpu"
    in_processes(expected["devices"], 29613, _deepspeed_config, path, expected)
    shown = ("parsed by deepspeed 0.19.8's DeepSpeedConfig, which settles the plan's batch, ZeRO stage and degrees",)
    if degrees["tp"] * degrees["pp"] * degrees["cp"] > 1:
        return shown
    in_processes(expected["devices"], 29618, _deepspeed_step, path, expected)
    step = (
        "a step of its engine with ZeRO 1, 2 and 3 on 4 CPU processes is one process's, with shards of the plan's size"
    )
    return (*shown, step)


def _deepspeed_step(rank: int, path: str, expected: dict[str, Any]) -> None:
    """One step of DeepSpeed's engine over all microbatches, against one process; bf16 with fp32 states, as written."""
    import deepspeed
    import torch

    deepspeed.comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    samples = torch.randn(expected["global_batch_size"], 16).bfloat16()
    # Adam's first step moves every number by the rate, whatever its gradient: what bf16 rounds is no part of it.
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.125) for model in models]
    engine, sharded, *_ = deepspeed.initialize(model=models[0], optimizer=optimizers[0], config=path)
    share = samples.chunk(dist.get_world_size())[rank]
    for piece in share.split(expected["micro_batch_size"]):
        engine.backward(engine(piece).float().square().mean())
        engine.step()
    assert engine.global_steps == 1
    models[1].bfloat16()(samples).float().square().mean().backward()
    optimizers[1].step()
    with deepspeed.zero.GatheredParameters(list(models[0].parameters()), enabled=expected["zero"] == 3):
        for parameter, reference in zip(models[0].parameters(), models[1].parameters(), strict=True):
            is_near = (parameter.detach() - reference.detach()).abs() < 0.05  # far less than a step in either direction
            assert is_near.float().mean() > 0.98, (rank, is_near.float().mean())  # gradients near zero may turn over
    states = sharded.fp32_partitioned_groups_flat if expected["zero"] == 3 else sharded.single_partition_of_fp32_groups
    total = sum(parameter.numel() for parameter in models[1].parameters())
    assert sum(state.numel() for state in states) == total // expected["mesh"]["dp_shard"], (rank, total)


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

    class Units:  # what tells DeepSpeed how many processes hold copies, as Megatron's own does
        def get_data_parallel_world_size(self) -> int:
            return copies

    config = DeepSpeedConfig(path, mpu=Units() if degrees["tp"] * degrees["pp"] > 1 else None, mesh_device=mesh)
    assert config.train_batch_size == expected["global_batch_size"]
    assert config.train_micro_batch_size_per_gpu == expected["micro_batch_size"]
    assert int(config.zero_optimization_stage) == expected["zero"]
    assert config.bfloat16_config.enabled


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
    in_processes(expected["devices"], 29614, _accelerate_step, str(folder / "plan.json"), expected)
    shown = (
        "parsed by accelerate 1.15.0's launch code",
        "the mesh of its ParallelismConfig on 4 processes of gloo is the plan's",
    )
    # Its context parallelism runs on accelerators only.
    is_run = expected["mesh"]["cp"] == 1
    return (*shown, "a step of torch's FSDP2 on that mesh has one process's gradients") if is_run else shown


def _accelerate_step(rank: int, plan_path: str, expected: dict[str, Any]) -> None:
    """Accelerate itself refuses FSDP on CPUs: torch's FSDP2 runs on the mesh and with the options that it is given."""
    import torch
    from torch.distributed.fsdp import fully_shard

    import phaze
    from phaze.backends.accelerate import accelerator_arguments

    arguments = accelerator_arguments(phaze.load_plan(plan_path))
    assert arguments["gradient_accumulation_steps"] == expected["micro_batches"]
    degrees, plugin = expected["mesh"], arguments["fsdp_plugin"]
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is (expected["zero"] == 3)
    mesh = arguments["parallelism_config"].build_device_mesh("cpu")
    for axis in ("dp_replicate", "dp_shard", "cp"):
        if degrees[axis] > 1:
            ranks = dist.get_process_group_ranks(mesh[axis].get_group())
            assert ranks == group_of(rank, degrees, axis), (rank, axis, ranks)
    if degrees["cp"] > 1:  # its context parallelism runs on accelerators only
        return
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    whole = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    whole.load_state_dict(model.state_dict())
    names = tuple(name for name in ("dp_replicate", "dp_shard") if degrees[name] > 1)
    fully_shard(model, mesh=mesh[names], reshard_after_forward=plugin.reshard_after_forward)
    samples = torch.randn(expected["devices"], 16)
    model(samples[rank : rank + 1]).square().mean().backward()
    whole(samples).square().mean().backward()
    for parameter, reference in zip(model.parameters(), whole.parameters(), strict=True):
        assert parameter.to_local().shape[0] == reference.shape[0] // degrees["dp_shard"]
        torch.testing.assert_close(parameter.grad.full_tensor(), reference.grad, rtol=1e-5, atol=1e-6)


def lightning(folder: Path, expected: dict[str, Any]) -> tuple[str, ...]:
    """The module's Trainer and strategy are built; its `shard` on the strategy's mesh makes the plan's shards."""
    module = load(folder / "lightning_plan.py")
    trainer = module.trainer(accelerator="cpu", logger=False, enable_checkpointing=False, precision="32-true")
    assert trainer.accumulate_grad_batches == expected["micro_batches"]
    assert trainer.strategy._data_parallel_size == expected["mesh"]["dp_shard"]
    in_processes(expected["devices"], 29615, _lightning_shards, str(folder / "lightning_plan.py"), expected)
    return (
        "imported, and its Trainer and ModelParallelStrategy built, by lightning 2.6.6",
        "shards and gradients of a step on the mesh of its own code on 4 processes of gloo are the plan's",
    )


def _lightning_shards(rank: int, path: str, expected: dict[str, Any]) -> None:
    import torch
    from lightning.fabric.strategies.model_parallel import _setup_device_mesh

    module = load(Path(path))
    size = expected["devices"]
    mesh = _setup_device_mesh(size, 1, size, torch.device("cpu"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
    reference = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
    reference.load_state_dict(model.state_dict())
    module.shard(model, [(model, "0"), (model, "1")], mesh)
    samples = torch.randn(size, 16)
    model(samples[rank : rank + 1]).square().mean().backward()
    reference(samples).square().mean().backward()
    for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.grad, rtol=1e-5, atol=1e-6)
        assert parameter.to_local().shape[0] == whole.shape[0] // size


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
    "torchrun": torchrun,
}


def main() -> None:
    """Check the folder that the arguments name: one line of JSON with what was shown, or a traceback."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    print(json.dumps(CHECKS[name](folder, json.loads((folder / "expected.json").read_text()))))


if __name__ == "__main__":
    main()
