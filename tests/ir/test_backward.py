"""The backward of a graph: by rule it equals central differences, and tied gradients are split."""

from dataclasses import dataclass

import numpy as np
import pytest
from graphs import TINY_CONFIGS, argument_values, graphs, tiny_graph
from hypothesis import given
from oracles.numpy_reference import evaluate_graph

from phaze.errors import GraphError
from phaze.ir import Attribute, DType, Graph, GraphBuilder, OpKind, Phase, Role, Rule
from phaze.ir.backward import derive_backward, split_tied_gradients
from phaze.ir.graph_builder import (
    broadcast_rule,
    concatenate_rule,
    convolution_rule,
    elementwise_rule,
    lookup_rule,
    reduction_rule,
    reshape_rule,
    slice_rule,
    transpose_rule,
)
from phaze.ir.op import UNARY_READS

STEP = 1e-5


def assert_gradients_are_slopes(graph: Graph) -> None:
    """Compare each parameter's gradient with a central difference of the loss along a random direction."""
    values = argument_values(graph)
    results = evaluate_graph(graph, values)
    generator = np.random.default_rng(1)
    gradients: dict[str, np.ndarray] = {}
    for parameter, gradient in graph.gradients:
        gradients[parameter] = gradients.get(parameter, 0) + results[gradient]
    for parameter, gradient in gradients.items():
        direction = generator.normal(size=gradient.shape)
        losses = [
            evaluate_graph(graph, {**values, parameter: values[parameter] + step * direction})[graph.outputs[0]]
            for step in (STEP, -STEP)
        ]
        slope = float(losses[0] - losses[1]) / (2 * STEP)
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-4, abs=1e-7), parameter


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_gradients_of_every_family_are_slopes_of_its_loss(family: str) -> None:
    graph = tiny_graph(family)
    assert {parameter for parameter, _ in graph.gradients} == {tensor.id for tensor in graph.parameters}
    assert_gradients_are_slopes(graph)


@given(graphs())
def test_gradients_of_random_graphs_are_slopes(graph: Graph) -> None:
    assert graph.gradients
    assert_gradients_are_slopes(graph)


@dataclass(frozen=True)
class Case:
    """One op on parameters of the rule's shapes (integers where `ids` says so), reduced to a loss."""

    kind: OpKind
    function: str
    rule: Rule
    attributes: tuple[tuple[str, Attribute], ...] = ()
    ids: tuple[int, ...] = ()
    result_count: int = 1


def loss_of(case: Case) -> Graph:
    builder = GraphBuilder(case.function, dtype=DType.FLOAT64)
    inputs = []
    for index, dims in enumerate(case.rule.operands):
        role, dtype = (Role.OTHER, DType.INT64) if index in case.ids else (Role.PARAMETER, DType.FLOAT64)
        inputs.append(builder.argument(f"x{index}", case.rule.shape(dims), role, dtype))
    names = tuple(str(index) for index in range(1, case.result_count))
    outputs = builder.add(
        "y", case.kind, case.function, case.rule, inputs, results=names, attributes=dict(case.attributes)
    )
    losses = []
    for index, tensor_id in enumerate(outputs):
        shape = case.rule.shape(case.rule.results[index])
        (square,) = builder.add(f"q{index}", OpKind.ELEMENTWISE, "square", elementwise_rule(shape, shape), (tensor_id,))
        rule = reduction_rule(shape, range(len(shape)))
        losses += builder.add(f"l{index}", OpKind.REDUCTION, "sum", rule, (square,))
    total = losses[0]
    for index, loss in enumerate(losses[1:]):
        (total,) = builder.add(f"t{index}", OpKind.ELEMENTWISE, "add", elementwise_rule((), (), ()), (total, loss))
    return builder.build((total,)).with_backward()


