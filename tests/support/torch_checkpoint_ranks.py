"""Run as a program: ranks that train, save and resume under another plan, and write whole models.

`python torch_checkpoint_ranks.py FOLDER` reads FOLDER/cases.json, a list of stages of one history: each has a plan, the
size of its world, whether it resumes, and how many steps it trains. Losses are appended to FOLDER/losses.json.
"""

import contextlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch_ranks import import_what_ranks_need
from torch_training import batch_of, build_model, inputs_of

import phaze


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    cases = json.loads((folder / "cases.json").read_text())
    import_what_ranks_need({case["kind"] for case in cases})
    for index, case in enumerate(cases):
        processes.start_processes(serve, args=(folder, index, case), nprocs=case["world"], start_method="fork")


def serve(rank: int, folder: Path, index: int, case: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting{index}",
        rank=rank,
        world_size=case["world"],
        timeout=timedelta(seconds=300),
    )
    kind, plan = case["kind"], phaze.load_plan(case["plan"])
    batch = batch_of(kind)
    with torch.device("meta") if case["weights"] else contextlib.nullcontext():
        model = build_model(kind)
    run = plan.apply(
        model,
        weights=case["weights"] or None,
        inputs=inputs_of(kind, batch),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=case["learning_rate"]),
    )
    if case["resumes"]:
        run.load(case["resumes"])
    losses = [float(run.step(**run.share(batch_of(kind, seed=seed)))) for seed in case["seeds"]]
    if case["saves"]:
        run.save(case["saves"])
    if case["writes"]:
        run.save_pretrained(case["writes"])
    if rank == 0:
        rates = [group["lr"] for group in run.optimizer.param_groups]
        held = sum(parameter.to_local().numel() for stage in run.stages for parameter in stage.parameters())
        answer = {"losses": losses, "rates": rates, "held": held}
        (folder / f"losses{index}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
