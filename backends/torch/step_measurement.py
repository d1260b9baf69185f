"""What steps of an arranged model cost: functions that ran on whole tensors, seconds, memory, bytes between processes.

`WholeCalls` counts the functions of torch without a rule for split tensors, which gather first (`RunReport`).
`measured_step` runs training steps and compares them with the plan (`StepProfile`), which writes the table of measured
runs that `phaze calibrate` takes.

Bytes are counted as plans count them: an all-reduce twice its tensor, other collectives their tensor once, a send what
is sent.
"""

from __future__ import annotations

import csv
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phaze.backends.torch.split_tensor import watch_whole_calls
from phaze.errors import PlanError

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["RunReport", "StepProfile", "WholeCalls", "axes_of_groups", "measured_step"]

_BYTES_PER_GIB = 2**30


# -------------------------------------------------------------------------------------- functions on whole tensors


@dataclass(frozen=True, slots=True)
class WholeFunction:
    """A function of torch that ran on gathered tensors: over which axis, how often, and the bytes that it gathered."""

    name: str
    axis: str
    calls: int
    gathered_bytes: int


@dataclass(frozen=True, slots=True)
class RunReport:
    """What ran whole on this process since the plan was applied, the most bytes first, and in how many batches."""

    batches: int
    functions: tuple[WholeFunction, ...]

    def __str__(self) -> str:
        if not self.functions:
            return f"{self.batches} batches: every function ran on parts, or nothing is split"
        lines = [f"{self.batches} batches; on gathered tensors ran, by bytes gathered on this process:"]
        width = max(len(function.name) for function in self.functions)
        for function in self.functions:
            gathered = f"{function.gathered_bytes / 2**20:.3g} MiB"
            lines.append(f"  {function.name:{width}s}  {function.axis}  {function.calls:6d} calls  {gathered}")
        return "\n".join(lines)


@dataclass(slots=True)
class WholeCalls:
    """Counts the functions that ran on gathered tensors, by name and axis."""

    batches: int = 0
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    gathered_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """While this is entered, functions on gathered tensors are counted; it is entered once a batch."""
        self.batches += 1
        with watch_whole_calls(self._note):
            yield

    def _note(self, name: str, tensors: Sequence[torch.Tensor], *, is_context: bool) -> None:
        key = name, "cp" if is_context else "tp"
        self.calls[key] += 1
        self.gathered_bytes[key] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def report(self) -> RunReport:
        """What was counted so far."""
        functions = (
            WholeFunction(name, axis, self.calls[name, axis], self.gathered_bytes[name, axis])
            for name, axis in self.calls
        )
        return RunReport(self.batches, tuple(sorted(functions, key=lambda each: (-each.gathered_bytes, each.name))))


# ---------------------------------------------------------------------------------------- bytes between processes


_TIMES = {
    "allreduce_": 2,
    "all_reduce": 2,
    "_allgather_base_": 1,
    "allgather_": 1,
    "all_gather_into_tensor": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_": 1,
    "reduce_scatter_tensor": 1,
    "alltoall_base_": 1,
    "all_to_all_single": 1,
    "broadcast_": 1,
    "send": 1,
}
"""How often the largest tensor of a collective counts, by the name of torch's operator; receiving counts nothing."""

_HELD_PARTS = ("alltoall_base_", "all_to_all_single", "send")
"""Operators of which a device's own tensor counts, not the largest."""

_IN_LISTS = ("allgather_", "reduce_scatter_")
"""Operators that take the parts of the large tensor as a list: the parts together count."""


class _CountsTraffic(TorchDispatchMode):
    """Counts what this process sends, by the name of the process group."""

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        namespace, _, name = func.name().partition("::")  # type: ignore[attr-defined]
        times = _TIMES.get(name.partition(".")[0], 0) if namespace in ("c10d", "_c10d_functional") else 0
        if times:
            leaves = tree_leaves((args, kwargs or {}))
            self.sent_bytes[_group_name(leaves)] += times * _size_of(name.partition(".")[0], args, leaves)
        return func(*args, **(kwargs or {}))


def _size_of(name: str, args: Sequence[object], leaves: Sequence[object]) -> int:
    """The bytes that one collective counts."""
    sizes = _sizes(leaves)
    if name in _HELD_PARTS:
        return sizes[-1]
    return max(sum(_sizes(tree_leaves(arg))) for arg in args) if name in _IN_LISTS else max(sizes, default=0)


def _sizes(leaves: Iterable[object]) -> list[int]:
    return [leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _group_name(leaves: Sequence[object]) -> str:
    """The name of the process group among the arguments of a collective."""
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject):
            try:
                return str(dist.ProcessGroup.unbox(leaf).group_name)
            except (RuntimeError, TypeError):
                continue  # another object, such as the operation of a reduction
    names = [leaf for leaf in leaves if isinstance(leaf, str)]
    return names[-1] if names else ""


