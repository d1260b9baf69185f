"""Megatron's patterns are found on models captured from torch, too."""

from dataclasses import replace

import pytest
import torch_models
from sharding import A100S

import phaze
from phaze.ir import OpKind
from phaze.ir.backward import derive_backward
from phaze.shard import Axis, ShardedModel, shard_model
from phaze.shard.layout import head_factors


@pytest.fixture(scope="module")
def t5() -> ShardedModel:
    family = torch_models.FAMILIES["t5"]
    family = replace(family, fields={**family.fields, "num_layers": 1})  # one block of each kind shows it
    graph = phaze.import_graph(family.build(), family.inputs())
    return shard_model(derive_backward(graph), Axis(A100S, 2))


def test_a_t5_captured_from_torch_is_tensor_parallel(t5: ShardedModel) -> None:
    matrices = {name: layout for name, layout in t5.parameters.items() if len(t5.graph.tensors[name].shape) == 2}
    assert len(matrices) == (4 + 2) + (8 + 2) + 2 + 1
    assert {layout.ways for layout in matrices.values()} == {2}


def test_the_attention_of_a_captured_t5_is_split_by_heads(t5: ShardedModel) -> None:
    products = [
        (op, layer.splits[op.id])
        for layer in t5.layers
        for op in (*layer.problem.layer.forward, *layer.problem.layer.backward)
        if op.kind is OpKind.CONTRACTION and head_factors(t5.graph, op)
    ]
    assert len(products) == (1 + 2) * 2 * 3
    for op, split in products:
        assert split.ways == tuple((name, 2) for name in head_factors(t5.graph, op))
