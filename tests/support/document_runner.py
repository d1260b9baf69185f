"""Run as a program: the steps of documents one after the other, in one process, which imports everything once.

`python document_runner.py STEPS ANSWERS` reads steps (JSON) and writes for each what it printed, or how it failed. It
runs in the folder of the steps. Programs and `phaze` commands run in this process; all others in a shell, and those of
`make` are only looked up, as in `documents.run_step`.
"""

import contextlib
import io
import json
import runpy
import shlex
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from rare_collections import collect_rarely
from repository import ROOT

from phaze.cli import main as run_phaze

TORCHRUN = f"{shlex.quote(sys.executable)} -m torch.distributed.run"
"""The program that `torchrun` is, in this environment."""


def main(steps: Path, answers: Path) -> None:
    collect_rarely()
    sys.path.insert(0, "")
    told = []
    for step in json.loads(steps.read_text()):
        started = time.process_time()
        told.append({**answer(step), "seconds": time.process_time() - started})
        answers.write_text(json.dumps(told, indent=1))


def answer(step: dict[str, Any]) -> dict[str, Any]:
    """What a step printed on standard output, with errors where it should fail; or why it failed otherwise."""
    printed = io.StringIO()
    fails = "fails" in step["mark"].split()
    errors = printed if fails else io.StringIO()
    if step["file"] is not None:
        Path(step["file"][0]).write_text(step["file"][1])
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            code = run(step["command"]) if step["command"] else 0
    except Exception:
        return {"printed": printed.getvalue(), "error": traceback.format_exc()}
    is_expected = (code != 0) is fails
    error = "" if is_expected else f"exit code {code}: {errors.getvalue()}"
    return {"printed": printed.getvalue(), "error": error}


def run(command: str | list[str]) -> int:
    """Run a program or a command; its exit code."""
    if not isinstance(command, str):
        exec(compile(command[-1], "block", "exec"), {"__name__": "__main__"})
        return 0
    words = shlex.split(command)
    if words[0] == "phaze":
        return run_phaze(words[1:])
    if words[0] == "python":
        sys.argv = words[1:]
        runpy.run_path(words[1], run_name="__main__")
        return 0
    in_shell = command.replace("torchrun", TORCHRUN, 1) if words[0] == "torchrun" else command
    folder = None
    if words[0] == "make":
        in_shell, folder = f"{command} --dry-run", ROOT
    done = subprocess.run(in_shell, shell=True, cwd=folder, capture_output=True, text=True, check=False)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
