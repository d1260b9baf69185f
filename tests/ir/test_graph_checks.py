"""Verification: every kind of damage is refused by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from phaze.errors import GraphError
from phaze.ir import DType, Graph, GraphBuilder, Op, OpKind, Phase, Role, Rule, Tensor


def two_layers() -> Graph:
    """x -> linear a -> linear b -> mean."""
    builder = GraphBuilder("two", micro_batch_size=2)
    x = builder.argument("x", (2, 4), Role.BATCH)
    rule = builder.rule("b i, o i -> b o", {"b": 2, "i": 4, "o": 4})
    for name in ("a", "b"):
        weight = builder.parameter(f"{name}.weight", 4, 4)
        (x,) = builder.add(name, OpKind.CONTRACTION, "einsum", rule, (x, weight))
    (loss,) = builder.add("loss", OpKind.REDUCTION, "mean", builder.rule("b o -> .", {"b": 2, "o": 4}), (x,))
    return builder.build((loss,)).with_backward()


def with_op(graph: Graph, op_id: str, **changes: Any) -> dict[str, Any]:
    return {"ops": tuple(replace(op, **changes) if op.id == op_id else op for op in graph.ops)}


def with_tensor(graph: Graph, tensor: Tensor) -> dict[str, Any]:
    return {"tensors": {**graph.tensors, tensor.id: tensor}}


def swapped(graph: Graph) -> dict[str, Any]:
    first, second, *rest = graph.ops
    return {"ops": (second, first, *rest)}


def cyclic(graph: Graph) -> dict[str, Any]:
    return with_op(graph, "a", inputs=("b", "a.weight"))


BFLOAT16 = DType.BFLOAT16
LARGE = 2**62
DAMAGE: dict[str, tuple[Callable[[Graph], dict[str, Any]], str]] = {
    "cycle": (cyclic, "the graph has a cycle: b -> a -> b"),
    "self loop": (lambda g: with_op(g, "a", inputs=("a", "a.weight")), "the graph has a cycle: a -> a"),
    "wrong order": (swapped, "op 'b' reads 'a' before 'a' makes it"),
    "missing operand": (lambda g: with_op(g, "a", inputs=("ghost", "a.weight")), "op 'a' refers to tensor 'ghost'"),
    "dangling tensor": (lambda g: with_tensor(g, Tensor("ghost", (2,), BFLOAT16)), "tensor 'ghost' dangles"),
    "made argument": (
        lambda g: with_tensor(g, Tensor("a", (2, 4), BFLOAT16, Role.BATCH)),
        "tensor 'a' is an argument .batch. and made by 'a'",
    ),
    "duplicate op id": (lambda g: with_op(g, "b", id="a"), "two ops have the id 'a'"),
    "tensor made twice": (lambda g: with_op(g, "b", outputs=("a",)), "tensor 'a' is made twice, by 'a' and 'b'"),
    "tensor under another id": (
        lambda g: {"tensors": {**g.tensors, "other": g.tensors["x"]}},
        "tensor 'x' is stored under another id, 'other'",
    ),
    "shape against rule": (
        lambda g: with_tensor(g, Tensor("x", (3, 4), BFLOAT16, Role.BATCH)),
        r"op 'a': operand 0 'x' has shape \[3, 4\], but its rule .* says \[2, 4\]",
    ),
    "operand count": (lambda g: with_op(g, "a", inputs=("x",)), "op 'a' has 1 operands, but its rule .* has 2"),
    "result count": (
        lambda g: {**with_op(g, "a", outputs=("a", "c")), **with_tensor(g, Tensor("c", (2, 4), BFLOAT16))},
        "op 'a' has 2 results",
    ),
    "negative size": (
        lambda g: with_tensor(g, Tensor("x", (-2, 4), BFLOAT16, Role.BATCH)),
        "tensor 'x' has a dimension of -2; expected an integer from 1",
    ),
    "NaN size": (
        lambda g: with_tensor(g, Tensor("x", (float("nan"), 4), BFLOAT16, Role.BATCH)),  # type: ignore[arg-type]
        "tensor 'x' has a dimension of nan",
    ),
    "absurd size": (
        lambda g: with_tensor(g, Tensor("x", (LARGE, 4), BFLOAT16, Role.BATCH)),
        f"tensor 'x' has a dimension of {LARGE}",
    ),
    "absurd product": (
        lambda g: with_tensor(g, Tensor("x", (2**40, 2**40), BFLOAT16, Role.BATCH)),
        "tensor 'x' has 1208925819614629174706176 elements",
    ),
    "too many dimensions": (
        lambda g: with_tensor(g, Tensor("x", (2,) * 20_000, BFLOAT16, Role.BATCH)),
        "tensor 'x' has 20000 dimensions; at most 64",
    ),
    "a number of thousands of digits": (
        lambda g: with_tensor(g, Tensor("x", (10**5000, 4), BFLOAT16, Role.BATCH)),
        "tensor 'x' has a dimension of a int of thousands of digits",
    ),
    "no forward op": (
        lambda g: {"ops": tuple(replace(op, phase=Phase.BACKWARD, gradient_of="") for op in g.ops)},
        "none of them is a forward op",
    ),
    "growing parameter": (
        lambda g: with_op(g, "a", rule=Rule.parse("b i, o i -> b o | b=2 i=4 o=4*")),
        "parameter 'a.weight' would grow with the microbatch.*marks factor 'o'",
    ),
    "microbatch of zero": (lambda g: {"micro_batch_size": 0}, "micro_batch_size is 0"),
    "forward after backward": (
        lambda g: with_op(g, g.ops[-1].id, phase=Phase.FORWARD),
        "forward op .* reads .*, which backward op .* makes",
    ),
    "unknown output": (lambda g: {"outputs": ("ghost",)}, "output 'ghost' does not exist"),
    "unknown forward op": (
        lambda g: with_op(g, g.ops[-1].id, gradient_of="ghost"),
        "is the gradient of 'ghost', which does not exist",
    ),
    "gradient of no parameter": (
        lambda g: {"gradients": (("x", "a"),)},
        "'a' belongs to 'x', which is not a parameter",
    ),
    "missing gradient": (lambda g: {"gradients": (("a.weight", "ghost"),)}, "gradient 'ghost' of 'a.weight' does not"),
    "gradient's shape": (
        lambda g: {"gradients": (("a.weight", "a"),)},
        r"gradient 'a' has shape \[2, 4\], its parameter 'a.weight' has \[4, 4\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_name(damage: str) -> None:
    graph = two_layers()
    change, message = DAMAGE[damage]
    with pytest.raises(GraphError, match=message):
        replace(graph, **change(graph))


RULES = {
    "one operand": (OpKind.CONTRACTION, "b i -> b | b=2 i=3", "must have two operands and one result"),
    "not elementwise": (OpKind.ELEMENTWISE, "b i -> b | b=2 i=3", "so it is not elementwise"),
    "no normalized factor": (OpKind.SOFTMAX, "b i -> b i | b=2 i=3", "must mark the normalized factors"),
    "no looked-up factor": (OpKind.LOOKUP, "b i -> b i | b=2 i=3", "must mark the looked-up factors"),
    "reduction that grows": (OpKind.REDUCTION, "b -> b i | b=2 i=3", "has a result factor that its operand lacks"),
    "view of nothing": (OpKind.VIEW, "-> b i | b=2 i=3", "must have one operand"),
    "attention of two": (OpKind.ATTENTION, "b i, b i -> b i | b=2 i=3", "must have query, key and value"),
    "part of a product": (OpKind.CONTRACTION, "b@5 i, i -> b | b=2 i=3", "cannot cover a dimension in part"),
    "absurd work": (OpKind.CONTRACTION, f"a b, b c -> a c | a={2**27} b={2**27} c={2**27}", "more than can be counted"),
    "dropout without a mask": (OpKind.DROPOUT, "b i -> b i | b=2 i=3", "takes 1 operands and gives at least 2 results"),
    "parts that do not add up": (OpKind.COPY, "s@2, s@3 -> s | s=6!", "joins parts of 5 in all into a dimension of 6"),
    "parts without a size": (OpKind.COPY, "s, s -> s | s=6!", "must cover one dimension of each operand in part"),
    "factor of no tensor": (OpKind.ELEMENTWISE, "b i -> b i | b=2 i=3 k=4", "factors k of .* stand in no tensor"),
}


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
@pytest.mark.parametrize("case", RULES)
def test_a_rule_that_does_not_fit_its_kind_is_refused_in_every_phase(case: str, phase: Phase) -> None:
    kind, text, message = RULES[case]
    rule = Rule.parse(text)
    tensors = {f"x{i}": Tensor(f"x{i}", rule.shape(d), BFLOAT16, Role.BATCH) for i, d in enumerate(rule.operands)}
    function = {OpKind.DROPOUT: "dropout", OpKind.COPY: "concatenate"}.get(kind, "f")
    op = Op(id="y", kind=kind, function=function, rule=rule, inputs=tuple(tensors), outputs=("y",))
    tensors["y"] = Tensor("y", rule.shape(rule.results[0]), BFLOAT16)
    first = Op(
        id="z", kind=OpKind.VIEW, function="reshape", rule=Rule.parse("n -> n | n=2"), inputs=("n",), outputs=("z",)
    )
    tensors |= {"n": Tensor("n", (2,), BFLOAT16, Role.BATCH), "z": Tensor("z", (2,), BFLOAT16)}
    with pytest.raises(GraphError, match=message):
        Graph(name="bad", tensors=tensors, ops=(first, replace(op, phase=phase)), outputs=("y",))


@pytest.mark.parametrize("value", [None, [1], (1.5,), {"a": 1}])
def test_an_attribute_that_cannot_be_saved_is_refused(value: object) -> None:
    with pytest.raises(GraphError, match=r"op 'y': attribute 'a' is .*; expected a number, text or integers"):
        Op(
            id="y",
            kind=OpKind.ELEMENTWISE,
            function="f",
            rule=Rule.parse("b -> b | b=1"),
            inputs=("x",),
            outputs=("y",),
            attributes=(("a", value),),  # type: ignore[arg-type]
        )
