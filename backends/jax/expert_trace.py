"""Expert parallelism: a traced loss, rewritten for one of the devices that experts are divided over.

Each of ep devices has an equal run of the experts, and tokens of its own. A value of the trace is one of these:

whole      all experts, where there are any: the same on all devices (`varies` is False: parameters, and what is made of
           them alone), or made of the device's own tokens
experts    this device's experts of a parameter: a part along the dimension that counts experts
exchanged  this device's experts, for the tokens of all devices: a part along that dimension, with a new first dimension
           that counts the devices from which the rows came

A product that pairs experts of a parameter with rows of all experts exchanges these rows by an all-to-all. What follows
runs on exchanged rows, for each device that sent some, where a rule here says that this gives the part of its result.
Where no rule holds, rows return to their owners by another all-to-all (parameters are gathered), and the equation runs
on whole values, so that what is computed never depends on the rules.

Where the tensor axis divides experts as well, it does so first: a device has a run of experts out of the part of each
tensor-parallel device (`tiles` of them), so that the exchange moves nothing between these.

JAX differentiates the rewritten trace: the transpose of an all-to-all is one, and the gradient of an expert on its
device is that of the sum of the losses of all devices that sent rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.extend import core

from phaze.backends.jax.tensor_parts import ALONG_ONE, ELEMENTWISE, MOVES, bind, local_shape, place_in_product
from phaze.backends.jax.traced_loss import TracedLoss, loss_of_trace, primitive_name

__all__ = ["AXIS", "loss_of_experts"]

AXIS = "ep"
"""The mesh axis over which experts are divided."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a value lies on devices: `dim` counts experts where it is a part, `varies` says that tokens made it."""

    dim: int | None
    varies: bool

    @property
    def is_exchanged(self) -> bool:
        """Whether it has the first dimension of devices that sent rows."""
        return self.dim is not None and self.varies


@dataclass(frozen=True, slots=True, eq=False)
class _Value:
    array: jax.Array
    layout: _Layout


def loss_of_experts(trace: TracedLoss, expert_dims: Mapping[int, int], ep: int, tiles: int = 1) -> TracedLoss:
    """The trace that one of ep devices runs; `expert_dims` has the dimension that counts experts, by parameter.

    Of these parameters it takes this device's experts, and of the batch this device's samples. The result is the loss
    of these samples. `tiles` says into how many parts the tensor axis divides experts.
    """
    jaxpr, first = trace.flat.jaxpr, len(trace.parameters)
    layouts = [_Layout(expert_dims.get(number), number >= first) for number in range(len(jaxpr.invars))]

    def run(*arguments: jax.Array) -> list[jax.Array]:
        device = _OneExpertDevice(ep, tiles)
        return [device.whole(result) for result in device.run(trace.flat, list(map(_Value, arguments, layouts)))]

    shapes = [
        jax.ShapeDtypeStruct(local_shape(variable.aval.shape, layout.dim, ep), variable.aval.dtype)
        for variable, layout in zip(jaxpr.invars, layouts, strict=True)
    ]
    axes = [(AXIS, ep)]
    return loss_of_trace(jax.make_jaxpr(run, axis_env=axes)(*shapes), first)


