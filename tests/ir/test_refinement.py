"""Refinement: factors found through views, wherever in the graph the view stands."""

import pytest
from graphs import TINY_CONFIGS, tiny_graph
from hypothesis import given
from hypothesis import strategies as st

from phaze.ir import DType, Graph, GraphBuilder, OpKind, Role
from phaze.ir.factor_following import refine_factors
from phaze.ir.graph_builder import contraction_rule, elementwise_rule, reduction_rule, reshape_rule


def linear_between_views(batch: int, length: int, heads: int, size: int) -> Graph:
    """x[b, s, i] viewed as rows, through a linear map, viewed as heads."""
    builder = GraphBuilder("toy", micro_batch_size=batch, dtype=DType.FLOAT32)
    x = builder.argument("x", (batch, length, 10), Role.BATCH)
    weight = builder.parameter("weight", 10, heads * size)
    rows, wide = (batch * length, 10), (batch * length, heads * size)
    (flat,) = builder.add("flat", OpKind.VIEW, "reshape", reshape_rule((batch, length, 10), rows), (x,))
    rule = contraction_rule(rows, (10, heads * size), contracted=((1,), (0,)))
    (y,) = builder.add("matmul", OpKind.CONTRACTION, "einsum", rule, (flat, weight))
    (y,) = builder.add("relu", OpKind.ELEMENTWISE, "relu", elementwise_rule(wide, wide), (y,))
    view = (batch, length, heads, size)
    (y,) = builder.add("heads", OpKind.VIEW, "reshape", reshape_rule(wide, view), (y,))
    (loss,) = builder.add("loss", OpKind.REDUCTION, "mean", reduction_rule(view, range(4)), (y,))
    return builder.build((loss,)).with_backward()


def test_rows_and_columns_are_split_as_the_views_around_say() -> None:
    graph = refine_factors(linear_between_views(31, 4, 3, 5), 31)
    assert str(graph.op("matmul").rule) == "(b0 d0) d1, d1 (d2 d3) -> (b0 d0) (d2 d3) | b0=31* d0=4 d1=10 d2=3 d3=5"
    assert str(graph.op("relu").rule) == "(b0 d0) (d1 d2) -> (b0 d0) (d1 d2) | b0=31* d0=4 d1=3 d2=5"


def test_a_derived_backward_speaks_of_the_factors_of_its_forward_ops() -> None:
    graph = refine_factors(linear_between_views(31, 4, 3, 5), 31)
    assert graph.is_backward_derived
    for op in graph.ops:
        if op.gradient_of:
            assert {*op.rule.factors} <= {*graph.op(op.gradient_of).rule.factors}


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 9))
def test_a_refined_graph_scales_to_what_is_built_at_that_size(length: int, heads: int, size: int, batch: int) -> None:
    graph = refine_factors(linear_between_views(31, length, heads, size), 31)
    built = linear_between_views(batch, length, heads, size)
    assert graph.with_micro_batch(batch).tensors == built.tensors
    assert graph.with_micro_batch(batch).matmul_flops("backward") == built.matmul_flops("backward")


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_refining_keeps_shapes_and_flops(name: str) -> None:
    graph = tiny_graph(name)
    refined = refine_factors(graph)
    assert refined.tensors == graph.tensors
    assert [op.flops for op in refined.ops] == [op.flops for op in graph.ops]
    assert refine_factors(refined) == refined


def test_cuts_that_contradict_each_other_leave_the_first() -> None:
    builder = GraphBuilder("toy", dtype=DType.FLOAT32)
    x = builder.argument("x", (12,), Role.BATCH)
    for shape in ((2, 6), (3, 4)):
        builder.add(f"view {shape}", OpKind.VIEW, "reshape", reshape_rule((12,), shape), (x,))
    (loss,) = builder.add("loss", OpKind.REDUCTION, "mean", reduction_rule((12,), (0,)), (x,))
    assert str(refine_factors(builder.build((loss,))).op("loss").rule) == "(d0 d1) -> . | d0=2 d1=6"
