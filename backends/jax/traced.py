"""A loss as JAX traces it, run again piece by piece: what a scan over layers reads, what comes before and behind it.

The trace is flat (calls of jitted functions are inlined) and is evaluated on demand: only what some wanted values need
is run. So the part before the scan, one layer of it, and the part behind it are functions of their own, which stages of
a pipeline, gathers of sharded parameters and recomputation are built from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["LayerScan", "Traced", "evaluate", "needed", "trace"]

_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})

Values = dict[Any, Any]
Read = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerScan:
    """The scan over stacked parameters: its equation, per stacked operand the parameter that it is, its flat body."""

    equation: Any
    stacked: Mapping[int, int]
    body: Any = None

    @property
    def length(self) -> int:
        """How many layers it has."""
        return int(self.equation.params["length"])

    @property
    def constants(self) -> list[Any]:
        """Operands that all layers read."""
        return list(self.equation.invars[: self.equation.params["num_consts"]])

    @property
    def carried(self) -> list[Any]:
        """Operands that layers hand on."""
        first = self.equation.params["num_consts"]
        return list(self.equation.invars[first : first + self.equation.params["num_carry"]])

    @property
    def scanned(self) -> list[Any]:
        """Operands that layers take a slice of."""
        return list(self.equation.invars[self.equation.params["num_consts"] + self.equation.params["num_carry"] :])

    @property
    def weights(self) -> dict[Any, int]:
        """Inside of the body: the variables of stacked parameters, in the order of their places, and their numbers."""
        first = len(self.constants) + len(self.carried)
        return {self.body.jaxpr.invars[first + place]: self.stacked[place] for place in sorted(self.stacked)}

    @property
    def results(self) -> list[Any]:
        """What the last layer hands on."""
        return list(self.equation.outvars[: self.equation.params["num_carry"]])

    @property
    def collected(self) -> list[Any]:
        """What is stacked up from all layers."""
        return list(self.equation.outvars[self.equation.params["num_carry"] :])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traced:
    """A flat trace of loss(parameters, batch): its equations, arguments, and the scan over layers if there is one."""

    equations: tuple[Any, ...]
    parameters: tuple[Any, ...]
    batch: tuple[Any, ...]
    constants: Mapping[Any, Any]
    loss: Any
    scan: LayerScan | None

    def start(self, batch: Sequence[Any]) -> Values:
        """What is known before anything is run; parameters are read through `read`."""
        return {**self.constants, **dict(zip(self.batch, batch, strict=True))}


def trace(loss: Callable[..., Any], parameters: Sequence[Any], batch: Sequence[Any]) -> Traced:
    """Trace a function of flat parameters and a flat batch, all given as shapes."""
    import jax

    closed = jax.make_jaxpr(lambda p, b: loss(p, b))(list(parameters), list(batch))
    flat = jax.make_jaxpr(lambda *values: _inline(closed, values))(*(*parameters, *batch))
    jaxpr = flat.jaxpr
    own = tuple(jaxpr.invars[: len(parameters)])
    return Traced(
        equations=tuple(jaxpr.eqns),
        parameters=own,
        batch=tuple(jaxpr.invars[len(parameters) :]),
        constants=dict(zip(jaxpr.constvars, flat.consts, strict=True)),
        loss=jaxpr.outvars[0],
        scan=_layer_scan(jaxpr, own),
    )


def _layer_scan(jaxpr: Any, parameters: Sequence[Any]) -> LayerScan | None:
    """The only scan that takes parameters apart; None where there is none, or several."""
    import jax

    found = []
    numbers = {variable: index for index, variable in enumerate(parameters)}
    for equation in jaxpr.eqns:
        if str(equation.primitive) == "scan":
            scan = LayerScan(equation=equation, stacked={})
            stacked = {place: numbers[v] for place, v in enumerate(scan.scanned) if _known(v, numbers)}
            if stacked:
                found.append(LayerScan(equation=equation, stacked=stacked))
    if len(found) != 1 or len(set(found[0].stacked.values())) < len(found[0].stacked):
        return None
    elsewhere = {v for e in jaxpr.eqns if e is not found[0].equation for v in e.invars if _known(v, numbers)}
    if any(parameters[index] in elsewhere for index in found[0].stacked.values()):
        return None
    closed = found[0].equation.params["jaxpr"]
    body = jax.make_jaxpr(lambda *values: _inline(closed, values))(*closed.in_avals)
    return replace(found[0], body=body)


def _known(variable: Any, among: Mapping[Any, Any]) -> bool:
    from jax.extend import core

    return not isinstance(variable, core.Literal) and variable in among


def _inline(closed: Any, values: Sequence[Any]) -> list[Any]:
    """Run a closed jaxpr with the jitted functions that it calls laid open."""
    known: Values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known |= dict(zip(closed.jaxpr.invars, values, strict=True))
    for equation in closed.jaxpr.eqns:
        operands = [_value(variable, known) for variable in equation.invars]
        if str(equation.primitive) in _INLINED:
            inner = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
            results = _inline(inner, operands)
        else:
            results = run_equation(equation, operands)
        known |= dict(zip(equation.outvars, results, strict=True))
    return [_value(variable, known) for variable in closed.jaxpr.outvars]


def _value(variable: Any, known: Values) -> Any:
    from jax.extend import core

    return variable.val if isinstance(variable, core.Literal) else known[variable]


def run_equation(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """One equation on other operands."""
    primitive = equation.primitive
    results = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
    return list(results) if primitive.multiple_results else [results]


def evaluate(
    equations: Sequence[Any],
    wanted: Sequence[Any],
    known: Mapping[Any, Any],
    read: Read,
    settle: Callable[[Any, Any], Any] = lambda _, result: result,
) -> list[Any]:
    """The values of some variables; `read` gives those that are neither known nor made by an equation.

    An equation is one of JAX, or anything with `invars`, `outvars` and `run(operands)`; `settle` may lay out what it
    makes.
    """
    from jax.extend import core

    values: Values = dict(known)

    def value(variable: Any) -> Any:
        if isinstance(variable, core.Literal):
            return variable.val
        if variable not in values:
            values[variable] = read(variable)
        return values[variable]

    for equation in needed(equations, wanted, known):
        operands = [value(variable) for variable in equation.invars]
        results = equation.run(operands) if hasattr(equation, "run") else run_equation(equation, operands)
        values |= {v: settle(equation, result) for v, result in zip(equation.outvars, results, strict=True)}
    return [value(variable) for variable in wanted]


def needed(equations: Sequence[Any], wanted: Iterable[Any], known: Mapping[Any, Any]) -> list[Any]:
    """The equations that make what is wanted from what is known, each behind those that it reads."""
    from jax.extend import core

    makers = {variable: equation for equation in equations for variable in equation.outvars}
    ordered: dict[int, Any] = {}
    entered: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(v, False) for v in reversed([*wanted])]
    while waiting:
        item, is_done = waiting.pop()
        if is_done:
            ordered[id(item)] = item
            continue
        if isinstance(item, core.Literal) or item in known or item not in makers or id(makers[item]) in entered:
            continue
        entered.add(id(makers[item]))
        waiting.append((makers[item], True))
        waiting += [(variable, False) for variable in reversed(makers[item].invars)]
    return list(ordered.values())
