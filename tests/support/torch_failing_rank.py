"""Run as a program: `python torch_failing_rank.py FOLDER RANK`, of two; rank 1 fails while rank 0 waits for it."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from phaze.backends.torch.process_groups import told_to_all
from phaze.errors import PlanError


def main(folder: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    dist.barrier()
    try:
        with told_to_all():
            if rank == 1:
                raise ValueError("the weights of layer 3 are missing")
            dist.all_reduce(torch.ones(4))
    except (PlanError, ValueError) as error:
        (folder / f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
