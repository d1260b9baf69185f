"""What targets that write files have in common: READMEs, readers with defaults, edited files, shardings as a module.

A tool's module says three things: which settings a plan becomes (`settings`), which strategy settings are
(`strategy_of`), and in which texts they stand (`text_of`). Tools bring their own models, whose layers are an embedding,
equal blocks and a head; a plan for one of them has the same layers: one before the blocks and one behind them.

The targets 'fsdp' and 'pjit' write shardings as a module of literals that people read and import
(`ShardingModuleTarget`). `sharding.py` says the mesh (`MESH`), the step (`STEP`), and how every parameter lies on the
mesh, by the user's own names of them, in the framework's own words. A program beside it reads these and runs. The file
is ours from its first line to its last, so that an edited one is written anew.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypedDict

from phaze.backends.tools.config_texts import ConfigText, Settings, one_line
from phaze.backends.tools.script_texts import PYTHON
from phaze.errors import FormatError, PlanError
from phaze.ir import RecomputeMode
from phaze.parallelism import ALL_DEVICES, Parallelism
from phaze.strategy_files import StrategyFile

if TYPE_CHECKING:
    from phaze.plan.plan import Plan
    from phaze.targets import Capabilities

__all__ = [
    "ShardingModuleTarget",
    "ToolTarget",
    "block_counts",
    "command_line",
    "literal_table",
    "micro_batches",
    "nodes",
    "shard_groups",
    "shard_of",
    "strongest_recompute",
    "torchrun",
    "unread_keys",
    "whole",
]

_RECOMPUTE_MODES = list(RecomputeMode)
"""From the one that computes least again, and keeps most, to the one that computes most."""
_MOST_NAMES = 12
"""Keys that were passed over and are listed by name; more are counted."""


class ToolTarget(ABC):
    """A target that writes the files of one tool and reads them; see `phaze.interfaces.FileTarget`."""

    name: str
    tool: str
    checked: str
    libraries: tuple[str, ...] = ()

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What the tool can run."""

    @abstractmethod
    def text_of(self, name: str, part: str | None, text: str) -> ConfigText | None:
        """The kind of text that a file of this tool is; None for any other file."""

    @abstractmethod
    def settings(self, plan: Plan, kind: ConfigText) -> dict[str, object]:
        """Everything that a plan decides, in the tool's own words. Raises PlanError where it has no word for it."""

    @abstractmethod
    def strategy_of(self, settings: Settings, devices: int, global_batch_size: int | None) -> StrategyFile:
        """What settings say about how a batch is divided, with the tool's own defaults."""

    @abstractmethod
    def files(self, plan: Plan) -> dict[str, str]:
        """The files that the tool reads, by name."""

    @abstractmethod
    def launch(self, plan: Plan) -> str:
        """The command that runs the files."""

    def left_out(self, plan: Plan) -> list[str]:
        """What the files do not say, in sentences."""
        modes = sorted(set(plan.strategy.recompute), key=_RECOMPUTE_MODES.index)
        if len(modes) < 2:
            return []
        return [
            f"{self.tool} has one recompute mode for all stages: {modes[-1]} is written; the plan has "
            f"{', '.join(plan.strategy.recompute)} from the first stage to the last."
        ]

    def owned(self, settings: Settings) -> set[str]:
        """Keys of a file that say how a batch is divided: those that a plan does not need are removed from it."""
        return set()

    def placed(self, wanted: Settings, current: Settings) -> Settings:
        """A plan's settings under the keys by which a file has them, where other versions spell them otherwise."""
        return wanted

    def export(self, plan: Plan, model: object) -> Mapping[str, str]:
        """The files, and a README with the command and what was left out."""
        files = self.files(plan)
        return {**files, "README.md": self.readme(plan, files)}

    def head(self, plan: Plan) -> list[str]:
        """What every file says first."""
        devices = f"{plan.cluster.device_count} x {plan.cluster.accelerator.name}"
        return [f"For {self.tool}: {plan.model.name} on {devices}, by Phaze.", f"Checked: {self.checked}."]

    def recognizes(self, name: str, text: str) -> bool:
        """Whether a file is one of this tool."""
        return self.text_of(name, None, text) is not None

    def read(self, name: str, part: str | None, text: str, devices: int, global_batch_size: int | None) -> StrategyFile:
        """The strategy that a file says."""
        kind = self.text_of(name, part, text)
        assert kind is not None
        return self.strategy_of(kind.parse(text), devices, global_batch_size)

    def edit(self, name: str, part: str | None, text: str, plan: Plan) -> tuple[str, str]:
        """A file as it is, and with a plan's settings."""
        kind = self.text_of(name, part, text)
        assert kind is not None
        current = kind.parse(text)
        wanted = self.placed(self.settings(plan, kind), current)
        changes: dict[str, object] = dict.fromkeys(sorted(self.owned(current) - wanted.keys()))
        changes |= {key: value for key, value in wanted.items() if not _is_same(current.get(key), value)}
        return kind.edit(text, {}), kind.edit(text, changes)

    def readme(self, plan: Plan, files: Mapping[str, str]) -> str:
        """The launch command, what the files leave out, and how such files were checked."""
        head = f"# {one_line(plan.model.name)} on {plan.cluster.device_count} x {plan.cluster.accelerator.name}"
        left_out = [f"- {one_line(sentence)}" for sentence in self.left_out(plan)]
        left_out.append(
            f"- The model, its data and its optimizer are chosen in {self.tool.split()[0]}; sizes must agree."
        )
        command = "\n".join(f"    {line}" for line in self.launch(plan).splitlines())
        names = ", ".join(f"`{name}`" for name in files)
        return "\n".join(
            [
                head,
                "",
                f"Files for {self.tool}, written by Phaze: {names}.",
                "",
                "## Launch",
                "",
                command,
                "",
                "## What the files do not say",
                "",
                *left_out,
                "",
                "## How such files were checked",
                "",
                f"{self.checked[0].upper()}{self.checked[1:]}.",
                "",
            ]
        )


