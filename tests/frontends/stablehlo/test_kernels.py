"""Custom calls by name: attention and its backward, grouped products, Neuron's kernels; what is not known is said."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import jax_models as models
import pytest
from jax.experimental import pallas
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

import phaze
from phaze.ir import Graph, Phase

BATCH, HEADS, LENGTH, SIZE = 2, 4, 256, 128
PRODUCT = 2 * BATCH * HEADS * LENGTH * LENGTH * SIZE
"""The flops of one of the products of an attention: scores, context, and twice as many backward."""


def attention_loss(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    q, k, v = (
        jnp.moveaxis((x @ parameters[name]).reshape(*x.shape[:2], HEADS, SIZE), 2, 1) for name in ("q", "k", "v")
    )
    return jnp.mean(flash_attention(q, k, v, causal=True) ** 2)


def test_a_loss_with_pallas_kernels_is_imported_and_planned_on_a_host_without_their_chip() -> None:
    parameters = {name: models.shape(64, HEADS * SIZE) for name in ("q", "k", "v")}
    graph = phaze.import_graph(attention_loss, (parameters, models.shape(BATCH, LENGTH, 64)))
    projections = 3 * 2 * BATCH * LENGTH * 64 * HEADS * SIZE
    assert graph.matmul_flops(Phase.FORWARD) == 2 * PRODUCT + projections
    assert graph.matmul_flops(Phase.BACKWARD) == 4 * PRODUCT + projections
    plan = phaze.optimize(graph, cluster="tpuv4:4", global_batch_size=16)
    assert plan.step_time_s > 0


def hlo(parameters: list[str], result: str, target: str, **attributes: Any) -> Graph:
    """The graph of one custom call."""
    lines = [f"  p{index} = {shape} parameter({index})" for index, shape in enumerate(parameters)]
    operands = ", ".join(f"p{index}" for index in range(len(parameters)))
    given = "".join(f", {name}={value}" for name, value in attributes.items())
    lines.append(f'  ROOT call = {result} custom-call({operands}), custom_call_target="{target}"{given}')
    return phaze.import_graph(("ENTRY main {\n" + "\n".join(lines) + "\n}\n").encode(), frontend="hlo")


SCORES = {"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"dimensions": ["2", "4", "64", "64"]}}}


@pytest.mark.parametrize(
    ("target", "attributes"),
    [
        ("__cudnn$fmhaSoftmax", {"backend_config": json.dumps(SCORES)}),
        ("te_fused_attn_forward_ffi", {}),
        ("tpu_custom_call", {"backend_config": json.dumps({"kernel_name": "splash_mha_fwd_residuals"})}),
        ("AwsNeuronCustomNativeKernel", {"backend_config": json.dumps({"func_name": "flash_fwd"})}),
    ],
)
def test_attention_kernels_are_attention(target: str, attributes: dict[str, str]) -> None:
    # cuDNN takes positions before heads and gives heads before positions.
    shapes = ["bf16[2,64,4,32]", "bf16[2,64,2,32]", "bf16[2,64,2,32]", "s32[2]"]
    result = "(bf16[2,4,64,32]{3,1,2,0}, u8[0])" if "cudnn" in target else "(bf16[2,64,4,32], f32[2,4,64,1])"
    graph = hlo(shapes, result, target, **attributes)
    assert graph.matmul_flops(Phase.FORWARD) == 2 * 2 * 2 * 4 * 64 * 64 * 32
    assert graph.coverage().flops_share == 1


@pytest.mark.parametrize(
    ("shapes", "result", "flops"),
    [
        (["bf16[64,32]", "bf16[4,32,16]", "s32[4]"], "bf16[64,16]", 2 * 64 * 32 * 16),
        (["bf16[64,32]", "bf16[4,16,32]", "s32[4]"], "bf16[64,16]", 2 * 64 * 32 * 16),
        (["bf16[64,32]", "bf16[64,16]", "s32[4]"], "bf16[4,32,16]", 2 * 64 * 32 * 16),
        (["bf16[64,32]", "bf16[32,16]"], "bf16[64,16]", 2 * 64 * 32 * 16),
    ],
)
def test_products_with_a_matrix_for_each_group_of_rows_multiply_each_row_once(
    shapes: list[str], result: str, flops: int
) -> None:
    graph = hlo(shapes, result, "__cublas$lt$groupedMatmul")
    assert graph.matmul_flops(Phase.FORWARD) == flops


def test_ragged_dots_of_jax_multiply_each_row_once_where_they_are_lowered_for_a_chip() -> None:
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    traced = jax.jit(jax.lax.ragged_dot).trace(models.shape(64, 32), models.shape(4, 32, 16), sizes)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert phaze.import_graph(text.encode(), frontend="hlo").matmul_flops(Phase.FORWARD) == 2 * 64 * 32 * 16


@pytest.mark.parametrize(
    ("target", "shapes", "function"),
    [
        ("AwsNeuronGelu", ["f32[4,8]"], "gelu"),
        ("AwsNeuronGeluBackward", ["f32[4,8]", "f32[4,8]"], "gelu_backward"),
        ("AwsNeuronRmsNorm", ["f32[4,8]", "f32[8]", "f32[]"], "rms_norm"),
        ("AwsNeuronSoftmax", ["f32[4,8]"], "softmax"),
    ],
)
def test_neuron_kernels_are_told_by_their_names(target: str, shapes: list[str], function: str) -> None:
    graph = hlo(shapes, "f32[4,8]", target, backend_config='"1"')
    assert [op.function for op in graph.ops] == [function]


def test_marks_for_a_compiler_compute_nothing() -> None:
    assert hlo(["f32[4,8]"], "f32[4,8]", "AwsNeuronTransferWithStaticRing").ops == ()


def test_a_kernel_that_is_not_known_is_opaque_and_its_own_estimate_is_said() -> None:
    def double(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    estimate = pallas.CostEstimate(flops=12345, bytes_accessed=8, transcendentals=0)
    call = pallas.pallas_call(double, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32), cost_estimate=estimate)
    text = jax.jit(call).trace(models.shape(8, 128)).lower(lowering_platforms=("tpu",)).as_text()
    graph = phaze.import_graph(text.encode(), frontend="hlo")
    assert graph.coverage().flops_share == 0
    assert any("double" in note and "its own estimate is 12,345 flops" in note for note in graph.notes)
