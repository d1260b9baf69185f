"""Trace a loss as if its author had not said what backward computes again: that is for a plan to say.

`jax.checkpoint` is an equation that calls another trace, under a policy of what is kept. With the policy that keeps
everything, and without the barriers that stop a compiler from undoing the rest, a loss is lowered as it is without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

__all__ = ["CHECKPOINTS", "keeping_everything"]

CHECKPOINTS = frozenset({"remat2", "checkpoint"})
"""The primitives of `jax.checkpoint`, by name, in different versions of JAX."""


def keeping_everything(function: Callable[..., Any], *specs: Any) -> Callable[..., Any]:
    """The function of these arguments without what its checkpoints drop; itself where it has none."""
    closed, output = jax.make_jaxpr(function, return_shape=True)(*specs)
    changed = _changed(closed.jaxpr)
    if changed is closed.jaxpr:
        return function
    run = core.jaxpr_as_fun(core.ClosedJaxpr(changed, closed.consts))
    structure = jax.tree_util.tree_structure(output)

    def keeping(*arguments: Any) -> Any:
        return jax.tree_util.tree_unflatten(structure, run(*jax.tree_util.tree_leaves(arguments)))

    return keeping


def _changed(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The same trace with checkpoints that keep everything; itself where there are none inside of it."""
    equations = []
    for equation in jaxpr.eqns:
        params = {name: _changed_value(value) for name, value in equation.params.items()}
        if str(equation.primitive) in CHECKPOINTS:
            params |= {"policy": jax.checkpoint_policies.everything_saveable, "prevent_cse": False}
        is_same = all(params[name] is value for name, value in equation.params.items())
        equations.append(equation if is_same else equation.replace(params=params))
    if all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=equations)


def _changed_value(value: Any) -> Any:
    """A parameter of an equation, with the traces in it changed."""
    if isinstance(value, core.ClosedJaxpr):
        changed = _changed(value.jaxpr)
        return value if changed is value.jaxpr else core.ClosedJaxpr(changed, value.consts)
    if isinstance(value, core.Jaxpr):
        return _changed(value)
    if isinstance(value, tuple) and any(isinstance(item, core.ClosedJaxpr | core.Jaxpr) for item in value):
        items = tuple(_changed_value(item) for item in value)
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    return value
