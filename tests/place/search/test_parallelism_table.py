"""The table of strategies: rows that stand for several values of dp, and how they are split."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from placement_problems import examples, random_problem

from phaze.parallelism import Parallelism
from phaze.place import PreparedProblem
from phaze.place.search.parallelism_table import ParallelismTable, list_parallelisms, split_rows


def listed(prepared: PreparedProblem, *, joins_dp: bool) -> ParallelismTable:
    return list_parallelisms(
        prepared.problem,
        prepared.space,
        prepared.stage_sums,
        prepared.network,
        prepared.update_s,
        checks_memory=False,
        joins_dp=joins_dp,
    )


@examples(60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_rows_that_join_values_of_dp_split_into_all_strategies_and_bound_each(seed: int, micro_batches: int) -> None:
    problem = replace(random_problem(seed, most_devices=16), micro_batches=micro_batches)
    prepared = PreparedProblem.of(problem)
    single = listed(prepared, joins_dp=False)
    bounds = {single.parallelism(index): single.bound_s[index] for index in range(len(single))}
    rows = listed(prepared, joins_dp=True)
    left: set[Parallelism] = set()
    while len(rows):
        for index in range(len(rows)):
            if not rows.is_wide[index]:
                strategy = rows.parallelism(index)
                assert strategy not in left
                assert rows.bound_s[index] <= bounds[strategy] * (1 + 1e-9)
                left.add(strategy)
        rows = split_rows(problem, prepared.space, prepared.stage_sums, rows.take(rows.is_wide))
    assert left == bounds.keys()


@examples(40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.floats(1.0, 40.0))
def test_what_refutes_a_row_that_joins_values_of_dp_refutes_each(
    seed: int, micro_batches: int, target_s: float
) -> None:
    problem = replace(random_problem(seed, most_devices=16), micro_batches=micro_batches)
    prepared = PreparedProblem.of(problem)
    rows, single = listed(prepared, joins_dp=True), listed(prepared, joins_dp=False)
    refuted = prepared.layer_table.refuted(rows, 0 * rows.bound_s + target_s)
    is_single_refuted = prepared.layer_table.refuted(single, 0 * single.bound_s + target_s)
    by_strategy = dict(zip(map(single.parallelism, range(len(single))), is_single_refuted.tolist(), strict=True))
    for index in refuted.nonzero()[0].tolist():
        strategy = rows.parallelism(index)
        for dp in range(int(rows.least_dp[index]), strategy.dp + 1):
            assert by_strategy.get(replace(strategy, dp=dp), True)
