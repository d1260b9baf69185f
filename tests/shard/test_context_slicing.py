"""What devices of a context exchange, in bytes, and what cannot be split over them."""

import pytest
from graphs import MORE_TINY_CONFIGS, TINY_CONFIGS

import phaze
from phaze.cost import Collective, fuse_attention, price_collective
from phaze.cost.off_chip_traffic import seen_gemms
from phaze.errors import ShardError
from phaze.frontends.transformer_config import graph_from_config
from phaze.hardware import parse_cluster
from phaze.ir import DType, Graph, GraphBuilder, Op, OpKind, Phase, Role, Rule, stashed_bytes
from phaze.ir.factor_following import mark_sequences
from phaze.ir.layers import single_layer
from phaze.shard import Axis
from phaze.shard.context_slicing import KeyExchange, can_exchange_heads, key_attentions
from phaze.shard.device_graph import device_graph
from phaze.shard.mesh_axes import CONTEXT_AXIS, axis_of, is_exchange, whole_bytes

CP = 4
CLUSTER = parse_cluster("a100-80gb:8")


def llama(layers: int = 2) -> Graph:
    config = {**TINY_CONFIGS["llama"], "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4}
    return fuse_attention(mark_sequences(graph_from_config(config, name="llama", sequence_length=64)))


def sliced(graph: Graph, way: KeyExchange, cp: int = CP) -> Graph:
    return device_graph(graph, cp=cp, exchanges=dict.fromkeys((op.id for op in key_attentions(graph)), way))


def sent_bytes(local: Graph, op: Op, devices: int) -> float:
    """What one device sends in a collective on one level of a network."""
    collective, size = Collective(op.function), whole_bytes(local, op, devices)
    priced = size / devices if collective is Collective.ALL_TO_ALL else size
    return float(price_collective(collective, priced, CLUSTER, devices).sent_bytes)


def sent_by_phase(local: Graph) -> dict[Phase, float]:
    sent = dict.fromkeys((Phase.FORWARD, Phase.BACKWARD), 0.0)
    for op in local.ops:
        if is_exchange(op):
            assert axis_of(op) == CONTEXT_AXIS
            sent[op.phase] += sent_bytes(local, op, CP)
    return sent


@pytest.mark.parametrize("way", [KeyExchange.GATHER, KeyExchange.RING])
def test_gathers_and_rings_send_all_keys_and_values_but_ones_own(way: KeyExchange) -> None:
    graph = llama()
    attentions = key_attentions(graph)
    keys = sum(graph.tensors[name].size_bytes for op in attentions for name in op.inputs[1:3])
    sent = sent_by_phase(sliced(graph, way))
    assert sent[Phase.FORWARD] == pytest.approx((CP - 1) / CP * keys)
    assert sent[Phase.BACKWARD] == pytest.approx(2 * (CP - 1) / CP * keys)  # keys again, and their gradients


def test_exchanges_of_heads_send_a_devices_part_of_everything() -> None:
    graph = llama()
    names = [name for op in key_attentions(graph) for name in (*op.inputs[:3], op.outputs[0])]
    moved = sum(graph.tensors[name].size_bytes for name in names) / CP
    sent = sent_by_phase(sliced(graph, KeyExchange.HEADS))
    assert sent == pytest.approx({Phase.FORWARD: (CP - 1) / CP * moved, Phase.BACKWARD: (CP - 1) / CP * moved})


def test_exchanges_follow_the_microbatch_and_the_types() -> None:
    local = sliced(llama(), KeyExchange.GATHER)
    larger = local.with_micro_batch(3)
    assert sent_by_phase(larger)[Phase.BACKWARD] == pytest.approx(3 * sent_by_phase(local)[Phase.BACKWARD])


@pytest.mark.parametrize("way", KeyExchange)
def test_a_device_does_its_share_of_the_work_and_keeps_its_share_of_the_activations(way: KeyExchange) -> None:
    graph, local = llama(), sliced(llama(), way)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert local.matmul_flops(phase) * CP == graph.matmul_flops(phase)
    assert local.parameter_count == graph.parameter_count
    assert len(local.layers) == len(graph.layers)
    whole, part = (stashed_bytes(each, single_layer(each)) for each in (graph, local))
    # An exchange of heads keeps the context both as heads and as positions.
    assert part * CP == whole if way is not KeyExchange.HEADS else part * CP <= whole * 1.2


@pytest.mark.parametrize("way", KeyExchange)
@pytest.mark.parametrize("window", [None, 512])
def test_causal_work_is_balanced(way: KeyExchange, window: int | None) -> None:
    config = {**TINY_CONFIGS["mistral"], "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": window}
    graph = fuse_attention(mark_sequences(graph_from_config(config, name="mistral", sequence_length=4096)))
    local = sliced(graph, way)
    for op in key_attentions(graph):
        seen = sum(gemm.flops for gemm in seen_gemms(op))
        assert seen < 0.6 * op.matmul_flops
        share = sum(gemm.flops for gemm in seen_gemms(local.op(op.id))) * CP
        assert seen <= share <= 1.02 * seen  # blocks of scores are rounded up


def test_heads_are_exchanged_where_cp_and_tp_divide_the_key_heads() -> None:
    (attention, *_) = key_attentions(llama())
    assert [cp for cp in range(1, 9) if can_exchange_heads(attention, cp)] == [1, 2, 4]
    assert not can_exchange_heads(attention, 4, tp=2)
    with pytest.raises(ShardError, match="its key heads do not divide over cp=8 devices"):
        sliced(llama(), KeyExchange.HEADS, cp=8)


def test_a_ring_takes_steps_between_neighbours_and_a_gather_what_its_levels_allow() -> None:
    graph = llama()
    for tp in (1, 2):
        axis = Axis(parse_cluster("h100:64"), tp, cp=CP)
        for way in (KeyExchange.GATHER, KeyExchange.RING):
            local = sliced(graph, way)
            op = next(op for op in local.ops if is_exchange(op))
            size = whole_bytes(local, op, CP)
            step_s = axis.seconds(Collective.POINT_TO_POINT, size / CP, CONTEXT_AXIS)
            gather_s = axis.seconds(Collective.ALL_GATHER, size, CONTEXT_AXIS)
            assert axis.link_s(local, op) == pytest.approx((CP - 1) * step_s if way is KeyExchange.RING else gather_s)


def test_a_cp_that_does_not_divide_is_refused_with_the_nearest_that_do() -> None:
    with pytest.raises(ShardError, match=r"cp=6 does not divide the 64 positions of 'input_ids'.* are 4 and 8\."):
        device_graph(llama(), cp=6)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("vit", "model 'vit' has no sequence that cp=2 could split"),
        ("mamba", r"mixer.conv1d' \(convolution convolution\) reads positions beside its own along the sequence"),
        ("mamba2", r"mixer.conv1d' \(convolution convolution\) reads positions beside its own along the sequence"),
    ],
)
def test_what_cannot_be_sliced_is_named(family: str, message: str) -> None:
    config = MORE_TINY_CONFIGS.get(family) or TINY_CONFIGS[family]
    length = None if family == "vit" else 8
    graph = mark_sequences(graph_from_config(config, name=family, sequence_length=length))
    with pytest.raises(ShardError, match=message):
        device_graph(graph, cp=2)


