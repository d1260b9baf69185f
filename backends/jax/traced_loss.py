"""The loss as JAX traces it, cut into layers: by its scan over stacked layers, or by the parameters each layer reads.

The trace is flat (calls of jitted functions are inlined) and is evaluated on demand: only the equations that some
wanted values need are run. So the part before the scan, one layer of it, and the part behind it become functions of
their own. Pipeline stages, gathers of sharded parameters and recomputation are built from these functions.

A loss without a scan is cut by `cut_into_layers`. An equation belongs to the latest layer among what it reads: an
activation brings the layer that made it, and a parameter brings the first layer that reads it. A value that is made of
parameters and constants alone belongs to no layer and is made where it is read. An equation that only later layers
read, and that reads a single tensor (a norm before its scale), belongs to the first layer that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import jax
from jax.extend import core

from phaze.backends.jax.trace_rewriting import inlined
from phaze.ir import Graph

__all__ = [
    "Equation",
    "LayerScan",
    "LayerSegment",
    "TracedLoss",
    "cut_into_layers",
    "evaluate",
    "first_layers",
    "loss_of_trace",
    "needed_equations",
    "primitive_name",
    "read_variables",
    "run_equation",
    "trace_loss",
]


class ReplacedEquation(Protocol):
    """An equation of ours that stands for some equations of the trace and knows how to run itself."""

    @property
    def invars(self) -> Sequence[core.Var]:
        """The variables that it reads."""
        ...

    @property
    def outvars(self) -> Sequence[core.Var]:
        """The variables that it makes."""
        ...

    def run(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The values of `outvars`, given those of `invars`."""
        ...


