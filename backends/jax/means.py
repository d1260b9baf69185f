"""Whether a loss is a mean over samples, so that the mean of microbatches' losses is the loss of all of them.

The loss is traced at a microbatch and at twice as many rows, and both traces are walked together. A value of the batch
is *rows* while it grows with the microbatch; a sum over the samples ends that, and from there on the value is known by
its *growth*: how it changes when every sample comes twice. A sum doubles (2), a mean stays (1); only linear functions
may follow. Anything else mixes samples, or weighs them by one another, and is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phaze.backends.jax.micro_batches import Share
from phaze.backends.jax.traced import Traced, evaluate
from phaze.errors import PlanError

__all__ = ["check_mean"]

_ROWS = "rows"
_MEAN = 1.0
_SUMS = frozenset({"dot_general", "reduce_sum"})
_LINEAR = frozenset(
    {
        *("broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "neg", "real", "reduce_sum"),
        *("reduce_precision", "reshape", "sharding_constraint", "slice", "squeeze", "transpose"),
    }
)
_ADDITIONS = frozenset({"add", "add_any", "sub"})
_ALONG = {"cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cumlogsumexp": "axis", "sort": "dimension"}
_INNER = ("jaxpr", "call_jaxpr")

State = str | float | None
"""Rows; the growth of a sum over rows; None for what does not depend on the batch."""


class _UnknownError(LookupError):
    """A value that cannot be computed without parameters or a batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Body:
    """The equations of one trace at both sizes, and what leads to values from outside of them."""

    equations: tuple[Sequence[Any], Sequence[Any]]
    outside: tuple[Mapping[Any, Callable[[], Any]], Mapping[Any, Callable[[], Any]]]

    def value(self, side: int, variable: Any) -> Any:
        """What does not depend on parameters and batch."""

        def read(other: Any) -> Any:
            if other not in self.outside[side]:
                raise _UnknownError
            return self.outside[side][other]()

        return evaluate(self.equations[side], [variable], {}, read)[0]

    def growth(self, small: Any, large: Any) -> float:
        """How a factor that no sample takes part in changes; 1 where it cannot be computed: then it is learned."""
        try:
            before, after = (self.value(side, variable) for side, variable in enumerate((small, large)))
        except _UnknownError:
            return 1.0
        return float(after.ravel()[0] / before.ravel()[0]) if getattr(before, "size", 0) else float(after / before)


def check_mean(small: Traced, large: Traced, shares: Sequence[Share]) -> None:
    """Raise PlanError unless the loss, traced at two sizes, is a mean over samples."""
    constants = [{v: _given(value) for v, value in one.constants.items()} for one in (small, large)]
    body = _Body(equations=(small.equations, large.equations), outside=(constants[0], constants[1]))
    rows = [variable for variable, share in zip(small.batch, shares, strict=True) if share is Share.ROWS]
    states: dict[Any, State] = dict.fromkeys(rows, _ROWS)
    _walk(body, states)
    found = _state(states, small.loss)
    if found not in (None, _MEAN):
        kind = "a sum over the samples" if found == 2.0 else f"grows {found}-fold when every sample comes twice"
        raise _refused(f"it is {kind}" if found == 2.0 else f"it {kind}")


def _given(value: Any) -> Callable[[], Any]:
    return lambda: value


def _refused(why: str) -> PlanError:
    return PlanError(
        f"the loss is not a mean over samples: {why}. Copies and microbatches average their losses, which would then "
        "train something else. Return a mean (divide by a constant number of samples or tokens), or pass "
        "takes_mean=True to take the mean of their losses as the loss."
    )


def _state(states: Mapping[Any, State], variable: Any) -> State:
    from jax.extend import core

    return None if isinstance(variable, core.Literal) else states.get(variable)


def _walk(body: _Body, states: dict[Any, State]) -> None:
    """Give every variable of the small trace its state."""
    first, second = body.equations
    if len(first) != len(second):
        raise _refused("it is traced differently for twice as many samples")
    for small, large in zip(first, second, strict=True):
        if str(small.primitive) != str(large.primitive):
            raise _refused("it is traced differently for twice as many samples")
        inputs = [_state(states, variable) for variable in small.invars]
        if any(state is not None for state in inputs):
            found = _results(body, small, large, inputs)
            states.update(zip(small.outvars, found, strict=True))


