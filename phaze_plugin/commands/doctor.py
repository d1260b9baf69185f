"""`phaze doctor`: what is installed here, what works, and where it came from."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from rich.console import Console

import phaze
from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, plain_table, show

__all__ = ["doctor"]

DISTRIBUTION = "phaze-plugin"


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
    """Show versions."""
    libraries = list(required_libraries())
    document = {
        "phaze": phaze.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": [{"name": name, "extra": extra, "version": installed_version(name)} for name, extra in libraries],
    }
    rows = [(name, installed_version(name) or "not installed", extra or "core") for name, extra in libraries]
    show(
        console,
        arguments,
        document,
        f"phaze {document['phaze']} on Python {document['python']}, {document['platform']}",
        plain_table(["library", "version", "needed by"], rows),
    )
    return ExitCode.FINE


def required_libraries() -> Iterator[tuple[str, str | None]]:
    """Every library that the distribution names, with the extra that asks for it (None: the core does)."""
    for requirement in importlib.metadata.requires(DISTRIBUTION) or ():
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if name != DISTRIBUTION and (extra is None or extra[1] not in ("dev", "all")):
            yield name, extra[1] if extra else None


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


doctor = Command(
    name="doctor",
    group=CommandGroup.INSTALLATION,
    summary="show versions, solvers, frontends, backends and plugins, and where each came from",
    configure=configure,
    run=run,
)
