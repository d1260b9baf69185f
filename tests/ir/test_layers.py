"""Layers: what placement moves, what flows between, what repeats."""

from collections.abc import Iterable
from dataclasses import replace

from graphs import graphs, tiny_graph
from hypothesis import given

from phaze.frontends.transformer_config import graph_from_config
from phaze.ir import Graph, GraphBuilder, Op, OpKind, Phase, Role
from phaze.ir.graph_builder import elementwise_rule, reduction_rule
from phaze.ir.layers import rescaled_layers


def names(graph: Graph) -> list[str]:
    return [layer.name for layer in graph.layers]


def test_a_gpt_has_its_blocks_and_two_more_layers() -> None:
    graph = tiny_graph("gpt2")
    assert names(graph) == [
        "transformer.wte .. transformer.drop",
        "transformer.h.0",
        "transformer.h.1",
        "transformer.ln_f .. loss",
    ]
    assert len(graph.distinct_layers) == 3
    assert graph.layer_graph.is_chain


def test_the_tied_table_belongs_to_the_first_and_the_last_layer() -> None:
    assert tiny_graph("gpt2").layer_graph.tied_parameters == {"transformer.wte.weight": (0, 3)}


def test_every_forward_and_backward_op_is_in_exactly_one_layer() -> None:
    graph = tiny_graph("t5")
    members = [op.id for layer in graph.layers for op in (*layer.forward, *layer.backward)]
    assert sorted(members) == sorted(op.id for op in graph.ops)
    assert all(op.phase is Phase.FORWARD for layer in graph.layers for op in layer.forward)


def test_t5_branches_and_relays_the_encoder_output_and_the_position_biases() -> None:
    graph = tiny_graph("t5")
    assert names(graph) == [
        "encoder.embed_tokens .. encoder",
        "encoder.block.0",
        "encoder.block.1",
        "encoder.final_layer_norm",
        "decoder.embed_tokens .. decoder",
        "decoder.block.0",
        "decoder.block.1",
        "decoder.final_layer_norm .. loss",
    ]
    layers = graph.layer_graph
    assert not layers.is_chain
    assert {(3, 5), (3, 6), (4, 5), (5, 6), (6, 7)} <= layers.edges
    relayed = {
        boundary.tensor: (boundary.producer, *boundary.consumers)
        for boundary in layers.boundaries
        if boundary.is_relayed
    }
    assert relayed == {
        "encoder.final_layer_norm.dropout": (3, 5, 6),
    }
    shared = {boundary.tensor for boundary in layers.boundaries if "relative_attention_bias" in boundary.tensor}
    assert len(shared) == 2


def test_a_position_bias_that_many_blocks_read_is_relayed() -> None:
    config = {"model_type": "t5", "num_layers": 4, "d_model": 8, "d_kv": 4, "num_heads": 2, "d_ff": 8, "vocab_size": 9}
    graph = graph_from_config(config, name="t5", sequence_length=4)
    relayed = [boundary for boundary in graph.layer_graph.boundaries if boundary.is_relayed]
    biases = [boundary for boundary in relayed if "relative_attention_bias" in boundary.tensor]
    assert [(bias.producer, bias.consumers) for bias in biases] == [(1, (2, 3, 4)), (7, (8, 9, 10))]


def test_boundary_tensors_enter_and_leave_layers() -> None:
    graph = tiny_graph("gpt2")
    for before, after in zip(graph.layers, graph.layers[1:], strict=False):
        assert before.outputs == after.inputs
    assert graph.layers[-1].outputs == graph.outputs


@given(graphs())
def test_layers_never_wait_for_each_other(graph: Graph) -> None:
    assert all(producer < consumer for producer, consumer in graph.layer_graph.edges)


def _in_order(ops: Iterable[Op]) -> list[str]:
    return list(dict.fromkeys(name for op in ops for name in (*op.inputs, *op.outputs)))


@given(graphs())
def test_equal_keys_mean_equal_work_and_wiring(graph: Graph) -> None:
    by_key: dict[str, list[tuple[object, ...]]] = {}
    for layer in graph.layers:
        ops = (*layer.forward, *layer.backward)
        numbers = {tensor_id: index for index, tensor_id in enumerate(_in_order(ops))}
        work = [(op.function, str(op.rule), *(numbers[name] for name in (*op.inputs, *op.outputs))) for op in ops]
        assert by_key.setdefault(layer.key, work) == work


