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
        known = words.get(f"{command}.{action.dest}", words.get(action.dest))
        if action.metavar == "MODEL" and known is not None:
            completes: object = _words_or_files("_phaze_models", known)
        elif known is not None:
            completes = shtab.cmd(shlex.join(["printf", r"%s\n", *known]))
        elif action.metavar in _FILES:
            completes = shtab.FILE
        elif action.metavar == "DIR":
            completes = shtab.DIRECTORY
        else:
            continue
        action.complete = completes  # type: ignore[attr-defined]


def _words_or_files(function: str, words: Sequence[str]) -> Mapping[str, object]:
    """A completion that shtab has none of: known words, and files as well."""
    listed = shlex.join(words)
    return {
        "bash": function,
        "zsh": function,
        "fish": rf"(printf '%s\n' {listed}; __fish_complete_path (commandline -ct))",
        "preamble": {
            "bash": f'{function}() {{\n  compgen -W "{listed}" -- "$1"\n  compgen -f -- "$1"\n}}',
            "zsh": f"{function}() {{\n  compadd -- {listed}\n  _files\n}}",
        },
    }


completion_command = Command(
    name="completion",
    group=CommandGroup.INSTALLATION,
    summary="print the script by which bash, zsh or fish complete commands, options and names",
    configure=configure,
    run=run,
)
