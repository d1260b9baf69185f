"""A plan said as shardings for a `jax.jit` that the user writes: PartitionSpecs of own trees, or logical axis rules.

PartitionSpecs of trees (`specs_of_trees`). The first tree holds the parameters. Where it is a whole training state (its
paths have `opt_state`, as those of flax's TrainState and nnx's Optimizer do), the parameters are its arrays under
`params` or `model`. Every other array, of any tree, is one of these:

state     it has the shape of a parameter and the end of its path: it lies as that parameter's shard of ZeRO does
batch     its first dimension is the plan's global batch, which the data axes divide; a second one as long as sequences
          is divided by the context axis
other     scalars, keys, statistics: whole on every device

Arrays keep the user's shapes. A split for which such a shape has no spec (of every one of several fused parts, of two
dimensions) becomes a split of the same dimension into equal blocks; an uneven one is left out. Both change where data
lies and never what is computed.

Logical axis rules (`logical_rules`) are for models of flax linen that name the dimensions of their parameters. Such a
model makes its parameters by `nn.with_logical_partitioning(initializer, names)`, and pairs of a name and of mesh axes
say where the dimensions of that name lie (`nn.logical_axis_rules`, MaxText's `logical_axis_rules`). Of the rules for
the names of an array the first ones win that take no mesh axis twice. So the rules here are ordered:

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
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from phaze.backends.jax.jax_mesh import mesh_axes
from phaze.backends.jax.loss_function import PyTree, is_a, path_words
from phaze.backends.jax.parameter_storage import ParameterStorage, choose_storage
from phaze.errors import PlanError
from phaze.plan.plan import Plan, SplitDim

__all__ = ["Rule", "constraints_of_plan", "logical_rules", "specs_of_trees", "user_storage"]

Words = tuple[str, ...]
"""The keys on the way from the root of a tree to one of its arrays."""

_STATE_KEY = "opt_state"
_PARAMETER_KEYS = ("params", "model")
"""Under these keys training states keep the optimizer's state and the parameters."""


def constraints_of_plan(plan: Plan) -> dict[str, PartitionSpec]:
    """The specs of the batch, and of activations (samples, sequence, width) between layers."""
    axes = mesh_axes(plan)
    sequence_axes = (*axes.context, *(("tp",) if plan.layouts.boundaries else ()))
    sequence = sequence_axes if len(sequence_axes) > 1 else next(iter(sequence_axes), None)
    batch = axes.batch_spec(has_sequence=True)
    return {"batch": batch, "activations": PartitionSpec(batch[0], sequence, None)}


def user_storage(
    plan: Plan, name: str, shape: Sequence[int], splits: Sequence[SplitDim], *, is_stacked: bool
) -> ParameterStorage:
    """How a parameter lies on the mesh in the user's own shape."""
    strategy, axes = plan.strategy, mesh_axes(plan)
    return choose_storage(
        name,
        tuple(shape),
        splits,
        is_stacked=is_stacked,
        tp=strategy.tp,
        shards=axes.shard_count,
        shard_axes=axes.shards,
        pp=strategy.pp,
        keeps_shape=True,
    )


def specs_of_trees(plan: Plan, trees: Sequence[PyTree]) -> list[PyTree]:
    """For every tree the specs of its arrays, in its own structure; see the module's words."""
    if not trees:
        raise PlanError("specs takes the trees of your arrays, parameters first: plan.specs(params, opt_state, batch).")
    if plan.strategy.ep > 1:
        raise PlanError(
            f"the plan divides experts over {plan.strategy.ep} devices (ep), and a plan does not say which arrays are "
            "experts; plan.apply(model, inputs=...).specs does. Or plan with strategy ep=1."
        )
    parameters, axes = _parameters(plan, trees[0]), mesh_axes(plan)

    def spec(words: Words, leaf: object, *, is_first: bool) -> PartitionSpec:
        shape = tuple(getattr(leaf, "shape", ()))
        if is_first and words in parameters.storages:
            return _spec(plan, parameters.storages[words], is_parameter=True)
        storage = parameters.owner(words, shape)
        if storage is not None:
            return _spec(plan, storage, is_parameter=False)
        if shape[:1] != (plan.question.global_batch_size,):
            return PartitionSpec()
        is_divided = shape[1:2] == (plan.model.tokens_per_sample,) and shape[1] % plan.strategy.cp == 0
        return axes.batch_spec(has_sequence=is_divided)

    return [
        jax.tree_util.tree_map_with_path(
            lambda path, leaf, is_first=number == 0: spec(path_words(path), leaf, is_first=is_first), tree
        )
        for number, tree in enumerate(trees)
    ]


