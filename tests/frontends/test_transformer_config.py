"""Configs into graphs: parameters and flops against published figures, and refusals that name the field."""

import json
from pathlib import Path
from typing import Any

import pytest
from graphs import TINY_CONFIGS, tiny_graph

import phaze
from phaze.errors import FormatError, ImportModelError, PhazeError, UnknownNameError
from phaze.frontends.families import FAMILIES
from phaze.frontends.named_models import NAMED_CONFIGS
from phaze.frontends.transformer_config import graph_from_config
from phaze.ir import Graph, OpKind

PARAMETERS = {
    "bert-large": 335_141_888,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama3-70b": 70_553_706_496,
    "llama3-8b": 8_030_261_248,
    "llama3.1-405b": 405_853_388_800,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x22b": 140_620_634_112,
    "mixtral-8x7b": 46_702_792_704,
    "opt-1.3b": 1_315_758_080,
    "opt-350m": 331_196_416,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "t5-large": 737_668_096,
}
GPTS = {
    "gpt2": (12, 768, 50257, 1024),
    "gpt2-xl": (48, 1600, 50257, 1024),
    "gpt3-175b": (96, 12288, 51200, 2048),
    "megatron-gpt2-54": (54, 1920, 50304, 1024),
    "megatron-gpt2-72": (72, 3072, 50304, 1024),
    "megatron-gpt2-xl": (40, 1536, 50304, 1024),
}
LAYERS = {"llama3-70b": 82, "t5-large": 52, "mixtral-8x7b": 34, "bert-large": 26, "opt-350m": 26, "gpt3-175b": 98}

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")


def shallow_graph(name: str) -> Graph:
    """A built-in model with four of its layers: what holds for a few equal blocks holds for all of them."""
    config = {key: min(4, value) if key in LAYER_COUNTS else value for key, value in NAMED_CONFIGS[name].items()}
    return graph_from_config(config, name=name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_counted_to_the_unit(name: str) -> None:
    assert phaze.import_graph(name).parameter_count == PARAMETERS[name]


def test_gpt3_has_174_6_billion_parameters() -> None:
    assert phaze.import_graph("gpt3-175b").parameter_count == pytest.approx(174.6e9, rel=0.005)


@pytest.mark.parametrize("name", GPTS)
@pytest.mark.parametrize("batch", [1, 4])
def test_forward_matmul_flops_of_a_gpt_follow_the_closed_form(name: str, batch: int) -> None:
    layers, hidden, vocabulary, length = GPTS[name]
    graph = phaze.import_graph(name).with_micro_batch(batch)
    tokens = batch * length
    expected = layers * (24 * tokens * hidden**2 + 4 * tokens * length * hidden) + 2 * tokens * hidden * vocabulary
    assert graph.matmul_flops("forward") == expected


@pytest.mark.parametrize("name", NAMED_CONFIGS)
def test_backward_matmul_flops_are_exactly_twice_the_forward_ones(name: str) -> None:
    graph = shallow_graph(name)
    assert graph.matmul_flops("backward") == 2 * graph.matmul_flops("forward")


@pytest.mark.parametrize("name", NAMED_CONFIGS)
def test_every_op_of_a_built_in_model_has_a_rule(name: str) -> None:
    coverage = shallow_graph(name).coverage()
    assert coverage.flops_share == coverage.bytes_share == 1.0
    assert coverage.unknown == ()


@pytest.mark.parametrize("name", LAYERS)
def test_built_in_models_have_their_blocks_and_the_ends_as_layers(name: str) -> None:
    assert len(phaze.import_graph(name).layers) == LAYERS[name]


@pytest.mark.parametrize("name", [name for name in NAMED_CONFIGS if name != "t5-large"])
def test_blocks_of_a_single_stack_are_one_distinct_layer(name: str) -> None:
    assert len(shallow_graph(name).distinct_layers) == 3


def test_mixtral_computes_only_the_chosen_experts() -> None:
    graph = phaze.import_graph("mixtral-8x7b", sequence_length=1024)
    experts = sum(op.matmul_flops for op in graph.layers[1].forward if ".experts." in op.id)
    assert experts == 2 * 1024 * 2 * (4096 * 14336) * 3


def test_keys_are_shared_between_query_heads_in_llama3() -> None:
    graph = phaze.import_graph("llama3-8b", sequence_length=64)
    (scores,) = [op for op in graph.layers[1].forward if op.id.endswith(".scores")]
    assert str(scores.rule) == "b s g r d, b t g d -> b g r s t | b=1* s=64 g=8 r=4 d=128 t=64"


def test_a_sequence_length_overrides_the_model_s_own() -> None:
    assert phaze.import_graph("llama2-7b", sequence_length=128).tensors["input_ids"].shape == (1, 128)


def test_every_family_is_built_in_tests() -> None:
    assert {config["model_type"] for config in TINY_CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("where", ["dict", "file", "folder", "object"])
def test_a_config_is_taken_in_every_form(where: str, tmp_path: Path) -> None:
    config = {**TINY_CONFIGS["llama"], "max_position_embeddings": 8, "an_unknown_field": [1, 2]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))

    class Config:
        model_type = "llama"

        def to_dict(self) -> dict[str, Any]:
            return config

    models: dict[str, object] = {"dict": config, "file": str(path), "folder": tmp_path, "object": Config()}
    graph = phaze.import_graph(models[where], micro_batch_size=2)
    assert graph.ops == tiny_graph("llama").ops


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": None}, "the gpt2 config lacks n_embd or hidden_size"),
        ({"n_layer": None}, "the gpt2 config lacks n_layer or num_hidden_layers"),
        ({"n_embd": 0}, "n_embd is 0; expected a positive integer"),
        ({"n_embd": -12}, "n_embd is -12; expected a positive integer"),
        ({"n_embd": 2**62}, "n_embd is 4611686018427387904; expected a positive integer"),
        ({"n_embd": float("nan")}, "n_embd is nan; expected a positive integer"),
        ({"n_embd": "12"}, "n_embd is '12'; expected a positive integer"),
        ({"n_head": 5}, "hidden size 12 is not a multiple of 5 attention heads"),
        ({"attn_pdrop": 1.5}, "attn_pdrop is 1.5; expected a number of at least 0 and below 1"),
        ({"activation_function": "swoosh"}, "activation_function is 'swoosh'; expected one of gelu"),
        ({"n_layer": 10**9}, "n_layer or num_hidden_layers is 1000000000; at most 10000"),
        ({"n_embd": 10**5000}, "n_embd is a int of thousands of digits"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportModelError, match=message):
        graph_from_config({**TINY_CONFIGS["gpt2"], **changes}, name="bad")


def test_longer_sequences_than_learned_positions_are_refused() -> None:
    with pytest.raises(ImportModelError, match="has 1024 learned positions, fewer than the sequence length 4096"):
        phaze.import_graph("gpt2", sequence_length=4096)


def test_an_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown model_type 'gpt5'.*Did you mean gpt2"):
        phaze.import_graph({"model_type": "gpt5"})


def test_a_head_size_of_its_own_need_not_divide_the_hidden_size() -> None:
    config = {**TINY_CONFIGS["llama"], "hidden_size": 66, "head_dim": 16}
    graph = graph_from_config(config, name="llama", sequence_length=8)
    assert graph.tensors["model.layers.0.self_attn.q_proj.weight"].shape == (64, 66)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 4 experts"),
        ("llama", {"head_dim": 15}, "heads of size 15 are not possible"),
    ],
)
def test_impossible_combinations_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportModelError, match=message):
        graph_from_config({**TINY_CONFIGS[family], **changes}, name="bad", sequence_length=8)


