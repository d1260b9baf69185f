"""Configs into graphs: parameters and flops against published figures, and refusals that name the field."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from graphs import MORE_TINY_CONFIGS, TINY_CONFIGS, tiny_graph

import phaze
from phaze.errors import FormatError, ImportModelError, LimitError, PhazeError, UnknownNameError
from phaze.frontends.families import FAMILIES
from phaze.frontends.families.parameter_count import count_parameters
from phaze.frontends.named_models import NAMED_CONFIGS
from phaze.frontends.transformer_config import graph_from_config
from phaze.ir import Graph, OpKind
from phaze.ir.factor_following import mark_sequences

ALL_TINY_CONFIGS = {**TINY_CONFIGS, **MORE_TINY_CONFIGS}
PARAMETERS = {
    "bert-large": 335_141_888,
    "bloom-176b": 176_247_271_424,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "falcon-40b": 41_303_293_952,
    "falcon-7b": 6_921_720_704,
    "gemma2-27b": 27_227_128_320,
    "gemma2-9b": 9_241_705_984,
    "gemma3-1b": 999_885_952,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama2-70b": 68_976_648_192,
    "llama2-7b": 6_738_415_616,
    "llama3-70b": 70_553_706_496,
    "llama3-8b": 8_030_261_248,
    "llama3.1-405b": 405_853_388_800,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mamba-2.8b": 2_768_345_600,
    "mamba2-2.7b": 2_702_599_680,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x22b": 140_620_634_112,
    "mixtral-8x7b": 46_702_792_704,
    "olmo2-7b": 7_298_617_344,
    "opt-1.3b": 1_315_758_080,
    "opt-350m": 331_196_416,
    "phi-2": 2_779_683_840,
    "phi-4": 14_659_507_200,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "kimi-k2": 1_026_408_209_408,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-8b": 8_190_735_360,
    "starcoder2-15b": 15_957_889_024,
    "t5-large": 737_668_096,
    "vit-huge": 632_045_800,
    "vit-large": 304_326_632,
    "whisper-large-v3": 1_543_490_560,
}
ACTIVE = {
    "deepseek-v3": 37.6e9,
    "gpt-oss-120b": 5.7e9,
    "gpt-oss-20b": 4.2e9,
    "kimi-k2": 32.9e9,
    "llama3.1-8b": 8.03e9,
    "llama4-maverick": 17.2e9,
    "mixtral-8x22b": 39.1e9,
    "mixtral-8x7b": 12.9e9,
    "qwen3-235b-a22b": 22.2e9,
    "qwen3-30b-a3b": 3.35e9,
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

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")


def shallow_graph(name: str) -> Graph:
    """A built-in model with four of its layers: what holds for a few equal blocks holds for all of them."""
    config = {key: min(4, value) if key in LAYER_COUNTS else value for key, value in NAMED_CONFIGS[name].items()}
    return graph_from_config(config, name=name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_counted_to_the_unit(name: str) -> None:
    assert count_parameters(NAMED_CONFIGS[name]).total == PARAMETERS[name]


@pytest.mark.parametrize("name", ["gpt2-xl", "llama3.2-1b", "qwen3-30b-a3b", "whisper-small"])
def test_a_built_in_model_s_graph_has_the_counted_parameters(name: str) -> None:
    assert phaze.import_graph(name).parameter_count == count_parameters(NAMED_CONFIGS[name]).total


@pytest.mark.parametrize("family", ALL_TINY_CONFIGS)
def test_parameters_are_counted_as_the_graph_has_them(family: str) -> None:
    config = {"seq_length": 8, **ALL_TINY_CONFIGS[family]}
    assert count_parameters(config).total == tiny_graph(family).parameter_count


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_ones(name: str) -> None:
    assert count_parameters(NAMED_CONFIGS[name]).active == pytest.approx(ACTIVE[name], rel=0.01)


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


# The first convolution's input, an image or a sound, has no gradient.
@pytest.mark.parametrize("family", [name for name in ALL_TINY_CONFIGS if name not in ("vit", "whisper")])
def test_backward_matmul_flops_are_exactly_twice_the_forward_ones(family: str) -> None:
    graph = tiny_graph(family)
    assert graph.matmul_flops("backward") == 2 * graph.matmul_flops("forward")


@pytest.mark.parametrize("family", ALL_TINY_CONFIGS)
def test_every_op_of_every_family_has_a_rule(family: str) -> None:
    coverage = tiny_graph(family).coverage()
    assert coverage.flops_share == coverage.bytes_share == 1.0
    assert coverage.unknown == ()


@pytest.mark.parametrize("name", LAYERS)
def test_built_in_models_have_their_blocks_and_the_ends_as_layers(name: str) -> None:
    assert len(phaze.import_graph(name).layers) == LAYERS[name]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gpt2-xl", 1),
        ("llama3.1-405b", 1),
        ("qwen3-32b", 1),
        ("gemma3-27b", 1),
        ("gemma2-9b", 2),
        ("gpt-oss-120b", 2),
        ("deepseek-v3", 2),
        ("llama4-maverick", 3),
        ("phi-4", 1),
        ("mamba2-2.7b", 1),
        ("vit-huge", 1),
    ],
)
def test_equal_blocks_are_one_distinct_layer_beside_the_ends(name: str, kinds: int) -> None:
    assert len(shallow_graph(name).distinct_layers) == kinds + 2


def test_mixtral_computes_only_the_chosen_experts() -> None:
    graph = phaze.import_graph("mixtral-8x7b", sequence_length=1024)
    experts = sum(op.matmul_flops for op in graph.layers[1].forward if ".experts." in op.id)
    assert experts == 2 * 1024 * 2 * (4096 * 14336) * 3


def test_keys_are_shared_between_query_heads_in_llama3() -> None:
    graph = phaze.import_graph("llama3-8b", sequence_length=64)
    (scores,) = [op for op in graph.layers[1].forward if op.id.endswith(".scores")]
    assert str(scores.rule) == "b s g r d, b t g d -> b g r s t | b=1* s=64^ g=8 r=4 d=128 t=64^"


def test_a_sequence_length_overrides_the_model_s_own() -> None:
    assert phaze.import_graph("llama2-7b", sequence_length=128).tensors["input_ids"].shape == (1, 128)


def test_every_family_is_built_in_tests() -> None:
    assert {config["model_type"] for config in ALL_TINY_CONFIGS.values()} == set(FAMILIES)


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
    assert graph.ops == mark_sequences(tiny_graph("llama")).ops


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


def test_an_unknown_family_lists_the_known_ones_and_another_way() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown model_type 'qwen4'. Did you mean qwen3.*as a torch module"):
        phaze.import_graph({"model_type": "qwen4"})


def test_a_config_with_a_language_model_inside_stands_for_that() -> None:
    config = {"model_type": "gemma3", "text_config": MORE_TINY_CONFIGS["gemma3_text"], "vision_config": {}}
    graph = graph_from_config(config, name="both", sequence_length=8)
    assert graph.parameter_count == tiny_graph("gemma3_text").parameter_count
    assert "only the language model of the gemma3 config, its text_config, is imported" in graph.notes


def test_windows_are_facts_of_the_softmax_and_alternate_as_the_config_says() -> None:
    graph = graph_from_config(ALL_TINY_CONFIGS["gpt_oss"], name="oss", sequence_length=8)
    softmaxes = [op for op in graph.ops if op.function == "sink_softmax"]
    assert [op.attribute("window") for op in softmaxes] == [3, None]
    assert "1 of 2 layers see a window of 3 positions; matmul flops count all of them" in graph.notes


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    config = {**ALL_TINY_CONFIGS["mistral"], "sliding_window": 8}
    graph = graph_from_config(config, name="mistral", sequence_length=8)
    assert all(op.attribute("window") is None for op in graph.ops)


def test_a_latent_of_queries_is_the_reference_s_unless_it_is_null() -> None:
    config = {key: value for key, value in ALL_TINY_CONFIGS["deepseek_v3"].items() if key != "q_lora_rank"}
    graph = graph_from_config(config, name="whole", sequence_length=8)
    assert graph.tensors["model.layers.0.self_attn.q_a_proj.weight"].shape == (1536, 12)
    graph = graph_from_config({**config, "q_lora_rank": None}, name="none", sequence_length=8)
    assert graph.tensors["model.layers.0.self_attn.q_proj.weight"].shape == (18, 12)


def test_the_multi_token_head_adds_a_block_three_norms_and_a_linear_map() -> None:
    config = {**ALL_TINY_CONFIGS["deepseek_v3"], "with_multi_token_heads": True, "num_hidden_layers": 2}
    graph = graph_from_config(config, name="mtp", sequence_length=8)
    plain, hidden = tiny_graph("deepseek_v3"), 12
    block = sum(prod(tensor.shape) for tensor in plain.parameters if tensor.id.startswith("model.layers.1."))
    assert graph.parameter_count - plain.parameter_count == block + 3 * hidden + 2 * hidden**2
    assert graph.matmul_flops("backward") == 2 * graph.matmul_flops("forward")


def test_a_head_size_of_its_own_need_not_divide_the_hidden_size() -> None:
    config = {**TINY_CONFIGS["llama"], "hidden_size": 66, "head_dim": 16}
    graph = graph_from_config(config, name="llama", sequence_length=8)
    assert graph.tensors["model.layers.0.self_attn.q_proj.weight"].shape == (64, 66)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 4 experts"),
        ("deepseek_v3", {"n_group": 3}, "2 of 4 experts cannot be chosen from topk_group=1 of n_group=3 groups"),
        (
            "falcon with groups",
            {"num_kv_heads": 3},
            "4 attention heads cannot share 3 key/value heads",
        ),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ("gemma2", {"layer_types": ["full_attention", "some"]}, "layer_types has 'some'"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1; expected a positive number"),
        ("mamba2", {"chunk_size": 3}, "works in chunks of 3 positions"),
        ("mamba2", {"num_heads": 5}, "num_heads=5 of head_dim=4 are not expand x hidden_size=24 channels"),
        ("qwen2_moe", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'; expected a list of whole numbers"),
        ("vit", {"patch_size": 4}, "image_size=6 is not a multiple of patch_size=4"),
        ("llama", {"head_dim": 15}, "heads of size 15 are not possible"),
    ],
)
def test_impossible_combinations_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    length = None if family == "vit" else 8
    with pytest.raises(ImportModelError, match=message):
        graph_from_config({**ALL_TINY_CONFIGS[family], **changes}, name="bad", sequence_length=length)


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


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [("llama", "num_hidden_layers", 10**9), ("mixtral", "num_local_experts", 10**9), ("llama", "vocab_size", 10**9)],
)
def test_absurd_counts_are_refused_before_work_starts(family: str, field: str, value: int) -> None:
    with pytest.raises(LimitError, match=rf"{field}.* is 1000000000, more than the .*PHAZE_LIMITS="):
        graph_from_config({**TINY_CONFIGS[family], field: value}, name=family, sequence_length=4)
