import numpy as np
import pytest
from graphs import tiny_graph

from phaze.cost import CoreKind, Estimate, fuse_epilogues, price_groups, price_ops
from phaze.errors import PluginError
from phaze.hardware import AcceleratorArray, preset
from phaze.ir import Graph, Op, OpKind

GRAPH = tiny_graph("gpt2").with_backward()
CHIPS = AcceleratorArray.of([preset("tpuv4").accelerator, preset("h100").accelerator])


def costs_a_second(graph: Graph, op: Op, accelerators: AcceleratorArray) -> Estimate:
    estimate = Estimate.empty([CoreKind.VECTOR], len(accelerators))
    estimate.core_s[:] = estimate.spread_s[:] = 1.0
    return estimate


@pytest.mark.parametrize("name", ["gelu_tanh", "elementwise.gelu_tanh"])
def test_a_plugins_price_for_a_function_wins_over_the_built_in(name: str) -> None:
    estimate = price_ops(GRAPH, GRAPH.ops, CHIPS, prices={name: costs_a_second})
    is_priced = [op.function == "gelu_tanh" for op in GRAPH.ops]
    assert any(is_priced)
    assert (estimate.spread_s == 1.0).all(axis=1).tolist() == is_priced


def test_a_plugins_price_for_a_kind_wins_over_the_built_in() -> None:
    estimate = price_ops(GRAPH, GRAPH.ops, CHIPS, prices={"norm": costs_a_second})
    assert (estimate.spread_s == 1.0).all(axis=1).tolist() == [op.kind is OpKind.NORM for op in GRAPH.ops]


def test_the_more_specific_price_wins() -> None:
    def costs_two(graph: Graph, op: Op, accelerators: AcceleratorArray) -> Estimate:
        estimate = costs_a_second(graph, op, accelerators)
        estimate.spread_s[:] = 2.0
        return estimate

    prices = {"norm": costs_a_second, "layer_norm": costs_two}
    norms = [op for op in GRAPH.ops if op.function == "layer_norm"]
    assert (price_ops(GRAPH, norms, CHIPS, prices=prices).spread_s == 2.0).all()


def test_a_fused_group_with_such_an_op_is_priced_op_by_op() -> None:
    groups = [group for group in fuse_epilogues(GRAPH) if any(op.function == "gelu_tanh" for op in group.ops)]
    assert all(group.epilogue for group in groups)
    found = price_groups(GRAPH, groups, CHIPS, prices={"gelu_tanh": costs_a_second}).spread_s
    alone = price_ops(GRAPH, groups[0].ops, CHIPS, prices={"gelu_tanh": costs_a_second}).spread_s
    np.testing.assert_allclose(found[0], alone.sum(axis=0))


def test_a_price_that_fails_or_answers_with_something_else_is_named() -> None:
    def fails(graph: Graph, op: Op, accelerators: AcceleratorArray) -> Estimate:
        raise ZeroDivisionError("no lanes")

    def forgets(graph: Graph, op: Op, accelerators: AcceleratorArray) -> Estimate:
        return Estimate.empty([CoreKind.VECTOR], 1)

    with pytest.raises(PluginError, match=r"'norm' failed on op .*ZeroDivisionError: no lanes"):
        price_ops(GRAPH, GRAPH.ops, CHIPS, prices={"norm": fails})
    with pytest.raises(PluginError, match=r"'norm' of op .* is not an Estimate of 1 op on 2 accelerators"):
        price_ops(GRAPH, GRAPH.ops, CHIPS, prices={"norm": forgets})


def test_rows_follow_the_ops_that_were_asked_for() -> None:
    chosen = [GRAPH.ops[5], GRAPH.ops[2], GRAPH.ops[5]]
    estimate = price_ops(GRAPH, chosen, CHIPS, prices={})
    whole = price_ops(GRAPH, GRAPH.ops, CHIPS, prices={})
    np.testing.assert_array_equal(estimate.spread_s, whole.spread_s[[5, 2, 5]])
