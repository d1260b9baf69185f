"""Worlds: the processes that a launcher started together, and the devices that they see, in torch and in JAX.

`optimize` plans once per launch: rank 0 plans and gathers what the others must know. A world says who is rank 0, and
which accelerators there are where nobody names a cluster. No framework is imported here: a framework that nobody has
imported has started no process group, so it is looked up among the imported modules.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from phaze.hardware import preset_names
from phaze.hooks import hookimpl
from phaze.interfaces import World
from phaze.name_spelling import folded_name

__all__ = ["JaxWorld", "TorchWorld", "chip_of_device", "phaze_worlds"]


def chip_of_device(device_name: str) -> str | None:
    """The preset of an accelerator from the name that its driver gives it; None where no preset fits.

    All parts of a preset's name must occur in the device's name, with no further digit behind them; of several such
    presets the longest name is taken. A host's own processor is no accelerator: a plan for it is made only where
    somebody asks for it.
    """
    device = folded_name(device_name.casefold().replace("lite", "e"))  # "TPU v5 lite" is the v5e
    fitting = [
        name
        for name in preset_names()
        if name != "cpu" and all(re.search(rf"{part}(?![0-9])", device) for part in name.split("-"))
    ]
    return max(fitting, key=len, default=None)


@dataclass(frozen=True, slots=True)
class TorchWorld:
    """The processes of `torch.distributed`, once somebody has initialised it, and the CUDA devices that torch sees."""

    name: str = "torch"

    def size(self) -> int:
        """The number of processes in the default group."""
        distributed = _initialized_torch_distributed()
        return 1 if distributed is None else int(distributed.get_world_size())

    def rank(self) -> int:
        """The rank of this process."""
        distributed = _initialized_torch_distributed()
        return 0 if distributed is None else int(distributed.get_rank())

    def gather(self, text: str) -> Sequence[str]:
        """One text from each process."""
        distributed = _initialized_torch_distributed()
        if distributed is None:
            return [text]
        texts: list[str | None] = [None] * self.size()
        distributed.all_gather_object(texts, text)
        return [str(gathered) for gathered in texts]

    def visible_devices(self) -> tuple[str, int] | None:
        """CUDA devices: one for each process of a launch, else all that this process sees.

        Without any, the processes of a launch are the devices: whoever launches several has asked for a plan for them.
        """
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        if not torch.cuda.is_available():
            return ("cpu", self.size()) if self.size() > 1 else None
        chip = chip_of_device(torch.cuda.get_device_name(0))
        launched = os.environ.get("WORLD_SIZE", "")
        count = int(launched) if launched.isdigit() and int(launched) > 1 else int(torch.cuda.device_count())
        return None if chip is None else (chip, count)


def _initialized_torch_distributed() -> ModuleType | None:
    torch = sys.modules.get("torch")
    distributed: ModuleType | None = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


@dataclass(frozen=True, slots=True)
class JaxWorld:
    """The processes of `jax.distributed`, once somebody has initialised it, and the devices that JAX sees."""

    name: str = "jax"

    def size(self) -> int:
        """The number of processes of the launch."""
        jax = _initialized_jax()
        return 1 if jax is None else int(jax.process_count())

    def rank(self) -> int:
        """The index of this process."""
        jax = _initialized_jax()
        return 0 if jax is None else int(jax.process_index())

    def gather(self, text: str) -> Sequence[str]:
        """One text from each process: JAX gathers arrays of one shape, so lengths go first, then padded bytes."""
        if _initialized_jax() is None:
            return [text]
        from jax.experimental.multihost_utils import process_allgather

        raw = np.frombuffer(text.encode(), dtype=np.uint8)
        lengths = np.asarray(process_allgather(np.array([raw.size], dtype=np.int32))).reshape(-1)
        padded = np.zeros(int(lengths.max()), dtype=np.uint8)
        padded[: raw.size] = raw
        rows = np.asarray(process_allgather(padded)).reshape(len(lengths), -1)
        return [row[:length].tobytes().decode() for row, length in zip(rows, lengths.tolist(), strict=True)]

    def visible_devices(self) -> tuple[str, int] | None:
        """The devices of all processes, where JAX has been imported."""
        jax = sys.modules.get("jax")
        if jax is None or not hasattr(jax, "devices"):
            return None
        devices = jax.devices()
        chip = chip_of_device(devices[0].device_kind)
        return None if chip is None else (chip, len(devices))


def _initialized_jax() -> ModuleType | None:
    jax = sys.modules.get("jax")
    if jax is None or not hasattr(jax, "distributed") or not jax.distributed.is_initialized():
        return None
    return jax


@hookimpl
def phaze_worlds() -> tuple[World, ...]:
    """The worlds of torch and of JAX."""
    return (TorchWorld(), JaxWorld())
