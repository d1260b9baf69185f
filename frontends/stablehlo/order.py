"""An order of ops that does not depend on how a dump lists them, and blocks found by repetition alone.

HLO lists operations in the order of a search from the results, so that equal layers can be listed differently. Sorted
by depth (the longest way from an argument), then by what they compute and what they read, they are equal again.

Where neither scopes nor parameters have numbered names, layers are cut at narrow waists, and a block may be several
such parts. The longest run of parts that repeats gives the blocks; what stands before and after it is a layer each.
"""

from __future__ import annotations

from collections.abc import Sequence

from phaze.ir import Graph, Op
from phaze.ir.repeats import canonical_key

__all__ = ["by_depth", "repeated_blocks"]


def by_depth(ops: Sequence[Op]) -> list[Op]:
    """The ops of one phase, or of several, in an order that follows from what they compute."""
    depths: dict[str, int] = {}
    levels: dict[int, list[Op]] = {}
    for op in ops:
        depth = 1 + max((depths.get(tensor_id, 0) for tensor_id in op.inputs), default=0)
        depths.update(dict.fromkeys(op.outputs, depth))
        levels.setdefault(depth, []).append(op)
    places: dict[str, int] = {}
    texts: dict[int, str] = {}
    found: list[Op] = []
    for depth in sorted(levels):
        level = levels[depth]
        level.sort(
            key=lambda op: (
                op.function,
                texts.setdefault(id(op.rule), str(op.rule)),
                [places.get(tensor_id, -1) for tensor_id in op.inputs],
            )
        )
        for op in level:
            places.update((tensor_id, len(found)) for tensor_id in op.outputs)
            found.append(op)
    return found


def repeated_blocks(graph: Graph) -> dict[str, str] | None:
    """Names of blocks by forward op, for a graph without module paths; None where nothing repeats."""
    layers = graph.layers
    texts: dict[int, str] = {}
    run = _longest_run([canonical_key(graph, layer.forward, layer.outputs, texts) for layer in layers])
    if run is None:
        return None
    start, period, count = run
    names = ["first"] * start
    names += [f"block.{index // period}" for index in range(period * count)]
    names += ["last"] * (len(layers) - len(names))
    return {op.id: names[layer.index] for layer in layers for op in layer.forward}


def _longest_run(keys: Sequence[str]) -> tuple[int, int, int] | None:
    """Start, period and number of repetitions of the run that covers the most, at least two of them."""
    best: tuple[int, int, int] | None = None
    for period in range(1, len(keys) // 2 + 1):
        for start in range(len(keys) - 2 * period + 1):
            count = 1
            while keys[start : start + period] == keys[start + count * period : start + (count + 1) * period]:
                count += 1
            if count > 1 and (best is None or period * count > best[1] * best[2]):
                best = (start, period, count)
    return best
