"""What devices that share experts exchange, in bytes, and what cannot be divided over them."""

import math

import pytest
from graphs import TINY_CONFIGS

import phaze
from phaze.errors import ShardError
from phaze.hardware import parse_cluster
from phaze.ir import Graph, OpKind, Phase
from phaze.profile.layer_profile import expert_parameters
from phaze.shard import Axis, ShardingProblem, shard_layer, slice_layer
from phaze.shard.device_graph import device_graph
from phaze.shard.expert_slicing import expert_counts
from phaze.shard.mesh_axes import EXPERT_AXIS, axis_of, is_exchange, whole_bytes

LENGTH, CHOSEN, COUNT, HIDDEN = 64, 2, 8, 16


def mixtral() -> Graph:
    config = {**TINY_CONFIGS["mixtral"], "num_local_experts": COUNT, "num_experts_per_tok": CHOSEN}
    return phaze.import_graph(config, sequence_length=LENGTH)


@pytest.mark.parametrize("imbalance", [1.0, 1.5])
@pytest.mark.parametrize(("cp", "ep"), [(1, 2), (1, 8), (2, 4)])
def test_tokens_are_sent_and_returned_forward_and_backward(cp: int, ep: int, imbalance: float) -> None:
    local = device_graph(mixtral(), cp=cp, ep=ep, expert_imbalance=imbalance)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        exchanges = [op for op in local.layers[1].forward + local.layers[1].backward if is_exchange(op)]
        exchanges = [op for op in exchanges if axis_of(op) == EXPERT_AXIS and op.phase is phase]
        assert [op.function for op in exchanges] == ["all_to_all"] * 2
        rows = math.ceil(LENGTH // cp * CHOSEN / COUNT * imbalance) * COUNT
        for op in exchanges:
            sent = (ep - 1) / ep * whole_bytes(local, op, ep) / ep
            assert sent == pytest.approx((ep - 1) / ep * rows * HIDDEN * 2)


def test_a_device_has_its_share_of_the_experts_and_the_tokens_of_all() -> None:
    graph = mixtral()
    local = device_graph(graph, ep=4)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert local.matmul_flops(phase) == graph.matmul_flops(phase)
    expert_bytes = sum(tensor.elements for tensor in graph.parameters if ".experts." in tensor.id)
    assert graph.parameter_count - local.parameter_count == expert_bytes * 3 // 4
    assert expert_parameters(local) == expert_bytes // 4
    assert local.with_micro_batch(3).matmul_flops("forward") == 3 * local.matmul_flops("forward")


def test_shared_experts_and_routers_stay_whole() -> None:
    graph = phaze.import_graph({**TINY_CONFIGS["deepseek_v3"], "n_shared_experts": 1}, sequence_length=LENGTH)
    local = device_graph(graph, ep=4)
    assert set(expert_counts(graph).values()) == {4}
    assert any("shared_experts" in tensor.id for tensor in graph.parameters)
    changed = {tensor.id for tensor in graph.parameters if local.tensors[tensor.id].shape != tensor.shape}
    assert changed == {tensor.id for tensor in graph.parameters if ".mlp.experts." in tensor.id}


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_divides_experts_further_or_cuts_them(tp: int) -> None:
    local = device_graph(mixtral(), ep=4)
    layer = local.layers[1]
    problem = ShardingProblem(graph=local, layer=layer, axis=Axis(parse_cluster("a100-80gb:32"), tp, ep=4))
    sharded = shard_layer(problem)
    part = slice_layer(sharded)
    whole = sum(tensor.elements for tensor in mixtral().parameters if ".0.mlp.experts." in tensor.id)
    assert expert_parameters(part) == whole / 4 / tp
    exchanges = [op for op in part.ops if op.kind is OpKind.COLLECTIVE and axis_of(op) == EXPERT_AXIS]
    assert len(exchanges) == 4


def test_an_ep_that_does_not_divide_is_refused_with_the_nearest_that_do() -> None:
    with pytest.raises(
        ShardError, match=r"ep=3 does not divide the 8 experts of op .* the nearest that do are 2 and 4"
    ):
        device_graph(mixtral(), ep=3)


def test_models_without_experts_are_refused() -> None:
    with pytest.raises(ShardError, match="model 'gpt2' has no experts that ep=2 could divide"):
        device_graph(phaze.import_graph("gpt2", sequence_length=8), ep=2)


@pytest.mark.parametrize("imbalance", [0.5, math.inf, math.nan])
def test_an_imbalance_below_1_is_refused(imbalance: float) -> None:
    with pytest.raises(ShardError, match=r"expert_imbalance is .*; expected a number of at least 1"):
        device_graph(mixtral(), ep=2, expert_imbalance=imbalance)


def test_rows_are_lengthened_by_the_imbalance_without_ep_as_well() -> None:
    lengthened = device_graph(mixtral(), expert_imbalance=2.0)
    products = [op.id for op in mixtral().ops_of(Phase.FORWARD) if ".experts." in op.id and op.matmul_flops]
    assert products
    assert all(lengthened.op(name).matmul_flops == 2 * mixtral().op(name).matmul_flops for name in products)
