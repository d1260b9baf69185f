"""The target pjit: a plan's shardings as JSON, and a training step in a Python file that needs nothing but JAX.

The file (`pjit_train_step.txt` here) leaves collectives to the compiler: it states the layout of arguments, of results
and of each microbatch. Some splits cannot be the layout of an argument: of a dimension that the tensor axis does not
divide, of every one of several parts of a dimension, and of two dimensions. The file leaves such a parameter whole; the
data names those of the last two kinds under "left_whole".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from phaze.capabilities import Capabilities

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["PjitTarget"]

_FORMAT = "phaze-shardings"
_VERSION = 1
"""Of the layout of `shardings.json`; it grows when a key changes its meaning."""


@dataclass(frozen=True, slots=True)
class PjitTarget:
    """Writes `shardings.json` and `train_step.py`, which reads it."""

    name: str = "pjit"
    libraries: tuple[str, ...] = ()
    tool: str = "JAX 0.10"
    checked: str = "steps run on 8 devices of a host have the results of one device"

    @property
    def capabilities(self) -> Capabilities:
        """One stage, and every ZeRO stage, which becomes a layout of parameters, gradients and state."""
        return Capabilities(zero_stages=frozenset({0, 1, 2, 3}), recompute_modes=frozenset({"none", "dots", "full"}))

    def export(self, plan: Plan, model: object) -> Mapping[str, str]:
        """The texts of both files by their names."""
        program = files("phaze.backends.jax").joinpath("pjit_train_step.txt").read_text()
        return {"shardings.json": json.dumps(_shardings(plan), indent=1) + "\n", "train_step.py": program}


def _shardings(plan: Plan) -> dict[str, object]:
    """What the program reads: the mesh, the batch, and the split dimension of each parameter."""
    strategy = plan.strategy
    split_dims: dict[str, int] = {}
    left_whole: set[str] = set()
    for name, splits in plan.layouts.parameters.items():
        path, is_layer = _path(name)
        if len(splits) > 1 or splits[0].outer > 1:
            left_whole.add(path)
        else:
            # The plan counts the dimensions of one layer; a stacked parameter has the layers in front of them.
            split_dims[path] = splits[0].dim + (1 if is_layer else 0)
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "model": plan.model.name,
        "mesh": {"dp": strategy.dp, "tp": strategy.tp},
        "global_batch_size": plan.question.global_batch_size,
        "micro_batch_size": strategy.micro_batch_size,
        "compute_dtype": plan.question.precision.compute_dtype,
        "zero": strategy.zero,
        "recompute": strategy.recompute[0],
        "splits_sequence": bool(plan.layouts.boundaries),
        "parameters": split_dims,
        "left_whole": sorted(left_whole),
    }


def _path(name: str) -> tuple[str, bool]:
    """A parameter's path inside the tree, without the argument's name, and whether it is one layer of a stack."""
    inside = name.partition(".")[2]
    stem, bracket, _ = inside.partition("[")
    return stem, bool(bracket)
