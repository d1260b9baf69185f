"""Elimination finds the least sum of tables that brute force finds, for every value of the variables that are kept."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaze.shard.elimination import FloatArray, plan_elimination


@st.composite
def table_sums(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, ...]], list[FloatArray], list[int]]:
    """Sizes of up to five variables, scopes of up to three of them, tables with forbidden entries, kept variables."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    variables = st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=3, unique=True)
    scopes = [tuple(scope) for scope in draw(st.lists(variables, min_size=1, max_size=7))]
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tables = []
    for scope in scopes:
        costs = generator.integers(0, 9, size=[sizes[variable] for variable in scope]).astype(np.float64)
        costs[generator.random(costs.shape) < 0.1] = np.inf
        tables.append(costs)
    kept = draw(st.lists(st.sampled_from(sorted({*itertools.chain(*scopes)})), max_size=2, unique=True))
    return sizes, scopes, tables, kept


@given(table_sums())
def test_the_least_sum_is_that_of_brute_force_and_the_values_read_off_have_it(
    sums: tuple[list[int], list[tuple[int, ...]], list[FloatArray], list[int]],
) -> None:
    sizes, scopes, tables, kept = sums

    def total(values: tuple[int, ...]) -> float:
        pairs = zip(scopes, tables, strict=True)
        return float(sum(table[tuple(values[variable] for variable in scope)] for scope, table in pairs))

    plan = plan_elimination(sizes, scopes, kept)
    assert plan is not None
    minimum = plan.minimise(tables)
    assert minimum.costs.shape == tuple(sizes[variable] for variable in kept)
    for given_values in itertools.product(*(range(sizes[variable]) for variable in kept)):
        agreeing = (
            values
            for values in itertools.product(*map(range, sizes))
            if tuple(values[variable] for variable in kept) == given_values
        )
        least = min(map(total, agreeing))
        assert minimum.costs[given_values] == least
        if np.isfinite(least):
            assert total(tuple(minimum.values(given_values))) == least


def test_a_plan_says_its_work_and_gives_up_where_a_table_would_be_too_large() -> None:
    """Five variables of three values, each tied to each: the first one eliminated needs a table of 3 ** 5."""
    scopes = list(itertools.combinations(range(5), 2))
    plan = plan_elimination([3] * 5, scopes, largest=3**5)
    assert plan is not None
    assert plan.work == 3**5 + 3**4 + 3**3 + 3**2 + 3
    assert plan_elimination([3] * 5, scopes, largest=3**5 - 1) is None


@pytest.mark.parametrize("length", [2, 50])
def test_a_chain_takes_tables_of_two_variables_however_long_it_is(length: int) -> None:
    plan = plan_elimination([4] * length, list(itertools.pairwise(range(length))))
    assert plan is not None
    assert plan.work <= 4 * 4 * length
