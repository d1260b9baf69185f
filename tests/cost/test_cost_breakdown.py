import pytest
from graphs import tiny_graph

from phaze.cost import CoreKind, Estimate, calibration_of, cost_report, price_ops, update_work
from phaze.hardware import AcceleratorArray, precision_recipe, preset
from phaze.ir import Graph, GraphBuilder, Op, OpKind, Phase, Role

CHIP = preset("a100-80gb").accelerator


def test_every_op_is_counted_once_and_the_total_is_theirs() -> None:
    graph = tiny_graph("llama").with_backward()
    report = cost_report(graph, CHIP, prices={})
    assert sum(row.count for row in report.rows) == len(graph.ops)
    estimate = price_ops(graph, graph.ops, CHIP, calibration=calibration_of(CHIP), prices={})
    assert report.total_s == pytest.approx(float(estimate.spread_s.sum()))


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
    recipe = precision_recipe("fp32-sgd")
    report = cost_report(graph, CHIP, recipe=recipe, prices={})
    work = update_work(recipe, graph.parameter_count, stack=calibration_of(CHIP).stack)
    assert report.update is not None
    assert report.update.off_chip_bytes == work.streamed_bytes


def test_captured_update_ops_are_left_out_and_counted() -> None:
    builder = GraphBuilder("step")
    builder.parameter("w", 8)
    builder.argument("state", (8,), Role.OPTIMIZER_STATE)
    rule = builder.rule("i, i -> i", {"i": 8})
    builder.add("new", OpKind.ELEMENTWISE, "add", rule, ("w", "state"), phase=Phase.UPDATE)
    report = cost_report(builder.build(("new",)), CHIP, prices={})
    assert (report.rows, report.skipped_update_ops) == ((), 1)
    assert report.update is not None


def test_an_ideal_chip_says_so() -> None:
    chip = preset("tpuv4-paper").accelerator
    assert cost_report(tiny_graph("gpt2"), chip, prices={}).calibration.name == "ideal"


def reduces_in_a_second(graph: Graph, op: Op, accelerators: AcceleratorArray) -> Estimate:
    estimate = Estimate.empty([CoreKind.LINK], len(accelerators))
    estimate.core_s[:] = estimate.spread_s[:] = 1.0
    return estimate


def test_an_op_that_only_a_plugin_prices_has_its_row() -> None:
    builder = GraphBuilder("reduced")
    builder.argument("x", (8, 4), Role.BATCH)
    for name, reads, group in (("y", "x", 2), ("z", "y", 2), ("w", "z", 4)):
        rule = builder.rule("i j -> i j", {"i": 8, "j": 4})
        builder.add(name, OpKind.COLLECTIVE, "all_reduce", rule, (reads,), attributes={"devices": group})
    graph = builder.build(("w",))
    report = cost_report(graph, CHIP, prices={"collective": reduces_in_a_second})
    assert [(row.functions, row.count, row.shape, row.kind) for row in report.rows] == [
        ("all_reduce", 2, "8x4", CoreKind.LINK),
        ("all_reduce", 1, "8x4", CoreKind.LINK),
    ]
    assert report.total_s == 3.0


def test_a_graph_without_parameters_has_no_update() -> None:
    builder = GraphBuilder("free")
    builder.argument("x", (8,), Role.BATCH)
    builder.add("y", OpKind.ELEMENTWISE, "gelu", builder.rule("i -> i", {"i": 8}), ("x",))
    assert cost_report(builder.build(("y",)), CHIP).update is None
