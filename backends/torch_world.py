"""The processes of a torch process group, and the devices that torch sees."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phaze.backends.device_names import known_chip
from phaze.hooks import hookimpl
from phaze.interfaces import World

__all__ = ["TorchWorld", "phaze_worlds"]


@dataclass(frozen=True, slots=True)
class TorchWorld:
    """`torch.distributed`, once somebody initialised it."""

    name: str = "torch"

    def size(self) -> int:
        """Processes of the default group."""
        group = _group()
        return 1 if group is None else int(group.get_world_size())

    def rank(self) -> int:
        """This one."""
        group = _group()
        return 0 if group is None else int(group.get_rank())

    def gather(self, text: str) -> Sequence[str]:
        """One text from each."""
        group = _group()
        if group is None:
            return [text]
        texts: list[Any] = [None] * self.size()
        group.all_gather_object(texts, text)
        return [str(one) for one in texts]

    def visible_devices(self) -> tuple[str, int] | None:
        """CUDA devices: one for each process of a launch, else all that this process sees."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return None
        chip = known_chip(torch.cuda.get_device_name(0))
        launched = os.environ.get("WORLD_SIZE", "")
        count = int(launched) if launched.isdigit() and int(launched) > 1 else int(torch.cuda.device_count())
        return None if chip is None else (chip, count)


def _group() -> Any:
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


@hookimpl
def phaze_worlds() -> tuple[World, ...]:
    """This file's one world."""
    return (TorchWorld(),)
