"""The pages of the reference that are made from the code: commands from their parser, formats from their schemas."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from phaze.commands import COMMANDS
from phaze.commands.command import build_parser
from phaze.commands.help_topics import TOPICS
from phaze.commands.installation_commands import SCHEMAS

__all__ = ["command_line", "file_formats", "schema_files"]

_FORMAT_WORDS = {
    "accelerator": "A chip of your own: `phaze chips NAME --json` shows the numbers of a known one.",
    "calibration": "How far a chip stays behind its ideal: `phaze calibrate --out FILE` writes it.",
    "cluster": "Devices and the links between them: `phaze cluster TEXT --out FILE` writes it.",
    "graph": "A model's operators: `phaze import MODEL --out FILE` and `Graph.save` write it.",
    "journal": "What a search has done, one JSON document a line: `phaze search --journal FILE` writes it.",
    "plan": "A plan: `phaze optimize --out FILE` and `Plan.save` write it.",
    "search": "The answer of a search: `phaze search --out FILE` and `SearchResult.save` write it.",
    "space": "A space of accelerators of your own, for `phaze search --space FILE`. You write it.",
}
"""One sentence for each kind of document: what it is, and what writes it."""


def command_line() -> str:
    """The page of all commands with their options, and of the topics of `phaze help`."""
    parser = build_parser(COMMANDS)
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    lines = [
        "# Command line",
        "",
        "This page is made from the parser of `phaze`. Results go to standard output, errors and warnings to standard",
        "error. The exit code is 0 when all is well, 1 for an error, 2 for wrong usage and 130 after an interrupt.",
        "",
        "Options before the command:",
        "",
        *_options(parser),
    ]
    for command in COMMANDS:
        lines += ["", f"## {command.name}", "", f"{_sentence(command.summary)}", ""]
        own = subparsers.choices[command.name]
        lines += _options(own)
        if own.epilog:
            lines += ["", "```text", own.epilog.strip(), "```"]
    lines += ["", "## Topics", "", "What `phaze help TOPIC` prints."]
    for name, topic in TOPICS.items():
        lines += ["", f"### {name} {{#topic-{name}}}", "", _sentence(topic.summary), "", "```text", topic.text, "```"]
    return "\n".join(lines) + "\n"


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A table of what a parser takes."""
    shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS and action.dest != "help"]
    if shown:
        yield "| argument | meaning |"
        yield "|---|---|"
    for action in shown:
        yield f"| `{_cell(_signature(action))}` | {_cell(_explained(parser, action))} |"


def _signature(action: argparse.Action) -> str:
    """An argument as people type it."""
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    if not action.option_strings:
        return f"[{value}]" if action.nargs == "?" else str(value)
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {value}"


def _explained(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The help of an argument, with its defaults filled in as argparse does."""
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    return f"{text} (required)" if action.required and action.option_strings else text


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _cell(text: str) -> str:
    """Text in a cell of a table."""
    return text.replace("\n", " ").replace("|", "\\|")


def schema_files() -> dict[str, str]:
    """The schemas as files of the site, by path."""
    return {f"reference/schemas/{kind}.json": json.dumps(make(), indent=1) for kind, make in SCHEMAS.items()}


def file_formats() -> str:
    """The page of all kinds of documents, each with the fields that its schema says."""
    lines = [
        "# File formats",
        "",
        "This page is made from the JSON Schemas in the package; `phaze schema KIND` prints one. A document is checked",
        "against its schema before it is used. Numbers are in seconds, bytes, hertz and watts, as their names say.",
    ]
    for kind, make in sorted(SCHEMAS.items()):
        schema = make()
        lines += ["", f"## {kind}", "", _FORMAT_WORDS[kind], f"The schema: [{kind}.json](schemas/{kind}.json).", ""]
        lines += _fields(schema, kind)
        inner = {**dict(sorted(schema.get("$defs", {}).items())), **dict(_inner_objects(schema))}
        for name, definition in inner.items():
            if definition.get("properties"):
                lines += ["", f"### {name} {{#{_anchor(kind, name)}}}", "", *_fields(definition, kind, name)]
    return "\n".join(lines) + "\n"


def _inner_objects(schema: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Objects with fields of their own that stand inside of others, by the path of their field."""
    for field, inner in schema.get("properties", {}).items():
        path = f"{name}.{field}" if name else field
        target = inner.get("items", inner)
        if target.get("properties"):
            yield path, target
            yield from _inner_objects(target, path)


def _fields(schema: Mapping[str, Any], kind: str, path: str = "") -> Iterator[str]:
    """A table of the fields of an object."""
    choices = [choice for choice in schema.get("oneOf", schema.get("anyOf", ())) if choice.get("properties")]
    for choice in choices:
        yield from _fields(choice, kind, path)
        yield ""
    if schema.get("properties"):
        required = schema.get("required", ())
        yield "| field | type | required |"
        yield "|---|---|---|"
        for name, field in schema["properties"].items():
            own = f"{path}.{name}" if path else name
            yield f"| `{name}` | {_type(field, kind, own)} | {'yes' if name in required else 'no'} |"


def _type(schema: Mapping[str, Any], kind: str, path: str) -> str:
    """A type in words, with links to objects that have a table on the page; `path` is that of the field, if any."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{_anchor(kind, name)})"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"]).replace("|", "\\|")
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return " or ".join(dict.fromkeys(_type(choice, kind, "") for choice in schema[word]))
    match schema.get("type"):
        case "array":
            return f"list of {_type(schema.get('items', {}), kind, path)}"
        case "object" if schema.get("properties"):
            names = ", ".join(f"`{name}`" for name in schema["properties"])
            return f"[object](#{_anchor(kind, path)})" if path else f"object with {names}"
        case "object":
            values = schema.get("additionalProperties")
            is_typed = isinstance(values, Mapping) and values
            return f"object of {_type(values, kind, '')} by name" if is_typed else "object"
        case list() as names:
            return " or ".join(names)
        case None:
            return "anything"
        case name:
            return str(name)


def _anchor(kind: str, name: str) -> str:
    return f"{kind}-{name.lower().replace('.', '-')}"
