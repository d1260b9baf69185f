"""States and activations on the host: less on devices, passes and updates that wait, and the optimum of trying all."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_brute_force import brute_force
from placement_problems import chain_problem, problem_with_axes, random_problem, with_host
from property_examples import examples

from phaze.errors import PlacementError
from phaze.hardware import HostLink, precision_recipe
from phaze.parallelism import Offload
from phaze.place import PlacementProblem, PreparedProblem, bound_placement, evaluate_placement, find_placement
from phaze.place.model.placement_problem import moved_profile
from phaze.place.model.stage_costs import update_s_per_parameter

seeds = st.integers(0, 2**32 - 1)


def assert_best(problem: PlacementProblem) -> None:
    times_s = brute_force(problem)
    result = find_placement(problem, top=1)
    if not times_s:
        assert result.best is None
        return
    assert result.best is not None
    assert result.best.time_s == pytest.approx(min(times_s.values()), rel=1e-9)
    assert result.best.parallelism.offload is problem.offload
    assert result.bound_s == pytest.approx(result.best.time_s, rel=1e-6)
    assert bound_placement(problem) <= result.best.time_s * (1 + 1e-9)


@examples(25)
@given(seeds)
def test_the_best_plan_with_states_on_the_host_is_that_of_trying_everything(seed: int) -> None:
    assert_best(with_host(random_problem(seed), seed))


@examples(15)
@given(seeds)
def test_the_best_plan_over_all_axes_with_states_on_the_host_is_that_of_trying_everything(seed: int) -> None:
    assert_best(with_host(problem_with_axes(seed), seed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(60))
def test_the_best_plan_of_six_layers_with_states_on_the_host_is_that_of_trying_everything(seed: int) -> None:
    assert_best(with_host(random_problem(seed, largest=6, most_devices=8, most_micro_batches=4), seed))


def moved_problem(problem: PlacementProblem, seed: int) -> PlacementProblem:
    """With activations on hosts, alone or beside optimizer states; links hide passes wholly or in part."""
    moved = with_host(problem, seed, Offload.BOTH if seed % 3 == 0 else Offload.ACTIVATIONS)
    return replace(moved, calibration=replace(problem.calibration, overlap=1.0 if seed % 2 else 0.6))


@examples(25)
@given(seeds)
def test_the_best_plan_with_activations_on_the_host_is_that_of_trying_everything(seed: int) -> None:
    assert_best(moved_problem(random_problem(seed), seed))


@examples(15)
@given(seeds)
def test_the_best_plan_over_all_axes_with_activations_on_the_host_is_that_of_trying_everything(seed: int) -> None:
    assert_best(moved_problem(problem_with_axes(seed), seed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(60))
def test_the_best_plan_of_six_layers_with_activations_on_the_host_is_that_of_trying_everything(seed: int) -> None:
    assert_best(moved_problem(random_problem(seed, largest=6, most_devices=8, most_micro_batches=4), seed))


@examples(30)
@given(seeds, st.floats(1e3, 1e15), st.floats(0, 1))
def test_a_slower_link_to_the_host_never_makes_a_layer_quicker(seed: int, bandwidth: float, overlap: float) -> None:
    for profile in random_problem(seed).profiles.values():
        slow, fast = (moved_profile(profile, bandwidth * factor, overlap) for factor in (1, 2))
        for name in ("forward_s", "backward_input_s"):
            assert (getattr(fast, name).value <= getattr(slow, name).value).all()
            assert (getattr(profile, name).value <= getattr(fast, name).value).all()
            assert (getattr(slow, name).bound <= getattr(slow, name).value * (1 + 1e-12)).all()


def test_passes_wait_for_what_moves_and_devices_hold_two_layers_of_it() -> None:
    problem = chain_problem()
    kept = next(profile for profile in problem.profiles.values() if profile.stashed_bytes)
    forward_s, backward_s = kept.forward_s.value[0], (kept.backward_input_s.value + kept.backward_weight_s.value)[0]
    for moved_s in (min(forward_s, backward_s) / 2, 3 * max(forward_s, backward_s)):
        moved = moved_profile(kept, kept.stashed_bytes / moved_s, 1.0)
        assert moved.forward_s.value[0] == pytest.approx(max(forward_s, moved_s))
        assert (moved.backward_input_s.value + moved.backward_weight_s.value)[0] == pytest.approx(
            max(backward_s, moved_s)
        )
        assert (moved.stashed_bytes, moved.host_bytes) == (0, kept.stashed_bytes)
        assert moved.peak_working_bytes == kept.peak_working_bytes + 2 * kept.stashed_bytes
        exposed = moved_profile(kept, kept.stashed_bytes / moved_s, 0.0)
        assert exposed.forward_s.value[0] == pytest.approx(forward_s + moved_s)


def test_activations_that_the_host_does_not_hold_stay_on_the_device() -> None:
    problem = replace(chain_problem(), allows_marginal=True)
    whole = find_placement(problem, top=1).best
    assert whole is not None
    stages = [(stage.layers, stage.recompute) for stage in whole.stages]
    for host_bytes in (0, 10, 2**50):
        cluster = replace(problem.cluster, host=HostLink(1e15, max(host_bytes, 1)))
        moved = PreparedProblem.of(replace(problem, cluster=cluster, offload=Offload.ACTIVATIONS))
        memory = evaluate_placement(moved, replace(whole.parallelism, offload=Offload.ACTIVATIONS), stages).memory
        for before, after in zip(whole.memory, memory, strict=True):
            assert after.activations_bytes + after.host_bytes == pytest.approx(before.activations_bytes)
            assert after.host_bytes <= max(host_bytes, 1)
            assert host_bytes <= 10 or after.activations_bytes == pytest.approx(0)


def test_an_update_waits_for_the_slower_of_memory_and_the_link_to_the_host() -> None:
    problem = chain_problem()
    on_device_s = update_s_per_parameter(problem)
    for bandwidth in (1e6, 1e9, 1e15):
        cluster = replace(problem.cluster, host=HostLink(bandwidth, 2**40))
        on_host_s = update_s_per_parameter(replace(problem, cluster=cluster, offload=Offload.OPTIMIZER))
        assert on_host_s == max(on_device_s, problem.recipe.optimizer_bytes / bandwidth)


def test_what_the_host_does_not_hold_stays_on_the_device() -> None:
    problem = replace(chain_problem(), recipe=precision_recipe("bf16-adam"), allows_marginal=True)
    whole = find_placement(problem, top=1).best
    assert whole is not None
    states = whole.memory[0].optimizer_bytes
    assert states > 0
    stages = [(stage.layers, stage.recompute) for stage in whole.stages]
    for host_bytes in (int(states / 4), int(4 * states)):
        cluster = replace(problem.cluster, host=HostLink(1e15, host_bytes))
        offloaded = PreparedProblem.of(replace(problem, cluster=cluster, offload=Offload.OPTIMIZER))
        held = evaluate_placement(offloaded, replace(whole.parallelism, offload=Offload.OPTIMIZER), stages).memory[0]
        assert whole.parallelism.chunks == 1
        assert held.host_bytes == pytest.approx(min(states, host_bytes))
        assert held.optimizer_bytes == pytest.approx(states - held.host_bytes)
        assert held.buffers_bytes == pytest.approx(whole.memory[0].buffers_bytes + 2 * held.host_bytes)


def test_offload_without_a_host_is_refused() -> None:
    with pytest.raises(PlacementError, match="the cluster names no host"):
        replace(chain_problem(), offload=Offload.OPTIMIZER)
