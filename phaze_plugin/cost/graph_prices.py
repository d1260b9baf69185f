"""Prices of a graph's ops on every accelerator: singly, or in groups that run as one kernel; plugins' prices first.

Groups (`fuse_epilogues`). An elementwise op (dropout included) joins (`_joins`) the group of a matrix op when

1. the last result of the group is one of its operands,
2. it is of the same phase and runs over the same elements as that result,
3. its other operands were made before the matrix op, so that nothing waits in a circle.

Inside a group results pass from tensor to vector cores without leaving the chip. A tensor that is also needed outside
(kept for backward, read by another group, an output of the graph) is still written, never read back. The op then
occupies both kinds of core. Frameworks that call a library for matrix products fuse elementwise ops with each other
only: a chain then begins with the first of them, by the same three conditions.

Prices (`price_ops`, `price_groups`). A plugin's price wins over the built-in one. Callers pass the prices of plugins
that they want. `plugin_prices` lists those of a manager's plugins; loading plugins takes longer than pricing a layer,
so whoever plans does it once, and not this module. A fused group with an op that a plugin prices is priced as its ops
one after the other. Equal works are priced once.

A plugin's price is named after an op's kind and function (``elementwise.gelu``), its function (``gelu``) or its kind
(``elementwise``); the first of these that exists wins (`plugin_price_name`). Its answer is an `Estimate` of one op on
the accelerators asked about: finite, never negative, above zero seconds unless the op is a view, and no slower on all
cores than on one (`plugin_price` checks this).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from phaze.cost.calibration import IDEAL, Calibration, Fusion
from phaze.cost.estimate import BINDINGS, CoreKind, Estimate, stack_estimates, total_estimate
from phaze.cost.off_chip_traffic import ProductTiling
from phaze.cost.operator_work import Tensors, Work, in_pieces, op_work, read_bytes, vector_operations, written_bytes
from phaze.cost.work_prices import PriceTable, price_works
from phaze.errors import PluginError
from phaze.hardware import Accelerator, AcceleratorArray
from phaze.ir import Graph, Op, OpKind

if TYPE_CHECKING:
    from phaze.hooks import PluginManager
    from phaze.interfaces import OpPricer

__all__ = [
    "OpGroup",
    "accelerator_array",
    "fuse_epilogues",
    "group_work",
    "plugin_price",
    "plugin_price_name",
    "plugin_prices",
    "price_groups",
    "price_ops",
    "single_groups",
]

_EPILOGUES = frozenset({OpKind.ELEMENTWISE, OpKind.DROPOUT})
_HEADS = {
    Fusion.NONE: frozenset[OpKind](),
    Fusion.LOSS: frozenset[OpKind](),
    Fusion.CHAINS: _EPILOGUES,
    Fusion.CHAINS_AND_LOSS: _EPILOGUES,
    Fusion.CHAINS_AND_GATES: _EPILOGUES,
    Fusion.EPILOGUES: frozenset({OpKind.CONTRACTION, OpKind.CONVOLUTION}),
}


@dataclass(frozen=True, slots=True)
class OpGroup:
    """Ops that run as one: a head, and elementwise ops fused behind it; ``writes`` are the tensors that leave.

    A product may run in so many ``pieces`` of its rows, one after the other.
    """

    head: Op
    epilogue: tuple[Op, ...] = ()
    writes: tuple[str, ...] = ()
    pieces: int = 1

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops, in order."""
        return (self.head, *self.epilogue)

    @property
    def reads(self) -> tuple[str, ...]:
        """Tensors that come from outside, each once."""
        inside = {tensor_id for op in self.ops for tensor_id in op.outputs}
        names = dict.fromkeys(tensor_id for op in self.ops for tensor_id in op.inputs)
        return tuple(tensor_id for tensor_id in names if tensor_id not in inside)


def single_groups(ops: Iterable[Op]) -> tuple[OpGroup, ...]:
    """Every op by itself."""
    return tuple(OpGroup(op, (), op.outputs) for op in ops)


def fuse_epilogues(
    graph: Graph, ops: Sequence[Op] | None = None, fusion: Fusion = Fusion.EPILOGUES
) -> tuple[OpGroup, ...]:
    """Groups of ``ops`` (all of the graph's when left out), in the order of their heads, in which they can run."""
    wanted = graph.ops if ops is None else tuple(ops)
    position = {op.id: index for index, op in enumerate(graph.ops)}
    members: dict[str, list[Op]] = {}
    head_of: dict[str, str] = {}
    tail_of: dict[str, str] = {}
    for op in wanted:
        candidates = {head_of[name] for name in op.inputs if name in head_of and tail_of[head_of[name]] == name}
        latest_first = sorted(candidates, key=lambda head_id: -position[head_id])
        head_id = next((head_id for head_id in latest_first if _joins(graph, op, members[head_id], position)), op.id)
        members.setdefault(head_id, []).append(op)
        if members[head_id][0].kind in _HEADS[fusion]:
            head_of[op.outputs[0]] = head_id
            tail_of[head_id] = op.outputs[0]
    readers = _readers(graph)
    return tuple(_closed(group, readers) for group in members.values())


