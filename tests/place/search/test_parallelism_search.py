"""The default program against trying everything, and the laws that its answers keep."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from placement_brute_force import brute_force
from placement_problems import changed, problem_with_axes, random_problem, stage_sharded_problem, with_axes, with_owners
from property_examples import examples

from phaze.hardware import Cluster
from phaze.parallelism import PIPELINE_SCHEDULES, PipelineSchedule
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.search.parallelism_search import SearchEffort, refuted_below, search_parallelisms
from phaze.place.search.parallelism_table import list_parallelisms
from phaze.place.search.prepared_problem import PreparedProblem
from phaze.place.search.stage_search import PlanKind, best_stages
from phaze.place.simulation.placement import assemble
from phaze.profile.layer_profile import RecomputeMode
from phaze.targets import Capabilities

seeds = st.integers(0, 2**32 - 1)


def compare_with_brute_force(problem: PlacementProblem) -> None:
    expected = brute_force(problem)
    answer = search_parallelisms(PreparedProblem.of(problem), top=4)
    times = sorted(expected.values())[:4]
    assert [plan.time_s for plan in answer.plans] == pytest.approx(times, rel=1e-9)
    for plan in answer.plans:
        assert plan.time_s == pytest.approx(expected[plan.parallelism], rel=1e-9)
    assert answer.bound_s == pytest.approx(min(expected.values(), default=math.inf), rel=1e-9)


@examples(40)
@given(seeds)
def test_the_program_finds_what_trying_everything_finds(seed: int) -> None:
    compare_with_brute_force(random_problem(seed))


@examples(40)
@given(seeds)
def test_the_program_finds_what_trying_everything_finds_where_ends_are_sharded_over_stages(seed: int) -> None:
    compare_with_brute_force(stage_sharded_problem(seed))


@examples(40)
@given(seeds)
def test_the_program_finds_what_trying_everything_finds_over_hybrid_shards_split_sequences_and_experts(
    seed: int,
) -> None:
    compare_with_brute_force(problem_with_axes(seed))


@examples(20)
@given(seeds)
def test_the_program_finds_what_trying_everything_finds_where_owners_broadcast_their_tensors(seed: int) -> None:
    compare_with_brute_force(with_owners(problem_with_axes(seed), seed))


@examples(60)
@given(seeds, st.sampled_from([0.7, 1.0, 1.3, 3.0]))
def test_strategies_that_beat_a_target_are_never_refuted_below_it(seed: int, part: float) -> None:
    prepared = PreparedProblem.of(problem_with_axes(seed))
    expected = brute_force(prepared.problem)
    target_s = part * min(expected.values(), default=1.0)
    table = refuted_below(prepared, prepared.strategies(), target_s)
    assert not (table.is_wide & (table.bound_s < target_s)).any()
    rows = [table.parallelism(index, prepared.problem) for index in range(len(table))]
    for parallelism, time_s in expected.items():
        if time_s < target_s * (1 - 1e-9):
            bounds = [bound_s for row, bound_s in zip(rows, table.bound_s, strict=True) if row == parallelism]
            assert min(bounds, default=math.inf) <= time_s * (1 + 1e-9)


@pytest.mark.exhaustive
@examples(60)
@given(seeds)
def test_the_program_finds_what_trying_everything_finds_over_all_axes_with_six_layers_on_sixteen_devices(
    seed: int,
) -> None:
    compare_with_brute_force(problem_with_axes(seed, largest=6, most_devices=16))


@pytest.mark.exhaustive
@examples(60)
@given(seeds)
def test_the_program_finds_what_trying_everything_finds_with_six_layers_on_eight_devices(seed: int) -> None:
    compare_with_brute_force(random_problem(seed, largest=6, most_devices=8))


@examples(12)
@given(seeds)
def test_no_gate_is_above_the_time_of_what_it_lets_through(seed: int) -> None:
    prepared = PreparedProblem.of(with_axes(random_problem(seed, largest=5, most_devices=8), seed))
    strategies = list_parallelisms(
        prepared.problem, prepared.space, prepared.stage_sums, prepared.network, prepared.update_s
    )
    tightened = prepared.layer_table.tightened(strategies, 50.0)
    for index in range(len(strategies)):
        search = prepared.stage_search_below(strategies.parallelism(index, prepared.problem), math.inf)
        if search is None:
            continue
        problem = changed(
            prepared.problem,
            tp=(int(strategies.tp[index]),),
            dp=(int(strategies.dp[index]),),
            pp=(int(strategies.pp[index]),),
            zero=(int(strategies.zero[index]),),
            shard=(strategies.parallelism(index, prepared.problem).shard,),
        )
        times = [
            plan.time_s
            for plan in search_parallelisms(PreparedProblem.of(problem), top=20).plans
            if plan.parallelism == strategies.parallelism(index, problem)
        ]
        time_s = times[0] if times else math.inf
        assert strategies.bound_s[index] <= time_s
        assert tightened[index] <= time_s


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_of_a_strategy_does_not_depend_on_which_others_were_bounded_before(seed: int) -> None:
    problem = random_problem(seed, largest=6, most_devices=8)
    prepared = PreparedProblem.of(problem)
    strategies = list_parallelisms(
        prepared.problem, prepared.space, prepared.stage_sums, prepared.network, prepared.update_s
    )
    target_s = 50.0
    together = prepared.layer_table.tightened(strategies, target_s)
    for index in range(len(strategies)):
        alone = PreparedProblem.of(problem).layer_table.tightened(strategies.take(np.array([index])), target_s)
        assert alone[0] == together[index]


@examples(25)
@given(seeds)
def test_equal_layers_are_bounded_together_as_they_are_apart(seed: int) -> None:
    prepared = PreparedProblem.of(with_axes(random_problem(seed, largest=9, most_devices=12), seed))
    together, strategies = prepared.layer_table, prepared.strategies()
    layers = np.arange(len(together.kind_of_layer))
    apart = replace(together, kinds=layers, kind_of_layer=layers)
    assert together.tightened(strategies, 50.0) == pytest.approx(apart.tightened(strategies, 50.0), rel=1e-9)


def test_equal_layers_are_priced_once() -> None:
    table = PreparedProblem.of(stage_sharded_problem(0, largest=9, most_devices=4)).layer_table
    assert table.kind_of_layer.tolist() == [0, 1, 1, 1, 1, 1, 2]


@examples(15)
@given(seeds)
@example(33943)  # an interleaved strategy with more pipelines than the default effort searches
def test_no_gate_changes_the_answer(seed: int) -> None:
    prepared = PreparedProblem.of(random_problem(seed, largest=9, most_devices=12, most_micro_batches=16))
    strategies = list_parallelisms(
        prepared.problem, prepared.space, prepared.stage_sums, prepared.network, prepared.update_s, checks_memory=False
    )
    nodes, times = 10**6, [math.inf]
    for index in range(len(strategies)):
        search = prepared.stage_search_below(strategies.parallelism(index, prepared.problem), math.inf)
        if search is not None:
            times.append(best_stages(search, min(times), nodes).time_s)
    answer = search_parallelisms(prepared, effort=SearchEffort(nodes=nodes, nodes_per_strategy=nodes))
    assert (answer.plans[0].time_s if answer.plans else math.inf) == pytest.approx(min(times), rel=1e-9)


def relaxed(seed: int) -> PlacementProblem:
    problem = random_problem(seed, largest=5, most_devices=8)
    return replace(problem, capabilities=Capabilities.everything(), dp_divides_batch=False)


def optimum_s(problem: PlacementProblem) -> float:
    answer = search_parallelisms(PreparedProblem.of(problem))
    return answer.plans[0].time_s if answer.plans else math.inf


@examples(60)
@given(seeds)
def test_more_bandwidth_never_makes_the_optimum_slower(seed: int) -> None:
    problem = relaxed(seed)
    levels = tuple(
        replace(level, bandwidth_bytes_per_s=2 * level.bandwidth_bytes_per_s) for level in problem.cluster.levels
    )
    faster = replace(problem, cluster=replace(problem.cluster, levels=levels))
    assert optimum_s(faster) <= optimum_s(problem) * (1 + 1e-9)


@examples(60)
@given(seeds)
def test_more_memory_never_makes_the_optimum_slower(seed: int) -> None:
    problem = relaxed(seed)
    accelerator = problem.cluster.accelerator
    roomier = replace(accelerator, hbm_bytes=int(1.5 * accelerator.hbm_bytes))
    more = replace(problem, cluster=replace(problem.cluster, accelerator=roomier))
    assert optimum_s(more) <= optimum_s(problem) * (1 + 1e-9)


@examples(60)
@given(seeds, st.integers(1, 5))
def test_more_devices_never_make_the_optimum_slower(seed: int, extra: int) -> None:
    problem = relaxed(seed)
    cluster = problem.cluster
    more = replace(problem, cluster=Cluster(cluster.accelerator, cluster.device_count + extra, cluster.levels))
    assert optimum_s(more) <= optimum_s(problem) * (1 + 1e-9)


KINDS = st.sets(st.sampled_from(PIPELINE_SCHEDULES))


@examples(60)
@given(seeds, KINDS, st.sampled_from(PIPELINE_SCHEDULES))
def test_a_schedule_more_to_choose_from_never_makes_the_optimum_slower(
    seed: int, kinds: set[PipelineSchedule], other: PipelineSchedule
) -> None:
    problem = changed(relaxed(seed), schedule=tuple(kinds))
    more = changed(problem, schedule=(*kinds, other))
    assert optimum_s(more) <= optimum_s(problem) * (1 + 1e-9)


@examples(60)
@given(seeds, KINDS, st.sampled_from([0.005, 0.05, 0.3]))
def test_looser_schedules_to_choose_from_never_make_a_plan_slower_whatever_the_gap(
    seed: int, kinds: set[PipelineSchedule], gap: float
) -> None:
    tight = (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.ZERO_BUBBLE)
    few = changed(relaxed(seed), schedule=tight)
    fewer, more = (
        search_parallelisms(PreparedProblem.of(problem), gap=gap).plans
        for problem in (few, changed(few, schedule=(*sorted(kinds), *tight)))
    )
    assert not fewer or more[0].time_s <= fewer[0].time_s * (1 + 1e-9)


@examples(30)
@given(seeds)
def test_little_effort_lowers_the_bound_and_never_the_honesty(seed: int) -> None:
    problem = random_problem(seed, largest=5, most_devices=8)
    thorough = search_parallelisms(PreparedProblem.of(problem))
    hasty = search_parallelisms(
        PreparedProblem.of(problem), effort=SearchEffort(nodes=2, nodes_per_strategy=1, strategies=3)
    )
    if thorough.plans:
        assert hasty.bound_s <= thorough.plans[0].time_s * (1 + 1e-9)
        if hasty.plans:
            assert hasty.plans[0].time_s >= thorough.plans[0].time_s * (1 - 1e-9)
    elif not hasty.plans:
        assert hasty.bound_s == math.inf or math.isfinite(hasty.bound_s)


def test_the_same_problem_gets_the_same_answer() -> None:
    problem = random_problem(12, largest=6, most_devices=8)
    first, second = (search_parallelisms(PreparedProblem.of(problem), top=5) for _ in range(2))
    assert first == second


def test_the_orders_of_passes_are_not_shared_between_problems() -> None:
    problem = random_problem(3)
    prepared = PreparedProblem.of(problem)
    search_parallelisms(prepared)
    assert not PreparedProblem.of(problem).programs
    assert np.isfinite(prepared.update_s)


@examples(30)
@given(seeds)
def test_the_best_of_each_kind_is_a_plan_of_that_kind_and_the_best_plan_is_the_best_of_its_kinds(seed: int) -> None:
    problem = random_problem(seed, largest=5, most_devices=8)
    prepared = PreparedProblem.of(problem)
    answer = search_parallelisms(prepared)
    assert bool(answer.best_by_kind) == bool(answer.plans)
    for kind, plan in answer.best_by_kind.items():
        placement = assemble(prepared, plan.parallelism, plan.stages)
        modes = {stage.recompute for stage in placement.stages}
        is_of_kind = {
            PlanKind.NO_PIPELINE: plan.parallelism.pp == 1,
            PlanKind.PIPELINE: plan.parallelism.pp > 1,
            PlanKind.NO_ZERO: plan.parallelism.zero == 0,
            PlanKind.ZERO: plan.parallelism.zero > 0,
            PlanKind.ZERO_OVER_ALL: plan.parallelism.zero > 0 and plan.parallelism.shard_groups == 1,
            PlanKind.NO_RECOMPUTE: modes == {RecomputeMode.NONE},
            PlanKind.FULL_RECOMPUTE: modes == {RecomputeMode.FULL},
        }
        assert is_of_kind.get(kind, kind == f"schedule {plan.parallelism.schedule}")
        assert placement.time_s == pytest.approx(plan.time_s)
        assert plan.time_s >= answer.plans[0].time_s
    if answer.plans:
        assert answer.plans[0] in answer.best_by_kind.values()
