"""Steps that tools run on CPUs, for `tool_checks.py`: each function is one process of gloo, and fails where a step of
the tool's own code is not what one process computes.

Tools ask for CUDA in places that decide nothing here (a counter's device, a stream, a kind of backend). Those places
are answered for CPUs, each with a comment; everything else is the tool's own.
"""

import copy
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__: list[str] = []


def group_of(rank: int, degrees: dict[str, int], axis: str) -> list[int]:
    """The ranks that differ from this one on one axis alone; axes are ordered from the outermost."""
    names = list(degrees)
    strides = {name: product(degrees[inner] for inner in names[index + 1 :]) for index, name in enumerate(names)}
    own = rank // strides[axis] % degrees[axis]
    return [rank + (other - own) * strides[axis] for other in range(degrees[axis])]


def product(values: Any) -> int:
    """The product of whole numbers."""
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


class Block(torch.nn.Module):
    """A block of two products with a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape again."""
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def small_llama() -> Any:
    """A Llama of transformers with two layers."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))


def has_moved_alike(parameters: Any, references: Any) -> bool:
    """Whether a step of Adam moved parameters as it did the references: all but gradients near zero have one sign."""
    pairs = zip(parameters, references, strict=True)
    near = torch.cat([((one.detach() - other.detach()).abs() < 0.05).flatten() for one, other in pairs])
    return near.float().mean().item() > 0.98


# Adam's first step moves every number by the rate, whatever its gradient: what bf16 rounds is no part of it.
RATE = 0.125


def deepspeed_zero(rank: int, path: str, expected: dict[str, Any]) -> None:
    """One step of DeepSpeed's engine over all microbatches, against one process; bf16 with fp32 states, as written."""
    import deepspeed

    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    samples = torch.randn(expected["global_batch_size"], 16).bfloat16()
    optimizers = [torch.optim.Adam(model.parameters(), lr=RATE) for model in models]
    engine, sharded, *_ = deepspeed.initialize(model=models[0], optimizer=optimizers[0], config=path)
    share = samples.chunk(dist.get_world_size())[rank]
    for piece in share.split(expected["micro_batch_size"]):
        engine.backward(engine(piece).float().square().mean())
        engine.step()
    assert engine.global_steps == 1
    models[1].bfloat16()(samples).float().square().mean().backward()
    optimizers[1].step()
    with deepspeed.zero.GatheredParameters(list(models[0].parameters()), enabled=expected["zero"] == 3):
        assert has_moved_alike(models[0].parameters(), models[1].parameters())
    states = sharded.fp32_partitioned_groups_flat if expected["zero"] == 3 else sharded.single_partition_of_fp32_groups
    total = sum(parameter.numel() for parameter in models[1].parameters())
    assert sum(state.numel() for state in states) == total // expected["mesh"]["dp_shard"], (rank, total)


