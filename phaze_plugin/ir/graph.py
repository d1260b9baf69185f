"""The graph: ops in topological order, tensors, outputs and gradients; verified on construction."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from phaze.errors import GraphError
from phaze.ir.dtype import DType
from phaze.ir.op import Op, OpKind, Phase

if TYPE_CHECKING:
    from phaze.ir.coverage import Coverage
    from phaze.ir.layers import Layer, LayerGraph

__all__ = ["Graph", "Role", "Tensor"]


class Role(StrEnum):
    """What a graph's argument is; intermediate tensors have no role."""

    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer_state"
    BATCH = "batch"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value that flows between ops, or an argument of the graph where it has a role."""

    id: str
    shape: tuple[int, ...]
    dtype: DType
    role: Role | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.elements * self.dtype.size_bytes


@dataclass(frozen=True, kw_only=True, repr=False)
class Graph:
    """A model's operators, forward and backward.

    `gradients` pairs a parameter with a tensor that holds its gradient; a parameter used by several layers has one
    pair per layer, so that a gradient shared across pipeline stages is reduced between them and not inside one.
    `notes` says how the graph was obtained where that matters to a reader.
    """

    name: str
    tensors: Mapping[str, Tensor]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    gradients: tuple[tuple[str, str], ...] = ()
    micro_batch_size: int = 1
    notes: tuple[str, ...] = ()
    _producers: Mapping[str, Op] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        from phaze.ir.verify import verify

        object.__setattr__(self, "tensors", dict(self.tensors))
        object.__setattr__(self, "_producers", verify(self))

    def op(self, op_id: str) -> Op:
        """The op of that id; raises GraphError where there is none."""
        if op_id not in self._ops_by_id:
            raise GraphError(f"graph {self.name!r} has no op {op_id!r}.")
        return self._ops_by_id[op_id]

    def producer(self, tensor_id: str) -> Op | None:
        """The op that makes a tensor; None for an argument."""
        return self._producers.get(tensor_id)

    def storage(self, tensor_id: str) -> str:
        """The tensor whose memory this one is a view of (itself where it is none)."""
        op = self.producer(tensor_id)
        while op is not None and op.kind is OpKind.VIEW:
            tensor_id = op.inputs[0]
            op = self.producer(tensor_id)
        return tensor_id

    def ops_of(self, phase: Phase) -> tuple[Op, ...]:
        """The ops of one phase, in order."""
        return tuple(op for op in self.ops if op.phase is phase)

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters, each once however often it is used."""
        return tuple(tensor for tensor in self.tensors.values() if tensor.role is Role.PARAMETER)

    @property
    def parameter_count(self) -> int:
        """Number of scalar parameters; a tied one counts once."""
        return sum(tensor.elements for tensor in self.parameters)

    def matmul_flops(self, phase: Phase | str) -> int:
        """Flops of matrix ops in a phase: whole squares of attention, nothing recomputed."""
        if phase not in set(Phase):
            raise ValueError(f"phase is {phase!r}; expected one of {', '.join(Phase)}")
        wanted = Phase(phase)
        return sum(op.matmul_flops for op in self.ops if op.phase is wanted)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The units that placement moves, in order."""
        return self.layer_graph.layers

    @property
    def distinct_layers(self) -> tuple[Layer, ...]:
        """The first layer of each kind: equal ops, shapes and wiring."""
        return self.layer_graph.distinct

    @cached_property
    def layer_graph(self) -> LayerGraph:
        """Layers with the boundary tensors between them."""
        from phaze.ir.layers import split_layers

        return split_layers(self)

    def coverage(self) -> Coverage:
        """How much of the graph has a rule, in flops and bytes."""
        from phaze.ir.coverage import measure_coverage

        return measure_coverage(self)

    def with_micro_batch(self, size: int) -> Graph:
        """The same model at another microbatch size, every shape rescaled from the rules."""
        from phaze.ir.micro_batch import rescale

        return rescale(self, size)

    def with_backward(self) -> Graph:
        """The graph with a backward by rule; itself where it already has one."""
        from phaze.ir.backward import add_backward

        return add_backward(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON that `phaze.load_graph` reads back exactly; whole or not at all."""
        from phaze.ir.serialize import save_graph

        save_graph(self, path)

    def __str__(self) -> str:
        from phaze.ir.text import format_graph

        return format_graph(self)

    def __repr__(self) -> str:
        return (
            f"<Graph {self.name}: {self.parameter_count:,} parameters, {len(self.ops):,} ops, "
            f"microbatch {self.micro_batch_size}>"
        )

    def __hash__(self) -> int:
        return hash((self.name, self.micro_batch_size, self.ops))

    @cached_property
    def _ops_by_id(self) -> dict[str, Op]:
        return {op.id: op for op in self.ops}
