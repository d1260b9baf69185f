"""What a layer keeps between forward and backward, what it computes again, and the names that tools give to both.

Modes (`RecomputeMode`). A layer that computes nothing again keeps its stash: the forward tensors that its backward ops
read.

none       the whole stash
selective  the stash, less what lies inside attention: results of products of two activations, and of the
           softmax and dropout between them, that nothing else needs (Korthikanti et al., arXiv:2205.05198, section 5)

The modes below keep what enters the layer and the results of some of its ops, as far as backward or what runs again
reads them; with ``context`` those of attention are among them, and products are those that read a parameter. Where
several devices share a product, its sum is kept and not its parts.

dots+context  all products, and context
dots          all products
products      every other product, the first one included, context, and reduce-scatters (torchtitan's selective
              checkpointing by op, torchtitan/distributed/activation_checkpoint.py)
projections   the products right before and behind attention
qkv           the products right before attention: queries, keys and values
out           the first product behind attention

budget-75, budget-50 and budget-25 keep what makes computing the rest again least, within that part of the bytes between
full and none (`recompute_budget.py`).

full       only what enters the layer; the whole forward runs again, or (trimmed) what leads to a tensor that backward
           reads: compilers drop the rest, such as a layer's last product and the sum of its parts

Policies (`recompute_mode`) are the names that tools give to modes that keep the same:

    MaxText       remat_policy of configs/base.yml (layers/decoders.py, `get_remat_policy`)
    JAX           jax.checkpoint_policies
    torchtitan    activation_checkpoint.mode and selective_ac_option
    Megatron-LM   --recompute-granularity

Policies that move what is kept to the host's memory are a mode and `offload=activations` at once: a strategy may name
them. What is said of a mode above is what is priced; targets write the policy's name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from phaze.errors import QuestionError, meant, shown
from phaze.ir.graph import Graph, Role
from phaze.ir.layers import Layer
from phaze.ir.op import Op, OpKind, Phase
from phaze.name_spelling import spelled_alike

__all__ = [
    "BUDGET",
    "BUDGET_MODES",
    "MAXTEXT_POLICIES",
    "OFFLOADING_POLICIES",
    "SEARCHED_MODES",
    "Recomputation",
    "RecomputeMode",
    "entering_tensors",
    "kept_tensors",
    "made_again",
    "recomputation",
    "recompute_mode",
    "recomputed_ops",
    "stashed_bytes",
    "stashed_tensors",
]


class RecomputeMode(StrEnum):
    """How much of a layer's forward is computed again in backward."""

    NONE = "none"
    SELECTIVE = "selective"
    DOTS_AND_CONTEXT = "dots+context"
    DOTS = "dots"
    PRODUCTS = "products"
    PROJECTIONS = "projections"
    QKV = "qkv"
    OUT = "out"
    BUDGET_75 = "budget-75"
    BUDGET_50 = "budget-50"
    BUDGET_25 = "budget-25"
    FULL = "full"

    @property
    def budget(self) -> float | None:
        """The part of the bytes between full recompute and none that may be kept; None for modes without a budget."""
        return _BUDGETS.get(self)


_BUDGETS = {RecomputeMode.BUDGET_75: 0.75, RecomputeMode.BUDGET_50: 0.5, RecomputeMode.BUDGET_25: 0.25}
"""Three points between the ends: more of them make more stages to choose from, and stages of other modes beside each
other reach most of what lies between."""

BUDGET_MODES = tuple(_BUDGETS)
"""The modes that keep what pays most within a budget of memory."""


SEARCHED_MODES = (RecomputeMode.NONE, RecomputeMode.SELECTIVE, RecomputeMode.FULL)
"""What is searched unless a strategy says otherwise; few targets run the others."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What a layer keeps between forward and backward, by the ids of tensors, and the ops that backward runs again."""

    kept: tuple[str, ...]
    again: tuple[Op, ...]


