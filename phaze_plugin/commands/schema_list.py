"""`phaze schema`: the JSON Schema of a kind of document that Phaze writes, made from what reads it."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode

__all__ = ["SCHEMAS", "print_schema"]


def _plan() -> dict[str, Any]:
    from phaze.json_schemas import document_schema
    from phaze.plan.plan import FORMAT, VERSION, Plan

    schema: dict[str, Any] = document_schema("a plan", Plan, {"format": FORMAT, "version": VERSION, "digest": str})
    run = schema["$defs"]["RunFacts"]  # the run has a digest of its own
    run["properties"]["digest"] = {"type": "string"}
    run["required"].append("digest")
    return schema


def _search() -> dict[str, Any]:
    from phaze.explore.search_result import FORMAT, VERSION, SearchResult
    from phaze.json_schemas import document_schema

    return document_schema("a search", SearchResult, {"format": FORMAT, "version": VERSION, "digest": str})


def _calibration() -> dict[str, Any]:
    from phaze.cost.calibration import KIND, VERSION, CalibrationFile
    from phaze.json_schemas import document_schema

    return document_schema("a calibration", CalibrationFile, {"kind": KIND, "version": VERSION, "digest": str})


SCHEMAS: Mapping[str, Callable[[], dict[str, Any]]] = {"plan": _plan, "search": _search, "calibration": _calibration}
"""How the schema of each kind of document is made."""


def configure(parser: ArgumentParser) -> None:
    """Add the command's argument."""
    parser.add_argument("kind", choices=sorted(SCHEMAS), help="the kind of document")


def run(arguments: Namespace, console: Console) -> int:
    """Print the schema."""
    console.out(json.dumps(SCHEMAS[arguments.kind](), indent=1), highlight=False)
    return ExitCode.FINE


print_schema = Command(
    name="schema",
    group=CommandGroup.INSTALLATION,
    summary="print the JSON Schema of plans, searches or calibrations",
    configure=configure,
    run=run,
)