def chain(modules: list[str], *, functions: list[str] | None = None) -> Graph:
    """A chain of weighted ops, one per module path."""
    builder = GraphBuilder("chain")
    x = builder.argument("x", (4,), Role.BATCH)
    rule = elementwise_rule((4,), (4,), (4,))
    for index, module in enumerate(modules):
        weight = builder.parameter(f"w{index}", 4)
        function = functions[index] if functions else "multiply"
        (x,) = builder.add(f"op{index}", OpKind.ELEMENTWISE, function, rule, (x, weight), module=module)
    (loss,) = builder.add("loss", OpKind.REDUCTION, "sum", reduction_rule((4,), (0,)), (x,))
    return builder.build((loss,)).with_backward()


def test_children_of_the_outermost_repeated_container_are_the_layers() -> None:
    graph = chain(["stem", "blocks.0.parts.0", "blocks.0.parts.1", "blocks.1.parts.0", "blocks.1.parts.1", "head"])
    assert names(graph) == ["stem", "blocks.0", "blocks.1", "head .. loss"]


def test_a_container_with_one_child_is_looked_through() -> None:
    graph = chain(["model.0.blocks.0", "model.0.blocks.1", "model.0.blocks.2"])
    assert names(graph) == ["model.0.blocks.0", "model.0.blocks.1", "model.0.blocks.2"]


def test_a_model_of_one_block_keeps_its_layers() -> None:
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 12, "n_head": 3, "n_positions": 8, "vocab_size": 11}
    assert names(graph_from_config(config, name="gpt"))[1:] == ["transformer.h.0", "transformer.ln_f .. loss"]
    config = {"model_type": "t5", "num_layers": 1, "d_model": 8, "d_kv": 4, "num_heads": 2, "d_ff": 8, "vocab_size": 9}
    layers = names(graph_from_config(config, name="t5", sequence_length=4))
    assert [name for name in layers if "block" in name] == ["encoder.block.0", "decoder.block.0"]


def test_blocks_inside_an_outer_sequence_of_unlike_parts_are_the_layers() -> None:
    graph = chain(["0", "1.0", "1.1", "1.2", "2"], functions=["add", "multiply", "multiply", "multiply", "subtract"])
    assert names(graph) == ["0", "1.0", "1.1", "1.2", "2"]


def test_a_module_outside_of_blocks_that_is_used_twice_makes_two_layers() -> None:
    assert names(chain(["norm", "b.0", "norm", "b.1", "head"])) == ["norm", "b.0", "norm", "b.1", "head .. loss"]


def test_a_shared_mask_does_not_hide_waists() -> None:
    builder = GraphBuilder("masked")
    x, raw = builder.argument("x", (4,), Role.BATCH), builder.argument("raw", (4,), Role.BATCH)
    unary, binary = elementwise_rule((4,), (4,)), elementwise_rule((4,), (4,), (4,))
    (mask,) = builder.add("mask", OpKind.ELEMENTWISE, "exp", unary, (raw,))
    for index in range(3):
        weight = builder.parameter(f"w{index}", 4)
        (x,) = builder.add(f"y{index}", OpKind.ELEMENTWISE, "multiply", binary, (x, weight))
        (x,) = builder.add(f"z{index}", OpKind.ELEMENTWISE, "multiply", binary, (x, mask))
    assert len(builder.build((x,)).layers) == 3


def test_backward_ops_without_a_forward_op_go_where_their_parameters_are() -> None:
    graph = chain(["b.0", "b.1", "b.2", "b.3"])
    stripped = tuple(replace(op, gradient_of="", module="") if op.phase is Phase.BACKWARD else op for op in graph.ops)
    expected = [len(layer.backward) for layer in graph.layers]
    found = [len(layer.backward) for layer in replace(graph, ops=stripped).layers]
    assert sum(found) == sum(expected)
    assert min(found) > 0


def test_layers_that_differ_in_one_function_are_distinct() -> None:
    modules = ["b.0", "b.1", "b.2", "b.3"]
    same = chain(modules)
    other = chain(modules, functions=["multiply", "multiply", "subtract", "multiply"])
    assert same.layers[1].key == same.layers[2].key == other.layers[1].key
    assert other.layers[1].key != other.layers[2].key


