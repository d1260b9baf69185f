"""Traces run again with some equations replaced: with calls inlined, and with random draws of the rows of a microbatch.

Rewriting (`inlined`, `run_rewritten`) reaches into loops and branches. What the user wrote about how the model is to be
run gives way to the plan: checkpoints are inlined, because the plan says what backward computes again, and constraints
of shardings are dropped, because the plan says what lies where.

Random draws (`draws_of_samples`, `with_draws_of_rows`): each microbatch of each copy draws the rows of the mask that
one device would draw. A key is the same for all microbatches, whether it is an argument (typed, or raw words), made of
a step's number, or a constant of the model. What is drawn for the samples of a microbatch must differ from what the
others draw. Such draws are told by their shape: it grows when the loss is traced with twice as many samples. Others
(one number for the whole batch, a fixed random projection) are the same everywhere, as on one device. Keys that are
folded with the places of samples (0, 1, 2, ...) are folded with their places in the whole batch.

By default JAX makes every random number of its key and of its place in the drawn array alone ("partitionable"
threefry). So a microbatch can draw exactly its rows of the array that one device would draw for the whole batch
(`_threefry_bits`). Other generators, and arrays of more than 2^32 numbers, get a key of their own for each microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend import random as generators

from phaze.errors import PlanError

__all__ = [
    "DRAWS",
    "Replacement",
    "RowsOfBatch",
    "draws_of_samples",
    "inlined",
    "inner_traces",
    "paired_equations",
    "run_rewritten",
    "with_draws_of_rows",
]

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


_RESHAPES = frozenset({"expand_dims", "reshape", "squeeze"})
"""Primitives that only say a shape otherwise: JAX leaves some of them out where a size is 1."""

Pair: TypeAlias = tuple[core.JaxprEqn | None, core.JaxprEqn | None]
"""An equation of one trace and its counterpart in another; None where it is a reshape that the other is without."""


def paired_equations(small: Sequence[core.JaxprEqn], large: Sequence[core.JaxprEqn]) -> list[Pair] | None:
    """The equations of two traces of one function at different sizes, side by side; None where they differ.

    JAX traces what is done with a single sample with other reshapes than what is done with several.
    """
    names = [[str(equation.primitive) for equation in equations] for equations in (small, large)]
    if names[0] == names[1]:
        return list(zip(small, large, strict=True))
    pairs: list[Pair] = []
    others = iter(large)
    for equation in small:
        if str(equation.primitive) in _RESHAPES:
            pairs.append((equation, None))
            continue
        for other in others:
            if str(other.primitive) not in _RESHAPES:
                break
            pairs.append((None, other))
        else:
            return None
        if equation.primitive is not other.primitive:
            return None
        pairs.append((equation, other))
    rest: list[Pair] = [(None, other) for other in others]
    has_more = any(str(other.primitive) not in _RESHAPES for _, other in rest if other is not None)
    return None if has_more else [*pairs, *rest]


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


DRAWS = frozenset({"random_bits", "random_split"})
"""Primitives that draw an array of the `shape` among their parameters."""
_OTHER_DRAWS = frozenset({"random_gamma", "rng_bit_generator", "rng_uniform"})
"""Primitives whose draws cannot be told apart by rows."""
_COUNTERS = 2**32
"""How many places a draw has that one word of a counter can number."""


@dataclass(frozen=True, slots=True)
class RowsOfBatch:
    """The sizes by which a microbatch finds its rows: `rows` of a whole batch of `batch_rows`."""

    rows: int
    batch_rows: int


def draws_of_samples(small: core.ClosedJaxpr, large: core.ClosedJaxpr) -> dict[int, int]:
    """The draws for samples in a trace, given another of twice as many: the growing dimension by the equation's id.

    Raises PlanError where the traces cannot be compared, or a draw cannot be divided.
    """
    if not _draws_anything(small.jaxpr):
        return {}
    found: dict[int, int] = {}
    _compare(small.jaxpr, large.jaxpr, found)
    return found


def _draws_anything(trace: core.Jaxpr) -> bool:
    return any(
        str(equation.primitive) in DRAWS | _OTHER_DRAWS
        or any(_draws_anything(inner) for inner in inner_traces(equation))
        for equation in trace.eqns
    )


def _compare(small: core.Jaxpr, large: core.Jaxpr, found: dict[int, int]) -> None:
    pairs = paired_equations(small.eqns, large.eqns)
    if pairs is None:
        raise PlanError(
            "the loss draws random numbers and is traced differently for twice as many samples, so that it cannot be "
            "told what it draws for each sample; write it alike for all batch sizes."
        )
    places: set[core.Var] = set()
    for equation, larger in pairs:
        if equation is None or larger is None:
            continue
        name = str(equation.primitive)
        if name == "iota" or (name == "convert_element_type" and equation.invars[0] in places):
            places.add(equation.outvars[0])
        elif name == "random_fold_in" and _grows(equation, larger) and equation.invars[1] in places:
            found[id(equation)] = 0
        elif name in DRAWS and equation.params["shape"] != larger.params["shape"]:
            sizes = zip(equation.params["shape"], larger.params["shape"], strict=True)
            found[id(equation)] = next(dim for dim, (size, grown) in enumerate(sizes) if size != grown)
        elif name in _OTHER_DRAWS and _grows(equation, larger):
            raise _indivisible(name)
        for inner, larger_inner in zip(inner_traces(equation), inner_traces(larger), strict=True):
            before = len(found)
            _compare(inner, larger_inner, found)
            if len(found) > before and name not in ("scan", "while", "cond"):
                raise _indivisible(name)


def _grows(small: core.JaxprEqn, large: core.JaxprEqn) -> bool:
    return bool(small.outvars[-1].aval.shape != large.outvars[-1].aval.shape)


def _indivisible(name: str) -> PlanError:
    return PlanError(
        f"the loss draws random numbers for samples in {name}, where microbatches cannot be given numbers of their "
        "own; draw them outside with jax.random, or plan with one microbatch on one copy (strategy dp=1)."
    )


def with_draws_of_rows(
    closed: core.ClosedJaxpr, draws: Mapping[int, int], sizes: RowsOfBatch, totals: Sequence[core.Var] = ()
) -> core.ClosedJaxpr:
    """The trace with more arguments: the microbatch's first row, from which on it draws, and the values of `totals`."""

    def run(*values: jax.Array) -> list[jax.Array]:
        count = len(closed.in_avals)
        arguments, first_row, known = values[:count], values[count], dict(zip(totals, values[count + 1 :], strict=True))

        def replacement(equation: core.JaxprEqn, operands: Sequence[jax.Array]) -> list[jax.Array] | None:
            dim = draws.get(id(equation))
            if dim is None:
                return None
            if str(equation.primitive) == "random_fold_in":
                key, place = operands
                return [equation.primitive.bind(key, place + first_row.astype(place.dtype))]
            return [_draw_rows(equation, operands[0], dim, first_row, sizes)]

        return run_rewritten(closed, arguments, replacement, known)

    more = [jax.ShapeDtypeStruct((), jnp.uint32), *(variable.aval for variable in totals)]
    return jax.make_jaxpr(run)(*closed.in_avals, *more)