def _joins(graph: Graph, op: Op, group: Sequence[Op], position: dict[str, int]) -> bool:
    """Whether an op that reads a group's last result may join it: conditions 2 and 3 of the module."""
    head, tail = group[0], group[-1].outputs[0]
    if op.kind not in _EPILOGUES or op.phase is not head.phase or op.rule.work != graph.tensors[tail].elements:
        return False
    if op.rule.trips != head.rule.trips:
        return False
    made_inside = {tensor_id for member in group for tensor_id in member.outputs}
    producers = [graph.producer(name) for name in op.inputs if name not in made_inside]
    return all(producer is None or position[producer.id] < position[head.id] for producer in producers)


def _readers(graph: Graph) -> dict[str, set[str]]:
    """Ops that read each tensor; outputs of the graph and gradients count as read by nobody in particular."""
    readers: dict[str, set[str]] = {}
    for op in graph.ops:
        for tensor_id in op.inputs:
            readers.setdefault(tensor_id, set()).add(op.id)
    for tensor_id in (*graph.outputs, *(gradient for _, gradient in graph.gradients)):
        readers.setdefault(tensor_id, set()).add("")
    return readers


def _closed(group: Sequence[Op], readers: dict[str, set[str]]) -> OpGroup:
    """A finished group, with the tensors that somebody outside of it reads."""
    inside = {op.id for op in group}
    made = [tensor_id for op in group for tensor_id in op.outputs]
    leaving = [name for name in made if readers.get(name, {""}) - inside]
    return OpGroup(group[0], tuple(group[1:]), tuple(leaving or made[-1:]))


def group_work(group: OpGroup, tensors: Tensors) -> Work:
    """The work of a group: the head's own, with the traffic inside the group left out."""
    if group.pieces > 1:
        return in_pieces(group_work(replace(group, pieces=1), tensors), group.pieces)
    if group.epilogue and (trips := group.head.rule.trips) > 1:
        head, *epilogue = (replace(op, rule=op.rule.of_one_trip) for op in group.ops)
        return replace(group_work(OpGroup(head, tuple(epilogue), group.writes), tensors), trips=trips)
    work = op_work(group.head, tensors)
    if not group.epilogue:
        return work
    is_matrix = bool(work.products)
    arriving: dict[str, float] = {}
    inside = set(group.head.outputs) if is_matrix else set[str]()
    for op in group.epilogue if is_matrix else group.ops:
        for tensor_id, moved in zip(op.inputs, read_bytes(op, tensors), strict=True):
            if tensor_id not in inside:
                arriving[tensor_id] = max(moved, arriving.get(tensor_id, 0.0))
        inside.update(op.outputs)
    written = {
        tensor_id: moved
        for op in group.ops
        for tensor_id, moved in zip(op.outputs, written_bytes(op, tensors), strict=True)
    }
    return Work(
        products=work.products,
        vector_operations=sum(vector_operations(op) for op in (group.epilogue if is_matrix else group.ops)),
        tilings=tuple(
            replace(tiling, output_bytes=0.0) for tiling in work.tilings if isinstance(tiling, ProductTiling)
        ),
        streamed_bytes=sum(arriving.values()) + sum(written[name] for name in group.writes),
    )


def price_ops(
    graph: Graph,
    ops: Sequence[Op],
    accelerators: AcceleratorArray | Accelerator,
    *,
    calibration: Calibration = IDEAL,
    prices: Mapping[str, OpPricer] | None = None,
    table: PriceTable | None = None,
) -> Estimate:
    """Prices of single ops: row i is ``ops[i]``; see `price_groups`."""
    return price_groups(graph, single_groups(ops), accelerators, calibration=calibration, prices=prices, table=table)


