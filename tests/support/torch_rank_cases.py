"""Cases for `torch_ranks.py`: plans that groups of processes run one after another, and what must be equal."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from repository import ROOT
from torch_plans import planned

import phaze

SCRIPT = ROOT / "tests" / "support" / "torch_ranks.py"
Strategy = Mapping[str, object]
Cases = Mapping[str, tuple[str, phaze.Plan, int]]
"""By name: the kind of model, its plan, and how many steps it is trained for after the first."""
Answers = Callable[[str], dict[str, Any]]


def strategy_cases(world: int, strategies: Mapping[str, Strategy]) -> Cases:
    """Cases of one step for strategies that are given; a case's name begins with its kind of model."""
    cases = {}
    for name, strategy in strategies.items():
        kind = name.partition(" ")[0]
        precision = "bf16" if "bf16" in name else "fp32"
        cases[name] = (kind, planned(kind, world, strategy, precision=precision), 0)
    return cases


def run_cases(
    folder: Path, worlds: Mapping[int, Cases], moments_in_world: int | None = None, brief: Collection[str] = ()
) -> dict[int, Answers]:
    """What every case gave, run in one group of processes for each size of the world.

    Bytes of Adam's moments are counted in one of the worlds only: others repeat what is asked of it. In brief cases no
    gradients are added to those of a first backward, and no weights are loaded.
    """
    for world, cases in worlds.items():
        write_cases(folder / str(world), cases, counts_moments=world == moments_in_world, brief=brief)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *map(str, worlds)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=SCRIPT.parent,
        capture_output=True,
        text=True,
        timeout=1500 * len(worlds),
    )
    failures = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("*/failures-*")))
    assert done.returncode == 0, failures + done.stderr[-2000:]
    return {world: read_answers(folder / str(world), cases) for world, cases in worlds.items()}


def write_cases(folder: Path, cases: Cases, counts_moments: bool, brief: Collection[str]) -> None:
    folder.mkdir()
    documents = []
    for index, (name, (kind, plan, steps)) in enumerate(cases.items()):
        plan.save(folder / f"{index}.json")
        what = next((word for word in name.split() if word in ("loop", "dropout")), "step")
        plan_path = str(folder / f"{index}.json")
        given = {"kind": kind, "plan": plan_path, "steps": steps, "counts_moments": counts_moments, "what": what}
        documents.append(given | {"is_thorough": name not in brief})
    (folder / "cases.json").write_text(json.dumps(documents))


def read_answers(folder: Path, cases: Cases) -> Answers:
    answers = dict(zip(cases, json.loads((folder / "answers.json").read_text()), strict=True))
    return lambda name: answers[name]


def run_strategies(folder: Path, world: int, strategies: Mapping[str, Strategy]) -> Answers:
    """What one step of each strategy gave, in one group of processes."""
    return run_cases(folder, {world: strategy_cases(world, strategies)})[world]


def check_equality(answer: dict[str, Any], most: float = 1e-5, is_brief: bool = False) -> None:
    assert "error" not in answer, answer.get("trace")
    assert answer["loss"] < most
    assert answer["gradient"] < most, answer["worst"]
    assert answer["norm"] < most
    assert answer["clipped"] < most
    assert answer["buffers"] < most
    assert answer["parameter"] < most
    if not is_brief:
        assert answer["again"] < most
        assert answer["loaded"] == 0.0
