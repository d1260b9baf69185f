"""`phaze doctor` tells what is installed and where it came from."""

import json
import platform

import numpy
import pytest

import phaze
from phaze.cli import main


def test_doctor_tells_versions_to_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["phaze"] == phaze.__version__
    assert document["python"] == platform.python_version()
    libraries = {library["name"]: library for library in document["libraries"]}
    assert libraries["numpy"] == {"name": "numpy", "extra": None, "version": numpy.__version__}
    assert libraries["gurobipy"]["extra"] == "gurobi"
    assert "phaze-plugin" not in libraries
