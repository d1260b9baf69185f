"""The commands about this installation: `phaze help`, `phaze schema`, `phaze completion` and `phaze doctor`.

`phaze help` prints the list of topics, the text of one, or the help of a command.

`phaze schema` prints the JSON Schema of a kind of document that Phaze writes, by which it is checked when it is read.

`phaze completion` prints the script by which a shell completes commands, options, names and files. It is made by shtab
from the parser itself. What an argument takes is read from its name (`_words`) or, for files and folders, from its
placeholder. Names are those that are installed when the script is made, so that completing starts no Python.

`phaze doctor` tells what is installed here, what works, and where it came from.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, plain_table, show
from phaze.commands.help_topics import TERMS, TOPICS

if TYPE_CHECKING:
    from phaze.doctor_facts import Diagnosis
    from phaze.hooks import Origin

__all__ = ["SCHEMAS", "completion_command", "doctor", "help_command", "print_schema"]


def _configure_help(parser: ArgumentParser) -> None:
    """Add the command's argument."""
    parser.add_argument(
        "topic",
        nargs="?",
        metavar="TOPIC",
        help="a topic, a command or a word of a printed plan (none: list the topics)",
    )


def _run_help(arguments: Namespace, console: Console) -> int:
    """Print what was asked for: a topic, before a command of that name; a command; a word that a topic explains."""
    from phaze.commands import COMMANDS
    from phaze.commands.command import command_help
    from phaze.errors import UnknownNameError, near_names

    commands = {command.name: command for command in COMMANDS}
    name = arguments.topic
    if name is None:
        lines = ["topics:", *(f"  {topic:<13}{value.summary}" for topic, value in TOPICS.items()), ""]
        lines.append(
            "`phaze help NAME` explains a topic, a command (`phaze --help` lists them) or a word of a printed plan."
        )
    elif name in TOPICS:
        lines = [f"{name}: {TOPICS[name].summary}", "", TOPICS[name].text]
        if name in commands:
            lines += ["", f"`phaze {name} --help` lists the options of the command."]
    elif name in commands:
        lines = [command_help(commands[name]).rstrip("\n")]
    elif (word := name.casefold().replace("-", "_")) in TERMS:
        topic = TERMS[word]
        lines = [f"{name} is explained under {topic}: {TOPICS[topic].summary}", "", TOPICS[topic].text]
    else:
        raise UnknownNameError("topic", name, {*TOPICS, *commands}, near=near_names(name, {*TOPICS, *commands, *TERMS}))
    console.out("\n".join(lines), highlight=False)
    return ExitCode.FINE


help_command = Command(
    name="help",
    group=CommandGroup.INSTALLATION,
    summary="explain a topic such as plan, strategy or cluster, a command, or a word of a printed plan",
    configure=_configure_help,
    run=_run_help,
)


def _plan() -> dict[str, Any]:
    from phaze.json_documents import document_schema
    from phaze.plan.plan import FORMAT, VERSION, Plan

    schema: dict[str, Any] = document_schema("a plan", Plan, {"format": FORMAT, "version": VERSION, "digest": str})
    run = schema["$defs"]["RunFacts"]  # the run has a digest of its own
    run["properties"]["digest"] = {"type": "string"}
    run["required"].append("digest")
    return schema


def _search() -> dict[str, Any]:
    from phaze.explore.search_result import FORMAT, VERSION, SearchResult
    from phaze.json_documents import document_schema

    return document_schema("a search", SearchResult, {"format": FORMAT, "version": VERSION, "digest": str})


def _calibration() -> dict[str, Any]:
    from phaze.cost.calibration import KIND, VERSION, CalibrationFile
    from phaze.json_documents import document_schema

    return document_schema("a calibration", CalibrationFile, {"kind": KIND, "version": VERSION, "digest": str})


def _graph() -> Mapping[str, Any]:
    from phaze.ir.graph_json import GRAPH_SCHEMA

    return GRAPH_SCHEMA


def _accelerator() -> Mapping[str, Any]:
    from phaze.hardware.hardware_files import FILE_SCHEMAS

    return FILE_SCHEMAS["accelerator"]


def _cluster() -> Mapping[str, Any]:
    from phaze.hardware.hardware_files import FILE_SCHEMAS

    return FILE_SCHEMAS["cluster"]


def _space() -> Mapping[str, Any]:
    from phaze.space import SPACE_SCHEMA

    return SPACE_SCHEMA


def _journal() -> Mapping[str, Any]:
    from phaze.explore.journal import LINE_SCHEMA

    return LINE_SCHEMA


SCHEMAS: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "accelerator": _accelerator,
    "calibration": _calibration,
    "cluster": _cluster,
    "graph": _graph,
    "journal": _journal,
    "plan": _plan,
    "search": _search,
    "space": _space,
}
"""How the schema of each kind of document is made; of a journal, it is that of a line."""


def _configure_schema(parser: ArgumentParser) -> None:
    """Add the command's argument."""
    parser.add_argument("kind", choices=sorted(SCHEMAS), help="the kind of document")


def _run_schema(arguments: Namespace, console: Console) -> int:
    """Print the schema."""
    console.out(json.dumps(SCHEMAS[arguments.kind](), indent=1), highlight=False)
    return ExitCode.FINE


