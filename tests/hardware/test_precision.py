import dataclasses

import pytest
from graphs import tiny_graph

from phaze.cost import op_work
from phaze.errors import HardwareError, UnknownNameError
from phaze.hardware import cast_graph, precision_recipe, precision_recipe_names
from phaze.ir import DType, OpKind


def test_mixed_bf16_with_adam_is_eighteen_bytes_per_parameter() -> None:
    recipe = precision_recipe("bf16-adam")
    assert recipe.bytes_per_parameter == 18
    assert (recipe.compute_dtype, recipe.reduction_dtype, recipe.reduction_bytes) == ("bfloat16", "float32", 4)
    assert precision_recipe() == recipe


def test_plain_fp32_keeps_no_master_copy() -> None:
    assert precision_recipe("fp32-adam").bytes_per_parameter == 16
    assert precision_recipe("fp32-sgd").bytes_per_parameter == 8


def test_an_update_reads_the_gradient_and_reads_and_writes_the_rest() -> None:
    assert precision_recipe("bf16-adam").update_bytes == 4 + 2 * (4 + 8) + 2
    assert precision_recipe("fp32-adam").update_bytes == 4 + 2 * (4 + 8)
    assert precision_recipe("fp32-sgd").update_bytes == 4 + 2 * 4


@pytest.mark.parametrize("name", precision_recipe_names())
def test_every_recipe_is_named_after_itself(name: str) -> None:
    assert precision_recipe(name).name == name


def test_an_unknown_recipe_lists_near_names() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean bf16-adam"):
        precision_recipe("bf16-adm")


@pytest.mark.parametrize(
    "change", [{"parameter_bytes": 0}, {"gradient_bytes": -1}, {"state_bytes": -8}, {"compute_dtype": "bf61"}]
)
def test_a_recipe_that_cannot_exist_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(HardwareError):
        dataclasses.replace(precision_recipe(), **change)


@pytest.mark.parametrize("field", ["compute_dtype", "reduction_dtype"])
@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64"])
def test_types_that_nothing_is_trained_in_are_refused(field: str, dtype: str) -> None:
    with pytest.raises(HardwareError, match=f"{field} is {dtype}; expected one of float64"):
        dataclasses.replace(precision_recipe(), **{field: dtype})


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
