"""The whole import of a torch model: copy it onto fake tensors, capture, translate, find the batch, check.

The batch is captured as a prime that divides no dimension of the model, so that every dimension it divides is made of
the batch. Whether that holds is checked by running the forward at another prime: each dimension must have grown as
predicted (`_follow_batch`). Where the model cannot be captured so, or the check fails, the graph is captured at the
caller's own size and stays fixed to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch

from phaze.errors import GraphError, ImportModelError, PhazeError
from phaze.frontends.paused_collection import paused_collection
from phaze.frontends.torch.block_copies import Irregular
from phaze.frontends.torch.capture import (
    Capture,
    CaptureError,
    capture_loss,
    explain_failed_capture,
    explain_failed_forward,
    is_data_dependent,
    preserved_torch_state,
)
from phaze.frontends.torch.example_inputs import ExampleInputs, ModelWithInputs, read_model
from phaze.frontends.torch.fake_model import (
    FakeModel,
    LossCall,
    Objective,
    as_exported,
    make_fake_model,
)
from phaze.frontends.torch.grouped_keys import with_grouped_keys
from phaze.frontends.torch.repeated_blocks import capture_repeated, find_containers
from phaze.frontends.torch.routed_experts import mark_routed_experts
from phaze.frontends.torch.sample_walk import SampleWalk
from phaze.frontends.torch.translate import translate_capture
from phaze.frontends.torch.trial_run import OperatorShapes, TrialRun, run_trial
from phaze.ir import Graph
from phaze.ir.backward import split_tied_gradients
from phaze.ir.factor_following import refine_factors

__all__ = ["import_module", "loss_over_samples"]

_PRIMES = (31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139)
"""Batch sizes to capture at. Smaller primes divide the dimensions of many models. The list is long enough that two fit
nearly every model; where fewer do, the last two are taken, and the check by a second run decides."""

_FORWARD_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a forward may raise at a batch size that it was not written for."""

_LIST_OF_SAMPLES = "aten.unbind.int"
"""The operator that makes a list of a tensor's samples, which models of images and words join again."""

_NAMES_SHOWN = 5
"""How many names a note lists: enough to see the pattern, and still one line."""


def import_module(
    model: torch.nn.Module | torch.export.ExportedProgram,
    inputs: object,
    options: Mapping[str, object],
    *,
    copies_blocks: bool = True,
) -> Graph:
    """The training graph of an nn.Module, a GraphModule or an ExportedProgram; raises ImportModelError.

    Without `copies_blocks` every block is captured by itself; the graph is the same.
    """
    with preserved_torch_state(), paused_collection():
        source = read_model(model, inputs, options)
        fake = make_fake_model(source.module, _read_dtype(options.get("dtype")))
        loss_fn = cast(Callable[..., object] | None, options.get("loss_fn"))
        task = _Import(source, fake, loss_fn, find_containers(fake.module) if copies_blocks else {})
        graph = _import_with_free_batch(task) or _import_with_fixed_batch(task)
        mixing, averages = loss_over_samples(task)
        graph = replace(graph, mixes_samples=mixing, averages_samples=averages)
    size = options.get("micro_batch_size")
    if size is not None:
        graph = graph.with_micro_batch(cast(int, size))
    return replace(graph, notes=(*graph.notes, *_notes(task, graph)))


def _read_dtype(option: object) -> torch.dtype | None:
    """A floating point dtype of torch, given by itself or by its name."""
    dtype = getattr(torch, option, None) if isinstance(option, str) else option
    if option is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise ImportModelError(f"dtype is {option!r}; expected a floating point dtype of torch, such as 'bfloat16'.")


@dataclass(frozen=True, slots=True)
class _Import:
    """What is imported: the model with its inputs, its copy on fake tensors, the caller's loss, its lists of blocks."""

    source: ModelWithInputs
    fake: FakeModel
    loss_fn: Callable[..., object] | None
    containers: Mapping[str, torch.nn.Module]

    def loss_call(self, examples: ExampleInputs) -> LossCall:
        """The call to capture, at these inputs."""
        objective = Objective(self.fake.module, self.loss_fn, is_flat=self.source.is_flat)
        return LossCall(fake=self.fake, objective=objective, inputs=self.fake.fake_inputs(examples))

    def capture(self, loss_call: LossCall, trial: TrialRun) -> Capture:
        """Capture few of the blocks that are equal and copy them, else everything."""
        try:
            return capture_repeated(loss_call, trial, self.containers)
        except Irregular:
            return capture_loss(loss_call, directly=trial.has_own_gradients)

    def graph(self, captured: Capture, batch_size: int) -> Graph:
        """The graph of a capture, with its backward."""
        graph = translate_capture(captured, self.fake.module, name=self.source.name, batch_size=batch_size)
        return split_tied_gradients(with_grouped_keys(graph).with_backward())


def _import_with_free_batch(task: _Import) -> Graph | None:
    """The graph with its batch factors marked, at the caller's size; None where it cannot be captured so."""
    examples = task.source.examples
    size = examples.batch_size
    if size is None:
        return None
    first, second = _batch_primes(task.fake, examples)
    loss_call = task.loss_call(examples.with_batch(first))
    try:
        trial = run_trial(loss_call, tuple(task.containers.values()))
        second_trial = run_trial(task.loss_call(examples.with_batch(second)))
        if not _follow_batch(trial.shapes, second_trial.shapes, first, second):
            return None
        graph = task.graph(task.capture(loss_call, trial), first)
        if any(first in (len(op.inputs), len(op.outputs)) for op in graph.ops):  # a list with a tensor for each sample
            return None
        refined = refine_factors(graph, first)
        return mark_routed_experts(refined, task.fake.module).with_micro_batch(size)
    except (GraphError, ImportModelError, *_FORWARD_ERRORS):  # raised again, and explained, at the caller's own size
        return None