def _results(body: _Body, small: Any, large: Any, inputs: list[State]) -> list[State]:
    name = str(small.primitive)
    if name == "scan":
        return _scanned(body, small, large, inputs)
    inner = [next((one.params[key] for key in _INNER if key in one.params), None) for one in (small, large)]
    if all(hasattr(one, "eqns") for one in inner):
        return _inside(body, small, large, inner, inputs)
    kinds = {state for state in inputs if state is not None}
    grown = [_grown(a, b) for a, b in zip(small.outvars, large.outvars, strict=True)]
    if _ROWS not in kinds:
        return [_summed(body, small, large, inputs, any(grown))] * len(grown)
    if len(kinds) > 1:
        raise _refused(f"{name} joins single samples with a sum over all of them, as batch normalisation does")
    axis = small.params.get(_ALONG.get(name, ""))
    if axis is not None and small.invars[0].aval.shape[axis] != large.invars[0].aval.shape[axis]:
        raise _refused(f"{name} runs along the samples")
    if not all(grown) and name not in _SUMS:
        raise _refused(f"it takes {name} over the samples")
    return [_ROWS if grows else 2.0 for grows in grown]


def _grown(small: Any, large: Any) -> bool:
    sizes: list[int] = [math.prod(variable.aval.shape) for variable in (small, large)]
    if sizes[1] not in (sizes[0], 2 * sizes[0]):
        raise _refused("it compares samples with each other")
    return sizes[1] != sizes[0]


def _summed(body: _Body, small: Any, large: Any, inputs: list[State], is_grown: bool) -> float:
    """The growth of what is made of sums over samples, and of things that do not depend on them."""
    name = str(small.primitive)
    growths = [float(state) for state in inputs if state is not None]
    if is_grown:
        raise _refused(f"{name} hands a sum over all samples to each of them, as batch normalisation does")
    if name in _LINEAR:
        return growths[0]
    if name in _ADDITIONS and len(set(growths)) == 1 and (len(growths) == len(inputs) or growths[0] == _MEAN):
        return growths[0]
    if name in ("mul", "dot_general") and len(growths) == 1:
        other = inputs.index(None)
        return growths[0] * (body.growth(small.invars[other], large.invars[other]) if name == "mul" else 1.0)
    if name == "div" and len(growths) == 1 and inputs[0] is not None:
        return growths[0] / body.growth(small.invars[1], large.invars[1])
    if name == "div":
        raise _refused("it divides by a number that depends on the samples, as a count of unmasked tokens does")
    raise _refused(f"it takes {name} of a sum over the samples")


def _nested(
    body: _Body, small: Any, large: Any, inner: Sequence[Any], known: int | None = None
) -> tuple[_Body, list[Any]]:
    """The body of an equation, and the variables of its operands; the first `known` are the equation's own ones."""
    opened = [getattr(one, "jaxpr", one) for one in inner]
    outside: list[dict[Any, Callable[[], Any]]] = []
    for side, (equation, jaxpr) in enumerate(zip((small, large), opened, strict=True)):
        pairs = zip(jaxpr.invars[:known], equation.invars[:known], strict=True)
        given = {v: _lazily(body, side, outer) for v, outer in pairs}
        constants = getattr(inner[side], "consts", ())
        outside.append(given | {v: _given(value) for v, value in zip(jaxpr.constvars, constants, strict=False)})
    return _Body(equations=(opened[0].eqns, opened[1].eqns), outside=(outside[0], outside[1])), opened[0].invars


def _lazily(body: _Body, side: int, variable: Any) -> Callable[[], Any]:
    return lambda: body.value(side, variable)


def _inside(body: _Body, small: Any, large: Any, inner: Sequence[Any], inputs: list[State]) -> list[State]:
    nested, variables = _nested(body, small, large, inner)
    states: dict[Any, State] = dict(zip(variables, inputs, strict=True))
    _walk(nested, states)
    return [_state(states, variable) for variable in getattr(inner[0], "jaxpr", inner[0]).outvars]


def _scanned(body: _Body, small: Any, large: Any, inputs: list[State]) -> list[State]:
    """A scan: what is handed on becomes what any trip makes of it."""
    inner = [one.params["jaxpr"] for one in (small, large)]
    first, count = small.params["num_consts"], small.params["num_carry"]
    if small.params["length"] != large.params["length"]:
        if count:
            raise _refused("it scans along the samples")
        return [_ROWS] * len(small.outvars)
    nested, variables = _nested(body, small, large, inner, first)
    carried = inputs[first : first + count]
    while True:
        states: dict[Any, State] = dict(
            zip(variables, [*inputs[:first], *carried, *inputs[first + count :]], strict=True)
        )
        _walk(nested, states)
        results = [_state(states, variable) for variable in inner[0].jaxpr.outvars]
        joined = [_joined(before, after) for before, after in zip(carried, results[:count], strict=True)]
        if joined == carried:
            return [*joined, *results[count:]]
        carried = joined


def _joined(before: State, after: State) -> State:
    if before is None or after is None or before == after:
        return after if before is None else before
    raise _refused("a scan joins single samples with a sum over all of them")
