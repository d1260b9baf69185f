"""Sums over stages against loops over their layers: seconds, parameters and their ties, stash and what crosses cuts."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_problems import random_problem, stage_sharded_problem, with_axes
from property_examples import examples

from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_space import StageSpace, build_stage_space
from phaze.place.model.stage_sums import StageSumsByTp, build_stage_sums

seeds = st.integers(0, 2**32 - 1)


def sizes_of_flows(problem: PlacementProblem, tp: int) -> list[tuple[int, frozenset[int], float]]:
    """Every tensor between layers: who makes it, who reads it, its bytes."""
    mode = problem.choices.recompute[0]
    return [
        (flow.producer, frozenset(flow.consumers), problem.profile(flow.producer, tp, mode).outputs[flow.output])
        for flow in problem.graph.flows
    ]


@examples(60)
@given(seeds)
def test_sums_of_a_stage_equal_loops_over_its_layers(seed: int) -> None:
    problem = with_axes(random_problem(seed, largest=6), seed)
    space = build_stage_space(problem.graph)
    tp = Random(seed).choice(problem.tp_degrees)
    sums = build_stage_sums(problem, space, tp, use_bounds=False)
    for stage in range(len(space.source)):
        members = space.members(stage)
        for index, mode in enumerate(problem.choices.recompute):
            profiles = [problem.profile(layer, tp, mode) for layer in members]
            for name in ("forward_s", "backward_input_s", "backward_weight_s", "recompute_s"):
                expected = sum(float(getattr(profile, name).value[problem.accelerator]) for profile in profiles)
                assert getattr(sums, name)[index, stage] == pytest.approx(expected)
            relayed = relayed_bytes(problem, space, stage, tp)
            assert sums.stashed_bytes[index, stage] == pytest.approx(
                sum(profile.stashed_bytes for profile in profiles) + relayed
            )
        assert sums.parameters[stage] == pytest.approx(held_parameters(problem, members, tp))
        experts = sum(profile.expert_parameters for profile in profiles) if problem.ep > 1 else 0.0
        assert sums.expert_parameters[stage] == pytest.approx(experts)
        assert sum(kind.parameters[stage] for kind in sums.kinds(problem.ep)) == pytest.approx(sums.parameters[stage])
        frozen = sum(profile.frozen_parameters for profile in profiles)
        assert sums.frozen[0].summed_parameters[stage] + sums.frozen[1].parameters[stage] == pytest.approx(frozen)


def held_parameters(problem: PlacementProblem, members: tuple[int, ...], tp: int) -> float:
    """Trained parameters of some layers, each tied one once and as large as the largest of its layers has it."""
    profiles = [problem.profile(layer, tp, problem.choices.recompute[0]) for layer in members]
    alone = sum(profile.parameters - sum(profile.tied_parameters.values()) for profile in profiles)
    ties = {name for profile in profiles for name in profile.tied_parameters if name in problem.graph.ties}
    return alone + sum(max(profile.tied_parameters.get(name, 0.0) for profile in profiles) for name in ties)


def relayed_bytes(problem: PlacementProblem, space: StageSpace, stage: int, tp: int) -> float:
    """Bytes of tensors that were made before the stage and are read after it, but not by it."""
    before = set(np.flatnonzero(space.inside[space.source[stage]]).tolist())
    placed = set(np.flatnonzero(space.inside[space.target[stage]]).tolist())
    return sum(
        tensor.size_bytes
        for producer, readers, tensor in sizes_of_flows(problem, tp)
        if producer in before and readers - placed and not readers & (placed - before)
    )


@examples(60)
@given(seeds)
def test_what_crosses_a_cut_was_made_before_it_and_is_read_after_it(seed: int) -> None:
    problem = random_problem(seed, largest=6)
    space = build_stage_space(problem.graph)
    tp = problem.tp_degrees[0]
    sums = build_stage_sums(problem, space, tp, use_bounds=False)
    for stage in range(len(space.source)):
        ends = ((space.source, sums.received_bytes), (space.target, sums.sent_bytes))
        for states, crossing in ends:
            placed = set(np.flatnonzero(space.inside[states[stage]]).tolist())
            expected = sum(
                tensor.size_bytes
                for producer, readers, tensor in sizes_of_flows(problem, tp)
                if producer in placed and readers - placed
            )
            assert crossing[stage] == pytest.approx(expected)


@examples(40)
@given(seeds, st.integers(2, 4))
def test_parameters_sharded_over_stages_are_all_held_once(seed: int, stages: int) -> None:
    problem = stage_sharded_problem(seed)
    space = build_stage_space(problem.graph)
    sums = build_stage_sums(problem, space, problem.tp_degrees[0], use_bounds=False)
    sharded = sums.sharded_over_stages(stages)
    whole = int(np.flatnonzero((space.source == 0) & (space.target == space.states - 1))[0])
    parts = sharded.parameters - sums.stage_local_parameters
    assert stages * parts[whole] == pytest.approx(sums.all_stage_sharded_parameters)
    assert sums.stage_local_parameters[whole] + stages * parts[whole] == pytest.approx(sums.parameters[whole])


def test_sums_are_made_for_the_tp_that_is_asked_for_and_no_other() -> None:
    problem = next(problem for problem in map(random_problem, range(100)) if len(problem.tp_degrees) > 1)
    by_tp = StageSumsByTp(problem, build_stage_space(problem.graph), use_bounds=False)
    assert tuple(by_tp) == problem.tp_degrees
    assert by_tp[problem.tp_degrees[1]] is by_tp[problem.tp_degrees[1]]
    with pytest.raises(KeyError):
        by_tp[1024]
