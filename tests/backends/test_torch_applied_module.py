"""A plan applied to a torch module in one process: launches, meshes, models, options and batches that are refused."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch_plans import planned
from torch_training import batch_of, build_model

import phaze
from phaze.backends.torch import TorchTarget
from phaze.errors import PlanError


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


def test_a_batch_of_another_size_is_refused(alone: None) -> None:
    run = planned("uncut", 1, {"dp": 1}).apply(build_model("uncut"))
    batch = batch_of("uncut")
    assert float(run.step(**run.share(batch))) > 0
    with pytest.raises(PlanError, match=r"tensors of \[3\] samples; expected 8 in each"):
        run.step(**{name: value[:3] for name, value in batch.items()})
    with pytest.raises(PlanError, match="the batch has 3 samples; the plan's has 8"):
        run.share({name: value[:3] for name, value in batch.items()})


def test_zero_bubble_pipelines_and_partly_sharded_copies_are_never_planned_for_torch() -> None:
    plan = planned("uncut", 2, {"dp": 2})
    capabilities = TorchTarget().capabilities
    assert {schedule.value for schedule in capabilities.schedules} == {"gpipe", "1f1b", "interleaved-1f1b"}
    assert plan.strategy.zero in capabilities.zero_stages == frozenset({0, 3})
