"""What depends on what, and an order of ops that does not depend on how they are listed."""

from phaze.frontends.stablehlo.dataflow import Dataflow, sorted_by_depth
from phaze.ir import Op, OpKind
from phaze.ir.graph_builder import elementwise_rule

RULE = elementwise_rule((4,), (4,))


def op(result: str, operand: str, function: str = "tanh") -> Op:
    return Op(id=result, kind=OpKind.ELEMENTWISE, function=function, rule=RULE, inputs=(operand,), outputs=(result,))


CHAIN = [op("a", "x"), op("b", "a"), op("c", "b"), op("side", "a", "sin")]


def test_ancestors_descendants_and_what_is_read() -> None:
    dataflow = Dataflow(CHAIN)
    assert dataflow.ancestors(["c"]) == {"a", "b", "c"}
    assert dataflow.ancestors(["x"]) == set()
    assert dataflow.descendants(["b"]) == {"c"}
    assert dataflow.read_by(["b", "side"]) == {"a"}
    assert dataflow.shape("c") == (4,)


def test_the_state_of_a_trip_depends_on_what_the_trip_before_it_hands_on() -> None:
    assert Dataflow(CHAIN, {"a": "side"}).ancestors(["c"]) == {"a", "b", "c", "side"}


def test_ops_are_sorted_by_depth_then_by_what_they_compute_whatever_their_order() -> None:
    listed_otherwise = [CHAIN[0], CHAIN[3], CHAIN[1], CHAIN[2]]
    assert [op.id for op in sorted_by_depth(CHAIN)] == ["a", "side", "b", "c"]
    assert sorted_by_depth(listed_otherwise) == sorted_by_depth(CHAIN)
