"""Rules from shapes compute what numpy computes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracles.numpy_reference import evaluate_op

from phaze.ir import FactorKind, Op, OpKind, Rule
from phaze.ir.graph_builder import (
    broadcast_rule,
    concatenate_rule,
    contraction_rule,
    convolution_rule,
    elementwise_rule,
    lookup_rule,
    opaque_rule,
    reduction_rule,
    reshape_rule,
    slice_rule,
    transpose_rule,
)
from phaze.ir.graph_checks import check_rule

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def numbers(*shape: int) -> NDArray[np.float64]:
    return np.random.default_rng(sum(shape)).normal(size=shape)


def computed(
    kind: OpKind, function: str, rule: Rule, *arrays: NDArray[np.generic], **attributes: int
) -> NDArray[np.generic]:
    inputs = tuple(f"x{index}" for index in range(len(arrays)))
    op = Op(
        id="y",
        kind=kind,
        function=function,
        rule=rule,
        inputs=inputs,
        outputs=("y",),
        attributes=tuple(attributes.items()),
    )
    check_rule(op)
    for array, dims in zip(arrays, rule.operands, strict=True):
        assert array.shape == rule.shape(dims)
    (result,) = evaluate_op(op, arrays)
    assert result.shape == rule.shape(rule.results[0])
    return result


@given(shapes, st.data())
def test_elementwise_broadcasts_as_numpy(shape: list[int], data: st.DataObject) -> None:
    other = [size if data.draw(st.booleans()) else 1 for size in shape][data.draw(st.integers(0, len(shape))) :]
    x, y = numbers(*shape), numbers(*other)
    rule = elementwise_rule(shape, shape, other)
    np.testing.assert_allclose(computed(OpKind.ELEMENTWISE, "multiply", rule, x, y), x * y)


@given(shapes, st.data())
def test_transpose_orders_as_numpy(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    x = numbers(*shape)
    np.testing.assert_array_equal(
        computed(OpKind.VIEW, "transpose", transpose_rule(shape, order), x), x.transpose(order)
    )


@given(shapes, st.data(), st.booleans())
def test_reductions_sum_as_numpy(shape: list[int], data: st.DataObject, keep: bool) -> None:
    over = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    x = numbers(*shape)
    rule = reduction_rule(shape, tuple(over), keep=keep)
    np.testing.assert_allclose(computed(OpKind.REDUCTION, "sum", rule, x), x.sum(axis=tuple(over), keepdims=keep))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.data())
def test_reshape_lays_out_as_numpy(shape: list[int], data: st.DataObject) -> None:
    left, result = math.prod(shape), []
    while left > 1:
        result.append(data.draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0])))
        left //= result[-1]
    x = numbers(*shape)
    rule = reshape_rule(shape, result)
    np.testing.assert_array_equal(computed(OpKind.VIEW, "reshape", rule, x), x.reshape(result))


def test_reshape_finds_the_factors_of_splits_and_merges() -> None:
    assert str(reshape_rule((2, 3, 8), (6, 4, 2))) == "d0 d1 (d2 d3) -> (d0 d1) d2 d3 | d0=2 d1=3 d2=4 d3=2"


def test_reshape_marks_what_has_no_common_factoring_as_whole() -> None:
    rule = reshape_rule((2, 3, 4), (2, 2, 6))
    assert str(rule) == "d0 d1 d2 -> d0 d3 d4 | d0=2 d1=3! d2=4! d3=2! d4=6!"


def test_reshape_into_another_number_of_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="different numbers of elements"):
        reshape_rule((2, 3), (4,))


def test_broadcast_repeats_as_numpy() -> None:
    x = numbers(3, 1)
    result = computed(OpKind.VIEW, "expand", broadcast_rule((3, 1), (2, 3, 4), (1, 2)), x)
    np.testing.assert_array_equal(result, np.broadcast_to(x, (2, 3, 4)))


def test_slices_cut_as_numpy() -> None:
    x = numbers(5, 6)
    np.testing.assert_array_equal(computed(OpKind.VIEW, "slice", slice_rule((5, 6), (5, 2)), x, start=3), x[:, 3:5])


def test_concatenations_join_as_numpy() -> None:
    parts = [numbers(2, size, 3) for size in (1, 4, 2)]
    rule = concatenate_rule([part.shape for part in parts], 1)
    np.testing.assert_array_equal(computed(OpKind.COPY, "concatenate", rule, *parts), np.concatenate(parts, axis=1))


def test_lookups_take_as_numpy() -> None:
    table, ids = numbers(3, 5, 2), np.array([[4, 0], [1, 1]])
    result = computed(OpKind.LOOKUP, "embedding", lookup_rule((3, 5, 2), 1, (2, 2)), table, ids)
    np.testing.assert_array_equal(result, np.take(table, ids, axis=1))


def test_contractions_multiply_as_numpy() -> None:
    left, right = numbers(2, 3, 4, 5), numbers(5, 2, 6, 3)
    rule = contraction_rule(left.shape, right.shape, batch=((0,), (1,)), contracted=((1, 3), (3, 0)))
    expected = np.einsum("bijk,kbni->bjn", left, right)
    np.testing.assert_allclose(computed(OpKind.CONTRACTION, "einsum", rule, left, right), expected)


def test_a_convolution_sums_over_windows() -> None:
    x, weight = numbers(2, 4, 6, 5), numbers(6, 2, 3, 2)
    rule = convolution_rule(x.shape, weight.shape, (2, 6, 4, 4), groups=2)
    expected = np.zeros((2, 6, 4, 4))
    for b, o, p, q in itertools.product(*map(range, expected.shape)):
        channels = slice(0, 2) if o < 3 else slice(2, 4)
        expected[b, o, p, q] = (x[b, channels, p : p + 3, q : q + 2] * weight[o]).sum()
    np.testing.assert_allclose(computed(OpKind.CONVOLUTION, "convolution", rule, x, weight), expected)


def test_opaque_rules_split_nothing() -> None:
    rule = opaque_rule([(2, 3), (2,)], [(2, 5)])
    assert {factor.kind for factor in rule.factors} == {FactorKind.WHOLE}
    assert [rule.shape(dims) for dims in rule.tensors()] == [(2, 3), (2,), (2, 5)]
