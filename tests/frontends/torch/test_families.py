"""Hugging Face models as they come: equal to what torch counts, and to what their configs say."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch_models as models
import transformers

import phaze
from phaze.frontends.named_models import NAMED_CONFIGS
from phaze.ir import Graph, OpKind
from phaze.ir.backward import derive_backward
from phaze.shard.expert_slicing import expert_dims


@dataclass(frozen=True)
class Imported:
    family: models.Family
    model: torch.nn.Module
    graph: Graph


IN_FULL = ("opt", "qwen2_moe", "whisper")
"""Families much like others: a decoder as gpt2's, experts as mixtral's, two stacks as t5's."""
PARAMETERS = [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in IN_FULL)) for name in models.FAMILIES]


@pytest.fixture(scope="module", params=PARAMETERS)
def imported(request: pytest.FixtureRequest) -> Imported:
    family = models.FAMILIES[request.param]
    model = family.build()
    return Imported(family, model, phaze.import_graph(model, family.inputs()))


def test_parameters_are_the_model_s_to_the_unit(imported: Imported) -> None:
    expected = {name: tuple(parameter.shape) for name, parameter in imported.model.named_parameters()}
    assert {tensor.id: tensor.shape for tensor in imported.graph.parameters} == expected


def test_every_trainable_parameter_has_a_gradient(imported: Imported) -> None:
    trainable = {name for name, parameter in imported.model.named_parameters() if parameter.requires_grad}
    assert {parameter for parameter, _ in imported.graph.gradients} == trainable


def test_forward_flops_are_what_torch_counts(imported: Imported) -> None:
    counted = models.counted_flops(imported.model, imported.family.inputs())
    assert imported.graph.matmul_flops("forward") == counted + models.grouped_flops(imported.graph)


def test_everything_is_understood(imported: Imported) -> None:
    assert imported.graph.coverage().unknown == ()


def test_layers_are_the_model_s_blocks_and_equal_blocks_are_one(imported: Imported) -> None:
    stacks = imported.family.blocks
    blocks = [layer for layer in imported.graph.layers if layer.name.startswith(tuple(f"{stack}." for stack in stacks))]
    names = [f"{stack}.{index}" for stack in stacks for index in range(3)]
    blocks = [layer for layer in blocks if layer.name in names]
    assert [layer.name for layer in blocks] == names
    assert len(imported.graph.layers) == len(names) + 2 * len(stacks)
    assert len({layer.key for layer in blocks}) == imported.family.kinds


def test_a_backward_by_rule_has_the_products_and_gradients_of_the_captured_one(imported: Imported) -> None:
    derived = derive_backward(imported.graph)
    assert derived.is_backward_derived
    assert derived.matmul_flops("backward") == imported.graph.matmul_flops("backward")
    assert {name for name, _ in derived.gradients} >= {name for name, _ in imported.graph.gradients}


def test_the_microbatch_can_be_changed(imported: Imported) -> None:
    larger = imported.graph.with_micro_batch(6)
    assert larger.matmul_flops("forward") == 3 * imported.graph.matmul_flops("forward")
    assert larger.matmul_flops("backward") == 3 * imported.graph.matmul_flops("backward")


def test_the_config_of_the_model_gives_the_same_counts(imported: Imported) -> None:
    config = imported.model.config
    length = {} if config.model_type == "vit" else {"sequence_length": models.LENGTH}
    written = phaze.import_graph(config, micro_batch_size=2, **length)
    assert written.parameter_count == imported.graph.parameter_count
    for phase in ("forward", "backward"):
        assert imported.graph.matmul_flops(phase) == pytest.approx(written.matmul_flops(phase), rel=0.005)
    assert len(imported.graph.layers) == len(written.layers)


def test_experts_split_rows_by_expert_so_that_experts_can_be_spread() -> None:
    family = models.FAMILIES["mixtral"]
    model = family.build()
    graph = phaze.import_graph(model, family.inputs())
    assert expert_dims(graph) == {name: 0 for name, _ in model.named_parameters() if ".experts." in name}
    experts = [op for op in graph.layers[1].forward if op.origin == "aten._grouped_mm"]
    assert [str(op.rule).partition("|")[0] for op in experts] == [
        "(d0 b0) d1, d0 d1 (d2 d3) -> (d0 b0) (d2 d3) ",
        "(d0 b0) d1, d0 d1 d2 -> (d0 b0) d2 ",
    ]


def test_experts_in_single_precision_fall_back_to_a_backward_by_rule() -> None:
    family = models.FAMILIES["mixtral"]
    family = replace(family, fields={**family.fields, "num_hidden_layers": 1})
    graph = phaze.import_graph(family.build().to(torch.float32), family.inputs())
    assert {"captured from torch by export", "backward derived by rule"} <= set(graph.notes)
    assert graph.matmul_flops("backward") == 2 * graph.matmul_flops("forward")
    assert graph.coverage().unknown == ()
    assert len(graph.distinct_layers) == 3


def test_without_dropout_attention_is_one_op_with_heads_as_factors() -> None:
    config = transformers.ViTConfig(**models.FAMILIES["vit"].fields)
    model = models.on_meta(lambda: transformers.ViTForImageClassification(config))
    graph = phaze.import_graph(model, models.FAMILIES["vit"].inputs())
    attention = [op for op in graph.ops if op.kind is OpKind.ATTENTION]
    assert len(attention) == 6
    assert str(attention[0].rule).startswith("b0 d0 d1 d2, b0 d0 d3 d2, b0 d0 d3 d4 -> b0 d0 d1 d4, b0 d0 d1 |")


def test_inputs_and_labels_are_found_where_a_model_describes_itself() -> None:
    graph = phaze.import_graph(models.gpt2(n_layer=2), sequence_length=12)
    assert graph.tensors["input_ids"].shape == graph.tensors["labels"].shape == (3, 12)
    assert "inputs were found, not given: input_ids [3, 12], labels [3, 12]" in graph.notes


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gpt2", "GPT2LMHeadModel"),
        ("gpt2-xl", "GPT2LMHeadModel"),
        ("bert-large", "BertModel"),
        ("opt-1.3b", "OPTForCausalLM"),
        ("t5-large", "T5ForConditionalGeneration"),
        ("llama2-7b", "LlamaForCausalLM"),
        ("llama3-8b", "LlamaForCausalLM"),
        ("mixtral-8x7b", "MixtralForCausalLM"),
    ],
)
def test_a_real_model_equals_its_built_in_name(name: str, model: str) -> None:
    fields = {"decoder_start_token_id": 0, "pad_token_id": 0, **NAMED_CONFIGS[name]}
    build = getattr(transformers, model)
    module = models.on_meta(lambda: build(build.config_class(**fields))).to(torch.bfloat16)
    ids = models.ids(1, 512)
    options = {"loss_fn": lambda output: output.pooler_output.mean()} if model == "BertModel" else {}
    inputs = {"input_ids": ids} if options else {"input_ids": ids, "labels": ids}
    graph, written = phaze.import_graph(module, inputs, **options), phaze.import_graph(name, sequence_length=512)
    assert graph.parameter_count == written.parameter_count
    assert graph.matmul_flops("forward") == pytest.approx(written.matmul_flops("forward"), rel=0.005)
    assert len(graph.layers) == len(written.layers)
