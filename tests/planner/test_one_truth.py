"""One truth: whoever is asked about a strategy, its price is the same, and no bound that is printed is contradicted."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import FITTED_CHIP, IDEAL_CHIP, small_cluster, small_graph
from property_examples import examples

import phaze
from phaze.errors import PhazeError, PlanError, QuestionError
from phaze.hardware import Cluster
from phaze.ir import Graph
from phaze.parallelism import Parallelism
from phaze.plan.plan import Plan, PlanStatus
from phaze.planner import Progress
from phaze.verify.plan_checks import check_plan

Question = dict[str, Any]


def full_strategy(plan: Plan) -> dict[str, Any]:
    """Everything that a plan chose but its stages; recompute only where all stages have one mode."""
    strategy = {field.name: getattr(plan.strategy, field.name) for field in fields(Parallelism)}
    modes = set(strategy.pop("recompute"))
    return {**strategy, "recompute": modes.pop()} if len(modes) == 1 else strategy


def assert_evaluates_to_itself(plan: Plan, model: object, question: Question) -> None:
    """The plan's own strategy, with and without its stages, has the plan's time and memory, and no higher bound."""
    strategy = full_strategy(plan)
    stages = {"stages": [len(stage.layers) for stage in plan.stages], "recompute": plan.strategy.recompute}
    for asked in ({**strategy, **stages}, strategy):
        again = phaze.evaluate(model, strategy=asked, compares=False, **question).plan
        assert again.strategy == plan.strategy
        assert again.step_time_s == pytest.approx(plan.step_time_s, rel=1e-9)
        assert again.bound_s <= plan.step_time_s * (1 + 1e-9)
        assert again.bound_s >= plan.bound_s * (1 - 1e-9)
        assert again.is_feasible == plan.is_feasible
        for before, after in zip(plan.stages, again.stages, strict=True):
            assert after.memory_bytes == pytest.approx(before.memory_bytes, rel=1e-9)


def assert_above(plan: Plan, other: Plan) -> None:
    """A plan of a narrower question is not below the bound of a wider one."""
    if other.is_feasible:
        assert other.step_time_s >= plan.bound_s * (1 - 1e-9), other.strategy


@st.composite
def questions(draw: st.DrawFn) -> tuple[Graph, Question]:
    """A small model, and what is asked of it; memories from ample to hardly enough."""
    heads = draw(st.sampled_from([2, 4, 6]))
    graph = small_graph(
        num_layers=draw(st.integers(1, 3)),
        num_attention_heads=heads,
        hidden_size=heads * draw(st.sampled_from([16, 64])),
        seq_length=256,
    )
    devices = draw(st.sampled_from([2, 3, 4, 6, 8]))
    chip = draw(st.sampled_from([IDEAL_CHIP, FITTED_CHIP]))
    ample = draw(st.sampled_from([1.0, 0.1, 0.02]))
    needed = 18.0 * graph.parameter_count + 2**28
    cluster: Cluster = small_cluster(int(needed * ample), devices, chip)
    question = {
        "cluster": cluster,
        "global_batch_size": draw(st.sampled_from([8, 12])),
        "micro_batch_size": draw(st.sampled_from([(1,), (2,), (1, 4)])),
        "tp": draw(st.sampled_from([(1, 2), (2,), (2, 4)])) if devices > 3 else (1, 2),
    }
    return graph, question


@examples(4)
@given(
    questions(),
    st.sampled_from(
        [
            {"sequence_parallel": True},
            {"sequence_parallel": False},
            {"sequence_parallel": "mixed"},
            {"schedule": "gpipe"},
            {"schedule": "zero-bubble"},
            {"zero": 0},
        ]
    ),
)
def test_a_plan_evaluated_again_is_itself_and_nothing_lies_below_its_bound(
    asked: tuple[Graph, Question], strategy: dict[str, Any]
) -> None:
    graph, question = asked
    try:
        plan = phaze.optimize(graph, **question)
    except PlanError:  # heads that no tp divides
        return
    if not plan.is_feasible:
        return
    assert_evaluates_to_itself(plan, graph, question)
    assert (plan.status is PlanStatus.ABOVE_GAP) == (plan.gap > 0.01 + 1e-9)
    try:
        other = phaze.evaluate(graph, strategy=strategy, compares=False, **question).plan
    except PhazeError:  # this model, these devices or this batch have no such plan
        return
    assert_above(plan, other)
    if other.is_feasible:
        assert_evaluates_to_itself(other, graph, question)


@pytest.mark.slow
@pytest.mark.parametrize(
    "question",
    [
        {"cluster": "tpuv5e:8", "global_batch_size": 32, "micro_batch_size": (1,), "tp": (2,)},
        pytest.param({"cluster": "tpuv5e:256"}, marks=pytest.mark.exhaustive, id="llama2-7b"),
        pytest.param({"cluster": "tpuv5p:256", "cp": (1,)}, marks=pytest.mark.exhaustive, id="llama3-70b"),
    ],
)
def test_a_plan_that_gains_by_splitting_sequences_in_some_layers_only_is_not_contradicted(
    question: Question, request: pytest.FixtureRequest
) -> None:
    model: object = request.node.callspec.id
    if "tp" in question:
        model = small_graph(num_layers=2, hidden_size=1024, num_attention_heads=16)
    plan = phaze.optimize(model, **question)
    assert plan.strategy.tp > 1
    assert_evaluates_to_itself(plan, model, question)
    for value in (True, False, "mixed"):
        strategy = {**full_strategy(plan), "sequence_parallel": value}
        assert_above(plan, phaze.evaluate(model, strategy=strategy, compares=False, **question).plan)
    assert [finding for finding in check_plan(plan, model) if not finding.holds] == []


def test_a_schedule_asks_for_a_pipeline() -> None:
    question = {"cluster": small_cluster(), "global_batch_size": 32, "micro_batch_size": (1,), "tp": (1,)}
    for strategy in ({"schedule": "1f1b"}, {"chunks": 2}):
        plan = phaze.evaluate(small_graph(), strategy=strategy, compares=False, **question).plan
        assert plan.strategy.pp > 1
        assert plan.strategy.schedule == strategy.get("schedule", "interleaved-1f1b")
    with pytest.raises(QuestionError, match="on 1 devices have no two stages"):
        phaze.evaluate(
            small_graph(), strategy={"schedule": "1f1b"}, **{**question, "cluster": small_cluster(devices=1)}
        )


def test_sequence_parallelism_asks_for_tensor_parallelism() -> None:
    question = {"cluster": small_cluster(), "global_batch_size": 32, "micro_batch_size": (2,), "compares": False}
    for value in (True, "mixed"):
        with pytest.raises(QuestionError, match=f"sequence_parallel {value} and tp 1"):
            phaze.evaluate(small_graph(), strategy={"sequence_parallel": value, "tp": 1}, **question)
        with pytest.raises(QuestionError, match="only tp 1 is offered"):
            phaze.evaluate(small_graph(), strategy={"sequence_parallel": value}, tp=1, **question)
    plan = phaze.evaluate(small_graph(), strategy={"sequence_parallel": True}, tp=(1, 2), **question).plan
    assert (plan.strategy.tp, plan.strategy.sequence_parallel) == (2, True)


class _EndingAt:
    """Ends the work by Ctrl-C at the n-th report after some words were said."""

    def __init__(self, words: str, count: int = 1) -> None:
        self.words, self.left = words, count

    def __call__(self, progress: Progress) -> None:
        self.left -= self.words in progress.doing
        if not self.left:
            self.left = -1
            raise KeyboardInterrupt


def test_given_stages_are_priced_as_far_as_there_is_time() -> None:
    question = {"cluster": small_cluster(), "global_batch_size": 32, "micro_batch_size": (1, 2), "tp": (1,)}
    asked = {"strategy": {"stages": (3, 3)}, "compares": False, **question}
    with pytest.raises(PlanError, match="nothing was found within"):
        phaze.evaluate(small_graph(), time_limit_s=1e-9, **asked)
    plan = phaze.evaluate(small_graph(), progress=_EndingAt("pricing stages", 2), **asked).plan
    assert plan.status is PlanStatus.INTERRUPTED
    assert plan.strategy.micro_batch_size == 1
    assert plan.bound_s <= phaze.evaluate(small_graph(), **asked).step_time_s


def test_a_strategy_that_was_priced_is_kept_where_the_comparison_was_ended() -> None:
    question = {"cluster": small_cluster(), "global_batch_size": 32, "micro_batch_size": (1, 2), "tp": (1,)}
    strategy = {"dp": 8, "tp": 1, "pp": 1, "micro_batch_size": 2}
    alone = phaze.evaluate(small_graph(), strategy=strategy, compares=False, **question)
    ended = phaze.evaluate(small_graph(), strategy=strategy, progress=_EndingAt("slicing", 2), **question)
    assert ended.step_time_s == alone.step_time_s
    assert ended.best is None
    assert "the time was over before a best plan to compare with was found" in str(ended)


def test_a_plan_that_ended_above_the_gap_says_so() -> None:
    question = {"cluster": small_cluster(), "global_batch_size": 32, "micro_batch_size": (2,), "tp": (1,)}
    plan = phaze.optimize(small_graph(), **question)
    ended = replace(plan, status=PlanStatus.ABOVE_GAP, gap=0.0572)
    words = "ended at 5.72 % of the best, 1 % was asked: no plan of any slicing offered takes less than"
    assert words in " ".join(str(ended).split())
