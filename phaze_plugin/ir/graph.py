"""The graph of a model: its tensors, its ops, outputs and gradients, as text, and how much of it is understood.

Tensors (`Tensor`) have an element type and a shape; a graph's arguments also have a role (`Role`). A `Graph` is printed
as text (`format_graph`) and made again at another microbatch size.

Coverage (`measure_coverage`) is the share of a graph's flops and bytes whose ops have a rule of their own. Ops without
one are kept as opaque ops and priced as memory-bound work; they are never free.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from phaze.errors import GraphError
from phaze.ir.op import Op, OpKind, Phase

if TYPE_CHECKING:
    from phaze.ir.layers import Layer, LayerGraph

__all__ = [
    "LARGEST_TENSOR",
    "Coverage",
    "DType",
    "Graph",
    "Role",
    "Tensor",
    "UnknownOp",
    "format_graph",
    "format_ops",
    "measure_coverage",
]

LARGEST_TENSOR = 2**55
"""The most elements of a tensor: its bytes, at up to 8 an element, still fit into 64 bits with room for a few sums."""


class DType(StrEnum):
    """The element type of a tensor (what a chip computes in is `hardware`'s to say)."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8 = "float8"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"
    COMPLEX64 = "complex64"

    @property
    def size_bytes(self) -> int:
        """Bytes per element."""
        return _SIZE_BYTES[self]

    @property
    def is_float(self) -> bool:
        """Whether gradients can flow through this type."""
        return self.value.startswith(("float", "bfloat", "complex"))


_SIZE_BYTES = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.FLOAT8: 1,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.BOOL: 1,
    DType.COMPLEX64: 8,
}


class Role(StrEnum):
    """What a graph's argument is; intermediate tensors have no role."""

    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer_state"
    BATCH = "batch"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value that flows between ops, or an argument of the graph where it has a role.

    A parameter that is frozen is read and not trained: it has no gradient and no optimizer state.
    """

    id: str
    shape: tuple[int, ...]
    dtype: DType
    role: Role | None = None
    is_frozen: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether this is a parameter that an optimizer updates: a float one that is not frozen."""
        return self.role is Role.PARAMETER and self.dtype.is_float and not self.is_frozen

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
    `is_backward_derived` says that the backward ops were derived by rule; `why_backward_kept` why those of a capture
    were kept although that was tried. `runs_as` has the fields of the strategy that a captured program runs on several
    devices. `saved` has the tensors that the captured software keeps for backward, as far as that is known
    (`with_saved_activations`). `mixes_samples` says how the loss mixes the samples of a batch, or numbers
    them, so that losses of parts of a batch do not make up its own; empty where nothing shows that. `averages_samples`:
    it is known that samples count alike in the loss, whatever is in them. `notes` tell a reader how the graph was
    obtained; nothing reads them back.
    """

    name: str
    tensors: Mapping[str, Tensor]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    gradients: tuple[tuple[str, str], ...] = ()
    micro_batch_size: int = 1
    is_backward_derived: bool = False
    why_backward_kept: str = ""
    runs_as: Mapping[str, int] = field(default_factory=dict)
    saved: tuple[str, ...] = ()
    mixes_samples: str = ""
    averages_samples: bool = False
    notes: tuple[str, ...] = ()
    _producers: Mapping[str, Op] = field(init=False, repr=False, compare=False)
    _rescaled_from: Graph | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        from phaze.ir.graph_checks import check_graph

        object.__setattr__(self, "tensors", dict(self.tensors))
        object.__setattr__(self, "_producers", check_graph(self))

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

    @cached_property
    def parameter_of_gradient(self) -> dict[str, str]:
        """The parameter of each gradient, in the order of `gradients`."""
        return {gradient: parameter for parameter, gradient in self.gradients}

    @property
    def parameter_count(self) -> int:
        """Number of scalar parameters; a tied one counts once."""
        return sum(tensor.elements for tensor in self.parameters)

    @cached_property
    def frozen_parameter_count(self) -> int:
        """How many of these are read and not trained."""
        return sum(tensor.elements for tensor in self.parameters if tensor.is_frozen)

    @property
    def tokens_per_sample(self) -> int:
        """The length of the longest sequence of tokens among the inputs; 1 where there is none."""
        lengths = [
            math.prod(tensor.shape[1:])
            for tensor in self.tensors.values()
            if tensor.role is Role.BATCH and tensor.dtype.value.startswith("int") and len(tensor.shape) == 2
        ]
        return max(lengths, default=1)

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
        from phaze.ir.layers import rescaled_layers, split_layers

        known = self._rescaled_from
        return split_layers(self) if known is None else rescaled_layers(known.layer_graph, self)

    def coverage(self) -> Coverage:
        """How much of the graph has a rule, in flops and bytes."""

        return measure_coverage(self)

    def with_micro_batch(self, size: int) -> Graph:
        """The same model at another microbatch size, every shape rescaled from the rules."""
        return _rescaled(self, size)

    def with_backward(self) -> Graph:
        """The graph with a backward by rule; itself where it already has one."""
        from phaze.ir.backward import add_backward

        return add_backward(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON that `phaze.load_graph` reads back exactly; whole or not at all."""
        from phaze.ir.graph_json import save_graph

        save_graph(self, path)

    def __str__(self) -> str:
        return format_graph(self)

    def _repr_html_(self) -> str:
        from phaze.report.html_views import graph_view

        return graph_view(self)

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


