"""Runs a sharded layer on simulated devices: real pieces of arrays, real collectives, op by op.

Every device runs the op at its local rule on its own pieces. Ops whose kernel needs to know where its piece lies (a
masked lookup, a causal mask, a dropout pattern, the routing of tokens) get it by running on arrays that are zero
outside of the device's piece; a normalization over a split factor runs on what its statistics make whole.

`TensorGroup` is one group of tp devices; `device_grid.py` runs several of them beside each other.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracles.numpy_reference import evaluate_op

from phaze.ir import FactorKind, Op
from phaze.ir.rule import names_of
from phaze.shard import Layout, OpSplit, ShardedLayer
from phaze.shard.layout import layout_of

Array = NDArray[Any]
Pieces = list[Array]

POSITIONAL = {
    "embedding",
    "scatter_add",
    "dispatch",
    "undispatch",
    "combine",
    "dropout",
    "attention",
    "attention_backward",
}
POSITIONAL |= {"combine_rows_backward", "combine_weights_backward", "softmax", "biased_softmax"}


def piece_index(layout: Layout, shape: tuple[int, ...], device: int) -> list[Array]:
    """For every dimension the indices that a device holds."""
    held = [np.arange(size) for size in shape]
    for split in layout.splits:
        size = shape[split.dim]
        run = size // split.outer
        part = (device // split.stride) % split.ways
        inside = np.arange(size) % run
        mine = (inside >= part * split.chunk) & (inside < (part + 1) * split.chunk)
        held[split.dim] = np.intersect1d(held[split.dim], np.flatnonzero(mine))
    return held


def place(whole: Array, layout: Layout, tp: int) -> Pieces:
    """A whole tensor dealt out to devices; as a partial sum the first device has all of it."""
    if layout.is_partial:
        return [whole if device == 0 else np.zeros_like(whole) for device in range(tp)]
    return [whole[np.ix_(*piece_index(layout, whole.shape, device))] if whole.ndim else whole for device in range(tp)]


def assemble(pieces: Pieces, layout: Layout, shape: tuple[int, ...]) -> Array:
    """The whole tensor from what the devices hold."""
    if layout.is_partial:
        return np.asarray(sum(pieces[1:], start=pieces[0]))
    whole = np.zeros(shape, pieces[0].dtype)
    for device, piece in enumerate(pieces):
        if whole.ndim:
            whole[np.ix_(*piece_index(layout, shape, device))] = piece
        else:
            whole = np.asarray(piece)
    return whole


def move(pieces: Pieces, before: Layout, after: Layout, shape: tuple[int, ...]) -> Pieces:
    """The collective between two layouts."""
    return pieces if before == after else place(assemble(pieces, before, shape), after, len(pieces))


Evaluate = Callable[[Op, Sequence[Array]], tuple[Array, ...]]
"""What runs one op on arrays."""


class TensorGroup:
    """The tp devices that share a layer, op by op: what each holds so far, and in which layout."""

    def __init__(self, sharded: ShardedLayer, arguments: Mapping[str, Array], evaluate: Evaluate = evaluate_op) -> None:
        self.sharded, self.problem, self.tp = sharded, sharded.problem, sharded.problem.axis.tp
        self.arguments, self.evaluate = arguments, evaluate
        self.held: dict[str, tuple[Pieces, Layout]] = {}

    def run(self, op: Op) -> None:
        """Run an op on all devices of the group."""
        split = self.sharded.splits[op.id]
        self.keep(op, _run_op(self, op, split, self.operands(op), self.tp))

    def operands(self, op: Op) -> list[Pieces]:
        """What each device reads, moved to where the op wants it."""
        wanted_layouts = self.sharded.splits[op.id].operands
        return [self._fetch(name, wanted) for name, wanted in zip(op.inputs, wanted_layouts, strict=True)]

    def keep(self, op: Op, made: Sequence[Sequence[Array]]) -> None:
        """Settle what each device made of an op's results."""
        split = self.sharded.splits[op.id]
        for index, name in enumerate(op.outputs):
            shape = self.problem.graph.tensors[name].shape
            pieces = [results[index] for results in made]
            self.held[name] = (move(pieces, split.made[index], split.results[index], shape), split.results[index])

    def assembled(self) -> dict[str, Array]:
        """Every tensor that was made, put together from the devices."""
        tensors = self.problem.graph.tensors
        return {name: assemble(*entry, tensors[name].shape) for name, entry in self.held.items()}

    def _fetch(self, name: str, wanted: Layout) -> Pieces:
        if name in self.held:
            pieces, layout = self.held[name]
            return move(pieces, layout, wanted, self.problem.graph.tensors[name].shape)
        return place(np.asarray(self.arguments[name]), wanted, self.tp)


