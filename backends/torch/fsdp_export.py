"""Target 'fsdp': a plan as placements of parameters, and as Python files that need nothing but torch, for torchrun.

`sharding.py` is data: the mesh, the step, and the placements of every parameter on the mesh's axes replicate, shard and
tp. `train_step.py` reads it and arranges the model. The modules that run a model's own code on parts of its parameters
come along beside it, word for word as Phaze itself runs them.

This module loads without torch. `stored_cut` says how torch stores a parameter's layout; target 'torch' uses it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from phaze.backends.tools.config_texts import ConfigText
from phaze.backends.tools.tool_target import ShardingModuleTarget, literal_table
from phaze.targets import Capabilities

if TYPE_CHECKING:
    from phaze.plan.plan import Plan, SplitDim

__all__ = ["FsdpTarget", "stored_cut"]

_PACKAGE = "phaze.backends.torch"
_EXPORTED_MODULES = (
    "arrange",
    "split_collectives",
    "split_tensor",
    "split_rules",
    "split_products",
    "ring_attention",
)
_TRAIN_STEP = "fsdp_train_step.txt"
_AXES = ("replicate", "shard", "tp")
_TABLES = """# How parameters lie between steps on the axes of MESH, in their order; OTHERS are all without a name here.
OTHERS = {others}
{placements}
# Of these, tp cuts every one of so many equal runs of the dimension, such as query, key and value.
{runs}"""


class FsdpTarget(ShardingModuleTarget):
    """Writes `sharding.py`, `train_step.py`, which reads it, and what that imports."""

    name = "fsdp"
    tool = "torch 2.13"
    checked = (
        "steps run on 2 processes of gloo, where Phaze cannot be imported, have the losses of one process, and the "
        "parameters there lie as sharding.py says"
    )
    version = 2
    imports = "from torch.distributed.tensor import Replicate, Shard"

    @property
    def capabilities(self) -> Capabilities:
        """One pipeline stage only; ZeRO as under target 'torch'."""
        return Capabilities(
            zero_stages=frozenset({0, 3}),
            master_zero_stages=frozenset({1, 2}),
            compute_dtypes=frozenset({"float32", "bfloat16", "float16"}),
            allows_shard_groups=True,
            allows_strided_parameters=True,
        )

    def mesh_axes(self, plan: Plan) -> dict[str, int]:
        """Copies of the shards, the shards of ZeRO, and tensor parallelism."""
        strategy = plan.strategy
        shards = strategy.shard_devices if strategy.zero else 1
        return dict(zip(_AXES, (strategy.dp // shards, shards, strategy.tp), strict=True))

    def settings(self, plan: Plan, kind: ConfigText) -> dict[str, object]:
        """The mesh and the step, with the paths of the layers that FSDP2 gathers and recomputes one by one."""
        return super().settings(plan, kind) | {"step.layers": [layer.path for layer in plan.stages[0].layers]}

    def tables(self, plan: Plan, model: object) -> str:
        """Placements by name; a module that is given names all of its parameters."""
        cuts = {name: stored_cut(splits) for name, splits in plan.layouts.parameters.items() if splits}
        names = list(cuts)
        if callable(named_parameters := getattr(model, "named_parameters", None)):
            named = list(named_parameters(remove_duplicate=False))
            names = [name for name, _ in named]
            # A tied parameter has several names, of which the plan knows one.
            cut_of = {id(parameter): cuts[name] for name, parameter in named if name in cuts}
            cuts = {name: cut_of[id(parameter)] for name, parameter in named if id(parameter) in cut_of}
        shard = "Shard(0)" if self.mesh_axes(plan)["shard"] > 1 else "Replicate()"
        placements = {
            name: f"(Replicate(), {shard}, {f'Shard({cuts[name][0]})' if name in cuts else 'Replicate()'})"
            for name in names
        }
        runs = {name: str(cut[1]) for name, cut in cuts.items() if cut[1] > 1}
        return _TABLES.format(
            others=f"(Replicate(), {shard}, Replicate())",
            placements=literal_table("PLACEMENTS", placements),
            runs=literal_table("RUNS", runs),
        )

    def programs(self) -> dict[str, str]:
        """The program, and the modules of Phaze that it needs."""
        source = files(_PACKAGE)
        modules = {f"{name}.py": source.joinpath(f"{name}.py").read_text() for name in _EXPORTED_MODULES}
        standalone = {name: _without_package(text) for name, text in modules.items()}
        return {"train_step.py": source.joinpath(_TRAIN_STEP).read_text(), **standalone}

    def left_out(self, plan: Plan) -> list[str]:
        """What the user's script does."""
        return [
            "`train_step.py` says in its first lines how your script calls it.",
            "Parameters that PLACEMENTS does not name lie as OTHERS says; "
            "`plan.export('fsdp', model)` names all of them.",
        ]


def _without_package(text: str) -> str:
    """A module's text that imports the files beside it instead of those of this package."""
    lines = [
        "".join(f"import {name}\n" for name in line.partition(" import ")[2].strip().split(", "))
        if line.startswith(f"from {_PACKAGE} import ")
        else line
        for line in text.splitlines(keepends=True)
    ]
    return "".join(lines).replace(f"{_PACKAGE}.", "")


def stored_cut(splits: Sequence[SplitDim]) -> tuple[int, int]:
    """How torch stores a parameter's layout: the dimension that is cut, and the equal runs of it that are cut each.

    Splits of several factors that lie side by side in one dimension are one cut. A layout that splits two dimensions is
    stored cut along the first: it takes as many bytes, and what reads it gathers where it must.
    """
    first = min(splits, key=lambda split: (split.dim, split.outer))
    return first.dim, first.outer
