"""The table of strategies: rows that stand for several values of dp and shard, and how they are split."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from placement_problems import problem_with_axes, random_problem
from property_examples import examples

from phaze.parallelism import Parallelism
from phaze.place import PreparedProblem
from phaze.place.search.parallelism_table import ParallelismTable, list_parallelisms, split_rows


def listed(prepared: PreparedProblem, *, joins_rows: bool) -> ParallelismTable:
    return list_parallelisms(
        prepared.problem,
        prepared.space,
        prepared.stage_sums,
        prepared.network,
        prepared.update_s,
        checks_memory=False,
        joins_rows=joins_rows,
    )


@examples(60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_rows_that_join_values_of_dp_and_shard_split_into_all_strategies_and_bound_each(
    seed: int, micro_batches: int
) -> None:
    made = random_problem if seed % 2 else problem_with_axes
    problem = replace(made(seed, most_devices=16), micro_batches=micro_batches)
    prepared = PreparedProblem.of(problem)
    single = listed(prepared, joins_rows=False)
    bounds = {single.parallelism(index, problem): single.bound_s[index] for index in range(len(single))}
    rows = listed(prepared, joins_rows=True)
    left: set[Parallelism] = set()
    while len(rows):
        for index in range(len(rows)):
            if not rows.is_wide[index]:
                strategy = rows.parallelism(index, problem)
                assert strategy not in left
                assert rows.bound_s[index] <= bounds[strategy] * (1 + 1e-9)
                left.add(strategy)
        rows = split_rows(problem, prepared.space, prepared.stage_sums, rows.take(rows.is_wide))
    assert left == bounds.keys()


@examples(40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.floats(1.0, 40.0))
def test_what_refutes_a_row_that_joins_values_of_dp_and_shard_refutes_each(
    seed: int, micro_batches: int, target_s: float
) -> None:
    made = random_problem if seed % 2 else problem_with_axes
    problem = replace(made(seed, most_devices=16), micro_batches=micro_batches)
    prepared = PreparedProblem.of(problem)
    rows, single = listed(prepared, joins_rows=True), listed(prepared, joins_rows=False)
    refuted = prepared.layer_table.refuted(rows, 0 * rows.bound_s + target_s)
    is_single_refuted = prepared.layer_table.refuted(single, 0 * single.bound_s + target_s)
    same = ("tp", "pp", "chunks", "schedule", "zero")
    for index in refuted.nonzero()[0].tolist():
        stands_for = (rows.least_dp[index] <= single.dp) & (single.dp <= rows.dp[index])
        stands_for &= (rows.least_shard[index] <= single.shard) & (single.shard <= rows.shard[index])
        for name in same:
            stands_for &= getattr(single, name) == getattr(rows, name)[index]
        assert is_single_refuted[stands_for].all()
