"""Recomputation: what forward does not keep and backward computes again, as the plan's recompute mode says.

none        everything that backward reads is kept; with ZeRO-3, gathered parameters (and whatever only moves data) are
            made again, so that a layer's parameters are gathered once in each pass (`keep_only_what_mode_allows`)
selective   products that read no parameter (attention scores and context) and what lies between them are made again;
            the context itself, which the next product reads, is kept (`with_recomputed_attention`)
dots        a layer keeps what enters it and the results of products without batch dimensions, which are those that
            read a parameter (`keep_only_what_mode_allows`)
full        a layer keeps only what enters it (`keep_only_what_mode_allows`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import jax
from jax.extend import core

from phaze.backends.jax.traced_loss import Equation, evaluate, needed_equations, primitive_name, read_variables
from phaze.ir import RecomputeMode

__all__ = ["keep_only_what_mode_allows", "with_recomputed_attention"]

_MOVES = frozenset(
    {
        *("all_gather", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice"),
        *("expand_dims", "pad", "reshape", "rev", "sharding_constraint", "shard_map", "slice", "squeeze", "transpose"),
    }
)
"""Primitives that compute nothing, and only move data: what gathering a parameter consists of."""

P = ParamSpec("P")
R = TypeVar("R")


def keep_only_what_mode_allows(function: Callable[P, R], mode: RecomputeMode, *, gathers: bool) -> Callable[P, R]:
    """The function, of which forward keeps for backward only what the mode allows.

    `gathers` says that the function gathers parameters (ZeRO-3), which are then gathered again in backward.
    """
    recomputed = function
    if mode is RecomputeMode.FULL:
        recomputed = jax.checkpoint(function, policy=jax.checkpoint_policies.nothing_saveable)
    elif mode is RecomputeMode.DOTS:
        recomputed = jax.checkpoint(function, policy=_is_product_or_sum)
    elif gathers:
        recomputed = jax.checkpoint(function, policy=_is_computed)
    return recomputed


_SUMS = frozenset({"psum", "psum2", "psum_invariant", "psum_scatter", "reduce_scatter"})
"""Primitives that add up the parts of a product over devices."""


def _is_product_or_sum(primitive: core.Primitive, *operands: object, **parameters: object) -> bool:
    """A policy of `jax.checkpoint`: products without batch dimensions are kept, and sums of their parts."""
    is_product = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **parameters)
    return is_product or str(primitive) in _SUMS


def _is_computed(primitive: core.Primitive, *_: object, **__: object) -> bool:
    """A policy of `jax.checkpoint`: whether the result of a primitive is kept."""
    return str(primitive) not in _MOVES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RecomputedGroup:
    """Equations that are run as one, and that backward runs again."""

    equations: tuple[Equation, ...]
    invars: tuple[core.Var, ...]
    outvars: tuple[core.Var, ...]

    def run(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The values that leave the group."""

        def run_group(*values: jax.Array) -> list[jax.Array]:
            return evaluate(self.equations, self.outvars, dict(zip(self.invars, values, strict=True)))

        return list(jax.checkpoint(run_group, policy=jax.checkpoint_policies.nothing_saveable)(*operands))


def with_recomputed_attention(
    equations: Sequence[Equation], parameters: Sequence[core.Var], wanted: Sequence[core.Var]
) -> list[Equation]:
    """The equations with attention (see the module's words) in groups that backward runs again.

    A group stands behind what it reads and before what reads it, as equations of a trace do: those who follow what the
    tensor axis splits go through them in order. `wanted` are the variables that are read after all equations.
    """
    members = _attention(equations, parameters)
    groups = _connected([equation for equation in equations if id(equation) in members])
    grouped = {id(equation) for group in groups for equation in group}
    others = [equation for equation in equations if id(equation) not in grouped]
    read = {variable for equation in others for variable in read_variables(equation)}
    read |= {variable for variable in wanted if not isinstance(variable, core.Literal)}
    arranged = [*others, *(_recomputed_group(group, read, groups) for group in groups)]
    return needed_equations(arranged, [variable for equation in arranged for variable in equation.outvars], {})


def _recomputed_group(
    members: list[Equation], read: set[core.Var], groups: Sequence[Sequence[Equation]]
) -> _RecomputedGroup:
    made = dict.fromkeys(variable for equation in members for variable in equation.outvars)
    other_groups = [group for group in groups if group is not members]
    read_by_others = {variable for group in other_groups for equation in group for variable in read_variables(equation)}
    entering = dict.fromkeys(
        variable for equation in members for variable in read_variables(equation) if variable not in made
    )
    leaving = tuple(variable for variable in made if variable in read or variable in read_by_others)
    return _RecomputedGroup(equations=tuple(members), invars=tuple(entering), outvars=leaving)


def _attention(equations: Sequence[Equation], parameters: Sequence[core.Var]) -> set[int]:
    """The ids of products of two activations, and of what lies between such products without a parameter's product."""
    weights = set(parameters)
    products: set[int] = set()
    parameter_products: set[int] = set()
    for equation in equations:
        inputs = read_variables(equation)
        if inputs and all(variable in weights for variable in inputs):
            weights.update(equation.outvars)
        elif primitive_name(equation) == "dot_general":
            (parameter_products if any(variable in weights for variable in inputs) else products).add(id(equation))
    behind_products: set[core.Var] = set()
    following = set()
    for equation in equations:
        reads_one = not behind_products.isdisjoint(read_variables(equation))
        if id(equation) in products or (id(equation) not in parameter_products and reads_one):
            behind_products.update(equation.outvars)
            following.add(id(equation))
    before_products: set[core.Var] = set()
    leading = set()
    for equation in reversed(equations):
        makes_one = not before_products.isdisjoint(equation.outvars)
        if id(equation) in products or (id(equation) not in parameter_products and makes_one):
            before_products.update(read_variables(equation))
            leading.add(id(equation))
    return following & leading


def _connected(equations: Sequence[Equation]) -> list[list[Equation]]:
    """The equations in groups whose members hand values to each other."""
    groups: list[list[Equation]] = []
    for equation in equations:
        inputs = set(read_variables(equation))
        joined = [group for group in groups if any(not inputs.isdisjoint(member.outvars) for member in group)]
        merged = [member for group in joined for member in group]
        groups = [group for group in groups if all(group is not taken for taken in joined)]
        groups.append([*merged, equation])
    return groups
