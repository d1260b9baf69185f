"""Commands that are killed at random moments, and what they leave behind."""

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["killed", "leftovers"]


def killed(arguments: Sequence[str], chance: random.Random, longest_s: float) -> bool:
    """Start a command of phaze and kill it at a random moment; whether it was still running then."""
    program = [sys.executable, "-m", "phaze", *arguments]
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(chance.uniform(0.0, longest_s))
    was_running = process.poll() is None
    process.kill()
    process.wait()
    return was_running


def leftovers(folder: Path, expected: set[str]) -> list[str]:
    """Files in a folder that are neither expected nor the hidden, unfinished ones that a kill may leave."""
    return sorted(path.name for path in folder.iterdir() if path.name not in expected and path.name[0] != ".")
