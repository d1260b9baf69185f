"""A plan as data and as Python files that need nothing but torch: a training step under torchrun.

The small file reads the data and arranges the model; what it takes to run a model's own code on parts of its parameters
comes along beside it, word for word as Phaze itself runs it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from phaze.capabilities import Capabilities
from phaze.errors import PlanError

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["FsdpTarget"]

FORMAT = "phaze-fsdp"
VERSION = 1
_PACKAGE = "phaze.backends.torch"
_RUNTIME = ("arrange", "split_collectives", "split_tensor", "split_rules", "split_products", "split_parameters")


@dataclass(frozen=True, slots=True)
class FsdpTarget:
    """Writes `sharding.json`, `train_step.py`, which reads it, and what that imports."""

    name: str = "fsdp"
    libraries: tuple[str, ...] = ()

    @property
    def capabilities(self) -> Capabilities:
        """One stage; ZeRO as under target 'torch'."""
        return Capabilities(
            zero_stages=frozenset({0, 3}), master_zero_stages=frozenset({1, 2}), allows_strided_parameters=True
        )

    def export(self, plan: Plan, model: object) -> Mapping[str, str]:
        """All files."""
        source = files(_PACKAGE)
        texts = {f"{name}.py": source.joinpath(f"{name}.py").read_text() for name in _RUNTIME}
        texts = {name: text.replace(f"{_PACKAGE}.", "") for name, text in texts.items()}
        imported = "from phaze.backends.torch import split_products, split_rules\n"
        texts["split_parameters.py"] = texts["split_parameters.py"].replace(
            imported, "import split_products\nimport split_rules\n"
        )
        data = json.dumps(_data(plan), indent=1) + "\n"
        return {"sharding.json": data, "train_step.py": source.joinpath("train_step.txt").read_text(), **texts}


def _data(plan: Plan) -> dict[str, Any]:
    from phaze.backends.torch.layouts import cut_of

    chosen, recipe = plan.strategy, plan.question.precision
    if recipe.compute_dtype not in ("float32", "bfloat16", "float16"):
        raise PlanError(f"target 'fsdp' computes in float32, bfloat16 or float16; the plan in {recipe.compute_dtype}.")
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": plan.model.name,
        "mesh": {"dp": chosen.dp, "tp": chosen.tp},
        "global_batch_size": plan.question.global_batch_size,
        "micro_batch_size": chosen.micro_batch_size,
        "zero": chosen.zero,
        "compute_dtype": recipe.compute_dtype,
        "reduction_dtype": recipe.reduction_dtype,
        "splits_sequences": chosen.sequence_parallel and chosen.tp > 1,
        "layers": [layer.partition(":")[2] for layer in plan.stages[0].layers],
        "recompute": chosen.recompute[0],
        "parameters": {name: list(cut_of(splits)) for name, splits in plan.layouts.parameters.items() if splits},
    }