def axes_of_groups(
    meshes: Sequence[DeviceMesh], contexts: Mapping[dist.ProcessGroup, str]
) -> dict[dist.ProcessGroup, str]:
    """The mesh axis of each process group of this process; torch may use one group for axes of the same ranks."""
    groups = dict(contexts)
    for mesh in meshes:
        for name in mesh.mesh_dim_names or ():
            if mesh[name].size() > 1:
                group = mesh[name].get_group()
                groups[group] = f"{groups[group]} and {name}" if group in groups else name
    return groups


# ------------------------------------------------------------------------------------------------ a measured step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """A measured step beside the planned one.

    Attributes:
        seconds: the median of the measured steps, of the slowest process.
        planned_seconds: what the plan says.
        memory_bytes: the most that this process's device held, where the device says so; None elsewhere.
        planned_memory_bytes: what the plan says of the fullest stage of this process.
        sent_bytes: what this process sent in one step, by mesh axis; the plan's time has its own, which it does not
            keep.
        steps: how many steps were measured.
    """

    seconds: float
    planned_seconds: float
    memory_bytes: int | None
    planned_memory_bytes: float
    sent_bytes: Mapping[str, float]
    steps: int
    plan: Plan = field(repr=False)

    def __str__(self) -> str:
        ratio = self.seconds / self.planned_seconds
        lines = [
            f"step    {self.seconds:.4g} s measured (median of {self.steps}, slowest process), "
            f"{self.planned_seconds:.4g} s planned: {ratio:.3g} times"
        ]
        planned = f"{self.planned_memory_bytes / _BYTES_PER_GIB:.3g} GiB planned"
        if self.memory_bytes is None:
            lines.append(f"memory  not told by this device, {planned}")
        else:
            lines.append(f"memory  {self.memory_bytes / _BYTES_PER_GIB:.3g} GiB measured on this process, {planned}")
        sent = ", ".join(f"{axis} {size / 2**20:.4g} MiB" for axis, size in self.sent_bytes.items() if size)
        lines.append(f"sent    {sent or 'nothing'} by this process")
        return "\n".join(lines)

    def write_measured(self, path: str | os.PathLike[str], *, model: str, cluster: str) -> None:
        """Add a line to a table of measured steps, as `phaze calibrate --measured` takes it; begin the table if needed.

        `model` is a name, a config or a saved graph, and `cluster` the text of the real one, as `phaze optimize` takes
        them: a table keeps no live module. Raises PlanError for strategies that the table has no columns for.
        """
        strategy = self.plan.strategy
        has_groups = strategy.zero > 0 and strategy.shard_devices != strategy.replicas
        if strategy.cp > 1 or strategy.ep > 1 or has_groups:
            raise PlanError("tables of measured steps have no columns for cp, ep and shard yet; measure another plan.")
        row = {
            "model": model,
            "cluster": cluster,
            "global_batch": self.plan.question.global_batch_size,
            "seconds": self.seconds,
            "precision": self.plan.question.precision.name,
            "sequence_length": self.plan.model.tokens_per_sample,
            "memory_gib": "" if self.memory_bytes is None else self.memory_bytes / _BYTES_PER_GIB,
            **{name: getattr(strategy, name) for name in ("dp", "tp", "pp", "micro_batch_size", "chunks", "zero")},
            "schedule": strategy.schedule if strategy.pp > 1 else "",
            "recompute": self.plan.stages[0].recompute,
            "sequence_parallel": "true" if strategy.sequence_parallel else "false",
        }
        target = Path(path)
        is_new = not target.exists() or not target.stat().st_size
        with target.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            if is_new:
                writer.writeheader()
            writer.writerow(row)


def measured_step(
    step: Callable[[], object],
    plan: Plan,
    groups: Mapping[dist.ProcessGroup, str],
    stages: Sequence[int],
    *,
    steps: int,
) -> StepProfile:
    """Run a step to warm up and `steps` more; all processes call this.

    `groups` are the axes of this process's groups, and `stages` its stages.
    """
    if steps < 1:
        raise PlanError(f"steps is {steps}; expected at least 1.")
    is_cuda = dist.get_backend() == "nccl"
    step()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, counter = [], _CountsTraffic()
    for index in range(steps):
        dist.barrier()
        start = time.perf_counter()
        if index:
            step()
        else:  # counting costs time, so that this step's is left out where there are others
            with counter:
                step()
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(seconds[1:] or seconds), device="cuda" if is_cuda else "cpu")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    axes = {str(group.group_name): axis for group, axis in groups.items()}
    sent: Counter[str] = Counter()
    for group, size in counter.sent_bytes.items():
        sent[axes.get(group, "other")] += size
    return StepProfile(
        seconds=float(slowest),
        planned_seconds=plan.step_time_s,
        memory_bytes=int(torch.cuda.max_memory_allocated()) if is_cuda else None,
        planned_memory_bytes=max(plan.stages[index].memory_bytes["total"] for index in stages),
        sent_bytes=dict(sent),
        steps=steps,
        plan=plan,
    )