Equation: TypeAlias = core.JaxprEqn | ReplacedEquation
"""What `evaluate` can run."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerScan:
    """The scan that takes stacked parameters apart, one layer per trip.

    Attributes:
        equation: the scan in the trace.
        stacked: for each scanned operand that is a parameter, by its place, the number of that parameter.
        body: the trace of one layer.
    """

    equation: core.JaxprEqn
    stacked: Mapping[int, int]
    body: core.ClosedJaxpr

    @property
    def length(self) -> int:
        """The number of layers."""
        return int(self.equation.params["length"])

    @property
    def constants(self) -> list[core.Var]:
        """The operands that all layers read."""
        return list(self.equation.invars[: self.equation.params["num_consts"]])

    @property
    def carried(self) -> list[core.Var]:
        """The operands that each layer hands on to the next."""
        first = self.equation.params["num_consts"]
        return list(self.equation.invars[first : first + self.equation.params["num_carry"]])

    @property
    def scanned(self) -> list[core.Var]:
        """The operands of which each layer takes one slice."""
        return _scanned_operands(self.equation)

    @property
    def weights(self) -> dict[core.Var, int]:
        """The body's variables of stacked parameters, ordered by place, with the parameters' numbers."""
        first = len(self.constants) + len(self.carried)
        return {self.body.jaxpr.invars[first + place]: self.stacked[place] for place in sorted(self.stacked)}

    @property
    def results(self) -> list[core.Var]:
        """What the last layer hands on."""
        return list(self.equation.outvars[: self.equation.params["num_carry"]])

    @property
    def collected(self) -> list[core.Var]:
        """What is stacked up from all layers."""
        return list(self.equation.outvars[self.equation.params["num_carry"] :])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedLoss:
    """A flat trace of loss(parameters, batch).

    Attributes:
        flat: the trace as JAX has it.
        equations: in the order in which JAX traced them.
        parameters: the variables of the flat parameters.
        batch: the variables of the flat batch.
        constants: the values that the trace brings along.
        loss: the variable of the result.
        scan: the scan over layers; None where there is none, or where it cannot be cut.
    """

    flat: core.ClosedJaxpr
    equations: tuple[core.JaxprEqn, ...]
    parameters: tuple[core.Var, ...]
    batch: tuple[core.Var, ...]
    constants: Mapping[core.Var, jax.Array]
    loss: core.Var
    scan: LayerScan | None

    def known_values(self, batch: Sequence[jax.Array]) -> dict[core.Var, jax.Array]:
        """What is known before any equation is run; parameters are not among it, `evaluate` reads them on demand."""
        return {**self.constants, **dict(zip(self.batch, batch, strict=True))}


def trace_loss(
    loss: Callable[[Sequence[jax.Array], Sequence[jax.Array]], jax.Array],
    parameters: Sequence[jax.ShapeDtypeStruct],
    batch: Sequence[jax.ShapeDtypeStruct],
) -> TracedLoss:
    """Trace a function of flat parameters and a flat batch, which are given as shapes."""
    closed = jax.make_jaxpr(loss)(list(parameters), list(batch))
    return loss_of_trace(inlined(closed), len(parameters))


def loss_of_trace(flat: core.ClosedJaxpr, parameter_count: int) -> TracedLoss:
    """A flat trace whose first arguments are so many parameters, and whose others are the batch."""
    jaxpr = flat.jaxpr
    parameter_variables = tuple(jaxpr.invars[:parameter_count])
    return TracedLoss(
        flat=flat,
        equations=tuple(jaxpr.eqns),
        parameters=parameter_variables,
        batch=tuple(jaxpr.invars[parameter_count:]),
        constants=dict(zip(jaxpr.constvars, flat.consts, strict=True)),
        loss=jaxpr.outvars[0],
        scan=_layer_scan(jaxpr, parameter_variables),
    )


def _layer_scan(jaxpr: core.Jaxpr, parameters: Sequence[core.Var]) -> LayerScan | None:
    """The only scan that takes parameters apart; None where there is none, or several, or others read them too."""
    numbers = {variable: number for number, variable in enumerate(parameters)}
    scans = []
    for equation in jaxpr.eqns:
        if primitive_name(equation) == "scan":
            scanned = enumerate(_scanned_operands(equation))
            # A literal has no hash, so that it must not be looked up.
            variables = {place: variable for place, variable in scanned if not isinstance(variable, core.Literal)}
            stacked = {place: numbers[variable] for place, variable in variables.items() if variable in numbers}
            if stacked:
                scans.append((equation, stacked))
    if len(scans) != 1:
        return None
    ((scan, stacked),) = scans
    is_any_scanned_twice = len(set(stacked.values())) < len(stacked)
    read_elsewhere = {
        variable for equation in jaxpr.eqns if equation is not scan for variable in read_variables(equation)
    }
    if is_any_scanned_twice or any(parameters[number] in read_elsewhere for number in stacked.values()):
        return None
    return LayerScan(equation=scan, stacked=stacked, body=scan.params["jaxpr"])


def _scanned_operands(scan: core.JaxprEqn) -> list[core.Var]:
    return list(scan.invars[scan.params["num_consts"] + scan.params["num_carry"] :])


def primitive_name(equation: Equation) -> str:
    """The name of a traced equation's primitive; the empty string for one of ours that replaces others."""
    return str(equation.primitive) if isinstance(equation, core.JaxprEqn) else ""


def read_variables(equation: Equation) -> list[core.Var]:
    """The variables that an equation reads, without its literals."""
    return [variable for variable in equation.invars if not isinstance(variable, core.Literal)]


