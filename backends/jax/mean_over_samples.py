"""Whether the losses of microbatches make up the loss of all of them: as their mean, or as their sum.

The loss is traced at a microbatch and at twice as many samples, and both traces are walked together. A value of the
batch is *per sample* while it grows with the microbatch. A sum over the samples ends that, and from there on the value
is known by its *growth*: the factor by which it changes when every sample comes twice. A sum doubles (2), a mean stays
(1); only linear functions may follow. Anything else mixes samples, or weighs them by one another, and is refused by
name.

A sum over samples of something without parameters (a count of unmasked tokens) is a *count*. What is made of counts
alone is taken from the whole batch, so that it is a constant for the samples of a microbatch: sums may be divided by
it, and samples may be weighed by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import jax
from jax.extend import core

from phaze.backends.jax.loss_function import BatchShare
from phaze.backends.jax.trace_rewriting import DRAWS, paired_equations
from phaze.backends.jax.traced_loss import TracedLoss, evaluate, needed_equations, primitive_name
from phaze.errors import PlanError

__all__ = ["Counts", "read_weighting", "weighting_of_micro_batches"]

_PER_SAMPLE: Final = "per sample"
_COUNT: Final = "count"
_GROWTH_OF_A_MEAN = 1.0
_GROWTH_OF_A_SUM = 2.0
"""The larger trace has twice as many samples."""

_SUMS = frozenset({"dot_general", "reduce_sum"})
"""Primitives that may sum over the samples."""
_LINEAR = frozenset(
    {
        *("broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "neg", "real", "reduce_sum"),
        *("reduce_precision", "reshape", "sharding_constraint", "slice", "squeeze", "transpose"),
    }
)
"""Primitives of one operand that keep the growth of a sum."""
_ADDITIONS = frozenset({"add", "add_any", "sub"})
_ALONG = {"cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cumlogsumexp": "axis", "sort": "dimension"}
"""Primitives that run along one dimension, with the parameter that names it."""
_INNER_TRACES = ("jaxpr", "call_jaxpr")
"""The parameters under which a primitive has the trace that it calls."""

Dependence: TypeAlias = str | float | None
"""How a value depends on the batch: `_PER_SAMPLE`, `_COUNT`, or the growth of a sum; None where it does not."""

Place: TypeAlias = tuple[int, int]
"""The number of an equation in a flat trace, and of one of its results."""

Computed: TypeAlias = Mapping[core.Var, Callable[[], jax.Array]]
"""For some variables, functions that compute their values; these raise `_UnknownError` where that is impossible."""


class _UnknownError(LookupError):
    """A value cannot be computed without parameters or a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What microbatches take from the whole batch.

    Attributes:
        sums: sums over samples without parameters, which are added up over all microbatches.
        totals: what is made of them, and is read by equations with parameters or samples.
        is_sum: whether the loss is the sum of the microbatches' losses, and not their mean.
    """

    sums: tuple[Place, ...] = ()
    totals: tuple[Place, ...] = ()
    is_sum: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _FoundCounts:
    """The counts of a trace as they are found; dictionaries without values keep the order.

    `totals_of_large` are those of the larger trace.
    """

    with_parameters: set[core.Var]
    sums: dict[core.Var, None] = field(default_factory=dict)
    totals: dict[core.Var, None] = field(default_factory=dict)
    totals_of_large: dict[core.Var, None] = field(default_factory=dict)

    def is_free(self, equation: core.JaxprEqn) -> bool:
        """Whether an equation reads no parameter, nor anything made of one."""
        variables = (variable for variable in equation.invars if not isinstance(variable, core.Literal))
        return self.with_parameters.isdisjoint(variables)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PairedTraces:
    """The equations of one trace at both sizes (small, large), and the values that come from outside of them.

    `counts` are looked for in the outermost trace only.
    """

    equations: tuple[Sequence[core.JaxprEqn], Sequence[core.JaxprEqn]]
    outside: tuple[Computed, Computed]
    counts: _FoundCounts | None = None

    def value(self, size: int, variable: core.Var) -> jax.Array:
        """The value of a variable in the small (0) or large (1) trace; raises _UnknownError where it has none yet."""

        def read(outer: core.Var) -> jax.Array:
            if outer not in self.outside[size]:
                raise _UnknownError
            return self.outside[size][outer]()

        return evaluate(self.equations[size], [variable], {}, read)[0]

    def growth(self, small: core.Var, large: core.Var) -> float:
        """The growth of a factor that depends on no sample; 1 where it cannot be computed: then it is learned.

        Raises PlanError for what is made of learned numbers and of how many samples there are.
        """
        try:
            before, after = (self.value(size, variable) for size, variable in enumerate((small, large)))
        except _UnknownError:
            totals = ({}, {}) if self.counts is None else (self.counts.totals, self.counts.totals_of_large)
            literals = [
                [
                    str(value)
                    for equation in needed_equations(equations, [variable], known)
                    for value in _literals(equation)
                ]
                for equations, variable, known in zip(self.equations, (small, large), totals, strict=True)
            ]
            if literals[0] != literals[1]:
                raise _refusal("a factor of it is made of parameters and of the number of samples") from None
            return 1.0
        return float(after.ravel()[0] / before.ravel()[0]) if getattr(before, "size", 0) else float(after / before)


def read_weighting(small: TracedLoss, large: TracedLoss, shares: Sequence[BatchShare]) -> Counts:
    """How the losses of microbatches make up the loss, which was traced at some and at twice as many samples.

    Raises PlanError where they do not.
    """
    constants = [
        {variable: _constant(value) for variable, value in trace.constants.items()} for trace in (small, large)
    ]
    counts = _FoundCounts(with_parameters=_made_of(small.equations, small.parameters))
    traces = _PairedTraces(
        equations=(small.equations, large.equations), outside=(constants[0], constants[1]), counts=counts
    )
    rows = [variable for variable, share in zip(small.batch, shares, strict=True) if share is BatchShare.ROWS]
    dependences: dict[core.Var, Dependence] = dict.fromkeys(rows, _PER_SAMPLE)
    _walk(traces, dependences)
    loss = _dependence(dependences, small.loss)
    if loss == _COUNT:
        raise _refusal("it does not depend on the parameters")
    if loss not in (None, _GROWTH_OF_A_MEAN, _GROWTH_OF_A_SUM):
        raise _refusal(f"it grows {loss}-fold when every sample comes twice")
    behind_totals = _made_of(small.equations, list(counts.totals)) - counts.totals.keys()
    if not behind_totals.isdisjoint(counts.sums):
        raise _refusal("it counts what depends on another count, as the variance of a batch depends on its mean")
    places = {
        variable: (number, place)
        for number, equation in enumerate(small.equations)
        for place, variable in enumerate(equation.outvars)
    }
    return Counts(
        sums=tuple(places[variable] for variable in counts.sums) if counts.totals else (),
        totals=tuple(places[variable] for variable in counts.totals),
        is_sum=loss == _GROWTH_OF_A_SUM,
    )


def weighting_of_micro_batches(
    trace_at: Callable[[int], TracedLoss], micro_batch_size: int, shares: Sequence[BatchShare]
) -> Counts:
    """How the losses of microbatches make up the loss of the batch, which can be traced for any number of samples.

    JAX traces sums over a single sample in other words than sums over several. So where a microbatch is one sample, and
    nothing is counted over all of them, microbatches of two say it.
    """
    sizes = (micro_batch_size, 2 * micro_batch_size)
    try:
        return read_weighting(trace_at(sizes[0]), trace_at(sizes[1]), shares)
    except PlanError:
        if micro_batch_size > 1:
            raise
        counts = read_weighting(trace_at(2), trace_at(4), shares)
        if counts.totals:
            raise
        return counts


def _made_of(equations: Sequence[core.JaxprEqn], variables: Sequence[core.Var]) -> set[core.Var]:
    """These variables, and all that is made with them."""
    made = set(variables)
    for equation in equations:
        if any(not isinstance(variable, core.Literal) and variable in made for variable in equation.invars):
            made.update(equation.outvars)
    return made


def _literals(equation: core.JaxprEqn) -> list[object]:
    return [variable.val for variable in equation.invars if isinstance(variable, core.Literal)]


def _constant(value: jax.Array) -> Callable[[], jax.Array]:
    return lambda: value


def _refusal(reason: str) -> PlanError:
    return PlanError(
        f"the loss is no mean or sum over samples: {reason}. Copies and microbatches add up their losses, which would "
        "then train something else. Return a mean or a sum (over samples, or over tokens that are counted), or pass "
        "takes_mean=True to take the mean of their losses as the loss."
    )


def _dependence(dependences: Mapping[core.Var, Dependence], variable: core.Var | core.Literal) -> Dependence:
    return None if isinstance(variable, core.Literal) else dependences.get(variable)


def _walk(traces: _PairedTraces, dependences: dict[core.Var, Dependence]) -> None:
    """Add how every variable of the small trace depends on the batch."""
    pairs = paired_equations(*traces.equations)
    if pairs is None:
        raise _refusal("it is traced differently for twice as many samples")
    for small, large in pairs:
        if small is None:
            continue
        if large is None:  # a reshape, which only a single sample has
            dependences[small.outvars[0]] = _dependence(dependences, small.invars[0])
            continue
        if primitive_name(small) in DRAWS and small.outvars[0].aval.shape != large.outvars[0].aval.shape:
            dependences[small.outvars[0]] = _PER_SAMPLE
            continue
        inputs = [_dependence(dependences, variable) for variable in small.invars]
        if any(dependence is not None for dependence in inputs):
            results = _results_with_counts(traces, small, large, inputs)
            dependences.update(zip(small.outvars, results, strict=True))


def _results_with_counts(
    traces: _PairedTraces, small: core.JaxprEqn, large: core.JaxprEqn, inputs: list[Dependence]
) -> list[Dependence]:
    """The same as `_results`, where counts are told from other sums."""
    counts = traces.counts
    if counts is None:
        return _results(traces, small, large, inputs)
    if _COUNT not in inputs:
        results = _results(traces, small, large, inputs)
        if set(results) == {_GROWTH_OF_A_SUM} and counts.is_free(small):
            counts.sums.update(dict.fromkeys(small.outvars))
            return [_COUNT] * len(results)
        return results
    is_made_of_counts = counts.is_free(small) and set(inputs) <= {_COUNT, None}
    if is_made_of_counts and not any(_grows(*pair) for pair in zip(small.outvars, large.outvars, strict=True)):
        return [_COUNT] * len(small.outvars)
    for variable, larger, dependence in zip(small.invars, large.invars, inputs, strict=True):
        if dependence == _COUNT:
            counts.totals[variable] = counts.totals_of_large[larger] = None
    others: list[Dependence] = [None if dependence == _COUNT else dependence for dependence in inputs]
    if all(dependence is None for dependence in others):
        return [None] * len(small.outvars)
    return _results(traces, small, large, others)


def _results(
    traces: _PairedTraces, small: core.JaxprEqn, large: core.JaxprEqn, inputs: list[Dependence]
) -> list[Dependence]:
    """How the results of an equation, which stands in both traces, depend on the batch."""
    name = primitive_name(small)
    if name == "scan":
        return _results_of_scan(traces, small, large, inputs)
    called = [
        next((equation.params[key] for key in _INNER_TRACES if key in equation.params), None)
        for equation in (small, large)
    ]
    if all(hasattr(trace, "eqns") for trace in called):
        return _results_of_call(traces, small, large, called, inputs)
    kinds = {dependence for dependence in inputs if dependence is not None}
    grows = [_grows(*results) for results in zip(small.outvars, large.outvars, strict=True)]
    if _PER_SAMPLE not in kinds:
        return [_growth_behind_sums(traces, small, large, inputs, any(grows))] * len(grows)
    if len(kinds) > 1:
        raise _refusal(f"{name} joins single samples with a sum over all of them, as batch normalisation does")
    axis = small.params.get(_ALONG.get(name, ""))
    if axis is not None and small.invars[0].aval.shape[axis] != large.invars[0].aval.shape[axis]:
        raise _refusal(f"{name} runs along the samples")
    if not all(grows) and name not in _SUMS:
        raise _refusal(f"it takes {name} over the samples")
    return [_PER_SAMPLE if result_grows else _GROWTH_OF_A_SUM for result_grows in grows]


def _grows(small: core.Var, large: core.Var) -> bool:
    small_size, large_size = (math.prod(variable.aval.shape) for variable in (small, large))
    if small_size == large_size == 0:
        return bool(small.aval.shape != large.aval.shape)
    if large_size not in (small_size, 2 * small_size):
        raise _refusal("it compares samples with each other")
    return bool(large_size != small_size)


def _growth_behind_sums(
    traces: _PairedTraces, small: core.JaxprEqn, large: core.JaxprEqn, inputs: list[Dependence], grows: bool
) -> float:
    """The growth of what is made of sums over samples, and of things that do not depend on the samples."""
    name = primitive_name(small)
    growths = [float(dependence) for dependence in inputs if dependence is not None]
    if grows:
        raise _refusal(f"{name} hands a sum over all samples to each of them, as batch normalisation does")
    if name in _LINEAR:
        return growths[0]
    # To a mean anything may be added that does not depend on the samples; to a sum only another sum.
    is_closed = len(growths) == len(inputs) or growths[0] == _GROWTH_OF_A_MEAN
    if name in _ADDITIONS and len(set(growths)) == 1 and is_closed:
        return growths[0]
    if name in ("mul", "dot_general") and len(growths) == 1:
        factor = inputs.index(None)
        return growths[0] * (traces.growth(small.invars[factor], large.invars[factor]) if name == "mul" else 1.0)
    if name == "div" and len(growths) == 1 and inputs[0] is not None:
        return growths[0] / traces.growth(small.invars[1], large.invars[1])
    if name == "div":
        raise _refusal("it divides by a sum over samples that depends on the parameters")
    raise _refusal(f"it takes {name} of a sum over the samples")


def _called_traces(
    traces: _PairedTraces,
    small: core.JaxprEqn,
    large: core.JaxprEqn,
    called: Sequence[core.Jaxpr | core.ClosedJaxpr],
    constant_count: int | None = None,
) -> tuple[_PairedTraces, list[core.Var]]:
    """The traces that an equation calls, and the small one's variables for its operands.

    Only the first `constant_count` operands (all for None) have in the called trace the value that they have outside:
    the others of a scan change from trip to trip.
    """
    jaxprs = [getattr(trace, "jaxpr", trace) for trace in called]
    outside: list[Computed] = []
    for size, (equation, jaxpr) in enumerate(zip((small, large), jaxprs, strict=True)):
        pairs = zip(jaxpr.invars[:constant_count], equation.invars[:constant_count], strict=True)
        operands = {inner: _value_outside(traces, size, outer) for inner, outer in pairs}
        constants = getattr(called[size], "consts", ())
        outside.append(
            operands | {variable: _constant(value) for variable, value in zip(jaxpr.constvars, constants, strict=False)}
        )
    inner_traces = _PairedTraces(equations=(jaxprs[0].eqns, jaxprs[1].eqns), outside=(outside[0], outside[1]))
    return inner_traces, jaxprs[0].invars


def _value_outside(traces: _PairedTraces, size: int, variable: core.Var) -> Callable[[], jax.Array]:
    return lambda: traces.value(size, variable)


def _results_of_call(
    traces: _PairedTraces,
    small: core.JaxprEqn,
    large: core.JaxprEqn,
    called: Sequence[core.Jaxpr | core.ClosedJaxpr],
    inputs: list[Dependence],
) -> list[Dependence]:
    inner_traces, variables = _called_traces(traces, small, large, called)
    dependences: dict[core.Var, Dependence] = dict(zip(variables, inputs, strict=True))
    _walk(inner_traces, dependences)
    return [_dependence(dependences, variable) for variable in getattr(called[0], "jaxpr", called[0]).outvars]


def _results_of_scan(
    traces: _PairedTraces, small: core.JaxprEqn, large: core.JaxprEqn, inputs: list[Dependence]
) -> list[Dependence]:
    """The results of a scan: what is handed on depends on the batch as soon as any trip makes it do so."""
    called = [equation.params["jaxpr"] for equation in (small, large)]
    first, count = small.params["num_consts"], small.params["num_carry"]
    if small.params["length"] != large.params["length"]:
        if count:
            raise _refusal("it scans along the samples")
        return [_PER_SAMPLE] * len(small.outvars)
    inner_traces, variables = _called_traces(traces, small, large, called, first)
    carried = inputs[first : first + count]
    while True:
        operands = [*inputs[:first], *carried, *inputs[first + count :]]
        dependences: dict[core.Var, Dependence] = dict(zip(variables, operands, strict=True))
        _walk(inner_traces, dependences)
        results = [_dependence(dependences, variable) for variable in called[0].jaxpr.outvars]
        joined = [_joined(before, after) for before, after in zip(carried, results[:count], strict=True)]
        if joined == carried:
            return [*joined, *results[count:]]
        carried = joined


def _joined(before: Dependence, after: Dependence) -> Dependence:
    if before is None or after is None or before == after:
        return after if before is None else before
    raise _refusal("a scan joins single samples with a sum over all of them")
