"""Shardings as a module of literals that people read and import: what the targets 'fsdp' and 'pjit' have in common.

`sharding.py` says the mesh (`MESH`), the step (`STEP`), and how every parameter lies on the mesh, by the user's own
names of them, in the framework's own words. A program beside it reads these and runs. The file is ours from its first
line to its last, so that an edited one is written anew.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phaze.backends.tools.config_texts import ConfigText, Settings
from phaze.backends.tools.python_texts import PYTHON
from phaze.backends.tools.tool_target import ToolTarget, torchrun, unread_keys, whole
from phaze.errors import FormatError
from phaze.parallelism import ALL_DEVICES
from phaze.strategy_files import StrategyFile

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["ShardingModuleTarget", "literal_table"]

_FILE = "sharding.py"
_AXES = ("replicate", "shard", "dp", "tp")
_STEP_KEYS = (
    *("format", "version", "global_batch_size", "micro_batch_size", "zero", "sequence_parallel", "recompute"),
    *("compute_dtype", "reduction_dtype", "layers"),
)


def literal_table(name: str, entries: Mapping[str, str]) -> str:
    """A dictionary of a module, one entry a line; keys are texts from outside, values are Python already."""
    return "\n".join([f"{name} = {{", *(f"    {key!a}: {value}," for key, value in entries.items()), "}", ""])


class ShardingModuleTarget(ToolTarget):
    """A target of one stage that writes `sharding.py` and a program; see the module's words."""

    version: int
    """Of the layout of `sharding.py`; it grows when a name in it changes its meaning."""
    imports: str
    """The line of `sharding.py` that imports the framework's words."""

    @abstractmethod
    def mesh_axes(self, plan: Plan) -> dict[str, int]:
        """The axes of the mesh from the outermost, with their sizes."""

    @abstractmethod
    def tables(self, plan: Plan, model: object) -> str:
        """The layouts of parameters as Python; the model, where it is known, names all of them."""

    @abstractmethod
    def programs(self) -> dict[str, str]:
        """The files that read `sharding.py`, by name."""

    def text_of(self, name: str, part: str | None, text: str) -> ConfigText | None:
        """The module that is written here, known by its own mark."""
        return PYTHON if name.endswith(".py") and f"'format': 'phaze-{self.name}'" in text else None

    def settings(self, plan: Plan, kind: ConfigText) -> dict[str, object]:
        """The mesh and the step."""
        strategy, recipe = plan.strategy, plan.question.precision
        step = {
            "format": f"phaze-{self.name}",
            "version": self.version,
            "global_batch_size": plan.question.global_batch_size,
            "micro_batch_size": strategy.micro_batch_size,
            "zero": strategy.zero,
            "sequence_parallel": strategy.sequence_parallel is True and strategy.tp > 1,
            "recompute": str(strategy.recompute[0]),
            "compute_dtype": recipe.compute_dtype,
            "reduction_dtype": recipe.reduction_dtype,
        }
        axes = {f"mesh.{axis}": size for axis, size in self.mesh_axes(plan).items()}
        return axes | {f"step.{key}": value for key, value in step.items()}

    def files(self, plan: Plan) -> dict[str, str]:
        """The module, without the names of parameters that lie as all others do, and what reads it."""
        return self._files(plan, None)

    def export(self, plan: Plan, model: object) -> Mapping[str, str]:
        """The files and a README; the model, where it is given, names all parameters."""
        files = self._files(plan, model)
        return {**files, "README.md": self.readme(plan, files)}

    def edit(self, name: str, part: str | None, text: str, plan: Plan) -> tuple[str, str]:
        """The module as it is, and the one of another plan."""
        return text, self._files(plan, None)[_FILE]

    def launch(self, plan: Plan) -> str:
        """One process per device."""
        return f"{torchrun(plan)} your_script.py  # which calls what train_step.py has"

    def strategy_of(self, settings: Settings, devices: int, global_batch_size: int | None) -> StrategyFile:
        """The strategy of the module's mesh and step."""
        version = settings.get("step.version")
        if version != self.version:
            raise FormatError(
                f"it says version {version!r} of the format phaze-{self.name}; this Phaze reads {self.version}. Export "
                "the plan again."
            )
        step = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith("step.")}
        mesh = {key.partition(".")[2]: whole(value) or 1 for key, value in settings.items() if key.startswith("mesh.")}
        tp, zero = mesh.get("tp", 1), whole(step.get("zero")) or 0
        groups = mesh.get("replicate", mesh.get("dp", 1))  # copies of all states, where an axis counts their shards
        dp = groups * mesh.get("shard", 1)
        shards = mesh.get("shard", dp)
        read = {f"step.{key}" for key in _STEP_KEYS} | {f"mesh.{axis}" for axis in _AXES}
        return StrategyFile(
            tool=self.name,
            strategy={
                "dp": dp,
                "shard": ALL_DEVICES if shards == dp or not zero else shards,
                "zero": zero,
                "cp": 1,
                "ep": 1,
                "tp": tp,
                **({"sequence_parallel": bool(step.get("sequence_parallel"))} if tp > 1 else {}),
                "micro_batch_size": whole(step.get("micro_batch_size")) or 1,
                "pp": 1,
                "recompute": step.get("recompute", "none"),
            },
            global_batch_size=whole(step.get("global_batch_size")),
            # The layouts of parameters follow from the plan: they are not read back.
            unknown=unread_keys(settings, read, ("runs.*",), is_whole=True)["unknown"],
        )

    def _files(self, plan: Plan, model: object) -> dict[str, str]:
        comments, _, data = PYTHON.render(self.head(plan), self.settings(plan, PYTHON)).partition("\n\n")
        module = f"{comments}\n\n{self.imports}\n\n{data}\n{self.tables(plan, model)}"
        return {_FILE: module, **self.programs()}
