"""Context parallelism: a traced loss, rewritten for one of the devices that every sequence is split over.

Each of cp devices has an equal part of every sequence. Every value of the trace is either whole (the same on all of
these devices) or a `_Part` along one dimension, and every equation runs on parts where a rule here says that this gives
the part of its result: elementwise functions, products, sums, lookups and moves of data. Where no rule holds, the parts
are gathered and the equation runs whole on every device, so that what is computed never depends on the rules:

  keys and values of attention   gathered, because the product pairs every query with all of them
  sums over positions            partial sums are added up (psum)
  anything else without a rule   gathered: scans and convolutions along the sequence, scatters, and functions with a
                                 gradient of their own (custom_vjp), which does not say what a device's share is

A gathered tensor that was only repeated or moved (keys repeated for grouped queries) is gathered before that. JAX
differentiates the rewritten trace: the transpose of a gather reduces and scatters, and the gradient of a parameter on
one device is its share of a sum over all of them, divided by cp, because each device computes the same loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core

from phaze.backends.jax.traced_loss import TracedLoss, loss_of_trace, primitive_name

__all__ = [
    *("ALONG_ONE", "AXIS", "ELEMENTWISE", "MOVES", "bind", "local_shape", "loss_of_context", "place_in_product"),
]

AXIS = "cp"
"""The mesh axis over which sequences are split."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """An equal part of a tensor along a dimension; `make_whole`, if any, makes the whole of less than its parts."""

    value: jax.Array
    dim: int
    make_whole: Callable[[], jax.Array] | None = None


_Value: TypeAlias = jax.Array | _Part

ELEMENTWISE = frozenset(
    {
        *("abs", "add", "add_any", "and", "atan2", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos"),
        *("cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow"),
        *("is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter"),
        *("not", "optimization_barrier", "or", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign"),
        *("sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"),
    }
)
"""Primitives that treat every element alike. Operands are scalars or have the result's rank, and repeat where they have
the size 1."""

_REDUCTIONS = ("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum")
"""Primitives that take the dimensions `axes` away."""

ALONG_ONE = {
    "cumsum": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumprod": "axis",
    "cumlogsumexp": "axis",
    "split": "axis",
    "sort": "dimension",
    "concatenate": "dimension",
}
"""Primitives that run along one dimension and keep all, with the name of the parameter that says which."""

_REMADE = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "transpose"})
"""Primitives of one operand whose whole result is made of the whole operand rather than gathered."""


def loss_of_context(trace: TracedLoss, has_sequence: Sequence[bool], cp: int) -> TracedLoss:
    """The trace that one of cp devices runs; `has_sequence` says which arguments of the batch come as its part.

    Dimension 1 of these arguments is the sequence. The result is the whole loss, on every device.
    """
    jaxpr, first = trace.flat.jaxpr, len(trace.parameters)
    is_part = [False] * first + list(has_sequence)

    def run(*arguments: jax.Array) -> list[jax.Array]:
        pairs = zip(arguments, is_part, strict=True)
        values: list[_Value] = [_Part(value=value, dim=1) if part else value for value, part in pairs]
        one = _OneContext(cp)
        return [one.whole(result) for result in one.run(trace.flat, values)]

    shapes = [
        jax.ShapeDtypeStruct(local_shape(variable.aval.shape, 1 if part else None, cp), variable.aval.dtype)
        for variable, part in zip(jaxpr.invars, is_part, strict=True)
    ]
    return loss_of_trace(jax.make_jaxpr(run, axis_env=[(AXIS, cp)])(*shapes), first)


def local_shape(shape: Sequence[int], dim: int | None, cp: int) -> tuple[int, ...]:
    """A shape of which each of cp devices has an equal part along a dimension."""
    return tuple(size // cp if place == dim else size for place, size in enumerate(shape))


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
        return jax.lax.all_gather(value.value, AXIS, axis=value.dim, tiled=True)

    def part(self, value: _Value, dim: int) -> jax.Array:
        """This device's part of a value along a dimension."""
        if isinstance(value, _Part) and value.dim == dim:
            return value.value
        whole = self.whole(value)
        size = whole.shape[dim] // self.cp
        return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(AXIS) * size, size, dim)

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
        return [_Part(value=result, dim=dim) for result in results]

    def _moved(self, equation: core.JaxprEqn, operand: _Value, dim: int) -> list[_Value] | None:
        """What moves or reduces one operand; sums over the split dimension itself are added up."""
        move = MOVES[primitive_name(equation)](equation, dim, self.cp)
        if move is not None:
            result_dim, changes = move
            return [
                _Part(value=result, dim=result_dim) for result in bind(equation, [self.part(operand, dim)], **changes)
            ]
        if primitive_name(equation) == "reduce_sum":
            return [jax.lax.psum(result, AXIS) for result in bind(equation, [self.part(operand, dim)])]
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
        return [_Part(value=result, dim=positions[index_dim])]

    def _remade(self, equation: core.JaxprEqn, operand: _Value, result: _Value) -> _Value:
        """A result that was only moved or repeated: its whole is made of the whole operand."""
        if not isinstance(result, _Part):
            return result
        return _Part(value=result.value, dim=result.dim, make_whole=lambda: bind(equation, [self.whole(operand)])[0])

    def _elementwise(self, equation: core.JaxprEqn, operands: Sequence[_Value], dim: int) -> list[_Value] | None:
        shape = equation.outvars[0].aval.shape
        shapes = [variable.aval.shape for variable in equation.invars]
        if any(given != () and len(given) != len(shape) for given in shapes):
            return None
        local = [
            self.whole(operand) if given == () or given[dim] != shape[dim] else self.part(operand, dim)
            for operand, given in zip(operands, shapes, strict=True)
        ]
        return [_Part(value=result, dim=dim) for result in bind(equation, local)]

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
        pair = (own.value, other) if side == 0 else (other, own.value)
        (result,) = bind(equation, [value.value if isinstance(value, _Part) else value for value in pair])
        if place.kind == "contracted":
            return jax.lax.psum(result, AXIS)
        return _Part(value=result, dim=place.result_dim)

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

        def trip(carry: list[jax.Array], slices: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            entering = [*operands[:first], *_parts(carry, carry_dims), *_parts(slices, slice_dims)]
            results = self.run(body, entering)
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
        return [*_parts(leaving, carry_dims), *_parts(collected, stacked_dims)]

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
            results = self.run(body, _parts(values, dims))
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
            results = self.run(trace, _parts(values, places))
            pairs = zip(results, [*result_dims, *result_dims], strict=False)
            return [self._laid_out(result, dim) for result, dim in pairs]

        function = jax.custom_jvp(lambda *values: local(body, values, dims))

        def derived(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[list[jax.Array], ...]:
            traced = jax.make_jaxpr(lambda *given: derivative.call_wrapped(*given))(*shapes, *shapes)
            results = local(traced, [*primals, *tangents], [*dims, *dims])
            return results[: len(result_dims)], results[len(result_dims) :]

        function.defjvp(derived)
        values = [operand.value if isinstance(operand, _Part) else operand for operand in operands]
        return _parts(function(*values), result_dims)


_Move: TypeAlias = tuple[int, dict[str, object]]
"""The dimension of the result along which it is a part, and the parameters of the equation that a part changes."""


def bind(equation: core.JaxprEqn, operands: Sequence[jax.Array], **changes: object) -> list[jax.Array]:
    """The results of an equation on these operands, with some of its parameters changed."""
    primitive = equation.primitive
    results = primitive.bind(*operands, **primitive.get_bind_params({**equation.params, **changes}))
    return list(results) if primitive.multiple_results else [results]


def _dim(value: _Value) -> int | None:
    return value.dim if isinstance(value, _Part) else None


def _parts(values: Sequence[jax.Array], dims: Sequence[int | None]) -> list[_Value]:
    return [value if dim is None else _Part(value=value, dim=dim) for value, dim in zip(values, dims, strict=True)]


@dataclass(frozen=True, slots=True)
class _PlaceInProduct:
    """What a product does with a dimension of an operand: "contracted", "batched" (both with a number) or "free".

    `result_dim` is the dimension of the result that it becomes, where it becomes one.
    """

    kind: str
    number: int
    result_dim: int


def place_in_product(equation: core.JaxprEqn, side: int, dim: int) -> _PlaceInProduct:
    """What a product does with a dimension of its left (0) or right (1) operand."""
    contracted, batched = equation.params["dimension_numbers"]
    if dim in contracted[side]:
        return _PlaceInProduct("contracted", list(contracted[side]).index(dim), -1)
    if dim in batched[side]:
        number = list(batched[side]).index(dim)
        return _PlaceInProduct("batched", number, number)
    free = [
        [place for place in range(len(variable.aval.shape)) if place not in (*contracted[number], *batched[number])]
        for number, variable in enumerate(equation.invars)
    ]
    before = len(batched[0]) + (len(free[0]) if side == 1 else 0)
    return _PlaceInProduct("free", 0, before + free[side].index(dim))


def _is_summed_over(variable: core.Var, dim: int, later: Sequence[core.JaxprEqn]) -> bool:
    """Whether a dimension of scores is summed over: by a reduction, or by a product with values."""
    followed: dict[core.Var, int] = {variable: dim}
    for equation in later:
        name = primitive_name(equation)
        for side, operand in enumerate(equation.invars):
            if isinstance(operand, core.Literal) or operand not in followed:
                continue
            place = followed[operand]
            if name in _REDUCTIONS and place in equation.params["axes"]:
                return True
            if name == "dot_general":
                return place_in_product(equation, side, place).kind == "contracted"
            shape = operand.aval.shape
            if name == "transpose":
                followed[equation.outvars[0]] = list(equation.params["permutation"]).index(place)
            elif all(result.aval.shape == shape for result in equation.outvars):
                followed |= dict.fromkeys(equation.outvars, place)
    return False


def _broadcast(equation: core.JaxprEqn, dim: int, cp: int) -> _Move | None:
    params, size = equation.params, equation.invars[0].aval.shape[dim]
    result_dim = params["broadcast_dimensions"][dim]
    is_repeated = params["shape"][result_dim] != size
    return None if is_repeated else (result_dim, {"shape": local_shape(params["shape"], result_dim, cp)})


def _reshape(equation: core.JaxprEqn, dim: int, cp: int) -> _Move | None:
    """A part stays one where as much lies in front of its dimension as in front of a dimension of the result."""
    before, sizes = equation.invars[0].aval.shape, equation.params["new_sizes"]
    in_front = math.prod(before[:dim])
    fitting = [
        place for place, size in enumerate(sizes) if math.prod(sizes[:place]) == in_front and size and size % cp == 0
    ]
    if equation.params["dimensions"] is not None or not fitting:
        return None
    result_dim = next((place for place in fitting if sizes[place] == before[dim]), fitting[-1])
    return result_dim, {"new_sizes": local_shape(sizes, result_dim, cp)}


def _transpose(equation: core.JaxprEqn, dim: int, cp: int) -> _Move | None:
    return list(equation.params["permutation"]).index(dim), {}


def _squeeze(equation: core.JaxprEqn, dim: int, cp: int) -> _Move | None:
    return dim - sum(place < dim for place in equation.params["dimensions"]), {}


def _reduce(equation: core.JaxprEqn, dim: int, cp: int) -> _Move | None:
    axes = equation.params["axes"]
    return None if dim in axes else (dim - sum(axis < dim for axis in axes), {})


def _largest(equation: core.JaxprEqn, dim: int, cp: int) -> _Move | None:
    """`top_k`, which runs along the last dimension unless it says otherwise."""
    rank = len(equation.invars[0].aval.shape)
    return None if equation.params.get("axis", rank - 1) % rank == dim else (dim, {})


def _slice(equation: core.JaxprEqn, dim: int, cp: int) -> _Move | None:
    params, size = equation.params, equation.invars[0].aval.shape[dim]
    stride = 1 if params["strides"] is None else params["strides"][dim]
    if (params["start_indices"][dim], params["limit_indices"][dim], stride) != (0, size, 1):
        return None
    return dim, {"limit_indices": local_shape(params["limit_indices"], dim, cp)}


MOVES: Mapping[str, Callable[[core.JaxprEqn, int, int], _Move | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "slice": _slice,
    "top_k": _largest,
    **dict.fromkeys(_REDUCTIONS, _reduce),
}
"""Primitives of one operand: what becomes of a part of it; None where the operand must be whole."""
