"""Layers that are sliced by contexts, experts and tensor parallelism compute what the whole ones compute."""

from typing import Any

import numpy as np
import pytest
from device_grid import DeviceGrid
from graphs import TINY_CONFIGS, argument_values
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracles.numpy_reference import evaluate_graph

from phaze.cost import fuse_attention
from phaze.frontends.transformer_config import graph_from_config
from phaze.hardware import parse_cluster
from phaze.ir import Graph
from phaze.ir.factor_following import mark_sequences
from phaze.ir.layers import single_layer
from phaze.shard import Axis, ShardingProblem, shard_layer, unsharded
from phaze.shard.context_slicing import KeyExchange, key_attentions
from phaze.shard.device_graph import device_graph
from phaze.shard.expert_slicing import expert_dims
from phaze.shard.sharding_problem import divides_experts

CLUSTER = parse_cluster("a100-80gb:64")

_HEADS = {"num_attention_heads": 4, "hidden_size": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {**TINY_CONFIGS["gpt2"], "n_head": 4, "n_embd": 16},
    "bert": {**TINY_CONFIGS["bert"], **_HEADS},
    "bert with its language head": {**TINY_CONFIGS["bert with its language head"], **_HEADS},
    "llama": {**TINY_CONFIGS["llama"], "num_attention_heads": 8, "num_key_value_heads": 4},
    "t5": {**TINY_CONFIGS["t5"], "num_heads": 4, "d_model": 16},
    "mixtral": {**TINY_CONFIGS["mixtral"], "num_key_value_heads": 4},
    "deepseek_v3": {**TINY_CONFIGS["deepseek_v3"], **_HEADS},
    "gemma2": TINY_CONFIGS["gemma2"],
    "gpt_oss": TINY_CONFIGS["gpt_oss"],
}


MORE = ("gpt2", "mixtral", "deepseek_v3")
"""Families whose exchanges of keys are run in full."""


MORE_DEGREES = ((1, 2, 1), (1, 4, 1), (4, 2, 1), (1, 2, 2))
"""cp, ep and tp of models with experts that are run in full."""


def model(family: str, micro_batch_size: int, *, is_fused: bool) -> Graph:
    graph = mark_sequences(graph_from_config(CONFIGS[family], name=family, sequence_length=8, micro_batch_size=1))
    graph = fuse_attention(graph) if is_fused else graph
    return graph.with_micro_batch(micro_batch_size)


def spread_experts(graph: Graph) -> float:
    """So much imbalance that no expert is ever full, whatever is routed to it: rows for all tokens."""
    tokens = {op.id: op for op in graph.ops if op.function == "dispatch"}
    return max((op.rule.size("s") / op.rule.size("c") for op in tokens.values()), default=1.0)


def assert_equal_to_whole(
    family: str,
    *,
    cp: int = 1,
    ep: int = 1,
    tp: int = 1,
    expert_tp: int | None = None,
    way: KeyExchange | None = None,
    ranks: int | None = None,
) -> None:
    """Run one layer of all on the grid, and the whole model at the batch of all copies; compare loss and gradients."""
    ranks = ranks or max(cp, ep)
    samples = 2
    whole = model(family, samples * ranks // cp, is_fused=way is not None)
    imbalance = spread_experts(whole)
    small = whole.with_micro_batch(samples)
    exchanges = {op.id: way for op in key_attentions(small)} if way is not None else None
    local = device_graph(small, cp=cp, ep=ep, exchanges=exchanges, expert_imbalance=imbalance)
    reference = device_graph(whole, expert_imbalance=imbalance)
    dims = expert_dims(small)
    axis = Axis(CLUSTER, tp, cp=cp, ep=ep)
    problem = ShardingProblem(graph=local, layer=single_layer(local), axis=axis, expert_dims=dims, expert_tp=expert_tp)
    sharded = unsharded(problem) if tp == 1 else shard_layer(problem)
    if expert_tp is not None:
        assert {divides_experts(sharded.parameters[name], dim, tp) for name, dim in dims.items()} == {expert_tp == 1}
    values = argument_values(reference)
    expected = evaluate_graph(reference, values)
    made = DeviceGrid(whole, sharded, ranks).run(values)
    (loss,) = (name for name in reference.outputs if reference.tensors[name].elements == 1)
    np.testing.assert_allclose(np.mean([each[loss] for each in made]), expected[loss], rtol=1e-9, atol=1e-9)
    assert [name for name, _ in local.gradients] == [name for name, _ in reference.gradients]
    for (parameter, gradient), (_, local_gradient) in zip(reference.gradients, local.gradients, strict=True):
        found = reduced_gradient(local, parameter, local_gradient, made, ep)
        np.testing.assert_allclose(found, expected[gradient], rtol=1e-9, atol=1e-9, err_msg=parameter)


def reduced_gradient(
    local: Graph, parameter: str, gradient: str, made: list[dict[str, NDArray[Any]]], ep: int
) -> NDArray[Any]:
    """The mean over all ranks, as data parallelism takes it; experts are put together from their owners."""
    is_divided = any(op.attribute("divided_over") and parameter in op.inputs for op in local.ops)
    if not is_divided:
        return np.asarray(sum(each[gradient] for each in made)) / len(made)
    sums = [np.asarray(sum(each[gradient] for each in made[owner::ep])) for owner in range(ep)]
    stacked = np.stack(sums, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:]) / len(made)


