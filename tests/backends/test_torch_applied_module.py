"""A plan applied to a torch module in one process: launches, meshes, models, options and batches that are refused."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch_losses import APART, MIXING, Scored, scored_batch
from torch_plans import imported, planned
from torch_training import batch_of, build_model, second_of_output, word_loss

import phaze
from phaze.backends.torch import TorchTarget
from phaze.backends.torch.applied_module import AppliedModule
from phaze.backends.torch.arrange import arrange_module, without_caches
from phaze.backends.torch.micro_batches import loss_of_output
from phaze.calibration_fitting.measured_runs import read_steps
from phaze.errors import PlanError
from phaze.frontends.torch.example_inputs import read_model


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


def test_a_batch_of_another_size_runs_and_says_so_once(alone: None) -> None:
    run, batch = planned("uncut", 1, {"dp": 1}).apply(build_model("uncut")), batch_of("uncut")
    expected = build_model("uncut")(**{name: value[:3] for name, value in batch.items()}).detach()
    few = run.share({name: value[:3] for name, value in batch.items()})
    with pytest.warns(UserWarning, match=r"have 3 samples of a batch where the plan has 8 \(microbatches: 1\)"):
        loss = run.backward(**few)
    assert torch.allclose(loss, expected)
    assert torch.allclose(run.backward(**few), expected)  # without a warning, which would be an error
    with pytest.raises(PlanError, match="has tensors of 3, 8 samples; expected equally many in each"):
        run.step(tokens=few["tokens"], targets=batch["targets"])
    with pytest.raises(PlanError, match="the batch has no samples on any process"):
        run.step(**{name: value[:0] for name, value in batch.items()})


class Masked(torch.nn.Module):
    """One that takes means itself: over a mask, over different targets, or of all samples."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.words, self.way = torch.nn.Linear(4, 5), way

    def forward(self, x: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = self.words(x)
        if self.way == "two":
            ignoring = torch.where(mask > 0, targets, -100)
            return word_loss(logits, targets) + word_loss(logits, ignoring)
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.mean() if self.way == "plain" else (losses * mask.flatten()).sum() / mask.sum()


def masked_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(4, 6)
    mask[0, 1:] = mask[2, 3:] = 0
    targets = torch.randint(0, 5, (4, 6), generator=generator)
    return {"x": torch.randn(4, 6, 4, generator=generator), "targets": targets, "mask": mask}


def masked_run(way: str, **options: object) -> tuple[AppliedModule, float]:
    """A run of two microbatches, and the loss of one process."""
    torch.manual_seed(0)
    model, batch = Masked(way), masked_batch()
    strategy = {"dp": 1, "micro_batch_size": 2, "zero": 0, "recompute": "none"}
    question = {"cluster": "cpu:1", "global_batch_size": 4, "precision": "fp32", "compares": False, "target": "torch"}
    plan = phaze.evaluate(model, batch, strategy=strategy, **question).plan
    expected = float(model(**batch).detach())
    return plan.apply(model, **options), expected


def test_a_masked_mean_that_the_model_takes_itself_is_weighted_as_it_is_said_or_refused(alone: None) -> None:
    run, expected = masked_run("mask", loss_weight=lambda mask, **_: mask.sum())
    assert float(run.backward(**masked_batch())) == pytest.approx(expected, rel=1e-6)
    assert float(run.evaluate(**masked_batch())) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(PlanError, match=r"a masked or weighted mean that the model takes itself.*Pass loss_weight="):
        masked_run("mask")[0].backward(**masked_batch())
    averaged, _ = masked_run("mask", loss_weight="samples")
    assert float(averaged.backward(**masked_batch())) != pytest.approx(expected, rel=1e-3)
    plain, expected = masked_run("plain")
    assert float(plain.backward(**masked_batch())) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(PlanError, match="loss_weight is 'mean'; expected 'samples', 'sum', a function"):
        masked_run("plain", loss_weight="mean")


def test_a_loss_of_means_over_different_targets_is_refused(alone: None) -> None:
    with pytest.raises(PlanError, match=r"adds 2 means of cross entropies over different targets \(24, 16 count"):
        masked_run("two")[0].backward(**masked_batch())


def test_means_with_weights_of_classes_and_losses_that_are_sums_equal_one_process(alone: None) -> None:
    plan, batch, weights = planned("headless", 1, {"dp": 1}), batch_of("headless"), torch.linspace(0.5, 2, 96)
    batch["targets"][:3, 2:] = -1
    question = {"weight": weights, "ignore_index": -1}

    def loss(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        flat = logits.flatten(0, 1), targets.flatten()
        return torch.nn.functional.cross_entropy(*flat, **question, reduction=reduction)

    for reduction, options in (("mean", {}), ("sum", {"loss_weight": "sum"})):
        model = build_model("headless")
        loss(model(batch["tokens"]), batch["targets"], reduction).backward()
        applied = build_model("headless")
        run = plan.apply(applied, loss_fn=partial(loss, reduction=reduction), **options)
        run.backward(**run.share(batch))
        assert torch.allclose(applied.head.weight.grad.full_tensor(), model.head.weight.grad, atol=1e-6)
    unsaid = plan.apply(build_model("headless"), loss_fn=partial(loss, reduction="sum"))
    with pytest.raises(PlanError, match=r"the loss \(.*\) is a sum over what a microbatch has. Pass loss_weight='sum'"):
        unsaid.backward(**unsaid.share(batch))


def scored_plan(model: Scored, **strategy: object) -> phaze.Plan:
    question = {"cluster": "cpu:1", "global_batch_size": 8, "precision": "fp32", "compares": False, "target": "torch"}
    settled = {"dp": 1, "micro_batch_size": 2, "zero": 0, "recompute": "none", **strategy}
    return phaze.evaluate(model, scored_batch(), strategy=settled, gap=0.9, **question).plan


def test_a_loss_that_mixes_samples_is_refused_unless_the_batch_is_run_at_once_or_it_is_said_how_parts_count(
    alone: None,
) -> None:
    plan = scored_plan(Scored(MIXING["contrastive"]))
    with pytest.raises(PlanError, match=r"does not treat samples apart: `mm` compares samples .*strategy dp=1"):
        plan.apply(Scored(MIXING["contrastive"]))
    batch, model = scored_batch(), Scored(MIXING["contrastive"])
    with torch.no_grad():
        parts = [float(model(**{name: value[i : i + 2] for name, value in batch.items()})) for i in range(0, 8, 2)]
        at_once = float(model(**batch))
    run = plan.apply(Scored(MIXING["contrastive"]), loss_weight="samples")
    assert float(run.backward(**batch)) == pytest.approx(sum(parts) / 4, rel=1e-5)
    whole = scored_plan(Scored(MIXING["contrastive"]), micro_batch_size=8).apply(Scored(MIXING["contrastive"]))
    assert float(whole.backward(**batch)) == pytest.approx(at_once, rel=1e-6)


@pytest.mark.parametrize("name", ["preferred_of_joined_pairs", "distilled", "z_loss", "last_token_of_each"])
def test_losses_of_samples_by_themselves_equal_one_process_in_microbatches(alone: None, name: str) -> None:
    model, batch = Scored(APART[name]), scored_batch()
    expected = model(**batch)
    expected.backward()
    run = scored_plan(Scored(APART[name])).apply(Scored(APART[name]))
    assert float(run.backward(**batch)) == pytest.approx(float(expected.detach()), rel=1e-6)
    for parameter, alike in zip(run.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.to_local(), alike.grad, rtol=1e-4, atol=1e-6)


def test_packed_sequences_are_kept_apart_as_in_one_process_or_refused(alone: None) -> None:
    model, batch = build_model("llama"), batch_of("llama")
    batch["position_ids"] = torch.cat([torch.arange(10), torch.arange(6)]).expand(8, 16).contiguous()
    with torch.no_grad():
        expected = float(model(**batch).loss)
        assert float(model(**batch, attention_mask=torch.ones(8, 16, dtype=torch.int64)).loss) != expected
    plan = planned("llama", 1, {"dp": 1})
    run = plan.apply(model)
    assert float(run.backward(**batch)) == pytest.approx(expected, rel=1e-6)
    cached = planned("llama", 1, {"dp": 1}).apply(build_model("llama-cached"))
    with pytest.raises(PlanError, match=r"position_ids begin anew .* Set model.config.use_cache = False"):
        cached.backward(**batch)
    cached.backward(**{**batch, "position_ids": torch.arange(16).expand(8, 16)})


def test_several_optimizers_step_together_and_keep_their_own_parameters(alone: None) -> None:
    plan, model = planned("uncut", 1, {"dp": 1}), build_model("uncut")
    inner, outer = model.early.qkv.weight, model.words.weight
    before = outer.detach().clone()
    optimizers = [torch.optim.AdamW([inner], lr=0.1), torch.optim.SGD([("words.weight", outer)], lr=0.0)]
    run = plan.apply(model, optimizer=optimizers)
    run.step(**run.share(batch_of("uncut")))
    assert [group["params"] for group in run.optimizer.param_groups] == [[model.early.qkv.weight], [model.words.weight]]
    assert set(run.optimizer.state) == {model.early.qkv.weight}
    assert torch.equal(model.words.weight.full_tensor(), before)


def test_a_function_that_makes_an_optimizer_finds_parameters_where_all_are_frozen(alone: None) -> None:
    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for value in parameters if value.requires_grad], lr=0.1)

    run = planned("uncut", 1, {"dp": 1}).apply(build_model("uncut").requires_grad_(False), optimizer=make)
    assert [(group["params"], group["lr"]) for group in run.optimizer.param_groups] == [([], 0.1)]
    run.optimizer.step()


