"""A plan said as PartitionSpecs of the user's own trees, for a `jax.jit` that the user writes.

The first tree holds the parameters. Where it is a whole training state (its paths have `opt_state`, as those of flax's
TrainState and nnx's Optimizer do), the parameters are its arrays under `params` or `model`. Every other array, of any
tree, is one of these:

state     it has the shape of a parameter and the end of its path: it lies as that parameter's shard of ZeRO does
batch     its first dimension is the plan's global batch, which the data axes divide; a second one as long as sequences
          is divided by the context axis
other     scalars, keys, statistics: whole on every device

Arrays keep the user's shapes. A split for which such a shape has no spec (of every one of several fused parts, of two
dimensions) becomes a split of the same dimension into equal blocks; an uneven one is left out. Both change where data
lies and never what is computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from phaze.backends.jax.jax_mesh import mesh_axes
from phaze.backends.jax.loss_function import PyTree, path_words
from phaze.backends.jax.parameter_storage import ParameterStorage, choose_storage
from phaze.errors import PlanError
from phaze.plan.plan import Plan, SplitDim

__all__ = ["constraints_of_plan", "specs_of_trees", "user_storage"]

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
