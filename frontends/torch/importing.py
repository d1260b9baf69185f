"""The whole way of a module: clone, capture, translate, refine, batch, check.

The batch is captured as a prime that divides no dimension of the model, so that every dimension it divides is made of
the batch. Whether that holds is checked by a second forward trace at another prime: each dimension must have grown as
predicted. Where the model cannot be captured so, or the check fails, the graph is captured at the caller's own size and
stays fixed to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from phaze.errors import GraphError, ImportModelError
from phaze.frontends.torch.capture import Capture, CaptureError, Target, capture, forward_shapes, untouched
from phaze.frontends.torch.clone import FakeModel, fake_model
from phaze.frontends.torch.examples import Examples, read_examples
from phaze.frontends.torch.objective import make_objective
from phaze.frontends.torch.translate import translate
from phaze.ir import Graph
from phaze.ir.refine import refine
from phaze.ir.ties import split_tied_gradients

__all__ = ["import_module"]

_PRIMES = (31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139)


def import_module(model: Any, inputs: object, options: Mapping[str, object]) -> Graph:
    """The training graph of an nn.Module."""
    examples = read_examples(model, inputs, options)
    with untouched():
        fake = fake_model(model, options.get("dtype"))
        graph = _flexible(model, fake, examples, options) or _fixed(model, fake, examples, options)
    notes = [note for note in (examples.note,) if note]
    return replace(graph, notes=(*graph.notes, *notes))


def _target(fake: FakeModel, examples: Examples, options: Mapping[str, object]) -> Target:
    objective = make_objective(fake.module, options.get("loss_fn"))  # type: ignore[arg-type]
    return Target(fake=fake, objective=objective, inputs=fake.tensors(examples))


def _flexible(model: Any, fake: FakeModel, examples: Examples, options: Mapping[str, object]) -> Graph | None:
    size = examples.batch_size
    if size is None:
        return None
    first, second = _fitting_primes(fake, examples)
    target = _target(fake, examples.with_batch(first), options)
    try:
        captured = capture(target)
        shapes = forward_shapes(_target(fake, examples.with_batch(second), options), captured.recipe)
    except CaptureError:
        return None
    except ImportModelError:
        raise
    except Exception:
        return None
    if not _grows(captured.shapes, shapes, first, second):
        return None
    graph = refine(_graph(model, fake, captured, first), first)
    try:
        return graph.with_micro_batch(size)
    except GraphError:
        return None


def _fixed(model: Any, fake: FakeModel, examples: Examples, options: Mapping[str, object]) -> Graph:
    captured = capture(_target(fake, examples, options))
    graph = refine(_graph(model, fake, captured, examples.batch_size or 1))
    note = f"fixed to the microbatch of {graph.micro_batch_size} that it was captured with"
    return replace(graph, notes=(*graph.notes, note))


def _graph(model: Any, fake: FakeModel, captured: Capture, batch_size: int) -> Graph:
    parameters = dict(fake.module.named_parameters())
    graph = translate(captured, parameters, name=type(model).__name__, batch_size=batch_size)
    return split_tied_gradients(graph.with_backward())


def _fitting_primes(fake: FakeModel, examples: Examples) -> tuple[int, int]:
    """Two primes that divide no dimension of a parameter, a buffer or an input but the batch itself."""
    sizes: set[int] = set()
    for tensor in (*fake.module.parameters(), *fake.module.buffers()):
        sizes.update(tensor.shape)
    for _, spec in examples.specs():
        sizes.update(spec.shape[1:] if spec.shape[:1] == (examples.batch_size,) else spec.shape)
    fitting = [prime for prime in _PRIMES if all(size % prime for size in sizes)]
    return (fitting[0], fitting[1]) if len(fitting) > 1 else (_PRIMES[-2], _PRIMES[-1])


def _grows(first: Iterable[Any], second: Iterable[Any], small: int, large: int) -> bool:
    """Whether two traces are the same but for the batch: each dimension that `small` divides has grown, others not."""
    one, two = list(first), list(second)
    if len(one) != len(two):
        return False
    for (target, shapes), (other_target, other_shapes) in zip(one, two, strict=True):
        expected = tuple(tuple(n // small * large if n % small == 0 else n for n in shape) for shape in shapes)
        if target != other_target or expected != other_shapes:
            return False
    return True
