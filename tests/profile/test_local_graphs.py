"""How attention exchanges its keys is chosen by price, and rings are hidden behind the blocks of their attention."""

import numpy as np
import pytest
from graphs import TINY_CONFIGS

import phaze
from phaze.cost import LIBRARY_STACK, PERFECT_STACK, Calibration, Collective, Stack, fuse_attention
from phaze.installed import installed_plugins
from phaze.ir import Graph, OpKind, Phase, RecomputeMode, recomputation
from phaze.profile.layer_jobs import price_pass
from phaze.profile.layer_profile import peak_working_bytes
from phaze.profile.local_graphs import LocalGraphs, exchange_counts, exchange_seconds
from phaze.profile.model_profiles import profile_model, profile_options, slicings
from phaze.question import Question, ask
from phaze.shard import Axis
from phaze.shard.context_slicing import KeyExchange, key_attentions
from phaze.shard.device_graph import device_graph
from phaze.shard.mesh_axes import CONTEXT_AXIS, is_ring

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}


def question(cluster: str = "h100:64", length: int = 4096, config: object = LLAMA) -> Question:
    options = {"cluster": cluster, "global_batch_size": 64, "sequence_length": length, "target": None}
    return ask(config, None, options, installed_plugins())  # type: ignore[arg-type]


def fused(asked: Question) -> Graph:
    return fuse_attention(asked.graph)


@pytest.mark.parametrize("length", [256, 65536])
@pytest.mark.parametrize("cp", [2, 8])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_cheapest_exchange_is_taken(length: int, cp: int, tp: int) -> None:
    asked = question(length=length)
    graph = fused(asked)
    local = LocalGraphs(asked, graph).at(1, tp=tp, cp=cp)
    (attention, *_) = key_attentions(graph)
    seconds = exchange_seconds(graph, attention, Axis(asked.cluster, tp, asked.calibration, cp))
    assert (KeyExchange.HEADS in seconds) is (4 % (cp * tp) == 0)
    (chosen,) = exchange_counts(local)
    assert seconds[KeyExchange(chosen)] == min(seconds.values())


def test_an_attention_is_priced_with_the_links_around_it() -> None:
    asked = question()
    graph, axis = fused(asked), Axis(asked.cluster, 1, cp=4)
    (attention, *_) = key_attentions(graph)
    keys = sum(graph.tensors[name].size_bytes for name in attention.inputs[1:3])
    seconds = exchange_seconds(graph, attention, axis)
    gather_s = axis.seconds(Collective.ALL_GATHER, keys, CONTEXT_AXIS)
    work_s = seconds[KeyExchange.GATHER] - 3 * gather_s
    step_s = axis.seconds(Collective.POINT_TO_POINT, keys / 4, CONTEXT_AXIS)
    assert work_s > 0
    # Three times keys and values go around, hidden behind all blocks but one of forward and one of backward.
    assert work_s <= seconds[KeyExchange.RING] <= work_s + 9 * step_s


def test_a_graph_is_rewritten_once_for_all_microbatch_sizes() -> None:
    asked = question()
    graphs = LocalGraphs(asked, fused(asked))
    first, second = graphs.at(1, cp=2), graphs.at(2, cp=2)
    assert graphs.at(1, cp=2) is first
    assert second.matmul_flops("forward") == 2 * first.matmul_flops("forward")
    assert [op.id for op in first.ops] == [op.id for op in second.ops]


@pytest.mark.parametrize("stack", [PERFECT_STACK, LIBRARY_STACK], ids=["perfect", "library"])
def test_a_ring_ends_with_the_work_or_one_block_after_its_steps(stack: Stack) -> None:
    asked = question()
    graph = fused(asked)
    ways = dict.fromkeys((op.id for op in key_attentions(graph)), KeyExchange.RING)
    local = device_graph(graph, cp=4, exchanges=ways)
    layer = local.layers[1]
    chip = asked.cluster.accelerator
    place = next(index for index, op in enumerate(layer.forward) if op.kind is OpKind.ATTENTION)
    name = layer.forward[place].id

    def attention_s(step_s: float) -> float:
        priced = price_pass(
            local,
            layer.forward,
            chip,
            link_s=lambda op: 3 * step_s if is_ring(op) else 0.0,
            calibration=Calibration(stack=stack),
        )
        assert all(
            priced.latency_s[0, index] == 0 for index, each in enumerate(priced.names) if is_ring(local.op(each))
        )
        return float(priced.spread_s[0, priced.names.index(name)])

    work_s = attention_s(0.0)
    assert attention_s(work_s / 100) == pytest.approx(work_s)
    # Keys and values make two exchanges of three steps each.
    assert attention_s(work_s) == pytest.approx(work_s / 4 + 2 * 3 * work_s)


def test_a_ring_never_holds_all_keys() -> None:
    config = {**LLAMA, "hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 8}
    graph = fuse_attention(phaze.import_graph(config, sequence_length=4096))
    peaks = {}
    for way in (KeyExchange.GATHER, KeyExchange.RING):
        ways = dict.fromkeys((op.id for op in key_attentions(graph)), way)
        local = device_graph(graph, cp=16, exchanges=ways)
        layer = local.layers[1]
        peaks[way] = peak_working_bytes(local, layer, recomputation(local, layer, RecomputeMode.NONE))
    keys = sum(graph.tensors[name].size_bytes for name in key_attentions(graph)[0].inputs[1:3])
    assert peaks[KeyExchange.RING] < peaks[KeyExchange.GATHER]
    assert peaks[KeyExchange.GATHER] - peaks[KeyExchange.RING] <= 2 * keys


@pytest.mark.parametrize(("cp", "ep", "tp"), [(1, 1, 1), (2, 4, 1), (2, 2, 2)])
def test_profiles_of_contexts_and_experts_have_a_devices_share(cp: int, ep: int, tp: int) -> None:
    config = {**TINY_CONFIGS["mixtral"], "num_key_value_heads": 4}
    asked = question(length=64, config=config)
    whole = LocalGraphs(asked).at(2)
    graph = LocalGraphs(asked).at(2, tp=tp, cp=cp, ep=ep)
    (model, *_) = slicings(asked, graph, tp, cp=cp, ep=ep)
    assert (model.axis.cp, model.axis.ep, model.axis.tp) == (cp, ep, tp)
    profiles = profile_model(model, profile_options(asked))
    profile = profiles.placed(1, RecomputeMode.NONE)
    experts = sum(tensor.elements for tensor in whole.parameters if ".layers.0.mlp.experts." in tensor.id)
    assert profile.expert_parameters == (0 if ep == 1 else experts / ep / tp)
    assert sum(output.size_bytes for output in profile.outputs) <= 2 * 64 * 16 * 2 / cp
    assert float(profile.forward_s.bound[0]) <= float(profile.forward_s.value[0])
    assert np.isfinite(profile.forward_s.value).all()
    assert whole.matmul_flops(Phase.FORWARD) == graph.matmul_flops(Phase.FORWARD) * cp
