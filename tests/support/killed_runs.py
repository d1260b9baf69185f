"""Work in a process of its own that is killed at a random moment, and what it leaves behind."""

import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

__all__ = ["killed", "leftovers"]


def killed(work: Callable[[], object], chance: random.Random, longest_s: float) -> bool:
    """Do work in a copy of this process, and kill -9 that at a random moment; whether it was still at work then.

    The copy has everything imported already, so that every moment is one of the work itself. Where other tests imported
    JAX into this process, it warns of copies that use its threads; the work here does not, and is killed in any case.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        process = os.fork()
    if process == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(null, stream)
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(chance.uniform(0.0, longest_s))
    was_at_work = os.waitpid(process, os.WNOHANG) == (0, 0)
    if was_at_work:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return was_at_work


def leftovers(folder: Path, expected: set[str]) -> list[str]:
    """Files in a folder that are neither expected nor the hidden, unfinished ones that a kill may leave."""
    return sorted(path.name for path in folder.iterdir() if path.name not in expected and path.name[0] != ".")
