"""Layouts agree with rules, and moves with the table of collectives."""

import numpy as np
import pytest
from devices import assemble, piece_index, place
from hypothesis import given
from hypothesis import strategies as st
from sharding import A100S

from phaze.cost import Collective, price_collective
from phaze.ir import Dim, Factor, Rule
from phaze.shard import PARTIAL, WHOLE, Axis, Layout, Split
from phaze.shard.layout import fills, layout_of
from phaze.shard.mesh_axes import collective_of, is_possible


@st.composite
def split_tensors(draw: st.DrawFn) -> tuple[Rule, dict[str, int]]:
    """A tensor of up to three dimensions of up to three factors, one of which is split."""
    factors, dims = [], []
    for dim in range(draw(st.integers(1, 3))):
        names = [f"f{dim}{index}" for index in range(draw(st.integers(1, 3)))]
        factors += [Factor(name, draw(st.integers(1, 7))) for name in names]
        dims.append(Dim(tuple(names)))
    chosen = draw(st.sampled_from(factors))
    ways = draw(st.sampled_from([ways for ways in range(1, chosen.size + 1) if fills(chosen.size, ways)]))
    return Rule((), (tuple(dims),), tuple(factors)), {chosen.name: ways}


@given(split_tensors())
def test_a_layout_s_local_shape_is_the_local_rule_s(case: tuple[Rule, dict[str, int]]) -> None:
    rule, ways = case
    (dims,) = rule.results
    assert layout_of(rule, dims, ways).local_shape(rule.shape(dims)) == rule.local(ways).shape(dims)


@given(split_tensors())
def test_pieces_cover_a_tensor_once_and_come_together_again(case: tuple[Rule, dict[str, int]]) -> None:
    rule, ways = case
    (dims,), (tp,) = rule.results, ways.values()
    layout, whole = layout_of(rule, dims, ways), np.random.default_rng(0).normal(size=rule.shape(dims))
    pieces = place(whole, layout, tp)
    assert sum(piece.size for piece in pieces) == whole.size
    np.testing.assert_array_equal(assemble(pieces, layout, whole.shape), whole)


def test_a_split_of_a_minor_factor_holds_a_part_of_every_run() -> None:
    rule = Rule.parse("(c h d) -> (c h d) | c=3 h=4 d=2")
    layout = layout_of(rule, rule.results[0], {"h": 2})
    assert layout.is_strided
    assert str(layout) == "dim 0 in 3 runs / 2"
    assert piece_index(layout, (24,), 1)[0].tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]


def test_two_split_factors_vary_with_the_last_one_fastest() -> None:
    rule = Rule.parse("g r -> g r | g=2 r=4")
    layout = layout_of(rule, rule.results[0], {"g": 2, "r": 2})
    held = [[indices.tolist() for indices in piece_index(layout, (2, 4), device)] for device in range(4)]
    assert held == [[[0], [0, 1]], [[0], [2, 3]], [[1], [0, 1]], [[1], [2, 3]]]


def test_two_split_factors_of_one_dimension_leave_a_part_of_a_part() -> None:
    rule = Rule.parse("(g d) i -> (g d) i | g=2 d=4 i=3")
    ways = {"g": 2, "d": 2}
    layout = layout_of(rule, rule.results[0], ways)
    assert layout.local_shape((8, 3)) == rule.local(ways).shape(rule.results[0]) == (2, 3)
    held = [piece_index(layout, (8, 3), device)[0].tolist() for device in range(4)]
    assert held == [[0, 1], [2, 3], [4, 5], [6, 7]]


ROWS, COLUMNS = Layout((Split(0, 1, 4, 2),)), Layout((Split(1, 1, 4, 2),))


@pytest.mark.parametrize(
    ("before", "after", "collective"),
    [
        (PARTIAL, WHOLE, Collective.ALL_REDUCE),
        (PARTIAL, ROWS, Collective.REDUCE_SCATTER),
        (ROWS, WHOLE, Collective.ALL_GATHER),
        (ROWS, COLUMNS, Collective.ALL_TO_ALL),
        (WHOLE, ROWS, None),
        (WHOLE, WHOLE, None),
        (ROWS, ROWS, None),
        (PARTIAL, PARTIAL, None),
    ],
)
def test_moves_are_the_collectives_of_the_table(before: Layout, after: Layout, collective: Collective | None) -> None:
    assert is_possible(before, after)
    assert collective_of(before, after) is collective


@pytest.mark.parametrize("before", [WHOLE, ROWS])
def test_nothing_becomes_partial_by_moving(before: Layout) -> None:
    assert not is_possible(before, PARTIAL)
    assert Axis(A100S, 2).move_s(before, PARTIAL, 1.0) == float("inf")


@given(st.sampled_from(Collective), st.integers(0, 2**34), st.sampled_from([2, 4, 8]))
def test_an_axis_prices_collectives_as_the_cost_model_does(collective: Collective, size: int, tp: int) -> None:
    share = size / tp if collective is Collective.ALL_TO_ALL else size
    expected = float(price_collective(collective, share, A100S, tp).seconds)
    assert Axis(A100S, tp).seconds(collective, size) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_size_fills_devices_exactly_where_no_part_is_empty(size: int, ways: int) -> None:
    chunk = -(-size // ways)
    assert fills(size, ways) == all(min(chunk, size - part * chunk) > 0 for part in range(ways))
