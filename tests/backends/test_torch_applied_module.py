"""A plan applied to a torch module in one process: launches, meshes, models, options and batches that are refused."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch_plans import imported, planned
from torch_training import batch_of, build_model, second_of_output, word_loss

import phaze
from phaze.backends.torch import TorchTarget
from phaze.backends.torch.applied_module import loss_of_output
from phaze.backends.torch.arrange import arrange_module, without_caches
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
    with pytest.raises(PlanError, match="no option 'optimiser' for target 'torch'; expected some of inputs, optimizer"):
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


class Tied(torch.nn.Module):
    """An embedding that is a layer by itself, and a head that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = torch.nn.Embedding(12, 8), torch.nn.Linear(8, 12)
        self.block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return word_loss(self.head(self.block(self.words(tokens))), tokens)


def test_modules_that_share_a_parameter_are_gathered_together(alone: None) -> None:
    torch.manual_seed(0)
    model, tokens = Tied(), torch.arange(8).reshape(2, 4)
    model(tokens).backward()
    expected = model.words.weight.grad
    model.zero_grad()
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("replicate", "shard", "tp"))
    arrange_module(
        model,
        mesh,
        cuts={},
        splits_sequences=False,
        blocks={"words": "none", "block": "none"},
        zero=3,
        compute_dtype=torch.float32,
        reduction_dtype=torch.float32,
    )
    model(tokens).backward()
    assert torch.allclose(model.words.weight.grad.full_tensor(), expected)


def test_caches_are_off_while_gradients_are_recorded_and_as_they_were_behind() -> None:
    model = build_model("llama-cached")
    with without_caches(model):
        assert not model.config.use_cache
    assert model.config.use_cache
    with torch.no_grad(), without_caches(model):
        assert model.config.use_cache


def test_the_loss_is_the_scalar_with_a_gradient_wherever_it_stands() -> None:
    loss, count, logits = torch.zeros((), requires_grad=True), torch.tensor(3.0), torch.zeros(2, 3, requires_grad=True)
    for output in (loss, (loss, logits), (logits, loss), [count, logits, loss], {"loss": loss}):
        assert loss_of_output(output) is loss
    with pytest.raises(PlanError, match="a tuple without a scalar loss"):
        loss_of_output((logits, None))


@pytest.mark.parametrize("kind", ["nanogpt", "nanogpt-indexed"])
def test_targets_go_to_the_model_that_declares_them(alone: None, kind: str) -> None:
    plan, batch = planned(kind, 1, {"dp": 1}), batch_of(kind)
    expected = build_model(kind)(**batch)[1].detach()
    run = plan.apply(build_model(kind), loss_fn=second_of_output if kind == "nanogpt-indexed" else None)
    assert torch.allclose(run.backward(**run.share(batch)), expected)


def test_a_pipeline_with_fewer_microbatches_than_stages_is_no_1f1b() -> None:
    question = {"cluster": "cpu:4", "global_batch_size": 2, "precision": "fp32", "target": "torch", "compares": False}
    strategy = {"tp": 2, "pp": 2, "micro_batch_size": 2}
    plan = phaze.evaluate(imported("hand-written"), strategy=strategy, **question).plan
    assert plan.strategy.schedule == "gpipe"
    with pytest.raises(PlanError, match="no plan is possible"):
        phaze.evaluate(imported("hand-written"), strategy={**strategy, "schedule": "1f1b"}, **question)


def test_batch_norms_that_would_train_otherwise_than_in_one_process_are_refused(alone: None) -> None:
    plan = planned("batch-normed", 1, {"dp": 1})  # two microbatches
    with pytest.raises(PlanError, match=r"'blocks.0.norm' is a batch norm, .* each copy runs 2 microbatches"):
        plan.apply(build_model("batch-normed"))
    with pytest.raises(PlanError, match=r"cannot be synchronized: each copy runs 2 microbatches"):
        plan.apply(build_model("batch-normed"), batch_norm="synchronized")
    with pytest.raises(PlanError, match=r"batch_norm is 'sync'; expected one of 'synchronized', 'local'"):
        plan.apply(build_model("batch-normed"), batch_norm="sync")


def test_batch_norms_of_one_microbatch_or_of_each_are_left_alone(alone: None) -> None:
    batch = batch_of("batch-normed")
    for strategy, options in (({"micro_batch_size": 8}, {}), ({"micro_batch_size": 4}, {"batch_norm": "local"})):
        run = planned("batch-normed", 1, strategy).apply(build_model("batch-normed"), **options)
        assert float(run.step(**run.share(batch))) > 0
