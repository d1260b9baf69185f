"""Attention whose keys serve several query heads each, where a trace repeats the keys for them beforehand.

Hugging Face's models repeat keys and values only while they are traced, because they make masks then: in training the
kernel takes keys as they are (`enable_gqa`). Models written by hand repeat them in front of a kernel without a mask. In
both cases a device of a context sends keys and values as they were before. `with_grouped_keys` therefore lets such an
attention read what was repeated, and its backward return the gradient of that:

    k [b, g, t, d]   reshape, expand to [b, g, r, t, d], copy, reshape to [b, (g r), t, d]  ->  attention
    gradient         of k [b, (g r), t, d]  reshape to [b, g, r, t, d], sum over r, reshape  ->  [b, g, t, d]

An attention with a mask that is read from memory is left alone: there the kernel reads repeated keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phaze.ir import Dim, Dims, Factor, Graph, Op, OpKind, Phase, Rule

__all__ = ["with_grouped_keys"]

_HEADS = 1
"""The dimension of heads of an operand, [batch, heads, positions, width]."""

_HEAD, _MEMBER = "g", "r"
"""Factors of query heads in an attention's rule: heads that have keys of their own, and those that share one."""

_REPEATING = (("reshape", "expand", "contiguous", "reshape"), ("reshape", "expand", "reshape"), ("expand",))
"""Functions that repeat keys, in the order in which they run: a copy is only made where memory asks for one, and keys
of one head are only stretched."""

_SUMMING = (("reshape", "sum", "reshape"), ("reshape", "sum"), ("sum",))
"""Functions that sum the gradient of repeated keys."""

_Readers = Mapping[str, Sequence[Op]]
"""The ops that read each tensor."""


@dataclass(frozen=True, slots=True)
class _Chain:
    """Ops one behind the other, the last of which nothing else than the next one reads."""

    ops: tuple[Op, ...]

    @property
    def source(self) -> str:
        """What the first op reads."""
        return self.ops[0].inputs[0]

    @property
    def result(self) -> str:
        """What the last op makes."""
        return self.ops[-1].outputs[0]


def with_grouped_keys(graph: Graph) -> Graph:
    """The graph whose attentions read keys and values before they are repeated; itself where none repeats them."""
    readers: dict[str, list[Op]] = {}
    for op in graph.ops:
        for name in op.inputs:
            readers.setdefault(name, []).append(op)
    changed: dict[str, Op] = {}
    left_out: set[str] = set()
    for op in graph.ops_of(Phase.FORWARD):
        if op.kind is OpKind.ATTENTION and len(op.inputs) == len(op.rule.operands) == 3:
            _regroup(graph, op, readers, changed, left_out)
    if not changed:
        return graph
    ops = [changed.get(op.id, op) for op in graph.ops if op.id not in left_out]
    made = {name for op in ops for name in op.outputs}
    tensors = {name: tensor for name, tensor in graph.tensors.items() if name in made or tensor.role is not None}
    return replace(graph, ops=tuple(ops), tensors=tensors)


def _regroup(graph: Graph, op: Op, readers: _Readers, changed: dict[str, Op], left_out: set[str]) -> None:
    """Add the attention and its backward as they are to be, and the ops that go, where both can be rewritten."""
    repeating = [_chain_to(graph, name) for name in op.inputs[1:]]
    backward = next((other for other in readers[op.outputs[0]] if other.kind is OpKind.ATTENTION), None)
    names = () if backward is None else backward.outputs[1:]
    summing = [_chain_from(name, readers) for name in names]
    shapes = {graph.tensors[chain.source].shape for chain in repeating if chain is not None}
    made = {graph.tensors[chain.result].shape for chain in summing if chain is not None}
    whole = graph.tensors[op.inputs[1]].shape
    is_known = None not in repeating and None not in summing and len(shapes) == 1 and made <= shapes
    if not is_known or not _is_repeated(next(iter(shapes)), whole):
        return
    groups = next(iter(shapes))[_HEADS]
    chains = [chain for chain in (*repeating, *summing) if chain is not None]
    keys = tuple(chain.source for chain in chains[:2])
    changed[op.id] = replace(op, inputs=(op.inputs[0], *keys), rule=_grouped_rule(op, groups))
    mine = {op.id}
    if backward is not None:
        changed[backward.id] = replace(
            backward,
            inputs=(backward.inputs[0], *keys, *backward.inputs[3:]),
            outputs=(backward.outputs[0], *(chain.result for chain in chains[2:])),
            rule=_grouped_rule(backward, groups),
        )
        mine.add(backward.id)
        left_out.update(op.id for chain in chains[2:] for op in chain.ops)
    for chain in chains[:2]:
        left_out.update(_unread(chain, readers, mine))


