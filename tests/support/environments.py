"""Throwaway environments to install into, and programs run inside them."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any


def run(*command: str | Path, folder: Path | None = None) -> str:
    """What a program prints; its complaints are part of the error if it fails. It sees no PYTHONPATH of ours."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment_with_our_dependencies(folder: Path) -> Path:
    """The Python of a fresh environment that sees the libraries of this one, but nothing of Phaze.

    A path file inside it leads to this environment's libraries; an editable Phaze among them stays unseen, since path
    files there are not read.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    libraries = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (libraries / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def empty_environment(folder: Path) -> Path:
    """The Python of a fresh environment that holds pip and nothing else."""
    venv.create(folder, with_pip=True, symlinks=True)
    return folder / "bin" / "python"


def install_without_network(python: Path, what: Path) -> None:
    """Install a wheel or a source folder with what is there: no index, no dependencies, no isolated build."""
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", "--quiet")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, what)


def doctor(python: Path) -> dict[str, Any]:
    """What `phaze doctor --json` of an environment tells."""
    document: dict[str, Any] = json.loads(run(python.parent / "phaze", "doctor", "--json"))
    return document
