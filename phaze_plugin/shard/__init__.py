"""Tensor parallelism: which factor of which op is split, by an integer program over factor rules."""

from phaze.shard.constraints import LayoutConstraint
from phaze.shard.layout import PARTIAL, WHOLE, Layout, Split
from phaze.shard.moves import Axis
from phaze.shard.program import shard_layer
from phaze.shard.strategies import Strategy
from phaze.shard.task import LayerTask, ShardedLayer

__all__ = [
    "PARTIAL",
    "WHOLE",
    "Axis",
    "LayerTask",
    "Layout",
    "LayoutConstraint",
    "ShardedLayer",
    "Split",
    "Strategy",
    "shard_layer",
]