def _spec(plan: Plan, storage: ParameterStorage, *, is_parameter: bool) -> PartitionSpec:
    """The spec of a parameter, or of state that belongs to it: shards cut parameters in ZeRO-3 only."""
    is_sharded = plan.strategy.zero == 3 or (plan.strategy.zero > 0 and not is_parameter)
    axes = ["tp"] if plan.strategy.tp > 1 else []
    axes += storage.shard_axes if is_sharded else ()
    axes += ["pp"] if plan.strategy.pp > 1 else []
    return storage.partition_spec(*axes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parameters:
    """The parameters of a tree by their words; `root` is how many words all of them begin with."""

    storages: Mapping[Words, ParameterStorage]
    root: int

    def owner(self, words: Words, shape: tuple[int, ...]) -> ParameterStorage | None:
        """The parameter to which an array of a training state belongs."""
        for parameter, storage in self.storages.items():
            end = parameter[self.root :]
            if words[len(words) - len(end) :] == end and storage.user_shape == shape and shape:
                return storage
        return None


def _parameters(plan: Plan, tree: PyTree) -> _Parameters:
    leaves = [(path_words(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    arrays = [(words, leaf) for words, leaf in leaves if _is_floating(leaf)]
    if any(_STATE_KEY in words for words, _ in arrays):
        arrays = [(words, leaf) for words, leaf in arrays if words[0] in _PARAMETER_KEYS]
    splits = _splits_by_end(plan)
    storages = {}
    for words, leaf in arrays:
        ends = (".".join(words[start:]) for start in range(len(words)))
        splits_of_leaf, is_stacked = next((splits[end] for end in ends if end in splits), ((), False))
        storages[words] = user_storage(plan, ".".join(words), leaf.shape, splits_of_leaf, is_stacked=is_stacked)
    unknown = (
        plan.strategy.tp > 1 and splits and not any(storage.split_dim is not None for storage in storages.values())
    )
    if unknown:
        raise PlanError(
            f"none of the arrays in the first tree is one that the plan splits ({next(iter(splits))}, ...); pass the "
            "parameters, or a training state that has them under params, first."
        )
    return _Parameters(storages=storages, root=_common_words([words for words, _ in arrays]))


def _is_floating(leaf: object) -> bool:
    return hasattr(leaf, "shape") and jnp.issubdtype(getattr(leaf, "dtype", None), jnp.floating)


def _splits_by_end(plan: Plan) -> dict[str, tuple[tuple[SplitDim, ...], bool]]:
    """The splits of parameters by their paths inside of the planned argument, and whether they are stacked layers."""
    found: dict[str, tuple[tuple[SplitDim, ...], bool]] = {}
    for name, splits in plan.layouts.parameters.items():
        stem, is_layer = re.subn(r"\[\d+\]$", "", name)
        found[stem.partition(".")[2] or stem] = (splits, bool(is_layer))
    return found


def _common_words(paths: Sequence[Words]) -> int:
    """How many words all paths begin with; every path keeps its last word."""
    shortest = min((len(words) for words in paths), default=1)
    for count in range(shortest - 1, 0, -1):
        if len({words[:count] for words in paths}) == 1:
            return count
    return 0


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
