"""The answer as a whole: best plan, runners-up, bound, evaluation, and the paper's counting of the same problem."""

import json
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from placement import brute_force
from placement_problems import changed, examples, random_problem

from phaze.capabilities import Capabilities
from phaze.errors import GraphError, PlacementError
from phaze.parallelism import PIPELINE_SCHEDULES, Parallelism, PipelineSchedule
from phaze.place import (
    Bounded,
    EventKind,
    Fit,
    LayerProfile,
    PlacementProblem,
    PlacementStatus,
    PreparedProblem,
    RecomputeMode,
    SearchEffort,
    bound_placement,
    evaluate_placement,
    find_placement,
    is_beaten,
    paper_instance,
    place_as_paper,
    place_paper,
)
from phaze.place.search.parallelism_search import search_parallelisms

seeds = st.integers(0, 2**32 - 1)


def loosened(problem: PlacementProblem, part: float) -> PlacementProblem:
    """The same problem with bounds at a part of its times."""

    def lower(profile: LayerProfile) -> LayerProfile:
        names = ("forward_s", "backward_input_s", "backward_weight_s", "recompute_s")
        seconds = {name: getattr(profile, name).value for name in names}
        return replace(profile, **{name: Bounded(value, part * value) for name, value in seconds.items()})

    return replace(problem, profiles={key: lower(profile) for key, profile in problem.profiles.items()})


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


@examples(25)
@given(seeds)
def test_the_bound_is_the_same_program_on_lower_bounds(seed: int) -> None:
    problem = random_problem(seed)
    loose = loosened(problem, 0.8)
    result = find_placement(loose)
    if result.best is None:
        assert result.status is PlacementStatus.INFEASIBLE
        return
    exact = replace(
        problem, profiles={key: loosened_profile(profile, 0.8) for key, profile in problem.profiles.items()}
    )
    optimum = find_placement(exact).best
    assert optimum is not None
    assert result.bound_s == pytest.approx(optimum.time_s, rel=1e-9)
    assert result.status in (PlacementStatus.WITHIN, PlacementStatus.OPTIMAL)
    assert result.gap == pytest.approx(1 - optimum.time_s / result.best.time_s)


def loosened_profile(profile: LayerProfile, part: float) -> LayerProfile:
    names = ("forward_s", "backward_input_s", "backward_weight_s", "recompute_s")
    return replace(profile, **{name: Bounded.exact(part * getattr(profile, name).value) for name in names})


def test_proven_answers_are_called_optimal_and_alternatives_say_what_they_lose() -> None:
    result = find_placement(chain_problem(), top=4)
    assert result.status is PlacementStatus.OPTIMAL
    assert result.gap == 0.0
    assert result.best is not None
    times = [result.best.time_s, *(other.placement.time_s for other in result.alternatives)]
    assert times == sorted(times)
    assert len({other.placement.parallelism for other in result.alternatives}) == 3
    assert all("slower" in other.reason for other in result.alternatives)


def test_asking_for_no_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="top is 0; expected at least 1"):
        find_placement(random_problem(7), top=0)


@examples(40)
@given(seeds)
def test_only_plans_below_the_cutoff_are_looked_for(seed: int) -> None:
    problem = random_problem(seed, largest=5, most_devices=8)
    best = find_placement(problem).best
    if best is None:
        return
    above = find_placement(problem, cutoff_s=best.time_s * (1 + 1e-6))
    assert above.best is not None
    assert (above.best.time_s, above.bound_s) == pytest.approx((best.time_s, best.time_s))
    for part in (1.0, 0.7):
        below = find_placement(problem, cutoff_s=part * best.time_s)
        assert (below.best, below.alternatives, below.infeasibility) == (None, (), None)
        assert below.status is PlacementStatus.CUT_OFF
        assert below.bound_s == part * best.time_s


@examples(40)
@given(seeds, st.sampled_from([0.01, 0.1, 0.3]))
def test_a_gap_is_kept_and_the_bound_still_holds(seed: int, gap: float) -> None:
    problem = random_problem(seed, largest=5, most_devices=8)
    exact, near = find_placement(problem).best, find_placement(problem, gap=gap)
    assert (exact is None) == (near.best is None)
    if exact is not None and near.best is not None:
        assert near.bound_s <= exact.time_s * (1 + 1e-9)
        assert near.bound_s >= near.best.time_s * (1 - gap) * (1 - 1e-9)
        assert near.gap <= gap + 1e-9


