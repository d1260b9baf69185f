"""The intermediate representation: ops as factor rules, graphs, layers, backward by rule."""

from phaze.ir.coverage import Coverage, UnknownOp, op_bytes
from phaze.ir.graph import Graph
from phaze.ir.graph_builder import GraphBuilder
from phaze.ir.kept_activations import (
    SEARCHED_MODES,
    RecomputeMode,
    kept_tensors,
    recomputed_ops,
    stashed_bytes,
    stashed_tensors,
)
from phaze.ir.layers import Boundary, Layer, LayerGraph
from phaze.ir.op import Attribute, Gemm, Op, OpKind, Phase
from phaze.ir.rule import Dim, Dims, Factor, FactorKind, Rule
from phaze.ir.tensor import DType, Role, Tensor

__all__ = [
    "SEARCHED_MODES",
    "Attribute",
    "Boundary",
    "Coverage",
    "DType",
    "Dim",
    "Dims",
    "Factor",
    "FactorKind",
    "Gemm",
    "Graph",
    "GraphBuilder",
    "Layer",
    "LayerGraph",
    "Op",
    "OpKind",
    "Phase",
    "RecomputeMode",
    "Role",
    "Rule",
    "Tensor",
    "UnknownOp",
    "kept_tensors",
    "op_bytes",
    "recomputed_ops",
    "stashed_bytes",
    "stashed_tensors",
]
