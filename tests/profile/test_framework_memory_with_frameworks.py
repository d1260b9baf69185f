"""What torch and XLA hold of a block between forward and backward is what the plan counts; the benchmark measures it.

XLA keeps more than planned of a scan without remat, and `benchmarks/README.md` says how much.
"""

import importlib
import sys
from types import ModuleType

import pytest
import torch
from repository import ROOT

import phaze
from phaze.ir import RecomputeMode


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("memory_statistics")


@pytest.mark.parametrize("mode", [RecomputeMode.NONE, RecomputeMode.FULL])
def test_torch_keeps_the_planned_bytes(memory: ModuleType, mode: RecomputeMode) -> None:
    module = memory.Stack("gelu", memory.DEEP, is_rematerialized=False)
    graph = phaze.import_graph(module, (torch.zeros(memory.BATCH, memory.LENGTH, memory.HIDDEN),))
    measured = memory.torch_bytes("gelu", is_rematerialized=mode is RecomputeMode.FULL)
    assert measured == memory.planned_bytes(graph, mode)


def test_xla_keeps_the_planned_bytes_of_a_scan_over_rematerialized_blocks(memory: ModuleType) -> None:
    loss, arguments = memory.jax_model("gelu", memory.DEEP, is_rematerialized=False)
    planned = memory.planned_bytes(phaze.import_graph(loss, arguments), RecomputeMode.FULL)
    assert memory.xla_bytes("gelu", is_rematerialized=True) == planned