def run_equation(equation: Equation, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Run one equation on these operands."""
    if not isinstance(equation, core.JaxprEqn):
        return equation.run(operands)
    primitive = equation.primitive
    results = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
    return list(results) if primitive.multiple_results else [results]


def _refuse_to_read(variable: core.Var) -> jax.Array:
    raise AssertionError(f"equations read {variable}, which is neither known nor made by one of them")


def evaluate(
    equations: Sequence[Equation],
    wanted: Sequence[core.Var],
    known: Mapping[core.Var, jax.Array],
    read: Callable[[core.Var], jax.Array] = _refuse_to_read,
    lay_out: Callable[[Equation, jax.Array], jax.Array] = lambda _, result: result,
) -> list[jax.Array]:
    """The values of the wanted variables, for which only the needed equations are run.

    `read` gives the value of a variable that is neither known nor made by an equation; by default there must be none.
    `lay_out` may constrain how a result of an equation lies on the devices.
    """
    values = dict(known)

    def value(variable: core.Var | core.Literal) -> jax.Array:
        if isinstance(variable, core.Literal):
            return variable.val
        if variable not in values:
            values[variable] = read(variable)
        return values[variable]

    for equation in needed_equations(equations, wanted, known):
        operands = [value(variable) for variable in equation.invars]
        results = run_equation(equation, operands)
        values |= {
            variable: lay_out(equation, result) for variable, result in zip(equation.outvars, results, strict=True)
        }
    return [value(variable) for variable in wanted]


def needed_equations(
    equations: Sequence[Equation], wanted: Iterable[core.Var], known: Mapping[core.Var, object]
) -> list[Equation]:
    """The equations that make what is wanted from what is known, each behind those that it reads."""
    makers = {variable: equation for equation in equations for variable in equation.outvars}
    ordered: list[Equation] = []
    entered: set[int] = set()
    # A depth-first walk without recursion: an equation is appended when it comes up for the second time.
    variables_to_visit = reversed([*wanted])
    waiting: list[tuple[core.Var | Equation, bool]] = [(variable, False) for variable in variables_to_visit]
    while waiting:
        item, is_equation_with_its_operands_done = waiting.pop()
        if is_equation_with_its_operands_done:
            ordered.append(item)
            continue
        if isinstance(item, core.Literal) or item in known or item not in makers or id(makers[item]) in entered:
            continue
        entered.add(id(makers[item]))
        waiting.append((makers[item], True))
        waiting += [(variable, False) for variable in reversed(makers[item].invars)]
    return ordered


@dataclass(frozen=True, slots=True)
class LayerSegment:
    """One layer of a loss without a scan.

    Attributes:
        layer: the number of the layer.
        entering: the variables that it reads from the batch and from other layers.
        leaving: the variables that other layers, or the caller of the loss, read of it.
    """

    layer: int
    entering: tuple[core.Var, ...]
    leaving: tuple[core.Var, ...]


def first_layers(parameter_names: Sequence[str], graph: Graph) -> tuple[int | None, ...]:
    """For each parameter the first layer that reads it; None for one that no layer reads under this name."""
    first: dict[str, int] = {}
    for layer in graph.layers:
        for name in layer.parameters:
            first.setdefault(name, layer.index)
    return tuple(first.get(name) for name in parameter_names)


def cut_into_layers(
    trace: TracedLoss, parameter_layers: Sequence[int | None], *, defers: bool = True
) -> list[LayerSegment]:
    """The layers in order; one segment with everything where no parameter has a layer.

    `defers` says whether equations belong to the first layer that reads them, where that is possible.
    """
    # The layer of each value that is made of parameters alone (None where their layers are unknown) ...
    weight_layers: dict[core.Var, int | None] = dict(zip(trace.parameters, parameter_layers, strict=True))
    # ... and of each value that depends on the batch.
    layers: dict[core.Var, int] = dict.fromkeys(trace.batch, 0)
    used = needed_equations(trace.equations, [trace.loss], {})
    for equation in used:
        inputs = read_variables(equation)
        activation_layers = [layers[variable] for variable in inputs if variable in layers]
        read_layers = [layer for variable in inputs if (layer := weight_layers.get(variable)) is not None]
        if activation_layers:
            layers |= dict.fromkeys(equation.outvars, max(activation_layers + read_layers))
        elif read_layers or any(variable in weight_layers for variable in inputs):
            weight_layers |= dict.fromkeys(equation.outvars, max(read_layers, default=None))
    return _segments(
        trace, used, _with_deferred_equations(trace, used, layers, set(weight_layers)) if defers else layers
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Deferral:
    """Which equations belong to a later layer than the one that made what they read.

    Attributes:
        batch: the variables of the batch.
        layers: the layer of each variable that depends on the batch.
        readers: the equations that read a variable.
        makers: the equation that makes a variable.
        deferred: the equations that may be deferred, by their id; `settle` drops those that may not.
    """

    batch: frozenset[core.Var]
    layers: dict[core.Var, int]
    readers: dict[core.Var, list[Equation]]
    makers: dict[core.Var, Equation]
    deferred: dict[int, Equation]

    def settle(self) -> None:
        """Drop equations that cannot be deferred, until nothing changes."""
        while wrong := [key for key, equation in self.deferred.items() if not self._may_be_deferred(equation)]:
            for key in wrong:
                del self.deferred[key]

    def _may_be_deferred(self, equation: Equation) -> bool:
        """Whether only later layers read it, and it reads at most one tensor that would not cross to them anyway."""
        layer, readers = self.layers[equation.outvars[0]], self.readers_of(equation)
        newly_crossing = {
            variable
            for variable in read_variables(equation)
            if variable in self.layers and self._newly_crosses(variable, layer)
        }
        other_readers = [reader for variable in newly_crossing for reader in self.readers[variable]]
        return (
            bool(readers)
            and len(newly_crossing) < 2
            and all(self._is_later(reader, layer) for reader in (*readers, *other_readers))
        )

    def readers_of(self, equation: Equation) -> list[Equation]:
        """The equations that read what this one makes."""
        return [reader for variable in equation.outvars for reader in self.readers.get(variable, ())]

    def _newly_crosses(self, variable: core.Var, layer: int) -> bool:
        """Whether a variable would have to be handed to a later layer only because its reader is deferred."""
        if variable in self.batch:
            return False
        if id(self.makers[variable]) in self.deferred and self.layers[variable] == layer:
            return False
        return all(self.layers.get(reader.outvars[0], 0) <= layer for reader in self.readers[variable])

    def _is_later(self, equation: Equation, layer: int) -> bool:
        its_layer = self.layers.get(equation.outvars[0], -1)
        return its_layer > layer or (its_layer == layer and id(equation) in self.deferred)


def _with_deferred_equations(
    trace: TracedLoss, used: Sequence[Equation], layers: dict[core.Var, int], weights: set[core.Var]
) -> dict[core.Var, int]:
    """The layers with equations moved to the first layer that reads them, where no more crosses to it than before."""
    readers: dict[core.Var, list[Equation]] = {}
    for equation in used:
        for variable in {variable for variable in read_variables(equation) if variable in layers}:
            readers.setdefault(variable, []).append(equation)
    active = [equation for equation in used if equation.outvars[0] in layers]
    deferral = _Deferral(
        batch=frozenset(trace.batch),
        layers=layers,
        readers=readers,
        makers={variable: equation for equation in active for variable in equation.outvars},
        deferred={id(equation): equation for equation in active if weights.isdisjoint(read_variables(equation))},
    )
    deferral.settle()
    moved = dict(layers)
    for equation in reversed(used):
        if id(equation) in deferral.deferred:
            first = min(moved[reader.outvars[0]] for reader in deferral.readers_of(equation))
            moved |= dict.fromkeys(equation.outvars, first)
    return moved


def _segments(trace: TracedLoss, used: Sequence[Equation], layers: dict[core.Var, int]) -> list[LayerSegment]:
    batch = set(trace.batch)
    # Dictionaries without values keep the order of the trace, which sets would not.
    read: dict[int, dict[core.Var, None]] = {}
    made: dict[int, dict[core.Var, None]] = {}
    for equation in used:
        layer = layers.get(equation.outvars[0])
        if layer is None:
            continue
        made.setdefault(layer, {}).update(dict.fromkeys(equation.outvars))
        read.setdefault(layer, {}).update(
            dict.fromkeys(variable for variable in read_variables(equation) if variable in layers)
        )
    segments = []
    for layer in sorted(made):
        read_elsewhere = {variable for reader in read if reader != layer for variable in read[reader]} | {trace.loss}
        entering = tuple(variable for variable in read[layer] if variable not in made[layer] or variable in batch)
        leaving = tuple(variable for variable in made[layer] if variable in read_elsewhere)
        segments.append(LayerSegment(layer=layer, entering=entering, leaving=leaving))
    return segments