@examples(30)
@given(seeds, st.sampled_from([0.0, 0.01, 0.2]), st.sampled_from([0.9, 1.0, 1.05, math.inf]))
def test_likely_degrees_change_neither_what_is_found_nor_what_is_proven(seed: int, gap: float, part: float) -> None:
    problem = loosened(random_problem(seed, largest=5, most_devices=8), 0.97)
    exact = find_placement(problem, top=20)
    if exact.best is None:
        return
    cutoff_s = part * exact.best.time_s
    every = [exact.best.parallelism, *(other.placement.parallelism for other in exact.alternatives)]
    for likely in Random(seed).sample(every, min(3, len(every))):
        found = find_placement(problem, top=1, cutoff_s=cutoff_s, gap=gap, likely=likely)
        plain = find_placement(problem, top=1, cutoff_s=cutoff_s, gap=gap)
        reached_s = cutoff_s if found.best is None else found.best.time_s
        assert found.bound_s >= min(plain.bound_s, reached_s * (1 - gap)) * (1 - 1e-9)
        assert found.bound_s <= exact.best.time_s * (1 + 1e-9)
        if found.best is None:
            assert found.status is PlacementStatus.CUT_OFF
            assert cutoff_s * (1 - gap) <= exact.best.time_s * (1 + 1e-9)
        else:
            assert found.best.time_s < cutoff_s
            assert found.best.time_s * (1 - gap) <= exact.best.time_s * (1 + 1e-9)


def test_likely_degrees_that_are_no_choice_are_left_aside() -> None:
    problem = chain_problem()
    best = find_placement(problem).best
    assert best is not None
    depths = tuple(depth for depth in (1, 2) if depth != best.parallelism.pp)
    narrowed = changed(problem, pp=depths)
    found, plain = find_placement(narrowed, top=1, likely=best.parallelism).best, find_placement(narrowed, top=1).best
    assert found is not None
    assert plain is not None
    assert (found.parallelism, found.time_s) == (plain.parallelism, plain.time_s)


@examples(40)
@given(seeds, st.floats(0.3, 1.5))
def test_what_is_beaten_has_no_plan_that_is_quicker(seed: int, part: float) -> None:
    problem = loosened(random_problem(seed, largest=5, most_devices=8), 0.8)
    best = find_placement(problem).best
    if best is not None:
        assert not (is_beaten(problem, part * best.time_s) and part * best.time_s > best.time_s * (1 + 1e-9))
        assert is_beaten(problem, 1e-9 * best.time_s)


@examples(40)
@given(seeds)
@example(12154214)
def test_a_cutoff_above_the_optimum_hides_neither_it_nor_a_bound(seed: int) -> None:
    problem = loosened(random_problem(seed, largest=5, most_devices=8), 0.8)
    for prepared in (PreparedProblem.of(problem), PreparedProblem.of(problem).with_bounds()):
        best = search_parallelisms(prepared)
        for above in (1.001, 1.1, 1.5) if best.plans else ():
            cut = search_parallelisms(prepared, cutoff_s=above * best.plans[0].time_s)
            assert cut.plans[0].time_s == pytest.approx(best.plans[0].time_s, rel=1e-9)
            assert cut.bound_s <= best.plans[0].time_s * (1 + 1e-9)


@examples(40)
@given(seeds)
@example(12154214)
def test_a_quick_bound_lies_under_every_plan_and_a_thorough_one_is_that_of_the_search(seed: int) -> None:
    problem = loosened(random_problem(seed, largest=5, most_devices=8), 0.8)
    result = find_placement(problem)
    quick, thorough = bound_placement(problem), bound_placement(problem, effort=SearchEffort())
    if result.best is None:
        assert thorough == math.inf
    else:
        assert quick <= thorough * (1 + 1e-9)
        assert thorough == pytest.approx(result.bound_s)
        assert bound_placement(problem, cutoff_s=0.5 * quick) == 0.5 * quick


@pytest.mark.parametrize("cutoff_s", [0.0, -1.0, math.nan])
def test_a_cutoff_that_cannot_be_is_refused(cutoff_s: float) -> None:
    with pytest.raises(ValueError, match=r"cutoff_s is .*; expected seconds above 0"):
        find_placement(random_problem(7), cutoff_s=cutoff_s)


@pytest.mark.parametrize("gap", [1.0, -0.1, math.nan])
def test_a_gap_that_cannot_be_is_refused(gap: float) -> None:
    with pytest.raises(ValueError, match=r"gap is .*; expected a part from 0 to below 1"):
        find_placement(random_problem(7), gap=gap)


@examples(40)
@given(seeds)
def test_a_problem_narrowed_to_one_strategy_is_answered_for_that_strategy(seed: int) -> None:
    problem = random_problem(seed)
    strategies = list(brute_force(problem))
    if not strategies:
        return
    random = Random(seed)
    tp, dp, devices, chunks, schedule, zero = random.choice(strategies)
    narrow = changed(
        problem,
        tp=(tp,),
        dp=(dp,),
        pp=(devices,),
        schedule=() if schedule is PipelineSchedule.NONE else (schedule,),
        chunks=(chunks,) if chunks > 1 else problem.choices.chunks,
        zero=(zero,),
        recompute=(random.choice(problem.choices.recompute),),
    )
    expected = brute_force(narrow)
    best = find_placement(narrow).best
    assert (best is None) == (not expected)
    if best is not None:
        parallelism = Parallelism(
            tp=tp,
            dp=dp,
            pp=devices,
            chunks=chunks,
            schedule=schedule,
            zero=zero,
        )
        assert best.parallelism == parallelism
        assert list(expected.values()) == pytest.approx([best.time_s])
        assert {stage.recompute for stage in best.stages} == set(narrow.choices.recompute)


