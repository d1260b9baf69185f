"""The intermediate representation: ops as factor rules, graphs, layers, backward by rule."""

from phaze.ir.graph import Coverage, DType, Graph, Role, Tensor, UnknownOp, op_bytes
from phaze.ir.graph_builder import GraphBuilder
from phaze.ir.kept_activations import (
    BUDGET_MODES,
    SEARCHED_MODES,
    Recomputation,
    RecomputeMode,
    kept_tensors,
    recomputation,
    recomputed_ops,
    stashed_bytes,
    stashed_tensors,
)
from phaze.ir.layers import Boundary, Layer, LayerGraph
from phaze.ir.op import Attribute, Gemm, Op, OpKind, Phase
from phaze.ir.rule import Dim, Dims, Factor, FactorKind, Rule

__all__ = [
    "BUDGET_MODES",
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
    "Recomputation",
    "RecomputeMode",
    "Role",
    "Rule",
    "Tensor",
    "UnknownOp",
    "kept_tensors",
    "op_bytes",
    "recomputation",
    "recomputed_ops",
    "stashed_bytes",
    "stashed_tensors",
]
