"""Whether a loss treats the samples of a batch apart, or mixes them, or weighs them by their number in the batch.

Copies of a model and microbatches take the loss of some samples each, and the loss of a batch is the mean of theirs. A
loss that looks up other samples (`x[permutation]`), compares all of them (`x @ y.T`), or divides by a statistic of the
batch finds other samples in a microbatch than in the batch, and trains something else. `SampleWalk` watches a run on
fake tensors and follows the *samples* of every tensor:

    a dimension of samples has (blocks, samples, neighbours) elements: joining two batches makes two blocks, merging
    (samples, positions) makes as many neighbours as there are positions (`Samples`)

Results are as follows; whatever is not listed keeps the samples of its operands as far as its shape shows them.

    reshapes, slices, joins         keep blocks and neighbours, or mix
    element by element              samples meet themselves, in the same dimension, or they are compared
    sums and means over samples     statistics; only linear functions of those with a gradient may follow
    softmax, sorts, shifts, scans   must run along other dimensions
    lookups                         must look up other dimensions, or each sample by its own number

What mixes samples is noted where it happens and handed on with the values, so that only what reaches the loss counts.
Operators inside of repeated blocks are never noted: mixtures sort tokens by their experts, and put them back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phaze.frontends.torch.fake_model import LossCall
from phaze.frontends.torch.routed_experts import holds_experts
from phaze.frontends.torch.sample_rules import PLAIN, MixedError, OperatorWithSamples, Samples, Value, in_shape

__all__ = ["SampleWalk"]


class SampleWalk(TorchDispatchMode):
    """Follows samples through the operators that run while it is entered; then `problem_of(loss)`."""

    def __init__(self, loss_call: LossCall, batch_size: int) -> None:
        super().__init__()
        self._size = batch_size
        self._known: dict[int, tuple[torch.Tensor, Value]] = {}  # the tensors, so that none gets the id of another
        self._blocks = _blocks(loss_call.fake.module)
        self._block_calls = 0
        for _, leaf in loss_call.named_leaves:
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] % batch_size == 0:
                self._note(leaf, Value(Samples(0, 1, leaf.shape[0] // batch_size), depends=True))
        for tensor in (*loss_call.fake.module.parameters(), *loss_call.fake.module.buffers()):
            self._note(tensor, PLAIN)

    def problem_of(self, loss: torch.Tensor) -> str:
        """How the loss mixes samples; empty where nothing shows that it does."""
        return self._value(loss).problem

    def averages(self, loss: torch.Tensor) -> bool:
        """Whether the loss is made of samples that count alike, whatever is in them."""
        value = self._value(loss)
        return value.depends and not value.problem and not value.is_weighed

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While this is entered, samples are followed, and operators inside of repeated blocks are told from others."""

        def entering(*_: object) -> None:
            self._block_calls += 1

        def leaving(*_: object) -> None:
            self._block_calls -= 1

        handles = [block.register_forward_pre_hook(entering) for block in self._blocks]
        handles += [block.register_forward_hook(leaving, always_call=True) for block in self._blocks]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        operands = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        values = [self._value(tensor) for tensor in operands]
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        call = OperatorWithSamples(func, args, kwargs or {}, tuple(operands), tuple(values), self._size)
        inherited = next((value.problem for value in values if value.problem), "")
        for tensor in made:
            value = call.guess(tensor)
            try:
                value = call.value(tensor)
            except MixedError as mixed:
                is_noted = not self._block_calls
                inherited = inherited or (f"`{call.name}` {mixed}" if is_noted else "")
            except (IndexError, ValueError, TypeError, KeyError, AttributeError, StopIteration):
                pass  # a form of the operator that is not known: what its shape shows
            self._note(tensor, replace(value, problem=inherited, is_weighed=call.weighs))
        return result

    def _note(self, tensor: torch.Tensor, value: Value) -> None:
        self._known[id(tensor)] = (tensor, value)

    def _value(self, tensor: torch.Tensor) -> Value:
        known = self._known.get(id(tensor))
        if known is not None:
            return known[1]
        # A constant that was made for this number of samples tells them apart.
        is_counted = any(size and size % self._size == 0 for size in tensor.shape)
        return Value(in_shape(tensor.shape, self._size), counts="other") if is_counted else PLAIN


def _blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of lists, and those that hold experts."""
    lists = [part for part in module.modules() if isinstance(part, torch.nn.ModuleList)]
    return [child for part in lists for child in part] + [part for part in module.modules() if holds_experts(part)]
