"""The trace of a model with all of its blocks, made from the trace of the same model with five groups of equal blocks.

A *repeat* is a run of equal groups of blocks, such as the 32 layers of a Llama, or 13 pairs of a layer with a sliding
window and one without. Its model is traced with five groups of the run: the first three and the last two. Every way
over them, forward, backward or along the list of parameters, is a *sweep*: groups 0 to 4, or 4 to 0. Copies of
group 2 are put behind it until the sweep is as long as it is with all groups.

This is right only if groups 1, 2 and 3 are equal up to their position. `_Comparison` checks it entry by entry: they do
the same, and each entry that one of them reads is either the same entry for all three, or moves along with the group
(the output of the group before, a parameter of the own group). What groups 0 and 4 do stays as it is: there a model may
begin and end differently. Nothing but these two may be read from outside of the run. Anything else is irregular.

That groups which were left out are like those that were traced does not follow from this; `repeated_blocks.py` asks a
run of the whole model for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["FORWARD", "KEPT_GROUPS", "Copy", "Entry", "Irregular", "Repeat", "add_copies"]

FORWARD = "forward"
"""The section of a trace in which operators run forward: every repeat must be swept over there."""

KEPT_GROUPS = 5
"""How many groups of a run are traced: one at each end, which may differ, and three inside, which must be equal. Two
inside would do to copy one of them, but could not tell what moves along with the group from what is fixed."""

_MIDDLE = 2
"""The group that is copied."""

_INSIDE = (_MIDDLE - 1, _MIDDLE, _MIDDLE + 1)
"""The groups that are compared."""


class Irregular(Exception):  # noqa: N818 - a reason, never seen by users: the model is captured whole instead
    """The traced groups are not copies of each other, so that those left out cannot be made from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A run of equal groups in a container of blocks.

    `path` is the container's; the run starts at its child `first` and has `groups` groups of `period` children.
    """

    path: str
    first: int
    period: int
    groups: int

    @property
    def left_out(self) -> int:
        """How many groups are not traced."""
        return self.groups - KEPT_GROUPS

    def kept_children(self, count: int) -> list[int]:
        """The numbers of the container's children that are traced, of `count` in all."""
        gap = range(self.first + (_MIDDLE + 1) * self.period, self.first + (_MIDDLE + 1 + self.left_out) * self.period)
        return [child for child in range(count) if child not in gap]

    def child_of(self, name: str) -> int | None:
        """The number of the child that a module or parameter of this name is in; None where it is in none."""
        if not name.startswith(f"{self.path}."):
            return None
        child = name[len(self.path) + 1 :].partition(".")[0]
        return int(child) if child.isdigit() else None

    def traced_group(self, child: int) -> int | None:
        """The group of a child in the model with few blocks; None where the child is not in the run."""
        group = (child - self.first) // self.period
        return group if 0 <= group < KEPT_GROUPS else None

    def in_whole_model(self, child: int) -> int:
        """The number of a child in the whole model, from its number in the one with few blocks."""
        is_behind = child >= self.first + (_MIDDLE + 1) * self.period
        return child + self.left_out * self.period if is_behind else child

    def renamed(self, name: str, child: int) -> str:
        """The name with another number of the child."""
        inner = name[len(self.path) + 1 :].partition(".")
        return f"{self.path}.{child}{inner[1]}{inner[2]}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A step of a trace.

    `key` says what it does except for what it reads and where it stands, `reads` are the earlier entries that it reads,
    `names` are the modules or the parameter that it belongs to. Entries of one `section` are swept over together.
    """

    key: Hashable
    reads: tuple[int, ...]
    names: tuple[str, ...]
    section: str


class Copy(NamedTuple):
    """An entry of the whole trace: the traced entry that it is like, what it reads and its names in the whole."""

    source: int
    reads: tuple[int, ...]
    names: tuple[str, ...]


class _Place(NamedTuple):
    """Where an entry stands: the sweep, the group, and the distance from the group's first entry."""

    sweep: int
    group: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Sweep:
    """One way over the groups of a repeat. `bounds` are the first entry of each group and the one after its last."""

    repeat: int
    bounds: tuple[tuple[int, int], ...]

    @property
    def is_backward(self) -> bool:
        return self.bounds[0] > self.bounds[-1]

    @property
    def start(self) -> int:
        return min(self.bounds)[0]

    @property
    def end(self) -> int:
        return max(self.bounds)[1]

    def length(self, group: int) -> int:
        start, end = self.bounds[group]
        return end - start


def add_copies(entries: Sequence[Entry], repeats: Sequence[Repeat]) -> list[Copy]:
    """The whole trace, from one of the model with few blocks; raises Irregular where the groups are no copies."""
    sweeps = _find_sweeps(entries, repeats)
    return _Layout(entries, repeats, sweeps).copies()


