"""Context parallelism: a traced loss, rewritten for one of the devices that every sequence is split over.

Each of cp devices has an equal part of every sequence. Every value of the trace is either whole (the same on all of
these devices) or a `_Part` along one dimension, and every equation runs on parts where a rule here says that this gives
the part of its result: elementwise functions, products, sums, lookups and moves of data. Where no rule holds, the parts
are gathered and the equation runs whole on every device, so that what is computed never depends on the rules:

  keys and values of attention   gathered, because the product pairs every query with all of them
  sums over positions            partial sums are added up (psum)
  anything else without a rule   gathered: scans and convolutions along the sequence, scatters, and functions with a
                                 gradient of their own (custom_vjp), which does not say what a device's share is

A gathered tensor that was only repeated or moved (keys repeated for grouped queries) is gathered before that. Where a
model drops the last positions (`logits[:, :-1]` against shifted labels), parts stay as they are: the last of them is
longer than what it has, and sums leave out what is behind the end. JAX differentiates the rewritten trace: the
transpose of a gather reduces and scatters, and the gradient of a parameter on one device is its share of a sum over all
of them, divided by cp, because each device computes the same loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core

from phaze.backends.jax.tensor_parts import (
    ALONG_ONE,
    ELEMENTWISE,
    MOVES,
    REDUCTIONS,
    bind,
    local_shape,
    moved_slice,
    place_in_product,
)
from phaze.backends.jax.traced_loss import TracedLoss, loss_of_trace, primitive_name

__all__ = ["AXIS", "SequenceInput", "loss_of_context", "sequence_inputs"]

AXIS = "cp"
"""The mesh axis over which sequences are split."""


class SequenceInput(StrEnum):
    """How an argument reaches the devices of a sequence, which is its dimension 1: as a part, whole and cut, or whole.

    What is cut there has a length that they do not divide, or is read at other positions as well (labels shifted by
    one), so that its parts would have to be gathered.
    """

    PART = "part"
    CUT = "cut"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """A part of a tensor along a dimension; `make_whole`, if any, makes the whole of less than its parts.

    All parts have ceil(length / cp) positions. Where these are more than `length`, the last ones repeat positions of
    the tensor, or have those that it lost.
    """

    value: jax.Array
    dim: int
    length: int
    make_whole: Callable[[], jax.Array] | None = None


_Value: TypeAlias = jax.Array | _Part

_REMADE = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "transpose"})
"""Primitives of one operand whose whole result is made of the whole operand rather than gathered."""


def sequence_inputs(trace: TracedLoss, has_sequence: Sequence[bool], cp: int) -> tuple[SequenceInput, ...]:
    """How the arguments of the batch reach cp devices; `has_sequence` says whose dimension 1 is the sequence."""
    shifted = {
        equation.invars[0]
        for equation in trace.equations
        if primitive_name(equation) == "slice" and len(equation.invars[0].aval.shape) > 1
        if moved_slice(equation, 1, cp) is None
    }

    def form(variable: core.Var) -> SequenceInput:
        is_divided = variable.aval.shape[1] % cp == 0
        return SequenceInput.PART if is_divided and variable not in shifted else SequenceInput.CUT

    pairs = zip(trace.batch, has_sequence, strict=True)
    return tuple(form(variable) if has else SequenceInput.WHOLE for variable, has in pairs)


def loss_of_context(trace: TracedLoss, inputs: Sequence[SequenceInput], cp: int) -> TracedLoss:
    """The trace that one of cp devices runs; `inputs` says how the arguments of the batch come.

    The result is the whole loss, on every device.
    """
    jaxpr, first = trace.flat.jaxpr, len(trace.parameters)
    forms = [SequenceInput.WHOLE] * first + list(inputs)

    def run(*arguments: jax.Array) -> list[jax.Array]:
        one = _OneContext(cp)
        given = zip(arguments, forms, jaxpr.invars, strict=True)
        values = [one.entering(value, form, variable) for value, form, variable in given]
        return [one.whole(result) for result in one.run(trace.flat, values)]

    shapes = [
        jax.ShapeDtypeStruct(
            local_shape(variable.aval.shape, 1 if form is SequenceInput.PART else None, cp), variable.aval.dtype
        )
        for variable, form in zip(jaxpr.invars, forms, strict=True)
    ]
    return loss_of_trace(jax.make_jaxpr(run, axis_env=[(AXIS, cp)])(*shapes), first)


@dataclass(frozen=True, slots=True)
class _OneContext:
    """Runs traces as one of cp devices."""

    cp: int

    def whole(self, value: _Value) -> jax.Array:
        """A value whole: gathered, or made of what was gathered."""
        if not isinstance(value, _Part):
            return value
        if value.make_whole is not None:
            return value.make_whole()
        gathered = jax.lax.all_gather(value.value, AXIS, axis=value.dim, tiled=True)
        return jax.lax.slice_in_dim(gathered, 0, value.length, axis=value.dim)

    def entering(self, value: jax.Array, form: SequenceInput, variable: core.Var) -> _Value:
        """An argument as the trace reads it."""
        if form is SequenceInput.WHOLE:
            return value
        length = variable.aval.shape[1]
        if form is SequenceInput.PART:
            return _Part(value=value, dim=1, length=length)
        return _Part(value=self.part(value, 1), dim=1, length=length, make_whole=lambda: value)

    def part(self, value: _Value, dim: int) -> jax.Array:
        """This device's part of a value along a dimension."""
        if isinstance(value, _Part) and value.dim == dim:
            return value.value
        whole = self.whole(value)
        length = whole.shape[dim]
        size = -(-length // self.cp)
        if size * self.cp > length:
            missing = [(0, size * self.cp - length if place == dim else 0) for place in range(whole.ndim)]
            # Positions of the tensor once more: of zeros, a quotient or a logarithm could be no number.
            whole = jnp.pad(whole, missing, mode="edge")
        return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(AXIS) * size, size, dim)

    def counted(self, value: _Part) -> jax.Array:
        """A part with zeros behind the end of the tensor."""
        size = value.value.shape[value.dim]
        if size * self.cp == value.length:
            return value.value
        shape = [size if place == value.dim else 1 for place in range(value.value.ndim)]
        is_there = jax.lax.axis_index(AXIS) * size + jnp.arange(size).reshape(shape) < value.length
        return jnp.where(is_there, value.value, jnp.zeros((), value.value.dtype))

    def run(self, closed: core.ClosedJaxpr, arguments: Sequence[_Value]) -> list[_Value]:
        """The results of a trace, whole or as parts."""
        values: dict[core.Var, _Value] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values |= dict(zip(closed.jaxpr.invars, arguments, strict=True))

        def read(variable: core.Var | core.Literal) -> _Value:
            return variable.val if isinstance(variable, core.Literal) else values[variable]

        for number, equation in enumerate(closed.jaxpr.eqns):
            operands = [read(variable) for variable in equation.invars]
            later = closed.jaxpr.eqns[number + 1 :]
            values |= dict(zip(equation.outvars, self._results(equation, operands, later), strict=True))
        return [read(variable) for variable in closed.jaxpr.outvars]

    def _results(
        self, equation: core.JaxprEqn, operands: Sequence[_Value], later: Sequence[core.JaxprEqn]
    ) -> list[_Value]:
        parts = [operand for operand in operands if isinstance(operand, _Part)]
        results: list[_Value] | None = None
        if parts:
            results = self._results_of_parts(equation, operands, parts[0].dim, later)
        if results is None:
            whole = [self.whole(operand) for operand in operands]
            return list(bind(equation, whole))
        if primitive_name(equation) in _REMADE:
            results = [self._remade(equation, operands[0], result) for result in results]
        return results

    def _results_of_parts(
        self, equation: core.JaxprEqn, operands: Sequence[_Value], dim: int, later: Sequence[core.JaxprEqn]
    ) -> list[_Value] | None:
        """The results where some operands are parts, the first along `dim`; None where all must be whole."""
        name = primitive_name(equation)
        if name in ELEMENTWISE:
            return self._elementwise(equation, operands, dim)
        if name in MOVES:
            return self._moved(equation, operands[0], dim)
        if name in ALONG_ONE:
            is_along = equation.params[ALONG_ONE[name]] == dim
            return None if is_along else self._on_parts(equation, operands, dim)
        match name:
            case "dot_general":
                return [self._product(equation, operands, later)]
            case "scan":
                return self._scan(equation, operands)
            case "custom_jvp_call":
                return self._with_own_derivative(equation, operands)
            case "gather":
                return self._look_up(equation, *operands)
            case "jit":
                return self.run(equation.params["jaxpr"], operands)
            case _:
                return None

    def _on_parts(self, equation: core.JaxprEqn, operands: Sequence[_Value], dim: int) -> list[_Value]:
        results = bind(equation, [self.part(operand, dim) for operand in operands])
        return _parts(results, [dim] * len(results), equation.outvars)

    def _moved(self, equation: core.JaxprEqn, operand: _Value, dim: int) -> list[_Value] | None:
        """What moves or reduces one operand; sums over the split dimension itself are added up."""
        move = MOVES[primitive_name(equation)](equation, dim, self.cp)
        if move is not None:
            result_dim, changes = move
            results = bind(equation, [self.part(operand, dim)], **changes)
            return _parts(results, [result_dim] * len(results), equation.outvars)
        assert isinstance(operand, _Part)
        match primitive_name(equation):
            case "reduce_sum":
                return [jax.lax.psum(result, AXIS) for result in bind(equation, [self.counted(operand)])]
            case "slice" if operand.make_whole is not None and equation.outvars[0].aval.shape[dim] >= self.cp:
                (whole,) = bind(equation, [operand.make_whole()])
                length = whole.shape[dim]
                return [_Part(value=self.part(whole, dim), dim=dim, length=length, make_whole=lambda: whole)]
            case _:
                return None

    def _look_up(self, equation: core.JaxprEqn, table: _Value, indices: _Value) -> list[_Value] | None:
        """Rows of a whole table, looked up by a part of the indices; or one element for each position of both."""
        numbers = equation.params["dimension_numbers"]
        rank, result_rank = len(equation.invars[1].aval.shape), len(equation.outvars[0].aval.shape)
        pairs = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
        if isinstance(table, _Part) and table.dim not in pairs:
            return None
        index_dim = pairs[table.dim] if isinstance(table, _Part) else _dim(indices)
        if index_dim is None or index_dim == rank - 1 or (isinstance(indices, _Part) and indices.dim != index_dim):
            return None
        table_dim = next((dim for dim, of_indices in pairs.items() if of_indices == index_dim), None)
        local_table = self.whole(table) if table_dim is None else self.part(table, table_dim)
        (result,) = bind(equation, [local_table, self.part(indices, index_dim)])
        positions = [dim for dim in range(result_rank) if dim not in numbers.offset_dims]
        return _parts([result], [positions[index_dim]], equation.outvars)

    def _remade(self, equation: core.JaxprEqn, operand: _Value, result: _Value) -> _Value:
        """A result that was only moved or repeated: its whole is made of the whole operand."""
        if not isinstance(result, _Part):
            return result
        return replace(result, make_whole=lambda: bind(equation, [self.whole(operand)])[0])

    def _elementwise(self, equation: core.JaxprEqn, operands: Sequence[_Value], dim: int) -> list[_Value] | None:
        shape = equation.outvars[0].aval.shape
        shapes = [variable.aval.shape for variable in equation.invars]
        if any(given != () and len(given) != len(shape) for given in shapes):
            return None
        local = [
            self.whole(operand) if given == () or given[dim] != shape[dim] else self.part(operand, dim)
            for operand, given in zip(operands, shapes, strict=True)
        ]
        results = bind(equation, local)
        return _parts(results, [dim] * len(results), equation.outvars)

    def _product(self, equation: core.JaxprEqn, operands: Sequence[_Value], later: Sequence[core.JaxprEqn]) -> _Value:
        """A product of two tensors, of which at least one is a part."""
        sides = list(operands)
        if all(isinstance(side, _Part) for side in sides):
            gathered = self._side_to_gather(equation, sides, later)
            if gathered is not None:
                sides[gathered] = self.whole(sides[gathered])
        side = next(number for number in (0, 1) if isinstance(sides[number], _Part))
        own = sides[side]
        assert isinstance(own, _Part)
        other, place = sides[1 - side], place_in_product(equation, side, own.dim)
        if place.kind != "free":
            dims = equation.params["dimension_numbers"][place.kind == "batched"]
            other = self.part(other, dims[1 - side][place.number])
        assert place.kind != "free" or not isinstance(other, _Part)
        if place.kind == "contracted":
            own = replace(own, value=self.counted(own))
        pair = (own.value, other) if side == 0 else (other, own.value)
        (result,) = bind(equation, [value.value if isinstance(value, _Part) else value for value in pair])
        if place.kind == "contracted":
            return jax.lax.psum(result, AXIS)
        return _parts([result], [place.result_dim], equation.outvars)[0]

    def _side_to_gather(
        self, equation: core.JaxprEqn, sides: Sequence[_Value], later: Sequence[core.JaxprEqn]
    ) -> int | None:
        """Which of two parts is gathered: a key, whose positions are summed over later; None where both fit."""
        assert isinstance(sides[0], _Part)
        assert isinstance(sides[1], _Part)
        places = [place_in_product(equation, side, sides[side].dim) for side in (0, 1)]
        if places[0].kind == places[1].kind != "free" and places[0].number == places[1].number:
            return None
        if places[0].kind == places[1].kind == "free":
            result = equation.outvars[0]
            return 0 if _is_summed_over(result, places[0].result_dim, later) else 1
        # Of a free and a summed dimension the free one stays: queries against all values.
        return next((side for side in (0, 1) if places[side].kind == "contracted"), 1)

    def _scan(self, equation: core.JaxprEqn, operands: Sequence[_Value]) -> list[_Value] | None:
        params, body = equation.params, equation.params["jaxpr"]
        first, count = params["num_consts"], params["num_carry"]
        scanned = list(operands[first + count :])
        if any(isinstance(value, _Part) and value.dim == 0 for value in scanned):
            return None
        dims: list[int | None] = [_dim(value) for value in operands]
        slice_dims = [None if dim is None else dim - 1 for dim in dims[first + count :]]
        carry_dims, collected_dims = self._carried_dims(body, dims[:first], dims[first : first + count], slice_dims)
        in_body = body.jaxpr.invars[first:]

        def trip(carry: list[jax.Array], slices: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            entering = _parts([*carry, *slices], [*carry_dims, *slice_dims], in_body)
            results = self.run(body, [*operands[:first], *entering])
            leaving = [self._laid_out(value, dim) for value, dim in zip(results[:count], carry_dims, strict=True)]
            collected = [self._laid_out(value, dim) for value, dim in zip(results[count:], collected_dims, strict=True)]
            return leaving, collected

        pairs = zip(operands[first : first + count], carry_dims, strict=True)
        leaving, collected = jax.lax.scan(
            trip,
            [jnp.asarray(self._laid_out(value, dim)) for value, dim in pairs],
            [value.value if isinstance(value, _Part) else value for value in scanned],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        stacked_dims = [None if dim is None else dim + 1 for dim in collected_dims]
        return _parts([*leaving, *collected], [*carry_dims, *stacked_dims], equation.outvars)

    def _laid_out(self, value: _Value, dim: int | None) -> jax.Array:
        return self.whole(value) if dim is None else self.part(value, dim)

    def _carried_dims(
        self,
        body: core.ClosedJaxpr,
        constants: Sequence[int | None],
        carried: Sequence[int | None],
        slices: Sequence[int | None],
    ) -> tuple[list[int | None], list[int | None]]:
        """The dimensions along which carried and collected values of a scan are parts.

        What enters whole and leaves a trip as a part enters as a part, too.
        """
        carry_dims = list(carried)
        while True:
            results = self._result_dims(body, [*constants, *carry_dims, *slices])
            leaving = results[: len(carry_dims)]
            joined = [after if before is None else before for before, after in zip(carry_dims, leaving, strict=True)]
            if joined == carry_dims:
                return carry_dims, results[len(carry_dims) :]
            carry_dims = joined

    def _result_dims(self, body: core.ClosedJaxpr, dims: Sequence[int | None]) -> list[int | None]:
        """The dimensions along which the results of a trace are parts, given those of its arguments."""
        found: list[int | None] = []

        def run(*values: jax.Array) -> list[jax.Array]:
            results = self.run(body, _parts(values, dims, body.jaxpr.invars))
            found.extend(_dim(result) for result in results)
            return [result.value if isinstance(result, _Part) else result for result in results]

        shapes = [
            jax.ShapeDtypeStruct(local_shape(variable.aval.shape, dim, self.cp), variable.aval.dtype)
            for variable, dim in zip(body.jaxpr.invars, dims, strict=True)
        ]
        jax.eval_shape(run, *shapes)
        return found

    def _with_own_derivative(self, equation: core.JaxprEqn, operands: Sequence[_Value]) -> list[_Value]:
        """A function with a derivative of its own (`jax.custom_jvp`): both are rewritten."""
        dims = [_dim(operand) for operand in operands]
        body = equation.params["call_jaxpr"]
        _, derivative = equation.primitive.get_bind_params(equation.params)["subfuns"]
        shapes = [jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in equation.invars]
        result_dims = self._result_dims(body, dims)

        def local(
            trace: core.ClosedJaxpr, values: Sequence[jax.Array], places: Sequence[int | None]
        ) -> list[jax.Array]:
            results = self.run(trace, _parts(values, places, trace.jaxpr.invars))
            pairs = zip(results, [*result_dims, *result_dims], strict=False)
            return [self._laid_out(result, dim) for result, dim in pairs]

        function = jax.custom_jvp(lambda *values: local(body, values, dims))

        def derived(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[list[jax.Array], ...]:
            traced = jax.make_jaxpr(lambda *given: derivative.call_wrapped(*given))(*shapes, *shapes)
            results = local(traced, [*primals, *tangents], [*dims, *dims])
            return results[: len(result_dims)], results[len(result_dims) :]

        function.defjvp(derived)
        values = [operand.value if isinstance(operand, _Part) else operand for operand in operands]
        return _parts(function(*values), result_dims, equation.outvars)


def _dim(value: _Value) -> int | None:
    return value.dim if isinstance(value, _Part) else None


def _parts(values: Sequence[jax.Array], dims: Sequence[int | None], variables: Sequence[core.Var]) -> list[_Value]:
    """Values as parts along these dimensions of what the variables of the trace have whole."""
    return [
        value if dim is None else _Part(value=value, dim=dim, length=variable.aval.shape[dim])
        for value, dim, variable in zip(values, dims, variables, strict=True)
    ]


def _is_summed_over(variable: core.Var, dim: int, later: Sequence[core.JaxprEqn]) -> bool:
    """Whether a dimension of scores is summed over: by a reduction, or by a product with values."""
    followed: dict[core.Var, int] = {variable: dim}
    for equation in later:
        name = primitive_name(equation)
        for side, operand in enumerate(equation.invars):
            if isinstance(operand, core.Literal) or operand not in followed:
                continue
            place = followed[operand]
            if name in REDUCTIONS and place in equation.params["axes"]:
                return True
            if name == "dot_general":
                return place_in_product(equation, side, place).kind == "contracted"
            shape = operand.aval.shape
            if name == "transpose":
                followed[equation.outvars[0]] = list(equation.params["permutation"]).index(place)
            elif all(result.aval.shape == shape for result in equation.outvars):
                followed |= dict.fromkeys(equation.outvars, place)
    return False
