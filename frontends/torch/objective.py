"""A model together with its loss, as one module that returns a scalar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from phaze.errors import ImportModelError
from phaze.loss_in_output import loss_candidates

__all__ = ["make_objective"]


def make_objective(model: Any, loss_fn: Callable[..., Any] | None, *, is_flat: bool = False) -> Any:
    """A module whose `forward(args, kwargs, targets)` is the scalar loss; the model is its child `phaze_model`.

    A flat graph is run node by node, which hands the module paths that its nodes remember on to the trace.
    """
    import torch

    class Objective(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phaze_model = model
            self.loss_fn = loss_fn
            self.training = model.training

        def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any) -> Any:
            call = torch.fx.Interpreter(self.phaze_model).run if is_flat else self.phaze_model
            output = call(*args, **kwargs)
            if self.loss_fn is None:
                return _find_loss(output)
            try:
                loss = self.loss_fn(output) if targets is None else self.loss_fn(output, targets)
            except TypeError as error:
                taken = "the output" if targets is None else "the output and targets"
                raise ImportModelError(f"loss_fn failed on {taken} ({_describe(output)}): {error}.") from error
            if not _is_scalar(loss):
                raise ImportModelError(f"loss_fn returned {_describe(loss)}; expected a scalar floating point tensor.")
            return loss

    return Objective()


def _find_loss(output: Any) -> Any:
    """The scalar that a model returns: itself, under `loss`, or first in a tuple; raises where there is none."""
    for candidate in loss_candidates(output):
        if _is_scalar(candidate):
            return candidate
    raise ImportModelError(
        f"the model returns {_describe(output)}, which holds no scalar loss; pass labels among the inputs where the "
        "model computes its own loss, or loss_fn=(a function of the output, and of targets= where those are given)."
    )


def _is_scalar(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()


def _describe(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} ({str(value.dtype).removeprefix('torch.')})"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(str(key) for key in value)}"
    return f"a {type(value).__name__}"
