"""Train a Hugging Face Llama with a plan, save a checkpoint, and go on from it, on as many processes as there are then.

Start:      torchrun --nproc-per-node 2 examples/torch_llama_checkpoint.py --checkpoint run1
Go on:      the same command again; the number of processes may be another one, the plan is made anew
Real size:  torchrun --nproc-per-node 8 examples/torch_llama_checkpoint.py --checkpoint run1 \
                --config my_llama_folder --length 4096 --batch 128 --steps 1000

A checkpoint holds the tensors of the whole model under its own names, each process writes its part, and a plan of any
other strategy reads it. `--export FOLDER` writes the trained model as `from_pretrained` reads it.
"""

import argparse
from pathlib import Path

import torch
import transformers

import phaze


def main() -> None:
    """Plan, resume where there is a checkpoint, train, save."""
    arguments = read_arguments()
    has_gpus = torch.cuda.is_available()
    torch.distributed.init_process_group("nccl" if has_gpus else "gloo")
    rank = torch.distributed.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)

    torch.manual_seed(0)  # equal weights in every process
    model = transformers.LlamaForCausalLM(llama_config(arguments.config)).to(device)
    batch = counting_batch(0, model.config.vocab_size, arguments, device)
    plan = phaze.optimize(
        model,
        batch,
        cluster=None if has_gpus else f"cpu:{torch.distributed.get_world_size()}",
        global_batch_size=arguments.batch,
        precision="bf16" if has_gpus else "fp32",
    )
    run = plan.apply(model, inputs=batch, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))

    first = last_step(Path(arguments.checkpoint))
    if first:
        run.load(Path(arguments.checkpoint, f"step-{first}"))
    if rank == 0:
        print(plan)
        print(f"goes on at step {first}" if first else "starts anew")

    for step in range(first, first + arguments.steps):
        loss = run.step(**run.share(counting_batch(step, model.config.vocab_size, arguments, device)))
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    run.save(Path(arguments.checkpoint, f"step-{first + arguments.steps}"))  # every process calls it
    if arguments.export:
        run.save_pretrained(arguments.export)
    torch.distributed.destroy_process_group()


def last_step(folder: Path) -> int:
    """The steps that the newest whole checkpoint has behind it; 0 without one. `.metadata` is what is written last."""
    whole = [path.parent.name for path in folder.glob("step-*/.metadata")]
    return max((int(name.removeprefix("step-")) for name in whole), default=0)


def llama_config(source: str | None) -> transformers.LlamaConfig:
    """The config of a folder or a name on the Hub, or a tiny one."""
    if source is not None:
        return transformers.LlamaConfig.from_pretrained(source)
    return transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )


def counting_batch(
    step: int, words: int, arguments: argparse.Namespace, device: torch.device
) -> dict[str, torch.Tensor]:
    """Sequences that count upwards, the same in every process: put your data loader here, seeded by the step."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(words, (arguments.batch, 1), generator=generator)
    ids = ((starts + torch.arange(arguments.length)) % words).to(device)
    return {"input_ids": ids, "labels": ids}


def read_arguments() -> argparse.Namespace:
    """The sizes; the defaults take seconds on a laptop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, metavar="FOLDER", help="that all processes reach")
    parser.add_argument("--config", metavar="FOLDER", help="with a config.json of a Llama (default: a tiny one)")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, over all processes")
    parser.add_argument("--steps", type=int, default=5, help="steps of this run")
    parser.add_argument("--export", metavar="FOLDER", help="write the model there for transformers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
