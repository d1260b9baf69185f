"""Strategies that the user gives, whole or in part: kept, filled in, priced, bounded, or refused by name."""

from dataclasses import fields

import pytest
from plans import QUESTION, checked, small_cluster, small_graph, small_plan

import phaze
from phaze.errors import PlanError, QuestionError
from phaze.parallelism import Parallelism
from phaze.plan.plan import PlanStatus


@pytest.mark.slow
def test_a_plan_priced_as_its_own_strategy_is_itself() -> None:
    for plan in (small_plan(), small_plan(hbm_mib=80)):
        strategy = {name: getattr(plan.strategy, name) for name in (field.name for field in fields(Parallelism))}
        if plan.strategy.tp == 1:
            strategy.pop("sequence_parallel")
        stages = [len(stage.layers) for stage in plan.stages]
        hbm = int(plan.stages[0].memory_bytes["capacity"])
        question = {**QUESTION, "compares": False}
        again = phaze.evaluate(
            small_graph(), cluster=small_cluster(hbm), strategy={**strategy, "stages": stages}, **question
        )
        assert again.plan.stages == plan.stages
        assert again.step_time_s == plan.step_time_s


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [(4,), pytest.param((1, 2, 4), marks=pytest.mark.exhaustive)])
def test_what_is_open_beside_given_stages_is_filled_in_with_the_fastest(degrees: tuple[int, ...]) -> None:
    question = {**QUESTION, "compares": False, "micro_batch_size": (2,), "tp": (1,)}
    layers = len(small_graph().layers)
    stages = (1, layers - 1)
    found = phaze.evaluate(small_graph(), cluster=small_cluster(), strategy={"stages": stages}, **question)
    assert [len(stage.layers) for stage in found.plan.stages] == list(stages)
    rest = {"tp": 1, "micro_batch_size": 2, "stages": stages}
    every = [
        {"pp": 2, "chunks": 1, "dp": dp, "schedule": schedule, "recompute": mode, **zero_and_shard, **rest}
        for dp in degrees
        for schedule in ("gpipe", "1f1b", "zero-bubble")
        for zero_and_shard in [
            {"zero": 0},
            *({"zero": zero, "shard": shard} for zero in (1, 2, 3) for shard in {2, dp} if dp >= shard > 1),
        ]
        for mode in ("none", "selective", "full")
    ]
    times = [
        phaze.evaluate(small_graph(), cluster=small_cluster(), strategy=one, **question).step_time_s for one in every
    ]
    assert found.step_time_s == min(times)


def test_the_bound_of_given_stages_is_under_their_time_with_better_schedules() -> None:
    strategy = {"dp": 2, "pp": 2, "tp": 1, "micro_batch_size": 1, "stages": (3, 3), "schedule": "1f1b", "zero": 0}
    asked = {**QUESTION, "cluster": "tpuv4-paper:4@paper", "strategy": strategy, "compares": False}
    near, exact = (phaze.evaluate(small_graph(), gap=gap, **asked).plan for gap in (0.9, 0.0))
    assert exact.step_time_s < near.step_time_s
    assert near.bound_s <= exact.step_time_s * (1 + 1e-9)
    assert exact.status is PlanStatus.OPTIMAL
    words = "no way that was tried to fill in what this strategy leaves open takes less"
    assert words in " ".join(str(near).split())
    one_mode = phaze.evaluate(small_graph(), **{**asked, "strategy": {**strategy, "recompute": "none"}}).plan
    assert "no plan of this strategy takes less" in " ".join(str(one_mode).split())


def test_given_stages_that_no_strategy_has_are_refused() -> None:
    question = {**QUESTION, "compares": False}
    with pytest.raises(PlanError, match="leave out stages, or what is fixed beside them"):
        phaze.evaluate(
            small_graph(),
            cluster=small_cluster(),
            strategy={"stages": (1, 5), "schedule": "interleaved-1f1b"},
            **question,
        )


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"dp": 2, "zero": 1}, r"zero 1 \(it runs 0, 3 in fp32-adam\), which target fsdp does not run"),
        ({"pp": 2}, r"schedule of any kind \(it runs one stage only\)"),
        ({"schedule": "1f1b"}, r"schedule 1f1b \(it runs one stage only\)"),
        ({"recompute": "products"}, r"recompute products \(it runs full, none, selective\)"),
    ],
)
def test_a_strategy_that_the_target_does_not_run_is_refused(strategy: dict[str, object], message: str) -> None:
    with pytest.raises(QuestionError, match=message):
        phaze.evaluate(
            small_graph(),
            cluster=small_cluster(),
            strategy=strategy,
            **{**QUESTION, "target": "fsdp", "precision": "fp32"},
        )


