"""Where a model's loss may be in what it returns; the same for who captures a model and who runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["loss_candidates"]


def loss_candidates(output: Any) -> list[Any]:
    """What may be the loss, likeliest first: the output itself, what it has under `loss`, the members of a tuple.

    A caller takes the first that is a scalar with a gradient: models return (loss, logits) and (logits, loss) alike.
    """
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    elif isinstance(output, tuple | list):
        candidates.extend(output)
    return candidates
