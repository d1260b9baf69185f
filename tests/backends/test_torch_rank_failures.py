"""An error on one process of a launch is told to the processes that wait for it."""

import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

SCRIPT = ROOT / "tests" / "support" / "torch_failing_rank.py"


@pytest.mark.parametrize("way", ["collective", "made"])
def test_a_process_that_waits_in_vain_says_what_happened_to_the_other(tmp_path: Path, way: str) -> None:
    ranks = [subprocess.Popen([sys.executable, str(SCRIPT), str(tmp_path), str(rank), way]) for rank in (0, 1)]
    for rank in ranks:
        rank.wait(timeout=120)
    assert (tmp_path / "1.txt").read_text() == "ValueError: the weights of layer 3 are missing"
    told = (tmp_path / "0.txt").read_text()
    assert told == (
        "PlanError: another process of this launch failed: rank 1: ValueError: the weights of layer 3 are missing"
    )