def _is_same(current: object, wanted: object) -> bool:
    """Whether a setting says what is wanted; options of commands are texts, and one name is a list of one."""
    if isinstance(current, str) and wanted == [current]:
        return True
    if isinstance(current, str) and not isinstance(wanted, str):
        return current.lower() in (json.dumps(wanted), str(wanted).lower())
    return current == wanted and isinstance(current, bool) == isinstance(wanted, bool)


def micro_batches(plan: Plan) -> int:
    """The number of microbatches that each pipeline runs in a step."""
    return plan.question.global_batch_size // (plan.strategy.dp * plan.strategy.micro_batch_size)


def strongest_recompute(plan: Plan) -> str:
    """The recompute mode for tools that have one mode for all stages: the strongest that any stage needs to fit."""
    return str(max(plan.strategy.recompute, key=_RECOMPUTE_MODES.index))


def block_counts(plan: Plan, tool: str) -> list[int]:
    """How many blocks each stage (chunk of a device) has, in the order of the pipeline.

    Raises PlanError where the plan's layers cannot be an embedding, blocks and a head.
    """
    counts = [len(stage.layers) for stage in plan.stages]
    counts[0] -= 1
    counts[-1] -= 1
    if min(counts) < 0 or sum(counts) < 1:
        raise PlanError(
            f"{tool} cuts models of an embedding, equal blocks and a head; this plan's stages have "
            f"{', '.join(str(len(stage.layers)) for stage in plan.stages)} layers. Plan such a model."
        )
    return counts