def loss_over_samples(task: _Import) -> tuple[str, bool]:
    """How the loss mixes samples, and whether all of them count alike.

    It mixes them where it does so at two sizes of the batch: one may be another dimension's by chance. A model that
    does not run at a prime is run at twice as many.
    """
    mixing, averages = "", False
    for prime in _batch_primes(task.fake, task.source.examples) if task.source.examples.batch_size else ():
        for size in (prime, 2 * prime):
            with contextlib.suppress(PhazeError, *_FORWARD_ERRORS):
                mixing, averages = _loss_at(task, size)
                break
        else:
            return "", False
        if not mixing:
            return "", averages
    return mixing, False


def _loss_at(task: _Import, size: int) -> tuple[str, bool]:
    loss_call = task.loss_call(task.source.examples.with_batch(size))
    walk = SampleWalk(loss_call, size)
    with loss_call.fake.mode, as_exported(), walk.watching():
        loss = loss_call.objective(*loss_call.arguments)
    return walk.problem_of(loss), walk.averages(loss)


def _import_with_fixed_batch(task: _Import) -> Graph:
    """The graph at the caller's batch size, to which it is bound; raises ImportModelError with the reason."""
    examples, name = task.source.examples, task.source.name
    loss_call = task.loss_call(examples)
    forward_error, directly = None, False
    try:
        directly = run_trial(loss_call).has_own_gradients
    except PhazeError:
        raise
    except Exception as error:
        # A forward that asks for values may still be captured: some ways of torch trace around the question.
        forward_error = error
        if not is_data_dependent(error):
            raise explain_failed_forward(name, loss_call, error) from error
    try:
        captured = capture_loss(loss_call, directly=directly)
    except CaptureError as failure:
        if forward_error is not None:
            raise explain_failed_forward(name, loss_call, forward_error) from forward_error
        raise explain_failed_capture(name, failure) from next(iter(failure.errors.values()))
    try:
        graph = refine_factors(task.graph(captured, examples.batch_size or 1))
    except PhazeError:
        raise
    except Exception as error:
        # What was traced around a question about values may have sizes that are not known.
        if forward_error is None or not is_data_dependent(error):
            raise
        raise explain_failed_forward(name, loss_call, forward_error) from forward_error
    note = f"fixed to the microbatch of {graph.micro_batch_size} that it was captured with: shapes do not follow it"
    return replace(graph, notes=(*graph.notes, note))


def _notes(task: _Import, graph: Graph) -> Iterator[str]:
    """What a reader should know of how the model was captured."""
    if task.source.examples.note:
        yield task.source.examples.note
    if not task.source.module.training and not task.source.is_flat:
        yield "captured in evaluation mode, as the model was: without dropout"
    frozen = sum(parameter.numel() for parameter in task.fake.module.parameters() if not parameter.requires_grad)
    if frozen:
        share = frozen / sum(parameter.numel() for parameter in task.fake.module.parameters())
        yield f"{share:.1%} of the parameters are frozen: they have no gradients and no optimizer states"
    with_gradient = {parameter for parameter, _ in graph.gradients}
    if graph.mixes_samples:
        yield f"the loss does not treat samples apart ({graph.mixes_samples}): parts of a batch have other losses"
    without_gradient = [name for name in task.fake.trainable if name not in with_gradient]
    if without_gradient:
        read = {tensor_id for op in graph.ops for tensor_id in op.inputs}
        unused = [name for name in without_gradient if name not in read]
        detached = [name for name in without_gradient if name in read]
        for reason, names in (("unused by the loss", unused), ("read, but detached from the loss", detached)):
            if names:
                shown = ", ".join(names[:_NAMES_SHOWN])
                yield f"{len(names)} trainable parameters have no gradient ({reason}): {shown}"


def _batch_primes(fake: FakeModel, examples: ExampleInputs) -> tuple[int, int]:
    """Two primes that divide no dimension of a parameter, a buffer or an input except the batch itself."""
    sizes: set[int] = set()
    for tensor in (*fake.module.parameters(), *fake.module.buffers()):
        sizes.update(tensor.shape)
    for spec in examples.specs():
        sizes.update(spec.shape[1:] if spec.shape[:1] == (examples.batch_size,) else spec.shape)
    fitting = [prime for prime in _PRIMES if all(size % prime for size in sizes)]
    return (fitting[0], fitting[1]) if len(fitting) > 1 else (_PRIMES[-2], _PRIMES[-1])


def _follow_batch(small_run: OperatorShapes, large_run: OperatorShapes, small: int, large: int) -> bool:
    """Whether two runs differ by their batch alone: each dimension that `small` divides has grown, the others not.

    Lists of samples count as equal: what is made of their tensors shows whether they are more than views.
    """
    if len(small_run) != len(large_run):
        return False
    for (small_operator, small_shapes), (large_operator, large_shapes) in zip(small_run, large_run, strict=True):
        if small_operator == large_operator == _LIST_OF_SAMPLES and (len(small_shapes), len(large_shapes)) == (
            small,
            large,
        ):
            continue
        predicted = tuple(
            tuple(size // small * large if size % small == 0 else size for size in shape) for shape in small_shapes
        )
        if small_operator != large_operator or predicted != large_shapes:
            return False
    return True