def _is_repeated(source: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a tensor differs from another one by fewer heads alone, which divide those."""
    if len(source) != len(whole) or source[_HEADS] >= whole[_HEADS] or whole[_HEADS] % source[_HEADS]:
        return False
    return (*source[:_HEADS], *source[_HEADS + 1 :]) == (*whole[:_HEADS], *whole[_HEADS + 1 :])


def _chain_to(graph: Graph, name: str) -> _Chain | None:
    """The ops that repeat heads for a tensor."""
    for functions in _REPEATING:
        ops: list[Op] = []
        for function in reversed(functions):
            op = graph.producer(ops[0].inputs[0] if ops else name)
            if op is None or op.function != function or op.kind not in (OpKind.VIEW, OpKind.COPY):
                break
            ops.insert(0, op)
        else:
            expand = next(op for op in ops if op.function == "expand")
            shape = graph.tensors[expand.outputs[0]].shape
            stretched = graph.tensors[expand.inputs[0]].shape
            # (b g r t d), of which only r is stretched: heads that share a key are neighbours; or (b r t d).
            member = _HEADS + (len(ops) > 1)
            is_stretched = len(shape) == 4 + (len(ops) > 1) and len(shape) == len(stretched) and stretched[member] == 1
            if is_stretched and _without(shape, member) == _without(stretched, member):
                return _Chain(tuple(ops))
    return None


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _chain_from(name: str, readers: _Readers) -> _Chain | None:
    """The ops that sum the gradient of repeated heads."""
    for functions in _SUMMING:
        ops: list[Op] = []
        for function in functions:
            following = readers.get(ops[-1].outputs[0] if ops else name, ())
            if len(following) != 1 or following[0].function != function:
                break
            ops.append(following[0])
        else:
            return _Chain(tuple(ops))
    return None


def _unread(chain: _Chain, readers: _Readers, gone: set[str]) -> set[str]:
    """The ids of the ops of a chain that nothing reads any more, when those that are `gone` do not."""
    gone, left_out = set(gone), set[str]()
    for op in reversed(chain.ops):
        if any(reader.id not in gone for name in op.outputs for reader in readers.get(name, ())):
            break
        gone.add(op.id)
        left_out.add(op.id)
    return left_out


def _grouped_rule(op: Op, groups: int) -> Rule:
    """The rule of an attention, forward or backward, whose keys and values have so many heads.

    The factor of heads is taken apart, and keys, values and their gradients lose the heads that share theirs.
    """
    rule = op.rule
    (head,) = rule.operands[0][_HEADS].factors
    size = rule.size(head)
    factors = [
        part
        for factor in rule.factors
        for part in (
            (replace(factor, name=_HEAD, size=groups), Factor(_MEMBER, size // groups))
            if factor.name == head
            else (factor,)
        )
    ]

    def renamed(dims: Dims, *, is_key: bool) -> Dims:
        heads = Dim((_HEAD,)) if is_key else Dim((_HEAD, _MEMBER))
        return tuple(heads if dim.factors == (head,) else dim for dim in dims)

    operands = tuple(renamed(dims, is_key=index in (1, 2)) for index, dims in enumerate(rule.operands))
    is_backward = op.phase is Phase.BACKWARD
    results = tuple(renamed(dims, is_key=is_backward and index in (1, 2)) for index, dims in enumerate(rule.results))
    return Rule(operands, results, tuple(factors))