def format_graph(graph: Graph) -> str:
    """Arguments, then the ops of each phase."""
    lines = [f"graph {graph.name} (microbatch {graph.micro_batch_size})"]
    for tensor in graph.tensors.values():
        if tensor.role is not None:
            frozen = "frozen " if tensor.is_frozen else ""
            lines.append(f"  {frozen}{tensor.role} {tensor.id}: {tensor.dtype}{list(tensor.shape)}")
    for phase in Phase:
        ops = graph.ops_of(phase)
        if ops:
            lines += [f"{phase}:", *(f"  {line}" for line in format_ops(graph, ops))]
    lines += [f"gradient {parameter}: {gradient}" for parameter, gradient in graph.gradients]
    lines += [f"output {tensor_id}" for tensor_id in graph.outputs]
    lines += [f"note {note}" for note in graph.notes]
    return "\n".join(lines) + "\n"


def format_ops(graph: Graph, ops: Iterable[Op]) -> list[str]:
    """One line an op: results with type and shape, function, operands, rule."""
    return [_format_op(graph, op) for op in ops]


def _format_op(graph: Graph, op: Op) -> str:
    results = ", ".join(_format_result(graph, tensor_id) for tensor_id in op.outputs)
    function = op.function if op.function == op.kind else f"{op.kind}.{op.function}"
    options = "".join(f" {name}={value}" for name, value in op.attributes)
    if op.collective_bytes:
        options += f" bytes={op.collective_bytes}"
    return f"{results} = {function}({', '.join(op.inputs)}){options}  [{op.rule}]"


def _format_result(graph: Graph, tensor_id: str) -> str:
    tensor = graph.tensors[tensor_id]
    return f"{tensor_id}: {tensor.dtype}{list(tensor.shape)}"


def _rescaled(graph: Graph, size: int) -> Graph:
    """The graph with every batch factor scaled to a microbatch of `size`; raises GraphError where it has none."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise GraphError(f"a microbatch of {size!r} is not possible; expected an integer of at least 1.")
    if size == graph.micro_batch_size:
        return graph
    rules = {id(op.rule): op.rule for op in graph.ops}
    if not any(factor.is_batch for rule in rules.values() for factor in rule.factors):
        raise GraphError(
            f"graph {graph.name!r} marks no batch factor: it is fixed to the microbatch it was captured with, "
            f"{graph.micro_batch_size}. Capture it again with inputs of batch {size}."
        )
    scaled = {key: rule.with_batch_scaled(graph.micro_batch_size, size) for key, rule in rules.items()}
    ops = tuple(op.with_rule(scaled[id(op.rule)]) for op in graph.ops)
    shapes = _shapes(ops)
    tensors = dict(graph.tensors)
    for tensor_id, shape in (shapes or {}).items():
        tensor = tensors[tensor_id]
        if tensor.shape != shape:
            tensors[tensor_id] = Tensor(tensor_id, shape, tensor.dtype, tensor.role, tensor.is_frozen)
    if shapes is None or max(tensor.elements for tensor in tensors.values()) > LARGEST_TENSOR:
        return replace(graph, tensors=tensors, ops=ops, micro_batch_size=size)  # says what is wrong
    # All other checks passed at the other size, and hold at every size.
    rescaled = copy.copy(graph)
    changed = {"tensors": tensors, "ops": ops, "micro_batch_size": size, "_rescaled_from": graph}
    changed["_producers"] = {tensor_id: op for op in ops for tensor_id in op.outputs}
    for name in vars(graph).keys() - {entry.name for entry in fields(Graph)}:
        del vars(rescaled)[name]  # what was worked out for the other size
    vars(rescaled).update(changed)
    return rescaled


def _shapes(ops: tuple[Op, ...]) -> dict[str, tuple[int, ...]] | None:
    """The shape of every tensor that some rule describes; None where rules contradict each other."""
    sides: dict[int, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for op in ops:
        rule = op.rule
        if id(rule) not in sides:
            sides[id(rule)] = ([*map(rule.shape, rule.operands)], [*map(rule.shape, rule.results)])
        operands, results = sides[id(rule)]
        for tensor_id, shape in zip((*op.outputs, *op.inputs), (*results, *operands), strict=True):
            if shapes.setdefault(tensor_id, shape) != shape:
                return None
    return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownOp:
    """A function without a rule: how often it occurs and what share of the work it stands for."""

    function: str
    count: int
    flops_share: float
    bytes_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Shares of flops and bytes that ops with a rule stand for, and what is left, largest first."""

    op_count: int
    flops_share: float
    bytes_share: float
    unknown: tuple[UnknownOp, ...]


def measure_coverage(graph: Graph) -> Coverage:
    """Measure a graph's coverage."""
    flops = sum(op.flops for op in graph.ops)
    traffic = {op.id: op_bytes(graph, op) for op in graph.ops}
    total = sum(traffic.values())
    functions: dict[str, list[Op]] = {}
    for op in graph.ops:
        if op.kind is OpKind.OPAQUE:
            functions.setdefault(op.function, []).append(op)
    unknown = [
        UnknownOp(
            function=function,
            count=len(ops),
            flops_share=_share(sum(op.flops for op in ops), flops),
            bytes_share=_share(sum(traffic[op.id] for op in ops), total),
        )
        for function, ops in functions.items()
    ]
    unknown.sort(key=lambda entry: (-entry.bytes_share, -entry.flops_share, entry.function))
    return Coverage(
        op_count=len(graph.ops),
        flops_share=1.0 - sum(entry.flops_share for entry in unknown),
        bytes_share=1.0 - sum(entry.bytes_share for entry in unknown),
        unknown=tuple(unknown),
    )


def op_bytes(graph: Graph, op: Op) -> int:
    """Bytes that an op reads and writes when nothing stays on the chip; 0 for views."""
    read = zip(op.inputs, op.elements_read, strict=True)
    written = zip(op.outputs, op.elements_written, strict=True)
    return sum(count * graph.tensors[tensor_id].dtype.size_bytes for tensor_id, count in (*read, *written))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
