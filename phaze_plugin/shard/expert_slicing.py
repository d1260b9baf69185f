"""Expert parallelism: the forward ops that one device runs when experts are divided over ep devices.

Each device routes its own tokens, sends the copies of each to the owners of the chosen experts, runs its own experts on
what the ep devices sent, and gets the results back: two all-to-alls on the mesh axis `expert`, whose gradients are two
more. Of the rows of experts [expert, batch, row, hidden] a device first has all experts of its own batch, then its own
experts for the batches of all ep devices; its experts are every ep-th one. Routers and shared experts are as before.

A model's family names the op that sends tokens (`dispatch`); in captured models the one that does is marked
(`EXPERT_DIM`). The ops behind it belong to experts as long as experts and samples are dimensions of all they make.

Experts get equal shares of the tokens. `imbalance` is how many times its share the fullest one gets, by which all rows
are lengthened: an assumption about the router, stated by whoever asks (1.0 by default).

A tensor-parallel axis beside this one divides a device's experts further, or cuts each of them: `shard/` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from phaze.errors import ShardError
from phaze.ir import Factor, Graph, GraphBuilder, Op, Phase, Role, Rule, Tensor
from phaze.ir.factor_following import Piece, Pieces, follow_pieces, followed_factors, pieces_of
from phaze.ir.op import EXPERT_DIM
from phaze.ir.rule import factor_names
from phaze.shard.mesh_axes import COPIES, EXPERT_AXIS, collective_op, nearest_divisors, regrouped

__all__ = ["DIVIDED_OVER", "expert_counts", "expert_dims", "slice_experts"]

DIVIDED_OVER = "divided_over"
"""The attribute of ops whose parameters are divided over the devices of a mesh axis."""


def expert_counts(graph: Graph) -> dict[str, int]:
    """How many experts each op has that sends tokens to experts, by its id."""
    sent = {op.id: _sent(op) for op in graph.ops_of(Phase.FORWARD)}
    return {name: places[0][2] for name, places in sent.items() if places is not None}


def expert_dims(graph: Graph) -> dict[str, int]:
    """The parameters that are divided over the devices of experts, each with its dimension that counts experts."""
    if not expert_counts(graph):
        return {}
    regions = _Regions(graph.ops_of(Phase.FORWARD), graph.tensors)
    return {
        name: dim
        for name, pieces in regions.places[0].items()
        if graph.tensors[name].role is Role.PARAMETER
        for dim, _, _ in pieces
    }


def _sent(op: Op) -> tuple[Piece, Piece, Piece | None] | None:
    """Where in its result an op that sends tokens has experts, samples and rows; None for any other op.

    The rows of captured mixtures are what their authors made them, and no share that could be lengthened.
    """
    if op.function == "dispatch":
        shape = op.rule.shape(op.rule.results[0])
        return (0, 1, shape[0]), (1, 1, shape[1]), (2, 1, shape[2])
    dim = op.attribute(EXPERT_DIM)
    if not isinstance(dim, int):
        return None
    pieces = pieces_of(op.rule, op.rule.results[0])
    experts = [piece for name, piece in pieces if piece[0] == dim and not op.rule.factor(name).is_batch]
    batch = [piece for name, piece in pieces if op.rule.factor(name).is_batch]
    return (experts[0], batch[0], None) if len(experts) == 1 == len(batch) else None


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
            "a mixture that was captured from its code is recognised by modules that take tokens, chosen experts and "
            "weights, with parameters that count experts first: plan others from their config (for Hugging Face models "
            "model.config.to_dict()), which names the same parameters."
        )
    for name, count in counts.items():
        if count % ep:
            raise ShardError(
                f"ep={ep} does not divide the {count} experts of op {name!r}; {nearest_divisors(count, ep)}."
            )
    return _ExpertSlicer(graph, ep, imbalance).run()


class _Regions:
    """The ops of experts: those behind the sending of tokens, up to the ops that do not keep experts apart.

    Attributes:
        views: what is made of parameters alone.
        inside: the ids of these ops.
        made: the tensors that they make, and those that are sent.
        places: where experts, samples and rows lie in each tensor between the two exchanges.
    """

    def __init__(self, forward: tuple[Op, ...], tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.views = self._views_of_parameters(forward)
        self.inside: set[str] = set()
        self.made: set[str] = set()
        sent = {op.outputs[0]: places for op in forward if (places := _sent(op)) is not None}
        known: list[Pieces] = [{}, {}]
        for op in forward:
            if op.outputs[0] in sent:
                for pieces, piece in zip(known, sent[op.outputs[0]], strict=False):
                    pieces[op.outputs[0]] = set() if piece is None else {piece}
                self.made.add(op.outputs[0])
            elif not self.made.isdisjoint(op.inputs) and self._keeps_experts_apart(op, known):
                self.inside.add(op.id)
                self.made.update(op.outputs)
        self._take_views(forward)
        members = [op for op in forward if op.id in self.inside]
        self.places: list[Pieces] = [
            follow_pieces(members, {name: {piece} for name, places in sent.items() if (piece := places[kind])})
            for kind in range(3)
        ]

    def _views_of_parameters(self, forward: tuple[Op, ...]) -> set[str]:
        """What is made of parameters alone, such as their transposes."""
        made = {tensor.id for tensor in self.tensors.values() if tensor.role is Role.PARAMETER}
        parameters = set(made)
        for op in forward:
            if op.inputs and made.issuperset(op.inputs):
                made.update(op.outputs)
        return made - parameters

    def _take_views(self, forward: tuple[Op, ...]) -> None:
        """Count the ops among those of experts that make what these read of parameters alone."""
        wanted = {name for op in forward if op.id in self.inside for name in op.inputs} & self.views
        for op in reversed(forward):
            if not wanted.isdisjoint(op.outputs):
                self.inside.add(op.id)
                self.made.update(op.outputs)
                wanted.update(self.views.intersection(op.inputs))

    def _keeps_experts_apart(self, op: Op, known: list[Pieces]) -> bool:
        """Whether experts and samples are dimensions of all that an op makes, and of all that it is given with both.

        `known` are the pieces of experts and samples in what was made before; those of this op are added.
        """
        given = [(name, dims) for name, dims in zip(op.inputs, op.rule.operands, strict=True) if name in self.made]
        names = [
            {factor for name, dims in given for factor, piece in pieces_of(op.rule, dims) if piece in pieces[name]}
            for pieces in known
        ]
        others = [
            dims
            for name, dims in zip(op.inputs, op.rule.operands, strict=True)
            if name not in self.made and self.tensors[name].role is None and name not in self.views
        ]
        held = [[not names[kind].isdisjoint(factor_names(dims)) for kind in (0, 1)] for dims in others]
        if any(has_experts != has_batch for has_experts, has_batch in held):
            return False
        if not all(not names[kind].isdisjoint(factor_names(dims)) for kind in (0, 1) for dims in op.rule.results):
            return False
        for name, dims in zip(op.outputs, op.rule.results, strict=True):
            for pieces, followed in zip(known, names, strict=True):
                pieces[name] = {piece for factor, piece in pieces_of(op.rule, dims) if factor in followed}
        return True


class _ExpertSlicer:
    """Writes the local ops; between sending and returning, factors of experts, batch and rows have other sizes."""

    def __init__(self, graph: Graph, ep: int, imbalance: float) -> None:
        self.graph, self.ep, self.imbalance = graph, ep, imbalance
        self.forward = graph.ops_of(Phase.FORWARD)
        self.regions = _Regions(self.forward, graph.tensors)
        self.inside, self.places = self.regions.inside, self.regions.places
        self.builder = GraphBuilder(graph.name, micro_batch_size=graph.micro_batch_size)
        self.rules: dict[object, Rule] = {}
        self.exchanged: dict[str, str] = {}
        chosen = [op.rule.shape(op.rule.operands[1])[-1] for op in self.forward if op.function == "dispatch"]
        self.copies = ((COPIES, chosen[0]),) if chosen else ()

    def run(self) -> Graph:
        for op in self.forward:
            for name in op.inputs:
                self._enter(op, name)
            if op.id in self.inside:
                inputs = tuple(self._sent_along(op, name) for name in op.inputs)
                local = replace(op, rule=self._local(op), inputs=inputs, attributes=self._attributes(op))
                self._insert(local, op)
                continue
            inputs = tuple(self._returned(op, name) for name in op.inputs)
            written = replace(op, rule=self._with_rows(op), inputs=inputs)
            if _sent(op) is None or self.ep == 1:
                self._insert(written, op)
            else:
                self._insert(replace(written, outputs=(f"{op.outputs[0]}:sent",)), op)
                self._exchange(op, op, f"{op.outputs[0]}:sent", op.outputs[0], is_return=False)
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

    def _with_rows(self, op: Op) -> Rule:
        """The rule of an op that makes or reads rows of experts, with these lengthened."""
        around = (*zip(op.inputs, op.rule.operands, strict=True), *zip(op.outputs, op.rule.results, strict=True))
        rows = {
            factor
            for name, dims in around
            if name in self.regions.made
            for factor, piece in pieces_of(op.rule, dims)
            if piece in self.places[2].get(name, ())
        }
        if not rows or self.imbalance == 1:
            return op.rule
        factors = tuple(
            replace(factor, size=self._lengthened(factor.size)) if factor.name in rows else factor
            for factor in op.rule.factors
        )
        return Rule(op.rule.operands, op.rule.results, factors)

    def _sent_along(self, op: Op, name: str) -> str:
        """What an op of experts reads: something of other ops that has experts and samples is sent as well."""
        producer = self.graph.producer(name)
        is_own = name in self.regions.made or producer is None or not self.places[0].get(name)
        if is_own or self.ep == 1:
            return name
        if name not in self.exchanged:
            self.exchanged[name] = self.builder.unused(f"{name}:sent")
            assert producer is not None
            self._exchange(producer, op, name, self.exchanged[name], is_return=False)
        return self.exchanged[name]

    def _returned(self, op: Op, name: str) -> str:
        """What another op reads: rows of experts come back to the owners of their tokens first."""
        producer = self.graph.producer(name)
        if self.ep == 1 or producer is None or producer.id not in self.inside:
            return name
        if name not in self.exchanged:
            self.exchanged[name] = self.builder.unused(f"{name}:returned")
            self._exchange(producer, op, name, self.exchanged[name], is_return=True)
        return self.exchanged[name]

    def _exchange(self, producer: Op, op: Op, source: str, result: str, *, is_return: bool) -> None:
        """Add an all-to-all: from all experts of a device's own batch to its own experts for all batches, or back.

        `producer` makes what is exchanged, and `op` is the one to which the exchange belongs.
        """
        name = result if result in producer.outputs else source
        rule, dims = self._with_rows(producer), producer.rule.results[producer.outputs.index(name)]
        held = pieces_of(producer.rule, dims)
        experts, batch = (
            [factor for factor, piece in held if piece in self.places[kind].get(name, ())] for kind in (0, 1)
        )
        if len(experts) != 1 or len(batch) != 1:
            raise ShardError(f"ep={self.ep}: what op {producer.id!r} makes cannot be sent to experts. Use ep=1.")
        # A device holds one of ep batches before: seen from all of them, its batch is a part of theirs.
        sizes = {factor: rule.size(factor) * (self.ep if factor in batch else 1) for factor in factor_names(dims)}
        factors = tuple(replace(rule.factor(factor), size=size) for factor, size in sizes.items())
        identity = Rule((dims,), (dims,), factors)
        there = self.builder.shared(regrouped(identity, self.ep, gathered=batch[0], divided=experts[0]))
        if is_return:
            there = Rule(there.results, there.operands, there.factors)
        exchange = collective_op("all_to_all", EXPERT_AXIS, there, source, result, op, self.copies)
        self.builder.insert(exchange, [self.graph.tensors[name].dtype])