QKV = "b h s d, b h t d, b h t e -> b h s e | b=2 h=2 s=4 d=3 t=4 e=5"
GROUPED = "b s (g r) d, b t g d, b t g e -> b s (g r) e | b=2 g=2 r=3 s=4 d=3 t=4 e=5"
POOLED = (("padding", (1, 1)), ("stride", (2, 2)))
DILATED = (("dilation", (2,)), ("padding", (2,)), ("stride", (1,)))
CASES: dict[str, Case] = {
    "attention": Case(OpKind.ATTENTION, "attention", Rule.parse(QKV), (("scale", 0.5),)),
    "causal attention": Case(OpKind.ATTENTION, "attention", Rule.parse(QKV), (("causal", "s"), ("scale", 0.5))),
    "grouped attention": Case(OpKind.ATTENTION, "attention", Rule.parse(GROUPED), (("causal", "s"), ("scale", 0.5))),
    "broadcast": Case(OpKind.VIEW, "expand", broadcast_rule((3,), (2, 3, 4), (1,))),
    "concatenate": Case(OpKind.COPY, "concatenate", concatenate_rule([(2, 3), (2, 1), (2, 4)], 1)),
    "convolution": Case(
        OpKind.CONVOLUTION, "convolution", convolution_rule((2, 3, 6, 6), (4, 3, 3, 3), (2, 4, 3, 3)), POOLED
    ),
    "grouped convolution": Case(
        OpKind.CONVOLUTION, "convolution", convolution_rule((2, 4, 7), (6, 2, 3), (2, 6, 7), groups=2), DILATED
    ),
    "divide with a broadcast divisor": Case(OpKind.ELEMENTWISE, "divide", elementwise_rule((2, 3), (2, 3), (3,))),
    "multiply with a broadcast": Case(OpKind.ELEMENTWISE, "multiply", elementwise_rule((2, 3), (2, 3), (2, 1))),
    "subtract with a broadcast": Case(OpKind.ELEMENTWISE, "subtract", elementwise_rule((2, 3), (1, 3), (2, 3))),
    "lookup in the middle": Case(OpKind.LOOKUP, "embedding", lookup_rule((3, 5, 2), 1, (4, 2)), ids=(1,)),
    "maximum": Case(OpKind.REDUCTION, "max", reduction_rule((2, 3, 4), (0, 2))),
    "mean": Case(OpKind.REDUCTION, "mean", reduction_rule((2, 3, 4), (1,), keep=True)),
    "sum with a transposed square": Case(OpKind.ELEMENTWISE, "add", Rule.parse("a b, b a -> a b | a=3 b=3")),
    "transposed copy of a square": Case(OpKind.COPY, "contiguous", Rule.parse("a b -> b a | a=3 b=3")),
    "reshape": Case(OpKind.VIEW, "reshape", reshape_rule((4, 6), (2, 2, 3, 2))),
    "reshape without common factors": Case(OpKind.VIEW, "reshape", reshape_rule((2, 3, 4), (2, 2, 6))),
    "select": Case(OpKind.VIEW, "select", Rule.parse("b s i -> b i | b=2 s=3! i=4"), (("index", 2),)),
    "slice": Case(OpKind.VIEW, "slice", slice_rule((5, 3), (2, 3)), (("start", 1),)),
    "split": Case(OpKind.VIEW, "split", Rule.parse("b (c h) -> b h, b h | b=2 c=2! h=3"), result_count=2),
    "stack": Case(OpKind.COPY, "stack", Rule.parse("b h, b h -> b c h | b=2 c=2! h=3")),
    "where with a broadcast branch": Case(
        OpKind.ELEMENTWISE, "where", elementwise_rule((2, 3, 4), (2, 1, 4), (3, 4), (2, 3, 1)), ids=(0,)
    ),
    "transpose": Case(OpKind.VIEW, "transpose", transpose_rule((2, 3, 4), (2, 0, 1))),
}


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_one_op_is_its_slope(name: str) -> None:
    graph = loss_of(CASES[name])
    assert len(graph.gradients) == len(CASES[name].rule.operands) - len(CASES[name].ids)
    assert_gradients_are_slopes(graph)


@pytest.mark.parametrize("function", sorted(UNARY_READS))
def test_the_gradient_of_a_unary_function_is_its_slope(function: str) -> None:
    builder = GraphBuilder(function, dtype=DType.FLOAT64)
    x = builder.argument("x", (5,), Role.PARAMETER)
    rule, scalar = elementwise_rule((5,), (5,)), reduction_rule((5,), (0,))
    (x,) = builder.add("positive", OpKind.ELEMENTWISE, "exp", rule, (x,))
    attributes = {"factor": 3.0} if function == "scale" else {}
    (x,) = builder.add("y", OpKind.ELEMENTWISE, function, rule, (x,), attributes=attributes)
    (loss,) = builder.add("loss", OpKind.REDUCTION, "sum", scalar, (x,))
    assert_gradients_are_slopes(builder.build((loss,)).with_backward())


def test_a_function_without_a_known_gradient_gets_one_op_that_reads_its_float_inputs() -> None:
    builder = GraphBuilder("opaque")
    x = builder.argument("x", (3,), Role.PARAMETER)
    ids = builder.argument("ids", (3,), Role.BATCH, DType.INT64)
    rule = elementwise_rule((3,), (3,), (3,))
    (y,) = builder.add("y", OpKind.OPAQUE, "strange", rule, (x, ids))
    (loss,) = builder.add("loss", OpKind.REDUCTION, "sum", reduction_rule((3,), (0,)), (y,))
    graph = builder.build((loss,)).with_backward()
    (backward,) = [op for op in graph.ops if op.function == "strange_backward"]
    assert backward.inputs == ("y.gradient", "x")
    assert backward.kind is OpKind.OPAQUE