def stashed_tensors(graph: Graph, layer: Layer) -> tuple[str, ...]:
    """Ids of the tensors to keep, views counted as the tensor whose memory they are.

    Parameters and constants are not among them: they are there anyway.
    """
    kept: dict[str, None] = {}
    for op in layer.backward:
        for tensor_id in op.inputs:
            storage = graph.storage(tensor_id)
            producer = graph.producer(storage)
            is_forward = producer is not None and producer.phase is Phase.FORWARD
            if is_forward or graph.tensors[storage].role is Role.BATCH:
                kept[storage] = None
    return tuple(kept)


def stashed_bytes(graph: Graph, layer: Layer) -> int:
    """Bytes of what a layer keeps."""
    return sum(graph.tensors[tensor_id].size_bytes for tensor_id in stashed_tensors(graph, layer))


def kept_tensors(graph: Graph, layer: Layer, mode: RecomputeMode) -> tuple[str, ...]:
    """Ids of the tensors that a layer keeps between forward and backward in a mode without a budget."""
    stash = stashed_tensors(graph, layer)
    if mode is RecomputeMode.NONE:
        return stash
    if mode is RecomputeMode.FULL:
        return tuple(entering_tensors(graph, layer)) if stash else ()
    return made_again(graph, layer, _may_keep(graph, layer, mode)).kept


def recomputed_ops(graph: Graph, layer: Layer, mode: RecomputeMode, *, is_trimmed: bool = False) -> tuple[Op, ...]:
    """The forward ops that run again in backward, in order, in a mode without a budget."""
    if mode is RecomputeMode.NONE or not layer.backward:
        return ()
    if mode is RecomputeMode.FULL and not is_trimmed:
        return layer.forward
    return made_again(graph, layer, _may_keep(graph, layer, mode)).again


def recomputation(graph: Graph, layer: Layer, mode: RecomputeMode, *, is_trimmed: bool = False) -> Recomputation:
    """What a layer keeps and what runs again, in a mode without a budget."""
    return Recomputation(kept_tensors(graph, layer, mode), recomputed_ops(graph, layer, mode, is_trimmed=is_trimmed))


def entering_tensors(graph: Graph, layer: Layer) -> dict[str, None]:
    """Activations and batch tensors that a layer reads and does not make."""
    made = {tensor_id for op in layer.forward for tensor_id in op.outputs}
    return dict.fromkeys(
        graph.storage(tensor_id)
        for op in layer.forward
        for tensor_id in op.inputs
        if tensor_id not in made and graph.tensors[graph.storage(tensor_id)].role in (None, Role.BATCH)
    )


def _may_keep(graph: Graph, layer: Layer, mode: RecomputeMode) -> set[str]:
    """The tensors that a mode may keep."""
    if mode.budget is not None:
        raise ValueError(f"recompute {mode} depends on the seconds of ops; see recompute_budget.py.")
    may_keep = {*entering_tensors(graph, layer)}
    if mode in _RESULTS_KEPT:
        kept_ops = _settled(layer, _RESULTS_KEPT[mode](graph, layer))
        may_keep |= {graph.storage(tensor_id) for op in kept_ops for tensor_id in op.outputs}
    elif mode is RecomputeMode.SELECTIVE:
        may_keep |= {graph.storage(tensor_id) for op in layer.forward for tensor_id in op.outputs}
        may_keep -= _inside_attention(graph, layer)
    return may_keep


def made_again(graph: Graph, layer: Layer, may_keep: Collection[str]) -> Recomputation:
    """What a layer keeps of what it may keep, and the ops that make the rest of what backward asks for again."""
    stash = stashed_tensors(graph, layer)
    kept = dict.fromkeys(tensor_id for tensor_id in stash if tensor_id in may_keep)
    wanted = set(stash) - set(may_keep)
    rerun: list[Op] = []
    for op in reversed(layer.forward):
        if wanted.isdisjoint(op.outputs):
            continue
        rerun.append(op)
        for tensor_id in op.inputs:
            if (storage := graph.storage(tensor_id)) in may_keep:
                kept[storage] = None
            else:
                wanted.add(tensor_id)
    return Recomputation(tuple(kept), tuple(reversed(rerun)))