def _find_sweeps(entries: Sequence[Entry], repeats: Sequence[Repeat]) -> list[_Sweep]:
    """All sweeps, in order of their first entries."""
    groups = [_group_of(repeats, entry.names) for entry in entries]
    stretches: dict[tuple[int, str], list[_Stretch]] = {}
    for index, place in enumerate(groups):
        if place is None:
            continue
        repeat, group = place
        visited = stretches.setdefault((repeat, entries[index].section), [])
        if visited and visited[-1].group == group:
            visited[-1] = visited[-1]._replace(last=index)
        else:
            visited.append(_Stretch(group, index, index))
    for number, repeated in enumerate(repeats):
        if (number, FORWARD) not in stretches:
            raise Irregular(f"no operator says that it runs in a block of {repeated.path}")
    sweeps = []
    for (repeat, section), visited in stretches.items():
        for start in range(0, len(visited), KEPT_GROUPS):
            stretch = visited[start : start + KEPT_GROUPS]
            order = [group for group, _, _ in stretch]
            if order not in (list(range(KEPT_GROUPS)), list(range(KEPT_GROUPS))[::-1]):
                raise Irregular(f"the {section} of {repeats[repeat].path} visits its groups in the order {order}")
            sweeps.append(_sweep(entries, groups, repeat, stretch))
    sweeps.sort(key=lambda sweep: sweep.start)
    for before, after in itertools.pairwise(sweeps):
        if before.end > after.start:
            raise Irregular(f"the blocks of {repeats[before.repeat].path} run among others")
    return sweeps


class _Stretch(NamedTuple):
    """Entries from the first to the last that say to be in a group."""

    group: int
    first: int
    last: int


def _group_of(repeats: Sequence[Repeat], names: Iterable[str]) -> tuple[int, int] | None:
    """The repeat and the group that an entry says to be in; None where it does not say."""
    for name in names:
        for number, repeat in enumerate(repeats):
            child = repeat.child_of(name)
            group = None if child is None else repeat.traced_group(child)
            if group is not None:
                return number, group
    return None


def _sweep(entries: Sequence[Entry], groups: Sequence[object], repeat: int, stretch: Sequence[_Stretch]) -> _Sweep:
    """The sweep over one stretch for each group.

    What stands between two groups and does not say where it belongs is given to the earlier one, such as the sum of two
    gradients. Behind the last group as much is given to it as is like what stands behind the group before it.
    """
    ends = [after.first for after in stretch[1:]]
    end = stretch[-1].last + 1
    for tail in range(stretch[-2].last + 1, ends[-1]):
        if end == len(entries) or groups[end] is not None or entries[end].key != entries[tail].key:
            break
        end += 1
    bounds = {group: (first, end) for (group, first, _), end in zip(stretch, [*ends, end], strict=True)}
    return _Sweep(repeat, tuple(bounds[group] for group in range(KEPT_GROUPS)))