def test_optimizers_that_cannot_be_those_of_the_model_are_refused(alone: None) -> None:
    plan, model = planned("uncut", 1, {"dp": 1}), build_model("uncut")
    with pytest.raises(PlanError, match="optimizer 0 has a parameter that is none of the model's"):
        plan.apply(model, optimizer=torch.optim.SGD(build_model("uncut").parameters()))
    twice = [torch.optim.SGD([model.words.weight]), torch.optim.SGD([model.words.weight])]
    with pytest.raises(PlanError, match="optimizer 1 has a parameter that another optimizer has, too"):
        plan.apply(model, optimizer=twice)
    stepped = torch.optim.AdamW(model.parameters())
    model(**batch_of("uncut")).backward()
    stepped.step()
    with pytest.raises(PlanError, match="has made steps already"):
        plan.apply(model, optimizer=stepped)
    with pytest.raises(PlanError, match="expected a function from parameters to a torch optimizer, or one or several"):
        plan.apply(build_model("uncut"), optimizer="adam")


def test_what_arranging_would_lose_is_refused_by_name(data_parallel: phaze.Plan) -> None:
    split = planned("uncut", 2, {"tp": 2})
    model = build_model("uncut")
    model.late.up.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(PlanError, match=r"parameter 'late.up.weight' has a hook .* register it after `plan.apply`"):
        data_parallel.apply(model)
    model = build_model("uncut")
    model.early.register_full_backward_hook(lambda *_: None)
    with pytest.raises(PlanError, match="module 'early' has a backward hook"):
        split.apply(model)
    model = build_model("uncut")
    model.head.bfloat16()
    with pytest.raises(PlanError, match=r"several types \('words.weight' is torch.float32, 'head.weight' is"):
        data_parallel.apply(model)
    model = build_model("uncut")
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    with pytest.raises(PlanError, match=r"parameter 'scale' is a scalar, .* a tensor of one element"):
        data_parallel.apply(model)


