from dataclasses import replace
from typing import Any

import pytest
from graphs import TINY_CONFIGS
from plans import small_cluster, small_graph
from property_examples import one_of_each

import phaze
from phaze.calibration_fitting import PreparedLayers, Run, prepare_run
from phaze.cost import EAGER_STACK, LIBRARY_STACK, Calibration, Stack
from phaze.cost.measured_kernels import link_protocols_of, product_kernels_of
from phaze.errors import QuestionError
from phaze.frontends.transformer_config import graph_from_config
from phaze.hooks import PluginManager

STRATEGIES: dict[str, dict[str, Any]] = {
    "one stage, sharded": {"dp": 8, "tp": 1, "pp": 1, "schedule": "none", "zero": 3, "recompute": "none"},
    "split sequences": {
        "dp": 2,
        "tp": 4,
        "pp": 1,
        "schedule": "none",
        "zero": 1,
        "recompute": "none",
        "sequence_parallel": True,
    },
    "three ways": {"dp": 2, "tp": 2, "pp": 2, "schedule": "1f1b", "zero": 1, "recompute": "full"},
    "groups of four": {"dp": 8, "tp": 1, "pp": 1, "schedule": "none", "zero": 3, "shard": 4, "recompute": "none"},
    "contexts": {"dp": 2, "cp": 2, "tp": 2, "pp": 1, "schedule": "none", "zero": 1, "recompute": "none"},
}
FITTED = {"matrix": 0.6, "memory": 0.7, "link": 0.5, "network": 0.4, "overhead_s": 4e-6, "overlap": 0.3}
BLOCKING = replace(LIBRARY_STACK, launches_ahead=False)
PIPELINING = replace(LIBRARY_STACK, pipelines_products=True, hides_reductions=False)
STACKS = {"library": LIBRARY_STACK, "eager": EAGER_STACK, "blocking": BLOCKING, "pipelining": PIPELINING}


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


@pytest.mark.parametrize(("name", "software"), one_of_each(STRATEGIES, tuple(STACKS)))
def test_a_prepared_run_takes_as_long_as_evaluate_says(name: str, software: str) -> None:
    stack = STACKS[software]
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
def test_a_prepared_run_on_a_gpu_has_its_measured_kernels_as_evaluate_does(stack: Stack) -> None:
    measured = replace(run("one stage, sharded"), cluster="a100-80gb:8")
    prepared = prepare_run(measured, stack, PluginManager.load())
    chip = prepared.problem.cluster.accelerator
    products, links = product_kernels_of(chip), link_protocols_of(chip)
    calibration = Calibration(name="fitted", stack=stack, products=products, links=links, **FITTED)
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
    assert None not in (products, links)


def test_8_bit_products_and_attention_beside_its_softmax_take_as_long_as_evaluate_says() -> None:
    stack, asked = replace(LIBRARY_STACK, overlaps_softmax=True), {"cluster": "h100:8", "attention": "fused"}
    prepared = prepare_run(replace(run("one stage, sharded"), precision="fp8", **asked), stack, PluginManager.load())
    chip, seconds = prepared.problem.cluster.accelerator, []
    kernels = {"products": product_kernels_of(chip), "links": link_protocols_of(chip)}
    for terms in ({}, {"narrow_matrix": 1.2}, {"attention": 0.2}):
        calibration = Calibration(name="fitted", stack=stack, **kernels, **FITTED, **terms)
        plan = phaze.evaluate(
            small_graph(),
            strategy=strategy("one stage, sharded"),
            global_batch_size=32,
            precision="fp8",
            calibration=calibration,
            target=None,
            compares=False,
            **asked,
        ).plan
        assert prepared.seconds([calibration])[0] == pytest.approx(plan.step_time_s, rel=1e-6)
        seconds.append(plan.step_time_s)
    assert seconds[1] < seconds[0] < seconds[2]