def test_given_stages_leave_out_ways_to_fill_them_in_that_do_not_run() -> None:
    question = {"global_batch_size": 6, "micro_batch_size": (2,), "target": None}
    stages = (1, 1, 1, len(small_graph().layers) - 3)
    found = phaze.evaluate(small_graph(), cluster=small_cluster(), strategy={"stages": stages, "tp": 1}, **question)
    assert [len(stage.layers) for stage in found.plan.stages] == list(stages)  # 3 microbatches: not over 2 x 2


@pytest.mark.parametrize("stages", [{}, {"stages": (3, 3)}])
def test_a_strategy_of_more_devices_than_there_are_is_refused(stages: dict[str, object]) -> None:
    strategy = {"dp": 8, "pp": 2, "tp": 1, **stages}
    with pytest.raises(QuestionError, match="dp 8 x tp 1 x pp 2, 16 devices; the cluster has 8"):
        phaze.evaluate(small_graph(), cluster=small_cluster(), strategy=strategy, global_batch_size=16)


def test_microbatches_too_large_for_a_given_dp_are_left_out() -> None:
    question: dict[str, object] = {"cluster": small_cluster(), "global_batch_size": 8, "compares": False}
    found = phaze.evaluate(small_graph(), strategy={"dp": 4}, micro_batch_size=(1, 2, 4, 8), **question).plan
    assert found.strategy.dp == 4
    assert found.strategy.micro_batch_size <= 2
    with pytest.raises(QuestionError, match="8 samples are only 2 microbatches of 4; expected at least one for"):
        phaze.evaluate(small_graph(), strategy={"dp": 4, "micro_batch_size": 4}, **question)


def test_a_target_may_run_zero_stages_for_precisions_with_a_master_copy_only() -> None:
    question = {**QUESTION, "compares": False, "target": "fsdp"}
    found = phaze.evaluate(
        small_graph(), cluster=small_cluster(), strategy={"dp": 2, "zero": 1}, **{**question, "precision": "bf16"}
    )
    assert found.plan.strategy.zero == 1


def test_a_recompute_mode_that_is_not_searched_is_priced_and_verified_where_it_is_asked_for() -> None:
    asked = {"dp": 4, "tp": 1, "pp": 2, "schedule": "1f1b", "zero": 1, "micro_batch_size": 2}
    question = {**QUESTION, "compares": False}
    plans = {}
    for mode in ("none", "products", "full"):
        strategy = {**asked, "recompute": mode}
        found = phaze.evaluate(small_graph(), cluster=small_cluster(), strategy=strategy, **question)
        plans[mode] = checked(found.plan)
    assert plans["products"].strategy.recompute == ("products", "products")
    times, sizes = (
        [read(plan) for plan in plans.values()]
        for read in (lambda plan: plan.step_time_s, lambda plan: -plan.stages[0].memory_bytes["activations"])
    )
    assert times == sorted(times)
    assert sizes == sorted(sizes)


def test_a_strategy_that_does_not_fit_is_priced_and_says_so() -> None:
    question = {**QUESTION, "compares": False}
    asked = {"dp": 8, "tp": 1, "pp": 1, "zero": 0, "recompute": "none", "micro_batch_size": 2}
    found = phaze.evaluate(small_graph(), cluster=small_cluster(80 * 2**20), strategy=asked, **question)
    roomy = phaze.evaluate(small_graph(), cluster=small_cluster(), strategy=asked, **question)
    assert not found.is_feasible
    assert found.plan.status is PlanStatus.DOES_NOT_FIT
    assert found.step_time_s == roomy.step_time_s
    assert {stage.fit for stage in found.plan.stages} == {"over"}
    assert "DOES NOT FIT" in str(found)
