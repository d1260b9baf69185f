"""A plan said as logical axis rules, for models of flax linen that name the dimensions of their parameters.

Such a model makes its parameters by `nn.with_logical_partitioning(initializer, names)`, and pairs of a name and of mesh
axes say where the dimensions of that name lie (`nn.logical_axis_rules`, MaxText's `logical_axis_rules`). Of the rules
for the names of an array the first ones win that take no mesh axis twice. So the rules here are ordered:

1   what the plan splits over the tensor axis and over stages, by the names of these dimensions
2   where ZeRO's shards divide parameters: every name, those first by which most parameters are divided
3   names of activations between layers, where the caller gave them

A rule speaks of all arrays that have its name. Shards of ZeRO may therefore lie along another dimension than the
plan's, which changes neither bytes nor collectives; vectors (biases, scales) lie as the matrices with their names do.
Rules that divide a matrix over other tensor-parallel or stage axes than the plan, or leave it whole where the plan
divides it, are refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec

from phaze.backends.jax.jax_mesh import mesh_axes
from phaze.backends.jax.loss_function import PyTree, is_a, path_words
from phaze.backends.jax.user_specs import constraints_of_plan, specs_of_trees
from phaze.errors import PlanError
from phaze.plan.plan import Plan

__all__ = ["Rule", "logical_rules"]

Rule: TypeAlias = tuple[str, str | tuple[str, ...] | None]
"""A logical name and the mesh axes along which dimensions of that name lie."""

_BOX = "flax.core.meta.Partitioned"
"""What holds an array and the names of its dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """A parameter with names for its dimensions, and the mesh axes that the plan has for each."""

    path: str
    names: tuple[str | None, ...]
    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]


def logical_rules(plan: Plan, variables: PyTree, activations: Sequence[str | None] = ()) -> tuple[Rule, ...]:
    """The rules under which the parameters of a linen model lie as the plan says.

    Args:
        plan: made for the model.
        variables: what the model's `init` gives (its shapes suffice), with names in boxes of flax.
        activations: names of the dimensions (samples, sequence, width) of what lies between layers; None for no name.
    """
    parameters = _named_parameters(plan, variables)
    axes = mesh_axes(plan)
    rules: dict[Rule, None] = {}
    fixed = Counter(
        (name, kept)
        for parameter in parameters
        for name, of_dim in zip(parameter.names, parameter.axes, strict=True)
        if len(parameter.names) > 1
        and name is not None
        and (kept := tuple(axis for axis in of_dim if axis not in axes.shards))
    )
    rules |= dict.fromkeys((name, _entry(kept)) for (name, kept), _ in fixed.most_common())
    if any(_is_sharded(parameter, axes.shards) for parameter in parameters):
        rules |= dict.fromkeys(
            (name, _entry(axes.shards)) for name in _names_for_shards(parameters, axes.shards, axes.sizes)
        )
    _check(parameters, tuple(rules), axes.shards, axes.sizes)
    spec = constraints_of_plan(plan)["activations"]
    rules |= {(name, entry): None for name, entry in zip(activations, spec, strict=False) if name is not None}
    return tuple(rules)


def _named_parameters(plan: Plan, variables: PyTree) -> list[_Named]:
    from flax.core import meta  # here, because only a model of flax brings flax along

    boxes = jax.tree_util.tree_leaves_with_path(variables, is_leaf=lambda leaf: is_a(leaf, _BOX))
    specs = jax.tree.leaves(
        specs_of_trees(plan, [meta.unbox(variables)])[0], is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    named = [
        _Named(
            path=".".join(path_words(path)),
            names=tuple(box.names),
            shape=tuple(box.value.shape),
            axes=tuple(_axes(entry) for entry in (*spec, *[None] * (len(box.names) - len(spec)))),
        )
        for (path, box), spec in zip(boxes, specs, strict=True)
        if is_a(box, _BOX)
    ]
    if not named:
        raise PlanError(
            "no parameter names its dimensions; make them by nn.with_logical_partitioning(initializer, names), or use "
            "plan.specs(params) in jax.jit."
        )
    return named


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else tuple(entry) if isinstance(entry, tuple) else (entry,)


def _entry(axes: Sequence[str]) -> str | tuple[str, ...]:
    return tuple(axes) if len(axes) > 1 else axes[0]


def _is_sharded(parameter: _Named, shards: Sequence[str]) -> bool:
    return any(axis in shards for of_dim in parameter.axes for axis in of_dim)


def _names_for_shards(parameters: Sequence[_Named], shards: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """The names whose dimensions the shards can divide wherever they stand, the most used first."""
    count = math.prod(sizes[axis] for axis in shards)
    used: Counter[str] = Counter()
    impossible: set[str] = set()
    for parameter in parameters:
        for name, size, of_dim in zip(parameter.names, parameter.shape, parameter.axes, strict=True):
            if name is None or any(axis not in shards for axis in of_dim):
                continue
            used[name] += 1 if set(of_dim) & set(shards) else 0
            impossible |= set() if size % count == 0 else {name}
    return [name for name, _ in used.most_common() if name not in impossible]


def _check(
    parameters: Sequence[_Named], rules: Sequence[Rule], shards: Sequence[str], sizes: Mapping[str, int]
) -> None:
    """Raise PlanError where the rules lay out a parameter in another way than the plan."""
    from flax import linen  # here, because only a model of flax brings flax along

    for parameter in parameters:
        spec = linen.logical_to_mesh_axes(parameter.names, rules)
        given = [_axes(entry) for entry in (*spec, *[None] * (len(parameter.names) - len(spec)))]
        divides = all(
            size % math.prod(sizes[axis] for axis in of_dim) == 0
            for size, of_dim in zip(parameter.shape, given, strict=True)
        )
        fixed = [
            [tuple(axis for axis in of_dim if axis not in shards) for of_dim in layout]
            for layout in (parameter.axes, given)
        ]
        is_whole = not any(set(of_dim) & set(shards) for of_dim in given)
        is_other = fixed[0] != fixed[1] or (_is_sharded(parameter, shards) and is_whole)
        if not divides or (is_other and len(parameter.names) > 1):
            planned = PartitionSpec(*(_entry(of_dim) if of_dim else None for of_dim in parameter.axes))
            raise PlanError(
                f"no rules lay out {parameter.path} {parameter.names} as {planned}: other parameters have the same "
                f"names and lie otherwise, and the rules would make it {spec}. Give its dimensions names of their own, "
                "or use plan.specs(params) in jax.jit."
            )
