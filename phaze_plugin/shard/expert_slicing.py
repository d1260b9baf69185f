"""Expert parallelism: the forward ops that one device runs when experts are divided over ep devices.

Each device routes its own tokens, sends the copies of each to the owners of the chosen experts, runs its own experts on
what the ep devices sent, and gets the results back: two all-to-alls on the mesh axis `expert`, whose gradients are two
more. Of the rows of experts [expert, batch, row, hidden] a device first has all experts of its own batch, then its own
experts for the batches of all ep devices; its experts are every ep-th one. Routers and shared experts are as before.

Experts get equal shares of the tokens. `imbalance` is how many times its share the fullest one gets, by which all rows
are lengthened: an assumption about the router, stated by whoever asks (1.0 by default).

A tensor-parallel axis beside this one divides a device's experts further, or cuts each of them: `shard/` chooses.
"""

from __future__ import annotations

import math
from dataclasses import replace

from phaze.errors import ShardError
from phaze.ir import Dims, Factor, Graph, GraphBuilder, Op, Phase, Role, Rule
from phaze.ir.factor_following import Pieces, follow_pieces, followed_factors
from phaze.ir.rule import factor_names
from phaze.shard.mesh_axes import EXPERT_AXIS, collective_op, nearest_divisors, regrouped

__all__ = ["DIVIDED_OVER", "expert_counts", "slice_experts"]

DIVIDED_OVER = "divided_over"
"""The attribute of ops whose parameters are divided over the devices of a mesh axis."""


def expert_counts(graph: Graph) -> dict[str, int]:
    """How many experts each op has that sends tokens to experts, by its id."""
    return {op.id: _dispatched(op)[0] for op in graph.ops_of(Phase.FORWARD) if op.function == "dispatch"}


def _dispatched(op: Op) -> tuple[int, ...]:
    """The shape of what is sent to experts: [expert, batch, row, hidden]."""
    return op.rule.shape(op.rule.results[0])


def slice_experts(graph: Graph, ep: int, imbalance: float = 1.0) -> Graph:
    """The forward ops of one of ep devices; with ep 1 only the rows of experts are lengthened.

    Raises ShardError where the model has no experts, or ep does not divide them.
    """
    counts = expert_counts(graph)
    if not (math.isfinite(imbalance) and imbalance >= 1):
        raise ShardError(f"expert_imbalance is {imbalance}; expected a number of at least 1.")
    if not counts:
        raise ShardError(
            f"model {graph.name!r} has no experts that ep={ep} could divide: no op of it dispatches tokens. Use ep=1; "
            "a mixture that was captured from its code sorts tokens in ways that are not recognised: plan it from its "
            "config (for Hugging Face models model.config.to_dict()), which names the same parameters."
        )
    for name, count in counts.items():
        if count % ep:
            raise ShardError(
                f"ep={ep} does not divide the {count} experts of op {name!r}; {nearest_divisors(count, ep)}."
            )
    return _ExpertSlicer(graph, ep, imbalance).run()


