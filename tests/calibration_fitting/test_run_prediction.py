from dataclasses import replace
from typing import Any

import pytest
from plans import small_cluster, small_graph

import phaze
from phaze.calibration_fitting import Run, prepare_run
from phaze.cost import EAGER_STACK, LIBRARY_STACK, Calibration, Stack
from phaze.cost.product_kernels import product_kernels_of
from phaze.errors import QuestionError
from phaze.hooks import PluginManager

STRATEGIES: dict[str, dict[str, Any]] = {
    "one stage, sharded": {"dp": 8, "tp": 1, "pp": 1, "schedule": "none", "zero": 3, "recompute": "none"},
    "three ways": {"dp": 2, "tp": 2, "pp": 2, "schedule": "1f1b", "zero": 1, "recompute": "full"},
}
FITTED = {"matrix": 0.6, "memory": 0.7, "link": 0.5, "network": 0.4, "overhead_s": 4e-6, "overlap": 0.3}
BLOCKING = replace(LIBRARY_STACK, launches_ahead=False)


def strategy(name: str) -> dict[str, Any]:
    count = len(small_graph().layers)
    stages = (count,) if STRATEGIES[name]["pp"] == 1 else (count // 2, count - count // 2)
    return {"micro_batch_size": 2, "chunks": 1, "stages": stages, **STRATEGIES[name]}


def run(name: str, **changes: Any) -> Run:
    asked = strategy(name) | changes
    return Run(
        name=name,
        model=small_graph(),
        cluster=small_cluster(),
        global_batch_size=32,
        strategy=asked,
        seconds=1.0,
    )


@pytest.mark.parametrize("stack", [LIBRARY_STACK, EAGER_STACK, BLOCKING], ids=["library", "eager", "blocking"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_prepared_run_takes_as_long_as_evaluate_says(name: str, stack: Stack) -> None:
    prepared = prepare_run(run(name), stack, PluginManager.load())
    for terms in (FITTED, {**FITTED, "matrix": 0.9, "overlap": 0.0, "overhead_s": 5e-5}):
        calibration = Calibration(name="fitted", stack=stack, **terms)
        plan = phaze.evaluate(
            small_graph(),
            strategy=strategy(name),
            cluster=small_cluster(),
            global_batch_size=32,
            calibration=calibration,
            target=None,
            compares=False,
        ).plan
        assert prepared.seconds([calibration])[0] == pytest.approx(plan.step_time_s, rel=1e-6)
        assert prepared.needed_bytes == pytest.approx(max(stage.memory_bytes["total"] for stage in plan.stages))


@pytest.mark.parametrize("stack", [LIBRARY_STACK, EAGER_STACK], ids=["library", "eager"])
def test_a_prepared_run_on_a_gpu_has_its_product_kernels_as_evaluate_does(stack: Stack) -> None:
    measured = replace(run("one stage, sharded"), cluster="a100-80gb:8")
    prepared = prepare_run(measured, stack, PluginManager.load())
    products = product_kernels_of(prepared.problem.cluster.accelerator)
    calibration = Calibration(name="fitted", stack=stack, products=products, **FITTED)
    plan = phaze.evaluate(
        small_graph(),
        strategy=strategy("one stage, sharded"),
        cluster="a100-80gb:8",
        global_batch_size=32,
        calibration=calibration,
        target=None,
        compares=False,
    ).plan
    assert prepared.seconds([calibration])[0] == pytest.approx(plan.step_time_s, rel=1e-6)
    assert products is not None


def test_what_a_strategy_lacks_is_the_plainest_choice() -> None:
    lacking = Run(
        name="plain",
        model=small_graph(),
        cluster=small_cluster(),
        global_batch_size=32,
        strategy={"pp": 4, "micro_batch_size": 2},
        seconds=1.0,
    )
    parallelism = prepare_run(lacking, LIBRARY_STACK, PluginManager.load()).parallelism
    assert (parallelism.tp, parallelism.dp, parallelism.pp, parallelism.chunks, parallelism.zero) == (
        1,
        2,
        4,
        1,
        0,
    )


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(QuestionError, match="at most one stage a layer"):
        prepare_run(
            run("one stage, sharded", pp=8, dp=1, schedule="1f1b", stages=None), LIBRARY_STACK, PluginManager.load()
        )
