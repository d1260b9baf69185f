"""Tensor parallelism: which factor of which op is split, by an integer program over factor rules."""

from phaze.shard.constraints import LayoutConstraint
from phaze.shard.layout import PARTIAL, WHOLE, Layout, Split
from phaze.shard.model import SequenceParallel, ShardedModel, ShardOptions, sequence_lengths, shard_model
from phaze.shard.moves import Axis
from phaze.shard.program import shard_layer
from phaze.shard.slice import slice_layer
from phaze.shard.strategies import Strategy
from phaze.shard.task import LayerTask, ShardedLayer, unsharded

__all__ = [
    "PARTIAL",
    "WHOLE",
    "Axis",
    "LayerTask",
    "Layout",
    "LayoutConstraint",
    "SequenceParallel",
    "ShardOptions",
    "ShardedLayer",
    "ShardedModel",
    "Split",
    "Strategy",
    "sequence_lengths",
    "shard_layer",
    "shard_model",
    "slice_layer",
    "unsharded",
]
