"""Recompute within a budget of memory: which tensors a layer keeps so that computing the others again takes least.

Between recomputing everything, which keeps B0 bytes, and keeping the whole stash, which keeps B1, a share p of the
difference is the budget: at most B0 + p (B1 - B0) bytes are kept (`within_budget`). torch.compile knows the same lever
as its `activation_memory_budget`.

Let c be the seconds of each forward op. A choice of kept tensors says what runs again: all ops that lead from what is
kept to a tensor that backward reads and that is not kept. Every choice that nothing beats in both bytes and seconds is
found (`recompute_front`), by walking through the ops from the last to the first:

    a state      the tensors that are wanted and whose op comes earlier: backward reads them, or an op that runs again
    at an op     whose result is wanted there are two ways: keep what is wanted of it (its bytes), or run it again (its
                 c), which makes its inputs wanted. Ops whose results nobody wants are left out.
    per state    only those (bytes, seconds) are kept that no other one of the state is no worse than in both

All readers of a tensor come later, so that a state holds all that matters of what was decided: the walk is exact.
Views are made of the tensor whose memory they are, and what enters the layer can only be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phaze.ir.graph import Graph
from phaze.ir.kept_activations import Recomputation, RecomputeMode, entering_tensors, made_again, stashed_tensors
from phaze.ir.layers import Layer
from phaze.ir.op import OpKind

__all__ = ["FrontPoint", "point_within", "recompute_front", "within_budget"]

_MOST_LABELS = 20_000
"""Pairs of bytes and seconds beyond which they are thinned to a grid: layers of all families have some hundred. It
bounds the time of odd graphs to about a second; the choice of such a layer may be a grid step from the best."""

_GRID = 1_000
"""Steps of that grid from nothing to the whole stash: what is kept is then within a tenth of a percent of the best."""


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A choice that no other one beats in both: bytes that it keeps, seconds that run again, and what it keeps."""

    kept_bytes: int
    again_s: float
    kept: frozenset[str]


_Kept = tuple[str, "_Kept"] | None
"""Tensors that are kept, the latest decision first."""

_Label = tuple[int, float, _Kept]
"""Bytes that are kept, seconds of what runs again, and the choice."""


def recompute_front(
    graph: Graph, layer: Layer, op_seconds: Mapping[str, float], *, most_labels: int = _MOST_LABELS
) -> tuple[FrontPoint, ...]:
    """All choices that nothing beats in both, the least bytes first.

    ``op_seconds`` are those of each forward op. Beyond ``most_labels`` unfinished choices are thinned.
    """
    sizes = {tensor_id: tensor.size_bytes for tensor_id, tensor in graph.tensors.items()}
    made = {tensor_id for op in layer.forward if op.kind is not OpKind.VIEW for tensor_id in op.outputs}
    stash = frozenset(stashed_tensors(graph, layer))
    entering = (stash - made) | entering_tensors(graph, layer).keys()
    first = sum(sizes[tensor_id] for tensor_id in stash & entering)
    states: dict[frozenset[str], list[_Label]] = {stash: [(first, 0.0, None)]}
    grid = max(1, sum(sizes[tensor_id] for tensor_id in stash) // _GRID)
    for op in reversed(layer.forward):
        if op.kind is OpKind.VIEW:
            continue
        results = frozenset(op.outputs)
        reads = frozenset(graph.storage(tensor_id) for tensor_id in op.inputs) & (made | entering)
        found: dict[frozenset[str], list[_Label]] = {}
        for state, labels in states.items():
            wanted = state & results
            if not wanted:
                found.setdefault(state, []).extend(labels)
                continue
            more = sum(sizes[tensor_id] for tensor_id in wanted)
            kept_state = state - results
            found.setdefault(kept_state, []).extend(
                (kept_bytes + more, again_s, _with(kept, wanted)) for kept_bytes, again_s, kept in labels
            )
            entered = sum(sizes[tensor_id] for tensor_id in (reads - state) & entering)
            found.setdefault(kept_state | reads, []).extend(
                (kept_bytes + entered, again_s + op_seconds[op.id], kept) for kept_bytes, again_s, kept in labels
            )
        states = {state: _undominated(labels) for state, labels in found.items()}
        if sum(map(len, states.values())) > most_labels:
            states = {state: _thinned(labels, grid) for state, labels in states.items()}
    points = [
        (kept_bytes, again_s, _with(kept, state & entering))
        for state, labels in states.items()
        for kept_bytes, again_s, kept in labels
    ]
    return tuple(
        FrontPoint(kept_bytes, again_s, frozenset(_listed(kept))) for kept_bytes, again_s, kept in _undominated(points)
    )


def within_budget(
    graph: Graph, layer: Layer, mode: RecomputeMode, front: Sequence[FrontPoint], ends_bytes: tuple[int, int]
) -> Recomputation:
    """What a layer keeps, and what runs again, within the budget of a mode; ``ends_bytes`` are B0 and B1."""
    point = point_within(mode, front, ends_bytes)
    return made_again(graph, layer, point.kept)


def point_within(mode: RecomputeMode, front: Sequence[FrontPoint], ends_bytes: tuple[int, int]) -> FrontPoint:
    """The quickest choice within the budget of a mode; what keeps least, where none is."""
    least, most = ends_bytes
    assert mode.budget is not None
    budget = least + mode.budget * max(most - least, 0)
    fitting = [point for point in front if point.kept_bytes <= budget]
    return fitting[-1] if fitting else front[0]


def _with(kept: _Kept, tensors: frozenset[str]) -> _Kept:
    for tensor_id in sorted(tensors):
        kept = (tensor_id, kept)
    return kept


def _listed(kept: _Kept) -> list[str]:
    listed = []
    while kept is not None:
        listed.append(kept[0])
        kept = kept[1]
    return listed


def _undominated(labels: list[_Label]) -> list[_Label]:
    """The labels that no other one is no worse than, the least bytes first."""
    front: list[_Label] = []
    for label in sorted(labels, key=lambda label: label[:2]):
        if not front or label[1] < front[-1][1]:
            front.append(label)
    return front


def _thinned(labels: list[_Label], grid: int) -> list[_Label]:
    """Of the labels in each step of the grid the quickest one, and the one with least bytes of all."""
    steps: dict[int, _Label] = {label[0] // grid: label for label in labels}  # later ones are quicker
    return _undominated([labels[0], *steps.values()])
