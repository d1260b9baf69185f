"""A loss without a scan, cut into the layers of the planned graph by the parameters that they read.

An equation belongs to the latest layer among what it reads: activations bring the layer that made them, a parameter the
first one that reads it. What is made of parameters and constants alone belongs nowhere and is made where it is read.
What only a later layer reads, and makes of one tensor (a norm, before its scale), belongs to that layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phaze.backends.jax.traced import Traced, needed
from phaze.ir import Graph

__all__ = ["Segment", "layer_numbers", "segments"]


@dataclass(frozen=True, slots=True)
class Segment:
    """The number of a layer, what enters it from the batch and from other layers, and what others read of it."""

    number: int
    enters: tuple[Any, ...]
    leaves: tuple[Any, ...]


def layer_numbers(names: Sequence[str], graph: Graph) -> tuple[int | None, ...]:
    """For each parameter the first layer that reads it; None for one that no layer reads under this name."""
    found: dict[str, int] = {}
    for layer in graph.layers:
        for name in layer.parameters:
            found.setdefault(name, layer.index)
    return tuple(found.get(name) for name in names)


def segments(traced: Traced, layers: Sequence[int | None]) -> list[Segment]:
    """The layers in order; one segment with everything where no parameter has a layer."""
    from jax.extend import core

    of_parameter = {v: number for v, number in zip(traced.parameters, layers, strict=True) if number is not None}
    weights: dict[Any, int | None] = {v: of_parameter.get(v) for v in traced.parameters}
    level: dict[Any, int] = dict.fromkeys(traced.batch, 0)
    used = needed(traced.equations, [traced.loss], {})
    for equation in used:
        inputs = [v for v in equation.invars if not isinstance(v, core.Literal)]
        active = [level[v] for v in inputs if v in level]
        own = [number for v in inputs if (number := weights.get(v)) is not None]
        if active:
            level |= dict.fromkeys(equation.outvars, max(active + own))
        elif own or any(v in weights for v in inputs):
            weights |= dict.fromkeys(equation.outvars, max(own, default=None))
    return _segments(traced, used, _with_late_ones(traced, used, level, set(weights)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Moves:
    """Equations that may belong to a later layer (`late`, by their id), and what tells whether they do."""

    batch: frozenset[Any]
    level: dict[Any, int]
    readers: dict[Any, list[Any]]
    makers: dict[Any, Any]
    late: dict[int, Any]

    def settle(self) -> None:
        """Drop those that do not, until nothing changes."""
        while wrong := [key for key, equation in self.late.items() if not self._moves(equation)]:
            for key in wrong:
                del self.late[key]

    def _moves(self, equation: Any) -> bool:
        """Whether only later layers read it, and it reads at most one tensor that would not cross to them anyway."""
        own, results = self.level[equation.outvars[0]], self.reads_of(equation)
        new = {v for v in equation.invars if not hasattr(v, "val") and v in self.level and self._is_new(v, own)}
        read = [one for v in new for one in self.readers[v]]
        return bool(results) and len(new) < 2 and all(self._is_later(one, own) for one in (*results, *read))

    def reads_of(self, equation: Any) -> list[Any]:
        """The equations that read what one makes."""
        return [one for v in equation.outvars for one in self.readers.get(v, ())]

    def _is_new(self, variable: Any, own: int) -> bool:
        if variable in self.batch or (id(self.makers[variable]) in self.late and self.level[variable] == own):
            return False
        return all(self.level.get(one.outvars[0], 0) <= own for one in self.readers[variable])

    def _is_later(self, equation: Any, own: int) -> bool:
        number = self.level.get(equation.outvars[0], -1)
        return number > own or (number == own and id(equation) in self.late)


def _with_late_ones(traced: Traced, used: Sequence[Any], level: dict[Any, int], weights: set[Any]) -> dict[Any, int]:
    """Levels with equations moved to the first layer that reads them, where no more crosses to it than before."""
    readers: dict[Any, list[Any]] = {}
    for equation in used:
        for variable in {v for v in equation.invars if not hasattr(v, "val") and v in level}:
            readers.setdefault(variable, []).append(equation)
    active = [one for one in used if one.outvars[0] in level]
    moves = _Moves(
        batch=frozenset(traced.batch),
        level=level,
        readers=readers,
        makers={v: equation for equation in active for v in equation.outvars},
        late={id(one): one for one in active if all(hasattr(v, "val") or v not in weights for v in one.invars)},
    )
    moves.settle()
    moved = dict(level)
    for equation in reversed(used):
        if id(equation) in moves.late:
            first = min(moved[one.outvars[0]] for one in moves.reads_of(equation))
            moved |= dict.fromkeys(equation.outvars, first)
    return moved


def _segments(traced: Traced, used: Sequence[Any], level: dict[Any, int]) -> list[Segment]:
    from jax.extend import core

    batch = set(traced.batch)
    read: dict[int, dict[Any, None]] = {}
    made: dict[int, dict[Any, None]] = {}
    for equation in used:
        number = level.get(equation.outvars[0])
        if number is None:
            continue
        made.setdefault(number, {}).update(dict.fromkeys(equation.outvars))
        inputs = (v for v in equation.invars if not isinstance(v, core.Literal) and v in level)
        read.setdefault(number, {}).update(dict.fromkeys(inputs))
    found = []
    for number in sorted(made):
        later = {v for other in read if other != number for v in read[other]} | {traced.loss}
        enters = tuple(v for v in read[number] if v not in made[number] or v in batch)
        found.append(Segment(number=number, enters=enters, leaves=tuple(v for v in made[number] if v in later)))
    return found
