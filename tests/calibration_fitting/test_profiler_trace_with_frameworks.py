"""A trace that torch's profiler records is read."""

from pathlib import Path

import torch

from phaze.calibration_fitting import read_trace


def test_a_real_training_step_has_products_other_kernels_and_an_update(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    path = tmp_path / "trace.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(torch.randn(32, 64)).sum().backward()
        optimizer.step()
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path)
    assert min(trace.matrix_s, trace.vector_s, trace.update_s) > 0
    assert trace.matrix_s + trace.vector_s + trace.update_s <= trace.step_s * 1.001
