"""Sequence factors are those that grow with the length of the token inputs, and no others."""

from dataclasses import replace
from itertools import product

import pytest
from graphs import MORE_TINY_CONFIGS, TINY_CONFIGS

from phaze.frontends.transformer_config import graph_from_config
from phaze.ir import DType, Graph, GraphBuilder, OpKind, Role, Rule
from phaze.ir.factor_following import mark_sequences, marks_sequence, token_lengths
from phaze.ir.graph_json import graph_from_json, graph_to_json

FAMILIES = {**TINY_CONFIGS, **MORE_TINY_CONFIGS}
FIXED_LENGTHS = {"vit", "whisper"}


def at_length(family: str, length: int) -> Graph:
    config = {**FAMILIES[family], "max_position_embeddings": 32, "n_positions": 32, "seq_length": length}
    return mark_sequences(graph_from_config(config, name=family, sequence_length=length))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in FIXED_LENGTHS and "mamba" not in name])
def test_marked_factors_are_those_that_grow_with_the_length(family: str) -> None:
    short, long = at_length(family, 8), at_length(family, 16)
    assert marks_sequence(short)
    for before, after in zip(short.ops, long.ops, strict=True):
        for small, large in zip(before.rule.factors, after.rule.factors, strict=True):
            assert (small.name, small.is_sequence) == (large.name, large.is_sequence)
            assert (large.size > small.size) is small.is_sequence, f"{before.id}: {small}"


@pytest.mark.parametrize("family", ["llama", "mixtral", "t5"])
def test_marks_survive_json_backward_and_other_microbatch_sizes(family: str) -> None:
    graph = at_length(family, 8)
    assert graph_from_json(graph_to_json(graph)) == graph
    marked = {op.id: [factor.is_sequence for factor in op.rule.factors] for op in graph.ops}
    rescaled = graph.with_micro_batch(3)
    assert marked == {op.id: [factor.is_sequence for factor in op.rule.factors] for op in rescaled.ops}
    assert mark_sequences(graph) is graph


def test_lengths_are_those_of_each_token_input() -> None:
    assert token_lengths(at_length("t5", 8)) == dict.fromkeys(("input_ids", "decoder_input_ids", "labels"), 8)


def test_tokens_that_are_only_moved_do_not_shorten_the_sequence() -> None:
    builder = GraphBuilder("shifted", micro_batch_size=2)
    labels = builder.argument("labels", (2, 8), Role.BATCH)
    builder.tensors[labels] = replace(builder.tensors[labels], dtype=DType("int64"))
    table = builder.argument("table", (5, 4), Role.PARAMETER)
    cut = Rule.parse("b s@8 -> b s | b=2* s=7^")
    builder.add("cut", OpKind.VIEW, "slice", cut, (labels,))
    looked_up = Rule.parse("b s, v d -> b s d | b=2* s=8^ v=5? d=4")
    (rows,) = builder.add("rows", OpKind.LOOKUP, "embedding", looked_up, (labels, table))
    assert token_lengths(builder.build((rows,))) == {"labels": 8}


def test_images_have_no_sequence() -> None:
    graph = mark_sequences(graph_from_config(FAMILIES["vit"], name="vit"))
    assert not marks_sequence(graph)
    assert token_lengths(graph) == {}


def test_text_of_rules_with_every_mark_is_read_back() -> None:
    for kind, batch, sequence in product(("", "?", "~", "!"), ("", "*"), ("", "^")):
        text = f"a b -> a b | a=2{kind}{batch}{sequence} b=3"
        assert str(Rule.parse(text)) == text


def test_dimension_1_is_a_sequence_only_behind_the_batch() -> None:
    builder = GraphBuilder("counts", micro_batch_size=2)
    counts = builder.argument("counts", (3, 4), Role.BATCH)
    ids = builder.tensors[counts]
    builder.tensors[counts] = type(ids)(ids.id, ids.shape, type(ids.dtype)("int64"), ids.role)
    rule = Rule.parse("m b -> m b | m=3 b=4*")
    (copied,) = builder.add("copied", OpKind.ELEMENTWISE, "negative", rule, (counts,))
    assert not marks_sequence(mark_sequences(builder.build((copied,))))
