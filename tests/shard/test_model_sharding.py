"""Megatron's patterns are found, not coded: column then row, heads, vocabulary, sequence, experts."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from graphs import kept_bytes
from sharded_layer_text import format_sharded_layer
from sharding import A100S

import phaze
from phaze.errors import ShardError
from phaze.hardware import parse_cluster
from phaze.ir import Graph, GraphBuilder, OpKind, Phase, RecomputeMode, Role
from phaze.ir.layers import single_layer
from phaze.ir.rule import Rule
from phaze.shard import (
    Axis,
    LayoutConstraint,
    SequenceParallel,
    ShardedModel,
    ShardOptions,
    shard_layer,
    shard_model,
    shard_variants,
    slice_layer,
)
from phaze.solvers import AUTOMATIC_SOLVERS, LinearProblem, LinearResult, SolverChain, WorkLimits

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
DEGREES = (2, 4, 8)
MEGATRON = tuple(
    LayoutConstraint(pattern, dim)
    for pattern, dim in {
        "*.query_key_value.weight": 0,
        "*.self_attention.dense.weight": 1,
        "*.dense_h_to_4h.weight": 0,
        "*.dense_4h_to_h.weight": 1,
        "*layernorm.out": None,
        "*layernorm.out.gradient": None,
        "*.dense.matmul": None,
        "*.dense_4h_to_h.matmul": None,
        "*.dense.bias_add": None,
        "*.dense_4h_to_h.bias_add": None,
        "*.dense.bias_add.gradient": None,
        "*.dense_4h_to_h.bias_add.gradient": None,
        "*.self_attention.dropout.2": None,
        "*.mlp.dropout": None,
        "*.residual*": None,
    }.items()
)


@pytest.fixture(scope="module")
def gpt3() -> Graph:
    return phaze.import_graph("gpt3-175b")


def sharded(graph: Graph, tp: int, mode: str, *constraints: LayoutConstraint) -> ShardedModel:
    options = ShardOptions(sequence_parallel=SequenceParallel(mode), constraints=constraints)
    return shard_model(graph, Axis(A100S, tp), options)


def collectives(graph: Graph, at_least: int = 2**20) -> Counter[tuple[str, str]]:
    """Large collectives of a slice by pass and name."""
    return Counter(
        (op.phase.value, op.function)
        for op in graph.ops
        if op.kind is OpKind.COLLECTIVE and op.collective_bytes >= at_least
    )


@pytest.mark.parametrize("tp", DEGREES)
def test_pinning_megatron_s_layouts_reproduces_its_collectives(gpt3: Graph, tp: int) -> None:
    """Two all-reduces of b s h elements forward and two backward (arXiv:1909.08053, section 3)."""
    local = slice_layer(sharded(gpt3, tp, "off", *MEGATRON).layers[1])
    assert collectives(local) == {("forward", "all_reduce"): 2, ("backward", "all_reduce"): 2}
    sizes = {op.collective_bytes for op in local.ops if op.kind is OpKind.COLLECTIVE}
    assert sizes == {2048 * 12288 * 2}


@pytest.mark.parametrize("tp", DEGREES)
def test_the_best_answer_is_never_dearer_than_megatron_s(gpt3: Graph, tp: int) -> None:
    best, megatron = sharded(gpt3, tp, "off"), sharded(gpt3, tp, "off", *MEGATRON)
    assert best.layers[1].seconds <= megatron.layers[1].seconds * (1 + 1e-9)


@pytest.mark.parametrize("tp", DEGREES)
def test_sequence_parallelism_is_megatron_s(gpt3: Graph, tp: int) -> None:
    """arXiv:2205.05198, section 4.2.2: gathers before and scatters after, and what was gathered is gathered again."""
    model = sharded(gpt3, tp, "on")
    assert collectives(slice_layer(model.layers[1])) == {
        ("forward", "all_gather"): 2,
        ("forward", "reduce_scatter"): 2,
        ("backward", "all_gather"): 4,
        ("backward", "reduce_scatter"): 2,
    }
    assert all(model.is_sequence_split[:-1])


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("tp", DEGREES)
def test_columns_then_rows_heads_and_vocabulary(gpt3: Graph, tp: int, mode: str) -> None:
    layouts = sharded(gpt3, tp, mode).parameters
    root = "language_model.encoder.layers.95"
    dims = {name: [split.dim for split in layout.splits] for name, layout in layouts.items()}
    assert dims[f"{root}.self_attention.query_key_value.weight"] == [0]
    assert dims[f"{root}.self_attention.dense.weight"] == [1]
    assert dims[f"{root}.mlp.dense_h_to_4h.weight"] == [0]
    assert dims[f"{root}.mlp.dense_4h_to_h.weight"] == [1]
    assert dims["language_model.embedding.word_embeddings.weight"] == [0]
    assert dims[f"{root}.input_layernorm.weight"] == []


def test_llama_splits_columns_then_rows_and_heads() -> None:
    layouts = sharded(phaze.import_graph("llama2-7b"), 8, "on").parameters
    root = "model.layers.31"
    wanted = {"self_attn.q_proj": 0, "self_attn.k_proj": 0, "self_attn.v_proj": 0, "self_attn.o_proj": 1}
    wanted |= {"mlp.gate_proj": 0, "mlp.up_proj": 0, "mlp.down_proj": 1}
    for name, dim in wanted.items():
        assert [split.dim for split in layouts[f"{root}.{name}.weight"].splits] == [dim]
    assert [split.dim for split in layouts["lm_head.weight"].splits] == [0]


def test_shared_keys_stay_with_their_queries() -> None:
    model = sharded(phaze.import_graph("llama3-70b", sequence_length=1024), 8, "off")
    local = slice_layer(model.layers[1])
    (scores,) = [op for op in local.ops if op.id.endswith(".scores") and op.phase is Phase.FORWARD]
    assert (scores.rule.size("g"), scores.rule.size("r")) == (1, 8)


@pytest.mark.parametrize("mode", ["off", "on"])
def test_fewer_key_heads_than_devices_are_sliced(mode: str) -> None:
    """Devices that share a key head each add up a part of its gradient, which is placed before it is reduced."""
    graph = phaze.import_graph("llama3-8b", sequence_length=1024)
    options = ShardOptions(sequence_parallel=SequenceParallel(mode))
    local = slice_layer(shard_model(graph, Axis(parse_cluster("a100-80gb:16"), 16), options).layers[1])
    (scores,) = [op for op in local.ops if op.id.endswith(".scores") and op.phase is Phase.FORWARD]
    assert (scores.rule.size("g"), scores.rule.size("r")) == (1, 2)
    assert any(op.function == "place" for op in local.ops)


def test_experts_are_split_or_their_hidden_size_whichever_is_cheaper() -> None:
    graph = phaze.import_graph("mixtral-8x7b", sequence_length=1024)
    best = sharded(graph, 8, "off")
    by_expert = sharded(graph, 8, "off", LayoutConstraint("*.experts.*_proj", 0))
    by_hidden = sharded(
        graph, 8, "off", LayoutConstraint("*.experts.gate_up_proj", 1), LayoutConstraint("*.experts.down_proj", 2)
    )
    assert best.layers[1].seconds <= min(by_expert.layers[1].seconds, by_hidden.layers[1].seconds) * (1 + 1e-9)


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("tp", DEGREES)
def test_kept_bytes_of_a_gpt_layer_are_korthikanti_et_al_s(gpt3: Graph, tp: int, mode: str) -> None:
    """arXiv:2205.05198, table 2: s b h (10 + 24/t + 5 a s/(h t)); all of it over t with sequence parallelism."""
    length, hidden, heads = 2048, 12288, 96
    unit, square = length * hidden, 5 * heads * length**2
    local = slice_layer(sharded(gpt3, tp, mode, *(MEGATRON if mode == "off" else ())).layers[1])
    linear = 10 * unit + 24 * unit // tp if mode == "off" else 34 * unit // tp
    layer = single_layer(local)
    assert kept_bytes(local, layer, RecomputeMode.NONE) == linear + square // tp
    assert kept_bytes(local, layer, RecomputeMode.SELECTIVE) == linear
    assert kept_bytes(local, layer, RecomputeMode.FULL) == 2 * unit // (1 if mode == "off" else tp)


@pytest.mark.parametrize("tp", DEGREES)
def test_matmul_weights_and_flops_are_divided_among_devices(gpt3: Graph, tp: int) -> None:
    model = sharded(gpt3, tp, "on")
    for whole, layer in zip(gpt3.distinct_layers, (model.layers[0], model.layers[1], model.layers[-1]), strict=True):
        local = slice_layer(layer)
        for phase, ops in ((Phase.FORWARD, whole.forward), (Phase.BACKWARD, whole.backward)):
            assert tp * local.matmul_flops(phase) == sum(op.matmul_flops for op in ops)
        for parameter in local.parameters:
            if len(parameter.shape) == 2 and "position" not in parameter.id:
                assert tp * parameter.elements == gpt3.tensors[parameter.id].elements


def test_an_uneven_vocabulary_costs_more_than_its_share() -> None:
    graph = phaze.import_graph("gpt2")
    local = slice_layer(sharded(graph, 4, "off").layers[-1])
    whole = sum(op.matmul_flops for op in graph.layers[-1].forward)
    assert whole < 4 * local.matmul_flops("forward") < whole * 1.001
    assert local.tensors["transformer.wte.weight"].shape == (12565, 768)


def test_tied_parameters_have_one_layout_and_t5_branches() -> None:
    model = sharded(phaze.import_graph("t5-large", sequence_length=64), 2, "off")
    assert {layer.parameters["shared.weight"] for layer in model.layers if "shared.weight" in layer.parameters} == {
        model.parameters["shared.weight"]
    }


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("name", ["gpt3-175b", "llama2-7b"])
def test_a_block_reads_as_its_golden_dump(name: str, mode: str) -> None:
    text = format_sharded_layer(sharded(phaze.import_graph(name), 8, mode).layers[1])
    assert text == (GOLDEN / f"sharded_{name}_8_{mode}.txt").read_text()


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b"])
def test_variants_are_what_each_mode_gives_alone(name: str) -> None:
    graph = phaze.import_graph(name, sequence_length=256)
    variants = shard_variants(graph, Axis(A100S, 4), modes=tuple(SequenceParallel))
    assert tuple(variants) == tuple(SequenceParallel)
    for mode, model in variants.items():
        alone = sharded(graph, 4, mode)
        assert model.seconds == alone.seconds
        assert model.parameters == alone.parameters
        assert model.is_sequence_split == alone.is_sequence_split


@pytest.mark.parametrize("name", ["gpt2", "t5-large", "mixtral-8x7b"])
def test_without_split_sequences_a_layer_is_what_it_is_among_whole_splits_alone(name: str) -> None:
    """Tables hold splits of sequences, too, which are forbidden by their price; shard_layer lists none of them."""
    variants = shard_variants(phaze.import_graph(name), Axis(A100S, 2), modes=tuple(SequenceParallel))
    model = variants[SequenceParallel.OFF]
    for answer in {id(layer): layer for layer in model.layers}.values():
        assert not answer.problem.may_split_sequence
        assert shard_layer(answer.problem).seconds == pytest.approx(answer.seconds, rel=1e-9)


def test_a_variant_that_constraints_forbid_is_left_out() -> None:
    """What is pinned along the sequence cannot be had where nothing is split along it."""
    graph = phaze.import_graph("gpt2", sequence_length=64)
    pinned = ShardOptions(constraints=(LayoutConstraint(graph.layers[1].outputs[0], 1),))
    assert [*shard_variants(graph, Axis(A100S, 2), pinned)] == [SequenceParallel.ON]
    with pytest.raises(ShardError, match="25 heads"):
        shard_variants(phaze.import_graph("gpt2-xl"), Axis(A100S, 4))


def test_heads_that_do_not_divide_are_refused_by_op_factor_and_size() -> None:
    message = r"op 'transformer.h.0.attn.scores': its 25 heads \(factor h=25\) cannot be split 4 ways evenly"
    with pytest.raises(ShardError, match=message):
        sharded(phaze.import_graph("gpt2-xl"), 4, "off")


def test_a_parameter_too_small_to_split_is_refused_by_op() -> None:
    graph = phaze.import_graph(
        {"model_type": "gpt2", "n_layer": 1, "n_embd": 4, "n_head": 4, "n_positions": 8, "vocab_size": 3}
    )
    with pytest.raises(
        ShardError, match=r"op 'transformer.wte': none of its factors \(v=3, i=4, s=8\) can be split 8 ways"
    ):
        sharded(graph, 8, "off")


def test_a_layer_that_shares_very_many_parameters_is_refused_by_name() -> None:
    builder = GraphBuilder("shared")
    x = builder.argument("x", (4, 8), Role.BATCH)
    product = Rule.parse("b i, i o -> b o | b=4* i=8 o=8")
    weights = [builder.parameter(f"w{index}", 8, 8) for index in range(14)]
    for index, weight in enumerate(weights):
        (x,) = builder.add(f"op{index}", OpKind.CONTRACTION, "dot", product, (x, weight), module=f"b.{index}")
    for index, weight in enumerate(weights):
        (x,) = builder.add(f"again{index}", OpKind.CONTRACTION, "dot", product, (x, weight), module="last")
    graph = builder.build((x,))
    assert len(graph.layer_graph.tied_parameters) == len(weights)
    with pytest.raises(ShardError, match=r"layer 'last' shares 14 parameters with other layers .* use tp=1"):
        sharded(graph, 2, "off")


def test_a_factor_that_cannot_be_split_leaves_this_tp_out_by_the_name_of_its_layer() -> None:
    graph = phaze.import_graph("gpt2", sequence_length=64).with_backward()
    ops = [
        replace(op, rule=Rule.parse(str(op.rule).replace("f=3072", "f=3072!")))
        if op.id == "transformer.h.0.mlp.c_fc.bias_add.gradient"
        else op
        for op in graph.ops
    ]
    with pytest.raises(ShardError, match=r"layer 'transformer\.h\.0', factor .* must stay whole"):
        sharded(replace(graph, ops=tuple(ops)), 2, "off")


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ([LayoutConstraint("*.nothing", 0)], r"pin '\*.nothing' split along dim 0 matches no parameter or tensor"),
        (
            [LayoutConstraint("*.c_fc.weight", 0), LayoutConstraint("*.mlp.c_fc.*", 1)],
            r"contradict each other on 'transformer.h.0.mlp.c_fc.weight': pin '\*.c_fc.weight' .*, and pin",
        ),
        (
            [LayoutConstraint("*.c_fc.weight", 0), LayoutConstraint("*.c_fc.weight", 0, is_forbidden=True)],
            "contradict each other on",
        ),
        ([LayoutConstraint("*.c_fc.weight", None)], "no sharding 2 ways under these constraints"),
    ],
)
def test_impossible_constraints_are_named(constraints: list[LayoutConstraint], message: str) -> None:
    with pytest.raises(ShardError, match=message):
        sharded(phaze.import_graph("gpt2", sequence_length=64), 2, "off", *constraints)


def test_a_forbidden_layout_is_avoided() -> None:
    graph = phaze.import_graph("gpt2", sequence_length=64)
    name = "transformer.h.3.mlp.c_fc.weight"
    usual = sharded(graph, 2, "off").parameters[name]
    other = sharded(graph, 2, "off", LayoutConstraint("*.c_fc.weight", usual.splits[0].dim, is_forbidden=True))
    assert other.parameters[name].splits[0].dim != usual.splits[0].dim
    assert other.seconds >= sharded(graph, 2, "off").seconds


def test_fused_columns_are_split_in_one_block_where_strides_are_not_allowed() -> None:
    graph = phaze.import_graph("gpt2", sequence_length=64)
    options = ShardOptions(sequence_parallel=SequenceParallel.OFF)
    strided = shard_model(graph, Axis(A100S, 2), options).parameters["transformer.h.0.attn.c_attn.weight"]
    plain = shard_model(graph, Axis(A100S, 2), replace(options, may_stride_parameters=False))
    assert strided.is_strided
    assert not any(layout.is_strided for layout in plain.parameters.values())


@dataclass(frozen=True)
class CountingSolver:
    """HiGHS under another name that remembers the problems that it was given, as a plugin's solver would get them."""

    solved: list[str]
    name: str = "counting"

    def is_importable(self) -> bool:
        return True

    def refusal(self, problem: LinearProblem) -> str | None:
        return None

    def solve(self, problem: LinearProblem, limits: WorkLimits) -> LinearResult:
        self.solved.append(problem.name)
        return AUTOMATIC_SOLVERS.solvers[0].solve(problem, limits)


def test_the_solver_that_is_named_solves_every_layer_and_their_boundaries() -> None:
    graph, solved = phaze.import_graph("gpt2"), list[str]()
    options = ShardOptions(sequence_parallel=SequenceParallel.OFF, solver=SolverChain((CountingSolver(solved),)))
    model = shard_model(graph, Axis(A100S, 2), options)
    layers = [name for name in solved if name.startswith("tensor parallelism of ")]
    assert len(layers) >= len(graph.distinct_layers)
    assert solved[-1] == "boundary layouts"
    assert model.seconds == sharded(graph, 2, "off").seconds
