"""`phaze help`: the list of topics, the text of one, or the help of a command."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode
from phaze.commands.help_topics import TOPICS

__all__ = ["help_command"]


def configure(parser: ArgumentParser) -> None:
    """Add the command's argument."""
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="a topic or a command (none: list the topics)")


def run(arguments: Namespace, console: Console) -> int:
    """Print what was asked for; a topic goes before a command of the same name, and names that command."""
    from phaze.commands import COMMANDS
    from phaze.commands.command_parser import command_help
    from phaze.errors import UnknownNameError

    commands = {command.name: command for command in COMMANDS}
    name = arguments.topic
    if name is None:
        lines = ["topics:", *(f"  {topic:<13}{value.summary}" for topic, value in TOPICS.items()), ""]
        lines.append("`phaze help TOPIC` explains one, `phaze help COMMAND` a command; `phaze --help` lists commands.")
    elif name in TOPICS:
        lines = [f"{name}: {TOPICS[name].summary}", "", TOPICS[name].text]
        if name in commands:
            lines += ["", f"`phaze {name} --help` lists the options of the command."]
    elif name in commands:
        lines = [command_help(commands[name]).rstrip("\n")]
    else:
        raise UnknownNameError("topic", name, {*TOPICS, *commands})
    console.out("\n".join(lines), highlight=False)
    return ExitCode.FINE


help_command = Command(
    name="help",
    group=CommandGroup.INSTALLATION,
    summary="explain a topic such as strategy, cluster or memory, or a command",
    configure=configure,
    run=run,
)