def test_a_backward_that_was_captured_is_refused_with_the_reason() -> None:
    graph = llama()
    captured = Graph(
        name="captured",
        tensors=graph.tensors,
        ops=graph.ops,
        outputs=graph.outputs,
        gradients=graph.gradients,
        why_backward_kept="no loss was found",
    )
    with pytest.raises(ShardError, match=r"need a backward by rule, .* kept as captured: no loss was found"):
        device_graph(captured, cp=2)


def shifted_model(first: str, last: str, left: int = 8) -> Graph:
    """Tokens -> embedding -> logits -> loss, of which some positions are dropped; `first` and `last` say how, if so."""
    builder = GraphBuilder("shifted", dtype=DType.FLOAT32)
    sizes = {"b": 1, "s": 9, "v": 5, "i": 4}
    tokens = builder.argument("tokens", (1, 9), Role.BATCH, DType.INT64)
    labels = builder.argument("labels", (1, 9), Role.BATCH, DType.INT64)
    cut, source = {"b": 1, "p": left}, tokens
    if first:
        rule = Rule.of(first, cut)
        (source,) = builder.add("inputs", OpKind.VIEW, "slice", rule, (tokens,), dtypes=[DType.INT64])
        sizes["s"] = left
    table = builder.parameter("table", 5, 4)
    rule = Rule.of("v i, b s -> b s i", sizes, lookup="v")
    (x,) = builder.add("embedding", OpKind.LOOKUP, "embedding", rule, (table, source))
    weight = builder.parameter("weight", 5, 4)
    (x,) = builder.add("logits", OpKind.CONTRACTION, "einsum", Rule.of("b s i, v i -> b s v", sizes), (x, weight))
    if last:
        (x,) = builder.add("shift", OpKind.VIEW, "slice", Rule.of(last, {**cut, "v": 5}), (x,))
    rule = Rule.of("b p@9 -> b p", cut)
    (targets,) = builder.add(
        "targets", OpKind.VIEW, "slice", rule, (labels,), dtypes=[DType.INT64], attributes={"start": 1}
    )
    rule = Rule.of("b p v, b p -> .", {**cut, "v": 5}, normalized="v")
    (loss,) = builder.add("loss", OpKind.SOFTMAX, "cross_entropy", rule, (x, targets))
    return mark_sequences(builder.build((loss,)).with_backward())


