"""Make the program of one device whole again: every tensor at its full size, collectives and shards gone.

A partitioned module has the shapes of one device. Each dimension of a tensor there is 1/k of the whole one; k is known
for the arguments (their shardings say it) and follows for the others by the rules: a factor is divided alike in all
tensors of an op. A collective that gathers or scatters changes k, one that reduces does not, and a slice that starts
where a device's number says begins a division. `_Divisions.follow` passes the k of dimensions on, to and fro, until
nothing changes; what then is not known is not divided. Where two tensors divide a factor differently, or where devices
exchange parts in another way, there is no whole program to be told (`WholeProgramError`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from phaze.errors import GraphError
from phaze.frontends.stablehlo.symbols import CONSTANT_PREFIX
from phaze.ir import Dim, Dims, FactorKind, Graph, Op, OpKind, Rule
from phaze.ir.shape_rules import elementwise_rule

__all__ = ["WholeProgramError", "whole_program"]

MOST_SWEEPS = 40
"""Sweeps over the graph, to and fro: more than the turns that a division takes through the views of a model."""

_MOVES = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_slice", "cross-replica-sum"})
"""Collectives after which a tensor of the whole program is the same as before."""


class WholeProgramError(Exception):
    """The parts do not make a whole in a way that is known here; the text says why."""


def whole_program(graph: Graph, parts: Mapping[str, Sequence[int]]) -> Graph:
    """The graph of the whole program; `parts` has, for each argument that is divided or known not to be, the parts.

    Raises WholeProgramError.
    """
    divisions = _Divisions(graph, parts)
    divisions.follow()
    ops = tuple(divisions.whole_op(op) for op in graph.ops)
    shapes = {tensor_id: divisions.whole_shape(tensor_id) for tensor_id in graph.tensors}
    tensors = {tensor_id: replace(tensor, shape=shapes[tensor_id]) for tensor_id, tensor in graph.tensors.items()}
    try:
        return replace(graph, ops=ops, tensors=tensors)
    except GraphError as error:
        # Rules have no factor for a dimension of one element, such as one head a device.
        raise WholeProgramError("a dimension of which each device has one element cannot be followed") from error


class _Divisions:
    """Into how many parts each dimension of each tensor is divided, as far as it is known."""

    def __init__(self, graph: Graph, parts: Mapping[str, Sequence[int]]) -> None:
        self.graph = graph
        self.known: dict[tuple[str, int], int] = {}
        for tensor_id, counts in parts.items():
            self.known.update({(tensor_id, dim): count for dim, count in enumerate(counts)})

    def follow(self) -> None:
        for sweep in range(MOST_SWEEPS):
            before = len(self.known)
            for op in self.graph.ops if sweep % 2 == 0 else reversed(self.graph.ops):
                self._pass_through(op)
            if len(self.known) == before:
                return

    def _pass_through(self, op: Op) -> None:
        if _is_move(op):
            self._pass_through_move(op)
            return
        if op.kind is OpKind.COLLECTIVE:
            raise WholeProgramError(f"{op.function} exchanges parts between devices")
        factors = self.factors(op)
        for tensor_id, dims in zip((*op.inputs, *op.outputs), op.rule.tensors(), strict=True):
            for index, dim in enumerate(dims):
                if (tensor_id, index) in self.known or not dim.factors:
                    continue
                # A dimension of several factors is known once one of them is divided: only the others may be unknown.
                counts = [factors.get(name) for name in dim.factors]
                if all(count is not None for count in counts) or any(count not in (None, 1) for count in counts):
                    total = 1
                    for count in counts:
                        total *= count or 1
                    self.known[tensor_id, index] = total

    def factors(self, op: Op) -> dict[str, int]:
        """Into how many parts the factors of an op are divided, as far as the dimensions of its tensors say."""
        found: dict[str, int] = {}
        sides = list(zip((*op.inputs, *op.outputs), op.rule.tensors(), strict=True))
        for is_single in (True, False):
            for tensor_id, dims in sides:
                for index, dim in enumerate(dims):
                    count = self.known.get((tensor_id, index))
                    if count is None or (len(dim.factors) == 1) is not is_single or not dim.factors:
                        continue
                    if is_single:
                        self._agree(op, found, dim.factors[0], count)
                    else:
                        self._divide(op, found, dim, count)
        return found

    def _agree(self, op: Op, found: dict[str, int], name: str, count: int) -> None:
        if found.setdefault(name, count) != count:
            raise WholeProgramError(f"{op.id} reads a factor in {found[name]} parts and in {count}")

    def _divide(self, op: Op, found: dict[str, int], dim: Dim, count: int) -> None:
        """Divide a dimension of several factors: what known factors leave goes to the first other one."""
        for name in dim.factors:
            known = found.get(name, 1)
            if count % known:
                raise WholeProgramError(f"{op.id} divides a dimension in {count} parts and a factor of it in {known}")
            count //= known
        unknown = [name for name in dim.factors if name not in found]
        unknown.sort(key=lambda name: op.rule.factor(name).kind in (FactorKind.WHOLE, FactorKind.SERIAL))
        for index, name in enumerate(unknown):
            found[name] = count if index == 0 else 1
        if not unknown and count > 1:
            raise WholeProgramError(f"{op.id} divides a dimension in more parts than its factors")

    def _pass_through_move(self, op: Op) -> None:
        """What a collective or a shard's slice gathers or divides, both ways."""
        before, after = op.inputs[0], op.outputs[0]
        for dim, (small, large) in enumerate(zip(self._shape(before), self._shape(after), strict=True)):
            if (before, dim) in self.known and (after, dim) not in self.known:
                self.known[after, dim] = self._moved(op, self.known[before, dim], small, large)
            elif (after, dim) in self.known and (before, dim) not in self.known:
                self.known[before, dim] = self._moved(op, self.known[after, dim], large, small)

    def _moved(self, op: Op, count: int, size: int, new_size: int) -> int:
        if count * size % new_size:
            raise WholeProgramError(f"{op.id} does not move whole parts")
        return count * size // new_size

    def _shape(self, tensor_id: str) -> tuple[int, ...]:
        return self.graph.tensors[tensor_id].shape

    def whole_shape(self, tensor_id: str) -> tuple[int, ...]:
        shape = self._shape(tensor_id)
        return tuple(size * self.known.get((tensor_id, dim), 1) for dim, size in enumerate(shape))

    def whole_op(self, op: Op) -> Op:
        """The op on whole tensors; a collective, or a device's slice of a tensor, is a view of the same elements."""
        if _is_move(op):
            before, after = self.whole_shape(op.inputs[0]), self.whole_shape(op.outputs[0])
            if before != after:
                raise WholeProgramError(f"{op.id} joins {list(before)} to {list(after)}")
            rule = elementwise_rule(before, before)
            return replace(op, kind=OpKind.VIEW, function="moved", rule=rule, inputs=op.inputs[:1], attributes=())
        counts = self.factors(op)
        if all(count == 1 for count in counts.values()):
            return op
        factors = tuple(replace(factor, size=factor.size * counts.get(factor.name, 1)) for factor in op.rule.factors)
        sides = [
            tuple(self._whole_dims(tensor_id, dims) for tensor_id, dims in zip(ids, side, strict=True))
            for ids, side in ((op.inputs, op.rule.operands), (op.outputs, op.rule.results))
        ]
        return replace(op, rule=Rule(sides[0], sides[1], factors))

    def _whole_dims(self, tensor_id: str, dims: Dims) -> Dims:
        """Dimensions that a factor covers in part are as large as the whole tensor's."""
        shape = self.whole_shape(tensor_id)
        return tuple(dim if dim.size is None else Dim(dim.factors, shape[index]) for index, dim in enumerate(dims))


def _is_move(op: Op) -> bool:
    """Whether an op gives the same tensor of the whole program: collectives, and slices by the device's number."""
    if op.kind is OpKind.COLLECTIVE:
        return op.function in _MOVES
    # Start indices that are constants, and yet not known, come from the number of the device.
    is_slice = op.function == "dynamic_slice" and len(op.inputs) > 1
    return is_slice and all(tensor_id.startswith(CONSTANT_PREFIX) for tensor_id in op.inputs[1:])
