"""Models of many kinds, trained for five steps in processes as plans say, against one process.

    python benchmarks/torch_zoo.py [NAME ...] [--markdown]

A row a model, made from its config alone: under each strategy the largest relative difference of losses and of all
parameters after five steps of SGD with momentum, in fp32 over gloo, or why the strategy is refused. `--markdown` prints
the rows of a table. Ranks are forked from this process, so that each model is captured once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch_zoo_models import MODELS, ZooModel

import phaze
from phaze.errors import PhazeError

BATCH = 8
STEPS = 5
TOLERANCE = 1e-5
PATIENCE = timedelta(seconds=600)
STRATEGIES: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "dp2 x tp2": {"dp": 2, "tp": 2, "zero": 3},
    "cp2 x tp2": {"cp": 2, "tp": 2},
    "hybrid 2 x 2": {"dp": 4, "shard": 2, "zero": 3},
}


def main() -> int:
    """Print a row a model, and how many cases are equal, refused, or neither."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in MODELS]:
        parser.error(f"unknown model {unknown[0]}; known are {', '.join(MODELS)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    equal = refused = wrong = 0
    if arguments.markdown:
        print("| model | " + " | ".join(STRATEGIES) + " |\n|---|" + "---|" * len(STRATEGIES))
    for name in arguments.names or MODELS:
        answers = answers_of(MODELS[name])
        equal += sum(is_equal(answer) for answer in answers.values())
        refused += sum("refused" in answer for answer in answers.values())
        wrong += sum(not is_equal(answer) and "refused" not in answer for answer in answers.values())
        show(name, answers, is_markdown=arguments.markdown)
    print(f"{equal} equal one process, {refused} refused with a reason, {wrong} neither")
    return 1 if wrong else 0


def is_equal(answer: Mapping[str, Any]) -> bool:
    """Whether a case gave what one process gives."""
    return float(answer.get("error", "inf")) <= TOLERANCE if "failure" not in answer else False


def show(name: str, answers: Mapping[str, Mapping[str, Any]], *, is_markdown: bool) -> None:
    """Print the answers for a model."""
    if is_markdown:
        cells = [f"{answers[key]['error']:.0e}" if is_equal(answers[key]) else "-" for key in STRATEGIES]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    for key, answer in answers.items():
        if is_equal(answer):
            words = f"equal ({answer['error']:.0e})"
        elif "refused" in answer:
            words = f"refused: {answer['refused']}"
        else:
            words = f"WRONG: {answer.get('failure', answer.get('error'))}"
        if not is_markdown or not is_equal(answer):
            print(f"{name:16s} {key:13s} {words[:260]}", flush=True, file=sys.stderr if is_markdown else sys.stdout)


def answers_of(model: ZooModel) -> dict[str, dict[str, Any]]:
    """What every strategy gave for a model."""
    answers: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plans: dict[int, dict[str, str]] = {2: {}, 4: {}}
        graphs: dict[bool, Any] = {}
        for key, strategy in STRATEGIES.items():
            world = 4 if " x " in key else 2
            try:
                plan = plan_of(model, graphs, strategy, world)
                plan.save(folder / f"{key}.json")
                plans[world][key] = str(folder / f"{key}.json")
            except PhazeError as error:
                answers[key] = {"refused": " ".join(str(error).split())}
        expected = train_alone(model)
        torch.save(expected, folder / "expected")
        for world, cases in plans.items():
            if cases:
                answers |= run_ranks(model, folder, world, cases)
    return answers


def plan_of(model: ZooModel, graphs: dict[bool, Any], strategy: Mapping[str, int], world: int) -> phaze.Plan:
    """The plan of a strategy, of the captured model, or of its config where experts must be known."""
    needs_config = strategy.get("ep", 1) > 1 or (model.is_mixture and strategy.get("cp", 1) > 1)
    if needs_config not in graphs:
        captured = None if needs_config else phaze.import_graph(model.build(), model.batch(BATCH))
        graphs[needs_config] = model.described() if needs_config else captured
    settled: dict[str, object] = {"dp": 1, "tp": 1, "pp": 1, "zero": 0, "recompute": "none", **strategy}
    copies = int(str(settled["dp"]))
    settled["micro_batch_size"] = BATCH // copies if model.has_batch_norms else max(1, BATCH // copies // 2)
    if settled["tp"] != 1:
        settled["sequence_parallel"] = False
    if settled["pp"] != 1:
        settled |= {"schedule": "1f1b", "chunks": 1}
    asked = {"global_batch_size": BATCH, "precision": "fp32", "target": "torch", "compares": False}
    return phaze.evaluate(graphs[needs_config], cluster=f"cpu:{world}", strategy=settled, **asked).plan


def optimizer_of(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """SGD, whose steps are as exact as the gradients; Adam's divide gradients that are nothing but rounding."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.02, momentum=0.9)


def train_alone(model: ZooModel) -> dict[str, Any]:
    """Losses and parameters of one process."""
    module = model.build()
    optimizer, losses = optimizer_of(module.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model.loss(module(**model.batch(BATCH, step)))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "parameters": {name: value.detach() for name, value in named(module)}}


def named(module: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Parameter]]:
    """Parameters by all their names."""
    return module.named_parameters(remove_duplicate=False)


def run_ranks(model: ZooModel, folder: Path, world: int, cases: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The answers of rank 0 for all cases of one size of the world."""
    answers = folder / f"answers{world}.json"
    try:
        processes.start_processes(serve, args=(model, folder, world, cases), nprocs=world, start_method="fork")
    except Exception as error:  # whatever ended a rank is what this script reports
        known = json.loads(answers.read_text()) if answers.exists() else {}
        return {key: known.get(key, {"failure": f"a rank ended: {str(error)[-200:]}"}) for key in cases}
    return dict(json.loads(answers.read_text()))


def serve(rank: int, model: ZooModel, folder: Path, world: int, cases: Mapping[str, str]) -> None:
    """One rank: run all cases, and write what any rank saw of each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    meeting = f"file://{folder}/meeting{world}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=PATIENCE)
    expected = torch.load(folder / "expected")
    answers: dict[str, Any] = {}
    for key, path in cases.items():
        try:
            answer = train_in_ranks(model, phaze.load_plan(path), expected)
        except PhazeError as error:
            answer = {"refused": " ".join(str(error).split())}
        except Exception as error:  # whatever a model does wrong is a row of the table
            where = traceback.format_exc().strip().splitlines()[-3].strip()
            answer = {"failure": f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({where})"}
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, answer)
        failed = [one for one in gathered if "error" not in one]
        answers[key] = failed[0] if failed else max(gathered, key=lambda one: one["error"])
        if rank == 0:
            (folder / f"answers{world}.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


def train_in_ranks(model: ZooModel, plan: phaze.Plan, expected: Mapping[str, Any]) -> dict[str, Any]:
    """The largest relative difference of losses and parameters from those of one process."""
    batch_norm = {"batch_norm": "synchronized"} if model.has_batch_norms else {}
    loss_fn = {} if model.returns_loss else {"loss_fn": model.loss}
    run = plan.apply(model.build(), inputs=model.batch(BATCH), optimizer=optimizer_of, **batch_norm, **loss_fn)
    losses = [float(run.step(**run.share(model.batch(BATCH, step)))) for step in range(STEPS)]
    differences = [abs(loss - wanted) / abs(wanted) for loss, wanted in zip(losses, expected["losses"], strict=True)]
    held = {name for stage in run.stages for name, _ in stage.named_parameters(remove_duplicate=False)}
    everywhere: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everywhere, held)
    if missing := expected["parameters"].keys() - set().union(*everywhere):
        return {"failure": f"no process trains {', '.join(sorted(missing)[:3])}"}
    for stage in run.stages:
        state = stage.state_dict()
        for name, _ in stage.named_parameters():
            wanted = expected["parameters"][name]
            value = state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name]
            differences.append(float((value - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3)))
    return {"error": max(differences)}


if __name__ == "__main__":
    sys.exit(main())
