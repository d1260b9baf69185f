"""Run a trace again with some equations replaced, also inside of loops and branches, and with calls inlined.

What the user wrote about how the model is to be run gives way to the plan: checkpoints are inlined, because the plan
says what backward computes again, and constraints of shardings are dropped, because the plan says what lies where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
from jax.extend import core

from phaze.errors import PlanError

__all__ = ["Replacement", "inlined", "inner_traces", "run_rewritten"]

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint"})
"""Primitives that only call another trace; the last two also say what backward computes again."""
_LOOPS_AND_BRANCHES = frozenset({"scan", "while", "cond"})
"""Primitives whose traces can be run again by a function of JAX."""

Replacement: TypeAlias = Callable[[core.JaxprEqn, Sequence[jax.Array]], list[jax.Array] | None]
"""The results of an equation, given its operands, or None for what the equation itself gives."""


def inner_traces(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The traces that an equation calls."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            trace = getattr(item, "jaxpr", item)
            if hasattr(trace, "eqns"):
                yield trace


def inlined(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same trace without calls, checkpoints and constraints of shardings.

    Raises PlanError for a model that divides its work by itself.
    """
    return jax.make_jaxpr(lambda *values: run_rewritten(closed, values, _without_constraint))(*closed.in_avals)


def _without_constraint(equation: core.JaxprEqn, operands: Sequence[jax.Array]) -> list[jax.Array] | None:
    name = str(equation.primitive)
    if name == "shard_map":
        raise PlanError(
            "the model divides its work by a shard_map of its own, which a plan cannot divide again; plan and apply "
            "the same model without it."
        )
    return list(operands) if name == "sharding_constraint" else None


def run_rewritten(
    closed: core.ClosedJaxpr,
    arguments: Sequence[jax.Array],
    replacement: Replacement,
    known: Mapping[core.Var, jax.Array] | None = None,
) -> list[jax.Array]:
    """The results of a trace, where every equation that is no call was offered to `replacement` first.

    `known` variables of the outermost trace have these values, whatever equations make them.
    """
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(closed.jaxpr.invars, arguments, strict=True))
    for equation in closed.jaxpr.eqns:
        operands = [_value(variable, values) for variable in equation.invars]
        if str(equation.primitive) in _CALLS:
            called = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
            results = run_rewritten(_closed(called), operands, replacement)
        else:
            replaced = replacement(equation, operands)
            results = _run(equation, operands, replacement) if replaced is None else replaced
        values |= dict(zip(equation.outvars, results, strict=True))
        values |= {variable: known[variable] for variable in equation.outvars if known and variable in known}
    return [_value(variable, values) for variable in closed.jaxpr.outvars]


def _value(variable: core.Var | core.Literal, values: Mapping[core.Var, jax.Array]) -> jax.Array:
    return variable.val if isinstance(variable, core.Literal) else values[variable]


def _closed(trace: core.Jaxpr | core.ClosedJaxpr) -> core.ClosedJaxpr:
    return trace if isinstance(trace, core.ClosedJaxpr) else core.ClosedJaxpr(trace, ())


def _run(equation: core.JaxprEqn, operands: Sequence[jax.Array], replacement: Replacement) -> list[jax.Array]:
    match str(equation.primitive):
        case "scan":
            return _run_scan(equation, operands, replacement)
        case "while":
            return _run_while(equation, operands, replacement)
        case "cond":
            branches = [_function(branch, replacement) for branch in equation.params["branches"]]
            return list(jax.lax.switch(operands[0], branches, *operands[1:]))
    results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return list(results) if equation.primitive.multiple_results else [results]


def _function(trace: core.ClosedJaxpr, replacement: Replacement) -> Callable[..., list[jax.Array]]:
    return lambda *values: run_rewritten(trace, values, replacement)


def _run_scan(scan: core.JaxprEqn, operands: Sequence[jax.Array], replacement: Replacement) -> list[jax.Array]:
    params, body = scan.params, _function(scan.params["jaxpr"], replacement)
    first, count = params["num_consts"], params["num_carry"]
    constants, carried, scanned = operands[:first], operands[first : first + count], operands[first + count :]

    def trip(carry: list[jax.Array], slices: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        results = body(*constants, *carry, *slices)
        return results[:count], results[count:]

    leaving, collected = jax.lax.scan(
        trip,
        list(carried),
        list(scanned),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*leaving, *collected]


def _run_while(loop: core.JaxprEqn, operands: Sequence[jax.Array], replacement: Replacement) -> list[jax.Array]:
    params = loop.params
    goes_on, body = (_function(params[name], replacement) for name in ("cond_jaxpr", "body_jaxpr"))
    of_condition, of_body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    return list(
        jax.lax.while_loop(
            lambda state: goes_on(*operands[:of_condition], *state)[0],
            lambda state: body(*operands[of_condition:of_body], *state),
            list(operands[of_body:]),
        )
    )
