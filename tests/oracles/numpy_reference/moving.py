"""Functions that only move elements: views, slices, stacks, concatenations, padding; and plain reductions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from oracles.numpy_reference.axes import Array, align, collapse, expand
from phaze.ir.op import Op
from phaze.ir.rule import factor_names, names_of

__all__ = ["concatenate", "max_backward", "pad", "reduce", "select", "slice_part", "split", "stack", "view", "zeros"]


def view(op: Op, x: Array) -> tuple[Array, ...]:
    """Reshape, transpose and repeat, as the factors say; a run that has no common factoring is laid out anew."""
    rule = op.rule
    if op.function == "reshape" and not names_of(rule.operands[0]) <= names_of(rule.results[0]):
        return (x.reshape(rule.shape(rule.results[0])),)
    order = factor_names(rule.results[0])
    return (collapse(rule, rule.results[0], align(rule, rule.operands[0], x, order), order),)


def select(op: Op, x: Array) -> tuple[Array, ...]:
    """One index along the factors that the result lacks."""
    return (_part(op, x, 0, _integer(op, "index")),)


def split(op: Op, x: Array) -> tuple[Array, ...]:
    """One result per index along the factor that the results lack."""
    return tuple(_part(op, x, index, index) for index in range(len(op.rule.results)))


def stack(op: Op, *parts: Array) -> tuple[Array, ...]:
    """The inverse of split."""
    rule = op.rule
    names = factor_names(rule.results[0])
    (new,) = names_of(rule.results[0]) - names_of(rule.operands[0])
    inner = [name for name in names if name != new]
    aligned = [align(rule, dims, part, inner) for dims, part in zip(rule.operands, parts, strict=True)]
    return (collapse(rule, rule.results[0], np.stack(aligned, axis=names.index(new)), names),)


def slice_part(op: Op, x: Array) -> tuple[Array, ...]:
    """A run of elements along each dimension that the rule covers in part."""
    rule = op.rule
    return (x[_cut(op, x.shape, rule.shape(rule.results[0]))].copy(),)


def pad(op: Op, x: Array) -> tuple[Array, ...]:
    """Zeros with x at its place: the inverse of a slice or a selection."""
    rule = op.rule
    result = np.zeros(rule.shape(rule.results[0]), x.dtype)
    missing = names_of(rule.results[0]) - names_of(rule.operands[0])
    if not missing:
        result[_cut(op, result.shape, x.shape)] = x
        return (result,)
    spread, names = expand(rule, rule.results[0], result)
    inner = [name for name in names if name not in missing]
    place = tuple(_integer(op, "index") if name in missing else slice(None) for name in names)
    spread[place] = align(rule, rule.operands[0], x, inner)
    return (spread.reshape(result.shape),)


def concatenate(op: Op, *parts: Array) -> tuple[Array, ...]:
    """Parts one after another along the dimension that each covers in part."""
    dims = op.rule.operands[0]
    return (np.concatenate(parts, axis=next(axis for axis, dim in enumerate(dims) if dim.size is not None)),)


def zeros(op: Op) -> tuple[Array, ...]:
    """Zeros."""
    return (np.zeros(op.rule.shape(op.rule.results[0])),)


def reduce(op: Op, x: Array) -> tuple[Array, ...]:
    """Sum, mean or maximum over the factors that the result lacks."""
    rule = op.rule
    spread, names = expand(rule, rule.operands[0], x)
    kept = names_of(rule.results[0])
    axes = tuple(index for index, name in enumerate(names) if name not in kept)
    reduced = _REDUCERS[op.function](spread, axis=axes)
    return (collapse(rule, rule.results[0], reduced, [name for name in names if name in kept]),)


def max_backward(op: Op, gradient: Array, x: Array, result: Array) -> tuple[Array, ...]:
    """The gradient where an element is the maximum."""
    rule = op.rule
    order = factor_names(rule.results[0])
    parts = zip(rule.operands, (gradient, x, result), strict=True)
    incoming, whole, largest = (align(rule, dims, array, order) for dims, array in parts)
    return (collapse(rule, rule.results[0], incoming * (whole == largest), order),)


_REDUCERS: dict[str, Callable[..., Array]] = {"sum": np.sum, "mean": np.mean, "max": np.max}


def _part(op: Op, x: Array, result: int, index: int) -> Array:
    rule = op.rule
    spread, names = expand(rule, rule.operands[0], x)
    dims = rule.results[result]
    kept = names_of(dims)
    taken = spread[tuple(slice(None) if name in kept else index for name in names)]
    return collapse(rule, dims, taken, [name for name in names if name in kept])


def _cut(op: Op, whole: tuple[int, ...], part: tuple[int, ...]) -> tuple[slice, ...]:
    start = _integer(op, "start")
    return tuple(
        slice(None) if size == taken else slice(start, start + taken) for size, taken in zip(whole, part, strict=True)
    )


def _integer(op: Op, name: str) -> int:
    value = op.attribute(name)
    return value if isinstance(value, int) else 0
