"""Arrays with one axis per factor, and back to the dimensions of a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phaze.ir.rule import Dims, Rule, factor_names, names_of

__all__ = ["Array", "align", "collapse", "einsum", "expand"]

Array = NDArray[Any]


def expand(rule: Rule, dims: Dims, array: Array) -> tuple[Array, list[str]]:
    """One axis per factor, in the order of the dimensions."""
    names = factor_names(dims)
    return array.reshape([rule.size(name) for name in names]), names


def align(rule: Rule, dims: Dims, array: Array, order: Sequence[str]) -> Array:
    """One axis per factor of `order`, of length 1 where the tensor does not have that factor."""
    spread, names = expand(rule, dims, array)
    present = [name for name in order if name in names]
    spread = spread.transpose([names.index(name) for name in present])
    return spread.reshape([rule.size(name) if name in names else 1 for name in order])


def collapse(rule: Rule, dims: Dims, array: Array, order: Sequence[str]) -> Array:
    """From one axis per factor of `order` to a result: broadcast what is missing, sum what the result lacks."""
    full = np.broadcast_to(array, [rule.size(name) for name in order])
    wanted = names_of(dims)
    gone = tuple(index for index, name in enumerate(order) if name not in wanted)
    summed = np.asarray(full.sum(axis=gone, dtype=full.dtype))
    left = [name for name in order if name in wanted]
    names = factor_names(dims)
    return summed.transpose([left.index(name) for name in names]).reshape(rule.shape(dims))


def einsum(rule: Rule, operands: Sequence[tuple[Array, Sequence[str]]], names: Sequence[str]) -> Array:
    """The product of arrays with one axis per named factor, summed over what `names` lacks."""
    present = frozenset(name for _, axes in operands for name in axes)
    letters = {name: index for index, name in enumerate(dict.fromkeys(n for _, axes in operands for n in axes))}
    parts: list[object] = []
    for array, axes in operands:
        parts += [array, [letters[name] for name in axes]]
    kept = [name for name in names if name in present]
    product: Array = np.asarray(np.einsum(*parts, [letters[name] for name in kept]))  # type: ignore[call-overload]
    shape = [rule.size(name) if name in present else 1 for name in names]
    return np.asarray(np.broadcast_to(product.reshape(shape), [rule.size(name) for name in names]))
