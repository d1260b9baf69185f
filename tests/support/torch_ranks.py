"""Run as a program: ranks of one process group, over gloo, that apply plans to models and compare with one process.

`python torch_ranks.py FOLDER WORLD...` reads, for one size of the process group after the other, cases (JSON) from
FOLDER/WORLD/cases.json, starts WORLD ranks, and writes what rank 0 gathered to FOLDER/WORLD/answers.json: for each case
errors relative to the unsharded model, or the message of a failure.

Ranks are forked from a process that has imported everything, has built the models and has captured one: importing
torch, transformers and what captures graphs takes each rank longer than most of its cases.
"""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from rare_collections import collect_rarely, keep_what_is_there
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_loops import dropped, train_alone, train_applied
from torch_training import apply_options, batch_of, build_model, inputs_of, loss_of

import phaze
from phaze.errors import PlanError

LEARNING_RATE = 0.05
PATIENCE = timedelta(seconds=int(os.environ.get("PHAZE_TEST_PATIENCE_S", "120")))


def main(folder: Path, worlds: Iterable[int]) -> None:
    torch.set_num_threads(1)  # a thread pool would not survive the fork
    cases = {world: json.loads((folder / str(world) / "cases.json").read_text()) for world in worlds}
    import_what_ranks_need({case["kind"] for of_world in cases.values() for case in of_world})
    for world, of_world in cases.items():
        arguments = (folder / str(world), world, of_world)
        processes.start_processes(serve, args=arguments, nprocs=world, start_method="fork")


def import_what_ranks_need(kinds: Iterable[str]) -> None:
    """Modules that are imported when a model is built or captured for the first time."""
    collect_rarely()
    for kind in kinds:
        build_model(kind)
    phaze.import_graph(build_model("gpt2"), batch_of("gpt2"))
    keep_what_is_there()


