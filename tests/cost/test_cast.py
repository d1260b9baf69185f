from graphs import tiny_graph

from phaze.cost import cast_graph, op_work
from phaze.hardware import precision_recipe
from phaze.ir import DType, OpKind


def test_a_captured_float32_model_is_priced_at_the_compute_type() -> None:
    captured = cast_graph(tiny_graph("gpt2"), precision_recipe("fp32-adam"))
    assert {tensor.dtype for tensor in captured.parameters} == {DType.FLOAT32}
    half = cast_graph(captured, precision_recipe("fp16-adam"))
    assert {tensor.dtype for tensor in half.parameters} == {DType.FLOAT16}
    product = next(op for op in half.ops if op.kind is OpKind.CONTRACTION)
    assert op_work(product, half.tensors).products[0].dtype == "float16"
    assert half.notes[-1] == "float32 priced as float16 (fp16-adam)"


def test_types_chosen_on_purpose_stay() -> None:
    graph = tiny_graph("gpt2")
    cast = cast_graph(graph, precision_recipe("fp16-adam"))
    singles = {name for name, tensor in graph.tensors.items() if tensor.dtype is DType.FLOAT32}
    assert singles
    assert {name for name, tensor in cast.tensors.items() if tensor.dtype is DType.FLOAT32} == singles
    assert all(
        cast.tensors[name].dtype == tensor.dtype for name, tensor in graph.tensors.items() if not tensor.dtype.is_float
    )


def test_nothing_to_change_is_the_same_graph() -> None:
    graph = tiny_graph("gpt2")
    assert cast_graph(graph, precision_recipe("bf16-adam")) is graph
