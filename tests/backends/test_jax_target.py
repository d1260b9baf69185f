"""JAX as a target: what it applies, what it refuses and why, and what is written for other tools."""

import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax_training as models
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import Mesh
from jax_models import adam_state, adam_step, gpt_parameters, tokens
from repository import ROOT

import phaze
from phaze.backends.jax import EqualLayerStages
from phaze.errors import PlanError, QuestionError
from phaze.plan.plan import Plan, PlanStatus
from phaze.verify.plan_checks import check_plan

QUESTION: dict[str, Any] = {"global_batch_size": 16, "precision": "fp32"}
FIXED = {"schedule": "none", "chunks": 1, "recompute": "none", "pp": 1, "zero": 0}


def small(*, stacked: bool = False) -> tuple[Any, tuple[Any, Any]]:
    loss = models.scanned_loss if stacked else models.loss
    return loss, (models.weights(models.shapes(stacked=stacked)), models.batch(16))


@cache
def plan_of(dp: int, tp: int, stacked: bool = False, zero: int = 0) -> Plan:
    loss, inputs = small(stacked=stacked)
    strategy = {**FIXED, "dp": dp, "tp": tp, "zero": zero, "micro_batch_size": 16 // dp}
    if tp > 1:
        strategy["sequence_parallel"] = False
    return phaze.evaluate(loss, inputs, cluster=f"cpu:{dp * tp}", strategy=strategy, compares=False, **QUESTION).plan


def test_a_plan_for_one_device_trains_on_it() -> None:
    loss, inputs = small()
    run = plan_of(1, 1).apply(loss, inputs=inputs)
    assert dict(run.mesh.shape) == {"pp": 1, "dp": 1, "tp": 1}
    value, gradients = run.gradients(run.start(inputs[0]), inputs[1])
    expected = jax.jit(jax.value_and_grad(loss))(*inputs)
    assert value == pytest.approx(float(expected[0]), rel=1e-5)
    for gradient, expected_gradient in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-5 * float(np.abs(expected_gradient).max()))


def test_too_few_devices_are_counted() -> None:
    loss, inputs = small()
    with pytest.raises(PlanError, match=r"takes 8 devices \(dp=2, pp=1, tp=4\); JAX sees 1 of kind cpu"):
        plan_of(2, 4).apply(loss, inputs=inputs)


def test_what_is_no_mesh_is_refused() -> None:
    loss, inputs = small()
    with pytest.raises(PlanError, match=r"mesh is a str; expected a jax.sharding.Mesh with axes dp=1"):
        plan_of(1, 1).apply(loss, "a mesh", inputs=inputs)


def test_a_mesh_of_another_size_is_refused() -> None:
    loss, inputs = small()
    with pytest.raises(PlanError, match=r"mesh has the sizes dp=1, tp=1; the plan needs dp=2, pp=1, tp=4"):
        plan_of(2, 4).apply(loss, Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("dp", "tp")), inputs=inputs)


def test_another_model_is_refused_with_what_differs() -> None:
    loss, _ = small()
    other = (models.weights(models.shapes(layers=1)), models.batch(16))
    with pytest.raises(PlanError, match=r"not the one that was planned:\n  model.parameter_count: \d+ in the plan"):
        plan_of(1, 1).apply(loss, inputs=other)


def test_other_parameters_and_batches_are_refused_with_what_differs() -> None:
    loss, inputs = small()
    run = plan_of(1, 1).apply(loss, inputs=inputs)
    with pytest.raises(PlanError, match=r"params.embed has the shape \[61, 32\]; planned was \[64, 32\]"):
        run.start(models.weights(models.shapes(words=61)))
    with pytest.raises(PlanError, match="the parameters have the structure"):
        run.start(models.weights(models.shapes(layers=1)))
    with pytest.raises(PlanError, match=r"an array of shape \[4, 16\]; the plan's is \[16, 16\]"):
        run.step(run.start(inputs[0]), models.batch(4))
    with pytest.raises(PlanError, match=r"state is a dict; expected what start\(parameters\) or a step returned"):
        run.step(inputs[0], inputs[1])