def test_losses_of_routers_that_are_taken_in_parts_are_said(alone: None, data_parallel: phaze.Plan) -> None:
    model = build_model("uncut")
    model.config = SimpleNamespace(output_router_logits=True, router_aux_loss_coef=0.01)
    with (
        pytest.warns(UserWarning, match="the loss of routers .* of each of 2 copies and 2 microbatches by itself"),
        pytest.raises(PlanError, match="takes 2 processes"),
    ):
        data_parallel.apply(model)


def test_compiled_blocks_run_uncompiled_where_tensors_are_split(alone: None) -> None:
    model = build_model("uncut")
    model.early.compile(backend="eager")
    with (
        pytest.warns(UserWarning, match="'early' and 0 other modules run uncompiled"),
        pytest.raises(PlanError, match="takes 2 processes"),
    ):
        planned("uncut", 2, {"tp": 2}).apply(model)
    assert model.early._compiled_call_impl is None


def test_a_compiled_model_is_planned_and_applied_as_what_it_wraps_and_says_so(alone: None) -> None:
    model, batch = torch.compile(build_model("uncut"), backend="eager"), batch_of("uncut")
    assert read_model(model, batch, {}).module is model._orig_mod
    with pytest.warns(UserWarning, match=r"runs uncompiled: .* Compile its blocks instead"):
        run = planned("uncut", 1, {"dp": 1}).apply(model)
    assert run.module is model._orig_mod


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_block_trains_as_it_does_uncompiled(alone: None) -> None:
    losses = []
    for is_compiled in (False, True):
        model = build_model("uncut")
        if is_compiled:
            model.early.compile(backend="eager")
        run = planned("uncut", 1, {"dp": 1}).apply(model, optimizer=lambda given: torch.optim.SGD(given, lr=0.1))
        losses.append([float(run.step(**batch_of("uncut"))) for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][1] < losses[0][0]


def test_gradients_of_several_batches_are_added_and_scaled(alone: None) -> None:
    run = planned("uncut", 1, {"dp": 1}).apply(build_model("uncut"))
    run.backward(**batch_of("uncut"))
    expected = [parameter.grad.clone() for parameter in run.module.parameters()]
    run.backward(**batch_of("uncut"))
    run.scale_gradients(1 / 2)
    for parameter, gradient in zip(run.module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.to_local(), gradient.to_local())


def test_autocast_around_a_step_is_that_of_one_process(alone: None) -> None:
    run, model, batch = (
        planned("uncut", 1, {"dp": 1}).apply(build_model("uncut")),
        build_model("uncut"),
        batch_of("uncut"),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = run.backward(**batch), model(**batch)
    with torch.no_grad():
        assert float(found) == pytest.approx(float(expected), rel=1e-4)
        assert abs(float(expected) - float(model(**batch))) > 1e-6 * float(expected)


def test_gradient_checkpointing_of_a_model_is_left_to_the_plan_which_says_so(alone: None) -> None:
    model = build_model("uncut")
    model.early.gradient_checkpointing = True  # as Hugging Face's models say it of their layers
    with pytest.warns(UserWarning, match=r"of Block is switched off: the plan says .* \(recompute none\)"):
        planned("uncut", 1, {"dp": 1}).apply(model)
    assert not model.early.gradient_checkpointing


def test_measured_steps_are_what_calibration_reads(alone: None, tmp_path: Path) -> None:
    run, table = planned("uncut", 1, {"dp": 1}).apply(build_model("uncut")), tmp_path / "measured.csv"
    profile = run.profile(run.share(batch_of("uncut")), steps=2)
    assert "memory  not told by this device" in str(profile)
    assert profile.sent_bytes == {}
    for _ in range(2):
        profile.write_measured(table, model="gpt2", cluster="cpu:1")
    measured = read_steps(table)
    assert [each.seconds for each in measured] == pytest.approx([profile.seconds] * 2)
    assert measured[0].strategy["micro_batch_size"] == 4
    with pytest.raises(PlanError, match="steps is 0; expected at least 1"):
        run.profile(run.share(batch_of("uncut")), steps=0)


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
