"""Models captured from torch and JAX are sliced along their sequences as models from configs are."""

import jax
import jax_models
import pytest
import torch_models

import phaze
from phaze.errors import ShardError
from phaze.ir import Graph, Phase
from phaze.ir.backward import derive_backward
from phaze.ir.factor_following import token_lengths
from phaze.shard.device_graph import device_graph
from phaze.shard.mesh_axes import is_exchange


def captured_gpt2() -> Graph:
    inputs = {"input_ids": torch_models.ids(), "labels": torch_models.ids()}
    return phaze.import_graph(torch_models.gpt2(n_layer=2), inputs)


def captured_llama() -> Graph:
    ids = jax_models.ids()
    return phaze.import_graph(jax_models.llama_loss, (jax_models.llama_parameters(), ids, ids))


def shifted_llama() -> Graph:
    """The loss over shifted labels that is usual in JAX: one token more than there are positions."""

    def loss(params: object, tokens: jax.Array) -> jax.Array:
        return jax_models.llama_loss(params, tokens[:, :-1], tokens[:, 1:])

    ids = jax_models.ids(length=jax_models.LENGTH + 1)
    return phaze.import_graph(loss, (jax_models.llama_parameters(), ids))


def test_what_a_loss_drops_at_the_end_of_a_sequence_is_computed_where_that_is_allowed() -> None:
    def loss(params: object, tokens: jax.Array) -> jax.Array:
        return jax_models.llama_loss(params, tokens, tokens[:, 1:], positions=slice(None, -1))

    graph = derive_backward(phaze.import_graph(loss, (jax_models.llama_parameters(), jax_models.ids())))
    local = device_graph(graph, cp=4, keeps_dropped=True)
    whole = derive_backward(captured_llama())
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert local.matmul_flops(phase) * 4 == whole.matmul_flops(phase)
    with pytest.raises(ShardError, match="positions of 'tokens' that the model uses of 16; compare all 16 positions"):
        device_graph(graph, cp=4)


def test_labels_that_are_rolled_leave_a_sequence_whole() -> None:
    def loss(params: object, tokens: jax.Array) -> jax.Array:
        return jax_models.llama_loss(params, jax.numpy.roll(tokens, 1, axis=1), tokens)

    graph = derive_backward(phaze.import_graph(loss, (jax_models.llama_parameters(), jax_models.ids())))
    local = device_graph(graph, cp=4, keeps_dropped=True)
    assert local.matmul_flops(Phase.FORWARD) * 4 == graph.matmul_flops(Phase.FORWARD)


def test_what_drops_the_first_positions_stays_refused() -> None:
    def loss(params: object, tokens: jax.Array) -> jax.Array:
        return jax_models.llama_loss(params, tokens, tokens[:, :-1], positions=slice(1, None))

    graph = derive_backward(phaze.import_graph(loss, (jax_models.llama_parameters(), jax_models.ids())))
    with pytest.raises(ShardError, match="cp=4 does not divide the 15 positions of 'tokens'"):
        device_graph(graph, cp=4, keeps_dropped=True)


@pytest.mark.parametrize(
    "build", [captured_gpt2, shifted_llama, pytest.param(captured_llama, marks=pytest.mark.exhaustive)]
)
def test_captured_models_are_sliced_along_their_sequences(build: object) -> None:
    assert callable(build)
    graph = derive_backward(build())
    local = device_graph(graph, cp=4)
    assert set(token_lengths(graph).values()) == {16}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert local.matmul_flops(phase) * 4 == graph.matmul_flops(phase)
    exchanges = [op.function for op in local.ops if is_exchange(op)]
    assert {name: exchanges.count(name) for name in exchanges} == {
        "all_gather": 2 * exchanges.count("reduce_scatter"),
        "reduce_scatter": exchanges.count("reduce_scatter"),
    }
    assert len(local.layers) == len(graph.layers)


def test_the_op_that_routes_tokens_of_a_captured_mixture_is_named() -> None:
    ids = jax_models.ids()
    graph = derive_backward(phaze.import_graph(jax_models.moe_loss, (jax_models.moe_parameters(), ids, ids)))
    with pytest.raises(ShardError, match="takes a part of the positions along the sequence"):
        device_graph(graph, cp=2)


def test_a_captured_model_without_experts_divides_none() -> None:
    with pytest.raises(ShardError, match="no op of it dispatches tokens"):
        device_graph(derive_backward(captured_gpt2()), ep=2)
