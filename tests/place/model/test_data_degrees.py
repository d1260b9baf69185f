"""Which groups of ZeRO's shards may be chosen, and what rows that stand for several of them hold and send at least."""

from dataclasses import replace
from itertools import accumulate, product
from operator import mul
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_problems import changed, problem_with_axes
from property_examples import examples

from phaze.parallelism import ALL_DEVICES
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.zero_sharding import (
    DataDegrees,
    ZeroSharding,
    every_shard,
    listed_shards,
    offered_shards,
    shard_ranges,
)
from phaze.targets import Capabilities

seeds = st.integers(0, 2**32 - 1)


def groups_by_definition(problem: PlacementProblem, tp: int, zero: int, dp: int) -> set[int]:
    """All devices, and every power of two or block of the network that divides them, as the module's docstring says."""
    replicas = dp * problem.cp
    if zero == 0 or not problem.capabilities.allows_shard_groups:
        return {replicas}
    blocks = accumulate((level.size for level in problem.cluster.levels), mul)
    sizes = {2**power for power in range(1, 20)} | {block // tp for block in blocks if block % tp == 0}
    shared = {size for size in sizes if size % problem.ep == 0 or problem.ep % size == 0}
    return {replicas} | {size for size in shared if 1 < size < replicas and replicas % size == 0}


def grouped_problem(seed: int) -> PlacementProblem:
    """A problem with axes whose target may run every group."""
    problem = problem_with_axes(seed, most_devices=16)
    free = replace(Capabilities.everything(), allows_shard_groups=Random(seed).random() < 0.8)
    return replace(problem, capabilities=free)


@examples(100)
@given(seeds)
def test_every_group_that_may_be_chosen_is_listed_once(seed: int) -> None:
    problem = grouped_problem(seed)
    for tp, zero in product(problem.tp_degrees, range(4)):
        dp = np.arange(1, problem.cluster.device_count // tp + 1)
        rows, sizes = every_shard(problem, tp, zero, dp)
        listed = list(zip(dp[rows].tolist(), sizes.tolist(), strict=True))
        expected = {(int(copies), size) for copies in dp for size in groups_by_definition(problem, tp, zero, copies)}
        assert len(listed) == len(set(listed))
        assert set(listed) == expected


@examples(60)
@given(seeds)
def test_ranges_and_lists_of_groups_agree_with_all_of_them(seed: int) -> None:
    problem = grouped_problem(seed)
    for tp, zero in product(problem.tp_degrees, (1, 2, 3)):
        dp = np.arange(1, problem.cluster.device_count // tp + 1)
        rows, sizes = every_shard(problem, tp, zero, dp)
        least, largest = shard_ranges(problem, tp, zero, dp)
        for index, copies in enumerate(dp.tolist()):
            of_copies = sorted(sizes[rows == index].tolist())
            assert [least[index], largest[index]] == [of_copies[0], of_copies[-1]]
            assert listed_shards(problem, tp, copies, of_copies[0], of_copies[-1], zero) == of_copies


@pytest.mark.parametrize(
    ("asked", "expected"),
    [((ALL_DEVICES,), {8}), ((2,), {2}), ((2, 4), {2, 4}), ((4, ALL_DEVICES), {4, 8}), ((3,), set())],
)
def test_groups_that_are_asked_for_are_the_only_ones(asked: tuple[object, ...], expected: set[int]) -> None:
    problem = changed(replace(grouped_problem(0), cp=1, ep=1, capabilities=Capabilities.everything()), shard=asked)
    rows, sizes = every_shard(problem, 1, 3, np.array([8]))
    assert set(sizes.tolist()) == expected
    assert len(rows) == len(expected)


def test_a_target_without_groups_is_offered_none() -> None:
    problem = replace(grouped_problem(0), capabilities=replace(Capabilities.everything(), allows_shard_groups=False))
    assert offered_shards(problem, 1) == ()


@examples(100)
@given(seeds)
def test_a_row_for_several_strategies_holds_and_sends_no_more_than_any_of_them(seed: int) -> None:
    random, problem = Random(seed), grouped_problem(seed)
    zero = random.randrange(4)
    dp = np.arange(1, problem.cluster.device_count + 1)
    rows, sizes = every_shard(problem, 1, zero, dp)
    divides = (dp[rows] * problem.cp) % problem.ep == 0
    copies, shards = dp[rows][divides], sizes[divides]
    if not len(copies):
        return
    wide = DataDegrees(
        zero=zero,
        dp=copies.max(keepdims=True),
        least_dp=copies.min(keepdims=True),
        shard=shards.max(keepdims=True),
        least_shard=shards.min(keepdims=True),
    )
    for each_dp, shard in zip(copies, shards, strict=True):
        replicas = int(each_dp) * problem.cp
        dense = ZeroSharding(problem.recipe, zero, int(shard), replicas // int(shard))
        kinds = dense.by_kind(problem.ep, problem.has_frozen)
        for kind, shares in zip(kinds, wide.shares(problem), strict=True):
            assert shares.sharding.held_bytes_per_parameter[0] <= kind.held_bytes_per_parameter * (1 + 1e-12)
            assert shares.within[0] <= 1 - 1 / int(kind.shard) + 1e-12
            assert shares.reduced[0] <= sent_after_backward(zero, int(kind.shard), int(kind.groups)) + 1e-12


def sent_after_backward(zero: int, shard: int, groups: int) -> float:
    """Parts of a gradient that a device sends: a scatter 1 - 1/n of its tensor, an all-reduce twice that."""
    if zero == 0:
        return 2 * (1 - 1 / (shard * groups))
    between = 2 * (1 - 1 / groups) / shard
    return between + (1 - 1 / shard if zero == 1 else 0.0)
