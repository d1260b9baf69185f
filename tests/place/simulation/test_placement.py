"""Placements of given stages: they repeat what the search states, add up, and refuse stages that cut no graph."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_problems import chain_problem, random_problem, with_memory
from property_examples import examples

from phaze.errors import PlacementError
from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place import Fit, PreparedProblem, RecomputeMode, evaluate_placement, find_placement
from phaze.profile.layer_profile import PlacementGraph

seeds = st.integers(0, 2**32 - 1)


@examples(40)
@given(seeds)
def test_evaluating_the_best_stages_gives_the_time_that_the_search_states(seed: int) -> None:
    problem = random_problem(seed, largest=5, most_devices=8)
    result = find_placement(problem)
    for placement in [result.best, *(other.placement for other in result.alternatives)]:
        if placement is None:
            continue
        stages = [(stage.layers, stage.recompute) for stage in placement.stages]
        again = evaluate_placement(PreparedProblem.of(problem), placement.parallelism, stages)
        assert again.time_s == placement.time_s
        assert again.memory == placement.memory
        assert all(memory.total_bytes <= problem.usable_bytes * (1 + 1e-9) for memory in placement.memory)
        assert placement.device_count <= problem.cluster.device_count


@examples(40)
@given(seeds)
def test_the_parts_of_the_time_add_up_and_none_is_negative(seed: int) -> None:
    best = find_placement(random_problem(seed, largest=5, most_devices=8)).best
    if best is not None:
        parts = [getattr(best.parts, name) for name in best.parts.__slots__]
        assert sum(parts) == pytest.approx(best.time_s)
        assert min(parts) >= -1e-9


def test_stages_that_do_not_cut_the_graph_are_refused() -> None:
    problem = chain_problem()
    prepared, none = PreparedProblem.of(problem), RecomputeMode.NONE
    last = len(problem.graph.layers) - 1
    parallelism = Parallelism(
        tp=problem.tp_degrees[0],
        dp=1,
        pp=2,
        chunks=1,
        schedule=PipelineSchedule.ONE_F_ONE_B,
        zero=0,
    )
    everything = range(last + 1)
    for stages, message in [
        ([(everything, none)], "1 stages for 2 devices"),
        ([([1], none), ([0, *range(2, last + 1)], none)], "reads from a later stage"),
        ([([0], none), (range(1, last), none)], rf"layers \[{last}\] are in no stage"),
        ([([0], none), ([0, *range(1, last + 1)], none)], "repeats layers"),
        ([([0], none), ([], none)], "is empty"),
        ([([0], RecomputeMode.SELECTIVE), (range(1, last + 1), none)], "recompute mode selective is not among"),
    ]:
        with pytest.raises(PlacementError, match=message):
            evaluate_placement(prepared, parallelism, stages)
    with pytest.raises(PlacementError, match="tp 64 was not profiled"):
        evaluate_placement(prepared, replace(parallelism, tp=64), [([0], none), (range(1, last + 1), none)])


def test_a_plan_that_does_not_fit_can_still_be_evaluated() -> None:
    problem = chain_problem()
    tight = with_memory(problem, 1000)
    parallelism = Parallelism(tp=problem.tp_degrees[0], dp=1, pp=1, chunks=1, schedule=PipelineSchedule.NONE, zero=0)
    placement = evaluate_placement(
        PreparedProblem.of(tight), parallelism, [(range(len(problem.graph.layers)), RecomputeMode.NONE)]
    )
    assert placement.fit is Fit.OVER
    assert placement.time_s > 0


def test_where_a_v_turns_nothing_is_sent_and_both_ends_add_up_what_they_share() -> None:
    problem = chain_problem()
    members = list(range(len(problem.graph.layers)))
    plain = {
        index: replace(profile, tied_parameters={})
        for index, profile in problem.profiles.items()
        if index[0] == problem.graph.layers[1].key
    }
    profiles = {("inner", *index[1:]): profile for index, profile in plain.items()}
    for index, profile in plain.items():
        profiles["end", *index[1:]] = replace(profile, tied_parameters={"tie": profile.parameters / 2})
    keys = ("end", *("inner" for _ in members[1:-1]), "end")
    graph = PlacementGraph.chain(keys, {"tie": (members[0], members[-1])})
    prepared = PreparedProblem.of(replace(problem, graph=graph, profiles=profiles, micro_batches=4))
    stages = [([layer], RecomputeMode.NONE) for layer in members[:3]] + [(members[3:], RecomputeMode.NONE)]
    strategy = Parallelism(tp=problem.tp_degrees[0], pp=2, chunks=2, schedule=PipelineSchedule.INTERLEAVED)
    loop, v = (
        [stage.passes for stage in evaluate_placement(prepared, replace(strategy, schedule=schedule), stages).stages]
        for schedule in (PipelineSchedule.INTERLEAVED, PipelineSchedule.ZERO_BUBBLE_V)
    )
    assert [stage.receive_s > 0 for stage in loop] == [False, True, True, True]
    assert [stage.receive_s > 0 for stage in v] == [False, True, False, True]
    assert [stage.receive_gradient_s > 0 for stage in v] == [True, False, True, False]
    assert loop[0].shared_reduction_s > 0 == v[0].shared_reduction_s == v[3].shared_reduction_s
