import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from graphs import tiny_graph

from phaze.cost import CoreKind, Estimate, fuse_epilogues, price_groups, price_ops
from phaze.errors import PluginError
from phaze.hardware import AcceleratorArray, preset
from phaze.interfaces import OpPricer
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
        estimate.core_s[:] = estimate.spread_s[:] = 2.0
        return estimate

    prices = {"norm": costs_a_second, "layer_norm": costs_two}
    norms = [op for op in GRAPH.ops if op.function == "layer_norm"]
    assert (price_ops(GRAPH, norms, CHIPS, prices=prices).spread_s == 2.0).all()


def test_a_fused_group_with_such_an_op_is_priced_op_by_op() -> None:
    groups = [group for group in fuse_epilogues(GRAPH) if any(op.function == "gelu_tanh" for op in group.ops)]
    assert all(group.epilogue for group in groups)
    together_s = price_groups(GRAPH, groups, CHIPS, prices={"gelu_tanh": costs_a_second}).spread_s
    alone = price_ops(GRAPH, groups[0].ops, CHIPS, prices={"gelu_tanh": costs_a_second}).spread_s
    np.testing.assert_allclose(together_s[0], alone.sum(axis=0))


def test_a_price_that_fails_or_answers_with_something_else_is_named() -> None:
    def fails(graph: Graph, op: Op, accelerators: AcceleratorArray) -> Estimate:
        raise ZeroDivisionError("no lanes")

    def forgets(graph: Graph, op: Op, accelerators: AcceleratorArray) -> Estimate:
        return Estimate.empty([CoreKind.VECTOR], 1)

    with pytest.raises(PluginError, match=r"'norm' failed on op .*ZeroDivisionError: no lanes"):
        price_ops(GRAPH, GRAPH.ops, CHIPS, prices={"norm": fails})
    with pytest.raises(PluginError, match=r"'norm' of op .* is not an Estimate of 1 op on 2 accelerators"):
        price_ops(GRAPH, GRAPH.ops, CHIPS, prices={"norm": forgets})


def priced_with(**values: float) -> OpPricer:
    def price(graph: Graph, op: Op, accelerators: AcceleratorArray) -> Estimate:
        estimate = costs_a_second(graph, op, accelerators)
        for name, value in values.items():
            getattr(estimate, name)[0, -1] = value
        return estimate

    return price


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"spread_s": 0.0}, r"spread_s is 0\.0; expected finite numbers, above 0: only views cost nothing"),
        ({"core_s": -1.0}, r"core_s is -1\.0"),
        ({"core_s": np.nan}, "core_s is nan"),
        ({"spread_s": 2.0}, "spread_s exceeds core_s"),
        ({"spread_bytes": -1.0}, r"spread_bytes is -1\.0; expected finite numbers, at least 0"),
        ({"core_energy_j": np.inf}, "core_energy_j is inf"),
        ({"spread_binding": 9}, "a binding code is outside 0 to 3"),
    ],
)
def test_a_price_that_cannot_be_is_refused(values: dict[str, float], complaint: str) -> None:
    with pytest.raises(PluginError, match=rf"'norm' of op .*: {complaint}"):
        price_ops(GRAPH, GRAPH.ops, CHIPS, prices={"norm": priced_with(**values)})


def test_every_array_of_a_price_has_the_shape_that_was_asked_for() -> None:
    def narrow(graph: Graph, op: Op, accelerators: AcceleratorArray) -> Estimate:
        return replace(costs_a_second(graph, op, accelerators), spread_bytes=np.ones((1, 1)))

    with pytest.raises(PluginError, match="is not an Estimate of 1 op on 2 accelerators"):
        price_ops(GRAPH, GRAPH.ops, CHIPS, prices={"norm": narrow})


def test_a_view_may_cost_nothing() -> None:
    views = [op for op in GRAPH.ops if op.kind is OpKind.VIEW]
    estimate = price_ops(GRAPH, views, CHIPS, prices={"view": priced_with(core_s=0.0, spread_s=0.0)})
    assert (estimate.spread_s[:, -1] == 0).all()


def test_pricing_asks_no_plugins_by_itself() -> None:
    program = """
import sys
from phaze.cost import price_ops
from phaze.hardware import preset
from phaze.ir import GraphBuilder, OpKind, Role
builder = GraphBuilder("one")
builder.argument("x", (8,), Role.BATCH)
builder.add("y", OpKind.ELEMENTWISE, "gelu", builder.rule("i -> i", {"i": 8}), ("x",))
graph = builder.build(("y",))
assert price_ops(graph, graph.ops, preset("h100").accelerator).spread_s[0, 0] > 0
assert "phaze.hooks" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_rows_follow_the_ops_that_were_asked_for() -> None:
    chosen = [GRAPH.ops[5], GRAPH.ops[2], GRAPH.ops[5]]
    estimate = price_ops(GRAPH, chosen, CHIPS, prices={})
    whole = price_ops(GRAPH, GRAPH.ops, CHIPS, prices={})
    np.testing.assert_array_equal(estimate.spread_s, whole.spread_s[[5, 2, 5]])
