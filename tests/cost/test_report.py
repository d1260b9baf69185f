import pytest
from graphs import tiny_graph

from phaze.cost import cost_report, price_ops
from phaze.hardware import precision_recipe, preset
from phaze.ir import GraphBuilder, OpKind, Phase, Role

CHIP = preset("a100-80gb").accelerator


def test_every_op_is_counted_once_and_the_total_is_theirs() -> None:
    graph = tiny_graph("llama").with_backward()
    report = cost_report(graph, CHIP, prices={})
    assert sum(row.count for row in report.rows) == len(graph.ops)
    assert report.total_s == pytest.approx(float(price_ops(graph, graph.ops, CHIP, prices={}).spread_s.sum()))


def test_rows_come_most_expensive_first() -> None:
    totals = [row.total_s for row in cost_report(tiny_graph("gpt2"), CHIP, prices={}).rows]
    assert totals == sorted(totals, reverse=True)


def test_fusing_gives_fewer_rows_and_less_time() -> None:
    graph = tiny_graph("gpt2").with_backward()
    apart, fused = (cost_report(graph, CHIP, is_fused=fused, prices={}) for fused in (False, True))
    assert len(fused.rows) < len(apart.rows)
    assert fused.total_s < apart.total_s
    assert any("einsum + add" in row.functions for row in fused.rows)


def test_the_update_is_priced_from_the_recipe_once() -> None:
    graph = tiny_graph("gpt2")
    report = cost_report(graph, CHIP, recipe=precision_recipe("fp32-sgd"), prices={})
    assert report.update.off_chip_bytes == 12 * graph.parameter_count


def test_captured_update_ops_are_left_out_and_counted() -> None:
    builder = GraphBuilder("step")
    builder.parameter("w", 8)
    builder.argument("state", (8,), Role.OPTIMIZER_STATE)
    rule = builder.rule("i, i -> i", {"i": 8})
    builder.add("new", OpKind.ELEMENTWISE, "add", rule, ("w", "state"), phase=Phase.UPDATE)
    report = cost_report(builder.build(("new",)), CHIP, prices={})
    assert (report.rows, report.skipped_update_ops) == ((), 1)
    assert report.update.spread_s > 0


def test_an_ideal_chip_says_so() -> None:
    assert cost_report(tiny_graph("gpt2"), CHIP, prices={}).calibration.name == "ideal"