def _settled(layer: Layer, ops: Sequence[Op]) -> list[Op]:
    """The ops, and instead of a partial sum the collective that reads it alone and adds up the parts."""
    readers: dict[str, list[Op]] = {}
    for op in layer.forward:
        for tensor_id in op.inputs:
            readers.setdefault(tensor_id, []).append(op)
    settled = []
    for op in ops:
        following = readers.get(op.outputs[0], [])
        is_partial = len(following) == 1 and following[0].function in ("all_reduce", "reduce_scatter")
        settled.append(following[0] if is_partial else op)
    return settled


def _products(graph: Graph, layer: Layer) -> list[Op]:
    """Products that read a parameter."""
    products = [op for op in layer.forward if op.kind is OpKind.CONTRACTION]
    return [op for op in products if not _is_activation_product(graph, op)]


def _context(graph: Graph, layer: Layer) -> list[Op]:
    """Fused attentions, and the last product of those that are written out."""
    inside = _inside_attention(graph, layer)
    written_out = [op for op in layer.forward if _is_activation_product(graph, op) and inside.isdisjoint(op.outputs)]
    return [op for op in layer.forward if op.kind is OpKind.ATTENTION] + written_out


def _products_and_context(graph: Graph, layer: Layer) -> list[Op]:
    return _products(graph, layer) + _context(graph, layer)


def _every_other_product(graph: Graph, layer: Layer) -> list[Op]:
    scattered = [op for op in layer.forward if op.kind is OpKind.COLLECTIVE and op.function == "reduce_scatter"]
    return _products(graph, layer)[::2] + _context(graph, layer) + scattered


def _before_attention(graph: Graph, layer: Layer) -> list[Op]:
    """Products whose results attention reads without another product between."""
    attentions = [op for op in layer.forward if op.kind is OpKind.ATTENTION or _is_activation_product(graph, op)]
    wanted = {tensor_id for op in attentions for tensor_id in op.inputs}
    neighbours: list[Op] = []
    products = {op.id for op in _products(graph, layer)}
    for op in reversed(layer.forward):
        if wanted.isdisjoint(op.outputs):
            continue
        if op.id in products:
            neighbours.append(op)
        else:
            wanted.update(op.inputs)
    return neighbours


def _behind_attention(graph: Graph, layer: Layer) -> list[Op]:
    """Products that read the result of attention without another product between."""
    made = {tensor_id for op in _context(graph, layer) for tensor_id in op.outputs}
    neighbours: list[Op] = []
    products = {op.id for op in _products(graph, layer)}
    for op in layer.forward:
        if made.isdisjoint(op.inputs):
            continue
        if op.id in products:
            neighbours.append(op)
        else:
            made.update(op.outputs)
    return neighbours


def _around_attention(graph: Graph, layer: Layer) -> list[Op]:
    return _before_attention(graph, layer) + _behind_attention(graph, layer)


_RESULTS_KEPT: dict[RecomputeMode, Callable[[Graph, Layer], list[Op]]] = {
    RecomputeMode.DOTS_AND_CONTEXT: _products_and_context,
    RecomputeMode.DOTS: _products,
    RecomputeMode.PRODUCTS: _every_other_product,
    RecomputeMode.PROJECTIONS: _around_attention,
    RecomputeMode.QKV: _before_attention,
    RecomputeMode.OUT: _behind_attention,
}
"""The ops whose results each mode keeps, besides what enters the layer."""


def _inside_attention(graph: Graph, layer: Layer) -> frozenset[str]:
    """Tensors between products of two activations that no op outside of them reads."""
    inside = {op.id for op in layer.forward if _is_activation_product(graph, op)}
    inside |= _between(layer, inside)
    readers: dict[str, list[str]] = {}
    for op in layer.forward:
        for tensor_id in op.inputs:
            readers.setdefault(tensor_id, []).append(op.id)
    leaving = frozenset(layer.outputs)
    return frozenset(
        tensor_id
        for op in layer.forward
        if op.id in inside
        for tensor_id in op.outputs
        if tensor_id not in leaving and inside.issuperset(readers.get(tensor_id, ()))
    )


def _is_activation_product(graph: Graph, op: Op) -> bool:
    if op.kind is not OpKind.CONTRACTION:
        return False
    return all(graph.tensors[graph.storage(tensor_id)].role is not Role.PARAMETER for tensor_id in op.inputs)


