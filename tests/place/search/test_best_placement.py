"""The answer as a whole: the best plan, the runners-up, the cutoff, the gap and the bound."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from placement_brute_force import brute_force
from placement_problems import chain_problem, changed, random_problem
from property_examples import examples

from phaze.parallelism import PipelineSchedule
from phaze.place import (
    Bounded,
    BoundedStrategies,
    LayerProfile,
    PlacementProblem,
    PlacementStatus,
    PreparedProblem,
    SearchEffort,
    bound_placement,
    find_placement,
    is_beaten,
)
from phaze.place.search.parallelism_search import refuted_below, search_parallelisms

seeds = st.integers(0, 2**32 - 1)


def loosened(problem: PlacementProblem, part: float) -> PlacementProblem:
    """The same problem with bounds at a part of its times."""

    def lower(profile: LayerProfile) -> LayerProfile:
        names = ("forward_s", "backward_input_s", "backward_weight_s", "recompute_s")
        seconds = {name: getattr(profile, name).value for name in names}
        return replace(profile, **{name: Bounded(value, part * value) for name, value in seconds.items()})

    return replace(problem, profiles={key: lower(profile) for key, profile in problem.profiles.items()})


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
def test_a_likely_strategy_changes_neither_what_is_found_nor_what_is_proven(seed: int, gap: float, part: float) -> None:
    problem = loosened(random_problem(seed, largest=5, most_devices=8), 0.97)
    exact = find_placement(problem, top=20)
    if exact.best is None:
        return
    cutoff_s = part * exact.best.time_s
    strategies = [exact.best.parallelism, *(other.placement.parallelism for other in exact.alternatives)]
    for likely in Random(seed).sample(strategies, min(3, len(strategies))):
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


def test_a_likely_strategy_that_is_no_choice_is_left_aside() -> None:
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


@examples(30)
@given(seeds, st.sampled_from([0.0, 0.01, 0.1]), st.sampled_from([0.9, 1.05, 1.5]))
def test_bounds_from_before_change_neither_the_answer_nor_what_is_proven(seed: int, gap: float, part: float) -> None:
    problem = loosened(random_problem(seed, largest=5, most_devices=8), 0.95)
    exact = find_placement(problem).best
    if exact is None:
        return
    cutoff_s = part * exact.time_s
    bounded = PreparedProblem.of(problem, use_bounds=True)
    target_s = cutoff_s * (1 - gap)
    strategies = refuted_below(bounded, bounded.strategies(), target_s)
    known = BoundedStrategies(prepared=bounded, strategies=strategies, target_s=target_s)
    result = find_placement(problem, cutoff_s=cutoff_s, gap=gap, known=known)
    assert result.bound_s <= exact.time_s * (1 + 1e-9)
    if result.best is None:
        assert exact.time_s >= target_s * (1 - 1e-9)
    else:
        assert exact.time_s >= result.best.time_s * (1 - gap) * (1 - 1e-9)


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
    strategy = random.choice(strategies)
    narrow = changed(
        problem,
        tp=(strategy.tp,),
        dp=(strategy.dp,),
        pp=(strategy.pp,),
        schedule=() if strategy.schedule is PipelineSchedule.NONE else (strategy.schedule,),
        chunks=(strategy.chunks,) if strategy.chunks > 1 else problem.choices.chunks,
        zero=(strategy.zero,),
        shard=(strategy.shard,),
        recompute=(random.choice(problem.choices.recompute),),
    )
    expected = brute_force(narrow)
    best = find_placement(narrow).best
    assert (best is None) == (not expected)
    if best is not None:
        assert best.parallelism == strategy
        assert list(expected.values()) == pytest.approx([best.time_s])
        assert {stage.recompute for stage in best.stages} == set(narrow.choices.recompute)


def test_a_zero_stage_asked_of_a_single_pipeline_shards_nothing() -> None:
    problem = changed(chain_problem(), dp=(1,))
    plain, asked = (find_placement(changed(problem, zero=(zero,))).best for zero in (0, 2))
    assert plain is not None
    assert asked is not None
    assert asked.parallelism.zero == 2
    assert asked.time_s == plain.time_s
