from collections.abc import Iterable
from pathlib import Path

import pytest
from graphs import TINY_CONFIGS, graphs, tiny_graph
from hypothesis import given

from phaze.cost import CoreKind, OpGroup, fuse_epilogues, group_work, op_work, price_groups, price_ops
from phaze.hardware import preset
from phaze.ir import Graph, GraphBuilder, OpKind, Phase, Role

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CHIP = preset("tpuv4").accelerator


def format_groups(graph: Graph, groups: Iterable[OpGroup]) -> str:
    """One line a group: what leaves, the functions in order, what comes in, and the off-chip bytes saved."""
    return "".join(f"{format_group(graph, group)}\n" for group in groups)


def format_group(graph: Graph, group: OpGroup) -> str:
    functions = " + ".join(op.function for op in group.ops)
    line = f"{', '.join(group.writes)} = {functions}({', '.join(group.reads)})"
    if not group.epilogue:
        return line
    apart = sum(op_work(op, graph.tensors).compulsory_bytes for op in group.ops)
    together = group_work(group, graph.tensors).compulsory_bytes
    return f"{line}  [saves {apart - together:.0f} of {apart:.0f} bytes]"


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_the_groups_of_a_tiny_model_read_as_their_golden_dump(name: str) -> None:
    graph = tiny_graph(name, 1).with_backward()
    text = format_groups(graph, fuse_epilogues(graph))
    assert text == (GOLDEN / f"tiny_{name}_groups.txt").read_text()


@given(graphs())
def test_every_op_is_in_one_group_and_groups_can_run_in_order(graph: Graph) -> None:
    check_order(graph)


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_groups_of_every_family_can_run_in_order(name: str) -> None:
    check_order(tiny_graph(name).with_backward())


def check_order(graph: Graph) -> None:
    groups = fuse_epilogues(graph)
    assert sorted(op.id for group in groups for op in group.ops) == sorted(op.id for op in graph.ops)
    ready = {name for name, tensor in graph.tensors.items() if tensor.role is not None}
    for group in groups:
        assert set(group.reads) <= ready, f"{group.head.id} waits for what is made later"
        ready.update(group.writes)
    assert set(graph.outputs) <= ready


@given(graphs())
def test_fusion_never_moves_more_bytes_and_never_does_less_arithmetic(graph: Graph) -> None:
    for group in fuse_epilogues(graph):
        together, apart = group_work(group, graph.tensors), [op_work(op, graph.tensors) for op in group.ops]
        assert together.compulsory_bytes <= sum(work.compulsory_bytes for work in apart)
        assert together.macs == sum(work.macs for work in apart)
        assert together.vector_operations == sum(work.vector_operations for work in apart)
        assert together.kind is (CoreKind.BOTH if group.epilogue else apart[0].kind)


@given(graphs())
def test_fusion_never_costs_time(graph: Graph) -> None:
    groups = fuse_epilogues(graph)
    fused = price_groups(graph, groups, CHIP, prices={}).spread_s.sum()
    apart = price_ops(graph, graph.ops, CHIP, prices={}).spread_s.sum()
    assert fused <= apart * (1 + 1e-12)


def two_products() -> GraphBuilder:
    """A gated unit: two products of one input, and functions on them."""
    builder = GraphBuilder("gated")
    builder.argument("x", (1, 4, 6), Role.BATCH)
    sizes = {"b": 1, "s": 4, "i": 6, "o": 6}
    rule = builder.rule("b s i, o i -> b s o", sizes)
    for name in ("gate", "up"):
        builder.add(name, OpKind.CONTRACTION, "einsum", rule, ("x", builder.parameter(f"{name}.weight", 6, 6)))
    return builder


SIZES = {"b": 1, "s": 4, "o": 6}


def test_an_op_on_two_products_joins_the_later_one() -> None:
    builder = two_products()
    builder.add("mixed", OpKind.ELEMENTWISE, "multiply", builder.rule("b s o, b s o -> b s o", SIZES), ("gate", "up"))
    groups = fuse_epilogues(builder.build(("mixed",)))
    assert [[op.id for op in group.ops] for group in groups] == [["gate"], ["up", "mixed"]]


def test_a_tensor_that_is_needed_elsewhere_is_still_written() -> None:
    builder = two_products()
    builder.add("active", OpKind.ELEMENTWISE, "gelu", builder.rule("b s o -> b s o", SIZES), ("up",))
    builder.add("total", OpKind.REDUCTION, "sum", builder.rule("b s o -> b s", SIZES), ("up",))
    graph = builder.build(("active", "total", "gate"))
    group = next(group for group in fuse_epilogues(graph) if group.epilogue)
    assert group.writes == ("up", "active")
    alone = sum(op_work(op, graph.tensors).compulsory_bytes for op in group.ops)
    assert group_work(group, graph.tensors).compulsory_bytes == alone - 2 * 24


def test_ops_of_another_size_or_phase_do_not_join() -> None:
    builder = two_products()
    builder.add("summed", OpKind.REDUCTION, "sum", builder.rule("b s o -> o", SIZES), ("up",))
    builder.add(
        "later", OpKind.ELEMENTWISE, "gelu", builder.rule("b s o -> b s o", SIZES), ("gate",), phase=Phase.BACKWARD
    )
    assert not any(group.epilogue for group in fuse_epilogues(builder.build(("summed", "later"))))
