"""Whether a loss treats samples apart: no sample reads another one, nor its own number in the batch.

Copies and microbatches run a loss on some samples each. What looks up other samples (a shuffled batch that is mixed
into itself) or weighs a sample by its place in the batch would there find other samples and other places than on one
device, and train something else. Shapes do not tell: such a loss is a mean over samples all the same.

The loss is traced for a number of samples that a prime divides which divides no size of the model, so
that every dimension that this prime divides is made of samples. All equations are then walked once. A dimension of
samples has, for each sample, a number of neighbouring elements, its *run*: merging (samples, sequence) makes runs as
long as the sequence, and a pair of samples that is made one element leaves runs of a half. An element stays with its
sample while

  reshapes, joins and slices   keep runs whole and in their order
  lookups                      pair a sample with itself, by dimensions of the lookup or by its own number
  reversals, sorts, scans      run along other dimensions
  the number of a sample       (an iota over the samples) is only used to look up that sample, or to draw its numbers

Primitives without a rule treat samples apart when they are joined by no dimension of samples of another kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

import jax
import numpy as np
from jax.extend import core

from phaze.backends.jax.trace_rewriting import inner_traces
from phaze.backends.jax.traced_loss import TracedLoss, primitive_name
from phaze.errors import PlanError

__all__ = ["check_samples_apart"]

_PRIMES = (1009, 1013, 1019, 1021, 1031)
"""Larger than most dimensions that models repeat, so that products of a few of them rarely contain one."""

_ALONG = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), "axis"),
    "sort": "dimension",
}
"""Primitives that run along one dimension, with the parameter that names it."""
_KEEP_NUMBERS = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "expand_dims"})
"""Primitives behind which the number of a sample is still one."""
_DRAWS_BY_NUMBER = frozenset({"random_fold_in"})
"""Primitives that draw for a sample by its number; microbatches give them the number in the whole batch."""
_COMPARISONS = frozenset({"lt", "ge"})

Variable: TypeAlias = core.Var | core.Literal


def check_samples_apart(trace_at: Callable[[int], TracedLoss], micro_batch_size: int, sizes: Collection[int]) -> None:
    """Raises PlanError where a loss mixes samples, or reads their numbers in the batch.

    `trace_at` traces it for a number of samples; `sizes` are those of all dimensions that are no samples.
    """
    prime = next((prime for prime in _PRIMES if all(size % prime or not size for size in sizes)), _PRIMES[-1])
    rows = micro_batch_size * prime
    closed = trace_at(rows).flat
    walk = _Walk(rows=rows, prime=prime)
    for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        walk.enter_constant(variable, value)
    for variable in closed.jaxpr.invars:
        walk.enter(variable)
    walk.run(closed.jaxpr)


def _refusal(what: str) -> PlanError:
    return PlanError(
        f"the loss does not treat samples apart: {what}. Copies and microbatches have other samples beside each other "
        "than one device has. Mix or number the samples before they are given to the loss, plan with one microbatch on "
        "one copy (strategy dp=1), or pass takes_mean=True to take the mean of the losses of microbatches as they are."
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Walk:
    """What is known of the variables of a trace.

    Attributes:
        rows: samples in the trace.
        prime: what divides dimensions of samples only.
        runs: how many neighbouring elements a sample has, for variables that are not the same for all samples.
        numbers: variables that are, for each sample, its number.
        shifted: the same with something added, as indices from the end are made.
        joined: the operands of concatenations, by their results.
    """

    rows: int
    prime: int
    runs: dict[core.Var, Fraction] = field(default_factory=dict)
    numbers: set[core.Var] = field(default_factory=set)
    shifted: set[core.Var] = field(default_factory=set)
    joined: dict[core.Var, tuple[int, tuple[Variable, ...]]] = field(default_factory=dict)

    def dim(self, variable: Variable) -> int | None:
        """The dimension of samples, if there is one."""
        found = [dim for dim, size in enumerate(variable.aval.shape) if size and size % self.prime == 0]
        if len(found) > 1:
            raise _refusal("it compares samples with each other")
        return found[0] if found else None

    def run_of(self, variable: Variable) -> Fraction | None:
        """The run of each sample; None where all samples have the same."""
        return None if isinstance(variable, core.Literal) else self.runs.get(variable)

    def enter(self, variable: core.Var) -> None:
        """An argument: its rows are samples."""
        if self.dim(variable) is not None:
            self.runs[variable] = Fraction(1)

    def enter_constant(self, variable: core.Var, value: jax.Array) -> None:
        """An array that was made beside the trace, and must be the same for all samples or their numbers."""
        dim = self.dim(variable)
        if dim is None:
            return
        rows = np.moveaxis(np.asarray(value), dim, 0)
        if rows.ndim == 1 and np.array_equal(rows, np.arange(self.rows)):
            self.runs[variable] = Fraction(1)
            self.numbers.add(variable)
        elif not (rows == rows[:1]).all():
            raise _refusal("it reads a constant that has other numbers for each sample")

    def run(self, jaxpr: core.Jaxpr) -> None:
        """Walk the equations of a trace."""
        for equation in jaxpr.eqns:
            inner = list(inner_traces(equation))
            if inner:
                self._call(equation, inner)
            else:
                self._equation(equation)

    def _call(self, equation: core.JaxprEqn, called: Sequence[core.Jaxpr]) -> None:
        """A loop, a branch, or a function with a derivative of its own."""
        params = equation.params
        for jaxpr in called:
            given = list(equation.invars)
            if primitive_name(equation) == "cond":
                given = given[1:]
            elif "cond_nconsts" in params:
                of_condition, of_body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
                is_condition = jaxpr is getattr(params["cond_jaxpr"], "jaxpr", None)
                given = [*given[slice(0, of_condition) if is_condition else slice(of_condition, of_body)]]
                given += equation.invars[of_body:]
            if len(given) != len(jaxpr.invars):
                continue
            for inside, outside in zip(jaxpr.invars, given, strict=True):
                self._hand_over(inside, outside)
            self.run(jaxpr)
            if len(jaxpr.outvars) == len(equation.outvars):
                for outside, inside in zip(equation.outvars, jaxpr.outvars, strict=True):
                    self._hand_over(outside, inside)

    def _hand_over(self, variable: core.Var, source: Variable) -> None:
        """What is known of a variable of one trace holds for one of another; a loop over samples has them apart."""
        if isinstance(source, core.Literal) or self.dim(variable) is None:
            return
        run = self.run_of(source)
        if self.dim(source) is None or run is not None:
            self.runs[variable] = run or Fraction(1)
        for known in (self.numbers, self.shifted):
            if source in known:
                known.add(variable)

    def _equation(self, equation: core.JaxprEqn) -> None:
        name = primitive_name(equation)
        if name == "iota":
            self._count(equation)
            return
        if any(not isinstance(variable, core.Literal) and variable in self.numbers for variable in equation.invars):
            if self._uses_numbers(equation, name):
                return
        elif any(not isinstance(variable, core.Literal) and variable in self.shifted for variable in equation.invars):
            raise _refusal(f"it takes {name} of the numbers of samples in the batch")
        if name in ("concatenate", "pad") and self._makes_samples(equation):
            raise _refusal("it puts together, of several parts, something for all samples")
        runs = {run for run in map(self.run_of, equation.invars) if run is not None}
        if name.startswith("random_") and any(self.dim(result) is not None for result in equation.outvars):
            runs = runs or {Fraction(1)}
            self._keep(equation, {self._run_of_draw(equation.outvars[0]) or runs.pop()})
            return
        if not runs:
            return
        match name:
            case "reshape":
                self._reshape(equation)
            case "gather" | "dynamic_slice" | "dynamic_update_slice":
                self._look_up(equation, name)
                self._keep(equation, runs)
            case _ if name.startswith("scatter"):
                self._look_up(equation, name)
                self._keep(equation, runs)
            case "slice" | "split" | "concatenate" | "pad":
                self._cut(equation, name)
                self._keep(equation, runs)
            case _:
                self._check_direction(equation, name)
                self._keep(equation, runs)

    def _keep(self, equation: core.JaxprEqn, runs: set[Fraction]) -> None:
        """Results have the runs of operands, which are alike where samples are joined."""
        for result in equation.outvars:
            if self.dim(result) is not None:
                if len(runs) > 1 and primitive_name(equation) not in ("gather", "dot_general"):
                    raise _refusal(f"{primitive_name(equation)} joins samples in different orders")
                self.runs[result] = max(runs)

    def _count(self, equation: core.JaxprEqn) -> None:
        (result,) = equation.outvars
        if equation.params["dimension"] == self.dim(result):
            self.runs[result] = self._run_of_draw(result) or Fraction(1)
            self.numbers.add(result)

    def _run_of_draw(self, result: core.Var) -> Fraction | None:
        """The run of samples in what is made for all of them at once."""
        dim = self.dim(result)
        return None if dim is None else Fraction(result.aval.shape[dim], self.rows)

    def _uses_numbers(self, equation: core.JaxprEqn, name: str) -> bool:
        """Whether an equation with numbers of samples is done with here; raises PlanError for uses that are not known.

        Indices are made of them as those that may count from the end: `where(i < 0, i + size, i)`.
        """
        (result, *_) = equation.outvars
        operands = equation.invars
        if name in _DRAWS_BY_NUMBER or name in ("gather", "dynamic_slice") or name.startswith("scatter"):
            return False
        if name in _KEEP_NUMBERS:
            self.numbers.add(result)
            if self.dim(result) is not None:
                self.runs[result] = Fraction(1)
            return True
        if name in _COMPARISONS and isinstance(operands[1], core.Literal) and not np.any(operands[1].val):
            return True
        if name == "add" and any(self._is_count_of_rows(operand) for operand in operands):
            self.shifted.add(result)
            self.runs[result] = Fraction(1)
            return True
        if name == "select_n" and all(operand in self.numbers | self.shifted for operand in operands[1:]):
            self.numbers.add(result)
            self.runs[result] = Fraction(1)
            return True
        if name == "concatenate" and self.dim(result) != equation.params["dimension"]:
            self.joined[result] = (equation.params["dimension"], tuple(operands))
            self.runs[result] = Fraction(1)
            return True
        raise _refusal(f"it takes {name} of the numbers of samples in the batch")

    def _is_count_of_rows(self, variable: Variable) -> bool:
        return isinstance(variable, core.Literal) and bool(np.all(np.asarray(variable.val) == self.rows))

    def _reshape(self, equation: core.JaxprEqn) -> None:
        """Elements of one sample stay neighbours, in the order of samples."""
        (source, *_), (result,) = equation.invars, equation.outvars
        run, before, after = self.run_of(source), self.dim(source), self.dim(result)
        assert run is not None
        if before is None or equation.params["dimensions"] is not None:
            raise _refusal("it reorders samples")
        elements = run * math.prod(source.aval.shape[before + 1 :])
        if after is None:
            raise _refusal("it takes samples apart in a reshape")
        new_run = elements / math.prod(result.aval.shape[after + 1 :])
        if Fraction(result.aval.shape[after]) % (self.rows * new_run):
            raise _refusal("a reshape joins samples that are not neighbours, such as halves of the batch")
        self.runs[result] = new_run

    def _cut(self, equation: core.JaxprEqn, name: str) -> None:
        """Along the samples, only batches of all samples are joined and taken apart again."""
        source = next(variable for variable in equation.invars if self.run_of(variable) is not None)
        dim, run, params = self.dim(source), self.run_of(source), equation.params
        assert dim is not None
        assert run is not None
        whole = self.rows * run
        places: Sequence[int]
        if name == "slice":
            strides = params["strides"]
            is_whole = strides is None or strides[dim] == 1
            places = (params["start_indices"][dim], params["limit_indices"][dim]) if is_whole else (1,)
        elif name == "pad":
            places = [abs(size) for size in params["padding_config"][dim]]
        else:
            along = params["axis" if name == "split" else "dimension"]
            sizes = [variable.aval.shape[dim] for variable in (*equation.invars, *equation.outvars)]
            places = sizes if along == dim else ()
        if any(Fraction(place) % whole for place in places):
            raise _refusal("it reads some samples and not others, or moves them")

    def _makes_samples(self, equation: core.JaxprEqn) -> bool:
        """Whether a dimension of samples is made of others, as numbers from 0 to 1 are of all but the last."""
        dim = self.dim(equation.outvars[0])
        return dim is not None and any(self.dim(variable) != dim for variable in equation.invars if variable.aval.shape)

    def _look_up(self, equation: core.JaxprEqn, name: str) -> None:
        """Samples are looked up by themselves."""
        table = equation.invars[0]
        dim = self.dim(table)
        if dim is None or (self.run_of(table) is None and name in ("gather", "dynamic_slice")):
            return
        if name.startswith("dynamic"):
            moved = equation.params["slice_sizes"] if name == "dynamic_slice" else equation.invars[1].aval.shape
            if moved[dim] != table.aval.shape[dim]:
                raise _refusal(f"it looks up samples of the batch ({name})")
            return
        numbers = equation.params["dimension_numbers"]
        is_gather = name == "gather"
        looked_up = numbers.start_index_map if is_gather else numbers.scatter_dims_to_operand_dims
        if dim in looked_up and not self._is_number(equation.invars[1], list(looked_up).index(dim)):
            raise _refusal(f"it looks up samples of the batch by their numbers ({name}), as shuffling them does")

    def _is_number(self, indices: Variable, place: int) -> bool:
        """Whether one of the indices that stand last is the number of the sample that looks up."""
        if isinstance(indices, core.Literal):
            return False
        if indices in self.numbers:
            return True
        dim, operands = self.joined.get(indices, (None, ()))
        if dim != len(indices.aval.shape) - 1:
            return False
        before = 0
        for operand in operands:
            size = operand.aval.shape[dim]
            if before <= place < before + size:
                return not isinstance(operand, core.Literal) and operand in self.numbers
            before += size
        return False

    def _check_direction(self, equation: core.JaxprEqn, name: str) -> None:
        """Refuse what runs along the samples."""
        source = next(variable for variable in equation.invars if self.run_of(variable) is not None)
        dim, params = self.dim(source), equation.params
        if name == "rev" and dim in params["dimensions"]:
            raise _refusal("it reverses the order of samples")
        if params.get(_ALONG.get(name, "")) == dim and name in _ALONG:
            raise _refusal(f"{name} runs along the samples")