class _Layout:
    """Where every entry stands in the whole trace."""

    def __init__(self, entries: Sequence[Entry], repeats: Sequence[Repeat], sweeps: Sequence[_Sweep]) -> None:
        self.entries = entries
        self.repeats = repeats
        self.sweeps = sweeps
        self.places: list[_Place | None] = [None] * len(entries)
        for number, sweep in enumerate(sweeps):
            for group, (start, end) in enumerate(sweep.bounds):
                for index in range(start, end):
                    self.places[index] = _Place(number, group, index - start)
        self.starts: dict[tuple[int, int], int] = {}
        self.outside: dict[int, int] = {}
        self.order: list[tuple[int, int]] = []
        self._lay_out()

    def _lay_out(self) -> None:
        """Put down the traced entry and the group of every entry of the whole (-1 outside of all sweeps)."""
        index = 0
        by_start = {sweep.start: (number, sweep) for number, sweep in enumerate(self.sweeps)}
        while index < len(self.entries):
            if index not in by_start:
                self.outside[index] = len(self.order)
                self.order.append((index, -1))
                index += 1
                continue
            number, sweep = by_start[index]
            groups = range(self.repeats[sweep.repeat].groups)
            for group in reversed(groups) if sweep.is_backward else groups:
                self.starts[number, group] = len(self.order)
                self.order += [(source, group) for source in range(*sweep.bounds[self._traced(sweep, group)])]
            index = sweep.end

    def _traced(self, sweep: _Sweep, group: int) -> int:
        """The traced group that a group of the whole is a copy of."""
        left_out = self.repeats[sweep.repeat].left_out
        return group if group <= _MIDDLE else max(_MIDDLE, group - left_out)

    def _in_whole(self, sweep: _Sweep, traced_group: int) -> int:
        """The group of the whole that a traced group stands for; the first one of the copies for the middle."""
        return traced_group if traced_group <= _MIDDLE else traced_group + self.repeats[sweep.repeat].left_out

    def copies(self) -> list[Copy]:
        """The whole trace."""
        inside = [self._references(sweep) for sweep in self.sweeps]
        copies = []
        for source, group in self.order:
            place, entry = self.places[source], self.entries[source]
            if place is None or place.group not in _INSIDE:
                reads = tuple(self._position(read, place) for read in entry.reads)
                names = tuple(self._name_in_whole(name) for name in entry.names)
            else:
                references, moving = inside[place.sweep][place.offset]
                reads = tuple(
                    self._moved(read, place, reference, group)
                    for read, reference in zip(entry.reads, references, strict=True)
                )
                repeat = self.repeats[self.sweeps[place.sweep].repeat]
                names = tuple(
                    _shifted(repeat, name, group - place.group) if moves else self._name_in_whole(name)
                    for name, moves in zip(entry.names, moving, strict=True)
                )
            copies.append(Copy(source, reads, names))
        return copies

    def _position(self, index: int, reader: _Place | None) -> int:
        """Where an entry that is read from outside, or from one end of a run, stands in the whole."""
        place = self.places[index]
        if place is None:
            return self.outside[index]
        is_neighbour = (
            reader is not None
            and self._repeat_of(reader) == self._repeat_of(place)
            and abs(place.group - reader.group) <= 1
        )
        if place.group in _INSIDE and not is_neighbour:
            raise Irregular(f"{self.entries[index].key} inside of a run is read from outside")
        sweep = self.sweeps[place.sweep]
        return self.starts[place.sweep, self._in_whole(sweep, place.group)] + place.offset

    def _repeat_of(self, place: _Place) -> int:
        return self.sweeps[place.sweep].repeat

    def _name_in_whole(self, name: str) -> str:
        for repeat in self.repeats:
            child = repeat.child_of(name)
            if child is not None:
                return repeat.renamed(name, repeat.in_whole_model(child))
        return name

    def _moved(self, read: int, reader: _Place, reference: _Place | None, group: int) -> int:
        """Where that stands in the whole which a copy, in this group of the whole, of an entry inside reads."""
        if reference is None:
            return self._position(read, None)
        place = self.places[read]
        if place is not None and place.group not in _INSIDE:
            return self._position(read, reader)
        return self.starts[reference.sweep, group + reference.group] + reference.offset

    def _references(self, sweep: _Sweep) -> list[tuple[tuple[_Place | None, ...], tuple[bool, ...]]]:
        """What each entry of a group inside reads, and which of its names move along; raises Irregular."""
        repeat = self.repeats[sweep.repeat]
        lengths = {sweep.length(group) for group in _INSIDE}
        if len(lengths) > 1:
            raise Irregular(f"the groups of {repeat.path} differ in length: {sorted(lengths)}")
        answers = []
        for offset in range(lengths.pop()):
            alike = [self.entries[sweep.bounds[group][0] + offset] for group in _INSIDE]
            first, *others = alike
            if any(other.key != first.key or len(other.reads) != len(first.reads) for other in others):
                raise Irregular(f"the groups of {repeat.path} differ: {[entry.key for entry in alike]}")
            references = tuple(
                self._reference(sweep.repeat, reads) for reads in zip(*(entry.reads for entry in alike), strict=True)
            )
            names = [entry.names for entry in alike]
            answers.append((references, _moving_names(repeat, names)))
        return answers

    def _reference(self, repeat: int, reads: tuple[int, ...]) -> _Place | None:
        """What the three groups inside read at one place: one entry (None), or one that moves along with the group.

        The group of the result counts from the reader's. Those of the three that read inside must read at the same
        place of a group; one that reads in the first or last group keeps what it reads there, since these may differ.
        """
        if len(set(reads)) == 1:
            return None
        places = [
            place._replace(group=place.group - group)
            for read, group in zip(reads, _INSIDE, strict=True)
            if (place := self.places[read]) is not None
        ]
        inside = {place for place, group in zip(places, _INSIDE, strict=False) if place.group + group in _INSIDE}
        if (
            len(places) == len(reads)
            and len(inside) == 1
            and self._repeat_of(places[0]) == repeat
            and len({(place.sweep, place.group) for place in places}) == 1
        ):
            return inside.pop()
        raise Irregular(f"the groups read {[self.entries[read].key for read in reads]} at one place")


def _moving_names(repeat: Repeat, names: Sequence[tuple[str, ...]]) -> tuple[bool, ...]:
    """Which names move along with the group and which are the same for all three; raises Irregular."""
    first, *others = names
    if any(len(other) != len(first) for other in others):
        raise Irregular(f"the groups of {repeat.path} run in different modules: {names}")
    moving = []
    for position, name in enumerate(first):
        moves = any(other[position] != name for other in others)
        expected = [_shifted(repeat, name, distance) if moves else name for distance in (1, 2)]
        if [other[position] for other in others] != expected:
            raise Irregular(f"the groups of {repeat.path} run in different modules: {names}")
        moving.append(moves)
    return tuple(moving)


def _shifted(repeat: Repeat, name: str, groups: int) -> str:
    """A name moved by this many groups."""
    child = repeat.child_of(name)
    return name if child is None else repeat.renamed(name, child + groups * repeat.period)