def _between(layer: Layer, products: set[str]) -> set[str]:
    """Ops that depend on one product and that another depends on, without a product on the way."""
    producer = {tensor_id: op.id for op in layer.forward for tensor_id in op.outputs}
    after: set[str] = set()
    for op in layer.forward:
        before = {producer[tensor_id] for tensor_id in op.inputs if tensor_id in producer}
        if op.id not in products and op.kind in _BETWEEN_PRODUCTS and before & (products | after):
            after.add(op.id)
    ahead: set[str] = set()
    for op in reversed(layer.forward):
        if op.id in products or op.id in ahead:
            ahead |= {producer[tensor_id] for tensor_id in op.inputs if tensor_id in producer} & after
    return after & ahead


_BETWEEN_PRODUCTS = (OpKind.SOFTMAX, OpKind.DROPOUT, OpKind.ELEMENTWISE, OpKind.VIEW)
"""Kinds of ops that may stand between the two products of an attention: masks, scaling, softmax and dropout."""


BUDGET = "budget"
"""What stands for all modes with a budget where a search is told which modes to try."""

MAXTEXT_POLICIES: dict[str, RecomputeMode] = {
    "none": RecomputeMode.NONE,
    "minimal_with_context": RecomputeMode.DOTS_AND_CONTEXT,
    "minimal": RecomputeMode.DOTS,
    "save_dot_except_mlp": RecomputeMode.PROJECTIONS,
    "save_qkv_proj": RecomputeMode.QKV,
    "save_out_proj": RecomputeMode.OUT,
    "full": RecomputeMode.FULL,
}
"""What MaxText calls each mode that it has."""

_OTHER_NAMES: dict[str, RecomputeMode] = {
    "minimal_flash": RecomputeMode.DOTS_AND_CONTEXT,  # MaxText's older name
    "everything_saveable": RecomputeMode.NONE,
    "dots_with_no_batch_dims_saveable": RecomputeMode.DOTS,
    "checkpoint_dots_with_no_batch_dims": RecomputeMode.DOTS,
    "nothing_saveable": RecomputeMode.FULL,
    "selective-op": RecomputeMode.PRODUCTS,  # torchtitan
    "core_attn": RecomputeMode.SELECTIVE,  # Megatron-LM's --recompute-modules
}

_NEAREST = {"dots_saveable": "dots+context", "checkpoint_dots": "dots+context"}
"""Policies that no mode is, and the mode that is next to each: these keep the scores of attention as well."""

OFFLOADING_POLICIES: dict[str, RecomputeMode] = {
    "minimal_offloaded": RecomputeMode.DOTS,  # MaxText
    "qkv_proj_offloaded": RecomputeMode.QKV,  # MaxText
    "offload_dot_with_no_batch_dims": RecomputeMode.DOTS,  # JAX
}
"""What policies keep that move it to the host. What enters a layer, which they leave on the device, is moved, too."""


def recompute_mode(name: object) -> RecomputeMode:
    """The mode that keeps what a policy keeps, by the mode's own name or a tool's; raises QuestionError for others."""
    if isinstance(name, RecomputeMode):
        return name
    if name in OFFLOADING_POLICIES:
        raise QuestionError(
            f"recompute {name!r} keeps activations in the host's memory. As a mode it is "
            f"{OFFLOADING_POLICIES[str(name)].value!r}; write that, and offload=activations in the strategy."
        )
    if name == BUDGET:
        raise QuestionError(
            f"strategy has recompute {name!r}; say which part of the bytes may be kept: {', '.join(BUDGET_MODES)}."
        )
    known = {mode.value: mode for mode in RecomputeMode} | MAXTEXT_POLICIES | _OTHER_NAMES
    mode_name = spelled_alike(name, known) if isinstance(name, str) else None
    if mode_name is None:
        is_near = isinstance(name, str) and name in _NEAREST
        hint = meant(_NEAREST[str(name)] if is_near else name, known)
        modes = ", ".join(RecomputeMode)
        raise QuestionError(
            f"strategy has recompute {shown(name)}; expected one of {modes}, or a policy of MaxText, JAX, torchtitan "
            f"or Megatron-LM by its name.{hint}"
        )
    return known[mode_name]
