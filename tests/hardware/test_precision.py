import dataclasses

import pytest
from graphs import tiny_graph

from phaze.cost import op_work
from phaze.errors import HardwareError, UnknownNameError
from phaze.hardware import (
    OPTIMIZERS,
    PRECISIONS,
    AcceleratorArray,
    cast_graph,
    precision_recipe,
    precision_recipe_names,
    preset,
    recipe_of,
)
from phaze.ir import DType, OpKind, Phase
from phaze.ir.backward import derive_backward


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


@pytest.mark.parametrize(
    ("optimizer", "held"),
    [
        ("adam", 18),
        ("adamw", 18),
        ("sgd", 10),
        ("momentum-sgd", 14),
        ("adafactor", 10),
        ("lion", 14),
        ("adam8bit", 12.03125),
        ("muon", 14),
    ],
)
def test_bytes_per_parameter_of_every_optimizer_in_bf16(optimizer: str, held: float) -> None:
    """2 of the copy that is read, 4 of the gradient, 4 of the master, and the state."""
    assert recipe_of("bf16", optimizer).bytes_per_parameter == held
    assert recipe_of("bf16", optimizer, low_gradients=True).bytes_per_parameter == held - 2


def test_every_optimizer_and_precision_is_tested_here() -> None:
    assert set(OPTIMIZERS) == {"adam", "adamw", "sgd", "momentum-sgd", "adafactor", "lion", "adam8bit", "muon", "none"}
    eight = {"fp8", "fp8-delayed", "fp8-current", "fp8-tensorwise", "fp8-rowwise", "mxfp8", "nvfp4"}
    assert set(PRECISIONS) == {"bf16", "bf16-cast", "fp16", "fp32", "tf32"} | eight


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if "8" in name or "4" in name])
def test_recipes_of_few_bits_store_what_bf16_stores_and_say_what_they_leave_out(precision: str) -> None:
    recipe, bf16 = recipe_of(precision, "adamw"), recipe_of("bf16", "adamw")
    sizes = ("parameter_bytes", "gradient_bytes", "master_bytes", "state_bytes", "compute_dtype")
    assert [getattr(recipe, size) for size in sizes] == [getattr(bf16, size) for size in sizes]
    assert recipe.product_dtype == ("fp4" if precision == "nvfp4" else "fp8")
    assert "scales" in recipe.note
    assert recipe.quantizes_products
    assert not recipe_of("tf32", "adamw").quantizes_products


def test_products_with_parameters_of_repeated_layers_are_priced_at_the_product_type() -> None:
    graph = derive_backward(tiny_graph("gpt2"))
    cast = cast_graph(graph, precision_recipe("mxfp8-adam"))
    marked = {op.id for op in cast.ops if op.attribute("product_dtype") == "fp8"}
    products = [op for op in cast.ops if op.kind is OpKind.CONTRACTION]
    blocks = [op for op in products if ".h." in op.module]
    scores = [op for op in blocks if op.module.endswith("attn") and op.id not in marked]
    assert {op.module for op in products if op.id in marked} == {
        op.module for op in blocks if op.module.endswith(("c_attn", "c_proj", "c_fc"))
    }
    assert scores
    assert not marked.intersection(op.id for op in products if ".h." not in op.module)
    forward = sum(op.phase is Phase.FORWARD for op in products if op.id in marked)
    assert len(marked) == 3 * forward
    dtypes = {op_work(op, cast.tensors).products[0].dtype for op in products if op.id in marked}
    assert dtypes == {"fp8"}
    assert cast.tensors == graph.tensors


@pytest.mark.parametrize(("chip", "times"), [("h100", 2.0), ("b200", 2.0), ("a100-80gb", 1.0)])
def test_a_product_in_fp8_runs_at_the_chips_rate_of_it(chip: str, times: float) -> None:
    chips = AcceleratorArray.of([preset(chip).accelerator])
    assert chips.rate("fp8")[0] == times * chips.rate("bf16")[0]


@pytest.mark.parametrize(
    ("precision", "optimizer", "recipe"),
    [
        ("BF16", "AdamW", "bf16-adam"),
        ("bfloat16", "Momentum SGD", "bf16-momentum-sgd"),
        ("float16", "adamw_8bit", "fp16-adam8bit"),
        ("fp8_delayed", "Lion", "fp8-delayed-lion"),
    ],
)
def test_precisions_and_optimizers_are_known_by_other_spellings(precision: str, optimizer: str, recipe: str) -> None:
    assert recipe_of(precision, optimizer) == precision_recipe(recipe)


def test_an_unknown_precision_or_optimizer_lists_near_names() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown precision 'mxfp9'.*Did you mean mxfp8"):
        recipe_of("mxfp9", "adamw")
    with pytest.raises(UnknownNameError, match=r"unknown optimizer 'moun'.*Did you mean muon"):
        recipe_of("bf16", "moun")


def test_an_unknown_recipe_lists_near_names_and_few_others() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean bf16-adam") as refused:
        precision_recipe("bf16-adm")
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_precision_alone_is_with_adam(name: str) -> None:
    assert precision_recipe(name) == recipe_of(name, "adam")


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
