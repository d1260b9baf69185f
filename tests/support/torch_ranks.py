"""Run as a program: ranks of one process group, over gloo, that apply plans to models and compare with one process.

`python torch_ranks.py FOLDER WORLD` reads cases (JSON) from FOLDER/cases.json, spawns WORLD ranks, and writes what rank
0 gathered to FOLDER/answers.json: for each case errors relative to the unsharded model, or the message of a failure.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_training import batch_of, build_model, given_loss, inputs_of, loss_of

import phaze

LEARNING_RATE = 0.05
PATIENCE = timedelta(seconds=int(os.environ.get("PHAZE_TEST_PATIENCE_S", "120")))


def main(folder: Path, world: int) -> None:
    processes.start_processes(serve, args=(folder, world), nprocs=world, start_method="spawn")


def serve(rank: int, folder: Path, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=PATIENCE
    )
    answers = []
    for case in json.loads((folder / "cases.json").read_text()):
        try:
            found = run_case(case)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            with (folder / f"failures-{rank}.txt").open("a") as notes:  # others may wait in vain for this rank
                notes.write(f"{case}\n{found['trace']}\n")
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, found)
        answers.append(joined(gathered))
    if rank == 0:
        (folder / "answers.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks saw: the largest of each error, the names that any of them held."""
    for rank, one in enumerate(found):
        if "error" in one:
            return {**one, "rank": rank}
    numbers = {key: max(one[key] for one in found) for key in found[0] if isinstance(found[0][key], float)}
    worst = max(found, key=lambda one: one["gradient"])
    names = sorted({name for one in found for name in one["names"]})
    listed = {
        "names": names,
        "worst": worst["worst"],
        "curve": found[0]["curve"],
        "live": [one["live"] for one in found],
    }
    return numbers | listed


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """A plan applied: one backward and one step against one process, then a loss curve where steps are asked for."""
    plan = phaze.load_plan(case["plan"])
    kind = case["kind"]
    size = plan.question.global_batch_size
    batch = batch_of(kind, size=size)
    reference = build_model(kind)
    loss = loss_of(kind, reference, batch)
    loss.backward()
    model = build_model(kind)
    run = plan.apply(
        model,
        inputs=inputs_of(kind, batch),
        optimizer=lambda own: torch.optim.SGD(own, lr=LEARNING_RATE),
        **given_loss(kind),
    )
    gathered = {}
    for stage in run.stages:
        stage.register_forward_hook(lambda own, *_: gathered.update({id(own): stored_bytes(own.parameters())}))
    with CopyTraffic() as traffic:
        found = run.backward(**run.share(batch))
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters(remove_duplicate=False)}
    worst, errors, names = "", 0.0, []
    largest = max(float(one.abs().max()) for one in gradients.values())
    for stage in run.stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is None:
                raise AssertionError(f"{name} has no gradient")
            error = difference(in_order(stage, name, parameter, parameter.grad), gradients[name], largest)
            names.append(name)
            if error >= errors:
                worst, errors = name, error
    answer = {
        "loss": abs(float(found) - float(loss.detach())) / abs(float(loss.detach())),
        "gradient": errors,
        "worst": worst,
        "names": names,
    }
    live = live_bytes(run) | {"gathered": sum(gathered.values()), "copies": traffic.total_bytes}
    answer["again"] = second_backward(run, batch, gradients, largest)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter -= LEARNING_RATE * parameter.grad
    run.step(**run.share(batch))
    after = dict(reference.named_parameters(remove_duplicate=False))
    scale = max(float(one.detach().abs().max()) for one in after.values())
    answer["parameter"] = max(
        difference(in_order(stage, name, own, own.detach()), after[name].detach(), scale)
        for stage in run.stages
        for name, own in stage.named_parameters()
    )
    live["optimizer"] = adam_bytes(run)
    answer["loaded"] = loading_error(run, kind)
    return {**answer, "live": live, **curve(case, plan)}


