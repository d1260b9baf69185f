"""Where a model's loss may be in what it returns; the same for who captures a model and who runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["loss_candidates"]


def loss_candidates(output: Any) -> list[Any]:
    """What may be the loss, likeliest first: the output itself, what it has under `loss`, the first of a tuple."""
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    elif isinstance(output, tuple | list) and output:
        candidates.append(output[0])
    return candidates