def test_a_config_without_a_length_asks_for_one() -> None:
    with pytest.raises(ImportModelError, match="the t5 config names no sequence length; pass sequence_length"):
        phaze.import_graph({key: value for key, value in TINY_CONFIGS["t5"].items() if key != "n_positions"})


def test_a_model_name_longer_than_file_names_may_be_is_unknown() -> None:
    with pytest.raises(UnknownNameError, match="unknown model"):
        phaze.import_graph("x" * 5000)


def test_heads_that_cannot_share_keys_are_refused() -> None:
    with pytest.raises(ImportModelError, match="4 attention heads cannot share 3 key/value heads"):
        graph_from_config({**TINY_CONFIGS["llama"], "num_key_value_heads": 3}, name="bad", sequence_length=8)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000])
def test_a_file_that_is_no_config_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"config\.json"):
        phaze.import_graph(path)


def test_a_config_without_a_family_says_so(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    with pytest.raises(ImportModelError, match="the config has no model_type; expected one of bert"):
        phaze.import_graph(path)


@pytest.mark.parametrize("option", ["sequence_length", "micro_batch_size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "8"])
def test_impossible_options_are_refused(option: str, value: object) -> None:
    with pytest.raises((PhazeError, ValueError), match=f"{option} is {value!r}"):
        phaze.import_graph(TINY_CONFIGS["llama"], **{option: value})


def test_parameters_have_the_names_and_shapes_of_the_reference_implementation() -> None:
    tensors = phaze.import_graph("gpt2-xl").tensors
    assert tensors["transformer.h.47.attn.c_attn.weight"].shape == (1600, 4800)
    assert phaze.import_graph("mixtral-8x7b").tensors["model.layers.0.mlp.experts.gate_up_proj"].shape == (
        8,
        28672,
        4096,
    )


def test_dropout_has_a_mask_of_one_byte_an_element() -> None:
    graph = tiny_graph("gpt2")
    masks = [graph.tensors[op.outputs[1]] for op in graph.ops if op.kind is OpKind.DROPOUT and op.function == "dropout"]
    assert masks
    assert all(mask.dtype.size_bytes == 1 for mask in masks)