def test_tokens_that_are_shifted_before_the_model_are_sliced() -> None:
    local = device_graph(shifted_model("b p@9 -> b p", ""), cp=2)
    assert local.op("logits").rule.size("s") == 4
    assert local.op("loss").rule.size("p") == 4
    assert not any(is_exchange(op) for op in local.ops)


def test_logits_that_are_shifted_behind_the_model_are_refused_by_name() -> None:
    graph = shifted_model("", "b p@9 v -> b p v", left=6)
    with pytest.raises(ShardError, match=r"op 'shift' \(view slice\) takes a part of the positions along the sequence"):
        device_graph(graph, cp=3)
    with pytest.raises(ShardError, match=r"the 6 positions of 'labels' that the model uses of 9; the nearest is 6\."):
        device_graph(graph, cp=9)


def test_learned_positions_that_are_added_whole_are_taken_in_part() -> None:
    builder = GraphBuilder("positions", dtype=DType.FLOAT32)
    sizes = {"b": 1, "s": 8, "v": 5, "i": 4}
    tokens = builder.argument("tokens", (1, 8), Role.BATCH, DType.INT64)
    rule = Rule.of("v i, b s -> b s i", sizes, lookup="v")
    table, positions = builder.parameter("table", 5, 4), builder.parameter("positions", 8, 4)
    (x,) = builder.add("embedding", OpKind.LOOKUP, "embedding", rule, (table, tokens))
    (x,) = builder.add("add", OpKind.ELEMENTWISE, "add", Rule.of("b s i, s i -> b s i", sizes), (x, positions))
    (loss,) = builder.add("loss", OpKind.REDUCTION, "mean", Rule.of("b s i -> .", sizes), (x,))
    local = device_graph(mark_sequences(builder.build((loss,)).with_backward()), cp=2)
    assert local.tensors["positions"].shape == (8, 4)
    assert local.tensors["positions:part"].shape == (4, 4)
    (gradient,) = (made for name, made in local.gradients if name == "positions")
    assert local.tensors[gradient].shape == (8, 4)


def test_a_built_in_model_is_sliced_at_its_published_length() -> None:
    graph = phaze.import_graph("llama3.2-1b")
    assert device_graph(graph, cp=8).matmul_flops("forward") * 8 == graph.matmul_flops("forward")
