"""`phaze schema`: the JSON Schema of a kind of document that Phaze writes, by which it is checked when it is read."""

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
    summary="print the JSON Schema of a kind of document, by which it is checked when it is read",
    configure=configure,
    run=run,
)
