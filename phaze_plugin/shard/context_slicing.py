"""Context parallelism: the forward ops that one of cp devices runs when every sequence is split over them.

Each op is sliced along one sequence factor, and so is every tensor; parameters stay whole. Devices then compute like
copies in data parallelism, each on positions of its own: a loss is that of a device's own tokens, and the gradients of
parameters are sums over all devices that placement reduces. Only where an op needs more than its own positions devices
exchange something, on the mesh axis `context`:

  keys and values of attention   gathered; their gradients are reduced and scattered (`KeyExchange`)
  sums over positions            reduced on all devices (`_reduce`); scalars, such as losses, are left as they are
  few positions of many          gathered (`_gather`): the first token that a classifier reads

Gathered keys are not kept: backward gathers them again (`gather_again`), where the software can; in a ring they always
go around again. Where attention is causal, every device has an
early and a late part of the sequence (of 2 cp parts device k has parts k and 2 cp - 1 - k), so that all do equal work:
a sliced attention sees the same share of its keys as the whole one. Which positions they are changes no size.

What would need neighbouring positions (convolutions along the sequence, shifts of activations) or all of them in order
(scans) is refused by name. On what no parameter takes part in (ids, labels, masks) such ops run whole on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from phaze.cost.off_chip_traffic import BALANCED_OVER
from phaze.errors import ShardError
from phaze.ir import Dim, Dims, FactorKind, Graph, GraphBuilder, Op, OpKind, Phase, Role, Rule, Tensor
from phaze.ir.factor_following import token_lengths
from phaze.ir.graph_builder import elementwise_rule
from phaze.ir.rule import factor_names, names_of
from phaze.shard.layout import ROUTED
from phaze.shard.mesh_axes import CONTEXT_AXIS, EXCHANGE, RING, collective_op, is_ring, nearest_divisors, regrouped

__all__ = ["KeyExchange", "can_exchange_heads", "gather_again", "key_attentions", "query_positions", "slice_context"]


class KeyExchange(StrEnum):
    """How the keys and values of an attention meet the queries of all devices.

    GATHER: keys and values are all-gathered before the product (Llama 3, arXiv:2407.21783, section 3.3.2).
    RING: they go around in cp - 1 steps, each behind the product with the block before (arXiv:2310.01889). Only fused
        attention can take them block by block.
    HEADS: an all-to-all of queries, keys and values gives each device some heads of the whole sequence, and another one
        of the results brings the positions back (arXiv:2309.14509). Fused attention only, and cp must divide the key
        heads.
    """

    GATHER = "all_gather"
    RING = RING
    HEADS = "all_to_all"


Location = tuple[int, int]
"""Where a factor lies in a tensor: its dimension, and the product of the factors before it there."""


def slice_context(graph: Graph, cp: int, exchanges: Mapping[str, KeyExchange] | None = None) -> Graph:
    """The forward ops of one of cp devices; `exchanges` says how each attention gets its keys, by op, else gathered.

    Raises ShardError where the graph has no sequences, cp does not divide one, or an op cannot be sliced.
    """
    _check_lengths(graph, cp)
    return _ContextSlicer(graph, cp, exchanges or {}).run()


def _check_lengths(graph: Graph, cp: int) -> None:
    """Raise ShardError where the sequences of a graph cannot be split evenly."""
    lengths = token_lengths(graph)
    if not lengths:
        raise ShardError(
            f"model {graph.name!r} has no sequence that cp={cp} could split: no integer input [batch, positions] "
            "reaches its ops; use cp=1."
        )
    for name, length in lengths.items():
        if length % cp:
            whole = graph.tensors[name].shape[1]
            left = "" if whole == length else f" that the model uses of {whole}"
            advice = nearest_divisors(length, cp)
            if whole % cp == 0 and whole == length + 1:
                advice = f"compare all {whole} positions with labels that are shifted outside and padded, or use cp=1"
            raise ShardError(f"cp={cp} does not divide the {length} positions of {name!r}{left}; {advice}.")


def key_attentions(graph: Graph) -> list[Op]:
    """The fused attentions whose queries and keys lie along sequences."""
    return [op for op in graph.ops_of(Phase.FORWARD) if _attends_along_sequences(op)]


def _attends_along_sequences(op: Op) -> bool:
    if op.kind is not OpKind.ATTENTION or query_positions(op) is None:
        return False
    return any(op.rule.factor(name).is_sequence for name in _key_positions(op))


def can_exchange_heads(op: Op, cp: int, tp: int = 1) -> bool:
    """Whether an attention's heads can be divided over cp devices, beside tp ones."""
    return _exchanged_heads(op, cp * tp) is not None