print_schema = Command(
    name="schema",
    group=CommandGroup.INSTALLATION,
    summary="print the JSON Schema of a kind of document, by which it is checked when it is read",
    configure=_configure_schema,
    run=_run_schema,
)


SHELLS = ("bash", "zsh", "fish")
"""Those that scripts were written for and looked at; shtab knows more."""

_FILES = ("FILE", "PLAN", "FIRST", "SECOND")
"""Placeholders of arguments that are files."""

_DEVICES = 8
"""The number of devices in the examples of clusters: what a node has most often."""


def _configure_completion(parser: ArgumentParser) -> None:
    """Add the command's argument."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to complete")
    parser.epilog = "`phaze help completion` says where each shell looks for the script."


def _run_completion(arguments: Namespace, console: Console) -> int:
    """Print the script."""
    import shtab

    from phaze.commands import COMMANDS
    from phaze.commands.command import build_parser

    parser, words = build_parser(COMMANDS), _words([command.name for command in COMMANDS])
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.help = "a command"  # shtab leaves out what the help leaves out
            for name, subparser in action.choices.items():
                _mark_arguments(name, subparser, words)
    console.out(shtab.complete(parser, arguments.shell), highlight=False)
    return ExitCode.FINE


def _words(commands: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """What arguments take, by their names; `COMMAND.NAME` is for one command's."""
    from phaze.explore.objectives import Metric
    from phaze.hardware import network_names, preset_names
    from phaze.hardware.precision import OPTIMIZERS, PRECISIONS
    from phaze.installed import installed_plugins
    from phaze.objective import ObjectiveKind

    plugins = installed_plugins()
    chips = sorted({*preset_names(), *plugins.accelerators().names})
    models = plugins.named_models().names
    return {
        "model": models,
        "models": models,
        "chip": chips,
        "chips.name": chips,
        "cluster": [f"{chip}:{_DEVICES}" for chip in chips],
        "cluster.text": [f"{chip}:{_DEVICES}" for chip in chips],
        "network": network_names(),
        "target": ["auto", "none", *plugins.targets().names],
        "solver": plugins.solvers().names,
        "precision": list(PRECISIONS),
        "optimizer": list(OPTIMIZERS),
        "objective": list(ObjectiveKind),
        "search.objective": list(Metric),
        "topic": [*TOPICS, *commands],
    }


def _mark_arguments(command: str, parser: ArgumentParser, words: Mapping[str, Sequence[str]]) -> None:
    """Say of each argument what it takes, as shtab reads it."""
    import shtab

    for action in parser._actions:
        if isinstance(action.metavar, str):  # zsh would end the placeholder at a colon, and read on as what is offered
            action.metavar = action.metavar.replace(":", " ")
        key = f"{command}.{action.dest}" if f"{command}.{action.dest}" in words else action.dest
        if key in words:
            takes_files = action.metavar == "MODEL"
            completes = _offers(f"_phaze_{key.replace('.', '_')}", words[key], takes_files=takes_files)
        elif action.metavar in _FILES:
            completes = shtab.FILE
        elif action.metavar == "DIR":
            completes = shtab.DIRECTORY
        else:
            continue
        action.complete = completes  # type: ignore[attr-defined]


def _offers(function: str, words: Sequence[str], *, takes_files: bool) -> Mapping[str, object]:
    """What shtab writes of an argument that takes known words, and perhaps files as well: a function of each shell."""
    listed = shlex.join(words)
    bash, zsh, fish = f'compgen -W "{listed}" -- "$1"', f"compadd -- {listed}", rf"printf '%s\n' {listed}"
    if takes_files:
        bash += '\n  compgen -f -- "$1"'
        zsh += "\n  _files"
        fish += "; __fish_complete_path (commandline -ct)"
    return {
        "bash": function,
        "zsh": function,
        "fish": f"({fish})",
        "preamble": {"bash": f"{function}() {{\n  {bash}\n}}", "zsh": f"{function}() {{\n  {zsh}\n}}"},
    }


completion_command = Command(
    name="completion",
    group=CommandGroup.INSTALLATION,
    summary="print the script by which bash, zsh or fish complete commands, options and names",
    configure=_configure_completion,
    run=_run_completion,
)


COUNTED_PARTS = (
    "frontends",
    "targets",
    "solvers",
    "stage_builders",
    "accelerators",
    "networks",
    "op_prices",
    "named_models",
    "worlds",
)


def _configure_doctor(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json_option(parser)


def _run_doctor(arguments: Namespace, console: Console) -> int:
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
        adds = ", ".join(f"{count} {kind if count > 1 else kind[:-1]}" for kind, count in counts.items() if count)
        yield plugin.origin.plugin, _source(plugin.origin), adds or "nothing", _file_text(plugin.origin)


def _file_text(origin: Origin) -> str:
    """The file of a plugin; of our own, which lie beside this one, only where in the package."""
    package = Path(__file__).parents[1]
    file = Path(origin.file or "")
    return str(file.relative_to(package.parent)) if file.is_relative_to(package) else str(origin.file or "")


def _source(origin: Origin) -> str:
    return f"{origin.distribution} {origin.version}" if origin.distribution else origin.plugin


doctor = Command(
    name="doctor",
    group=CommandGroup.INSTALLATION,
    summary="show versions, solvers, frontends, targets and plugins, and where each came from",
    configure=_configure_doctor,
    run=_run_doctor,
)