def _draw_rows(
    equation: core.JaxprEqn, key: jax.Array, dim: int, first_row: jax.Array, sizes: RowsOfBatch
) -> jax.Array:
    shape = tuple(equation.params["shape"])
    samples, remainder = divmod(shape[dim], sizes.rows)
    whole_shape = (*shape[:dim], samples * sizes.batch_rows, *shape[dim + 1 :])
    is_threefry = str(jax.random.key_impl(key)) in ("threefry2x32", "fry") and jax.config.jax_threefry_partitionable
    if key.shape or remainder or not is_threefry or math.prod(whole_shape) >= _COUNTERS:
        number = first_row // jnp.uint32(sizes.rows)
        fold = jax.random.fold_in
        for _ in key.shape:
            fold = jax.vmap(fold, in_axes=(0, None))
        folded = fold(key, number)
        (result,) = [equation.primitive.bind(folded, **equation.params)]
        return result
    first, second = _threefry_bits(key, shape, whole_shape, dim, first_row * jnp.uint32(samples))
    if str(equation.primitive) == "random_split":
        return jax.random.wrap_key_data(jnp.stack([first, second], axis=-1), impl="threefry2x32")
    bit_width = equation.params["bit_width"]
    # How words become numbers of other widths is part of the generator: bit for bit what jax.random.bits gives.
    if bit_width == 64:
        return (first.astype(jnp.uint64) << jnp.uint64(32)) | second.astype(jnp.uint64)
    return (first ^ second).astype(jnp.dtype(f"uint{bit_width}"))


def _threefry_bits(
    key: jax.Array, shape: Sequence[int], whole_shape: Sequence[int], dim: int, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Two words for each place of an array of `shape`, which starts at `first` along `dim` of the whole one."""
    place = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        index = jax.lax.broadcasted_iota(jnp.uint32, tuple(shape), axis)
        index = index + first if axis == dim else index
        place = place + index * jnp.uint32(math.prod(whole_shape[axis + 1 :]))
    first_word, second_word = jax.random.key_data(key)
    # The upper word of a place is zero below 2^32 places.
    results = generators.threefry2x32_p.bind(first_word, second_word, jnp.zeros_like(place), place)
    return results[0], results[1]