def test_equal_layers_that_share_other_parameters_with_the_last_are_distinct() -> None:
    builder = GraphBuilder("penalty")
    x = builder.argument("x", (4,), Role.BATCH)
    rule = elementwise_rule((4,), (4,), (4,))
    weights = [builder.parameter(f"w{index}", 4) for index in range(5)]
    for index, weight in enumerate(weights):
        (x,) = builder.add(f"op{index}", OpKind.ELEMENTWISE, "multiply", rule, (x, weight), module=f"b.{index}")
    for index, weight in enumerate(weights[1:3]):
        (x,) = builder.add(f"penalty{index}", OpKind.ELEMENTWISE, "add", rule, (x, weight), module="last")
    (loss,) = builder.add("loss", OpKind.REDUCTION, "sum", reduction_rule((4,), (0,)), (x,), module="last")
    graph = builder.build((loss,)).with_backward()
    assert set(graph.layer_graph.tied_parameters) == {"w1", "w2"}
    keys = [layer.key for layer in graph.layers if layer.name.startswith("b.")]
    assert keys[1] != keys[2] != keys[3] == keys[4]
    rescaled = rescaled_layers(graph.layer_graph, graph)
    assert len({layer.key for layer in rescaled.layers}) == len({layer.key for layer in graph.layers})


def test_without_paths_the_chain_is_cut_at_its_waists() -> None:
    graph = chain(["", "", ""])
    assert names(graph) == ["part 0", "part 1", "part 2"]


def test_a_module_used_twice_around_another_does_not_make_layers_that_wait_for_each_other() -> None:
    graph = chain(["b.0", "b.1", "b.0"])
    assert names(graph) == ["part 0", "part 1", "part 2"]


def test_a_mask_without_parameters_joins_its_first_reader() -> None:
    builder = GraphBuilder("masked")
    x, raw = builder.argument("x", (4,), Role.BATCH), builder.argument("raw", (4,), Role.BATCH)
    unary, binary = elementwise_rule((4,), (4,)), elementwise_rule((4,), (4,), (4,))
    (mask,) = builder.add("mask", OpKind.ELEMENTWISE, "exp", unary, (raw,), module="mask")
    for index in range(3):
        weight = builder.parameter(f"w{index}", 4)
        (y,) = builder.add(f"y{index}", OpKind.ELEMENTWISE, "multiply", binary, (x, weight), module=f"b.{index}")
        (x,) = builder.add(f"z{index}", OpKind.ELEMENTWISE, "multiply", binary, (y, mask), module=f"b.{index}")
    graph = builder.build((x,))
    assert names(graph) == ["b.0", "b.1", "b.2"]
    assert [op.id for op in graph.layers[0].forward] == ["mask", "y0", "z0"]
    assert [(boundary.tensor, boundary.is_relayed) for boundary in graph.layer_graph.boundaries] == [
        ("z0", False),
        ("mask", True),
        ("z1", False),
    ]


def test_a_mask_that_several_blocks_read_joins_the_embedding_so_that_blocks_stay_equal() -> None:
    builder = GraphBuilder("masked")
    x, raw = builder.argument("x", (4,), Role.BATCH), builder.argument("raw", (4,), Role.BATCH)
    unary, binary = elementwise_rule((4,), (4,)), elementwise_rule((4,), (4,), (4,))
    (mask,) = builder.add("mask", OpKind.ELEMENTWISE, "exp", unary, (raw,), module="mask")
    for index, module in enumerate(["embedding", "b.0", "b.1"]):
        weight = builder.parameter(f"w{index}", 4)
        (x,) = builder.add(f"y{index}", OpKind.ELEMENTWISE, "multiply", binary, (x, weight), module=module)
        if module != "embedding":
            (x,) = builder.add(f"z{index}", OpKind.ELEMENTWISE, "multiply", binary, (x, mask), module=module)
    graph = builder.build((x,))
    assert names(graph) == ["embedding", "b.0", "b.1"]
    assert [op.id for op in graph.layers[0].forward] == ["mask", "y0"]
    assert len(graph.distinct_layers) == 2


def test_calls_of_one_module_are_layers() -> None:
    assert names(chain(["stem", "block@0.up", "block@1.up", "block@2.up", "head"])) == [
        "stem",
        "block@0",
        "block@1",
        "block@2",
        "head .. loss",
    ]


def test_stages_whose_blocks_are_alike_in_one_of_them_are_taken_apart_in_all() -> None:
    modules = ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1"]
    graph = chain(modules, functions=["multiply", "add", "add", "add"])
    assert names(graph) == modules


def test_a_child_without_parameters_is_no_layer() -> None:
    builder = GraphBuilder("sequence")
    x = builder.argument("x", (4,), Role.BATCH)
    unary, binary = elementwise_rule((4,), (4,)), elementwise_rule((4,), (4,), (4,))
    for index in range(2):
        weight = builder.parameter(f"w{index}", 4)
        (x,) = builder.add(f"y{index}", OpKind.ELEMENTWISE, "multiply", binary, (x, weight), module=f"{2 * index}")
        (x,) = builder.add(f"z{index}", OpKind.ELEMENTWISE, "relu", unary, (x,), module=f"{2 * index + 1}")
    assert names(builder.build((x,))) == ["0", "2"]