def price_groups(
    graph: Graph,
    groups: Sequence[OpGroup],
    accelerators: AcceleratorArray | Accelerator,
    *,
    calibration: Calibration = IDEAL,
    prices: Mapping[str, OpPricer] | None = None,
    table: PriceTable | None = None,
    known_works: dict[tuple[str, ...], Work] | None = None,
) -> Estimate:
    """Prices of groups: row i is ``groups[i]``; the ``prices`` of plugins win over the built-in ones.

    A ``table`` is that of the one accelerator and the calibration, and gives the built-in prices. ``known_works`` are
    those of groups of this graph that were priced before, by the ids of their ops; others are added. An op that nobody
    prices is a `CostError`; a price that fails or cannot be a `PluginError`.
    """
    chips = accelerator_array(accelerators, table)
    offered = prices or {}
    works: dict[Work, int] = {}
    rows: list[int | Estimate] = []  # the place of a group's work among the distinct ones, or a plugin's price
    for group in groups:
        if offered and any(plugin_price_name(op, offered) for op in group.ops):
            single_estimates = [_price_alone(graph, op, chips, calibration, offered) for op in group.ops]
            rows.append(total_estimate(stack_estimates(single_estimates)))
        else:
            rows.append(works.setdefault(_work_of(group, graph, known_works), len(works)))
    if not rows:
        return Estimate.empty([], len(chips))
    distinct = tuple(works)
    built_in = table.prices(distinct) if table else price_works(distinct, chips, calibration=calibration)
    places = [row for row in rows if isinstance(row, int)]
    if len(places) == len(rows):
        return built_in.rows(places)
    return stack_estimates([built_in.rows([row]) if isinstance(row, int) else row for row in rows])


def accelerator_array(accelerators: AcceleratorArray | Accelerator, table: PriceTable | None) -> AcceleratorArray:
    """The accelerators as an array; that of a table of prices on the only one is there already."""
    if isinstance(accelerators, AcceleratorArray):
        return accelerators
    return AcceleratorArray.of([accelerators]) if table is None else table.chips


def _work_of(group: OpGroup, graph: Graph, known: dict[tuple[str, ...], Work] | None) -> Work:
    """The work of a group, looked up among those that are known where there are any."""
    if known is None:
        return group_work(group, graph.tensors)
    key = (group.head.id, *[op.id for op in group.epilogue], str(group.pieces))
    if key not in known:
        known[key] = group_work(group, graph.tensors)
    return known[key]


def _price_alone(
    graph: Graph,
    op: Op,
    chips: AcceleratorArray,
    calibration: Calibration,
    prices: Mapping[str, OpPricer],
) -> Estimate:
    """The price of one op outside of its group: a plugin's, or the built-in one."""
    name = plugin_price_name(op, prices)
    if name is not None:
        return plugin_price(name, prices[name], graph, op, chips)
    return price_works([op_work(op, graph.tensors)], chips, calibration=calibration)


def plugin_prices(plugins: PluginManager) -> dict[str, OpPricer]:
    """The prices that plugins bring; two plugins that price the same ops are a `PluginError`."""
    return plugins.op_prices().to_mapping()


def plugin_price_name(op: Op, prices: Mapping[str, OpPricer]) -> str | None:
    """The name of the price that wins for ``op``, or None where no plugin prices it."""
    return next((name for name in (f"{op.kind}.{op.function}", op.function, str(op.kind)) if name in prices), None)


def plugin_price(name: str, price: OpPricer, graph: Graph, op: Op, chips: AcceleratorArray) -> Estimate:
    """The checked answer of one price; a `PluginError` says what is wrong with it."""
    try:
        answer: object = price(graph, op, chips)
    except Exception as error:
        raise PluginError(f"the price {name!r} failed on op {op.id!r}: {type(error).__name__}: {error}") from error
    if not isinstance(answer, Estimate) or not _has_shape(answer, (1, len(chips))):
        raise PluginError(
            f"the price {name!r} of op {op.id!r} is not an Estimate of 1 op on {len(chips)} accelerators."
        )
    if complaint := _complaint(answer, op):
        raise PluginError(f"the price {name!r} of op {op.id!r}: {complaint}.")
    return answer


def _has_shape(answer: Estimate, shape: tuple[int, int]) -> bool:
    arrays = [getattr(answer, field.name) for field in fields(Estimate) if field.name != "kinds"]
    is_shaped = all(isinstance(array, np.ndarray) and array.shape == shape for array in arrays)
    return is_shaped and len(answer.kinds) == 1 and isinstance(answer.kinds[0], CoreKind)


def _complaint(answer: Estimate, op: Op) -> str:
    """What is wrong with the numbers, or nothing."""
    for name in ("core_s", "spread_s", "core_bytes", "spread_bytes", "core_energy_j", "spread_energy_j"):
        values = getattr(answer, name)
        may_be_zero = op.kind is OpKind.VIEW or not name.endswith("_s")
        is_right = np.isfinite(values) & ((values >= 0) if may_be_zero else (values > 0))
        if not is_right.all():
            expected = "at least 0" if may_be_zero else "above 0: only views cost nothing"
            return f"{name} is {float(values[~is_right][0])}; expected finite numbers, {expected}"
    if (answer.spread_s > answer.core_s).any():
        return "spread_s exceeds core_s; an op spread over all cores is never slower than on one"
    if max(answer.core_binding.max(initial=0), answer.spread_binding.max(initial=0)) >= len(BINDINGS):
        return f"a binding code is outside 0 to {len(BINDINGS) - 1}"
    return ""
