"""Runs the program that `plan.export("fsdp")` wrote, where phaze cannot be imported; started as `... FOLDER KIND`.

Two ranks take three steps; rank 0 writes their losses, and those of one process, to FOLDER/found.json.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch_training import batch_of, build_model, loss_of


def run(rank: int, folder: Path, kind: str) -> None:
    sys.modules["phaze"] = None  # type: ignore[assignment]
    sys.path.insert(0, str(folder))
    import train_step

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model, alone = build_model(kind), build_model(kind)
    mesh = train_step.arrange_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    losses, expected = [], []
    for step in range(3):
        batch = batch_of(kind, seed=step)
        losses.append(float(train_step.train_step(model, mesh, optimizer, **train_step.share(mesh, batch))))
        reference.zero_grad()
        loss = loss_of(kind, alone, batch)
        loss.backward()
        reference.step()
        expected.append(float(loss.detach()))
    if rank == 0:
        (folder / "found.json").write_text(json.dumps({"losses": losses, "expected": expected}))
    dist.destroy_process_group()


if __name__ == "__main__":
    processes.start_processes(run, args=(Path(sys.argv[1]), sys.argv[2]), nprocs=2, start_method="spawn")
