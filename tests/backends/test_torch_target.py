"""The torch target in one process: what it refuses, what it exports, and split tensors by themselves."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from repository import ROOT
from torch.distributed.device_mesh import init_device_mesh
from torch_plans import imported, planned
from torch_training import batch_of, build_model

import phaze
from phaze.backends.torch import TorchTarget
from phaze.backends.torch.pipeline import find_cut_paths
from phaze.backends.torch.split_collectives import Axis
from phaze.backends.torch.split_parameters import Cut, to_device_order, to_model_order
from phaze.backends.torch.split_rules import reshaped
from phaze.backends.torch.split_tensor import NoRule, SplitTensor
from phaze.backends.torch.stage_cuts import cut_paths, dry_run
from phaze.errors import PlanError
from phaze.hooks import PluginManager


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process."""
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def data_parallel() -> phaze.Plan:
    return planned("uncut", 2, {"dp": 2})


def test_a_launch_of_another_size_is_refused(alone: None, data_parallel: phaze.Plan) -> None:
    with pytest.raises(PlanError, match=r"takes 2 processes .* and 1 were launched"):
        data_parallel.apply(build_model("uncut"))


def test_a_mesh_of_other_names_or_sizes_is_refused(alone: None, data_parallel: phaze.Plan) -> None:
    for names, message in ((("x",), "mesh has the axes x=1"), (("dp",), "mesh has the sizes dp=1; the plan needs")):
        with pytest.raises(PlanError, match=message):
            data_parallel.apply(build_model("uncut"), init_device_mesh("cpu", (1,), mesh_dim_names=names))
    with pytest.raises(PlanError, match="expected a torch DeviceMesh"):
        data_parallel.apply(build_model("uncut"), "mesh")


def test_another_model_is_refused_with_what_differs(data_parallel: phaze.Plan) -> None:
    with pytest.raises(
        PlanError, match=r"not the one that was planned .*\n.*32,128 parameters in the plan, 57,536 here"
    ):
        data_parallel.apply(build_model("hand-written"))
    with pytest.raises(PlanError, match=r"arranges a torch\.nn\.Module"):
        data_parallel.apply("gpt2-xl")


def test_a_model_that_is_sharded_already_is_refused(alone: None) -> None:
    x = torch.zeros(4, 8)
    question = {"loss_fn": torch.nn.functional.mse_loss, "targets": x, "cluster": "cpu:1", "precision": "fp32"}
    plan = phaze.optimize(torch.nn.Linear(8, 8), x, global_batch_size=4, **question)
    model = torch.nn.Linear(8, 8)
    plan.apply(model, loss_fn=torch.nn.functional.mse_loss)
    with pytest.raises(PlanError, match="sharded already; apply a plan to the plain model, once"):
        plan.apply(model, loss_fn=torch.nn.functional.mse_loss)


def test_an_unknown_option_is_refused_by_name(data_parallel: phaze.Plan) -> None:
    with pytest.raises(PlanError, match="no option 'optimiser' for torch; expected some of inputs, optimizer"):
        data_parallel.apply(build_model("uncut"), optimiser=None)


def test_a_plan_for_analysis_is_refused() -> None:
    with pytest.raises(PlanError, match="analysis only and is not executable"):
        planned("uncut", 2, {"dp": 2}, target=None).apply(build_model("uncut"))


def test_zero_bubble_pipelines_and_partly_sharded_copies_are_never_planned_for_torch() -> None:
    plan = planned("uncut", 2, {"dp": 2})
    capabilities = TorchTarget().capabilities
    assert {schedule.value for schedule in capabilities.schedules} == {"gpipe", "1f1b", "interleaved-1f1b"}
    assert plan.strategy.zero in capabilities.zero_stages == frozenset({0, 3})


def test_cuts_stand_before_the_outermost_module_that_holds_no_earlier_layer() -> None:
    model = build_model("t5")
    names = [f"{index}:{layer.name}" for index, layer in enumerate(imported("t5").layers)]
    assert cut_paths([names[:4], names[4:]], model) == ["decoder"]
    assert cut_paths([names[:2], names[2:]], model) == ["encoder.block.1"]
    model = build_model("gpt2")
    names = [f"{index}:{layer.name}" for index, layer in enumerate(imported("gpt2").layers)]
    assert cut_paths([names[:1], names[1:5], names[5:]], model) == ["transformer.h.0", "transformer.ln_f"]


def test_a_model_that_nothing_cuts_is_refused_with_what_is_known() -> None:
    builders = [offer.value for offer in PluginManager.load().stage_builders()]
    with pytest.raises(PlanError, match=r"nothing cuts Uncut into stages \(known: list of blocks"):
        find_cut_paths(build_model("uncut"), [["0:early"], ["1:late"]], builders)


def test_orders_of_devices_and_of_the_model_undo_each_other() -> None:
    value = torch.arange(24).reshape(2, 12)
    ordered = to_device_order(value, Cut(1, 3), 2)
    assert ordered[0].tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert torch.equal(to_model_order(ordered, Cut(1, 3), 2), value)