def serve(rank: int, folder: Path, world: int, cases: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=PATIENCE
    )
    answers = []
    for case in cases:
        try:
            answer = RUNS[case["what"]](case)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            with (folder / f"failures-{rank}.txt").open("a") as notes:  # others may wait in vain for this rank
                notes.write(f"{case}\n{answer['trace']}\n")
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, answer)
        answers.append(joined(gathered))
    if rank == 0:
        (folder / "answers.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


def joined(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks saw: the largest of each error, the names that any of them held."""
    for rank, answer in enumerate(of_ranks):
        if "error" in answer:
            return {**answer, "rank": rank}
    first = of_ranks[0]
    numbers = {key: max(answer[key] for answer in of_ranks) for key in first if isinstance(first[key], float)}
    if "loop" in first:
        return {**numbers, "refusal": first["refusal"]}
    if "dropped" in first:
        return {**numbers, "dropped": [answer["dropped"] for answer in of_ranks]}
    worst = max(of_ranks, key=lambda answer: answer["gradient"])
    names = sorted({name for answer in of_ranks for name in answer["names"]})
    listed = {
        "names": names,
        "worst": worst["worst"],
        "curve": first["curve"],
        "live": [answer["live"] for answer in of_ranks],
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
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
        **apply_options(kind),
    )
    gathered = {}
    for stage in run.stages:
        stage.register_forward_hook(lambda module, *_: gathered.update({id(module): stored_bytes(module.parameters())}))
    with CopyTraffic() as traffic:
        sharded_loss = run.backward(**run.share(batch))
    for parameter in reference.parameters():
        if parameter.grad is None:  # nothing reads it
            parameter.grad = torch.zeros_like(parameter)
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters(remove_duplicate=False)}
    worst, errors, names = "", 0.0, []
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for stage in run.stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is None:
                if gradients[name].any():
                    raise AssertionError(f"{name} has no gradient")
                parameter.grad = torch.zeros_like(parameter)
            error = difference(in_order(stage, name, parameter, parameter.grad), gradients[name], largest)
            names.append(name)
            if error >= errors:
                worst, errors = name, error
    answer = {
        "loss": abs(float(sharded_loss) - float(loss.detach())) / abs(float(loss.detach())),
        "gradient": errors,
        "worst": worst,
        "names": names,
    }
    norm = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf")))
    answer["norm"] = abs(float(run.clip_grad_norm_(float("inf"))) - norm) / norm
    answer["buffers"] = max(
        (
            float((buffer - dict(reference.named_buffers())[name]).abs().max())
            for stage in run.stages
            for name, buffer in stage.named_buffers()
            if "running" in name
        ),
        default=0.0,
    )
    live = live_bytes(run) | {"gathered": sum(gathered.values()), "copies": traffic.total_bytes}
    live["exchanged"] = traffic.exchanged_bytes
    live["tensor"] = traffic.bytes_in(run.mesh["tp"].get_group()) + traffic.summed_bytes
    live["contexts"] = traffic.bytes_in(run._contexts.group) if run._contexts is not None else 0
    if case["is_thorough"]:
        answer["again"] = second_backward(run, batch, gradients, largest)
    run.clip_grad_norm_(norm / 2)
    answer["clipped"] = abs(float(run.clip_grad_norm_(float("inf"))) / (norm / 2) - 1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter -= LEARNING_RATE * parameter.grad
    run.step(**run.share(batch))
    after = dict(reference.named_parameters(remove_duplicate=False))
    scale = max(float(parameter.detach().abs().max()) for parameter in after.values())
    answer["parameter"] = max(
        difference(in_order(stage, name, parameter, parameter.detach()), after[name].detach(), scale)
        for stage in run.stages
        for name, parameter in stage.named_parameters()
    )
    if case["counts_moments"]:
        live["optimizer"] = adam_bytes(run)
    if case["is_thorough"]:
        answer["loaded"] = loading_error(run, kind)
    return {**answer, "live": live, **curve(case, plan)}


def run_loop(case: dict[str, Any]) -> dict[str, Any]:
    """A training loop under a plan and in one process: the largest differences of losses and of parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sizes that are not the plan's are said once
        run, losses = train_applied(case["kind"], phaze.load_plan(case["plan"]))
    alone, expected = train_alone(case["kind"])
    after = dict(alone.named_parameters(remove_duplicate=False))
    frozen = {name for name, parameter in after.items() if not parameter.requires_grad}
    named = [(stage, name, parameter) for stage in run.stages for name, parameter in stage.named_parameters()]
    assert all(parameter.grad is None for _, name, parameter in named if name in frozen)
    errors = [
        difference(in_order(stage, name, parameter, parameter.detach()), after[name].detach(), 1.0)
        for stage, name, parameter in named
    ]
    apart = max(abs(value - other) / abs(other) for value, other in zip(losses, expected, strict=True))
    generated, refusal = generated_errors(run, alone)
    measured = run.profile(run.share(batch_of(case["kind"])), steps=1)
    assert measured.seconds > 0
    assert "times" in str(measured)
    return {
        "loop": apart,
        "parameter": max(errors),
        "sent": float(sum(measured.sent_bytes.values())),
        "generated": generated,
        "refusal": refusal,
    }


def run_dropout(case: dict[str, Any]) -> dict[str, Any]:
    """What ranks that were seeded differently drop of equal samples."""
    value, is_untouched = dropped(phaze.load_plan(case["plan"]), seed=dist.get_rank())
    assert is_untouched
    return {"dropped": value}


RUNS = {"step": run_case, "loop": run_loop, "dropout": run_dropout}


def generated_errors(run: Any, alone: torch.nn.Module) -> tuple[float, str]:
    """How many words differ from those that one process generates, or why there are none; copies have other prompts."""
    copy = run.mesh.get_local_rank("shard")
    prompt, length = batch_of("llama")["input_ids"][copy : copy + 1, : 4 + copy], {"max_new_tokens": 3 + copy}
    try:
        words = run.generate(prompt, **length, do_sample=False)
    except PlanError as error:
        return 0.0, str(error)
    return float((words != alone.generate(prompt, **length, do_sample=False)).sum()), ""


def loading_error(run: Any, kind: str) -> float:
    """The largest difference after other weights are loaded, whole and in parts, and saved again."""
    other, worst = build_model(kind), 0.0
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(5))
    state, whole = other.state_dict(), StateDictOptions(full_state_dict=True)
    for stage in run.stages:
        given = {name: state[name] for name in stage.state_dict()}
        loads = [stage.load_state_dict]
        if dist.get_world_size() == 2:  # larger groups repeat what is asked of these
            loads.append(lambda state, into=stage: set_model_state_dict(into, state, options=whole))
        for load in loads:
            for parameter in stage.parameters():
                parameter.detach().zero_()
            load(dict(given))
            stage.load_state_dict(stage.state_dict())
            for name, parameter in stage.named_parameters():
                loaded = in_order(stage, name, parameter, parameter.detach())
                worst = max(worst, float((loaded - state[name]).abs().max()))
        saved = get_model_state_dict(stage, options=whole)
        ends = [(whole_tensor(saved[name]), value) for name, value in given.items()]
        worst = max([worst, *(float((loaded - value).abs().max()) for loaded, value in ends)])
    return worst


def second_backward(run: Any, batch: Any, gradients: dict[str, Any], largest: float) -> float:
    """The error of gradients that a second backward adds to."""
    run.backward(**run.share(batch))
    return max(
        difference(in_order(stage, name, parameter, parameter.grad), 2 * gradients[name], largest)
        for stage in run.stages
        for name, parameter in stage.named_parameters()
    )


def in_order(stage: torch.nn.Module, name: str, parameter: torch.nn.Parameter, value: Any) -> torch.Tensor:
    """A parameter or its gradient as the model has it: whole, in the model's own order."""
    from phaze.backends.torch.arrange import to_model_order

    whole = whole_tensor(value)
    path, _, key = name.rpartition(".")
    cuts = getattr(stage.get_submodule(path), "_phaze_strided", {})
    return to_model_order(whole, *cuts[key]) if key in cuts else whole


def whole_tensor(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole


def difference(actual: torch.Tensor, expected: torch.Tensor, largest: float) -> float:
    """The largest difference as a share of the largest value; what is nothing but rounding in both is equal."""
    scale = float(expected.abs().max())
    if scale < 1e-6 * largest:
        return float((actual - expected).abs().max()) / largest
    return float((actual - expected).abs().max()) / scale


class CopyTraffic(TorchDispatchMode):
    """Counts what copies of a model send: a gather or a scatter its whole tensor, an all-reduce twice.

    All-to-alls of contexts and experts are counted apart, by what a device sends, and so are rings. FSDP2 gathers and
    scatters one flat buffer per layer; tensors under 1 KiB do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total_bytes = self.exchanged_bytes = self.summed_bytes = 0
        self._beside_sums: dict[str, int] = {}
        self._times = {"_allgather_base_": 1, "_reduce_scatter_base_": 1, "allreduce_": 2}

    def bytes_in(self, group: dist.ProcessGroup) -> int:
        """What all collectives of a group but all-reduces send: of gathers and scatters the whole tensor."""
        return self._beside_sums.get(str(group.group_name), 0)

    def _note(self, name: str, args: Any) -> None:
        leaves = tree_leaves(args)
        boxed = [
            leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
        ]
        group = str(dist.ProcessGroup.unbox(boxed[0]).group_name)
        sizes = [
            sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor))
            for arg in args
        ]
        size = next(size for size in reversed(sizes) if size) if name.startswith(("alltoall", "send")) else max(sizes)
        self._beside_sums[group] = self._beside_sums.get(group, 0) + size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.name().split("::")
        if namespace == "c10d" and name.startswith(("allgather_", "_reduce_scatter", "alltoall_base_", "send")):
            self._note(name, args)
        is_exchange = namespace == "c10d" and name.startswith(("alltoall_base_", "send"))
        times = 1 if is_exchange else self._times.get(name.partition(".")[0], 0) if namespace == "c10d" else 0
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)] if times else []
        size = max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
        counted = times * size if size >= 1024 else 0
        self.summed_bytes += counted if name.startswith("allreduce_") else 0
        if is_exchange:  # of an output and an input, or of an input
            self.exchanged_bytes += tensors[-1].numel() * tensors[-1].element_size() if counted else 0
        else:
            self.total_bytes += counted
        return func(*args, **(kwargs or {}))


def live_bytes(run: Any) -> dict[str, int]:
    """Bytes of parameters and gradients that this process holds between steps."""
    parameters = [parameter for stage in run.stages for parameter in stage.parameters()]
    return {
        "parameters": stored_bytes(parameters),
        "gradients": stored_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
    }


def stored_bytes(tensors: Iterable[Any]) -> int:
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(int(part.numel() * part.element_size()) for part in parts)


def adam_bytes(run: Any) -> int:
    """Bytes of Adam's two moments of this process's parameters, after a step."""
    adam = torch.optim.Adam([parameter for stage in run.stages for parameter in stage.parameters()])
    adam.step()
    moments = [state[name] for state in adam.state.values() for name in ("exp_avg", "exp_avg_sq")]
    local_moments = [moment.to_local() if isinstance(moment, DTensor) else moment for moment in moments]
    return sum(int(moment.numel()) * 4 for moment in local_moments)


def curve(case: dict[str, Any], plan: phaze.Plan) -> dict[str, Any]:
    """Losses of some training steps, relative to those of one process."""
    if not case.get("steps"):
        return {"curve": [], "curve_error": 0.0}
    kind, size = case["kind"], plan.question.global_batch_size
    alone, model = build_model(kind), build_model(kind)
    run = plan.apply(
        model, inputs=batch_of(kind, size=size), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)
    )
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    losses, error = [], 0.0
    for step in range(case["steps"]):
        batch = batch_of(kind, seed=step, size=size)
        losses.append(float(run.step(**run.share(batch))))
        optimizer.zero_grad()
        loss = loss_of(kind, alone, batch)
        loss.backward()
        optimizer.step()
        error = max(error, abs(losses[-1] - float(loss.detach())) / abs(float(loss.detach())))
    return {"curve": losses, "curve_error": error}


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(size) for size in sys.argv[2:]])