@pytest.mark.parametrize("facts", [{}, {"sends_tokens_once": True}, {"hides_exchanges": True}], ids=str)
def test_experts_on_several_devices_take_as_long_as_evaluate_says(facts: dict[str, bool]) -> None:
    stack = replace(LIBRARY_STACK, **facts)
    config = {**TINY_CONFIGS["mixtral"], "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    model = graph_from_config(config, name="mixture", sequence_length=256)
    asked = {"dp": 8, "ep": 4, "tp": 1, "pp": 1, "zero": 1, "micro_batch_size": 2, "schedule": "none", "chunks": 1}
    asked |= {"recompute": "none", "stages": (len(model.layers),)}
    calibration = Calibration(name="fitted", stack=stack, **FITTED)
    mixture = Run(
        name="mixture", model=model, cluster=small_cluster(), global_batch_size=32, strategy=asked, seconds=1.0
    )
    prepared = prepare_run(mixture, stack, PluginManager.load())
    plan = phaze.evaluate(
        model,
        strategy=asked,
        cluster=small_cluster(),
        global_batch_size=32,
        calibration=calibration,
        target=None,
        compares=False,
    ).plan
    assert prepared.seconds([calibration])[0] == pytest.approx(plan.step_time_s, rel=1e-6)
    plainer = prepare_run(mixture, LIBRARY_STACK, PluginManager.load()).seconds([calibration])[0]
    assert prepared.seconds([calibration])[0] < plainer or not facts


@pytest.mark.parametrize("name", ["split sequences", "one stage, sharded"])
def test_inputs_of_8_bit_products_kept_in_8_bits_need_what_evaluate_says(name: str) -> None:
    asked, needed = replace(run(name), precision="fp8", cluster="h100:8"), []
    for keeps in (False, True):
        stack = replace(LIBRARY_STACK, keeps_narrow_inputs=keeps)
        prepared = prepare_run(asked, stack, PluginManager.load())
        chip = prepared.problem.cluster.accelerator
        kernels = {"products": product_kernels_of(chip), "links": link_protocols_of(chip)}
        plan = phaze.evaluate(
            small_graph(),
            strategy=strategy(name),
            cluster="h100:8",
            global_batch_size=32,
            precision="fp8",
            calibration=Calibration(name="fitted", stack=stack, **kernels, **FITTED),
            target=None,
            compares=False,
        ).plan
        assert prepared.needed_bytes == pytest.approx(max(stage.memory_bytes["total"] for stage in plan.stages))
        needed.append(prepared.needed_bytes)
    assert needed[1] < needed[0]


@pytest.mark.slow
def test_runs_that_share_a_slicing_share_its_layers_and_are_predicted_as_alone() -> None:
    model, plugins, known = small_graph(), PluginManager.load(), PreparedLayers()
    calibration = Calibration(name="fitted", stack=LIBRARY_STACK, **FITTED)
    for batch in (32, 64):
        for name in STRATEGIES:
            shared = replace(run(name), model=model, global_batch_size=batch)
            together = prepare_run(shared, LIBRARY_STACK, plugins, known).seconds([calibration])
            alone = prepare_run(shared, LIBRARY_STACK, plugins).seconds([calibration])
            assert together == alone
    # Sharding over all devices or over groups of four is the same slicing.
    assert len(known.sliced) == len(STRATEGIES) - 1


def test_runs_that_differ_in_how_tp_devices_share_experts_are_sliced_apart() -> None:
    config = {**TINY_CONFIGS["mixtral"], "num_hidden_layers": 1}
    model = graph_from_config(config, name="mixture", sequence_length=16, micro_batch_size=1).with_backward()
    degrees = {"dp": 4, "tp": 2, "ep": 2, "zero": 1, "stages": (len(model.layers),)}
    plugins, known = PluginManager.load(), PreparedLayers()
    for expert_tp in (1, 2):
        prepare_run(
            replace(run("contexts"), model=model, strategy={**degrees, "expert_tp": expert_tp}),
            LIBRARY_STACK,
            plugins,
            known,
        )
    assert len(known.sliced) == 2


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_model_that_shows_four_of_its_blocks_takes_as_long_as_the_whole_one(name: str) -> None:
    calibration, plugins = Calibration(name="fitted", stack=LIBRARY_STACK, **FITTED), PluginManager.load()
    asked = {**strategy(name), "stages": (11,) if STRATEGIES[name]["pp"] == 1 else (6, 5)}
    whole = replace(run(name), model=small_graph(num_layers=9), strategy=asked)
    shown = replace(whole, model=small_graph(), blocks=9)
    expected, found = (prepare_run(asked_run, LIBRARY_STACK, plugins) for asked_run in (whole, shown))
    assert found.seconds([calibration])[0] == pytest.approx(expected.seconds([calibration])[0], rel=1e-12)
    assert found.needed_bytes == pytest.approx(expected.needed_bytes, rel=1e-12)
    assert found.problem.graph.flows == expected.problem.graph.flows
    assert found.problem.graph.ties == expected.problem.graph.ties


def test_blocks_of_several_kinds_cannot_be_shown_in_part() -> None:
    with pytest.raises(QuestionError, match="expected 4 in a row"):
        prepare_run(
            replace(run("one stage, sharded", stages=None), model=small_graph(num_layers=5), blocks=9),
            LIBRARY_STACK,
            PluginManager.load(),
        )


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
