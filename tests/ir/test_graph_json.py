"""Saved graphs: exact round trips, and readable refusals of everything else."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from graphs import TINY_CONFIGS, graphs, rules, tiny_graph
from hypothesis import given
from hypothesis import strategies as st
from sharding import whole_problem

from phaze.errors import FormatError, GraphError, PhazeError
from phaze.ir import DType, Graph, Op, OpKind, Role, Rule, Tensor, stashed_bytes
from phaze.ir.graph_json import graph_content_json, graph_from_json, graph_to_json, read_graph
from phaze.ir.rule import names_of
from phaze.shard import shard_layer, slice_layer


@given(graphs())
def test_a_random_graph_comes_back_bit_for_bit(graph: Graph) -> None:
    text = graph_to_json(graph)
    assert graph_from_json(text) == graph
    assert graph_to_json(graph_from_json(text)) == text


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_every_family_comes_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    graph = tiny_graph(family)
    graph.save(tmp_path / "graph.json")
    loaded = read_graph(tmp_path / "graph.json")
    assert loaded == graph
    assert loaded.layers == graph.layers
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "graph.json").read_bytes()


def test_how_a_backward_was_obtained_comes_back_and_is_no_content() -> None:
    derived = tiny_graph("gpt2")
    kept = replace(derived, is_backward_derived=False, why_backward_kept="no loss")
    assert derived.is_backward_derived
    assert [graph_from_json(graph_to_json(graph)) for graph in (derived, kept)] == [derived, kept]
    assert graph_content_json(derived) == graph_content_json(kept)
    assert "is_backward_derived" not in graph_content_json(derived)


def test_a_graph_saved_without_facts_on_its_backward_is_read() -> None:
    whole = document()
    del whole["is_backward_derived"]
    assert graph_from_json(json.dumps(whole)) == replace(tiny_graph("gpt2"), is_backward_derived=False)


def test_the_bytes_of_a_sliced_layer_s_collectives_come_back() -> None:
    local = slice_layer(shard_layer(whole_problem(tiny_graph("gpt2"), 3)))
    sizes = [op.collective_bytes for op in local.ops if op.kind is OpKind.COLLECTIVE]
    assert sizes
    assert min(sizes) > 0
    assert graph_from_json(graph_to_json(local)) == local


def test_only_collectives_have_collective_bytes() -> None:
    op = tiny_graph("gpt2").ops[0]
    with pytest.raises(GraphError, match="has 8 collective bytes but is of kind lookup"):
        replace(op, collective_bytes=8)


def test_saving_leaves_nothing_but_the_file(tmp_path: Path) -> None:
    tiny_graph("gpt2").save(tmp_path / "graph.json")
    assert [path.name for path in tmp_path.iterdir()] == ["graph.json"]


def test_saving_into_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"cannot write .*: No such file or directory"):
        tiny_graph("gpt2").save(tmp_path / "missing" / "graph.json")


def document() -> dict[str, Any]:
    return dict(json.loads(graph_to_json(tiny_graph("gpt2"))))


def damaged(**changes: object) -> str:
    return json.dumps({**document(), **changes})


def damaged_entry(part: str, **changes: object) -> str:
    whole = document()
    whole[part][0].update(changes)
    return json.dumps(whole)


def without(field: str) -> str:
    return json.dumps({name: value for name, value in document().items() if name != field})


REFUSED: dict[str, tuple[str, str]] = {
    "nothing": ("", "not valid JSON"),
    "truncated": (graph_to_json(tiny_graph("gpt2"))[:1000], "not valid JSON"),
    "nested deeply": ("[" * 200_000, "not valid JSON|nested too deeply"),
    "nested deeply and closed": ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    "a list": ("[]", "not a saved graph"),
    "a config": ('{"model_type": "gpt2"}', "not a saved graph"),
    "another version": (damaged(version=99), "schema version 99; this Phaze reads version 1"),
    "no version": (without("version"), "schema version None"),
    "no ops": (without("ops"), "the graph lacks 'ops'"),
    "ops as text": (damaged(ops="many"), "ops is 'many'; expected a list"),
    "an op as a number": (damaged(ops=[3]), r"ops\[0\] is 3; expected an object"),
    "an op without id": (damaged_entry("ops", id=None), r"ops\[0\].id is None; expected text"),
    "an unknown kind": (damaged_entry("ops", kind="magic"), r"ops\[0\].kind is 'magic'; expected one of contraction"),
    "an unknown phase": (damaged_entry("ops", phase=3), r"ops\[0\].phase is 3; expected one of forward"),
    "an unknown rule": (damaged_entry("ops", rule=10**6), r"ops\[0\].rule is 1000000, but there are"),
    "a rule as truth": (damaged_entry("ops", rule=True), r"ops\[0\].rule is True; expected a whole number"),
    "inputs of numbers": (damaged_entry("ops", inputs=[1]), r"ops\[0\].inputs\[0\] is 1; expected text"),
    "a nested attribute": (damaged_entry("ops", attributes={"a": {}}), r"ops\[0\].attributes.a lacks 'float'"),
    "an unknown type": (damaged_entry("tensors", dtype="quarter"), r"tensors\[0\].dtype is 'quarter'; expected one of"),
    "an unknown role": (damaged_entry("tensors", role="star"), r"tensors\[0\].role is 'star'; expected one of"),
    "a shape as text": (damaged_entry("tensors", shape="2x4"), r"tensors\[0\].shape is '2x4'; expected a list"),
    "a shape of text": (
        damaged_entry("tensors", shape=["2"]),
        r"tensors\[0\].shape\[0\] is '2'; expected a whole number",
    ),
    "a NaN size": (damaged_entry("tensors", shape=[float("nan")]), "NaN is no number of JSON"),
    "an absurd size": (damaged_entry("tensors", shape=[2**62]), "has a dimension of 4611686018427387904"),
    "a negative size": (damaged_entry("tensors", shape=[-1]), "has a dimension of -1"),
    "a malformed rule": (damaged(rules=["b s"]), r"rules\[0\]: rule 'b s' has no '->'"),
    "a lone gradient": (damaged(gradients=[["a"]]), r"gradients\[0\] has 1 items; expected 2"),
    "a tensor twice": (damaged(tensors=document()["tensors"] * 2), "two tensors have the id"),
    "a microbatch of text": (damaged(micro_batch_size="2"), "micro_batch_size is '2'; expected a whole number"),
    "an unknown field": (damaged(zzz=1), "the graph has an unknown field 'zzz'"),
    "an unknown field of an op": (damaged_entry("ops", zzz=1), r"ops\[0\] has an unknown field 'zzz'"),
    "another microbatch": (damaged(micro_batch_size=3), "batch factor b=2[*] is not a multiple of the microbatch 3"),
    "half a character": (damaged(name="\ud800"), "name is .*half a character"),
    "a shape of thousands": (damaged_entry("tensors", shape=[2] * 20_000), "has 20000 dimensions"),
    "a huge number": ('{"format": "phaze-graph", "version": 1' + "0" * 5000 + "}", "not valid JSON|schema version"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_saved_graph_is_refused_with_the_field(case: str) -> None:
    text, message = REFUSED[case]
    with pytest.raises((FormatError, GraphError), match=message):
        graph_from_json(text)


@given(st.data())
def test_no_mutation_of_a_saved_graph_escapes_as_anything_but_a_phaze_error(data: st.DataObject) -> None:
    text = graph_to_json(tiny_graph("megatron-gpt"))
    start = data.draw(st.integers(0, len(text)))
    end = min(len(text), start + data.draw(st.integers(0, 40)))
    mutated = text[:start] + data.draw(st.text(max_size=10)) + text[end:]
    with contextlib.suppress(PhazeError):
        graph = graph_from_json(mutated)
        assert graph.layers
        assert graph.coverage().op_count == len(graph.ops)
        assert sum(stashed_bytes(graph, layer) for layer in graph.layers) >= 0
        assert graph_to_json(graph)


@given(rules())
def test_a_random_rule_comes_back_bit_for_bit(rule: Rule) -> None:
    tensors = {
        f"x{i}": Tensor(f"x{i}", rule.shape(dims), DType.FLOAT32, Role.OTHER) for i, dims in enumerate(rule.operands)
    }
    results = {f"y{i}": Tensor(f"y{i}", rule.shape(dims), DType.BOOL) for i, dims in enumerate(rule.results)}
    attributes = (("a", -float("inf")), ("b", (1, 2)), ("c", "text"), ("d", 0.1))
    names = frozenset[str]().union(*(names_of(dims) for dims in rule.tensors()))
    used = Rule(rule.operands, rule.results, tuple(factor for factor in rule.factors if factor.name in names))
    op = Op(
        id="op",
        kind=OpKind.OPAQUE,
        function="f",
        rule=used,
        inputs=tuple(tensors),
        outputs=tuple(results),
        origin="o",
        module="m.0",
        attributes=attributes,
    )
    graph = Graph(name="rule", tensors={**tensors, **results}, ops=(op,), outputs=tuple(results))
    assert graph_from_json(graph_to_json(graph)) == graph


def test_a_saved_graph_is_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    tiny_graph("gpt2").save(path)
    (tmp_path / "plain").write_text("")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_saving_over_a_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"cannot write .*: it is a folder"):
        tiny_graph("gpt2").save(tmp_path)


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text("{}")
    with pytest.raises(FormatError, match=r"graph\.json: JSON, but not a saved graph"):
        read_graph(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="it is no text in UTF-8"):
        read_graph(path)
    with pytest.raises(FormatError, match="cannot read"):
        read_graph(tmp_path / "missing.json")
