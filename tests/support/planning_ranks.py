"""Processes that plan together; started by the tests as `planning_ranks.py RANKS FOLDER`.

They are forked from one that has imported torch, which takes each of them longer than planning.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from plans import QUESTION, small_cluster, small_graph
from rare_collections import collect_rarely, keep_what_is_there

import phaze
from phaze.errors import PhazeError
from phaze.plan.plan import Plan
from phaze.planner import Progress


def plan(case: str, rank: int) -> Plan:
    """Equal questions twice, another model or a failure on one rank, a failure of the one that plans, no cluster."""
    graph, question = small_graph(), {"cluster": small_cluster(), **QUESTION}
    if case == "other" and rank == 2:
        graph = small_graph(num_layers=3)
    if case == "fails" and rank == 1:
        question["cluster"] = "no-such-chip:8"
    if case == "impossible":
        question |= {"gap": 0.02, "time_limit_s": 1e-9}
    if case == "unnamed":
        del question["cluster"]
    if case.startswith("interrupted"):
        question |= {"gap": 0.03, "progress": interrupt if case == "interrupted" else None}
    return phaze.optimize(graph, **question)


def interrupt(progress: Progress) -> None:
    """Press Ctrl-C when the next slicing begins after something was found."""
    if progress.best_step_time_s is not None:
        raise KeyboardInterrupt


def answer(rank: int, ranks: int, folder: Path) -> None:
    """Answer every case and write down what was found."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = {}
    for case in ("agree", "again", "other", "fails", "impossible", "unnamed", "interrupted", "interrupted before"):
        try:
            found[case] = {"plan": plan(case, rank).to_json()}
        except PhazeError as error:
            found[case] = {"error": f"{type(error).__name__}: {error}"}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)  # a thread pool would not survive the fork
    collect_rarely()
    keep_what_is_there()
    count = int(sys.argv[1])
    processes.start_processes(answer, args=(count, Path(sys.argv[2])), nprocs=count, start_method="fork")
