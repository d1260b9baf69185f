"""What torch and XLA hold of a block between forward and backward is what the plan counts, as a benchmark measures."""

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


@pytest.mark.parametrize("mode", [RecomputeMode.NONE, RecomputeMode.FULL])
def test_xla_keeps_the_planned_bytes_of_a_scan(memory: ModuleType, mode: RecomputeMode) -> None:
    is_rematerialized = mode is RecomputeMode.FULL
    loss, arguments = memory.jax_model("gelu", memory.DEEP, is_rematerialized=is_rematerialized)
    planned = memory.planned_bytes(phaze.import_graph(loss, arguments), mode)
    assert memory.xla_bytes("gelu", is_rematerialized=is_rematerialized) == planned


@pytest.mark.parametrize("mode", [RecomputeMode.NONE, RecomputeMode.FULL])
def test_xla_keeps_about_the_planned_bytes_of_blocks_one_after_the_other(
    memory: ModuleType, mode: RecomputeMode
) -> None:
    loss, arguments = memory.jax_model("normed", memory.DEEP, is_rematerialized=False, is_scanned=False)
    planned = memory.planned_bytes(phaze.import_graph(loss, arguments), mode)
    measured = memory.xla_bytes("normed", is_rematerialized=mode is RecomputeMode.FULL, is_scanned=False)
    assert planned == pytest.approx(measured, rel=0.1)


@pytest.mark.exhaustive
def test_all_that_the_benchmark_measures_is_planned_within_a_tenth(memory: ModuleType) -> None:
    rows = memory.rows()
    assert len(rows) == 36
    for *_, measured, planned in rows:
        assert planned == pytest.approx(measured, rel=0.1)