class _ExpertSlicer:
    """Writes the local ops; between sending and returning, factors of experts, batch and rows have other sizes."""

    def __init__(self, graph: Graph, ep: int, imbalance: float) -> None:
        self.graph, self.ep, self.imbalance = graph, ep, imbalance
        self.forward = graph.ops_of(Phase.FORWARD)
        self.inside = _ops_of_experts(self.forward)
        self.builder = GraphBuilder(graph.name, micro_batch_size=graph.micro_batch_size)
        inside = [op for op in self.forward if op.id in self.inside]
        sent = {op.outputs[0]: _dispatched(op) for op in self.forward if op.function == "dispatch"}
        self.rules: dict[object, Rule] = {}
        # Where experts, batch and rows lie in each tensor between the two exchanges.
        self.places: list[Pieces] = [
            follow_pieces(inside, {name: {(dim, 1, shape[dim])} for name, shape in sent.items()}) for dim in range(3)
        ]

    def run(self) -> Graph:
        for op in self.forward:
            for name in op.inputs:
                self._enter(op, name)
            if op.function == "dispatch":
                self._send(op)
            elif op.function == "combine":
                self._return(op)
            elif op.id in self.inside:
                self._insert(replace(op, rule=self._local(op), attributes=self._attributes(op)), op)
            else:
                self._insert(op, op)
        notes = [f"experts divided over {self.ep} devices along mesh axis {EXPERT_AXIS}"] if self.ep > 1 else []
        if self.imbalance != 1:
            notes.append(f"the fullest expert is assumed to get {self.imbalance:g} times its share of the tokens")
        return self.builder.build(self.graph.outputs, (*self.graph.notes, *notes))

    def _insert(self, local: Op, op: Op) -> None:
        self.builder.insert(local, [self.graph.tensors[name].dtype for name in op.outputs])

    def _enter(self, op: Op, name: str) -> None:
        """Add an argument; the parameters of experts have those of this device only."""
        tensor = self.graph.tensors[name]
        if tensor.role is None or name in self.builder.tensors:
            return
        shape = tensor.shape
        if op.id in self.inside:
            local = self._local(op)
            shape = local.shape(local.operands[op.inputs.index(name)])
        self.builder.argument(name, shape, tensor.role, tensor.dtype, is_frozen=tensor.is_frozen)

    def _attributes(self, op: Op) -> tuple[tuple[str, int | float | str | tuple[int, ...]], ...]:
        has_parameter = any(self.graph.tensors[name].role is Role.PARAMETER for name in op.inputs)
        return (*op.attributes, (DIVIDED_OVER, EXPERT_AXIS)) if has_parameter and self.ep > 1 else op.attributes

    def _local(self, op: Op) -> Rule:
        """The rule of an op of experts: its device's experts, the batches of all ep devices, lengthened rows."""
        experts, batch, rows = names = tuple(followed_factors(op, places) for places in self.places)
        key = (id(op.rule), names)
        if key in self.rules:
            return self.rules[key]

        def local(factor: Factor) -> Factor:
            size = factor.size // self.ep if factor.name in experts else factor.size
            size = size * self.ep if factor.name in batch else size
            return replace(factor, size=self._lengthened(size) if factor.name in rows else size)

        self.rules[key] = Rule(op.rule.operands, op.rule.results, tuple(map(local, op.rule.factors)))
        return self.rules[key]

    def _lengthened(self, rows: int) -> int:
        # A product such as 1.1 * 10 may lie a little above the whole number that is meant.
        return math.ceil(round(rows * self.imbalance, 6))

    def _with_rows(self, op: Op, dims: Dims) -> Rule:
        """The rule of an op at either end, with lengthened rows; `dims` are those of the rows of experts."""
        rows = frozenset(dims[2].factors)
        factors = tuple(
            replace(factor, size=self._lengthened(factor.size)) if factor.name in rows else factor
            for factor in op.rule.factors
        )
        return Rule(op.rule.operands, op.rule.results, factors)

    def _send(self, op: Op) -> None:
        """Add the routing of a device's own tokens, and the all-to-all to the owners of the experts."""
        rule = self._with_rows(op, op.rule.results[0])
        if self.ep == 1:
            self._insert(replace(op, rule=rule), op)
            return
        (name,) = op.outputs
        self._insert(replace(op, rule=rule, outputs=(f"{name}:sent",)), op)
        there = self._exchange(rule, rule.results[0])
        exchange = collective_op("all_to_all", EXPERT_AXIS, there, f"{name}:sent", name, op)
        self.builder.insert(exchange, [self.graph.tensors[name].dtype])

    def _return(self, op: Op) -> None:
        """Add the all-to-all back, and what a device makes of the answers for its tokens."""
        rule = self._with_rows(op, op.rule.operands[0])
        if self.ep == 1:
            self._insert(replace(op, rule=rule), op)
            return
        rows, returned = op.inputs[0], self.builder.unused(f"{op.inputs[0]}:returned")
        there = self._exchange(rule, rule.operands[0])
        back = Rule(there.results, there.operands, there.factors)
        exchange = collective_op("all_to_all", EXPERT_AXIS, back, rows, returned, op)
        self.builder.insert(exchange, [self.graph.tensors[rows].dtype])
        self._insert(replace(op, rule=rule, inputs=(returned, *op.inputs[1:])), op)

    def _exchange(self, rule: Rule, dims: Dims) -> Rule:
        """From all experts of a device's own batch to its own experts for the batches of all devices."""
        # A device holds one of ep batches before: seen from all of them, its batch is a part of theirs.
        sizes = {name: rule.size(name) * (self.ep if name in dims[1].factors else 1) for name in factor_names(dims)}
        factors = tuple(replace(rule.factor(name), size=size) for name, size in sizes.items())
        identity = Rule((dims,), (dims,), factors)
        return self.builder.shared(
            regrouped(identity, self.ep, gathered=dims[1].factors[0], divided=dims[0].factors[0])
        )


def _ops_of_experts(forward: tuple[Op, ...]) -> frozenset[str]:
    """The ops between sending tokens to experts and combining the answers."""
    routed: set[str] = set()
    inside: set[str] = set()
    for op in forward:
        if op.function == "dispatch":
            routed.update(op.outputs)
        elif op.function != "combine" and routed.intersection(op.inputs):
            routed.update(op.outputs)
            inside.add(op.id)
    return frozenset(inside)
