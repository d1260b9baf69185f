"""Target 'torchrun': the plain launch of a plan, with its mesh and the order of its ranks as data, for any trainer.

`mesh.json` names the axes from the outermost to the innermost (pp, dp_replicate, dp_shard, cp, tp), as
`torch.distributed.device_mesh.init_device_mesh` takes them, the ranks of every stage, and the whole strategy. Nothing
in it is a tool's: whatever a plan has can be written.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from phaze.backends.tools.config_texts import JSON, ConfigText, Settings
from phaze.backends.tools.tool_target import ToolTarget, shard_groups, torchrun, whole
from phaze.hardware.precision import PRECISIONS
from phaze.hooks import hookimpl
from phaze.interfaces import Target
from phaze.ir import BUDGET_MODES, RecomputeMode
from phaze.json_documents import to_document
from phaze.parallelism import STRATEGY_KEYS, Offload
from phaze.strategy_files import StrategyFile
from phaze.targets import Capabilities

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["TorchrunTarget", "phaze_targets"]

_FILE = "mesh.json"
FORMAT = "phaze-mesh"
VERSION = 1
"""Of the layout of `mesh.json`; it grows when a key changes its meaning."""


class TorchrunTarget(ToolTarget):
    """Writes a launch script and the mesh."""

    name = "torchrun"
    tool = "torch 2.13's torchrun"
    checked = "the mesh that init_device_mesh of torch 2.13 makes of mesh.json on 8 processes has the plan's ranks"

    @property
    def capabilities(self) -> Capabilities:
        """Everything that one mesh can say: equal tp in all stages, no idle devices, nothing of hosts or of budgets."""
        return replace(
            Capabilities.everything(),
            allows_mixed_tp=False,
            allows_idle_devices=False,
            allows_uneven_micro_batches=False,
            shards_whole_contexts=True,
            product_dtypes=frozenset(precision.product_dtype for precision in PRECISIONS.values()),
            recompute_modes=frozenset(RecomputeMode) - {*BUDGET_MODES},
            offloads=frozenset({Offload.NONE}),
        )

    def text_of(self, name: str, part: str | None, text: str) -> ConfigText | None:
        """The file that is written here."""
        return JSON if name.endswith(".json") and f'"{FORMAT}"' in text else None

    def settings(self, plan: Plan, kind: ConfigText) -> dict[str, object]:
        """Mesh, ranks and strategy."""
        strategy = plan.strategy
        copies, shards = shard_groups(strategy, "mesh.json")
        axes = {"pp": strategy.pp, "dp_replicate": copies, "dp_shard": shards, "cp": strategy.cp, "tp": strategy.tp}
        written = to_document(strategy)
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": plan.model.name,
            "global_batch_size": plan.question.global_batch_size,
            "precision": plan.question.precision.name,
            **{f"mesh.{axis}": size for axis, size in axes.items()},
            "stage_ranks": [list(stage.devices) for stage in plan.stages],
            **{f"strategy.{key}": value for key, value in written.items()},
            "strategy.stages": [len(stage.layers) for stage in plan.stages],
        }

    def files(self, plan: Plan) -> dict[str, str]:
        """The data and the script."""
        words = "Starts one process per device; ranks are ordered as mesh.json says."
        script = f'#!/bin/sh\n# {words}\nexec {torchrun(plan)} "$@"\n'
        return {_FILE: JSON.render((), self.settings(plan, JSON)), "launch.sh": script}

    def launch(self, plan: Plan) -> str:
        """The script with a program behind it."""
        return "sh launch.sh your_script.py"

    def left_out(self, plan: Plan) -> list[str]:
        """The trainer."""
        return [
            "Your script makes the mesh from mesh.json, pp outermost and tp innermost, and does what the strategy says."
        ]

    def strategy_of(self, settings: Settings, devices: int, global_batch_size: int | None) -> StrategyFile:
        """The strategy, word for word."""
        words = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith("strategy.")}
        strategy = {key: value for key, value in words.items() if key in STRATEGY_KEYS and value not in (None, [])}
        if whole(strategy.get("tp")) == 1:
            strategy.pop("sequence_parallel", None)
        if whole(strategy.get("pp")) == 1:  # all layers are one stage, however many a model has
            strategy.pop("stages", None)
        return StrategyFile(
            tool=self.name,
            strategy=strategy,
            global_batch_size=whole(settings.get("global_batch_size")),
            precision=str(settings["precision"]) if "precision" in settings else None,
            model=json.dumps(settings.get("model")).strip('"'),
            ignored=tuple(key for key in words if key not in STRATEGY_KEYS),
        )


@hookimpl
def phaze_targets() -> tuple[Target, ...]:
    """The plain launch."""
    return (TorchrunTarget(),)
