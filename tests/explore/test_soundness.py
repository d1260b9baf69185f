"""Corners in which a search once claimed too much, or gave up too early."""

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from designs import SMALL, searched, small_question, some_points, tiny_model

import phaze
from phaze.cost import Calibration
from phaze.errors import PlanError
from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.design_search import run_search
from phaze.explore.executors import Workers
from phaze.explore.journal import Journal
from phaze.explore.sampled_evaluation import DesignEvaluator
from phaze.explore.search_result import SearchProgress
from phaze.explore.worker_tasks import EvaluateTask, evaluate_design
from phaze.ir import Graph, OpKind, Role
from phaze.ir.graph_builder import GraphBuilder
from phaze.planner.progress import TimeLimitError

QUESTION: dict[str, Any] = {**SMALL, "micro_batch_size": (2,), "executor": "serial", "gap": 0.0}


def test_a_memory_is_chosen_only_where_the_plan_fits_beside_what_allocators_reserve() -> None:
    asked = {**QUESTION, "space": some_points(3), "calibration": Calibration(reserve=0.5)}
    needed_gib = phaze.search(tiny_model(), **{**asked, "hbm_gib": (1,)}).best.models[0].needed_bytes / 2**30
    result = phaze.search(tiny_model(), **{**asked, "hbm_gib": (1.2 * needed_gib / 0.95, 1)})
    (plan,) = result.plans.values()
    assert plan.is_feasible
    assert result.best.hbm_gib == 1
    small, large = (row.value for row in result.memories)
    assert small is not None
    assert large is not None
    assert small < large


@pytest.mark.parametrize("change", [{"objective": "throughput-per-energy"}, {"front": True}])
def test_where_energy_counts_the_proof_is_about_the_largest_memory_and_says_so(change: dict[str, Any]) -> None:
    sizes = (11037641 / 2**30, 11313584 / 2**30)  # the fastest plan of the first draws less than that of the second
    asked: dict[str, Any] = {
        "space": some_points(2, seed=4),
        "micro_batch_size": (1, 2, 4),
        "tp": (1,),
        "devices": 2,
        "global_batch_size": 8,
        "network": "tpuv4-pod",
        "executor": "serial",
        "gap": 0.0,
    }
    result = phaze.search(tiny_model(3, 512), hbm_gib=sizes, **asked, **change)
    assert result.best.value == result.certificate.value
    assert result.certificate.points == 2
    assert "energy is that of the fastest plans with the largest memory" in result.certificate.scope
    assert all(plan.is_feasible for plan in result.plans.values())


@pytest.mark.parametrize("seed", [68, *range(4)])
def test_the_bound_beside_the_best_plan_is_under_every_plan_of_its_accelerator(seed: int) -> None:
    draw = random.Random(seed)
    gap, hbm_gib = draw.choice((0.3, 0.5)), draw.choice((0.003, 0.004, 0.006, 0.01, 0.02, 1))
    model = tiny_model(draw.choice((2, 3, 5)), draw.choice((256, 512)))
    asked = {
        "micro_batch_size": (1, 2, 4, 8),
        "devices": draw.choice((2, 4, 8)),
        "global_batch_size": draw.choice((8, 16)),
        "hbm_gib": (hbm_gib,),
        "gap": gap,
        "network": draw.choice(("paper", "tpuv4-pod")),
    }
    question = small_question([model], some_points(1, seed=seed), **asked)
    try:
        best_first = searched(question)
    except PlanError:  # it does not fit
        return
    best = run_search(best_first, 0.0).best.models[0]
    task = EvaluateTask(
        model_question=replace(question.questions[0], gap=0.0),
        accelerator=question.points.at(0),
        slicings=tuple((0.0, swept.slicing) for swept in best_first.state.slicings),
        cutoff_s=math.inf,
    )
    fastest_s = evaluate_design(task).time_s
    assert fastest_s is not None
    assert best.bound_s <= fastest_s * (1 + 1e-9)


