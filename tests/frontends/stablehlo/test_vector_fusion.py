"""Vector work of JAX is joined into as many ops as other frontends have, and backward keeps as much."""

import jax
import jax.numpy as jnp
import jax_models as models
import pytest

import phaze
from phaze.cost.operator_work import vector_operations
from phaze.hardware import parse_cluster
from phaze.ir import Graph, OpKind, Phase, op_bytes, stashed_bytes
from phaze.shard import Axis, ShardingProblem, shard_layer


def imported(loss: object, *shapes: tuple[int, ...]) -> Graph:
    return phaze.import_graph(loss, tuple(models.shape(*sizes) for sizes in shapes))


@pytest.fixture(scope="module")
def block_graphs() -> tuple[Graph, Graph]:
    """The same GPT from JAX and from a config without dropout, both in bfloat16."""
    params = jax.tree.map(lambda leaf: models.shape(*leaf.shape, dtype=jnp.bfloat16), models.gpt_parameters())
    sizes = {"n_embd": models.WIDTH, "n_head": models.HEADS, "n_layer": models.LAYERS, "n_positions": models.LENGTH}
    dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    config = {"model_type": "gpt2", "vocab_size": models.WORDS, **sizes, **dropout}
    return (
        phaze.import_graph(models.gpt_loss, (params, models.tokens())),
        phaze.import_graph(config, sequence_length=models.LENGTH, micro_batch_size=2),
    )


def test_a_softmax_is_one_op_and_so_is_its_gradient() -> None:
    graph = imported(lambda w, x: (jax.nn.softmax(x @ w) @ w.T).sum(), (8, 8), (4, 8))
    softmax = [op for op in graph.ops if op.kind in (OpKind.SOFTMAX, OpKind.NORM)]
    assert [op.phase for op in softmax] == [Phase.FORWARD, Phase.BACKWARD]
    assert softmax[0].kind is OpKind.SOFTMAX
    assert str(softmax[0].rule).startswith("b0 d0 -> b0 d0")
    assert all("d0=8~" in str(op.rule) for op in softmax)


def test_a_norm_is_one_op_with_its_scale_and_bias(block_graphs: tuple[Graph, Graph]) -> None:
    graph = block_graphs[0]
    norms = [op for op in graph.layers[1].forward if op.kind is OpKind.NORM]
    assert len(norms) == 2
    for index, norm in enumerate(norms):
        read = {graph.storage(tensor_id) for tensor_id in norm.inputs}
        assert {f"params.h.0.ln_{index + 1}.scale", f"params.h.0.ln_{index + 1}.bias"} <= read
        assert f"={models.WIDTH}~" in str(norm.rule)


def test_a_sum_that_does_not_come_back_stays_a_reduction() -> None:
    graph = imported(lambda w, x: jnp.tanh(x * w).sum(), (8,), (4, 8))
    kinds = [op.kind for op in graph.ops_of(Phase.FORWARD) if op.kind is not OpKind.VIEW]
    assert kinds == [OpKind.ELEMENTWISE, OpKind.REDUCTION]


def test_a_cluster_never_waits_for_itself_through_another_op() -> None:
    graph = imported(lambda w, x: jnp.sum(jnp.tanh(x @ w) * (jnp.tanh(x @ w) @ w)), (8, 8), (4, 8))
    assert graph.matmul_flops("forward") == 2 * 2 * 4 * 8 * 8


def test_fused_ops_say_how_much_they_compute() -> None:
    graph = imported(lambda w, x: (jax.nn.gelu(x @ w)).sum(), (8, 8), (4, 8))
    (gelu,) = [op for op in graph.ops_of(Phase.FORWARD) if op.function == "fused"]
    assert 10 <= int(gelu.attribute("operations")) <= 20  # type: ignore[call-overload]
    assert vector_operations(gelu) == int(gelu.attribute("operations")) * 4 * 8  # type: ignore[call-overload]
    assert any("vector ops are joined" in note for note in graph.notes)


def test_a_block_moves_about_the_bytes_that_the_same_block_of_a_config_moves(
    block_graphs: tuple[Graph, Graph],
) -> None:
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        moved = [
            sum(
                op_bytes(graph, op) for op in (*graph.layers[1].forward, *graph.layers[1].backward) if op.phase is phase
            )
            for graph in block_graphs
        ]
        assert moved[0] < 1.35 * moved[1]


def test_backward_keeps_about_what_that_of_a_config_keeps(block_graphs: tuple[Graph, Graph]) -> None:
    kept = [stashed_bytes(graph, graph.layers[1]) for graph in block_graphs]
    assert kept[0] < 1.35 * kept[1]


def test_cheap_work_is_done_again_instead_of_kept() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = x @ w
        return (jnp.abs(jnp.square(jnp.tanh(y) * 2) - 1) @ w).sum()

    graph = imported(loss, (8, 8), (4, 8))
    read = {tensor_id for op in graph.ops_of(Phase.BACKWARD) for tensor_id in op.inputs}
    made = {tensor_id for op in graph.ops_of(Phase.FORWARD) for tensor_id in op.outputs}
    assert len(read & made) == 2  # what the second product reads, and the hyperbolic tangent


def test_expensive_work_is_kept_and_not_done_again() -> None:
    graph = imported(lambda w, x: (jnp.exp(jnp.exp(jnp.exp(x @ w)) + 1) @ w).sum(), (8, 8), (4, 8))
    read = {tensor_id for op in graph.ops_of(Phase.BACKWARD) for tensor_id in op.inputs}
    made = {tensor_id for op in graph.ops_of(Phase.FORWARD) for tensor_id in op.outputs}
    assert len(read & made) == 3


def test_a_block_is_split_across_devices_as_that_of_a_config_is(block_graphs: tuple[Graph, Graph]) -> None:
    axis = Axis(parse_cluster("a100-80gb:8"), models.HEADS)
    sharded = [shard_layer(ShardingProblem(graph=graph, layer=graph.layers[1], axis=axis)) for graph in block_graphs]
    by_shape = [
        {(graph.tensors[name].shape, str(layout)) for name, layout in layer.parameters.items()}
        for graph, layer in zip(block_graphs, sharded, strict=True)
    ]
    matrices = [{pair for pair in layouts if len(pair[0]) == 2} for layouts in by_shape]
    assert matrices[0] == matrices[1]
    assert sharded[0].move_s == pytest.approx(sharded[1].move_s, rel=0.1)
    assert sharded[0].compute_s < 1.35 * sharded[1].compute_s
