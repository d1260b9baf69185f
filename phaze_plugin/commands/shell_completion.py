"""`phaze completion`: the script by which a shell completes commands, options, names and files.

The script is made by shtab from the parser itself. What an argument takes is read from its name (`_words`) or, for
files and folders, from its placeholder. Names are those that are installed when the script is made, so that completing
starts no Python.
"""

from __future__ import annotations

import argparse
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode
from phaze.commands.help_topics import TOPICS

__all__ = ["completion_command"]

SHELLS = ("bash", "zsh", "fish")
"""Those that scripts were written for and looked at; shtab knows more."""

_FILES = ("FILE", "PLAN", "FIRST", "SECOND")
"""Placeholders of arguments that are files."""

_DEVICES = 8
"""The number of devices in the examples of clusters: what a node has most often."""


def configure(parser: ArgumentParser) -> None:
    """Add the command's argument."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to complete")
    parser.epilog = "`phaze help completion` says where each shell looks for the script."


def run(arguments: Namespace, console: Console) -> int:
    """Print the script."""
    import shtab

    from phaze.commands import COMMANDS
    from phaze.commands.command_parser import build_parser

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
    configure=configure,
    run=run,
)
