"""A plan as data and as a small Python file that needs nothing but JAX.

The file leaves collectives to the compiler: it states the layout of arguments and results, and of each microbatch. A
dimension that the tensor axis does not divide, or cuts inside of parts of it, cannot be an argument's layout; such a
parameter is left whole, and the data names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from phaze.capabilities import Capabilities

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["PjitTarget"]

FORMAT = "phaze-shardings"
VERSION = 1


@dataclass(frozen=True, slots=True)
class PjitTarget:
    """Writes `shardings.json` and `train_step.py`, which reads it."""

    name: str = "pjit"
    libraries: tuple[str, ...] = ()

    @property
    def capabilities(self) -> Capabilities:
        """One stage; every ZeRO stage, as layouts."""
        return Capabilities(zero_stages=frozenset({0, 1, 2, 3}))

    def export(self, plan: Plan, model: object) -> Mapping[str, str]:
        """Both files."""
        data = json.dumps(_data(plan), indent=1) + "\n"
        return {"shardings.json": data, "train_step.py": _source()}


def _source() -> str:
    """The program; it reads its plan from the data beside it."""
    return files("phaze.backends.jax").joinpath("pjit_train_step.txt").read_text()


def _data(plan: Plan) -> dict[str, Any]:
    chosen = plan.strategy
    split: dict[str, int] = {}
    whole: list[str] = []
    for name, splits in plan.layouts.parameters.items():
        path, is_layer = _path(name)
        if len(splits) > 1 or splits[0].outer > 1:
            whole.append(path)
        else:
            split[path] = splits[0].dim + is_layer
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": plan.model.name,
        "mesh": {"dp": chosen.dp, "tp": chosen.tp},
        "global_batch_size": plan.question.global_batch_size,
        "micro_batch_size": chosen.micro_batch_size,
        "compute_dtype": plan.question.precision.compute_dtype,
        "zero": chosen.zero,
        "recompute": chosen.recompute[0],
        "splits_sequence": bool(plan.layouts.boundaries),
        "parameters": split,
        "left_whole": sorted(set(whole)),
    }


def _path(name: str) -> tuple[str, bool]:
    """A parameter's path inside the tree, without the argument's name, and whether it is one layer of a stack."""
    inside = name.partition(".")[2]
    stem, bracket, _ = inside.partition("[")
    return stem, bool(bracket)
