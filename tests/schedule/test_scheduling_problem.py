"""Problems that contradict themselves are refused by name; problems without schedules are answers."""

from __future__ import annotations

import math

import pytest

from phaze.errors import ScheduleError
from phaze.schedule import Compatibility, Job, Resource, ScheduleStatus, SchedulingProblem, schedule_layer


def problem(
    *jobs: Job, edges: tuple[tuple[int, int], ...] = (), cores: tuple[int, int] = (2, 2), **more: object
) -> SchedulingProblem:
    return SchedulingProblem(jobs=jobs, edges=edges, tensor_cores=cores[0], vector_cores=cores[1], **more)  # type: ignore[arg-type]


def tensor(name: str = "a", latency_s: float = 2.0, spread_s: float = 1.0) -> Job:
    return Job(name, Resource.TENSOR, latency_s, spread_s)


def test_cyclic_precedence_is_refused_by_name() -> None:
    with pytest.raises(ScheduleError, match=r"cyclic among 'a', 'b'; remove an edge"):
        problem(tensor("a"), tensor("b"), edges=((0, 1), (1, 0)))


@pytest.mark.parametrize("value", [-1.0, math.nan, -math.inf])
@pytest.mark.parametrize("field", ["latency_s", "spread_s", "energy_j"])
def test_negative_and_nan_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ScheduleError, match=f"op 'a' has {field} {value}"):
        Job("a", Resource.TENSOR, **{"latency_s": 1.0, field: value})  # type: ignore[arg-type]


def test_edges_to_nowhere_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"edge \(0, 3\) names an op outside 0\.\.0"):
        problem(tensor(), edges=((0, 3),))


def test_repeated_names_are_refused() -> None:
    with pytest.raises(ScheduleError, match="two ops are called 'a'"):
        problem(tensor(), tensor())


def test_negative_cores_are_refused() -> None:
    with pytest.raises(ScheduleError, match="-1 vector cores"):
        problem(tensor(), cores=(1, -1))


@pytest.mark.parametrize("method", ["auto", "list", "exact", "cp-sat", "milp"])
@pytest.mark.parametrize(
    ("kind", "cores", "what"),
    [
        (Resource.TENSOR, (0, 1), "tensor"),
        (Resource.VECTOR, (1, 0), "vector"),
        (Resource.BOTH, (0, 1), "tensor"),
        (Resource.BOTH, (1, 0), "vector"),
    ],
)
def test_zero_cores_of_a_needed_kind_is_infeasible_and_named(
    method: str, kind: Resource, cores: tuple[int, int], what: str
) -> None:
    answer = schedule_layer(problem(Job("norm", kind, 1.0), cores=cores), method=method)
    assert answer.status is ScheduleStatus.INFEASIBLE
    assert answer.report == f"op 'norm' needs a {what} core and there is none"
    assert answer.makespan_s == math.inf
    assert not answer.is_feasible


@pytest.mark.parametrize("spread_s", [1.0, math.inf])
def test_infinite_latency_is_infeasible_and_named(spread_s: float) -> None:
    answer = schedule_layer(problem(tensor("a"), Job("giant", Resource.TENSOR, math.inf, spread_s)))
    assert answer.status is ScheduleStatus.INFEASIBLE
    assert answer.report == "op 'giant' cannot run on this accelerator (infinite latency)"


@pytest.mark.parametrize("method", ["auto", "list", "exact", "cp-sat", "milp"])
def test_empty_layer_takes_no_time(method: str) -> None:
    answer = schedule_layer(problem(), method=method)
    assert (answer.makespan_s, answer.bound_s, answer.status) == (0.0, 0.0, ScheduleStatus.OPTIMAL)


@pytest.mark.parametrize("method", ["auto", "list", "exact", "cp-sat", "milp"])
def test_layer_of_views_takes_no_time(method: str) -> None:
    views = (
        Job("view", Resource.NONE, 0.0),
        Job("cast", Resource.TENSOR, 0.0, 0.0),
        Job("split", Resource.BOTH, 1.0, 0.0),
    )
    answer = schedule_layer(problem(*views, edges=((0, 1), (1, 2))), method=method)
    assert (answer.makespan_s, answer.status) == (0.0, ScheduleStatus.OPTIMAL)


def test_unspreadable_op_runs_on_one_core() -> None:
    answer = schedule_layer(problem(Job("a", Resource.TENSOR, 3.0)), gap=0.0)
    assert answer.makespan_s == 3.0


def test_links_overlap_spread_ops_but_not_each_other() -> None:
    jobs = (tensor("mm", 8.0, 4.0), Job("reduce", Resource.LINK, 3.0), Job("gather", Resource.LINK, 2.0))
    assert schedule_layer(problem(*jobs), gap=0.0).makespan_s == 5.0


def test_paper_counting_makes_links_vector_ops_and_leaves_memory_out() -> None:
    jobs = (tensor("mm", 8.0, 4.0), Job("reduce", Resource.LINK, 3.0), Job("gather", Resource.LINK, 2.0))
    kept = schedule_layer(problem(*jobs, cores=(2, 1), memory_s=50.0), gap=0.0)
    paper = schedule_layer(problem(*jobs, cores=(2, 1), memory_s=50.0, compatibility=Compatibility.PAPER), gap=0.0)
    assert (kept.makespan_s <= 50.0, kept.time_s, kept.time_bound_s) == (True, 50.0, 50.0)
    assert (paper.makespan_s, paper.time_s) == (8.0, 8.0)


def test_memory_that_decides_the_time_needs_no_search() -> None:
    jobs = tuple(tensor(f"job{number}", 3.0 + number, 2.0 + number) for number in range(8))
    answer = schedule_layer(problem(*jobs, memory_s=1000.0), gap=0.0, method="exact")
    assert (answer.time_s, answer.time_bound_s, answer.status, answer.work) == (
        1000.0,
        1000.0,
        ScheduleStatus.OPTIMAL,
        0,
    )


def test_key_ignores_names_and_sees_everything_else() -> None:
    base = problem(tensor("a"), tensor("b"), edges=((0, 1),))
    assert base.key() == problem(tensor("x"), tensor("y"), edges=((0, 1), (0, 1))).key()
    changed = [
        problem(tensor("a"), tensor("b")),
        problem(tensor("a"), tensor("b", 2.5), edges=((0, 1),)),
        problem(tensor("a"), tensor("b"), edges=((0, 1),), cores=(2, 3)),
        problem(tensor("a"), tensor("b"), edges=((0, 1),), intra_op_exclusive=False),
        problem(tensor("a"), tensor("b"), edges=((0, 1),), memory_s=1.0),
    ]
    assert len({base.key(), *(other.key() for other in changed)}) == 6


@pytest.mark.parametrize("gap", [-0.1, 1.0, math.nan])
def test_gaps_that_mean_nothing_are_refused(gap: float) -> None:
    with pytest.raises(ValueError, match=f"gap is {gap}"):
        schedule_layer(problem(), gap=gap)


def test_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="'magic' is not a valid Method"):
        schedule_layer(problem(), method="magic")