def test_a_zero_stage_asked_of_a_single_pipeline_shards_nothing() -> None:
    problem = changed(chain_problem(), dp=(1,))
    plain, asked = (find_placement(changed(problem, zero=(zero,))).best for zero in (0, 2))
    assert plain is not None
    assert asked is not None
    assert asked.parallelism.zero == 2
    assert asked.time_s == plain.time_s


def chain_problem() -> PlacementProblem:
    """The first random problem that is a chain with full recompute, of which everything is allowed, and that fits."""
    for seed in range(10_000):
        problem = random_problem(seed, largest=6, most_devices=8)
        flows = [(flow.producer, flow.consumers) for flow in problem.graph.flows]
        is_chain = flows == [(index, (index + 1,)) for index in range(len(problem.graph.layers) - 1)]
        is_free = problem.capabilities == Capabilities.everything() and set(problem.choices.schedule) == set(
            PIPELINE_SCHEDULES
        )
        modes = (RecomputeMode.NONE, RecomputeMode.FULL)
        if is_chain and is_free and len(flows) >= 3 and problem.choices.recompute == modes:
            narrow = changed(problem, dp=(1,), zero=(0,))
            if find_placement(narrow).best and len(find_placement(problem, top=4).alternatives) == 3:
                return problem
    raise AssertionError


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
    small = replace(problem.cluster.accelerator, hbm_bytes=1000)
    tight = replace(problem, cluster=replace(problem.cluster, accelerator=small))
    parallelism = Parallelism(tp=problem.tp_degrees[0], dp=1, pp=1, chunks=1, schedule=PipelineSchedule.NONE, zero=0)
    placement = evaluate_placement(
        PreparedProblem.of(tight), parallelism, [(range(len(problem.graph.layers)), RecomputeMode.NONE)]
    )
    assert placement.fit is Fit.OVER
    assert placement.time_s > 0


def test_a_stage_within_the_margin_is_marginal() -> None:
    problem = replace(chain_problem(), memory_margin=0.2, allows_marginal=True)
    best = find_placement(problem).best
    assert best is not None
    peak = max(memory.total_bytes for memory in best.memory)
    fitted = replace(problem.cluster.accelerator, hbm_bytes=int(peak / 0.9))
    tight = find_placement(replace(problem, cluster=replace(problem.cluster, accelerator=fitted))).best
    assert tight is not None
    assert tight.fit is Fit.MARGINAL


def test_the_papers_program_counts_the_same_problem() -> None:
    problem = chain_problem()
    instance = paper_instance(problem)
    plan = place_as_paper(problem)
    assert plan is not None
    assert plan.time_s == place_paper(instance).time_s[problem.accelerator]
    assert [name for stage in plan.stages for name in stage] == [layer.name for layer in problem.graph.layers]
    assert instance.recompute == (False, True)


def test_the_papers_program_refuses_branches_and_missing_profiles() -> None:
    chain = chain_problem()
    with pytest.raises(GraphError, match="branches"):
        place_as_paper(replace(chain, graph=replace(chain.graph, flows=chain.graph.flows[1:])))
    with pytest.raises(PlacementError, match="needs profiles without recompute"):
        paper_instance(changed(chain, recompute=(RecomputeMode.FULL,)))


def test_the_timeline_shows_every_pass_and_ends_with_the_batch() -> None:
    best = find_placement(chain_problem()).best
    assert best is not None
    timeline = best.timeline
    forwards = [event for event in timeline.events if event.kind is EventKind.FORWARD]
    assert len(forwards) == best.micro_batches * len(best.stages)
    assert max(event.end_s for event in timeline.events) == pytest.approx(best.time_s)
    text = timeline.text(60)
    assert len(text.splitlines()) == timeline.devices + 2
    assert "0" in text.splitlines()[0]
    trace = timeline.chrome_trace()
    assert json.loads(json.dumps(trace)) == trace
    assert len(trace["traceEvents"]) == len(timeline.events)
    assert {event["ph"] for event in trace["traceEvents"]} == {"X"}


@examples(25)
@given(seeds)
def test_events_of_a_device_do_not_overlap(seed: int) -> None:
    best = find_placement(random_problem(seed, largest=5, most_devices=8)).best
    if best is None:
        return
    for device in range(best.timeline.devices):
        events = sorted((event.start_s, event.end_s) for event in best.timeline.events if event.device == device)
        starts, ends = np.array(events).T
        assert (starts[1:] >= ends[:-1] - 1e-9).all()
        assert math.isclose(ends.max(), best.timeline.time_s) or ends.max() < best.timeline.time_s