@pytest.mark.parametrize("cp", [4, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("family", CONFIGS)
def test_contexts_compute_what_the_whole_model_computes(family: str, cp: int) -> None:
    assert_equal_to_whole(family, cp=cp)


@pytest.mark.parametrize("way", KeyExchange)
@pytest.mark.parametrize(
    "family",
    ["bert with its language head", "llama", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)],
)
def test_every_exchange_of_keys_computes_what_the_whole_model_computes(family: str, way: KeyExchange) -> None:
    assert_equal_to_whole(family, cp=4, way=way)


@pytest.mark.parametrize(
    ("cp", "ep", "tp"),
    [
        (2, 4, 1),
        (2, 2, 2),
        *(
            pytest.param(*degrees, marks=pytest.mark.exhaustive)
            for degrees in [(1, 2, 1), (1, 4, 1), (4, 2, 1), (1, 2, 2)]
        ),
    ],
)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.exhaustive)])
def test_experts_beside_contexts_and_tensor_parallelism_compute_the_same(
    family: str, cp: int, ep: int, tp: int
) -> None:
    assert_equal_to_whole(family, cp=cp, ep=ep, tp=tp)


@pytest.mark.parametrize(
    ("cp", "ep", "tp", "expert_tp"),
    [
        (1, 1, 2, 2),
        *(
            pytest.param(*degrees, marks=pytest.mark.exhaustive)
            for degrees in [
                (1, 2, 2, 1),
                (1, 2, 2, 2),
                (2, 2, 2, 1),
                (2, 2, 2, 2),
                (1, 1, 4, 1),
                (1, 1, 4, 4),
                (2, 1, 2, 1),
            ]
        ),
    ],
)
@pytest.mark.parametrize("family", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.exhaustive)])
def test_experts_that_tensor_parallel_devices_divide_or_cut_compute_the_same(
    family: str, cp: int, ep: int, tp: int, expert_tp: int
) -> None:
    assert_equal_to_whole(family, cp=cp, ep=ep, tp=tp, expert_tp=expert_tp)


@pytest.mark.parametrize("way", KeyExchange)
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("gpt2", "mixtral"))]
)
def test_contexts_beside_tensor_parallelism_compute_the_same(family: str, way: KeyExchange) -> None:
    assert_equal_to_whole(family, cp=2, tp=2, way=way)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("way", [KeyExchange.GATHER, KeyExchange.RING])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "t5"])
def test_windows_caps_sinks_and_biases_compute_the_same(family: str, way: KeyExchange, tp: int) -> None:
    assert_equal_to_whole(family, cp=4 // tp, tp=tp, way=way)


@settings(max_examples=6)
@given(
    family=st.sampled_from(["bert with its language head", "llama", "mixtral"]),
    degrees=st.sampled_from([(2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (2, 4, 1), (4, 2, 1), (2, 1, 2), (2, 2, 2)]),
    way=st.none() | st.sampled_from(KeyExchange),
    copies=st.integers(1, 2),
)
def test_any_product_of_degrees_computes_the_same(
    family: str, degrees: tuple[int, int, int], way: KeyExchange | None, copies: int
) -> None:
    cp, ep, tp = degrees
    ep = ep if family == "mixtral" else 1
    # Dropout asks where a sample lies in the batch, which only one copy knows here.
    copies = 1 if "bert" in family else copies
    assert_equal_to_whole(family, cp=cp, ep=ep, tp=tp, way=way, ranks=copies * max(cp, ep))


def test_copies_beside_contexts_and_experts_compute_the_same() -> None:
    assert_equal_to_whole("mixtral", cp=2, ep=2, tp=2, way=KeyExchange.RING, ranks=4)
