"""Strategies as other tools write them: what a file of one says, and the target that reads it.

`read_strategy_file` gives what `phaze.evaluate` takes as ``strategy=``; the batch, the sequence length and the
precision where the file names them; and the keys that say nothing about how a batch is divided, or that nobody here
knows.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from phaze.errors import FormatError
from phaze.file_access import read_text
from phaze.installed import installed_plugins
from phaze.interfaces import FileTarget
from phaze.parallelism import ALL_DEVICES

if TYPE_CHECKING:
    from phaze.hooks import PluginManager
    from phaze.plan.plan import Plan

__all__ = ["SourceFile", "StrategyFile", "find_source", "read_strategy_file", "suggested_diff", "unsaid_keys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyFile:
    """What a file says: the tool that it is for, the keys of a strategy, and more where it names it.

    `model` is the model's name in the tool's own words, and `config` a model's sizes as `phaze.import_graph` takes them
    (Megatron-LM's arguments have both). `ignored` are keys that say nothing about how a batch is divided, and `unknown`
    those that the tool's known versions do not have, with a guess at what was meant; neither is priced. `notes` say in
    whole sentences what the file asks for and the price does not know.
    """

    tool: str
    strategy: Mapping[str, object]
    global_batch_size: int | None = None
    sequence_length: int | None = None
    precision: str | None = None
    model: str | None = None
    config: Mapping[str, object] | None = None
    ignored: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A tool's file and the target that reads and edits it. `part` is the function that is meant, in a Python file."""

    name: str
    part: str | None
    text: str
    target: FileTarget

    def read(self, devices: int, global_batch_size: int | None = None) -> StrategyFile:
        """What it says. `devices` and the batch settle degrees that the tool leaves to them."""
        try:
            return self.target.read(self.name, self.part, self.text, devices, global_batch_size)
        except FormatError as error:
            raise FormatError(f"{self.name}: {error}") from error


def find_source(path: str | os.PathLike[str], plugins: PluginManager | None = None) -> SourceFile:
    """A file (`FILE`, or `FILE.py:FUNCTION`) with the target that reads it; raises FormatError for any other."""
    place, colon, part = os.fspath(path).rpartition(":")
    has_part = bool(colon) and place.endswith(".py") and part.isidentifier()
    file = Path(place if has_part else path)
    text = read_text(file, "a strategy")
    readers = [
        offer.value for offer in (plugins or installed_plugins()).targets() if isinstance(offer.value, FileTarget)
    ]
    for target in readers:
        if target.recognizes(file.name, text):
            return SourceFile(file.name, part if has_part else None, text, target)
    known = ", ".join(sorted(target.name for target in readers))
    raise FormatError(f"{file} is no strategy that Phaze reads; expected a file of one of {known}.")


def read_strategy_file(path: str | os.PathLike[str], devices: int) -> StrategyFile:
    """Read a tool's file: `find_source` and `SourceFile.read` in one."""
    return find_source(path).read(devices)


def suggested_diff(source: SourceFile, plan: Plan) -> str:
    """What to change in a file so that it says a plan: a unified diff, empty where nothing is to be changed."""
    before, after = source.target.edit(source.name, source.part, source.text, plan)
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"a/{source.name}", f"b/{source.name}", n=1, lineterm=""
    )
    return "\n".join(lines)


def unsaid_keys(source: SourceFile, plan: Plan) -> list[str]:
    """The keys of a plan's strategy that the edited file still says otherwise, because it has no place for them."""
    _, after = source.target.edit(source.name, source.part, source.text, plan)
    edited = replace(source, text=after)
    said = edited.read(plan.cluster.device_count, plan.question.global_batch_size).strategy
    names = ("dp", "cp", "ep", "tp", "pp", "zero", "schedule", "chunks", "micro_batch_size", "sequence_parallel")
    unsaid = [name for name in names if name in said and said[name] != getattr(plan.strategy, name)]
    devices = plan.strategy.dp * plan.strategy.cp
    shard = devices if said.get("shard", ALL_DEVICES) == ALL_DEVICES else said["shard"]
    is_shard_unsaid = plan.strategy.zero > 0 and shard != plan.strategy.shard_devices
    return [*unsaid, "shard"] if is_shard_unsaid else unsaid