def deepspeed_pipeline(rank: int, path: str, expected: dict[str, Any]) -> None:
    """A batch of its PipelineEngine: stages, groups, the loss and the step of one process."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(0)
    blocks = [Block() for _ in range(expected["blocks"])]
    whole = torch.nn.Sequential(*copy.deepcopy(blocks)).bfloat16()
    degrees = expected["mesh"]
    model = PipelineModule(blocks, num_stages=degrees["pp"], loss_fn=_error, partition_method="type:Block")
    optimizers = [torch.optim.Adam(one.parameters(), lr=RATE) for one in (model, whole)]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizers[0], config=path)
    assert dist.get_process_group_ranks(engine.grid.get_pipe_parallel_group()) == group_of(rank, degrees, "pp")
    counts = [end - start for start, end in zip(model.parts, model.parts[1:], strict=False)]
    assert counts == expected["stage_blocks"], counts
    inputs, targets = torch.randn(2, expected["global_batch_size"], 16).bfloat16()
    copies = engine.grid.get_data_parallel_world_size()
    mine = engine.grid.get_data_parallel_rank()
    pieces = [part.chunk(copies)[mine].split(expected["micro_batch_size"]) for part in (inputs, targets)]
    loss = engine.train_batch(iter(list(zip(*pieces, strict=True))))
    reference = _error(whole(inputs), targets)
    torch.testing.assert_close(loss.float().cpu(), reference.detach(), rtol=2e-2, atol=1e-3)
    reference.backward()
    optimizers[1].step()
    first = int(model.parts[engine.grid.get_stage_id()])
    own = [blocks[first + index] for index in range(counts[engine.grid.get_stage_id()])]
    references = [parameter for index in range(len(own)) for parameter in whole[first + index].parameters()]
    assert has_moved_alike([parameter for block in own for parameter in block.parameters()], references)


def _error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - targets.float()).square().mean()


def deepspeed_tensor_parallel(rank: int, path: str, expected: dict[str, Any]) -> None:
    """A step of AutoTP, which the config alone switches on: its groups, its shards and the loss of one process."""
    import deepspeed
    from deepspeed.utils import groups

    degrees = expected["mesh"]
    torch.manual_seed(0)
    model = small_llama().bfloat16()
    whole = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=path)
    ranks = dist.get_process_group_ranks(groups.get_tensor_model_parallel_group())
    assert ranks == group_of(rank, degrees, "tp"), (rank, ranks)
    rows = model.model.layers[0].mlp.up_proj.weight.shape[0]
    assert rows == whole.model.layers[0].mlp.up_proj.weight.shape[0] // degrees["tp"]
    torch.manual_seed(1 + rank // degrees["tp"])  # devices of one copy take the same samples
    for _ in range(expected["micro_batches"]):
        tokens = torch.randint(0, 64, (expected["micro_batch_size"], 16))
        loss = engine(input_ids=tokens, labels=tokens).loss
        with torch.no_grad():
            reference = whole(input_ids=tokens, labels=tokens).loss
        torch.testing.assert_close(loss.detach().float(), reference.float(), rtol=1e-2, atol=1e-2)
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 1


def deepspeed_contexts(rank: int, mesh: Any, expected: dict[str, Any]) -> None:
    """Its DistributedAttention (Ulysses) on the groups of the plan: outputs and gradients of whole attention."""
    from deepspeed.sequence.layer import DistributedAttention

    cp = expected["mesh"]["cp"]
    place = rank % cp

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        parts = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # from (sequence, batch, heads, size)
        return torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).permute(2, 0, 1, 3)

    torch.manual_seed(0)
    whole = [torch.randn(16, 2, 4, 8, requires_grad=True) for _ in range(3)]
    own = [tensor.detach().chunk(cp)[place].clone().requires_grad_() for tensor in whole]
    output = DistributedAttention(attention, mesh.get_group("sequence_parallel"))(*own, 1)
    reference = attention(*whole)
    torch.testing.assert_close(output, reference.chunk(cp)[place], rtol=1e-5, atol=1e-6)
    output.square().sum().backward()
    reference.square().sum().backward()
    for part, tensor in zip(own, whole, strict=True):
        assert part.grad is not None
        assert tensor.grad is not None
        torch.testing.assert_close(part.grad, tensor.grad.chunk(cp)[place], rtol=1e-4, atol=1e-5)


def megatron_on_cpu() -> None:
    """Answer for CPUs where megatron-core asks for CUDA: buffers, generators, counters and the device of messages."""
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.utils import GlobalMemoryBuffer

    GlobalMemoryBuffer.get_tensor = lambda self, shape, dtype, *_: torch.empty(shape, dtype=dtype)
    initialize_rng_tracker(inference_rng_tracker=True)  # the other one forks the state of CUDA's generator
    zeros = torch.zeros
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.zeros = lambda *size, device=None, **more: zeros(*size, **more)  # type: ignore[assignment]


PLAIN = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "gradient_accumulation_fusion": False}


def _gpt(changes: dict[str, Any], **more: Any) -> Any:
    """A small GPTModel of the local layers, with these changes to its config."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "use_cpu_initialization": True}
    config = TransformerConfig(**{**sizes, **PLAIN, **changes})
    layers = get_gpt_layer_local_spec(num_experts=changes.get("num_moe_experts"), moe_grouped_gemm=False)
    return GPTModel(config, layers, vocab_size=128, max_sequence_length=32, **more)


def _megatron_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.arange(64).reshape(2, 32)
    return tokens, torch.arange(32).repeat(2, 1), torch.triu(torch.ones(1, 1, 32, 32), 1).bool()


