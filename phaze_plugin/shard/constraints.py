"""What users ask of layouts: pin or forbid them for parameters and tensors whose names match a pattern."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from phaze.errors import ShardError
from phaze.shard.layout import Layout

__all__ = ["LayoutConstraint", "admits", "check_constraints"]


@dataclass(frozen=True, slots=True)
class LayoutConstraint:
    """Pin (or, with `is_forbidden`, rule out) a layout: whole for `dim=None`, else split along that dimension."""

    pattern: str
    dim: int | None
    is_forbidden: bool = False

    def __str__(self) -> str:
        layout = "whole" if self.dim is None else f"split along dim {self.dim}"
        return f"{'forbid' if self.is_forbidden else 'pin'} {self.pattern!r} {layout}"

    def matches(self, name: str) -> bool:
        """Whether the pattern (shell style: * ? [...]) matches a parameter's or tensor's name."""
        return fnmatchcase(name, self.pattern)

    def admits(self, layout: Layout) -> bool:
        """Whether the constraint allows this layout."""
        is_meant = layout.is_whole if self.dim is None else {split.dim for split in layout.splits} == {self.dim}
        return is_meant is not self.is_forbidden


def admits(constraints: Sequence[LayoutConstraint], name: str, layout: Layout) -> bool:
    """Whether every constraint on a name allows a layout."""
    return all(constraint.admits(layout) for constraint in constraints if constraint.matches(name))


def check_constraints(constraints: Sequence[LayoutConstraint], names: Iterable[str]) -> None:
    """Raise ShardError for a pattern that matches nothing, or pins that contradict each other."""
    known = tuple(names)
    pinned: dict[str, LayoutConstraint] = {}
    for constraint in constraints:
        matched = [name for name in known if constraint.matches(name)]
        if not matched:
            raise ShardError(f"the constraint to {constraint} matches no parameter or tensor; check its pattern.")
        for name in matched:
            other = pinned.get(name) if not constraint.is_forbidden else None
            if other is not None and other.dim != constraint.dim:
                raise ShardError(f"constraints contradict each other on {name!r}: {other}, and {constraint}.")
            if not constraint.is_forbidden:
                pinned[name] = constraint
    for constraint in constraints:
        for name, pin in pinned.items():
            if constraint.is_forbidden and constraint.matches(name) and constraint.dim == pin.dim:
                raise ShardError(f"constraints contradict each other on {name!r}: {pin}, and {constraint}.")
