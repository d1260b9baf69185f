"""A model from the meta device to a training step on several processes, none of which ever holds it whole.

    python benchmarks/torch_large_model.py [--gib 6] [--ranks 4] [--layers 16]

A Llama of so many GiB of fp32 parameters is planned with ZeRO-3 and arranged without storage; every rank fills its own
shards and runs one step over gloo. Printed are the bytes of the parameters and, for each rank, the largest resident
memory before anything was filled and in the end.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
# The allocator of ranks, which are started anew, gives tensors back that are freed; else resident memory is what was
# held at any time, in pieces, and not what is held at once.
os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import transformers

import phaze

GIB = 2**30
LENGTH = 8


def main() -> None:
    """Plan the model here, and train it in ranks that are started anew, so that their memory is their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=6.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    width = width_of(arguments.gib, arguments.layers)
    strategy = {"dp": arguments.ranks, "tp": 1, "pp": 1, "zero": 3, "micro_batch_size": 1, "recompute": "full"}
    plan = phaze.evaluate(
        on_meta(width, arguments.layers),
        batch_of(arguments.ranks),
        cluster=f"cpu:{arguments.ranks}",
        global_batch_size=arguments.ranks,
        precision="fp32",
        target="torch",
        strategy=strategy,
        compares=False,
    ).plan
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        processes.start_processes(
            train, args=(folder, width, arguments.layers, arguments.ranks), nprocs=arguments.ranks, start_method="spawn"
        )


def width_of(gib: float, layers: int) -> int:
    """The width at which a model of so many layers has about so many GiB: twelve squares of it in each layer."""
    return round((gib * GIB / 4 / (12 * layers)) ** 0.5 / 128) * 128


def on_meta(width: int, layers: int) -> torch.nn.Module:
    """A Llama without storage."""
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=8 * width // 3 // 128 * 128,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 128,
        vocab_size=512,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def batch_of(size: int) -> dict[str, torch.Tensor]:
    """A batch of short sequences: memory is what this is about."""
    ids = torch.randint(0, 512, (size, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def fill(name: str, part: torch.Tensor) -> None:
    """Fill what a process holds of a parameter."""
    if "norm" in name:
        part.fill_(1.0)
    else:
        part.normal_(std=0.02)


def resident_gib() -> float:
    """The largest memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def train(rank: int, folder: str, width: int, layers: int, ranks: int) -> None:
    """One rank: arrange, fill, and one step."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timedelta(minutes=30))
    model = on_meta(width, layers)
    whole = sum(parameter.numel() * 4 for parameter in model.parameters()) / GIB
    before, start = resident_gib(), time.monotonic()
    run = phaze.load_plan(Path(folder) / "plan.json").apply(
        model, weights=fill, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3)
    )
    held = sum(parameter.to_local().numel() * 4 for parameter in model.parameters()) / GIB
    filled = resident_gib()
    loss = run.step(**run.share(batch_of(ranks)))
    answers: list[object] = [None] * ranks
    dist.all_gather_object(answers, (before, filled, resident_gib(), held))
    if rank == 0:
        print(
            f"{whole:.2f} GiB of parameters on {ranks} ranks, loss {float(loss):.3f}, {time.monotonic() - start:.0f} s"
        )
        for index, (started, shards, peak, own) in enumerate(answers):  # type: ignore[misc]
            print(
                f"rank {index}: peak {peak:.2f} GiB after a step, {shards:.2f} with {own:.2f} GiB of shards filled, "
                f"{started:.2f} before"
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
