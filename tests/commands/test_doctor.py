"""`phaze doctor` tells what is installed, what works and where it came from."""

import importlib.util
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from plugins import installed_distribution

import phaze
from phaze.cli import main

SAMPLE = """
from phaze.hooks import hookimpl
from phaze.hardware import preset
from phaze.solvers import SolveReport, SolveStatus, LinearResult

class Solver:
    def __init__(self, name, largest, is_installed=True):
        self.name, self.largest, self.is_installed = name, largest, is_installed
    def is_importable(self):
        return self.is_installed
    def refusal(self, problem):
        return None if problem.variable_count <= self.largest else f"more than {self.largest} variables"
    def solve(self, problem, limits):
        if self.largest > 1e9:
            raise RuntimeError("the engine stalled")
        objective = float(-problem.variable_count) if self.largest != 1e9 else 0.0
        return LinearResult(status=SolveStatus.OPTIMAL, report=SolveReport(solver=self.name), objective=objective)

class Frontend:
    name, libraries, options = "toy", ("json", "no_such_framework.nn"), ()
    def accepts(self, model):
        return False
    def import_model(self, model, inputs, options):
        raise AssertionError

@hookimpl
def phaze_solvers():
    return [Solver("none", 0), Solver("small", 5), Solver("large", 1e6), Solver("wrong", 1e9), Solver("stalls", 1e10),
            Solver("absent", 1, is_installed=False)]

@hookimpl
def phaze_frontends():
    return [Frontend()]

@hookimpl
def phaze_accelerators():
    return {"h100": preset("h100").accelerator}

@hookimpl
def phaze_op_prices():
    raise LookupError("prices.csv")
"""


@pytest.fixture
def sample(tmp_path: Path) -> Iterator[Path]:
    entry_points, modules = {"toy": "phaze_toy"}, {"phaze_toy": SAMPLE}
    with installed_distribution(tmp_path, "phaze-toy", version="2.5", entry_points=entry_points, modules=modules):
        yield tmp_path / "phaze_toy.py"


def diagnosis(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    document: dict[str, Any] = json.loads(captured.out)
    return document


def test_versions_are_those_installed(capsys: pytest.CaptureFixture[str]) -> None:
    document = diagnosis(capsys)
    assert document["phaze"] == phaze.__version__
    assert document["python"] == platform.python_version()
    libraries = {library["name"]: library for library in document["libraries"]}
    assert libraries["numpy"] == {"name": "numpy", "extra": None, "version": numpy.__version__}
    assert libraries["gurobipy"]["extra"] == "gurobi"
    assert {"phaze-plugin", "pytest"}.isdisjoint(libraries)


def test_built_in_solvers_are_tried(capsys: pytest.CaptureFixture[str]) -> None:
    states = {solver["name"]: solver["state"] for solver in diagnosis(capsys)["solvers"]}
    assert {name: states[name] for name in ("highs", "scip", "cp-sat")} == dict.fromkeys(
        ("highs", "scip", "cp-sat"), "works"
    )
    is_installed = importlib.util.find_spec("gurobipy") is not None
    assert states["gurobi"] in ({"works", "size-limited", "fails"} if is_installed else {"missing"})


def test_a_plugins_solver_is_tried_in_the_same_way(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    solvers = {solver["name"]: (solver["state"], solver["detail"]) for solver in diagnosis(capsys)["solvers"]}
    assert solvers["none"] == ("fails", "more than 0 variables")
    assert solvers["small"] == ("size-limited", "more than 5 variables")
    assert solvers["large"] == ("works", "solves 2,001 variables")
    assert solvers["wrong"] == ("fails", "it answered optimal 0.0, expected -1")
    assert solvers["stalls"] == ("fails", "RuntimeError: the engine stalled")
    assert solvers["absent"] == ("missing", "its library is not installed")


def test_a_plugin_is_told_with_its_origin_its_parts_and_its_problems(
    sample: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = diagnosis(capsys)
    origin = {"plugin": "toy", "distribution": "phaze-toy", "version": "2.5", "file": str(sample)}
    hooks = ["phaze_accelerators", "phaze_frontends", "phaze_op_prices", "phaze_solvers"]
    assert document["plugins"][0] == {"origin": origin, "hooks": hooks}
    frontends = {frontend["name"]: frontend for frontend in document["frontends"]}
    assert frontends["toy"] == {"name": "toy", "missing_libraries": ["no_such_framework.nn"], "origin": origin}
    failure, clash = document["problems"]
    assert failure == (
        "plugin 'toy' of phaze-toy 2.5 failed in phaze_op_prices and was passed over: LookupError: prices.csv"
    )
    assert "'h100' is claimed by plugin 'toy' of phaze-toy 2.5 and plugin 'core' of phaze-plugin" in clash


def test_people_get_the_same_in_tables(
    sample: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    assert main(["doctor"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = [" ".join(line.split()) for line in captured.out.splitlines()]
    assert lines[0].startswith(f"phaze {phaze.__version__} on Python")
    assert f"numpy {numpy.__version__}" in lines
    assert "small size-limited more than 5 variables" in lines
    assert "frontend toy needs no_such_framework.nn phaze-toy 2.5" in lines
    assert any(line.startswith("toy phaze-toy 2.5 1 frontend, 6 solvers, 1 accelerator") for line in lines)
    assert "2 problems with plugins" in lines
