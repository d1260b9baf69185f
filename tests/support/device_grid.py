"""Runs a layer that is sliced by cp, ep and tp on simulated devices: groups of tp devices in a row of dp x cp ranks.

All ranks run the same graph in step. Rank r is device r % cp of a context; of 2 cp parts of its sequences it has an
early and a late one, so that causal work is balanced. Collectives of contexts and experts are done here on the pieces
that the devices really hold, by the factors of their rules. Ops that ask where an element lies (causal masks, dropout)
get true positions by running on arrays that are zero outside of a device's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from devices import TensorGroup
from numpy.typing import NDArray
from oracles.numpy_reference import evaluate_op
from oracles.numpy_reference.axes import align, collapse

from phaze.ir import Dims, Graph, Op, OpKind, Role, Rule
from phaze.ir.rule import factor_names, names_of
from phaze.shard import ShardedLayer
from phaze.shard.mesh_axes import CONTEXT_AXIS, WAYS, axis_of, is_exchange

Array = NDArray[Any]


def own_positions(length: int, cp: int, device: int) -> Array:
    """The positions of a sequence that one of cp devices has: an early part and a late one."""
    part = np.array_split(np.arange(length), 2 * cp)
    return np.concatenate([part[device], part[2 * cp - 1 - device]])


def device_order(length: int, cp: int) -> Array:
    """All positions in the order in which the devices have them."""
    return np.concatenate([own_positions(length, cp, device) for device in range(cp)])


class DeviceGrid:
    """Ranks of dp x cp, each a group of tp devices; `whole` is the graph that was sliced."""

    def __init__(self, whole: Graph, sharded: ShardedLayer, ranks: int) -> None:
        axis = sharded.problem.axis
        self.whole, self.sharded, self.ranks, self.cp, self.ep = whole, sharded, ranks, axis.cp, axis.ep
        self.local = sharded.problem.graph

    def run(self, arguments: Mapping[str, Array]) -> list[dict[str, Array]]:
        """What each rank makes, given the arguments of the whole graph at a batch for all dp copies."""
        groups = [
            TensorGroup(self.sharded, self.arguments_of(rank, arguments), self._evaluator(rank))
            for rank in range(self.ranks)
        ]
        for op in self.sharded.problem.ops:
            if is_exchange(op):
                self._exchange(op, groups)
            else:
                for group in groups:
                    group.run(op)
        return [group.assembled() for group in groups]

    def arguments_of(self, rank: int, arguments: Mapping[str, Array]) -> dict[str, Array]:
        """The part of each argument that a rank has."""
        parts = {}
        for tensor in self.local.tensors.values():
            if tensor.role is not None:
                name = tensor.id.partition(":")[0]
                value = self.part(np.asarray(arguments[name]), tensor.shape, tensor.role, rank)
                if tensor.role is Role.OTHER and value.shape != arguments[name].shape:
                    value = self._in_device_order(value, tensor.id)
                parts[tensor.id] = value
        return parts

    def _in_device_order(self, value: Array, name: str) -> Array:
        """A table with the positions that are whole in the order in which gathered tensors have them."""
        reader = next(op for op in self.local.ops if name in op.inputs)
        dims = reader.rule.operands[reader.inputs.index(name)]
        along = [i for i, dim in enumerate(dims) if any(reader.rule.factor(each).is_sequence for each in dim.factors)]
        longest = max((value.shape[dim] for dim in along), default=0)
        for dim in along:
            if len(along) > 1 and value.shape[dim] == longest:
                value = np.take(value, device_order(longest, self.cp), dim)
        return value

    def part(self, value: Array, shape: tuple[int, ...], role: Role | None, rank: int) -> Array:
        """A rank's part of a whole array: its samples, its positions, its experts."""
        for dim, size in enumerate(shape):
            if value.shape[dim] == size:
                continue
            if role is Role.PARAMETER:
                value = np.take(value, np.arange(rank % self.ep, value.shape[dim], self.ep), dim)
            elif dim == 0 and role is Role.BATCH:
                value = value[size * (rank // self.cp) : size * (rank // self.cp + 1)]
            else:
                value = np.take(value, own_positions(value.shape[dim], self.cp, rank % self.cp), dim)
        assert value.shape == shape
        return value

    def _peers(self, op: Op, rank: int) -> list[int]:
        """The ranks that take part in a collective, in their order on the axis."""
        ways = self.cp if axis_of(op) == CONTEXT_AXIS else self.ep
        first = rank // ways * ways
        return list(range(first, first + ways))

    def _exchange(self, op: Op, groups: Sequence[TensorGroup]) -> None:
        """A collective of contexts or experts, on the pieces of each tensor-parallel device."""
        pieces = [group.operands(op)[0] for group in groups]
        made: list[list[tuple[Array]]] = [[] for _ in groups]
        for rank in range(self.ranks):
            peers = self._peers(op, rank)
            for device in range(groups[0].tp):
                held = [pieces[peer][device] for peer in peers]
                made[rank].append((_collected(op, held, peers.index(rank)),))
        for group, results in zip(groups, made, strict=True):
            group.keep(op, results)

    def _evaluator(self, rank: int) -> Any:
        def evaluate(op: Op, arrays: Sequence[Array]) -> tuple[Array, ...]:
            return self._evaluate(op, arrays, rank % self.cp)

        return evaluate

    def _evaluate(self, op: Op, arrays: Sequence[Array], device: int) -> tuple[Array, ...]:
        if op.attribute("axis") == CONTEXT_AXIS:
            return (_placed(op, arrays[0], self.cp, device),)
        is_causal = isinstance(op.attribute("causal"), str) and op.kind in (OpKind.ATTENTION, OpKind.SOFTMAX)
        if self.cp == 1 or not (is_causal or op.function == "dropout"):
            return evaluate_op(op, arrays)
        return self._evaluate_in_place(op, arrays, device)

    def _evaluate_in_place(self, op: Op, arrays: Sequence[Array], device: int) -> tuple[Array, ...]:
        """An op that asks where its elements lie: on positions at their true places, zero where there are none."""
        rule = op.rule
        sizes = {factor.name: factor.size for factor in rule.factors if factor.is_sequence}
        causal = op.attribute("causal")
        sliced = [causal] if isinstance(causal, str) else sorted(sizes, key=sizes.__getitem__)[:1]
        length = max(sizes.values()) if len(sizes) > 1 else max(sizes.values()) * self.cp
        places = {
            name: own_positions(length, self.cp, device)
            if name in sliced and size < length
            else device_order(length, self.cp)
            for name, size in sizes.items()
        }
        factors = tuple(replace(factor, size=length) if factor.name in sizes else factor for factor in rule.factors)
        whole = replace(op, rule=Rule(rule.operands, rule.results, factors))
        sides = zip(arrays, rule.operands, strict=True)
        results = evaluate_op(whole, [_spread(value, dims, whole.rule, places) for value, dims in sides])
        return tuple(_picked(value, dims, places) for value, dims in zip(results, rule.results, strict=True))


def _dims_along(dims: Dims, places: Mapping[str, Array]) -> list[tuple[int, Array]]:
    """The dimensions of a tensor that are made of one of the named factors alone, with its positions."""
    return [
        (index, places[dim.factors[0]])
        for index, dim in enumerate(dims)
        if dim.factors[:1] and dim.factors[0] in places
    ]


def _spread(value: Array, dims: Dims, whole: Rule, places: Mapping[str, Array]) -> Array:
    """A tensor with its positions at their true places, zero elsewhere."""
    for index, positions in _dims_along(dims, places):
        shape = [*value.shape]
        shape[index] = whole.dim_size(dims[index])
        larger = np.zeros(shape, value.dtype)
        larger[(slice(None),) * index + (positions,)] = value
        value = larger
    return value


def _picked(value: Array, dims: Dims, places: Mapping[str, Array]) -> Array:
    """A tensor's own positions, in the order in which a device has them."""
    for index, positions in _dims_along(dims, places):
        value = np.take(value, positions, index)
    return value


def _placed(op: Op, value: Array, cp: int, device: int) -> Array:
    """A device's part of a whole tensor, or the gradient of one put back among zeros."""
    shape = op.rule.shape(op.rule.results[0])
    for dim, size in enumerate(shape):
        if value.shape[dim] > size:
            value = np.take(value, own_positions(value.shape[dim], cp, device), dim)
        elif value.shape[dim] < size:
            larger = np.zeros((*value.shape[:dim], size, *value.shape[dim + 1 :]), value.dtype)
            larger[(slice(None),) * dim + (own_positions(size, cp, device),)] = value
            value = larger
    return value


def _collected(op: Op, held: Sequence[Array], place: int) -> Array:
    """What one of several devices has after a collective, from what all of them had; by the factors of its rule."""
    rule, operand, result = op.rule, op.rule.operands[0], op.rule.results[0]
    if op.function == "all_reduce":
        return np.asarray(sum(held)) / (len(held) if op.attribute("reduce") == "mean" else 1)
    local = _with_shape(rule, operand, held[0].shape)
    order = [name for name in factor_names(operand) if name != WAYS]
    arrays = []
    for array in held:
        has_ways = WAYS in names_of(operand)
        arrays.append(align(local, operand, array, [WAYS, *order] if has_ways else order))
    if op.function == "all_gather":
        stacked = np.stack(arrays)
        return collapse(local, result, stacked, [WAYS, *order])
    mine = [array[place] for array in arrays]
    if op.function == "reduce_scatter":
        return collapse(local, result, np.asarray(sum(mine)), order)
    return collapse(local, result, np.stack(mine), [WAYS, *order])


def _with_shape(rule: Rule, dims: Dims, shape: tuple[int, ...]) -> Rule:
    """The rule at the sizes of a tensor-parallel device's piece; only one factor of a dimension can be smaller."""
    sizes = {factor.name: factor.size for factor in rule.factors}
    for dim, size in zip(dims, shape, strict=True):
        whole = rule.dim_size(dim)
        if whole != size:
            cut = next(name for name in dim.factors if name != WAYS and sizes[name] * size % whole == 0)
            sizes[cut] = sizes[cut] * size // whole
    factors = tuple(replace(factor, size=sizes[factor.name]) for factor in rule.factors)
    return Rule(rule.operands, rule.results, factors)
