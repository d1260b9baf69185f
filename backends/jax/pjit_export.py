"""The target pjit: a plan as PartitionSpecs of the user's own parameters, and a training step that needs only JAX.

`sharding.py` is data: the mesh, the step, and a PartitionSpec for every parameter and its optimizer state, for the
batch and for activations between layers. `train_step.py` (`pjit_train_step.txt` here) gives them to `jax.jit` as
in_shardings and out_shardings and leaves collectives to the compiler.

Arrays keep the user's shapes, as in `user_shardings.py`: a split for which such a shape has no spec (of every one of
several fused parts, of two dimensions) becomes a split of the same dimension into equal blocks. That changes where data
lies and what the compiler sends, never what is computed; the README beside the files names such parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import TYPE_CHECKING

from phaze.backends.tools.tool_target import ShardingModuleTarget, literal_table
from phaze.errors import PlanError
from phaze.targets import Capabilities

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["PjitTarget"]

_MOST_NAMES = 8
"""Parameters of which the README says that they are cut in blocks; more are counted."""


class PjitTarget(ShardingModuleTarget):
    """Writes `sharding.py` and `train_step.py`, which reads it."""

    name = "pjit"
    tool = "JAX 0.10"
    checked = (
        "steps run on 8 devices of a host, where Phaze cannot be imported, have the losses of one device, and arrays "
        "there lie as sharding.py says"
    )
    version = 2
    imports = "from jax.sharding import PartitionSpec as P"

    @property
    def capabilities(self) -> Capabilities:
        """One stage, and every ZeRO stage, which becomes a layout of parameters, gradients and state."""
        return Capabilities(
            zero_stages=frozenset({0, 1, 2, 3}),
            recompute_modes=frozenset({"none", "dots", "full"}),
            allows_strided_parameters=True,
            allows_shard_groups=True,
        )

    def mesh_axes(self, plan: Plan) -> dict[str, int]:
        """Data and tensor parallelism; where ZeRO shards over some copies only, dp counts their groups."""
        strategy = plan.strategy
        if strategy.zero and strategy.shard_devices < strategy.dp:
            shards = strategy.shard_devices
            return {"dp": strategy.dp // shards, "shard": shards, "tp": strategy.tp}
        return {"dp": strategy.dp, "tp": strategy.tp}

    def tables(self, plan: Plan, model: object) -> str:
        """Specs by the paths of parameters; `model` is their tree, or None where only those cut by tp are known."""
        parameters, state = _planned_specs(plan) if model is None else _tree_specs(plan, model)
        sequence_axis = "tp" if plan.layouts.boundaries else None
        has_groups = "shard" in self.mesh_axes(plan)
        batch_axes = ("dp", "shard") if has_groups else "dp"
        zero_axis = "shard" if has_groups else "dp"
        return "\n".join(
            [
                f"# By path in the tree of parameters. Where ZeRO cuts an array over {zero_axis} and no such cut",
                f"# stands here, the program cuts the longest dimension that {zero_axis} divides and tp leaves whole.",
                literal_table("PARAMETERS", parameters),
                "# Of the optimizer's arrays, which have the path and the shape of a parameter.",
                "STATE = PARAMETERS\n" if state == parameters else literal_table("STATE", state),
                f"BATCH = {_literal((batch_axes,))}",
                f"ACTIVATIONS = {_literal((batch_axes, sequence_axis, None))}  # samples, sequence, width\n",
            ]
        )

    def programs(self) -> dict[str, str]:
        """The program."""
        return {"train_step.py": files("phaze.backends.jax").joinpath("pjit_train_step.txt").read_text()}

    def launch(self, plan: Plan) -> str:
        """One process for each host."""
        return "python your_script.py  # on every host; it calls what train_step.py has"

    def left_out(self, plan: Plan) -> list[str]:
        """What the compiler and the user's script do."""
        sentences = [
            "`train_step.py` says in its first lines how your script calls it.",
            "Call `constrain(x)` between layers of your model: activations then lie as ACTIVATIONS says. The compiler "
            "chooses all collectives, and may send more than the plan counts.",
            "`plan.export('pjit', params)` names all parameters, with ZeRO's cuts.",
        ]
        blocks = sorted(
            {
                _path(name)[0]
                for name, splits in plan.layouts.parameters.items()
                if len(splits) > 1 or any(split.outer > 1 for split in splits)
            }
        )
        if blocks:
            more = f" and {len(blocks) - _MOST_NAMES} more" if len(blocks) > _MOST_NAMES else ""
            sentences.append(
                "The plan cuts every one of several fused parts, or two dimensions, of "
                f"{', '.join(blocks[:_MOST_NAMES])}{more}; PartitionSpecs cut them in equal blocks, and the compiler "
                "moves data where a layer needs the parts. `plan.apply` of target jax moves none there."
            )
        return sentences


def _planned_specs(plan: Plan) -> tuple[dict[str, str], dict[str, str]]:
    """The specs of parameters that tp cuts, and of their state, as literals; without shapes ZeRO's cuts are unknown."""
    specs = {}
    for name, splits in plan.layouts.parameters.items():
        if splits:
            path, is_layer = _path(name)
            # The plan counts the dimensions of one layer; a stacked parameter has the layers in front of them.
            dim = max(split.dim for split in splits) + (1 if is_layer else 0)
            specs[path] = _literal((*[None] * dim, "tp"))
    return specs, specs


def _tree_specs(plan: Plan, tree: object) -> tuple[dict[str, str], dict[str, str]]:
    """The specs of all parameters of a tree, and of their state, as literals."""
    if callable(tree) or isinstance(tree, str):
        raise PlanError(
            f"pjit writes specs for the arrays of a tree, and got a {type(tree).__name__}; pass your parameters (or "
            "their shapes): plan.export('pjit', params)."
        )
    from jax import tree_util  # the door: a tree of arrays is JAX's

    from phaze.backends.jax.loss_function import path_words
    from phaze.backends.jax.user_shardings import specs_of_trees

    # The second tree has the paths and shapes of the parameters and is not the first: it is their state.
    parameters, state = (
        {
            ".".join(path_words(path)): _literal(spec)
            for path, spec in tree_util.tree_leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, tuple))
        }
        for specs in specs_of_trees(plan, [tree, tree])
    )
    return parameters, state


def _literal(spec: Iterable[object]) -> str:
    """A PartitionSpec as Python says it."""
    return f"P({', '.join(repr(axes) for axes in spec)})"


def _path(name: str) -> tuple[str, bool]:
    """A parameter's path inside the tree, without the argument's name, and whether it is one layer of a stack."""
    inside = name.partition(".")[2]
    stem, bracket, _ = inside.partition("[")
    return stem, bool(bracket)
