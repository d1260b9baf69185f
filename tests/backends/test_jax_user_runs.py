"""Plans meet what JAX users have: whole optax steps, jits of their own, meshes with other names, callable modules."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax_dividing as small
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from repository import ROOT

import phaze
from phaze.backends.jax.parameter_storage import choose_storage
from phaze.errors import PlanError
from phaze.plan.plan import SplitDim
from phaze.shard import Layout, Split

SCRIPT = ROOT / "tests" / "support" / "jax_user_runs.py"
FLAGS = f"--xla_force_host_platform_device_count=8 {os.environ['XLA_FLAGS']}"
ENVIRONMENT = {"XLA_FLAGS": FLAGS, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "tests")}
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All cases, run in one process with eight devices."""
    folder: Path = tmp_path_factory.mktemp("jax")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=os.environ | ENVIRONMENT,
        cwd=SCRIPT.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    measured = {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}
    return {**measured, "partitioner": {"words": done.stderr}}


def test_a_whole_optax_step_trains_as_on_one_device(results: Results) -> None:
    measured = results["whole step"]
    assert measured["losses"] == pytest.approx(measured["expected"], rel=1e-6)
    assert measured["error"] < 1e-6
    assert measured["losses"][-1] < measured["losses"][0]
    assert measured["steps"] == 3


def test_a_whole_step_is_compiled_once_with_its_state_as_planned(results: Results) -> None:
    measured = results["whole step"]
    assert measured["compilations"] == 1
    assert measured["parameter"] == "P(None, 'tp')"
    assert measured["moment"] == "P('dp', 'tp')", "ZeRO-1 shards the state of the optimizer only"


def test_a_step_of_nnx_changes_its_module_and_optimizer_as_on_one_device(results: Results) -> None:
    measured = results["nnx step"]
    assert measured["losses"] == pytest.approx(measured["expected"], rel=1e-6)
    assert measured["error"] < 1e-6
    assert measured["steps"] == len(measured["losses"])
    assert measured["parameter"] == "P(None, 'tp')"


def test_a_module_without_a_loss_trains_with_one_beside_it_in_stages_of_its_list_of_blocks(results: Results) -> None:
    measured = results["without a loss"]
    assert measured["losses"] == pytest.approx(measured["expected"], rel=1e-6)
    assert measured["error"] < 1e-6, "also after a checkpoint in the user's shapes"


def test_statistics_of_batches_dropout_and_masks_in_a_whole_step_are_those_of_one_device(results: Results) -> None:
    measured = results["statistics"]
    assert measured["losses"] == pytest.approx(measured["expected"], rel=1e-6)
    assert measured["error"] < 1e-6


def test_specs_fit_the_users_own_trees_in_a_jit_of_their_own(results: Results) -> None:
    measured = results["hand-written"]
    assert measured["error"] < 1e-6
    assert measured["batch"] == "P('dp',)"
    assert measured["activations"] == "P('dp', None, None)"


def test_an_applied_plan_lays_out_fused_projections_in_the_users_shapes(results: Results) -> None:
    measured = results["hand-written"]
    assert measured["projection"] == "P(None, 'tp')"
    assert measured["placed_error"] == 0
    assert measured["specs_are_equal"]


def test_a_mesh_may_have_the_users_names_and_order(results: Results) -> None:
    measured = results["own mesh"]
    assert measured["loss"] == pytest.approx(measured["expected"], rel=1e-6)
    assert measured["spec"] == "P(None, 'model')"


def test_a_callable_module_with_leaves_that_are_no_arrays_trains_on_rows_that_count(results: Results) -> None:
    measured = results["module"]
    assert measured["loss"] == pytest.approx(measured["expected"], rel=1e-6)
    assert measured["error"] < 1e-6
    assert measured["is_callable"]


def test_a_checkpoint_of_one_plan_is_resumed_by_another(results: Results) -> None:
    measured = results["checkpoint"]
    assert measured["loss"] == pytest.approx(measured["expected"], rel=1e-6)
    assert measured["error"] < 1e-6, "weight decay of matrices spares a fused bias, however a plan stores it"
    assert measured["state_error"] < 1e-6
    assert "dp" in measured["moment"]


def test_more_tensor_parallel_devices_than_heads_of_keys_train_as_one_device(results: Results) -> None:
    measured = results["grouped heads"]
    assert measured["loss"] == pytest.approx(measured["expected"], rel=1e-6)
    assert measured["error"] < 1e-6


def test_the_partitioner_never_replicates_a_tensor_for_want_of_a_way(results: Results) -> None:
    assert "Involuntary full rematerialization" not in results["partitioner"]["words"]


def test_specs_lay_out_a_step_on_a_mesh_of_explicit_axes(results: Results) -> None:
    measured = results["hand-written"]
    assert measured["explicit_error"] < 1e-6
    assert "@tp" in measured["explicit_type"]