def test_a_lookup_by_several_indices_scatters_its_gradient_to_the_table() -> None:
    builder = GraphBuilder("resized")
    x = builder.argument("x", (4, 5), Role.PARAMETER)
    ids = [builder.argument(name, shape, Role.BATCH, DType.INT64) for name, shape in (("i", (8, 1)), ("j", (10,)))]
    rule = Rule.parse("r c, p 1, q -> p q | r=4? c=5? p=8 q=10")
    (y,) = builder.add("y", OpKind.LOOKUP, "lookup", rule, (x, *ids))
    (loss,) = builder.add("loss", OpKind.REDUCTION, "sum", reduction_rule((8, 10), (0, 1)), (y,))
    graph = builder.build((loss,)).with_backward()
    (backward,) = [op for op in graph.ops if op.kind is OpKind.SCATTER]
    assert backward.inputs == ("y.gradient", "i", "j")
    assert {name: graph.tensors[gradient].shape for name, gradient in graph.gradients} == {"x": (4, 5)}


def test_an_elementwise_function_without_a_known_gradient_sums_it_over_what_was_broadcast() -> None:
    builder = GraphBuilder("opaque")
    x, y = (builder.argument(name, shape, Role.PARAMETER) for name, shape in (("x", (2, 3)), ("y", (3,))))
    (z,) = builder.add("z", OpKind.ELEMENTWISE, "strange", elementwise_rule((2, 3), (2, 3), (3,)), (x, y))
    (loss,) = builder.add("loss", OpKind.REDUCTION, "sum", reduction_rule((2, 3), (0, 1)), (z,))
    graph = builder.build((loss,)).with_backward()
    assert [op.function for op in graph.ops_of(Phase.BACKWARD)] == ["expand", "strange_backward", "sum"]
    assert {name: graph.tensors[gradient].shape for name, gradient in graph.gradients} == {"x": (2, 3), "y": (3,)}


def test_a_wanted_gradient_that_nobody_can_give_is_said() -> None:
    builder = GraphBuilder("biased")
    rule = Rule.parse("b h s d, b h t d, b h t e, h s t -> b h s e | b=2 h=2 s=4 d=3 t=4 e=5")
    inputs = [builder.argument(f"x{i}", rule.shape(d), Role.PARAMETER) for i, d in enumerate(rule.operands)]
    (y,) = builder.add("y", OpKind.ATTENTION, "attention", rule, inputs)
    (loss,) = builder.add("loss", OpKind.REDUCTION, "sum", reduction_rule((2, 2, 4, 5), range(4)), (y,))
    with pytest.raises(GraphError, match=r"op 'y': only query, key, value and sinks .* but 'x3' wants one"):
        builder.build((loss,)).with_backward()


def test_backward_ops_name_the_forward_op_they_belong_to() -> None:
    graph = tiny_graph("gpt2")
    forward = {op.id: op for op in graph.ops_of(Phase.FORWARD)}
    for op in graph.ops_of(Phase.BACKWARD):
        assert op.module == forward[op.gradient_of].module


def test_a_graph_with_a_backward_is_left_as_it_is() -> None:
    graph = tiny_graph("gpt2")
    assert graph.with_backward() is graph


def test_a_graph_without_a_scalar_output_says_so() -> None:
    builder = GraphBuilder("vector")
    x = builder.argument("x", (3,), Role.PARAMETER)
    (y,) = builder.add("y", OpKind.ELEMENTWISE, "exp", elementwise_rule((3,), (3,)), (x,))
    with pytest.raises(GraphError, match=r"no scalar float output to differentiate \(outputs: y\); add a loss"):
        builder.build((y,)).with_backward()


def test_a_tied_parameter_has_one_gradient_per_layer() -> None:
    graph = tiny_graph("gpt2")
    tied = [gradient for parameter, gradient in graph.gradients if parameter == "transformer.wte.weight"]
    assert len(tied) == 2


def test_a_backward_that_was_derived_stays_as_it_is() -> None:
    graph = tiny_graph("gpt2").with_backward()
    assert derive_backward(graph) is graph
    assert derive_backward(tiny_graph("gpt2")) == graph


def with_summed_gradients(graph: Graph) -> Graph:
    """The graph as a framework would give it: one gradient a parameter."""
    builder = GraphBuilder.from_graph(graph)
    builder.gradients.clear()
    summed: dict[str, str] = {}
    for parameter, gradient in graph.gradients:
        if parameter in summed:
            shape, dtype = graph.tensors[gradient].shape, graph.tensors[gradient].dtype
            rule, inputs = elementwise_rule(shape, shape, shape), (summed[parameter], gradient)
            kind, phase = OpKind.ELEMENTWISE, Phase.BACKWARD
            (gradient,) = builder.add(f"{parameter}.sum", kind, "add", rule, inputs, dtypes=(dtype,), phase=phase)
        summed[parameter] = gradient
    builder.gradients.extend(summed.items())
    return builder.build(graph.outputs, graph.notes)


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_one_gradient_a_layer_is_found_again(name: str) -> None:
    graph = tiny_graph(name)
    split = split_tied_gradients(with_summed_gradients(graph))
    assert sorted(split.gradients) == sorted(graph.gradients)
    assert split.ops == graph.ops
    assert split.tensors == graph.tensors


def test_a_graph_without_ties_is_itself() -> None:
    graph = tiny_graph("llama")
    assert split_tied_gradients(graph) is graph
