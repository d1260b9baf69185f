"""Errors of one process told to all: a process that waits for another in vain says what happened to that one.

An error on one process leaves the others in a collective that never ends well: they see a closed connection. Before
its error leaves the step, a process writes it into the store of the process group, which all of them reach. One whose
collective fails looks there (`told_to_all`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from phaze.errors import PlanError

__all__ = ["told_to_all"]

_KEY = "phaze/failed-rank"
_LONGEST_MESSAGE = 2000
"""Characters of an error that are told to other processes: a message and its advice, not a dump of tensors."""

_PATIENCE = timedelta(seconds=5)
"""How long a process looks for the error of another: it is written before the connection closes."""

_LOST_CONNECTION = ("closed by peer", "reset by peer", "timed out", "connection", "broken pipe", "not connected")
"""Words of torch's messages where another process of the group is gone."""


@contextmanager
def told_to_all() -> Iterator[None]:
    """Tell an error to the other processes; where this one only lost them, raise PlanError with what they told."""
    try:
        yield
    except Exception as error:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            raise
        if not _is_lost_connection(error):
            _tell(error)
            raise
        message = _told()
        if message is None:
            raise
        raise PlanError(f"another process of this launch failed: {message}") from error


def _is_lost_connection(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _LOST_CONNECTION)


def _tell(error: Exception) -> None:
    """Write down the first error; a store that is gone, too, leaves the others as they were."""
    text = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
    with suppress(RuntimeError):
        _get_default_store().compare_set(_KEY, "", text)


def _told() -> str | None:
    """What another process wrote down, or None."""
    with suppress(RuntimeError):
        store = _get_default_store()
        store.wait([_KEY], _PATIENCE)
        return str(store.get(_KEY).decode())
    return None