@pytest.mark.exhaustive
def test_two_processes_of_four_devices_each_train_as_one_device(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    settings = {**ENVIRONMENT, "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {os.environ['XLA_FLAGS']}"}
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--process"]
    ranks = [
        subprocess.Popen([*command, str(rank), port], env=os.environ | settings, cwd=SCRIPT.parent) for rank in (0, 1)
    ]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    for rank in (0, 1):
        measured = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (measured["devices"], measured["own"]) == (8, 4)
        for losses in measured["losses"].values():
            assert losses == pytest.approx(measured["expected"], rel=1e-6)


def test_a_row_of_the_zoo_trains_as_on_one_device() -> None:
    script = ROOT / "benchmarks" / "jax_zoo.py"
    command = [sys.executable, str(script), "--alone", "llama, shifted labels", "--strategy", "cp2"]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["cp2"]["error"] < 1e-5


def regression(params: Any, x: Any, y: Any) -> Any:
    return small.error(params, small.hidden(params, x), y)


def plan_of_regression(**strategy: int) -> Any:
    inputs = (small.weights(), *small.rows())
    question = {"cluster": "cpu:8", "global_batch_size": small.ROWS, "precision": "fp32", "compares": False}
    return phaze.evaluate(regression, inputs, strategy={**small.ALONE, **strategy}, **question).plan, inputs


def test_a_strategy_that_leaves_devices_idle_runs_on_the_first() -> None:
    plan, inputs = plan_of_regression(dp=1, micro_batch_size=16)
    run = plan.apply(regression, inputs=inputs)
    assert dict(run.mesh.shape) == {"pp": 1, "dp": 1, "tp": 1}
    assert run.gradients(run.start({"params": inputs[0]}), *inputs[1:])[0] == pytest.approx(float(regression(*inputs)))


def test_a_mesh_whose_axes_cannot_be_told_apart_is_refused() -> None:
    plan, inputs = plan_of_regression(dp=2, micro_batch_size=8)
    devices = np.array([jax.devices()[0]] * 4, dtype=object).reshape(2, 2)
    with pytest.raises(PlanError, match="which of them 'b' is cannot be told"):
        plan.apply(regression, Mesh(devices, ("a", "b")), inputs=inputs)


def test_a_loss_of_a_training_state_is_referred_to_the_step() -> None:
    params, x, y = (small.weights(), *small.rows())
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1, momentum=0.9))

    def loss(state: TrainState, x: Any, y: Any) -> Any:
        return regression(state.params, x, y)

    plan, _ = plan_of_regression(dp=1, micro_batch_size=16)
    with pytest.raises(PlanError, match=r"state is a whole training state.*plan and apply the whole step"):
        plan.apply(loss, inputs=(state, x, y))


def test_specs_need_a_plan_for_jax_and_the_parameters_first() -> None:
    plan, inputs = plan_of_regression(dp=1, micro_batch_size=16)
    with pytest.raises(PlanError, match=r"parameters first: plan.specs\(params, opt_state, batch\)"):
        plan.specs()
    analysis = phaze.optimize(regression, inputs, cluster="cpu:1", global_batch_size=16, target=None)
    with pytest.raises(PlanError, match="analysis only and has no specs"):
        analysis.specs(inputs[0])


def test_splits_of_neighbouring_factors_are_one_cut() -> None:
    heads = SplitDim(dim=0, outer=3, chunk=16, ways=4, stride=2)
    sizes = SplitDim(dim=0, outer=12, chunk=8, ways=2, stride=1)
    storage = choose_storage("qkv_bias", (3 * 4 * 16,), (heads, sizes), is_stacked=False, tp=8, shards=1)
    assert (storage.parts, storage.chunk, storage.shape) == (3, 8, (3, 64))
    joined = Layout((Split(0, 3, 16, 4, 2), Split(0, 12, 8, 2, 1)))
    assert joined.joined() == Layout((Split(0, 3, 8, 8, 1),))
    assert joined.is_one_cut((192,))
    assert Layout((Split(0, 1, 1, 4, 2), Split(1, 1, 8, 2))).is_one_cut((4, 16))
    assert not Layout((Split(0, 1, 1, 4, 2), Split(2, 1, 8, 2))).is_one_cut((4, 5, 16))


def moe(params: Any, x: Any, y: Any) -> Any:
    """Four experts, whose hidden units a tensor axis of eight would cut besides."""
    gates = jax.nn.softmax(x[:, :4])
    hidden = jax.nn.relu(jax.numpy.einsum("bi,eif->bef", x, params["up"]))
    return ((jax.numpy.einsum("bef,efi,be->bi", hidden, params["down"], gates) - y) ** 2).mean()


def test_plans_that_cut_a_parameter_twice_are_not_offered_to_jax() -> None:
    shapes = {"up": (4, 8, 6), "down": (4, 6, 8)}
    params = {name: np.ones(shape, "f") for name, shape in shapes.items()}
    inputs = (params, np.ones((16, 8), "f"), np.ones((16, 8), "f"))
    strategy = {**small.ALONE, "dp": 1, "tp": 8, "micro_batch_size": 16, "sequence_parallel": False}
    question = {"cluster": "cpu:8", "global_batch_size": 16, "precision": "fp32", "compares": False}
    with pytest.raises(PlanError, match="8 devices would have to cut two dimensions of its parameter"):
        phaze.evaluate(moe, inputs, strategy=strategy, **question)
    plan = phaze.evaluate(moe, inputs, strategy=strategy, target=None, **question).plan
    assert {split.dim for split in plan.layouts.parameters["params.up"]} == {0, 2}


def test_microbatches_of_one_sample_are_weighted_as_those_of_two_where_jax_traces_them_otherwise() -> None:
    def two_losses(params: Any, x: Any, y: Any) -> Any:
        kinds = optax.softmax_cross_entropy_with_integer_labels(x @ params["up"], y[:, 0].astype(int) % 3)
        return kinds.mean() + ((x @ params["up"]) ** 2).mean()

    inputs = (small.weights(), *small.rows())
    question = {"cluster": "cpu:1", "global_batch_size": small.ROWS, "precision": "fp32", "compares": False}
    strategy = {**small.ALONE, "dp": 1, "micro_batch_size": 1}
    run = phaze.evaluate(two_losses, inputs, strategy=strategy, **question).plan.apply(two_losses, inputs=inputs)
    loss, _ = run.gradients(run.start(inputs[0]), *inputs[1:])
    assert loss == pytest.approx(float(two_losses(*inputs)), rel=1e-6)