def test_a_view_keeps_the_cut_where_it_falls_on_chunks_of_a_dimension() -> None:
    axis = Axis(None, 2, 0)
    value = SplitTensor(torch.zeros(4, 6), axis, (4, 12), 1, 3)
    heads = reshaped(value, (4, 3, 4))
    assert (tuple(heads.local.shape), heads.split_dim, heads.outer) == ((4, 3, 2), 2, 1)
    rows = reshaped(SplitTensor(torch.zeros(2, 3, 5), axis, (2, 6, 5), 1), (12, 5))
    assert (tuple(rows.local.shape), rows.split_dim, rows.outer) == ((6, 5), 0, 2)
    with pytest.raises(NoRule):
        reshaped(SplitTensor(torch.zeros(4, 3), axis, (4, 6), 1), (4, 3, 2))


def test_changes_in_place_that_cannot_be_followed_are_refused() -> None:
    value = SplitTensor(torch.zeros(2, 2), Axis(None, 2, 0), (2, 4), 1)
    with pytest.raises(NotImplementedError, match="fill_ changes a tensor that is split over devices in place"):
        value.fill_(1.0)


class Gated(torch.nn.Module):
    """Blocks that take flags made of the embedding; `late` flags are read again behind the blocks."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(8, 4)
        self.blocks = torch.nn.ModuleList(torch.nn.Bilinear(4, 4, 4) for _ in range(2))
        self.bias = torch.nn.Parameter(torch.ones(4))
        self.late = late

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        keep = (x > 0).float()
        for block in self.blocks:
            x = block(x, keep)
        return ((x + self.bias) * keep if self.late else x + self.bias).sum()


def test_what_has_no_gradient_but_depends_on_parameters_crosses_a_cut_or_is_refused() -> None:
    batch = {"ids": torch.zeros(2, 3, dtype=torch.int64)}
    run = dry_run(Gated(late=False), ["blocks.1"], batch, torch.bfloat16)
    (boundary,) = run.boundaries
    assert [(tensor.dtype, tensor.requires_grad) for tensor in boundary.tensors] == [
        (torch.bfloat16, True),
        (torch.bfloat16, False),
    ]
    assert run.stages[""] == {0, 1}
    with pytest.raises(PlanError, match="reads what an earlier stage compared or counted"):
        dry_run(Gated(late=True), ["blocks.1"], batch, torch.float32)


def test_a_view_of_a_part_sees_changes_in_place() -> None:
    value = SplitTensor(torch.zeros(4, 3), Axis(None, 2, 0), (4, 6), 1)
    value.view(2, 2, 6).add_(1.0)
    assert value.local.sum() == 12
    with pytest.raises(NotImplementedError, match="__setitem__ changes a tensor"):
        value[0] = 0.0


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_an_autograd_function_on_a_part_is_refused_before_its_gradient_is_lost() -> None:
    local = torch.ones(4, 3, requires_grad=True)
    value = SplitTensor(local, Axis(None, 2, 0), (4, 6), 1)
    with pytest.raises(NotImplementedError, match=r"an autograd.Function was applied to a tensor that is split"):
        _ = Doubled.apply(value) + 1


def test_a_hook_on_a_split_tensor_sees_and_changes_its_gradient() -> None:
    local, seen_shapes = torch.ones(4, 3, requires_grad=True), []
    value = SplitTensor(local, Axis(None, 2, 0), (4, 6), 1) * 2

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        seen_shapes.append(tuple(gradient.shape))
        return gradient * 3

    value.register_hook(hook)
    value.local.sum().backward()
    assert seen_shapes == [(4, 6)]
    assert local.grad is not None
    assert local.grad.tolist() == [[6.0] * 3] * 4


def test_names_of_numpy_mean_the_same_dimensions() -> None:
    value = SplitTensor(torch.ones(4, 3), Axis(None, 2, 0), (4, 6), 1)
    assert (tuple(value.sum(axis=0).shape), tuple(value.sum(axis=0).local.shape)) == ((6,), (3,))
    assert [tuple(piece.shape) for piece in value.tensor_split(2, axis=0)] == [(2, 6), (2, 6)]
    assert tuple(SplitTensor(torch.ones(4, 3, 2), Axis(None, 2, 0), (4, 6, 2), 1).T.shape) == (2, 6, 4)


@pytest.mark.parametrize(
    ("kind", "strategy"), [("gpt2", {"tp": 2, "recompute": "full"}), ("uncut", {"dp": 2, "zero": 3})]
)
def test_exported_files_train_where_phaze_cannot_be_imported(
    tmp_path: Path, kind: str, strategy: dict[str, object]
) -> None:
    files = planned(kind, 2, strategy).export("fsdp")
    assert not any("phaze.backends" in text or "import phaze" in text for text in files.values())
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    script = ROOT / "tests" / "support" / "run_exported_torch.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), kind],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    training = json.loads((tmp_path / "found.json").read_text())
    assert training["losses"] == pytest.approx(training["expected"], rel=1e-5)


def test_the_export_holds_one_stage_only() -> None:
    with pytest.raises(PlanError, match="target 'fsdp' cannot run this plan: it has a pipeline"):
        planned("gpt2", 2, {"pp": 2}).export("fsdp")


def test_a_batch_of_another_size_is_refused(alone: None) -> None:
    run = planned("uncut", 1, {"dp": 1}).apply(build_model("uncut"))
    batch = batch_of("uncut")
    assert float(run.step(**run.share(batch))) > 0
    with pytest.raises(PlanError, match=r"tensors of \[3\] samples; expected 8 in each"):
        run.step(**{name: value[:3] for name, value in batch.items()})
    with pytest.raises(PlanError, match="the batch has 3 samples; the plan's has 8"):
        run.share({name: value[:3] for name, value in batch.items()})
