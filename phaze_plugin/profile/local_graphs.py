"""The graph that one device of cp and ep runs, at every microbatch size, each rewritten once.

How an attention exchanges its keys is chosen for each one of its own by what its forward and backward take with the
links around it (`exchange_seconds`), before anything is scheduled: of W seconds of work, keys and values of K bytes,
queries and results of Q bytes, on n devices

    all_gather   W forward, W' backward; gathers of K in both (in forward alone where the target keeps gathered keys),
                 and a reduce-scatter of K backward
    ring         max(W, W / n + R) with the n - 1 steps R of a ring of K, and the same backward with twice as many bytes
    all_to_all   the work on 1/n of the heads; all-to-alls of Q + K, twice

The schedule may hide some of a gather behind projections, which the choice does not see. A ring is preferred where
nothing is faster, because it never holds all keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from phaze.cost import Collective, price_ops
from phaze.cost.off_chip_traffic import BALANCED_OVER
from phaze.errors import GraphError, ShardError
from phaze.hardware.precision import cast_graph
from phaze.ir import Graph, Op, OpKind, Phase
from phaze.question import Question
from phaze.shard import Axis
from phaze.shard.context_slicing import KeyExchange, can_exchange_heads, key_attentions, query_positions
from phaze.shard.device_graph import device_graph
from phaze.shard.mesh_axes import CONTEXT_AXIS, EXCHANGE

__all__ = ["LocalGraphs", "exchange_counts", "exchange_seconds", "key_exchanges"]


_WITHOUT_MASK = 3
"""The operands of an attention that has none beside queries, keys and values."""


class LocalGraphs:
    """Graphs of one device, in the types of a question's precision recipe; whoever looks at several keeps one of these.

    `graph` is the model as it is planned, where that is not the question's own.
    """

    def __init__(self, question: Question, graph: Graph | None = None) -> None:
        self.question = question
        self.graph = question.graph if graph is None else graph
        self._sliced: dict[object, Graph] = {}
        self._at_size: dict[object, Graph] = {}
        self._exchanges: dict[object, Mapping[str, KeyExchange]] = {}

    def at(self, size: int, *, tp: int = 1, cp: int = 1, ep: int = 1) -> Graph:
        """The graph of one device of cp and ep at a microbatch size; tp matters to how keys are exchanged only.

        Raises ShardError where the model cannot be sliced so.
        """
        exchanges = self._chosen(size, tp, cp) if cp > 1 else {}
        key = (cp, ep, tuple(exchanges.items()))
        if (key, size) not in self._at_size:
            try:
                if key not in self._sliced:
                    sliced = device_graph(
                        self.graph,
                        cp=cp,
                        ep=ep,
                        exchanges=exchanges,
                        expert_imbalance=self.question.expert_imbalance,
                        keeps_dropped=self.question.capabilities.allows_dropped_positions,
                        keeps_gathered=self.question.capabilities.keeps_gathered_keys,
                    )
                    # Slices that contradict each other may agree by chance at the size that was captured.
                    sliced.with_micro_batch(1)
                    self._sliced[key] = sliced
                sized = self._sliced[key].with_micro_batch(size)
            except GraphError as error:
                if cp == ep == 1:
                    raise
                # Some captured graphs have ops whose slices contradict each other: such degrees are left out by name.
                raise ShardError(
                    f"model {self.graph.name!r} cannot be split for cp={cp} and ep={ep}: {error} Use cp=1 and ep=1."
                ) from error
            self._at_size[key, size] = cast_graph(sized, self.question.recipe)
        return self._at_size[key, size]

    def _chosen(self, size: int, tp: int, cp: int) -> Mapping[str, KeyExchange]:
        """How each attention exchanges its keys, by op."""
        if (size, tp, cp) not in self._exchanges:
            whole = self.at(size)
            axis = Axis(self.question.cluster, tp, self.question.calibration, cp)
            by_rule: dict[object, KeyExchange] = {}
            chosen = {}
            for op in key_attentions(whole):
                key = (op.rule, op.attributes)
                if key not in by_rule:
                    keeps_gathered = self.question.capabilities.keeps_gathered_keys
                    seconds = exchange_seconds(whole, op, axis, keeps_gathered=keeps_gathered)
                    runs = self.question.capabilities.key_exchanges
                    by_rule[key] = _cheapest({way: seconds[way] for way in seconds if way in runs})
                chosen[op.id] = by_rule[key]
            self._exchanges[size, tp, cp] = chosen
        return self._exchanges[size, tp, cp]


def exchange_counts(graph: Graph) -> dict[str, int]:
    """How many attentions of a device's graph exchange their keys in each way."""
    ways = (op.attribute(EXCHANGE) for op in graph.ops_of(Phase.FORWARD) if op.kind is OpKind.ATTENTION)
    return dict(Counter(way for way in ways if isinstance(way, str)))


