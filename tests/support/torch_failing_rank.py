"""Run as a program: `python torch_failing_rank.py FOLDER RANK WAY`, of two ranks, of which rank 1 fails.

Rank 0 waits for it in a collective (`collective`), or both make something of their own (`made`).
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phaze.backends.torch.process_groups import made_by_all, told_to_all
from phaze.errors import PlanError


def fail_or_wait(rank: int) -> None:
    with told_to_all():
        fail_on_second(rank)
        dist.all_reduce(torch.ones(4))


def fail_on_second(rank: int) -> None:
    if rank == 1:
        raise ValueError("the weights of layer 3 are missing")


def make_together(rank: int) -> None:
    made_by_all(lambda: fail_on_second(rank), init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)))


WAYS = {"collective": fail_or_wait, "made": make_together}


def main(folder: Path, rank: int, way: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    dist.barrier()
    try:
        WAYS[way](rank)
    except (PlanError, ValueError) as error:
        (folder / f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
