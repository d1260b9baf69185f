"""The pages of docs/ that people wrote, their steps in the order of the site, and how all of them are run."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from documents import Step, steps
from repository import ROOT

DOCS = ROOT / "docs"
RUNNER = ROOT / "tests" / "support" / "document_runner.py"


def pages(nav: Any) -> Iterator[str]:
    """The pages of the site that people wrote, in the order of its navigation."""
    if isinstance(nav, str):
        if (DOCS / nav).exists():
            yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(part)


PAGES = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
STEPS = [step for page in PAGES for step in steps(page, (DOCS / page).read_text())]
QUICK = [step for step in STEPS if not step.is_exhaustive]
LONG = [step for step in STEPS if step.is_exhaustive]


def run_all(asked: list[Step], folder: Path) -> list[dict[str, Any]]:
    """What each step printed, or how it failed, all run in one process after the other."""
    listed = folder / "steps.json"
    listed.write_text(json.dumps([dataclasses.asdict(step) for step in asked]))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [sys.executable, RUNNER, listed, folder / "answers.json"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads((folder / "answers.json").read_text())
    return answers
