"""Tensor parallelism: which factor of which op is split, by an integer program over factor rules."""

from phaze.shard.layer_combinations import SequenceParallel, sequence_lengths
from phaze.shard.layer_sharding import ShardedLayer, shard_layer, unsharded
from phaze.shard.layout import PARTIAL, WHOLE, Layout, LayoutConstraint, OpSplit, Split
from phaze.shard.mesh_axes import Axis
from phaze.shard.model_sharding import (
    ShardedModel,
    ShardingTables,
    ShardOptions,
    least_model_seconds,
    shard_model,
    shard_variants,
)
from phaze.shard.sharding_problem import ShardingProblem
from phaze.shard.sliced_layer import slice_layer

__all__ = [
    "PARTIAL",
    "WHOLE",
    "Axis",
    "Layout",
    "LayoutConstraint",
    "OpSplit",
    "SequenceParallel",
    "ShardOptions",
    "ShardedLayer",
    "ShardedModel",
    "ShardingProblem",
    "ShardingTables",
    "Split",
    "least_model_seconds",
    "sequence_lengths",
    "shard_layer",
    "shard_model",
    "shard_variants",
    "slice_layer",
    "unsharded",
]
