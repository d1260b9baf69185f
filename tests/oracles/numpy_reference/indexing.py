"""Functions that pick and place by index: lookups, scatters, the routing of tokens to experts, top-k."""

from __future__ import annotations

import numpy as np

from oracles.numpy_reference.axes import Array, collapse, expand
from phaze.ir.op import Op
from phaze.ir.rule import FactorKind, factor_names

__all__ = [
    "combine",
    "combine_rows_backward",
    "combine_weights_backward",
    "dispatch",
    "embedding",
    "scatter_add",
    "top_k",
    "top_k_backward",
    "undispatch",
]


def embedding(op: Op, table: Array, ids: Array) -> tuple[Array, ...]:
    """Rows of a table."""
    rule = op.rule
    spread, names = expand(rule, rule.operands[0], table)
    axis = names.index(_looked_up(op))
    rows = np.moveaxis(spread, axis, 0)[ids]
    order = factor_names(rule.operands[1]) + names[:axis] + names[axis + 1 :]
    return (collapse(rule, rule.results[0], rows.reshape([rule.size(name) for name in order]), order),)


def scatter_add(op: Op, gradient: Array, ids: Array) -> tuple[Array, ...]:
    """Every row of the gradient added to the row of the table that its id names."""
    rule = op.rule
    spread, names = expand(rule, rule.operands[0], gradient)
    picked = factor_names(rule.operands[1])
    rest = [name for name in names if name not in picked]
    rows = spread.transpose([names.index(name) for name in (*picked, *rest)])
    looked_up = _looked_up(op)
    table = np.zeros([rule.size(looked_up), *(rule.size(name) for name in rest)], gradient.dtype)
    np.add.at(table, ids.reshape([rule.size(name) for name in picked]), rows)
    return (collapse(rule, rule.results[0], table, [looked_up, *rest]),)


def _looked_up(op: Op) -> str:
    return next(factor.name for factor in op.rule.factors if factor.kind is FactorKind.LOOKUP)


def _slots(ids: Array, experts: int, rows: int) -> Array:
    """For every chosen expert (batch, position, choice) its row in that expert, or -1 where the expert is full."""
    slots = np.full(ids.shape, -1)
    for batch in range(ids.shape[0]):
        used = np.zeros(experts, dtype=int)
        for position in np.ndindex(ids.shape[1:]):
            expert = ids[(batch, *position)]
            if used[expert] < rows:
                slots[(batch, *position)] = used[expert]
                used[expert] += 1
    return slots


def _pairs(ids: Array, experts: int, rows: int) -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    """((batch, position, choice), (expert, batch, row)) for every choice that an expert takes."""
    slots = _slots(ids, experts, rows)
    pairs = []
    for b, s, k in np.ndindex(ids.shape):
        if slots[b, s, k] >= 0:
            pairs.append(((b, s, k), (int(ids[b, s, k]), b, int(slots[b, s, k]))))
    return pairs


def dispatch(op: Op, x: Array, ids: Array) -> tuple[Array, ...]:
    """b s i, b s k -> e b c i: every token copied to the experts that it chose."""
    shape = op.rule.shape(op.rule.results[0])
    result = np.zeros(shape, x.dtype)
    for (b, s, _), place in _pairs(ids, shape[0], shape[2]):
        result[place] = x[b, s]
    return (result,)


def undispatch(op: Op, gradient: Array, ids: Array) -> tuple[Array, ...]:
    """e b c i, b s k -> b s i: every token's copies summed."""
    result = np.zeros(op.rule.shape(op.rule.results[0]), gradient.dtype)
    for (b, s, _), place in _pairs(ids, gradient.shape[0], gradient.shape[2]):
        result[b, s] += gradient[place]
    return (result,)


def combine(op: Op, rows: Array, weights: Array, ids: Array) -> tuple[Array, ...]:
    """e b c i, b s k, b s k -> b s i: what the experts said of each token, weighted."""
    result = np.zeros(op.rule.shape(op.rule.results[0]), rows.dtype)
    for choice, place in _pairs(ids, rows.shape[0], rows.shape[2]):
        result[choice[:2]] += weights[choice] * rows[place]
    return (result,)


def combine_rows_backward(op: Op, gradient: Array, weights: Array, ids: Array) -> tuple[Array, ...]:
    """The gradient of what the experts said."""
    shape = op.rule.shape(op.rule.results[0])
    result = np.zeros(shape, gradient.dtype)
    for choice, place in _pairs(ids, shape[0], shape[2]):
        result[place] = weights[choice] * gradient[choice[:2]]
    return (result,)


def combine_weights_backward(op: Op, gradient: Array, rows: Array, ids: Array) -> tuple[Array, ...]:
    """The gradient of the weights."""
    result = np.zeros(op.rule.shape(op.rule.results[0]), gradient.dtype)
    for choice, place in _pairs(ids, rows.shape[0], rows.shape[2]):
        result[choice] = gradient[choice[:2]] @ rows[place]
    return (result,)


def top_k(op: Op, scores: Array) -> tuple[Array, ...]:
    """The k largest along the last dimension, largest first, and where they stood.

    With `groups`, those of the groups with the largest members only.
    """
    count = op.rule.shape(op.rule.results[0])[-1]
    groups, chosen = op.attribute("groups"), op.attribute("chosen_groups")
    shown = scores
    if isinstance(groups, int) and isinstance(chosen, int):
        grouped = scores.reshape(*scores.shape[:-1], groups, -1)
        best = grouped.max(axis=-1, keepdims=True)
        is_chosen = (-best).argsort(axis=-2, kind="stable").argsort(axis=-2, kind="stable") < chosen
        shown = np.where(is_chosen, grouped, -np.inf).reshape(scores.shape)
    ids = np.argsort(-shown, axis=-1, kind="stable")[..., :count]
    return np.take_along_axis(scores, ids, axis=-1), ids


def top_k_backward(op: Op, gradient: Array, ids: Array) -> tuple[Array, ...]:
    """The gradient put back to where the largest stood."""
    result = np.zeros(op.rule.shape(op.rule.results[0]), gradient.dtype)
    np.put_along_axis(result, ids, gradient, axis=-1)
    return (result,)
