"""The intermediate representation: ops as factor rules, graphs, layers, backward by rule."""

from phaze.ir.builder import GraphBuilder
from phaze.ir.coverage import Coverage, UnknownOp, op_bytes
from phaze.ir.dtype import DType
from phaze.ir.graph import Graph, Role, Tensor
from phaze.ir.layers import Boundary, Layer, LayerGraph
from phaze.ir.op import Attribute, Gemm, Op, OpKind, Phase
from phaze.ir.recompute import SEARCHED_MODES, RecomputeMode, kept_bytes, kept_tensors, recomputed_ops
from phaze.ir.rule import Dim, Dims, Factor, FactorKind, Rule
from phaze.ir.stash import stashed_bytes, stashed_tensors

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
    "kept_bytes",
    "kept_tensors",
    "op_bytes",
    "recomputed_ops",
    "stashed_bytes",
    "stashed_tensors",
]