def _whole_gpt(changes: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """One process's model and its loss, with gradients."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    model = _gpt(changes)
    tokens, positions, mask = _megatron_batch()
    loss = model(tokens, positions, mask, labels=tokens.roll(1, 1)).mean()
    loss.backward()
    parallel_state.destroy_model_parallel()
    return model, loss.detach()


def megatron_tensor_parallel(rank: int, planned_tp: int) -> None:
    """A GPTModel's loss and gradients as the plan divides it, against those at tp 1.

    Sequences stay whole: the local layers' norm is torch's, and splits none.
    """
    from megatron.core import parallel_state

    megatron_on_cpu()
    whole, whole_loss = _whole_gpt({})
    parallel_state.initialize_model_parallel(planned_tp)
    torch.manual_seed(0)
    model = _gpt({"tensor_model_parallel_size": planned_tp})
    tokens, positions, mask = _megatron_batch()
    loss = model(tokens, positions, mask, labels=tokens.roll(1, 1)).mean()
    loss.backward()
    torch.testing.assert_close(loss.detach(), whole_loss, rtol=1e-5, atol=1e-6)
    expected = whole.decoder.layers[0].mlp.linear_fc1.weight.grad.chunk(planned_tp)[rank % planned_tp]
    torch.testing.assert_close(model.decoder.layers[0].mlp.linear_fc1.weight.grad, expected, rtol=1e-4, atol=1e-6)


def megatron_experts(rank: int, ep: int) -> None:
    """A mixture's loss and gradients with its experts divided over ep devices, against those on one."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    megatron_on_cpu()
    moe_utils.te_general_gemm = None  # it asks for this name, which only Transformer Engine defines
    mixture = {"num_moe_experts": 4, "add_bias_linear": False, "moe_token_dispatcher_type": "allgather"}
    whole, whole_loss = _whole_gpt(mixture)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    model = _gpt({**mixture, "expert_model_parallel_size": ep})
    place, each = rank % ep, 4 // ep
    pairs = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            before, marked, behind = name.partition("local_experts.")
            number, _, rest = behind.partition(".")
            source = f"{before}{marked}{int(number) + place * each}.{rest}" if marked else name
            reference = whole.get_parameter(source)
            parameter.copy_(reference)
            pairs.append((bool(marked), parameter, reference))
    tokens, positions, mask = _megatron_batch()
    loss = model(tokens, positions, mask, labels=tokens.roll(1, 1)).mean()
    loss.backward()
    torch.testing.assert_close(loss.detach(), whole_loss, rtol=1e-5, atol=1e-6)
    for is_expert, parameter, reference in pairs:
        # Every device of ep has the same samples here: an expert sees each of them ep times.
        times = ep if is_expert else 1
        torch.testing.assert_close(parameter.grad, reference.grad * times, rtol=1e-4, atol=1e-6)


def megatron_pipeline(rank: int, layout: str, expected: dict[str, Any]) -> None:
    """A batch through megatron-core's own schedule over the layout's stages, against one process."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    megatron_on_cpu()
    whole, whole_loss = _whole_gpt({})
    pp, chunks = expected["mesh"]["pp"], expected["chunks"]
    virtual = {"virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {}
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp, **virtual)
    stages = {"pipeline_model_parallel_size": pp, "pipeline_model_parallel_layout": layout, **virtual}
    messages = {"pipeline_dtype": torch.float32, "batch_p2p_comm": False, "overlap_p2p_comm": False}
    place = parallel_state.get_pipeline_model_parallel_rank()
    models = []
    for chunk in range(chunks):
        ends = {"pre_process": place + chunk == 0, "post_process": place == pp - 1 and chunk == chunks - 1}
        more = {"vp_stage": chunk} if chunks > 1 else {}
        model = _gpt({**stages, **messages}, **ends, **more)
        model.model_type = None
        stage = chunk * pp + place
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        first = sum(expected["stage_blocks"][:stage])
        assert numbers == [first + index for index in range(expected["stage_blocks"][stage])], (rank, numbers)
        models.append(model)
    pairs = _copied(models, whole)
    tokens, positions, mask = _megatron_batch()
    count = max(2, pp) * chunks

    def forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
        next(batches)
        output = model(tokens, positions, mask, labels=tokens.roll(1, 1))
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(range(count)) for _ in models] if chunks > 1 else iter(range(count)),
        model=models if chunks > 1 else models[0],
        num_microbatches=count,
        seq_length=32,
        micro_batch_size=2,
    )
    for loss in losses:
        torch.testing.assert_close(loss["loss"], whole_loss, rtol=1e-5, atol=1e-6)
    assert bool(losses) == (place == pp - 1)
    for parameter, reference in pairs:
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-4, atol=1e-6)


def _copied(models: list[Any], whole: Any) -> list[tuple[Any, Any]]:
    """The parameters of stages with those of the whole model, which they are copies of."""
    pairs = []
    for model in models:
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, parameter in model.named_parameters():
            before, marked, behind = name.partition("decoder.layers.")
            index, _, rest = behind.partition(".")
            source = f"{before}{marked}{numbers[int(index)]}.{rest}" if marked else name
            with torch.no_grad():
                parameter.copy_(whole.get_parameter(source))
            pairs.append((parameter, whole.get_parameter(source)))
    return pairs


def accelerate_step(rank: int, plan_path: str, expected: dict[str, Any]) -> None:
    """A step of Accelerate's own FSDP2 by the two lines of `phaze.backends.accelerate`, against one process."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType

    import phaze
    from phaze.backends.accelerate import accelerator_arguments

    arguments = accelerator_arguments(phaze.load_plan(plan_path))
    assert arguments["gradient_accumulation_steps"] == expected["micro_batches"]
    degrees, plugin = expected["mesh"], arguments["fsdp_plugin"]
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is (expected["zero"] == 3)
    # It takes FSDP for processes with accelerators only, by this mark; its devices here are CPUs all the same.
    PartialState(cpu=True, backend="gloo")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(**{**arguments, "mixed_precision": "no", "gradient_accumulation_steps": 1}, cpu=True)
    mesh = accelerator.torch_device_mesh
    for axis in ("dp_replicate", "dp_shard", "cp"):
        if degrees[axis] > 1:
            ranks = dist.get_process_group_ranks(mesh[axis].get_group())
            assert ranks == group_of(rank, degrees, axis), (rank, axis, ranks)
    if degrees["cp"] > 1:  # its context parallelism is torch's ring of CUDA's attention kernels
        return
    torch.manual_seed(0)
    model = small_llama()
    whole = copy.deepcopy(model)
    references = dict(whole.named_parameters())
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.randint(0, 64, (expected["devices"], 16))
    accelerator.backward(model(input_ids=tokens[rank : rank + 1], labels=tokens[rank : rank + 1]).loss)
    whole(input_ids=tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        reference = references[name.replace("_checkpoint_wrapped_module.", "")]
        assert parameter.to_local().shape[0] == reference.shape[0] // degrees["dp_shard"], name
        torch.testing.assert_close(parameter.grad.full_tensor(), reference.grad, rtol=1e-4, atol=1e-6)


def lightning_loop(rank: int, path: str, expected: dict[str, Any]) -> None:
    """`Trainer.fit` with the written module over one step of all microbatches, against one process."""
    import lightning

    module, degrees = load(Path(path)), expected["mesh"]
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(Block(), Block())
    whole = copy.deepcopy(blocks)
    samples = torch.randn(expected["global_batch_size"], 16)

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def configure_model(self) -> None:
            module.shard(self.blocks, [(self.blocks, "0"), (self.blocks, "1")], self.device_mesh)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.blocks(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    os.environ["TORCHELASTIC_RUN_ID"] = "check"  # as torchrun's processes have it
    share = samples.chunk(degrees["dp_shard"])[rank // degrees["tp"]]
    batches = torch.utils.data.DataLoader(share, batch_size=expected["micro_batch_size"])
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "use_distributed_sampler": False,
    }
    trainer = module.trainer(accelerator="cpu", precision="32-true", max_epochs=1, **quiet)
    trainer.fit(Model(), batches)
    assert trainer.global_step == 1
    whole(samples).square().mean().backward()
    references = list(whole.parameters())
    for parameter, reference in zip(blocks.parameters(), references, strict=True):
        assert parameter.to_local().shape[0] == reference.shape[0] // degrees["dp_shard"]
        torch.testing.assert_close(parameter.full_tensor(), reference - 0.1 * reference.grad, rtol=1e-4, atol=1e-6)


def torchtitan_step(rank: int, model: Any, config: Any, expected: dict[str, Any]) -> None:
    """Forward and backward of a debug model that torchtitan sharded, against the same model on one process."""
    from torch.distributed.fsdp import FSDPModule

    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies first
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_states()
    whole = config.build()
    state = {name: _gathered(tensor) for name, tensor in model.state_dict().items()}
    whole.load_state_dict(state)
    degrees, copies = expected["mesh"], expected["devices"] // expected["mesh"]["tp"]
    torch.manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (copies, 32))
    own = tokens[rank // degrees["tp"] : rank // degrees["tp"] + 1]
    loss = _gathered(model(own)).float().square().mean()
    loss.backward()
    reference = whole(tokens).float().square().mean()
    reference.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / dist.get_world_size(), reference.detach(), rtol=1e-4, atol=1e-6)
    references = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        plain = name.replace("_checkpoint_wrapped_module.", "")
        summed = references[plain].grad * copies  # torchtitan divides the loss, and no gradient
        torch.testing.assert_close(_gathered(parameter.grad), summed, rtol=1e-3, atol=1e-5)


def _gathered(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
