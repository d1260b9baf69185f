"""The processes of multi-process JAX, and the devices that JAX sees."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phaze.backends.device_names import known_chip
from phaze.hooks import hookimpl
from phaze.interfaces import World

__all__ = ["JaxWorld", "phaze_worlds"]


@dataclass(frozen=True, slots=True)
class JaxWorld:
    """`jax.distributed`, once somebody initialised it."""

    name: str = "jax"

    def size(self) -> int:
        """Processes of the launch."""
        jax = _initialized()
        return 1 if jax is None else int(jax.process_count())

    def rank(self) -> int:
        """This one."""
        jax = _initialized()
        return 0 if jax is None else int(jax.process_index())

    def gather(self, text: str) -> Sequence[str]:
        """One text from each: lengths first, then bytes padded to the longest."""
        if _initialized() is None:
            return [text]
        import numpy as np
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
        chip = known_chip(devices[0].device_kind)
        return None if chip is None else (chip, len(devices))


def _initialized() -> Any:
    jax = sys.modules.get("jax")
    if jax is None or not hasattr(jax, "distributed") or not jax.distributed.is_initialized():
        return None
    return jax


@hookimpl
def phaze_worlds() -> tuple[World, ...]:
    """This file's one world."""
    return (JaxWorld(),)
