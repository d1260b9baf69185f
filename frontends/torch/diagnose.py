"""Why a model could not be captured: its own error where its forward fails, else what each way of capturing said."""

from __future__ import annotations

import os
import traceback
from typing import Any

from phaze.errors import ImportModelError
from phaze.frontends.torch.capture import CaptureError, Target

__all__ = ["explain_capture", "explain_forward", "is_data_dependent"]

_DATA_DEPENDENT = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")


def is_data_dependent(error: Exception) -> bool:
    """Whether a forward failed because it asked for the values of a tensor."""
    return type(error).__name__ in _DATA_DEPENDENT


def explain_forward(name: str, target: Target, error: Exception) -> ImportModelError:
    """What to say of a forward that fails on tensors without contents."""
    line = _line(error)
    if is_data_dependent(error):
        return ImportModelError(
            f"{name} decides by the values of a tensor at {line}, and Phaze captures it without values; compute both "
            "sides and choose with torch.where, or move the decision out of forward."
        )
    return ImportModelError(
        f"{name}.forward failed at {line} while Phaze ran it on tensors without contents, with inputs "
        f"{_describe(target)}: {type(error).__name__}: {error}"
    )


def explain_capture(name: str, failure: CaptureError) -> ImportModelError:
    """What to say of a model that runs, but that torch cannot capture in any way."""
    reasons = "; ".join(f"{recipe}: {_first_line(error)}" for recipe, error in failure.errors.items())
    return ImportModelError(f"{name} runs, but torch could not capture it. {reasons}")


def _line(error: Exception) -> str:
    """The innermost line outside of torch and Phaze."""
    import torch

    inside = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(inside)]
    if not frames:
        return "an unknown line"
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})"


def _describe(target: Target) -> str:
    from torch.utils._pytree import tree_flatten

    leaves: list[Any] = tree_flatten(target.arguments)[0]
    shapes = [
        f"{name} {list(leaf.shape)}"
        for name, leaf in zip(target.input_names, leaves, strict=True)
        if hasattr(leaf, "shape")
    ]
    return ", ".join(shapes) or "none"


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
