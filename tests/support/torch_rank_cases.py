"""Cases for `torch_ranks.py`: plans that one group of processes runs one after another, and what must be equal."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from repository import ROOT
from torch_plans import planned

import phaze

SCRIPT = ROOT / "tests" / "support" / "torch_ranks.py"
Strategy = Mapping[str, object]
Answers = Callable[[str], dict[str, Any]]


def run_cases(folder: Path, world: int, cases: Mapping[str, tuple[str, phaze.Plan, int]]) -> Answers:
    """Run plans (of a kind of model, for some steps of training) in one group of processes."""
    told = []
    for index, (kind, plan, steps) in enumerate(cases.values()):
        plan.save(folder / f"{index}.json")
        told.append({"kind": kind, "plan": str(folder / f"{index}.json"), "steps": steps})
    (folder / "cases.json").write_text(json.dumps(told))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(world)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=SCRIPT.parent,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    failures = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("failures-*")))
    assert done.returncode == 0, failures + done.stderr[-2000:]
    answers = dict(zip(cases, json.loads((folder / "answers.json").read_text()), strict=True))
    return lambda name: answers[name]


def run_strategies(folder: Path, world: int, strategies: Mapping[str, Strategy]) -> Answers:
    cases = {}
    for name, strategy in strategies.items():
        kind = name.partition(" ")[0]
        precision = "bf16" if "bf16" in name else "fp32"
        cases[name] = (kind, planned(kind, world, strategy, precision=precision), 0)
    return run_cases(folder, world, cases)


def check_equality(answer: dict[str, Any], most: float = 1e-5) -> None:
    assert "error" not in answer, answer.get("trace")
    assert answer["loss"] < most
    assert answer["gradient"] < most, answer["worst"]
    assert answer["again"] < most
    assert answer["parameter"] < most
    assert answer["loaded"] == 0.0
