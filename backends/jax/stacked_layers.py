"""Equal layers that a loss runs one after the other, found in its trace and put together as one scan over a stack.

Pipeline stages are parts of a scan over stacked parameters (`pipeline_scans.py`). A model that has its layers in a list
becomes such a scan here: the trace is cut into layers, the equations of every layer are compared with those of the
second, and each parameter of a layer is stacked with its counterparts. What enters a layer is one of these:

carried     the layer before makes it; the first layer reads it from what comes before the layers
constant    all layers read the same value
other       every layer reads a value of its own that is no parameter, such as a random key or a number in the code

The stack lies in the place of the first layer's parameter. Those of the other layers keep their places, which are
empty, so that the parameters have the user's structure. `LayerStacks` leads from the user's arrays to these and back.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from phaze.backends.jax.traced_loss import (
    Equation,
    LayerSegment,
    TracedLoss,
    cut_into_layers,
    evaluate,
    loss_of_trace,
    needed_equations,
    read_variables,
    run_equation,
)
from phaze.errors import PlanError

__all__ = ["EMPTY_SHAPE", "LayerStacks", "stack_equal_layers"]

EMPTY_SHAPE = (0,)
"""The shape of what lies in the place of a parameter that is part of another one's stack."""

_NO_AXES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LayerStacks:
    """Which parameters are stored as one stack: for every stack their numbers, first layer first."""

    stacks: tuple[tuple[int, ...], ...] = ()

    @property
    def absent(self) -> frozenset[int]:
        """The numbers of parameters whose place is empty."""
        return frozenset(number for stack in self.stacks for number in stack[1:])

    @property
    def layers_of(self) -> dict[int, tuple[int, ...]]:
        """For the number in whose place a stack lies, the numbers of its layers."""
        return {stack[0]: stack for stack in self.stacks}

    def stacked(self, values: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
        """Arrays by the numbers of their parameters, those of equal layers stacked."""
        stacked = dict(values)
        for stack in self.stacks:
            if stack[0] in values:
                stacked[stack[0]] = jnp.stack([values[number] for number in stack])
                stacked |= {number: jnp.zeros(EMPTY_SHAPE, values[number].dtype) for number in stack[1:]}
        return stacked

    def unstacked(self, values: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
        """What `stacked` was made of."""
        single = dict(values)
        for stack in self.stacks:
            if stack[0] in values:
                single |= {number: values[stack[0]][layer] for layer, number in enumerate(stack)}
        return single


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """One of the equal layers, matched with the second of them.

    Attributes:
        leaving: what it makes for others.
        equations: those that make it.
        values: for every variable of the second layer's equations what stands in its place in this layer.
        literals: for every literal of the second layer's equations, by equation and operand, that of this layer.
    """

    leaving: tuple[core.Var, ...]
    equations: list[core.JaxprEqn]
    values: dict[core.Var, core.Var | core.Literal] = field(default_factory=dict)
    literals: dict[tuple[int, int], core.Literal] = field(default_factory=dict)


def stack_equal_layers(
    trace: TracedLoss,
    parameter_layers: Sequence[int | None],
    layers: Sequence[int],
    axes: Mapping[str, int] = _NO_AXES,
) -> tuple[TracedLoss, LayerStacks]:
    """The same loss with its equal layers, whose numbers are given, as a scan, and what was stacked for it.

    Layers are cut behind their last parameter, or before the first of the next, whichever makes them equal. `axes` are
    the sizes of the mesh axes with collectives in the trace. Raises PlanError where neither does, or where layers do
    more than hand something to the next.
    """
    found: list[tuple[TracedLoss, LayerStacks]] = []

    def stack() -> tuple[()]:
        found.append(_stacked_either_way(trace, parameter_layers, layers))
        return ()

    # Tracing knows the sizes of axes inside of a trace that was told them.
    jax.make_jaxpr(stack, axis_env=list(axes.items()))()
    return found[0]


def _stacked_either_way(
    trace: TracedLoss, parameter_layers: Sequence[int | None], layers: Sequence[int]
) -> tuple[TracedLoss, LayerStacks]:
    try:
        return _stacked(trace, cut_into_layers(trace, parameter_layers), layers)
    except PlanError as refusal:
        try:
            return _stacked(trace, cut_into_layers(trace, parameter_layers, defers=False), layers)
        except PlanError:
            raise refusal from None


def _stacked(
    trace: TracedLoss, segments: Sequence[LayerSegment], layers: Sequence[int]
) -> tuple[TracedLoss, LayerStacks]:
    in_layers = [segment for segment in segments if segment.layer in layers]
    if len(in_layers) < max(len(layers), 2):
        raise _unequal(f"{len(in_layers)} of {len(layers)} are told apart by their parameters")
    blocks = _matched_layers(trace, in_layers)
    template, numbers = blocks[1], {variable: number for number, variable in enumerate(trace.parameters)}
    made = {variable for equation in template.equations for variable in equation.outvars}
    entering = [variable for variable in template.values if variable not in made]
    carried = _carried(blocks, entering)
    outside = _equations_outside(trace, blocks, [variable for variable in entering if variable not in carried])
    alone = _parameters_of_single_layers(trace, blocks, outside)
    own, constants, others = list[core.Var](), list[core.Var](), list[core.Var]()
    for variable in (variable for variable in entering if variable not in carried):
        values = [block.values[variable] for block in blocks]
        if all(not isinstance(value, core.Literal) and value in alone for value in values):
            own.append(variable)
        else:
            (constants if all(_is_same_value(value, variable) for value in values) else others).append(variable)
    stacks = LayerStacks(tuple(tuple(numbers[block.values[variable]] for block in blocks) for variable in own))
    scanned = _ScannedLoss(
        trace=trace, layers=blocks, carried=carried, constants=constants, others=others, own=own, stacks=stacks
    )
    return loss_of_trace(scanned.retraced(), len(trace.parameters)), stacks


def _matched_layers(trace: TracedLoss, segments: Sequence[LayerSegment]) -> list[_Layer]:
    blocks = []
    for segment in segments:
        known = dict.fromkeys([*segment.entering, *trace.constants])
        equations = needed_equations(trace.equations, segment.leaving, known)
        blocks.append(_Layer(leaving=segment.leaving, equations=list(equations)))
    for block in blocks:
        _match(trace, blocks[1], block)
    return blocks


def _match(trace: TracedLoss, template: _Layer, block: _Layer) -> None:
    """Find what stands in the places of the template's variables and literals; raises PlanError where layers differ."""
    if len(template.equations) != len(block.equations) or len(template.leaving) != len(block.leaving):
        raise _unequal("they do not compute the same")
    for number, (planned, equation) in enumerate(zip(template.equations, block.equations, strict=True)):
        if not _is_same_function(planned, equation):
            raise _unequal(f"{planned.primitive} stands beside {equation.primitive} in another way")
        for place, (variable, value) in enumerate(zip(planned.invars, equation.invars, strict=True)):
            if isinstance(variable, core.Literal):
                if not isinstance(value, core.Literal):
                    raise _unequal("a number in one of them is computed in another")
                block.literals[number, place] = value
            elif not _is_same_value(block.values.setdefault(variable, value), value):
                raise _unequal("they read other values")
        block.values.update(zip(planned.outvars, equation.outvars, strict=True))
    if any(
        block.values.get(variable) is not value for variable, value in zip(template.leaving, block.leaving, strict=True)
    ):
        raise _unequal("they hand on other values")


def _unequal(why: str) -> PlanError:
    return PlanError(
        f"the plan has several stages, and the model's layers are not equal as JAX traces them: {why}. Plan with "
        "strategy pp=1, or write the layers as a scan over stacked parameters."
    )


def _is_same_value(first: core.Var | core.Literal, second: core.Var | core.Literal) -> bool:
    if isinstance(first, core.Literal) or isinstance(second, core.Literal):
        are_literals = isinstance(first, core.Literal) and isinstance(second, core.Literal)
        return are_literals and bool(np.array_equal(first.val, second.val))
    return first is second


def _is_same_function(first: core.JaxprEqn, second: core.JaxprEqn) -> bool:
    """Whether two equations compute the same of their operands, and have the same gradients."""
    if first is second:
        return True
    avals = [
        [(variable.aval.shape, variable.aval.dtype) for variable in (*equation.invars, *equation.outvars)]
        for equation in (first, second)
    ]
    if first.primitive is not second.primitive or avals[0] != avals[1] or first.params.keys() != second.params.keys():
        return False
    functions = [name for name, value in first.params.items() if callable(value) or hasattr(value, "call_wrapped")]
    others = [name for name in first.params if name not in functions]
    if not all(_is_same_parameter(first.params[name], second.params[name]) for name in others):
        return False
    # A rule of the user's for gradients is compared by what it does.
    is_same = all(first.params[name] is second.params[name] for name in functions)
    return is_same or _gradient_text(first) == _gradient_text(second)


def _is_same_parameter(first: object, second: object) -> bool:
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return len(first) == len(second) and all(map(_is_same_parameter, first, second))
    if hasattr(first, "eqns") and hasattr(second, "eqns"):
        # Texts of traces name variables in their order.
        return str(first) == str(second) and _is_same_parameter(
            list(getattr(first, "consts", ())), list(getattr(second, "consts", ()))
        )
    if hasattr(first, "shape") and hasattr(second, "shape"):
        return bool(np.array_equal(first, second))  # type: ignore[arg-type]
    return bool(first == second)


def _gradient_text(equation: core.JaxprEqn) -> str:
    """What an equation with functions in it does, and what its gradients do, as a text."""
    floating = [
        place for place, variable in enumerate(equation.invars) if jnp.issubdtype(variable.aval.dtype, jnp.floating)
    ]

    def run(values: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        def of_floating(given: list[jax.Array]) -> list[jax.Array]:
            operands = list(values)
            for place, value in zip(floating, given, strict=True):
                operands[place] = value
            results = run_equation(equation, operands)
            return [result for result in results if jnp.issubdtype(result.dtype, jnp.floating)]

        results, pull_back = jax.vjp(of_floating, [values[place] for place in floating])
        return results, pull_back(results)[0]

    shapes = [jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in equation.invars]
    closed = jax.make_jaxpr(run)(shapes)
    return f"{closed.jaxpr} {[np.asarray(value).tobytes() for value in closed.consts]}"


def _carried(blocks: Sequence[_Layer], entering: Sequence[core.Var]) -> dict[core.Var, int]:
    """The variables that every layer takes from the one before, with their place among what that one hands on."""
    places = {variable: place for place, variable in enumerate(blocks[0].leaving)}
    carried = {variable: places[variable] for variable in entering if variable in places}
    for before, block in itertools.pairwise(blocks):
        if any(block.values[variable] is not before.leaving[place] for variable, place in carried.items()):
            raise _unequal("they do not all read what the layer before them made")
    return carried


def _equations_outside(trace: TracedLoss, blocks: Sequence[_Layer], others: Sequence[core.Var]) -> list[Equation]:
    """The equations that run before and behind the layers; `others` are what layers read and do not carry.

    Raises PlanError where one of them reads from the middle of the layers, or a layer from one far before it.
    """
    of_batch = set(trace.batch)
    for equation in trace.equations:
        if not of_batch.isdisjoint(read_variables(equation)):
            of_batch.update(equation.outvars)
    inside = {id(equation) for block in blocks for equation in block.equations if equation.outvars[0] in of_batch}
    before = [block.values[variable] for block in blocks for variable in others]
    after = needed_equations(trace.equations, [trace.loss], dict.fromkeys(blocks[-1].leaving))
    outside = [*needed_equations(trace.equations, before, {}), *after]
    if any(id(equation) in inside for equation in outside):
        raise PlanError(
            "the plan has several stages, and something reads what single layers made, beside the layer behind them; "
            "carry it from layer to layer instead, or plan with strategy pp=1."
        )
    return outside


def _parameters_of_single_layers(
    trace: TracedLoss, blocks: Sequence[_Layer], outside: Sequence[Equation]
) -> set[core.Var]:
    """The parameters that one layer reads, and nothing else."""
    readers = Counter(
        variable
        for block in blocks
        for variable in {variable for equation in block.equations for variable in read_variables(equation)}
    )
    read_outside = {variable for equation in outside for variable in read_variables(equation)}
    return {variable for variable in trace.parameters if readers[variable] == 1 and variable not in read_outside}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ScannedLoss:
    """The loss as it is traced anew; variables are those of the second layer, by which the others were matched."""

    trace: TracedLoss
    layers: Sequence[_Layer]
    carried: Mapping[core.Var, int]
    constants: Sequence[core.Var]
    others: Sequence[core.Var]
    own: Sequence[core.Var]
    stacks: LayerStacks

    def retraced(self) -> core.ClosedJaxpr:
        """The trace in which the layers are a scan."""
        shapes = {
            number: jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)
            for number, variable in enumerate(self.trace.parameters)
        }
        parameters = jax.eval_shape(self.stacks.stacked, shapes)
        batch = [jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in self.trace.batch]
        return jax.make_jaxpr(self._run)(*(parameters[number] for number in sorted(parameters)), *batch)

    def _run(self, *arguments: jax.Array) -> jax.Array:
        trace, count = self.trace, len(self.trace.parameters)
        parameters = dict(zip(trace.parameters, arguments, strict=False))
        known = trace.known_values(arguments[count:])

        def outside(values: Sequence[core.Var | core.Literal]) -> list[jax.Array]:
            return evaluate(trace.equations, values, known, lambda variable: parameters[variable])

        first = self.layers[0]
        entering = dict(zip(self.carried, outside([first.values[variable] for variable in self.carried]), strict=True))
        # What only the last layer hands on, and no layer takes, begins as nothing.
        carry = [
            next((entering[variable] for variable, at in self.carried.items() if at == place), None)
            for place in range(len(first.leaving))
        ]
        carry = [
            jnp.zeros(made.aval.shape, made.aval.dtype) if value is None else jnp.asarray(value, made.aval.dtype)
            for value, made in zip(carry, first.leaving, strict=True)
        ]
        constants = dict(zip(self.constants, outside(self.constants), strict=True))
        differing = self._differing_literals()
        slices = [
            [parameters[trace.parameters[stack[0]]] for stack in self.stacks.stacks],
            [jnp.stack(outside([layer.values[variable] for layer in self.layers])) for variable in self.others],
            [
                jnp.asarray([layer.literals[at].val for layer in self.layers], self.layers[1].literals[at].aval.dtype)
                for at in differing
            ],
        ]

        def layer(carry: list[jax.Array], slices: list[list[jax.Array]]) -> tuple[list[jax.Array], None]:
            own, others, literals = slices
            values = {
                **constants,
                **dict(zip(self.own, own, strict=True)),
                **dict(zip(self.others, others, strict=True)),
            }
            values |= {variable: carry[place] for variable, place in self.carried.items()}
            return self._run_layer({**trace.constants, **values}, dict(zip(differing, literals, strict=True))), None

        leaving, _ = jax.lax.scan(layer, carry, slices)
        known |= dict(zip(self.layers[-1].leaving, leaving, strict=True))
        return outside([trace.loss])[0]

    def _differing_literals(self) -> list[tuple[int, int]]:
        """The literals, by equation and operand, that are not the same in all layers."""
        return [
            at
            for at, literal in self.layers[1].literals.items()
            if not all(_is_same_value(layer.literals[at], literal) for layer in self.layers)
        ]

    def _run_layer(
        self, values: dict[core.Var, jax.Array], literals: Mapping[tuple[int, int], jax.Array]
    ) -> list[jax.Array]:
        template = self.layers[1]
        for number, equation in enumerate(template.equations):
            operands = [
                literals.get((number, place), variable.val) if isinstance(variable, core.Literal) else values[variable]
                for place, variable in enumerate(equation.invars)
            ]
            values |= dict(zip(equation.outvars, run_equation(equation, operands), strict=True))
        return [values[variable] for variable in template.leaving]