def test_what_cannot_be_arranged_says_what_can() -> None:
    loss, inputs = small()
    plan = plan_of(1, 1)
    for arguments, message in (
        ({}, "pass inputs= as optimize took them"),
        ({"inputs": {"params": 1}}, "inputs is a dict; expected a tuple"),
        ({"inputs": inputs, "loss_fn": loss}, "loss_fn and targets go with modules of flax"),
        (
            {"inputs": inputs, "batch": 1},
            "no option 'batch' for target 'jax'; expected some of inputs, optimizer, takes_mean",
        ),
        ({"inputs": inputs, "optimizer": "adam"}, "expected an object with init and update"),
    ):
        with pytest.raises(PlanError, match=message):
            plan.apply(loss, **arguments)
    with pytest.raises(PlanError, match="Lowered cannot be arranged on a mesh; expected a loss function"):
        plan.apply(jax.jit(loss).lower(*inputs), inputs=inputs)


def test_a_whole_train_step_is_arranged_by_its_shapes() -> None:
    params = gpt_parameters(1)
    inputs = (params, adam_state(params), tokens(2))
    plan = phaze.optimize(
        adam_step, inputs, cluster="cpu:1", global_batch_size=2, micro_batch_size=(2,), precision="fp32"
    )
    run = plan.apply(adam_step, inputs=inputs)
    assert jax.tree.structure(run.specs) == jax.tree.structure(inputs)
    with pytest.raises(PlanError, match="has its own optimizer"):
        plan.apply(adam_step, inputs=inputs, optimizer=object())
    with pytest.raises(PlanError, match="more than a scalar loss, and no new state either"):
        plan.apply(lambda params, state, batch: (batch["ids"], batch["ids"]), inputs=inputs)


def test_metrics_beside_a_loss_are_left_out_of_its_steps_and_that_is_said() -> None:
    loss, inputs = small()

    @functools.wraps(loss)
    def with_metrics(*given: Any) -> tuple[Any, dict[str, Any]]:
        value = loss(*given)
        return value, {"loss": value}

    plan = plan_of(1, 1)
    with pytest.warns(UserWarning, match=r"something beside it \(has_aux\).*Plan and apply a whole train step"):
        run = plan.apply(with_metrics, inputs=inputs)
    _, value = run.step(run.start(inputs[0]), *inputs[1:])
    assert value == pytest.approx(float(loss(*inputs)), rel=1e-6)


def regression(params: Any, key: Any, mask: Any, x: Any, y: Any, is_noisy: bool) -> Any:
    """A loss with a key, an array without samples before those that have them, and a flag."""
    hidden = jax.nn.relu(x @ params["up"]) @ mask
    if is_noisy:
        hidden = hidden * jax.random.bernoulli(key, 0.5, hidden.shape)
    return ((hidden @ params["down"] - y) ** 2).mean()


def test_flags_are_fixed_and_keys_and_other_arrays_are_whole() -> None:
    random = np.random.default_rng(0)
    params = {name: random.standard_normal(size).astype("f") for name, size in {"up": (8, 6), "down": (6, 4)}.items()}
    x, y, key = (*(random.standard_normal(size).astype("f") for size in ((4, 8), (4, 4))), jax.random.key(1))
    inputs = (params, key, np.eye(6, dtype="f"), x, y, True)
    strategy = {**FIXED, "dp": 1, "tp": 1, "micro_batch_size": 2}
    question = {"global_batch_size": 4, "precision": "fp32", "compares": False}
    plan = phaze.evaluate(regression, inputs, cluster="cpu:1", strategy=strategy, **question).plan
    run = plan.apply(regression, inputs=inputs)
    state = run.start(lambda: jax.tree.map(jnp.asarray, params))
    loss, _ = run.gradients(state, *inputs[1:])
    assert loss == pytest.approx(float(regression(*inputs)), rel=1e-5)
    with pytest.raises(PlanError, match="the batch has False where the inputs of the plan had True"):
        run.step(state, *inputs[1:-1], False)


