"""LoRA (Hu et al., arXiv:2106.09685): products of low rank beside frozen ones, added to a graph that has none.

`model+lora16` names a model whose linear layers have adapters of rank 16: beside y = x W, of which W is frozen, runs
y + (x A) B * scale, and A and B alone are trained. By default all products with a matrix of parameters between the
first and the last layer get one, as `target_modules="all-linear"` of peft says, routers excepted;
`model+lora16:q_proj,v_proj` names the modules that do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from phaze.errors import ImportModelError, shown
from phaze.ir.backward import has_loss, without_backward
from phaze.ir.graph import Graph, Role, Tensor
from phaze.ir.graph_builder import GraphBuilder
from phaze.ir.op import Op, OpKind, Phase
from phaze.ir.rule import Dim, Dims, Factor, Rule, factor_names, names_of

__all__ = ["LowRankAdapters", "add_adapters", "split_adapter_text"]

LARGEST_RANK = 65_536
"""The largest rank that is read: more than the width of any model, and so a mistake."""

_TEXT = re.compile(r"(?P<model>.+)\+lora(?P<rank>\d{1,6})(?::(?P<modules>[\w.,-]+))?")
_RANK = "rank"
_ROUTERS = ("gate", "router")
"""Modules that choose experts: no linear layers in the libraries, and so without adapters unless they are named."""


@dataclass(frozen=True, slots=True)
class LowRankAdapters:
    """The rank of a model's adapters, and the modules that have one; all linear layers where none is named."""

    rank: int
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that the rank is one."""
        if not 1 <= self.rank <= LARGEST_RANK:
            raise ImportModelError(f"a LoRA of rank {self.rank} is not possible; expected 1 to {LARGEST_RANK}.")

    def __str__(self) -> str:
        return f"lora{self.rank}" + (f":{','.join(self.modules)}" if self.modules else "")

    def adapts(self, module: str) -> bool:
        """Whether a product of this module gets an adapter."""
        name = module.rpartition(".")[2]
        return name in self.modules if self.modules else name not in _ROUTERS


def split_adapter_text(text: str) -> tuple[str, LowRankAdapters | None]:
    """A model's text, and the adapters that its end names, if it does.

    Raises ImportModelError where what follows `+lora` is no rank and names of modules.
    """
    if "+lora" not in text:
        return text, None
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ImportModelError(
            f"{shown(text)} names adapters that are not understood; expected MODEL+loraRANK, such as "
            "llama3.1-8b+lora16, or MODEL+loraRANK:MODULE,MODULE, such as llama3.1-8b+lora16:q_proj,v_proj."
        )
    modules = tuple(name for name in (match["modules"] or "").split(",") if name)
    return match["model"], LowRankAdapters(int(match["rank"]), modules)


def add_adapters(graph: Graph, adapters: LowRankAdapters) -> Graph:
    """The graph with everything frozen but adapters beside its linear layers; with a backward where it has a loss.

    Raises ImportModelError where no product gets an adapter.
    """
    forward = without_backward(graph)
    last = len(graph.layers) - 1
    adapted = {
        op.id
        for op in forward.ops
        if 0 < graph.layer_graph.layer_of[op.id] < last and _is_linear(forward, op) and adapters.adapts(_module(op))
    }
    if not adapted:
        names = sorted({_module(op).rpartition(".")[2] for op in forward.ops if _is_linear(forward, op)})
        raise ImportModelError(
            f"{graph.name!r} has no linear layer between its first and last for {adapters}; "
            f"its modules with linear layers are {', '.join(names) or 'none'}."
        )
    builder = _with_adapters(forward, adapters, adapted)
    trained = 2 * len(adapted)
    note = f"LoRA of rank {adapters.rank} beside {len(adapted)} linear layers; all but its {trained} matrices is frozen"
    outputs = [name for name in forward.outputs if name in builder.tensors]
    result = builder.build(outputs, (*forward.notes, note))
    return result.with_backward() if has_loss(result) else result


def _module(op: Op) -> str:
    return op.module or op.id.rpartition(".")[0]


def _is_linear(graph: Graph, op: Op) -> bool:
    """Whether an op is the product of an activation with a matrix of parameters, (contracted, given) or turned."""
    if op.kind is not OpKind.CONTRACTION or len(op.inputs) != 2:
        return False
    weight, dims = graph.tensors[op.inputs[1]], op.rule.operands[1]
    is_parameter = weight.role is Role.PARAMETER and graph.tensors[op.inputs[0]].role is not Role.PARAMETER
    if not is_parameter or len(dims) != 2 or any(dim.size is not None for dim in dims):
        return False
    given = names_of(op.rule.results[0])
    kept = [{name in given for name in dim.factors} for dim in dims]
    return sorted(map(sorted, kept)) == [[False], [True]]


def _with_adapters(graph: Graph, adapters: LowRankAdapters, adapted: set[str]) -> GraphBuilder:
    """The forward with adapters behind some of its ops, whose readers read the sum."""
    builder = GraphBuilder(f"{graph.name}+{adapters}", micro_batch_size=graph.micro_batch_size)
    for tensor in graph.tensors.values():
        if tensor.role is not None:
            frozen = tensor.role is Role.PARAMETER and tensor.dtype.is_float
            builder.argument(tensor.id, tensor.shape, tensor.role, tensor.dtype, is_frozen=frozen)
    sums: dict[str, str] = {}
    for op in graph.ops:
        copied = replace(op, inputs=tuple(sums.get(name, name) for name in op.inputs))
        builder.insert(copied, [graph.tensors[name].dtype for name in op.outputs])
        if op.id in adapted:
            sums[op.outputs[0]] = _adapter(builder, graph.tensors, copied, adapters.rank)
    return builder


def _adapter(builder: GraphBuilder, tensors: Mapping[str, Tensor], op: Op, rank: int) -> str:
    """Write y + (x A) B * scale behind y = x W; the id of the sum."""
    x, given, weight = op.rule.operands[0], op.rule.results[0], op.rule.operands[1]
    kept = names_of(given)
    (contracted,) = (dim for dim in weight if not kept.intersection(dim.factors))
    (produced,) = (dim for dim in weight if kept.intersection(dim.factors))
    low_dims = (*(dim for dim in x if not set(dim.factors) & set(contracted.factors)), Dim((_RANK,)))
    sizes = {factor.name: factor for factor in op.rule.factors} | {_RANK: Factor(_RANK, rank)}
    module, dtype = _module(op), tensors[op.outputs[0]].dtype

    def parameter(name: str, dims: Dims) -> str:
        shape = [_size(dim, sizes) for dim in dims]
        return builder.argument(f"{module}.{name}.weight", shape, Role.PARAMETER, tensors[op.inputs[1]].dtype)

    def add(name: str, kind: OpKind, function: str, reads: list[tuple[str, Dims]], dims: Dims) -> str:
        operands = tuple(read for _, read in reads)
        names = dict.fromkeys(name for tensor in (*operands, dims) for name in factor_names(tensor))
        rule = builder.shared(Rule(operands, (dims,), tuple(sizes[name] for name in names)))
        (result,) = builder.add(
            f"{module}.{name}",
            kind,
            function,
            rule,
            [tensor for tensor, _ in reads],
            dtypes=(dtype,),
            module=module,
            phase=Phase.FORWARD,
            attributes={"factor": 1 / rank} if function == "scale" else None,
        )
        return result

    a_dims, b_dims = (Dim((_RANK,)), contracted), (produced, Dim((_RANK,)))
    reads = [(op.inputs[0], x), (parameter("lora_A", a_dims), a_dims)]
    low = add("lora_A.matmul", OpKind.CONTRACTION, "einsum", reads, low_dims)
    reads = [(low, low_dims), (parameter("lora_B", b_dims), b_dims)]
    high = add("lora_B.matmul", OpKind.CONTRACTION, "einsum", reads, given)
    scaled = add("lora.scale", OpKind.ELEMENTWISE, "scale", [(high, given)], given)
    return add("lora.add", OpKind.ELEMENTWISE, "add", [(op.outputs[0], given), (scaled, given)], given)


def _size(dim: Dim, sizes: Mapping[str, Factor]) -> int:
    total = 1
    for name in dim.factors:
        total *= sizes[name].size
    return total