def shard_groups(strategy: Parallelism, tool: str) -> tuple[int, int]:
    """How the dp copies are divided: into so many groups, of so many that share one set of ZeRO's states.

    Tools divide states over the whole of cp and a part of dp. Raises PlanError for any other group.
    """
    if strategy.zero == 0:
        return strategy.dp, 1
    shards, rest = divmod(strategy.shard_devices, strategy.cp)
    if rest or strategy.dp % shards:
        raise PlanError(
            f"{tool} shards over all of cp ({strategy.cp}) and a part of dp ({strategy.dp}); the plan shards over "
            f"{strategy.shard_devices} devices. Plan with another shard."
        )
    return strategy.dp // shards, shards


def shard_of(groups: int, shards: int, cp: int) -> int | str:
    """The `shard` of a strategy with so many groups of so many copies."""
    return ALL_DEVICES if groups == 1 else shards * cp


def whole(value: object) -> int | None:
    """A setting as a whole number; None for what is absent, "auto" or a variable that the file does not set."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return int(value) if float(value) == int(float(value)) else None
    except (ValueError, OverflowError):
        return None


class UnreadKeys(TypedDict):
    """The keys of a file that were not read, as `StrategyFile` takes them."""

    ignored: tuple[str, ...]
    unknown: tuple[str, ...]


def unread_keys(
    settings: Settings, read: Collection[str], others: Sequence[str], *, is_whole: bool, prefix: str = ""
) -> UnreadKeys:
    """The keys of a file that were not read: those that say nothing about how a batch is divided, and unknown ones.

    `others` are patterns of keys that the tool has and that no plan decides. Where they are not the whole of what the
    tool has (`is_whole`), any other key is unknown only if its name speaks of what a plan decides.
    """
    ignored, unknown = [], []
    for key in settings:
        if key in read:
            continue
        is_other = any(fnmatchcase(key, pattern) for pattern in others)
        if is_other or not (is_whole or _DIVIDING_WORDS.search(key.lower())):
            ignored.append(f"{prefix}{key}")
        else:
            near = difflib.get_close_matches(key, read, n=1, cutoff=_ALIKE)
            unknown.append(f"{prefix}{key}" + (f" (meant: {prefix}{near[0]}?)" if near else ""))
    return {"ignored": _first_names(ignored), "unknown": _first_names(unknown)}


_DIVIDING_WORDS = re.compile(r"paral|pipeline|shard|fsdp|zero_|recomput|remat|micro_?batch|batch_size|virtual|expert_m")
"""Parts of names that say how a batch is divided, or how much is computed again."""
_ALIKE = 0.8
"""How alike (as `difflib` counts) two keys are where one is offered for the other: a letter or two in a name."""


def _first_names(names: Sequence[str]) -> tuple[str, ...]:
    more = len(names) - _MOST_NAMES
    return tuple(names) if more <= 0 else (*names[:_MOST_NAMES], f"and {more} more")


def nodes(plan: Plan) -> tuple[int, int]:
    """How many nodes there are (or tori, or slices), and how many devices each has."""
    each = plan.cluster.node_devices
    return math.ceil(plan.cluster.device_count / each), each


def torchrun(plan: Plan) -> str:
    """The command that starts one process per device, up to the program that is run."""
    count, each = nodes(plan)
    if count == 1:
        return f"torchrun --standalone --nproc-per-node {each}"
    where = '--rdzv-backend c10d --rdzv-endpoint "$HEAD_NODE:29500"'
    return f"torchrun --nnodes {count} --nproc-per-node {each} {where}"


def command_line(*parts: str) -> str:
    """A command over several lines, as a shell reads it."""
    return " \\\n  ".join(parts)


_SHARDING_FILE = "sharding.py"
_SHARDING_AXES = ("replicate", "shard", "dp", "tp")
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
        return text, self._files(plan, None)[_SHARDING_FILE]

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
        read = {f"step.{key}" for key in _STEP_KEYS} | {f"mesh.{axis}" for axis in _SHARDING_AXES}
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
        return {_SHARDING_FILE: module, **self.programs()}
