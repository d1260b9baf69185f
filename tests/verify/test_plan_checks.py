"""Verification by another way: a good plan passes, and no number of it can be changed unnoticed."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from designs import tiny_model
from forgeries import forged
from plans import SMALL_GPT, small_cluster, small_graph, small_plan

import phaze
from phaze.errors import PhazeError
from phaze.frontends.transformer_config import graph_from_config
from phaze.plan.plan import Plan, plan_from_document
from phaze.verify.plan_checks import check_plan


def test_a_plan_that_splits_the_sequences_of_some_layers_only_verifies() -> None:
    options: dict[str, Any] = {"global_batch_size": 16, "micro_batch_size": (8,), "optimizer": "sgd"}
    plan = phaze.optimize(tiny_model(), cluster="tpuv4-paper:4@paper", tp=(4,), **options)
    assert plan.strategy.sequence_parallel
    assert [finding for finding in check_plan(plan, tiny_model()) if not finding.holds] == []


@pytest.mark.parametrize(("hbm_mib", "sizes"), [(400, (1,)), (256, (1,)), (4096, None)])
def test_a_plan_for_which_more_was_offered_while_it_paid_verifies(hbm_mib: int, sizes: tuple[int, ...] | None) -> None:
    """Degrees that nobody gives are few at first; verification begins with as few."""
    length = 8192 if sizes else 256
    model = graph_from_config({**SMALL_GPT, "num_layers": 2, "seq_length": length}, name="gpt", sequence_length=length)
    cluster = small_cluster(hbm_mib * 2**20, devices=4)
    plan = phaze.optimize(
        model, cluster=cluster, global_batch_size=4 if sizes else 256, tp=(1,), micro_batch_size=sizes
    )
    assert max(plan.question.cp) > 1 or max(plan.question.micro_batch_size) > 8
    assert [finding for finding in check_plan(plan, model) if not finding.holds] == []


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all numbers in a document."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def document() -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(small_plan(hbm_mib=80).to_json())
    return plan


def changed(path: tuple[Any, ...]) -> dict[str, Any]:
    """The document with one number made a little larger."""
    plan = copy.deepcopy(document())
    parent: Any = plan
    for key in path[:-1]:
        parent = parent[key]
    old = parent[path[-1]]
    parent[path[-1]] = old + 1 if isinstance(old, int) else old * 1.001 + 1e-12
    return forged(plan)


def holds(plan: Plan) -> bool:
    return all(finding.holds for finding in check_plan(plan, small_graph()))


def is_noticed(path: tuple[Any, ...]) -> bool:
    try:
        return not holds(plan_from_document(changed(path)))
    except PhazeError:  # a plan that cannot be is refused
        return True


SOME = [
    ("step_time_s",),
    ("bound_s",),
    ("mfu",),
    ("energy", "total_j"),
    ("stages", 0, "memory_bytes", "activations"),
    ("strategy", "dp"),
    ("stages", 0, "place"),
    ("question", "gap"),
    ("question", "global_batch_size"),
    ("hardware", "levels", 0, "bandwidth_bytes_per_s"),
]


@pytest.mark.slow
def test_a_good_plan_holds() -> None:
    findings = check_plan(small_plan(hbm_mib=80), small_graph())
    assert all(finding.holds for finding in findings)
    names = [finding.what for finding in findings]
    assert "step time, simulated plainly" in names
    assert "feasibility" in names
    assert "every number, asked again" in names


def test_a_plan_for_which_batch_and_calibration_were_assumed_holds() -> None:
    plan = phaze.optimize(small_graph(), cluster=small_cluster(), micro_batch_size=(1,), tp=(1,))
    assert any("no global_batch_size was given" in note for note in plan.provenance.notes)
    assert [finding for finding in check_plan(plan, small_graph()) if not finding.holds] == []


@pytest.mark.parametrize("path", SOME, ids=str)
def test_a_changed_number_is_noticed(path: tuple[Any, ...]) -> None:
    assert is_noticed(path)


@pytest.mark.exhaustive
def test_a_changed_number_is_noticed_wherever_it_stands() -> None:
    """One number of each kind: of `stages[0].forward_s` and `stages[1].forward_s` only the last is changed."""
    numbers = [path for path in leaves(document()) if path[0] not in ("run", "version")]
    one_of_each = {tuple(key for key in path if isinstance(key, str)): path for path in numbers}
    assert len(one_of_each) > 100
    assert [path for path in one_of_each.values() if not is_noticed(path)] == []


def test_a_plan_for_another_model_does_not_hold() -> None:
    findings = check_plan(small_plan(hbm_mib=80), small_graph(num_layers=3))
    assert not findings[0].holds
    assert "model.layers: 6 in the plan, 5 now" in findings[0].found
