"""Running a fake model once before it is captured: its own errors come out plainly, and its shapes are written down.

The run also shows whether the loss has a gradient, and whether the model brings autograd functions of its own, whose
backward torch.export would not see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from phaze.errors import ImportModelError
from phaze.frontends.torch.capture import Target
from phaze.frontends.torch.surroundings import as_exported

__all__ = ["Rehearsal", "Shapes", "rehearse"]

Shapes = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
"""Every operator that ran, and the shapes that it made."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a run showed."""

    shapes: Shapes
    has_own_gradients: bool


def rehearse(target: Target) -> Rehearsal:
    """Run the forward on fake tensors; raises what it raises, or ImportModelError for a loss without gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            values = result if isinstance(result, list | tuple) else (result,)
            found.append((str(func), tuple(tuple(value.shape) for value in values if hasattr(value, "shape"))))
            return result

    with target.fake.mode, as_exported(), Recorder():
        loss = target.objective(*target.arguments)
    if not loss.requires_grad:
        raise ImportModelError(
            "the loss depends on no trainable parameter, so there is nothing to differentiate; look for torch.no_grad, "
            "detach or .item() between the parameters and the loss."
        )
    return Rehearsal(tuple(found), any(_own_functions(loss.grad_fn)))


def _own_functions(start: Any) -> Iterator[str]:
    """The names of autograd functions written in Python behind a loss, but for torch's own of checkpointing."""
    from torch.autograd.function import BackwardCFunction

    seen, waiting = set(), [start]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
        if isinstance(node, BackwardCFunction) and "CheckpointFunction" not in type(node).__name__:
            yield type(node).__name__
