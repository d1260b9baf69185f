"""`phaze doctor`: what is installed here, what works, and where it came from."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, plain_table, show

if TYPE_CHECKING:
    from phaze.doctor_facts import Diagnosis
    from phaze.hooks import Origin

__all__ = ["doctor"]

COUNTED_PARTS = (
    "frontends",
    "targets",
    "solvers",
    "stage_builders",
    "accelerators",
    "networks",
    "op_prices",
    "named_models",
)


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
    """Show the diagnosis; problems with plugins are shown, and are not an error of this command."""
    from phaze.doctor_facts import diagnose

    diagnosis = diagnose()
    show(console, arguments, dataclasses.asdict(diagnosis), *_for_people(diagnosis))
    return ExitCode.FINE


def _for_people(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    yield f"phaze {diagnosis.phaze} on Python {diagnosis.python}, {diagnosis.platform}\n"
    yield plain_table(
        ["library", "version", "extra"],
        [(library.name, library.version or "not installed", library.extra or "") for library in diagnosis.libraries],
    )
    yield ""
    yield plain_table(
        ["solver", "state", "detail"], [(solver.name, solver.state, solver.detail) for solver in diagnosis.solvers]
    )
    yield ""
    yield plain_table(["kind", "name", "state", "from"], list(_part_rows(diagnosis)))
    yield ""
    yield plain_table(["plugin", "from", "adds", "file"], list(_plugin_rows(diagnosis)))
    yield ""
    yield "\n".join([f"{len(diagnosis.problems)} problems with plugins", *diagnosis.problems])


def _part_rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str, str, str]]:
    for kind in ("frontends", "targets"):
        parts = getattr(diagnosis, kind)
        for part in parts:
            state = f"needs {', '.join(part.missing_libraries)}" if part.missing_libraries else "ready"
            yield kind.removesuffix("s"), part.name, state, _source(part.origin)
        if not parts:
            yield kind.removesuffix("s"), "none", "", ""


def _plugin_rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str, str, str]]:
    added = {kind: Counter(part.origin for part in getattr(diagnosis, kind)) for kind in COUNTED_PARTS}
    for plugin in diagnosis.plugins:
        counts = {kind.replace("_", " "): counter[plugin.origin] for kind, counter in added.items()}
        adds = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        yield plugin.origin.plugin, _source(plugin.origin), adds or "nothing", plugin.origin.file or ""


def _source(origin: Origin) -> str:
    return f"{origin.distribution} {origin.version}" if origin.distribution else origin.plugin


doctor = Command(
    name="doctor",
    group=CommandGroup.INSTALLATION,
    summary="show versions, solvers, frontends, targets and plugins, and where each came from",
    configure=configure,
    run=run,
)
