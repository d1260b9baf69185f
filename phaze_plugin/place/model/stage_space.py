"""Every possible stage of a layer graph, chain or branching, and sums and maxima over the layers of each.

A pipeline cuts the layers into stages such that no tensor flows backward: after each stage the layers placed so far
form a downset (a set that contains all predecessors of its members). States are downsets, a stage is a pair of a
downset and a larger one, and a pipeline is a path from the empty set to the full one. On a chain the downsets are the
prefixes, and a sum over a stage is a difference of prefix sums; on a branching graph, of sums over downsets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phaze.errors import PlacementError
from phaze.profile.layer_profile import PlacementGraph

__all__ = ["BoolArray", "FloatArray", "IntArray", "StageSpace", "build_stage_space"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_STATE_LIMIT = 2_000
"""The most downsets of a layer graph. Tables have a column for each, and stages grow with their square."""

_PAIR_LIMIT = 500_000
"""The most stages. Every quantity of a stage is an array of so many numbers (4 MB) per recompute mode."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSpace:
    """States in order of size, and stages sorted by where they start.

    Attributes:
        inside: per (state, layer), whether the layer has been placed.
        source: the state before each stage.
        target: the state after it.
    """

    inside: BoolArray
    source: IntArray
    target: IntArray

    @property
    def states(self) -> int:
        """Number of states; the first is empty, the last is full."""
        return len(self.inside)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.inside.shape[1])

    @property
    def is_chain(self) -> bool:
        """Whether the states are the prefixes of one order."""
        return self.states == self.layers + 1

    @property
    def sizes(self) -> IntArray:
        """How many layers each stage has."""
        placed = self.inside.sum(axis=1)
        return np.asarray(placed[self.target] - placed[self.source])

    def take(self, stages: IntArray) -> StageSpace:
        """The same states with only some of the stages."""
        return StageSpace(inside=self.inside, source=self.source[stages], target=self.target[stages])

    def members(self, stage: int) -> tuple[int, ...]:
        """The layers of one stage."""
        inside = self.inside[self.target[stage]] & ~self.inside[self.source[stage]]
        return tuple(np.flatnonzero(inside).tolist())

    def sums(self, per_layer: FloatArray) -> FloatArray:
        """Sum over each stage of numbers per (..., layer)."""
        placed = per_layer @ self.inside.T
        return np.asarray(np.maximum(placed[..., self.target] - placed[..., self.source], 0.0))

    def maxima(self, per_layer: FloatArray) -> FloatArray:
        """Largest over each stage of numbers per (..., layer) that are at least 0."""
        if self.is_chain:
            return self._window_maxima(per_layer)
        largest = np.zeros((*per_layer.shape[:-1], len(self.source)))
        for layer in range(self.layers):
            held = self.inside[self.target, layer] & ~self.inside[self.source, layer]
            np.maximum(largest, per_layer[..., layer, None], out=largest, where=held)
        return largest

    def _window_maxima(self, per_layer: FloatArray) -> FloatArray:
        """Largest over each stage of a chain: every stage is two runs, which may overlap, of a power of two of layers.

        Row k of the table has the largest of the 2^k layers from each one on.
        """
        lengths = self.target - self.source
        rows = [per_layer]
        while 2 ** len(rows) <= int(lengths.max(initial=0)):
            last, half = rows[-1], 2 ** (len(rows) - 1)
            rows.append(np.concatenate([np.maximum(last[..., :-half], last[..., half:]), last[..., -half:]], axis=-1))
        table, row = np.concatenate(rows, axis=-1), np.frexp(lengths)[1] - 1
        begin = row * self.layers
        first, second = (np.take(table, begin + start, axis=-1) for start in (self.source, self.target - (1 << row)))
        return np.asarray(np.maximum(first, second))

    def largest_above(self, per_layer: FloatArray, later: FloatArray) -> FloatArray:
        """Largest over each stage of a layer's number less the sum of ``later`` over the layers behind it.

        Both are per (..., layer) and at least 0.
        """
        if self.is_chain:
            before = np.concatenate([np.zeros((*later.shape[:-1], 1)), np.cumsum(later, axis=-1)], axis=-1)
            return np.asarray(self.maxima(per_layer + before[..., 1:]) - before[..., self.target])
        largest = np.zeros((*per_layer.shape[:-1], len(self.source)))
        for layer in range(self.layers):
            held = self.inside[self.target, layer] & ~self.inside[self.source, layer]
            above = np.maximum(largest - later[..., layer, None], per_layer[..., layer, None])
            np.copyto(largest, above, where=held)
        return largest

    def exposed(self, reduction_s: FloatArray, overlap_s: FloatArray) -> FloatArray:
        """What a stage's reductions take beyond its backward, per (..., stage).

        Layers run backward from the last to the first and are reduced one after the other in that order. With R the
        sum of reductions and O that of backward up to a layer of the stage, layer k is ready O(k-1) before the end:
        the excess is the largest of R(k) - O(k-1).
        """
        if self.is_chain:
            reduced, run = (
                np.concatenate([np.zeros((*seconds.shape[:-1], 1)), np.cumsum(seconds, axis=-1)], axis=-1)
                for seconds in (reduction_s, overlap_s)
            )
            late = reduced[..., 1:] - run[..., :-1]
            excess = self._window_maxima(late) - (reduced - run)[..., self.source]
            return np.asarray(np.maximum(excess, 0.0))
        shape = (*np.broadcast_shapes(reduction_s.shape, overlap_s.shape)[:-1], len(self.source))
        reduced, run, excess = np.zeros((3, *shape))
        for layer in range(self.layers):
            held = self.inside[self.target, layer] & ~self.inside[self.source, layer]
            reduced += np.where(held, reduction_s[..., layer, None], 0.0)
            np.maximum(excess, reduced - run, out=excess, where=held)
            run += np.where(held, overlap_s[..., layer, None], 0.0)
        return np.asarray(excess)


def build_stage_space(graph: PlacementGraph) -> StageSpace:
    """All downsets and all stages between them.

    Raises:
        PlacementError: the graph branches so much that there are too many.
    """
    layers = len(graph.layers)
    needs = [0] * layers
    for flow in graph.flows:
        for consumer in flow.consumers:
            needs[consumer] |= 1 << flow.producer
    if all(needs[layer] >> (layer - 1) & 1 for layer in range(1, layers)):
        source, target = np.triu_indices(layers + 1, 1)
        return StageSpace(inside=np.tri(layers + 1, layers, -1, dtype=bool), source=source, target=target)
    downsets = {0}  # as bit masks of layers
    newest = [0]
    while newest:
        grown = {
            placed | 1 << layer
            for placed in newest
            for layer in range(layers)
            if not placed >> layer & 1 and needs[layer] & ~placed == 0
        }
        newest = sorted(grown - downsets)
        downsets |= grown
        if len(downsets) > _STATE_LIMIT:
            raise PlacementError(
                f"the layer graph branches into more than {_STATE_LIMIT} partial placements; merge parallel layers "
                "into one before placing them."
            )
    masks = sorted(downsets, key=lambda placed: (placed.bit_count(), placed))
    inside = np.array([[bool(placed >> layer & 1) for layer in range(layers)] for placed in masks])
    outside = (~inside).astype(np.float32)
    contained = inside.astype(np.float32) @ outside.T == 0
    np.fill_diagonal(contained, False)
    source, target = np.nonzero(contained)
    if len(source) > _PAIR_LIMIT:
        raise PlacementError(
            f"the layer graph allows {len(source)} stages, more than {_PAIR_LIMIT}; merge layers before placing them."
        )
    return StageSpace(inside=inside, source=source, target=target)
