"""What a value of StableHLO stands for while a module is walked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phaze.ir import DType

__all__ = [
    "Constant",
    "Shape",
    "Spread",
    "Stack",
    "Tensor",
    "Unsupported",
    "Value",
    "is_constant",
    "is_empty",
    "tensors_of",
]

Shape = tuple[int, ...]


class Unsupported(Exception):  # noqa: N818 - a signal between tables, never seen by users
    """A table knows the operation, but not in this form: it becomes an opaque op."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the graph."""

    id: str
    shape: Shape
    dtype: DType


@dataclass(frozen=True, slots=True)
class Constant:
    """What depends on no argument; equal numbers mean equal contents. `value` is that of every element, where known."""

    number: int
    shape: Shape
    dtype: DType
    value: bool | int | float | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """A tensor repeated: dimension i of `source` is dimension `into[i]`, stretched where it has size 1.

    It is not made: who can reads the source instead.
    """

    source: Tensor | Constant
    into: tuple[int, ...]
    shape: Shape
    dtype: DType


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor taken apart along its first dimension; `loop` is the loop that writes or first reads it by trips."""

    slots: tuple[Value, ...]
    shape: Shape
    dtype: DType
    loop: int | None = None


Value = Tensor | Constant | Spread | Stack


def is_constant(value: Value) -> bool:
    """Whether a value depends on no argument."""
    return isinstance(value, Constant) or (isinstance(value, Spread) and isinstance(value.source, Constant))


def is_empty(value: Value) -> bool:
    """Whether there are no elements."""
    return math.prod(value.shape) == 0


def tensors_of(values: Sequence[Value]) -> Iterator[Tensor]:
    """The tensors among values, those inside stacks and behind repeats included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Stack):
            yield from tensors_of(value.slots)
        elif isinstance(value, Spread) and isinstance(value.source, Tensor):
            yield value.source