def query_positions(op: Op) -> str | None:
    """The factor of a fused attention along which queries lie; None where they lie along no sequence."""
    return next(iter(_sequence_of(op.rule, op.rule.operand_names[0] - op.rule.operand_names[1])), None)


def _key_positions(op: Op) -> frozenset[str]:
    """The factors of a fused attention along which keys lie."""
    query, key, value = (names_of(dims) for dims in op.rule.operands[:3])
    return (key & value) - query


def _exchanged_heads(op: Op, ways: int) -> str | None:
    """The factor of heads that so many devices divide; None where there is none, or an operand has heads alone."""
    rule = op.rule
    query, key, value = (names_of(dims) for dims in rule.operands[:3])
    shared = [factor for factor in rule.factors if factor.name in query & key & value and not factor.is_batch]
    head = next((factor.name for factor in shared if factor.size % ways == 0), None)
    if head is None or any(head in names and not _sequence_of(rule, names) for names in rule.operand_names):
        return None
    return head


def _sequence_of(rule: Rule, names: frozenset[str]) -> list[str]:
    return [factor.name for factor in rule.factors if factor.is_sequence and factor.name in names]


def _location(rule: Rule, dims: Dims, names: frozenset[str]) -> Location | None:
    """Where the first of some factors lies in a tensor; None where it has none of them."""
    for index, dim in enumerate(dims):
        start = 1
        for name in dim.factors:
            if name in names:
                return (index, start)
            start *= rule.size(name)
    return None


def _name_at(rule: Rule, dims: Dims, location: Location) -> str | None:
    """The sequence factor at a place of a tensor."""
    return next(
        (name for name in _sequence_of(rule, names_of(dims)) if _location(rule, dims, frozenset({name})) == location),
        None,
    )


@dataclass(frozen=True, slots=True)
class _Analysis:
    """What is known of the ops before they are sliced.

    `learned` are the tensors that depend on a parameter; `whole` the ops that run whole on every device; `normalized`
    the places of tensors with several sequence factors along which a softmax will run.
    """

    learned: frozenset[str]
    whole: frozenset[str]
    normalized: frozenset[tuple[str, Location]]

    @classmethod
    def of(cls, graph: Graph, forward: Sequence[Op]) -> _Analysis:
        learned = {tensor.id for tensor in graph.parameters}
        for op in forward:
            if learned.intersection(op.inputs):
                learned.update(op.outputs)
        whole, wanted_whole = set[str](), set[str]()
        normalized: set[tuple[str, Location]] = set()
        for op in reversed(forward):
            if not learned.intersection(op.outputs) and (
                wanted_whole.intersection(op.outputs) or _why_whole(op, _sequence_of(op.rule, _all_names(op)))
            ):
                whole.add(op.id)
                wanted_whole.update(op.inputs)
            keys = _normalized_factors(op, normalized)
            for name, dims in zip(op.inputs, op.rule.operands, strict=True):
                if len(_sequence_of(op.rule, names_of(dims))) > 1:
                    places = (_location(op.rule, dims, frozenset({key})) for key in keys)
                    normalized.update((name, place) for place in places if place is not None)
        return cls(frozenset(learned), frozenset(whole), frozenset(normalized))


def _all_names(op: Op) -> frozenset[str]:
    return frozenset(factor.name for factor in op.rule.factors)


def _normalized_factors(op: Op, normalized: set[tuple[str, Location]] | frozenset[tuple[str, Location]]) -> set[str]:
    """The sequence factors of an op along which a softmax runs, here or in what reads its results."""
    names = {factor.name for factor in op.rule.factors if factor.is_sequence and factor.kind is FactorKind.NORMALIZED}
    for tensor, dims in zip(op.outputs, op.rule.results, strict=True):
        for name in _sequence_of(op.rule, names_of(dims)):
            if (tensor, _location(op.rule, dims, frozenset({name}))) in normalized:
                names.add(name)
    return names


def _why_whole(op: Op, names: Sequence[str]) -> str:
    """Why an op cannot be sliced along its sequence factors; empty where it can."""
    in_part = {name for dims in op.rule.tensors() for dim in dims if dim.size is not None for name in dim.factors}
    if in_part.intersection(names):
        return "reads positions beside its own" if op.kind is OpKind.CONVOLUTION else "takes a part of the positions"
    if op.function in ROUTED:
        return ""
    for name in names:
        kind = op.rule.factor(name).kind
        if kind in (FactorKind.WHOLE, FactorKind.SERIAL):
            return "needs all positions in order"
        if kind is FactorKind.LOOKUP:
            return "picks positions"
    return ""