def run_sharded(sharded: ShardedLayer, arguments: Mapping[str, Array]) -> dict[str, Array]:
    """Every tensor of a layer, assembled from the devices."""
    group = TensorGroup(sharded, arguments)
    for op in sharded.problem.ops:
        group.run(op)
    return group.assembled()


def _run_op(group: TensorGroup, op: Op, split: OpSplit, operands: list[Pieces], tp: int) -> list[tuple[Array, ...]]:
    ways_of = dict(split.ways)
    if any(op.rule.factor(name).kind is FactorKind.NORMALIZED for name in ways_of):
        return _run_whole(group, op, split, operands, tp)
    is_positional = op.function in POSITIONAL and bool(ways_of)
    runner = _run_padded if is_positional else _run_local
    return [runner(group, op, split, [pieces[device] for pieces in operands], device) for device in range(tp)]


def _run_local(group: TensorGroup, op: Op, split: OpSplit, pieces: Sequence[Array], device: int) -> tuple[Array, ...]:
    ways_of = dict(split.ways)
    if not ways_of:
        return group.evaluate(op, pieces)
    names, shards, stride = list(ways_of), {}, 1
    for name in reversed(names):
        shards[name] = (device // stride) % ways_of[name]
        stride *= ways_of[name]
    local = replace(op, rule=op.rule.local(ways_of, shards))
    results = group.evaluate(local, pieces)
    for result, dims in zip(results, local.rule.results, strict=True):
        assert result.shape == local.rule.shape(dims)
    results = tuple(
        _placed(result, layout_of(op.rule, dims, ways_of), op.rule.shape(dims), device) if made.is_partial else result
        for result, dims, made in zip(results, op.rule.results, split.made, strict=True)
    )
    share = math.prod(local.rule.size(name) / op.rule.size(name) for name in ways_of if name in _averaged(op))
    return tuple(result * share for result in results) if share != 1 else results


def _placed(part: Array, layout: Layout, shape: tuple[int, ...], device: int) -> Array:
    """A device's part of a partial sum among zeros; itself where it is a sum of the whole."""
    if part.shape == shape:
        return part
    whole = np.zeros(shape, part.dtype)
    whole[np.ix_(*piece_index(layout, shape, device))] = part
    return whole


def _averaged(op: Op) -> frozenset[str]:
    """Factors that a mean runs over: a device's kernel divides by the size of the whole, not of its part."""
    if op.function in ("cross_entropy", "cross_entropy_backward"):
        return names_of(op.rule.operands[-1])
    if op.function in ("mean", "mean_backward"):
        return names_of(op.rule.operands[0]) ^ names_of(op.rule.results[0])
    return frozenset()


def _run_padded(group: TensorGroup, op: Op, split: OpSplit, pieces: Sequence[Array], device: int) -> tuple[Array, ...]:
    padded = []
    for piece, layout, dims in zip(pieces, split.operands, op.rule.operands, strict=True):
        whole = np.zeros(op.rule.shape(dims), piece.dtype)
        if whole.ndim:
            whole[np.ix_(*piece_index(layout, whole.shape, device))] = piece
        padded.append(whole if whole.ndim else piece)
    results = group.evaluate(op, padded)
    cut = []
    for result, layout in zip(results, split.made, strict=True):
        is_cut = result.ndim and not layout.is_partial
        cut.append(result[np.ix_(*piece_index(layout, result.shape, device))] if is_cut else result)
    return tuple(cut)


def _run_whole(group: TensorGroup, op: Op, split: OpSplit, operands: list[Pieces], tp: int) -> list[tuple[Array, ...]]:
    shapes = [op.rule.shape(dims) for dims in op.rule.operands]
    whole = [assemble(p, layout, s) for p, layout, s in zip(operands, split.operands, shapes, strict=True)]
    results = group.evaluate(op, whole)
    placed = [place(np.asarray(r), layout, tp) for r, layout in zip(results, split.made, strict=True)]
    return [tuple(pieces[device] for pieces in placed) for device in range(tp)]