def test_a_loss_that_is_no_mean_is_refused_unless_its_mean_is_wanted() -> None:
    def root(params: Any, x: Any) -> Any:
        return jnp.sqrt(((x @ params["w"]) ** 2).mean())

    inputs = ({"w": np.ones((8, 4), "f")}, np.ones((4, 8), "f"))
    strategy = {**FIXED, "dp": 1, "tp": 1, "micro_batch_size": 2}
    question = {"global_batch_size": 4, "precision": "fp32", "compares": False}
    plan = phaze.evaluate(root, inputs, cluster="cpu:1", strategy=strategy, **question).plan
    with pytest.raises(PlanError, match="no mean or sum over samples: it takes sqrt of a sum"):
        plan.apply(root, inputs=inputs)
    run = plan.apply(root, inputs=inputs, takes_mean=True)
    assert run.step(run.start(inputs[0]), inputs[1])[1] == pytest.approx(float(root(*inputs)))


class NnxLoss(nnx.Module):
    """A loss in nnx."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x: Any, y: Any) -> Any:
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return ((x - y) ** 2).mean()


def test_an_nnx_module_trains_as_it_does_alone() -> None:
    model, inputs = NnxLoss(nnx.Rngs(0)), (np.ones((4, 8), "f"), np.zeros((4, 8), "f"))
    strategy = {**FIXED, "dp": 1, "tp": 1, "micro_batch_size": 2}
    question = {"global_batch_size": 4, "precision": "fp32", "compares": False}
    plan = phaze.evaluate(model, inputs, cluster="cpu:1", strategy=strategy, **question).plan
    run = plan.apply(model, inputs=inputs)
    state = run.start(nnx.state(model, nnx.Param))
    _, gradients = run.gradients(state, *inputs)
    expected = nnx.grad(lambda module: module(*inputs))(model)
    for gradient, expected_gradient in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
    nnx.update(model, run.parameters(run.step(state, *inputs)[0]))
    model.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    with pytest.raises(PlanError, match=r"NnxLoss keeps dropout.* beside its parameters"):
        plan.apply(model, inputs=inputs)


class LinenNoise(linen.Module):
    """A loss in linen with statistics of batches, or with dropout."""

    has_statistics: bool

    @linen.compact
    def __call__(self, x: Any, y: Any) -> Any:
        hidden = linen.Dense(8)(x)
        if self.has_statistics:
            hidden = linen.BatchNorm(use_running_average=False)(hidden)
        else:
            hidden = linen.Dropout(0.5, deterministic=False)(hidden)
        return ((hidden - y) ** 2).mean()


def test_linen_modules_with_other_state_are_told_what_to_pass_instead() -> None:
    inputs = (np.ones((4, 8), "f"), np.zeros((4, 8), "f"))
    question = {"cluster": "cpu:1", "global_batch_size": 4, "precision": "fp32"}
    for has_statistics, message in (
        (True, "LinenNoise keeps batch_stats beside its parameters.* pass a loss function"),
        (False, r"LinenNoise draws random numbers \(dropout\).* a loss function that takes a key"),
    ):
        model = LinenNoise(has_statistics)
        plan = phaze.optimize(model, inputs, **question)
        with pytest.raises(PlanError, match=message):
            plan.apply(model, inputs=inputs)


def test_a_sequence_that_tp_does_not_divide_is_not_split() -> None:
    loss, (weights, batch) = small()
    inputs = (weights, {name: rows[:, :15] for name, rows in batch.items()})
    strategy = {**FIXED, "dp": 1, "tp": 4, "micro_batch_size": 16}
    question = {**QUESTION, "cluster": "cpu:4@paper", "compares": False}
    assert not phaze.evaluate(loss, inputs, strategy=strategy, **question).plan.strategy.sequence_parallel
    with pytest.raises(PlanError, match="a sequence of 15 cannot be split evenly 4 ways, as target jax does it"):
        phaze.evaluate(loss, inputs, strategy={**strategy, "sequence_parallel": True}, **question)


def test_a_plan_with_stages_holds_equal_parts_of_both_ends_and_is_verified() -> None:
    loss, inputs = small(stacked=True)
    strategy = {**FIXED, "schedule": "gpipe", "pp": 2, "dp": 1, "tp": 1, "micro_batch_size": 4}
    question = {**QUESTION, "cluster": "cpu:2", "compares": False}
    plan = phaze.evaluate(loss, inputs, strategy=strategy, **question).plan
    held = [[stage.memory_bytes[item] for item in ("parameters", "gradients", "optimizer")] for stage in plan.stages]
    assert held[0] == held[1]
    assert all(finding.holds for finding in check_plan(plan, loss, inputs))


def test_a_plan_with_stages_of_experts_is_verified() -> None:
    loss = functools.partial(models.mixture_loss, stacked=False, is_balanced=False)
    inputs = (models.weights(models.mixture_shapes(stacked=False)), models.batch(16))
    strategy = {**FIXED, "schedule": "gpipe", "pp": 2, "dp": 2, "ep": 2, "tp": 1, "zero": 1, "micro_batch_size": 4}
    question = {**QUESTION, "cluster": "cpu:4", "compares": False}
    plan = phaze.evaluate(loss, inputs, strategy=strategy, **question).plan
    assert plan.strategy.ep == 2
    assert all(finding.holds for finding in check_plan(plan, loss, inputs))


def test_plans_that_cannot_run_are_refused() -> None:
    loss, inputs = small()
    plan = plan_of(1, 1)
    with pytest.raises(PlanError, match="does not fit its devices"):
        replace(plan, status=PlanStatus.DOES_NOT_FIT).apply(loss, inputs=inputs)
    with pytest.raises(PlanError, match="analysis only"):
        replace(plan, question=replace(plan.question, target=None)).apply(loss, inputs=inputs)


def test_without_jax_the_extra_is_named(tmp_path: Path) -> None:
    plan_of(1, 1).save(tmp_path / "plan.json")
    program = (
        "import sys; sys.modules['jax'] = None\n"
        "import phaze; from phaze.errors import PlanError\n"
        "try: phaze.load_plan('plan.json').apply(print)\n"
        "except PlanError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "target 'jax' needs jax" in done.stdout
    assert "pip install 'phaze-plugin[jax]'" in done.stdout


def test_only_equal_layers_get_pipelines() -> None:
    plain, inputs = small()
    scanned, stacked_inputs = small(stacked=True)
    builder = EqualLayerStages()
    assert builder.accepts(phaze.import_graph(plain, inputs))
    assert builder.accepts(phaze.import_graph(scanned, stacked_inputs))
    assert not any("one pipeline stage only" in note for note in plan_of(1, 1).provenance.notes)


def test_a_penalty_on_weights_is_planned_in_one_stage() -> None:
    plain, inputs = small()

    def penalized(params: Any, batch: Any) -> jax.Array:
        return plain(params, batch) + 1e-4 * sum((leaf**2).sum() for leaf in jax.tree.leaves(params))

    plan = phaze.optimize(penalized, inputs, cluster="cpu:2", micro_batch_size=8, **QUESTION)
    assert (plan.strategy.dp, plan.strategy.tp, plan.strategy.pp) == (2, 1, 1)
    assert any("one pipeline stage only" in note for note in plan.provenance.notes)


def whole_step(params: Any, batch: Any) -> Any:
    loss, gradients = jax.value_and_grad(jax.checkpoint(models.loss))(params, batch)
    return jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, params, gradients), loss


def test_a_plan_of_a_whole_step_has_what_a_step_does() -> None:
    _, inputs = small()
    graph = phaze.import_graph(whole_step, inputs)
    question = {"cluster": "cpu:4", "precision": "fp32", "global_batch_size": 512, "target": "jax", "tp": 1}
    plan = phaze.optimize(graph, **question)
    strategy = plan.strategy
    assert strategy.dp * strategy.micro_batch_size == 512
    assert (strategy.pp, set(strategy.recompute)) == (1, {"none"})
    assert any("a whole train step runs as it is written" in note for note in plan.provenance.notes)
    assert any("jax.checkpoint in the step runs as it is written" in note for note in graph.notes)
    assert all(finding.holds for finding in check_plan(plan, graph))
    for fixed, words in {
        ("dp", 4, "micro_batch_size", 2): "64 microbatches a copy .it runs one, of 128 samples",
        ("recompute", "full"): "recompute full .it runs none",
        ("pp", 2): "a pipeline with schedule of any kind .it runs one stage only",
    }.items():
        strategy_asked = dict(zip(fixed[::2], fixed[1::2], strict=True))
        with pytest.raises(QuestionError, match=words):
            phaze.evaluate(graph, strategy=strategy_asked, compares=False, **question)


def test_a_plan_with_microbatches_is_not_applied_to_a_whole_step() -> None:
    loss, inputs = small()
    strategy = {**FIXED, "dp": 1, "tp": 1, "micro_batch_size": 4, "recompute": "full"}
    plan = phaze.evaluate(loss, inputs, cluster="cpu:1", strategy=strategy, compares=False, **QUESTION).plan
    with pytest.raises(PlanError, match="the plan has 4 microbatches for each copy, recompute full, and a whole train"):
        plan.apply(whole_step, inputs=inputs)


def test_a_layer_that_cannot_be_split_is_named() -> None:
    loss, inputs = small()
    offer = "The nearest tp that runs is 8"
    with pytest.raises(PlanError, match=f"cannot be sliced as asked. layer 'params.embed', op 'gather'.*{offer}"):
        phaze.evaluate(
            loss,
            inputs,
            cluster="cpu:48",
            strategy={**FIXED, "dp": 1, "tp": 48, "micro_batch_size": 16},
            compares=False,
            tp=(48,),
            **QUESTION,
        )


def test_stablehlo_carries_the_mesh_and_a_sharding_for_every_argument() -> None:
    loss, inputs = small(stacked=True)
    plan = plan_of(2, 4, stacked=True)
    lowered = jax.jit(jax.value_and_grad(loss), keep_unused=True).lower(*inputs)
    text = plan.export("stablehlo", lowered)["model.mlir"]
    assert 'sdy.mesh @mesh = <["dp"=2, "tp"=4]>' in text
    head = next(line for line in text.splitlines() if "func.func public @main" in line)
    assert head.partition("->")[0].count("sdy.sharding = ") == len(jax.tree.leaves(inputs))
    assert 'tensor<2x32x8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {"tp"}, {}]>}' in head
    assert 'tensor<16x16xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"dp"}, {}]>}' in head
    with pytest.raises(PlanError, match="stablehlo annotates a lowered function, and got NoneType"):
        plan.export("stablehlo")


def test_annotated_modules_run_on_eight_devices_with_the_plan_s_shards(tmp_path: Path) -> None:
    loss, inputs = small(stacked=True)
    lowered = jax.jit(jax.value_and_grad(loss), keep_unused=True).lower(*inputs)
    plan = plan_of(2, 4, stacked=True, zero=3)
    written = plan.export("stablehlo", lowered)
    assert sorted(written) == ["model.mlir", "model_gspmd.mlir"]
    for name, text in plan.export("hlo", lowered).items():
        (tmp_path / name).write_text(text)
        assert "num_partitions=8" in text.splitlines()[0]
        assert ("xla.sdy.sharding" in text) == (name == "model.hlo.txt")
    for name, text in written.items():
        (tmp_path / name).write_text(text)
        assert "mhlo.num_partitions = 8" in text
        head = next(line for line in text.splitlines() if "func.func public @main" in line)
        results = head.partition("->")[2]
        assert results.count("sharding = ") == 1 + len(jax.tree.leaves(inputs[0]))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(inputs)]
    np.savez(tmp_path / "arguments.npz", *leaves)
    script = ROOT / "tests" / "support" / "run_annotated_module.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads((tmp_path / "results.json").read_text())
    expected = float(loss(*inputs))
    assert sorted(measured) == ["model.hlo.txt", "model.mlir", "model_gspmd.hlo.txt", "model_gspmd.mlir"]
    for found in measured.values():
        assert found["losses"] == pytest.approx([expected] * 8, rel=1e-5)
        assert found["shapes"] == measured["model.mlir"]["shapes"]
    whole = [leaf.size for leaf in leaves]
    held = [int(np.prod(shape)) for shape in measured["model.mlir"]["shapes"]]
    assert min(part / size for part, size in zip(held, whole, strict=True)) == 1 / 8


def test_pjit_writes_specs_as_data_and_a_program() -> None:
    plan, (params, _) = plan_of(2, 4, stacked=True), small(stacked=True)[1]
    written = plan.export("pjit")
    assert sorted(written) == ["README.md", "sharding.py", "train_step.py"]
    assert "    'layers.q': P(None, None, 'tp')," in written["sharding.py"].splitlines()
    assert "STATE = PARAMETERS" in written["sharding.py"].splitlines()
    assert "phaze" not in written["train_step.py"].lower()
    named = plan_of(2, 4, stacked=True, zero=1).export("pjit", params)["sharding.py"].splitlines()
    assert "    'layers.norm_1.scale': P(None, None)," in named
    assert "    'layers.norm_1.scale': P(None, 'dp')," in named  # the state of the same parameter
    assert "    'layers.down_bias': P(None, ('tp', 'dp'))," in named
    with pytest.raises(PlanError, match=r"pass your parameters .*plan.export\('pjit', params\)"):
        plan.export("pjit", models.scanned_loss)


@cache
def fused_plan() -> Plan:
    inputs = (models.weights(models.fused_shapes()), models.batch(16))
    strategy = {**FIXED, "dp": 4, "shard": 2, "tp": 2, "zero": 3, "micro_batch_size": 2}
    question = {**QUESTION, "cluster": "cpu:8", "compares": False}
    return phaze.evaluate(models.fused_loss, inputs, strategy=strategy, **question).plan


def test_fused_projections_are_written_as_blocks_and_the_readme_names_them() -> None:
    written = fused_plan().export("pjit")
    assert "BATCH = P(('dp', 'shard'))" in written["sharding.py"].splitlines()
    assert "    'layers.0.qkv': P(None, 'tp')," in written["sharding.py"].splitlines()
    assert (
        "every one of several fused parts, or two dimensions, of layers.0.gate_up, layers.0.qkv" in written["README.md"]
    )


def test_the_exported_program_runs_where_phaze_cannot_be_imported(tmp_path: Path) -> None:
    params = small(stacked=True)[1][0]
    plans = {"scanned": (plan_of(2, 4, stacked=True, zero=1), params), "fused": (fused_plan(), None)}
    for kind, (plan, model) in plans.items():
        (tmp_path / kind).mkdir()
        for name, text in plan.export("pjit", model).items():
            (tmp_path / kind / name).write_text(text)
    script = ROOT / "tests" / "support" / "run_exported_step.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for measured in json.loads((tmp_path / "found.json").read_text()).values():
        assert measured["losses"] == pytest.approx(measured["expected"], rel=1e-5)
        assert measured["devices"] == 8
        assert measured["differing"] == []