def key_exchanges(graph: Graph) -> dict[str, str]:
    """How the attentions of a device's graph exchange their keys, by the path of the module that each lies in."""
    attentions = (op for op in graph.ops_of(Phase.FORWARD) if op.kind is OpKind.ATTENTION)
    return {op.module: way for op in attentions if isinstance(way := op.attribute(EXCHANGE), str)}


def _cheapest(seconds: Mapping[KeyExchange, float]) -> KeyExchange:
    return min(
        (KeyExchange.RING, KeyExchange.GATHER, KeyExchange.HEADS), key=lambda way: seconds.get(way, float("inf"))
    )


def exchange_seconds(graph: Graph, op: Op, axis: Axis, *, keeps_gathered: bool = False) -> dict[KeyExchange, float]:
    """What an attention of a whole graph takes forward and backward in each way that it can exchange its keys.

    An attention with a mask cannot take its keys block by block.
    """
    passes = [op, *(other for other in graph.ops if other.gradient_of == op.id and other.kind is OpKind.ATTENTION)]
    keys = sum(graph.tensors[name].size_bytes for name in op.inputs[1:3]) / axis.tp
    queries = sum(graph.tensors[name].size_bytes for name in (op.inputs[0], op.outputs[0])) / axis.tp
    cp = axis.cp
    gather_s = axis.seconds(Collective.ALL_GATHER, keys, CONTEXT_AXIS)
    scatter_s = axis.seconds(Collective.REDUCE_SCATTER, keys, CONTEXT_AXIS)
    ring_s = (cp - 1) * axis.seconds(Collective.POINT_TO_POINT, keys / cp, CONTEXT_AXIS)
    work_s = _work_s(graph, passes, axis)
    # Backward, the gradients of keys and values go around as well. Each block is a kernel of its own.
    blocks_s = [work + (cp - 1) * axis.calibration.op_overhead_s for work in work_s]
    waits_s = [max(0.0, count * ring_s - (1 - 1 / cp) * work) for count, work in enumerate(blocks_s, start=1)]
    backward_s = scatter_s if keeps_gathered else gather_s + scatter_s
    seconds = {KeyExchange.GATHER: sum(work_s) + gather_s + (backward_s if len(passes) > 1 else 0.0)}
    if len(op.inputs) == _WITHOUT_MASK:
        seconds[KeyExchange.RING] = sum(blocks_s) + sum(waits_s)
    if can_exchange_heads(op, cp, axis.tp):
        there_and_back_s = axis.seconds(Collective.ALL_TO_ALL, queries + keys, CONTEXT_AXIS)
        seconds[KeyExchange.HEADS] = sum(work_s) + len(passes) * there_and_back_s
    return seconds


def _work_s(graph: Graph, passes: list[Op], axis: Axis) -> list[float]:
    """Seconds of the passes of an attention on one device: its queries, and its heads as far as they divide."""
    rule = passes[0].rule
    heads = [
        factor.name
        for factor in rule.factors
        if not factor.is_batch and all(factor.name in names for names in rule.operand_names[:3])
    ]
    positions = query_positions(passes[0])
    ways = {} if positions is None else {positions: axis.cp}
    ways |= {name: axis.tp for name in heads[:1] if rule.size(name) % axis.tp == 0}
    balanced = (BALANCED_OVER, axis.cp)
    local = [replace(op, rule=op.rule.local(ways), attributes=(*op.attributes, balanced)) for op in passes]
    estimate = price_ops(graph, local, axis.cluster.accelerator, calibration=axis.calibration)
    seconds: list[float] = estimate.spread_s[:, 0].tolist()
    return seconds