def uneven_model(*sizes: int) -> Graph:
    """Blocks from each size to the next."""
    builder = GraphBuilder("uneven")
    x = builder.argument("x", (1, 8, sizes[0]), Role.BATCH)
    for index, (before, after) in enumerate(pairwise(sizes)):
        module, factors = f"blocks.{index}", {"b": 1, "s": 8, "i": before, "o": after}
        weight = builder.parameter(f"{module}.weight", after, before)
        rule = builder.rule("b s i, o i -> b s o", factors, batch="b")
        (y,) = builder.add(f"{module}.linear", OpKind.CONTRACTION, "einsum", rule, (x, weight), module=module)
        same = builder.rule("b s o -> b s o", factors, batch="b")
        (x,) = builder.add(f"{module}.exp", OpKind.ELEMENTWISE, "exp", same, (y,), module=module)
    rule = builder.rule("b s o -> .", {"b": 1, "s": 8, "o": sizes[-1]}, batch="b")
    (loss,) = builder.add("loss", OpKind.REDUCTION, "sum", rule, (x,))
    return builder.build((loss,))


def test_schedules_that_do_not_fit_do_not_hide_one_that_does() -> None:
    asked = {**QUESTION, "devices": 2, "micro_batch_size": (1,), "hbm_gib": (25e6 / 0.95 / 2**30,), "gap": 0.01}
    model, points = uneven_model(1024, 1024, 1024, 256, 1024), some_points(2)
    with pytest.raises(PlanError, match="fits on no accelerator"):
        phaze.search(model, space=points, schedule=("1f1b",), **asked)
    alone = phaze.search(model, space=points, schedule=("interleaved-1f1b",), **asked)
    both = phaze.search(model, space=points, schedule=("1f1b", "interleaved-1f1b"), **asked)
    assert both.best.value == pytest.approx(alone.best.value, rel=0.01)


def test_progress_is_told_while_nothing_was_found() -> None:
    heard: list[SearchProgress] = []
    with pytest.raises(PlanError, match="no accelerator of the space has a plan that fits"):
        phaze.search(
            tiny_model(7, 512),
            space=some_points(2, seed=1),
            **{**QUESTION, "devices": 5, "micro_batch_size": (1,), "hbm_gib": (9485888 / 2**30,), "gap": 0.1},
            schedule=("interleaved-1f1b",),
            progress=heard.append,
        )
    assert heard[-1].bound is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "schedules"),
    [
        (TimeLimitError, ("1f1b", "zero-bubble")),
        (KeyboardInterrupt, ("1f1b", "gpipe")),
        pytest.param(TimeLimitError, ("1f1b", "gpipe"), marks=pytest.mark.exhaustive),
        pytest.param(KeyboardInterrupt, ("1f1b", "zero-bubble"), marks=pytest.mark.exhaustive),
    ],
)
def test_wherever_a_search_is_interrupted_its_bound_holds_and_every_accelerator_is_listed(
    kind: type[BaseException], schedules: tuple[str, ...]
) -> None:
    question = small_question([tiny_model()], some_points(3, seed=2), micro_batch_size=(2,), schedule=schedules)
    reports: list[str] = []

    def stopped_at(last: int) -> phaze.SearchResult | None:
        reports.clear()

        def report(doing: str) -> None:
            reports.append(doing)
            if len(reports) == last:
                raise kind

        best_first = BestFirstSearch(question=question, workers=Workers(), journal=Journal(), report=report)
        try:
            return run_search(best_first, 0.0)
        except (PlanError, KeyboardInterrupt):
            return None

    whole = stopped_at(0)
    assert whole is not None
    has_found = False
    for last in range(1, len(reports) + 1):
        result = stopped_at(last)
        assert result is not None or not has_found  # what was found is not lost again
        if result is not None:
            has_found = True
            assert result.certificate.bound >= whole.best.value * (1 - 1e-9)
            assert [row.name for row in result.explored] == list(question.points.names)
    assert has_found


def test_sampling_as_the_paper_counts_finds_what_evaluating_everything_finds() -> None:
    for seed in range(3):
        points = some_points(6, seed=seed)
        question = small_question([tiny_model()], points, hbm_gib=(0.0115,), compatibility="paper")
        best_first = BestFirstSearch(question=question, workers=Workers(), journal=Journal())
        best_first.sweep()
        state = best_first.state
        few, whole = (DesignEvaluator(question, state.slicings, state.objective) for _ in range(2))
        best = 0.0
        for point in range(len(points)):
            best = max(best, few.value(point, question.hbm_bytes[0], best))
        values = [whole.value(point, question.hbm_bytes[0]) for point in range(len(points))]
        assert best == pytest.approx(max(values))
