"""Running a model once on fake tensors before it is captured, and writing down what it runs.

The run shows the model's own errors plainly, whether the loss has a gradient, and whether the model brings autograd
functions of its own, whose backward torch.export would not see. Its record has an entry for every argument and every
operator: the operator's name and numbers, which results it reads, the shapes that it makes, and in which blocks of the
model it ran. Where blocks are told apart, the backward runs too; its operators belong to the block in which
autograd made their node, known by the numbers that autograd counts its nodes with.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from phaze.errors import ImportModelError
from phaze.frontends.torch.block_copies import FORWARD, Entry
from phaze.frontends.torch.fake_model import LossCall, as_exported

__all__ = ["OperatorShapes", "TrialRun", "run_trial"]

OperatorShapes = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
"""Every operator that ran, in order, with the shapes of its results."""

PARAMETER, BUFFER, INPUT, BACKWARD, GRADIENT = "parameter", "buffer", "input", "backward", "gradient"
"""The sections of a record besides the forward: its arguments, the backward's operators, and what was asked for."""


@dataclass(frozen=True, slots=True)
class TrialRun:
    """What one run of a model on fake tensors showed; `record` ends with the forward where no blocks were told apart.

    `is_whole` says that the backward ran, and is in the record.
    """

    record: tuple[Entry, ...]
    shapes: OperatorShapes
    has_own_gradients: bool
    is_whole: bool


def run_trial(loss_call: LossCall, containers: Sequence[torch.nn.Module] = ()) -> TrialRun:
    """Run the forward on fake tensors; raises what it raises, or ImportModelError for a loss without gradient.

    With `containers` of blocks the backward runs too, and operators have the paths of the blocks that they ran in. An
    error in the backward is left to the capture.
    """
    recorder = _Recorder(loss_call)
    with loss_call.fake.mode, as_exported(), recorder.noting_blocks(loss_call.fake.module, containers), recorder:
        loss = loss_call.objective(*loss_call.arguments)
    if not loss.requires_grad:
        raise ImportModelError(
            "the loss depends on no trainable parameter, so there is nothing to differentiate; look for torch.no_grad, "
            "detach or .item() between the parameters and the loss."
        )
    shapes = tuple(recorder.shapes)
    has_own_gradients = any(_own_autograd_functions(loss.grad_fn))
    is_whole = False
    if containers:
        with contextlib.suppress(Exception), loss_call.fake.mode, as_exported():
            recorder.run_backward(loss)
            is_whole = True
    return TrialRun(tuple(recorder.entries), shapes, has_own_gradients, is_whole)


class _Recorder(TorchDispatchMode):
    """Writes down every operator that runs, and the shapes of its results."""

    def __init__(self, loss_call: LossCall) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.shapes: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
        self.parameters = dict(loss_call.fake.module.named_parameters())
        self.section = FORWARD
        self._made_by: dict[int, tuple[int, int]] = {}
        self._alive: list[torch.Tensor] = []  # so that no tensor gets the id of an earlier one
        self._running: list[str] = []
        self._boundaries: list[int] = [0]
        self._blocks: list[tuple[str, ...]] = [()]
        for section, values in (
            (PARAMETER, self.parameters.items()),
            (BUFFER, loss_call.fake.module.named_buffers()),
            (INPUT, loss_call.named_leaves),
        ):
            for name, value in values:
                if isinstance(value, torch.Tensor):
                    key = (section, value.shape, value.dtype, value.requires_grad)
                    self._add(Entry(key, (), (name,), section), (value,))

    def _add(self, entry: Entry, results: Iterable[object]) -> None:
        for number, value in enumerate(results):
            if isinstance(value, torch.Tensor):
                self._made_by[id(value)] = (len(self.entries), number)
                self._alive.append(value)
        self.entries.append(entry)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.ops.prim.device.default:  # a question about a tensor, which torch asks as often as it likes
            return func(*args, **(kwargs or {}))
        reads: list[int] = []
        given = (self._plain(args, reads), self._plain(kwargs or {}, reads))
        result = func(*args, **(kwargs or {}))
        values = result if isinstance(result, list | tuple) else (result,)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        shapes = tuple(tuple(value.shape) for value in tensors)
        self.shapes.append((str(func), shapes))
        key = (str(func), given, shapes, tuple(value.dtype for value in tensors))
        self._add(Entry(key, tuple(reads), self._current_blocks(), self.section), values)
        return result

    def _plain(self, value: object, reads: list[int]) -> object:
        """An argument without its tensors, which go to `reads`: in their place stands the number of the result."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._made_by:
                key = ("constant", value.shape, value.dtype)
                self._add(Entry(key, (), self._current_blocks(), self.section), (value,))
            index, number = self._made_by[id(value)]
            reads.append(index)
            return ("result", number)
        if isinstance(value, list | tuple):
            return tuple(self._plain(item, reads) for item in value)
        if isinstance(value, Mapping):
            return tuple((name, self._plain(item, reads)) for name, item in value.items())
        return value if value is None or isinstance(value, bool | int | float | str | torch.dtype) else repr(value)

    @contextlib.contextmanager
    def noting_blocks(self, module: torch.nn.Module, containers: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Note which children of these containers in the module run, by hooks on them."""
        wanted = {id(container) for container in containers}
        handles = []

        def entering(path: str) -> None:
            self._running.append(path)
            self._note_boundary()

        def leaving() -> None:
            self._running.pop()
            self._note_boundary()

        for path, part in module.named_modules():
            if id(part) not in wanted:
                continue
            for name, child in part.named_children():
                inner = f"{path}.{name}".lstrip(".")
                handles.append(child.register_forward_pre_hook(lambda *_, inner=inner: entering(inner)))
                handles.append(child.register_forward_hook(lambda *_: leaving(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_boundary(self) -> None:
        """Note that nodes which autograd makes from here on belong to the blocks that run now."""
        self._boundaries.append(torch.autograd._get_sequence_nr())
        self._blocks.append(tuple(self._running))

    def _current_blocks(self) -> tuple[str, ...]:
        if self.section == FORWARD:
            return tuple(self._running)
        node = torch._C._current_autograd_node()
        if node is None:
            return ()
        return self._blocks[bisect.bisect_right(self._boundaries, node._sequence_nr()) - 1]

    def run_backward(self, loss: torch.Tensor) -> None:
        """Run the backward for all parameters that train, and add an entry for each gradient."""
        self.section = BACKWARD
        trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        with self:
            gradients = torch.autograd.grad(loss, tuple(trained.values()), allow_unused=True)
        for name, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                index, number = self._made_by[id(gradient)]
                self.entries.append(Entry(("gradient", number), (index,), (name,), GRADIENT))


def _own_autograd_functions(grad_fn: torch.autograd.graph.Node) -> Iterator[str]:
    """The names of autograd functions written in Python behind a loss, except those of torch's own checkpointing."""
    seen, waiting = set(), [grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(next_node for next_node, _ in node.next_functions)
        if isinstance(node, BackwardCFunction) and "CheckpointFunction" not in type(node).__name__:
            yield type(node).__name__
