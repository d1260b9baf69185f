"""Runs programs that `plan.export("fsdp")` wrote, where phaze cannot be imported; started as `... FOLDER KIND...`.

For each kind of model two ranks take three steps with the program in FOLDER/KIND; rank 0 writes their losses, and those
of one process, to FOLDER/KIND/found.json. Ranks are forked from a process that has imported torch and built the models.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch_training import batch_of, build_model, loss_of

SCALARS: dict[str, dict[str, object]] = {"gpt2": {"return_dict": True, "logits_to_keep": 0}}
"""Arguments of a model without samples, which every process gets as they are."""


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
    check_placements(model)
    losses, expected = [], []
    for step in range(3):
        batch = batch_of(kind, seed=step)
        shared = train_step.share(mesh, {**batch, **SCALARS.get(kind, {})})
        losses.append(float(train_step.train_step(model, mesh, optimizer, **shared)))
        reference.zero_grad()
        loss = loss_of(kind, alone, batch)
        loss.backward()
        reference.step()
        expected.append(float(loss.detach()))
    if rank == 0:
        (folder / "found.json").write_text(json.dumps({"losses": losses, "expected": expected}))
    dist.destroy_process_group()


def check_placements(model: torch.nn.Module) -> None:
    """Every parameter lies as the written data say, on each axis of the mesh that has several processes."""
    import sharding

    axes = list(sharding.MESH)
    for name, parameter in model.named_parameters():
        planned = sharding.PLACEMENTS.get(name, sharding.OTHERS)
        for axis, placement in zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True):
            said = planned[axes.index(axis)]
            if sharding.MESH[axis] > 1:
                assert placement.is_shard() == said.is_shard(), (name, axis, placement)
                assert not said.is_shard() or placement.dim == said.dim, (name, axis, placement)


def main(folder: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)  # a thread pool would not survive the fork
    for kind in kinds:
        build_model(kind)  # imports what it needs
        processes.start_processes(run, args=(folder / kind, kind), nprocs=2, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
