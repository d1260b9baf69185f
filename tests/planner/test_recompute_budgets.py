"""Recompute within a budget of memory, from the question to a plan that is verified, explained and saved."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from plans import checked, small_cluster, small_graph

import phaze
from phaze.cli import main
from phaze.errors import QuestionError
from phaze.installed import installed_plugins
from phaze.ir import BUDGET_MODES, RecomputeMode
from phaze.ir.layers import single_layer
from phaze.plan.handover import obstacles
from phaze.plan.plan import Plan
from phaze.planner.fixed_stages import price_fixed_stages, strategy_with_stages
from phaze.planner.progress import Watch
from phaze.shard import slice_layer
from phaze.targets import Capabilities
from phaze.verify.plan_checks import budget_checks
from phaze.verify.saved_plan import question_for

ASKED: dict[str, Any] = {"global_batch_size": 32, "micro_batch_size": 8, "tp": 1, "target": None}
MEMORY = 350 * 2**20
"""Less than the model needs without recompute, and more than with half of it."""


@cache
def asked(*modes: str) -> Plan:
    """One device that does not hold all activations of the model."""
    return phaze.optimize(
        small_graph(), cluster=small_cluster(MEMORY, 1), recompute=modes or None, explain=True, **ASKED
    )


def test_budgets_beat_full_recompute_where_not_everything_fits() -> None:
    named, within = asked(), asked("none", "budget", "full")
    assert set(named.strategy.recompute) == {RecomputeMode.FULL}
    assert set(within.strategy.recompute) <= set(BUDGET_MODES)
    assert within.step_time_s < named.step_time_s
    checked(within)


def test_plans_say_what_layers_keep_and_what_that_is_worth() -> None:
    plan = asked("none", "budget", "full")
    kinds = [kind for kind in plan.layer_kinds if kind.recompute in BUDGET_MODES and kind.recompute_s]
    assert kinds
    for kind in kinds:
        again = {op.name for op in kind.ops if op.phase == "recompute"}
        assert kind.kept
        assert again.isdisjoint(kind.kept)
    text = " ".join(plan.explain().split())
    assert "what layers keep for backward within their budgets" in text
    assert f"{kinds[0].name} ({kinds[0].recompute}): {', '.join(kinds[0].kept)}" in text
    without = next(runner for runner in plan.runners_up if runner.kind == "no budgets of recompute")
    assert without.step_time_s == pytest.approx(asked().step_time_s)
    loose = phaze.optimize(
        small_graph(), cluster=small_cluster(2**33, 1), recompute=("none", "budget"), explain=True, **ASKED
    )
    assert set(loose.strategy.recompute) == {RecomputeMode.NONE}
    assert any(runner.kind == "recompute within budgets" for runner in loose.runners_up)


def test_a_strategy_names_a_budget() -> None:
    given = {"dp": 1, "pp": 1, "zero": 0, "micro_batch_size": 8, "sequence_parallel": False}
    asked_of = {**ASKED, "cluster": small_cluster(2**33, 1)}
    steps, kept = [], []
    for mode in ("none", *BUDGET_MODES, "full"):
        plan = phaze.evaluate(
            small_graph(), strategy={**given, "recompute": str(mode)}, compares=False, **asked_of
        ).plan
        steps.append(plan.step_time_s)
        kept.append(plan.stages[0].memory_bytes["activations"])
    assert steps == sorted(steps)
    assert kept == sorted(kept, reverse=True)
    assert len(set(steps)) == len(steps)


def test_an_integer_program_finds_a_plan_that_keeps_the_wrong_tensors() -> None:
    plan = asked("none", "budget", "full")
    question = question_for(plan, small_graph(), None, installed_plugins())
    answer = price_fixed_stages(question.with_strategy(strategy_with_stages(plan)), Watch())
    assert all(claimed <= most * (1 + 1e-9) for _, claimed, most in budget_checks(plan, answer))
    number = next(
        index for index, kind in enumerate(plan.layer_kinds) if kind.recompute in BUDGET_MODES and kind.recompute_s
    )
    kind = plan.layer_kinds[number]
    local = slice_layer(answer.candidate.slices.sharded.layers[1])
    everything = tuple(name for op in single_layer(local).forward for name in op.outputs)
    for kept, wrong in ((kind.kept[1:], "computes again"), (everything, "keeps"), (("unknown",), "keeps")):
        forged = replace(kind, kept=kept)
        kinds = (*plan.layer_kinds[:number], forged, *plan.layer_kinds[number + 1 :])
        checks = list(budget_checks(replace(plan, layer_kinds=kinds), answer))
        assert any(claimed > most * (1 + 1e-9) and wrong in what for what, claimed, most in checks)


def test_a_plan_with_budgets_is_saved_and_loaded(tmp_path: Path) -> None:
    plan = asked("none", "budget", "full")
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["question"]["recompute"] == ["none", "budget-75", "budget-50", "budget-25", "full"]
    loaded = phaze.load_plan(tmp_path / "plan.json", small_graph())
    assert loaded.layer_kinds == plan.layer_kinds


def test_no_target_offers_budgets_and_plans_say_so() -> None:
    for target in installed_plugins().targets():
        assert target.value.capabilities.recompute_modes.isdisjoint(BUDGET_MODES)
    assert any("budget" in text for text in obstacles(asked("none", "budget", "full"), Capabilities()))
    with pytest.raises(QuestionError, match=r"recompute has budget-75, which target megatron-lm does not run"):
        phaze.optimize(small_graph(), cluster=small_cluster(), recompute="budget", **{**ASKED, "target": "megatron-lm"})


@pytest.mark.parametrize(
    ("modes", "message"),
    [((), "expected modes such as"), (7, "recompute is 7"), ("some", "recompute 'some'"), (("none", 1), "recompute 1")],
)
def test_modes_that_cannot_be_are_refused(modes: object, message: str) -> None:
    with pytest.raises(QuestionError, match=message):
        phaze.optimize(small_graph(), cluster=small_cluster(), recompute=modes, **ASKED)


def test_a_strategy_says_how_large_its_budget_is() -> None:
    with pytest.raises(QuestionError, match="which part of the bytes may be kept: budget-75, budget-50, budget-25"):
        phaze.evaluate(small_graph(), cluster=small_cluster(), strategy={"recompute": "budget"}, **ASKED)


def test_the_command_line_takes_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["gpt2", "--cluster", "a100-80gb:1", "--global-batch", "64", "--micro-batch-size", "32", "--tp", "1"]
    assert main(["optimize", *arguments, "--target", "none", "--recompute", "budget,full"]) == 0
    assert "recompute budget-75" in capsys.readouterr().out
    assert main(["optimize", *arguments, "--target", "none", "--recompute", "some"]) == 1
    assert "recompute 'some'" in capsys.readouterr().err