def _why_gathered(op: Op) -> str:
    """What an op does with a sequence of which it does not see the positions as a factor."""
    if op.kind is OpKind.CONVOLUTION:
        return "reads positions beside its own"
    is_part = any(dim.size is not None for dims in op.rule.tensors() for dim in dims)
    return "takes a part of the positions" if is_part else "reads all positions"


def _is_pick(op: Op, graph: Graph, cp: int) -> bool:
    """Whether an op takes a few positions of many: what it makes is no larger than a device's part of what it reads."""
    made = max(graph.tensors[name].elements for name in op.outputs)
    return bool(op.inputs) and made * cp <= graph.tensors[op.inputs[0]].elements


class _ContextSlicer:
    """Writes the local ops; `held` says where each tensor that was written so far is split, None for whole ones."""

    def __init__(self, graph: Graph, cp: int, exchanges: Mapping[str, KeyExchange]) -> None:
        self.graph, self.cp, self.exchanges = graph, cp, exchanges
        self.forward = graph.ops_of(Phase.FORWARD)
        self.known = _Analysis.of(graph, self.forward)
        self.builder = GraphBuilder(graph.name, micro_batch_size=graph.micro_batch_size)
        self.held: dict[str, Location | None] = {}
        self.forms: dict[tuple[str, Location | None, str], str] = {}
        self.rules: dict[tuple[int, frozenset[str]], Rule] = {}

    def run(self) -> Graph:
        for op in self.forward:
            if self.exchanges.get(op.id) is KeyExchange.HEADS:
                self._exchange_heads(op)
            else:
                self._write(op, self._split_factors(op))
        outputs = [name for name in self.graph.outputs if name in self.held]
        note = f"sequences sliced {self.cp} ways along mesh axis {CONTEXT_AXIS}"
        return self.builder.build(outputs, (*self.graph.notes, note))

    def _split_factors(self, op: Op) -> frozenset[str]:
        """The sequence factors along which an op is sliced: one, or those of tokens and of routed rows."""
        names = _sequence_of(op.rule, _all_names(op))
        if not names or op.id in self.known.whole:
            return frozenset()
        if op.function in ROUTED:
            return frozenset(names)
        if len(names) > 1:
            keys = _normalized_factors(op, self.known.normalized)
            keys |= _key_positions(op) if op.kind is OpKind.ATTENTION else frozenset()
            names = [name for name in names if name not in keys]
            names = [name for name in names if name in op.rule.result_names[0]] or names
            names = [name for name in names if self._is_held_along(op, name)] or names
        if not names or op.rule.factor(names[0]).kind is FactorKind.NORMALIZED:
            raise self._refusal(op, "normalizes over the sequence")
        reason = _why_whole(op, names[:1])
        if reason and not _is_pick(op, self.graph, self.cp):
            raise self._refusal(op, reason)
        return frozenset() if reason else frozenset(names[:1])

    def _is_held_along(self, op: Op, name: str) -> bool:
        """Whether the first operand is split along a factor."""
        place = _location(op.rule, op.rule.operands[0], frozenset({name})) if op.inputs else None
        return place is not None and self.held.get(op.inputs[0]) == place

    def _refusal(self, op: Op, reason: str) -> ShardError:
        return ShardError(
            f"op {op.id!r} ({op.kind} {op.function}) {reason} along the sequence, which context parallelism does not "
            "exchange; use cp=1."
        )

    def _write(self, op: Op, names: frozenset[str]) -> None:
        """Add the local op, what brings its operands, and the reduction of a result that sums over positions."""
        local = self._local_rule(op.rule, names)
        inputs = [self._fetch(op, index, names) for index in range(len(op.inputs))]
        attributes = op.attributes
        if _attends_along_sequences(op):
            attributes = (*attributes, (EXCHANGE, self._exchange(op).value), (BALANCED_OVER, self.cp))
        summed = [names and not names.intersection(factors) for factors in op.rule.result_names]
        must_reduce = [
            bool(is_summed) and self.graph.tensors[name].elements > 1
            for is_summed, name in zip(summed, op.outputs, strict=True)
        ]
        if any(summed) and op.function == "max":
            raise self._refusal(op, "takes the largest")
        outputs = [f"{name}:local" if must else name for name, must in zip(op.outputs, must_reduce, strict=True)]
        self._insert(replace(op, rule=local, inputs=tuple(inputs), outputs=tuple(outputs), attributes=attributes), op)
        for name, dims, must in zip(op.outputs, op.rule.results, must_reduce, strict=True):
            if must:
                self._reduce(op, name, dims)
            self.held[name] = _location(op.rule, dims, names)

    def _local_rule(self, rule: Rule, names: frozenset[str]) -> Rule:
        """A rule with some factors divided by cp; ops of equal rules share one."""
        if not names:
            return rule
        key = (id(rule), names)
        if key not in self.rules:
            self.rules[key] = self.builder.shared(rule.local(dict.fromkeys(names, self.cp)))
        return self.rules[key]

    def _insert(self, local: Op, op: Op) -> None:
        self.builder.insert(local, [self.graph.tensors[name].dtype for name in op.outputs])

    def _exchange(self, op: Op) -> KeyExchange:
        return self.exchanges.get(op.id, KeyExchange.GATHER)

    def _reduce(self, op: Op, name: str, dims: Dims) -> None:
        """Add the sum of all devices' results; a mean of means where the op is a mean."""
        rule = Rule((dims,), (dims,), tuple(replace(op.rule.factor(factor)) for factor in factor_names(dims)))
        extra = (("reduce", "mean"),) if op.function == "mean" else ()
        reduced = collective_op("all_reduce", CONTEXT_AXIS, rule, f"{name}:local", name, op, extra)
        self.builder.insert(reduced, [self.graph.tensors[name].dtype])

    def _fetch(self, op: Op, index: int, names: frozenset[str]) -> str:
        """The id under which an op reads an operand, split along some factors where it has one of them."""
        name, dims = op.inputs[index], op.rule.operands[index]
        wanted = _location(op.rule, dims, names)
        tensor = self.graph.tensors[name]
        if name not in self.held:
            self.held[name] = None if tensor.role is Role.PARAMETER else wanted
            self._enter(name, tensor, self.held[name])
        held = self.held[name]
        if held == wanted:
            return name
        mode = self._exchange(op).value if op.kind is OpKind.ATTENTION and index in (1, 2) else ""
        key = (name, wanted, mode)
        if key not in self.forms:
            if tensor.role is not None and tensor.role is not Role.PARAMETER:
                # What enters from outside can be dealt out in several forms.
                form = f"{name}:whole" if wanted is None else f"{name}:part{wanted[0]}"
                self.forms[key] = self._enter(form, tensor, wanted)
            else:
                whole = name if held is None else self._gather(op, name, dims, held, mode)
                self.forms[key] = whole if wanted is None else self._part(op, whole, dims, names)
        return self.forms[key]

    def _enter(self, name: str, tensor: Tensor, location: Location | None) -> str:
        """Add an argument, whole or this device's part of it."""
        shape = list(tensor.shape)
        if location is not None:
            shape[location[0]] //= self.cp
        role = tensor.role or Role.OTHER
        return self.builder.argument(name, shape, role, tensor.dtype, is_frozen=tensor.is_frozen)

    def _gather(self, op: Op, name: str, dims: Dims, held: Location, mode: str) -> str:
        """Add the all-gather of a tensor; refuse it where it is neither keys nor a few positions of many."""
        factor = _name_at(op.rule, dims, held)
        is_key = any(other.is_sequence for other in op.rule.factors if other.name != factor)
        is_affordable = is_key or name not in self.known.learned or _is_pick(op, self.graph, self.cp)
        if not is_affordable or (factor is None and held[1] > 1):
            raise self._refusal(op, _why_gathered(op))
        if factor is None:
            shape, factor = self.graph.tensors[name].shape, f"d{held[0]}"
            rule = elementwise_rule(shape, shape)
        else:
            rule = self._operand_rule(op, dims)
        gather = self.builder.shared(regrouped(rule, self.cp, gathered=factor))
        result = self.builder.unused(f"{name}:gathered")
        extra = ((EXCHANGE, mode),) if mode else ()
        gathered = collective_op("all_gather", CONTEXT_AXIS, gather, name, result, op, extra)
        return self.builder.insert(gathered, [self.graph.tensors[name].dtype])[0]

    def _part(self, op: Op, name: str, dims: Dims, names: frozenset[str]) -> str:
        """Add the view of this device's part of a whole tensor."""
        factors = tuple(
            replace(factor, size=-(-factor.size // self.cp) if factor.name in names else factor.size)
            for factor in op.rule.factors
            if factor.name in names_of(dims)
        )
        source = self.builder.tensors[name]
        whole = tuple(
            Dim(dim.factors, size) if names.intersection(dim.factors) else dim
            for dim, size in zip(dims, source.shape, strict=True)
        )
        result = self.builder.unused(f"{name}:part")
        producer = self.graph.producer(name)
        part = Op(
            id=result,
            kind=OpKind.VIEW,
            function="part",
            rule=Rule((whole,), (dims,), factors),
            inputs=(name,),
            outputs=(result,),
            module=op.module if producer is None else producer.module,
            attributes=(("axis", CONTEXT_AXIS),),
        )
        return self.builder.insert(part, [source.dtype])[0]

    def _exchange_heads(self, op: Op) -> None:
        """Add an attention on some heads of the whole sequence, with the exchanges before and after it."""
        head = _exchanged_heads(op, self.cp)
        if head is None:
            raise ShardError(
                f"op {op.id!r}: its key heads do not divide over cp={self.cp} devices, or it has an operand of heads "
                "without positions; exchange keys in another way."
            )
        inputs = [self._to_heads(op, index, head) for index in range(len(op.inputs))]
        rule = op.rule.local({head: self.cp})
        outputs = [f"{name}:heads" for name in op.outputs]
        attributes = (*op.attributes, (EXCHANGE, KeyExchange.HEADS.value))
        self._insert(replace(op, rule=rule, inputs=tuple(inputs), outputs=tuple(outputs), attributes=attributes), op)
        for name, dims in zip(op.outputs, op.rule.results, strict=True):
            (along,) = _sequence_of(op.rule, names_of(dims))
            exchange = regrouped(self._operand_rule(op, dims), self.cp, gathered=along, divided=head)
            back = Rule(exchange.results, exchange.operands, exchange.factors)
            self.builder.insert(
                collective_op("all_to_all", CONTEXT_AXIS, back, f"{name}:heads", name, op),
                [self.graph.tensors[name].dtype],
            )
            self.held[name] = _location(op.rule, dims, frozenset({along}))

    def _to_heads(self, op: Op, index: int, head: str) -> str:
        """An operand with some heads of the whole sequence; masks without heads are gathered."""
        dims = op.rule.operands[index]
        along = _sequence_of(op.rule, names_of(dims))
        if head not in names_of(dims) or len(along) != 1:
            return self._fetch(op, index, frozenset())
        source = self._fetch(op, index, frozenset(along))
        result = self.builder.unused(f"{op.inputs[index]}:heads")
        rule = regrouped(self._operand_rule(op, dims), self.cp, gathered=along[0], divided=head)
        exchange = collective_op("all_to_all", CONTEXT_AXIS, rule, source, result, op)
        return self.builder.insert(exchange, [self.graph.tensors[op.inputs[index]].dtype])[0]

    def _operand_rule(self, op: Op, dims: Dims) -> Rule:
        return Rule((dims,), (dims,), tuple(op.rule.factor(name) for name in factor_names(dims)))


def gather_again(graph: Graph, *, keeps_gathered: bool = False) -> Graph:
    """The graph with a second all-gather in backward for each gathered tensor that backward ops read.

    What is kept between forward and backward so stays a device's own part, and the second gather is paid. With
    `keeps_gathered` only what goes around in a ring does so again.
    """
    gathers = {
        op.outputs[0]: op
        for op in graph.ops_of(Phase.FORWARD)
        if op.kind is OpKind.COLLECTIVE and op.function == "all_gather" and op.attribute("axis") == CONTEXT_AXIS
        if is_ring(op) or not keeps_gathered
    }
    builder = GraphBuilder.from_graph(graph)
    builder.ops.clear()
    again: dict[str, str] = {}
    for op in graph.ops:
        if op.phase is Phase.BACKWARD:
            for name in op.inputs:
                if name in gathers and name not in again:
                    again[name] = f"{name}:again"
                    second = replace(
                        gathers[name],
                        id=again[name],
                        outputs=(again[name],),
                        phase=Phase.BACKWARD,
                        gradient_of=gathers[name].id,
                    )
                    builder.insert(second, [graph.tensors[name].dtype])
            op = replace(op, inputs=tuple(again.get(name, name) for name in op.inputs)) if again else op
        builder.ops.append(op)
    return builder.build(graph.outputs, graph.notes) if again else graph
