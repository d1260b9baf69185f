"""Target 'fsdp': a plan written as data and as Python files that need nothing but torch, for a launch by torchrun.

`train_step.py` reads `sharding.json` and arranges the model. The modules that run a model's own code on parts of its
parameters come along beside it, word for word as Phaze itself runs them.

This module loads without torch. `stored_cut` says how torch stores a parameter's layout; target 'torch' uses it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from phaze.capabilities import Capabilities
from phaze.errors import PlanError

if TYPE_CHECKING:
    from phaze.plan.plan import Plan, SplitDim

__all__ = ["FsdpTarget", "stored_cut"]

FORMAT = "phaze-fsdp"
VERSION = 1
"""Of `sharding.json`; it rises when a field changes its meaning."""

_PACKAGE = "phaze.backends.torch"
_EXPORTED_MODULES = (
    "arrange",
    "split_collectives",
    "split_tensor",
    "split_attention",
    "split_rules",
    "split_products",
    "split_parameters",
)
_TRAIN_STEP = "fsdp_train_step.txt"
_COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class FsdpTarget:
    """Writes `sharding.json`, `train_step.py`, which reads it, and what that imports."""

    name: str = "fsdp"
    libraries: tuple[str, ...] = ()
    tool: str = "torch 2.13"
    checked: str = "steps run on 4 processes of gloo have the gradients of one process"

    @property
    def capabilities(self) -> Capabilities:
        """One pipeline stage only; ZeRO as under target 'torch'."""
        return Capabilities(
            zero_stages=frozenset({0, 3}),
            master_zero_stages=frozenset({1, 2}),
            allows_shard_groups=True,
            allows_strided_parameters=True,
        )

    def export(self, plan: Plan, model: object) -> Mapping[str, str]:
        """All files by name; the model is not needed."""
        source = files(_PACKAGE)
        texts = {f"{name}.py": source.joinpath(f"{name}.py").read_text() for name in _EXPORTED_MODULES}
        data = json.dumps(_plan_data(plan), indent=1) + "\n"
        train_step = source.joinpath(_TRAIN_STEP).read_text()
        standalone = {name: _without_package(text) for name, text in texts.items()}
        return {"sharding.json": data, "train_step.py": train_step, **standalone}


def _without_package(text: str) -> str:
    """A module's text that imports the files beside it instead of those of this package."""
    lines = [
        "".join(f"import {name}\n" for name in line.partition(" import ")[2].strip().split(", "))
        if line.startswith(f"from {_PACKAGE} import ")
        else line
        for line in text.splitlines(keepends=True)
    ]
    return "".join(lines).replace(f"{_PACKAGE}.", "")


def _plan_data(plan: Plan) -> dict[str, object]:
    """What `train_step.py` reads."""
    strategy, recipe = plan.strategy, plan.question.precision
    if recipe.compute_dtype not in _COMPUTE_DTYPES:
        raise PlanError(f"target 'fsdp' computes in float32, bfloat16 or float16; the plan in {recipe.compute_dtype}.")
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": plan.model.name,
        "mesh": {"dp": strategy.dp, "shard": strategy.shard_devices if strategy.zero else 1, "tp": strategy.tp},
        "global_batch_size": plan.question.global_batch_size,
        "micro_batch_size": strategy.micro_batch_size,
        "zero": strategy.zero,
        "compute_dtype": recipe.compute_dtype,
        "reduction_dtype": recipe.reduction_dtype,
        "splits_sequences": strategy.sequence_parallel is True and strategy.tp > 1,
        "layers": [layer.path for layer in plan.stages[0].layers],
        "recompute": strategy.recompute[0],
        "parameters": {name: list(stored_cut(splits)) for name, splits in plan.layouts.parameters.items() if splits},
    }


def stored_cut(splits: Sequence[SplitDim]) -> tuple[int, int]:
    """How torch stores a parameter's layout: the dimension that is cut, and the equal runs of it that are cut each.

    Splits of several factors that lie side by side in one dimension are one cut. A layout that splits two dimensions is
    stored cut along the first: it takes as many bytes, and what reads it gathers where it must.
    """
    first = min(splits, key=lambda split: (split.dim, split.outer))
    return first.dim, first.outer