def loading_error(run: Any, kind: str) -> float:
    """The largest difference after other weights are loaded, whole and in parts, and saved again."""
    other, worst = build_model(kind), 0.0
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(5))
    state, whole = other.state_dict(), StateDictOptions(full_state_dict=True)
    for stage in run.stages:
        given = {name: state[name] for name in stage.state_dict()}
        for load in (stage.load_state_dict, lambda one, own=stage: set_model_state_dict(own, one, options=whole)):
            for parameter in stage.parameters():
                parameter.detach().zero_()
            load(dict(given))
            stage.load_state_dict(stage.state_dict())
            for name, own in stage.named_parameters():
                found = in_order(stage, name, own, own.detach())
                worst = max(worst, float((found - state[name]).abs().max()))
        saved = get_model_state_dict(stage, options=whole)
        ends = [(whole_tensor(saved[name]), value) for name, value in given.items()]
        worst = max([worst, *(float((found - value).abs().max()) for found, value in ends)])
    return worst


def second_backward(run: Any, batch: Any, gradients: dict[str, Any], largest: float) -> float:
    """The error of gradients that a second backward adds to."""
    run.backward(**run.share(batch))
    return max(
        difference(in_order(stage, name, own, own.grad), 2 * gradients[name], largest)
        for stage in run.stages
        for name, own in stage.named_parameters()
    )


def in_order(stage: torch.nn.Module, name: str, parameter: torch.nn.Parameter, value: Any) -> torch.Tensor:
    """A parameter or its gradient as the model has it: whole, in the model's own order."""
    from phaze.backends.torch.split_parameters import to_model_order

    whole = whole_tensor(value)
    path, _, key = name.rpartition(".")
    cuts = getattr(stage.get_submodule(path), "_phaze_strided", {})
    return to_model_order(whole, *cuts[key]) if key in cuts else whole


def whole_tensor(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def difference(found: torch.Tensor, expected: torch.Tensor, largest: float) -> float:
    """The largest difference as a share of the largest value; what is nothing but rounding in both is equal."""
    scale = float(expected.abs().max())
    if scale < 1e-6 * largest:
        return float((found - expected).abs().max()) / largest
    return float((found - expected).abs().max()) / scale


class CopyTraffic(TorchDispatchMode):
    """Counts what copies of a model send: a gather or a scatter its whole tensor, an all-reduce twice.

    FSDP2 gathers and scatters one flat buffer per layer; tensors under 1 KiB do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total_bytes = 0
        self._times = {"_allgather_base_": 1, "_reduce_scatter_base_": 1, "allreduce_": 2}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.name().split("::")
        times = self._times.get(name.partition(".")[0], 0) if namespace == "c10d" else 0
        tensors = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)] if times else []
        size = max((one.numel() * one.element_size() for one in tensors), default=0)
        self.total_bytes += times * size if size >= 1024 else 0
        return func(*args, **(kwargs or {}))


def live_bytes(run: Any) -> dict[str, int]:
    """Bytes of parameters and gradients that this process holds between steps."""
    parameters = [own for stage in run.stages for own in stage.parameters()]
    return {
        "parameters": stored_bytes(parameters),
        "gradients": stored_bytes(own.grad for own in parameters if own.grad is not None),
    }


def stored_bytes(tensors: Iterable[Any]) -> int:
    parts = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    return sum(int(one.numel() * one.element_size()) for one in parts)


def adam_bytes(run: Any) -> int:
    """Bytes of Adam's two moments of this process's parameters, after a step."""
    adam = torch.optim.Adam([own for stage in run.stages for own in stage.parameters()])
    adam.step()
    moments = [state[name] for state in adam.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return sum(int(one.to_local().numel() if isinstance(one, DTensor) else one.numel()) * 4 for one in moments)


def curve(case: dict[str, Any], plan: phaze.Plan) -> dict[str, Any]:
    """Losses of some training steps, relative to those of one process."""
    if not case.get("steps"):
        return {"curve": [], "curve_error": 0.0}
    kind, size = case["kind"], plan.question.global_batch_size
    alone, model = build_model(kind), build_model(kind)
    run = plan.apply(model, inputs=batch_of(kind, size=size), optimizer=lambda own: torch.optim.AdamW(own, lr=1e-3))
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    found, error = [], 0.0
    for step in range(case["steps"]):
        batch = batch_of(kind, seed=step, size=size)
        found.append(float(run.step(**run.share(batch))))
        optimizer.zero_grad()
        loss = loss_of(kind, alone, batch)
        loss.backward()
        optimizer.step()
        error = max(error, abs(found[-1] - float(loss.detach())) / abs(float(loss.detach())))
    return {"curve": found, "curve_error": error}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