@dataclass(frozen=True, slots=True)
class _OneExpertDevice:
    """Runs traces as one of ep devices, whose experts lie in so many tiles."""

    ep: int
    tiles: int
    exchanged: dict[tuple[int, int | None], tuple[_Value, _Value]] = field(default_factory=dict)
    """By what was exchanged in this run of a trace, and its new dimension of experts: that value, what became of it."""

    def whole(self, value: _Value) -> jax.Array:
        """A value whole: its rows return to their owners, and experts of parameters are gathered."""
        if value.layout.dim is None:
            return value.array
        key = (id(value.array), None)
        if key not in self.exchanged:
            returned = _Value(self._gathered(value, value.layout.dim), _Layout(None, value.layout.varies))
            self.exchanged[key] = value, returned
        return self.exchanged[key][1].array

    def _gathered(self, value: _Value, dim: int) -> jax.Array:
        array, varies = value.array, int(value.layout.varies)
        own = self._with_dims(array, dim + varies, self.tiles, array.shape[dim + varies] // self.tiles)
        if value.layout.varies:
            whole = jax.lax.all_to_all(own, AXIS, split_axis=0, concat_axis=dim + 1)
        else:
            whole = jax.lax.all_gather(own, AXIS, axis=dim + 1)
        return whole.reshape(*whole.shape[:dim], -1, *whole.shape[dim + 3 :])

    def part(self, value: _Value, dim: int) -> _Value:
        """This device's experts of a value, whose dimension `dim` counts them: exchanged, where tokens made it."""
        if value.layout.dim == dim:
            return value
        key = (id(value.array), dim)
        if key not in self.exchanged:
            self.exchanged[key] = value, self._divided(value, dim)
        return self.exchanged[key][1]

    def _divided(self, value: _Value, dim: int) -> _Value:
        whole, layout = self.whole(value), _Layout(dim, value.layout.varies)
        size = whole.shape[dim] // self.ep
        by_owner = self._with_dims(whole, dim, self.tiles, self.ep, size // self.tiles)
        if layout.varies:
            own = jax.lax.all_to_all(by_owner, AXIS, split_axis=dim + 1, concat_axis=0)
        else:
            own = jax.lax.dynamic_index_in_dim(by_owner, jax.lax.axis_index(AXIS), dim + 1, keepdims=False)
        return _Value(self._with_dims(own, dim + int(layout.varies), size, joined=2), layout)

    def _with_dims(self, array: jax.Array, dim: int, *sizes: int, joined: int = 1) -> jax.Array:
        """An array in which dimensions of these sizes stand for one, or for several `joined` ones."""
        return array.reshape(*array.shape[:dim], *sizes, *array.shape[dim + joined :])

    def run(self, closed: core.ClosedJaxpr, arguments: Sequence[_Value]) -> list[_Value]:
        """The results of a trace, in which nothing is exchanged twice."""
        one_run = replace(self, exchanged={})
        same = _Layout(None, False)
        values = {
            variable: _Value(constant, same)
            for variable, constant in zip(closed.jaxpr.constvars, closed.consts, strict=True)
        }
        values |= dict(zip(closed.jaxpr.invars, arguments, strict=True))

        def read(variable: core.Var | core.Literal) -> _Value:
            return _Value(variable.val, same) if isinstance(variable, core.Literal) else values[variable]

        for equation in closed.jaxpr.eqns:
            operands = [read(variable) for variable in equation.invars]
            values |= dict(zip(equation.outvars, one_run._results(equation, operands), strict=True))
        return [read(variable) for variable in closed.jaxpr.outvars]

    def _results(self, equation: core.JaxprEqn, operands: Sequence[_Value]) -> list[_Value]:
        has_parts = any(operand.layout.dim is not None for operand in operands)
        results = self._results_of_parts(equation, operands) if has_parts else None
        if results is None:
            layout = _Layout(None, any(operand.layout.varies for operand in operands))
            results = [
                _Value(result, layout) for result in bind(equation, [self.whole(operand) for operand in operands])
            ]
        return results

    def _results_of_parts(self, equation: core.JaxprEqn, operands: Sequence[_Value]) -> list[_Value] | None:
        """The results where some operands are parts; None where all must be whole."""
        name = primitive_name(equation)
        dim = next(operand.layout.dim for operand in operands if operand.layout.dim is not None)
        assert dim is not None
        if name in ELEMENTWISE:
            return self._elementwise(equation, operands, dim)
        if name in MOVES:
            move = MOVES[name](equation, dim, self.ep)
            return None if move is None else self._on_parts(equation, operands, move[0], **move[1])
        if name in ALONG_ONE:
            if equation.params[ALONG_ONE[name]] == dim:
                return None
            return self._on_parts(equation, [self.part(operand, dim) for operand in operands], dim)
        match name:
            case "dot_general":
                return self._product(equation, operands)
            case "scan":
                return self._scan(equation, operands)
            case "custom_jvp_call":
                return self._with_own_derivative(equation, operands)
            case "jit":
                return self.run(equation.params["jaxpr"], operands)
            case _:
                return None

    def _on_parts(
        self, equation: core.JaxprEqn, operands: Sequence[_Value], result_dim: int, **changes: object
    ) -> list[_Value]:
        """The equation on parts (and on whole values that are the same on all devices), for every sending device."""
        varies = any(operand.layout.varies for operand in operands)
        arrays = [operand.array for operand in operands]
        if varies:
            axes = [0 if operand.layout.is_exchanged else None for operand in operands]
            results = jax.vmap(lambda *given: bind(equation, given, **changes), in_axes=axes)(*arrays)
        else:
            results = bind(equation, arrays, **changes)
        return [_Value(result, _Layout(result_dim, varies)) for result in results]

    def _elementwise(self, equation: core.JaxprEqn, operands: Sequence[_Value], dim: int) -> list[_Value] | None:
        shape = equation.outvars[0].aval.shape
        shapes = [variable.aval.shape for variable in equation.invars]
        if any(given != () and len(given) != len(shape) for given in shapes):
            return None
        has_experts = [given != () and given[dim] == shape[dim] for given in shapes]
        pairs = [*zip(operands, has_experts, strict=True)]
        # Something of a device's own tokens that does not count experts cannot go to the owners of experts.
        if any(operand.layout.varies and not is_counted for operand, is_counted in pairs):
            return None
        local = [self.part(operand, dim) if is_counted else operand for operand, is_counted in pairs]
        return self._on_parts(equation, local, dim)

    def _product(self, equation: core.JaxprEqn, operands: Sequence[_Value]) -> list[_Value] | None:
        """A product with a part on at least one side."""
        sides = [side for side in (0, 1) if operands[side].layout.dim is not None]
        places = [place_in_product(equation, side, operands[side].layout.dim or 0) for side in sides]
        if len(sides) == 2:
            is_paired = places[0].kind == places[1].kind == "batched" and places[0].number == places[1].number
            return self._on_parts(equation, operands, places[0].result_dim) if is_paired else None
        (side,), (place,) = sides, places
        own, other = operands[side], operands[1 - side]
        if place.kind == "contracted" or (place.kind == "free" and other.layout.varies):
            return None
        if place.kind == "batched":
            other = self.part(other, equation.params["dimension_numbers"][1][1 - side][place.number])
        return self._on_parts(equation, (own, other) if side == 0 else (other, own), place.result_dim)

    def _scan(self, equation: core.JaxprEqn, operands: Sequence[_Value]) -> list[_Value] | None:
        """A scan over layers, each of which takes slices of experts: what is carried and collected is whole."""
        params, body = equation.params, equation.params["jaxpr"]
        first, count = params["num_consts"], params["num_carry"]
        scanned = operands[first + count :]
        if any(value.layout.dim == 0 or value.layout.is_exchanged for value in (*operands[:first], *scanned)):
            return None
        slices_of = [_Layout(None if v.layout.dim is None else v.layout.dim - 1, v.layout.varies) for v in scanned]
        varying = _Layout(None, True)

        def trip(carry: list[jax.Array], slices: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            entering = [
                *operands[:first],
                *(_Value(value, varying) for value in carry),
                *map(_Value, slices, slices_of),
            ]
            results = [self.whole(value) for value in self.run(body, entering)]
            return results[:count], results[count:]

        leaving, collected = jax.lax.scan(
            trip,
            [jnp.asarray(self.whole(value)) for value in operands[first : first + count]],
            [value.array for value in scanned],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [_Value(value, varying) for value in (*leaving, *collected)]

    def _with_own_derivative(self, equation: core.JaxprEqn, operands: Sequence[_Value]) -> list[_Value]:
        """A function with a derivative of its own (`jax.custom_jvp`): both are rewritten."""
        layouts = [operand.layout for operand in operands]
        body, found = equation.params["call_jaxpr"], list[_Layout]()
        _, derivative = equation.primitive.get_bind_params(equation.params)["subfuns"]
        shapes = [jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in equation.invars]

        def lay_out(value: _Value, layout: _Layout) -> jax.Array:
            return self.whole(value) if layout.dim is None else self.part(value, layout.dim).array

        def primal(*values: jax.Array) -> list[jax.Array]:
            results = self.run(body, list(map(_Value, values, layouts)))
            found[:] = [result.layout for result in results]
            return [result.array for result in results]

        function = jax.custom_jvp(primal)

        def derived(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[list[jax.Array], ...]:
            traced = jax.make_jaxpr(lambda *given: derivative.call_wrapped(*given))(*shapes, *shapes)
            given = [*map(_Value, primals, layouts), *map(_Value, tangents, layouts)]
            results = self.run(traced, given)
            local = [lay_out(value, layout) for value, layout in zip(results, [*found, *found], strict=True)]
            return local[: len(found)], local[len(found) :]

        function.defjvp(derived)
        results = function(*(operand.array for operand in operands))
        return list(map(_Value, results, found))
