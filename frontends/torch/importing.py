"""The whole way of a model: clone, capture, translate, refine, batch, check.

The batch is captured as a prime that divides no dimension of the model, so that every dimension it divides is made of
the batch. Whether that holds is checked by running the forward at another prime: each dimension must have grown as
predicted. Where the model cannot be captured so, or the check fails, the graph is captured at the caller's own size and
stays fixed to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from phaze.errors import GraphError, ImportModelError, PhazeError
from phaze.frontends.torch.capture import Capture, CaptureError, Target, capture
from phaze.frontends.torch.clone import FakeModel, fake_model
from phaze.frontends.torch.diagnose import explain_capture, explain_forward, is_data_dependent
from phaze.frontends.torch.examples import Examples
from phaze.frontends.torch.objective import make_objective
from phaze.frontends.torch.rehearsal import Shapes, rehearse
from phaze.frontends.torch.sources import Source, read_source
from phaze.frontends.torch.surroundings import untouched
from phaze.frontends.torch.translate import translate
from phaze.ir import Graph
from phaze.ir.refine import refine
from phaze.ir.ties import split_tied_gradients

__all__ = ["import_module"]

_PRIMES = (31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139)


_FORWARD_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a forward may raise at a batch that it was not written for."""


def import_module(model: Any, inputs: object, options: Mapping[str, object]) -> Graph:
    """The training graph of an nn.Module, a GraphModule or an ExportedProgram."""
    with untouched():
        source = read_source(model, inputs, options)
        task = _Task(source, fake_model(source.module, _dtype(options.get("dtype"))), options)
        graph = _flexible(task) or _fixed(task)
    size = options.get("micro_batch_size")
    if size is not None:
        graph = graph.with_micro_batch(size)  # type: ignore[arg-type]
    return replace(graph, notes=(*graph.notes, *_notes(task, graph)))


def _dtype(given: object) -> Any:
    """A floating point dtype of torch, by itself or by its name."""
    import torch

    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if given is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise ImportModelError(f"dtype is {given!r}; expected a floating point dtype of torch, such as 'bfloat16'.")


@dataclass(frozen=True, slots=True)
class _Task:
    """What is imported, on fake tensors, and the options for it."""

    source: Source
    fake: FakeModel
    options: Mapping[str, object]

    def target(self, examples: Examples) -> Target:
        """What is captured, at these inputs."""
        is_flat = self.source.is_flat
        objective = make_objective(self.fake.module, self.options.get("loss_fn"), is_flat=is_flat)  # type: ignore[arg-type]
        return Target(fake=self.fake, objective=objective, inputs=self.fake.tensors(examples), is_flat=is_flat)

    def graph(self, captured: Capture, batch_size: int) -> Graph:
        """The graph of a capture, with its backward."""
        graph = translate(captured, self.fake.module, name=self.source.name, batch_size=batch_size)
        return split_tied_gradients(graph.with_backward())


def _flexible(task: _Task) -> Graph | None:
    """The graph with its batch factors marked, at the caller's size; None where it cannot be captured so."""
    examples = task.source.examples
    size = examples.batch_size
    if size is None:
        return None
    first, second = _fitting_primes(task.fake, examples)
    target = task.target(examples.with_batch(first))
    try:
        rehearsal = rehearse(target)
        if not _grows(rehearsal.shapes, rehearse(task.target(examples.with_batch(second))).shapes, first, second):
            return None
        captured = capture(target, directly=rehearsal.has_own_gradients)
        graph = refine(task.graph(captured, first), first)
        return graph.with_micro_batch(size)
    except (GraphError, ImportModelError, *_FORWARD_ERRORS):  # said again, at the caller's own size
        return None


def _fixed(task: _Task) -> Graph:
    examples, name = task.source.examples, task.source.name
    target = task.target(examples)
    problem, directly = None, False
    try:
        directly = rehearse(target).has_own_gradients
    except PhazeError:
        raise
    except Exception as error:
        problem = error
        if not is_data_dependent(error):
            raise explain_forward(name, target, error) from error
    try:
        captured = capture(target, directly=directly)
    except CaptureError as failure:
        if problem is not None:
            raise explain_forward(name, target, problem) from problem
        raise explain_capture(name, failure) from next(iter(failure.errors.values()))
    graph = refine(task.graph(captured, examples.batch_size or 1))
    note = f"fixed to the microbatch of {graph.micro_batch_size} that it was captured with: shapes do not follow it"
    return replace(graph, notes=(*graph.notes, note))


def _notes(task: _Task, graph: Graph) -> Iterator[str]:
    """What a reader should know of how the model was captured."""
    if task.source.examples.note:
        yield task.source.examples.note
    if not task.source.module.training and not task.source.is_flat:
        yield "captured in evaluation mode, as the model was: without dropout"
    with_gradient = {parameter for parameter, _ in graph.gradients}
    missing = [name for name in task.fake.trainable if name not in with_gradient]
    if missing:
        read = {tensor_id for op in graph.ops for tensor_id in op.inputs}
        unused = [name for name in missing if name not in read]
        detached = [name for name in missing if name in read]
        for what, names in (("unused by the loss", unused), ("read, but detached from the loss", detached)):
            if names:
                yield f"{len(names)} trainable parameters have no gradient ({what}): {', '.join(names[:5])}"


def _fitting_primes(fake: FakeModel, examples: Examples) -> tuple[int, int]:
    """Two primes that divide no dimension of a parameter, a buffer or an input but the batch itself."""
    sizes: set[int] = set()
    for tensor in (*fake.module.parameters(), *fake.module.buffers()):
        sizes.update(tensor.shape)
    for _, spec in examples.specs():
        sizes.update(spec.shape[1:] if spec.shape[:1] == (examples.batch_size,) else spec.shape)
    fitting = [prime for prime in _PRIMES if all(size % prime for size in sizes)]
    return (fitting[0], fitting[1]) if len(fitting) > 1 else (_PRIMES[-2], _PRIMES[-1])


def _grows(first: Shapes, second: Shapes, small: int, large: int) -> bool:
    """Whether two runs are the same but for the batch: each dimension that `small` divides has grown, others not."""
    if len(first) != len(second):
        return False
    for (target, shapes), (other_target, other_shapes) in zip(first, second, strict=True):
        expected = tuple(tuple(n // small * large if n % small == 0 else n for n in shape) for shape in shapes)
        if target != other_target or expected != other_shapes:
            return False
    return True
