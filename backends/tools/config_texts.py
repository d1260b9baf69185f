"""Config files as settings and back: TOML, YAML and JSON are written, read, and edited with the rest left as it is.

A setting is a dotted key ("parallelism.tensor_parallel_degree") with a plain value: a number, a truth value, a text, a
list of these. `edit` replaces, adds and (for a value of None) removes settings; `edit(text, {})` is what a diff of an
edited file starts from: the text itself, or for JSON the same document laid out anew.

Names that come from outside (a model's) stand in comments, by `one_line`, and in values, by `quoted`: neither lets a
text end its line or its quotes.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from phaze.errors import FormatError
from phaze.file_access import parse_json

__all__ = ["JSON", "TOML", "YAML", "ConfigText", "Settings", "one_line", "quoted"]

Settings: TypeAlias = Mapping[str, object]
"""Values by dotted key."""


class ConfigText(Protocol):
    """One kind of text that holds settings."""

    def parse(self, text: str) -> dict[str, object]:
        """The settings of a text. Raises FormatError where it is damaged."""

    def render(self, head: Sequence[str], settings: Settings) -> str:
        """A new text: lines of comment, then the settings in their order."""

    def edit(self, text: str, changes: Settings) -> str:
        """The text with other values; None removes a setting."""


def one_line(text: str) -> str:
    """A text for a comment: what does not print, line ends among it, is written as escapes."""
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)


def quoted(value: object) -> str:
    """A value as TOML and YAML both read it; texts are in double quotes and pure ASCII."""
    if isinstance(value, str):
        return '"' + "".join(_escaped(char) for char in value) + '"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(quoted(item) for item in value)}]"
    return json.dumps(value)


def _escaped(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if " " <= char <= "~":
        return char
    if "\ud800" <= char <= "\udfff":  # half a character, which no such file can hold
        return "?"
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


_MOST_SETTINGS = 100_000
"""More than any tool has; YAML's aliases can make a small file say far more."""


def flattened(document: object) -> dict[str, object]:
    """The settings of nested mappings; raises FormatError where there are too many."""
    settings: dict[str, object] = {}
    waiting: list[tuple[str, object]] = [("", document)]
    met = 0
    while waiting:
        prefix, value = waiting.pop()
        met += 1
        if met > _MOST_SETTINGS:
            raise FormatError(f"there are more than {_MOST_SETTINGS:,} settings; this is no config.")
        if isinstance(value, Mapping):
            inner = [(f"{prefix}.{key}" if prefix else str(key), entry) for key, entry in value.items()]
            waiting += reversed(inner)
        elif prefix:
            settings[prefix] = value
    return settings


def nested(settings: Settings) -> dict[str, object]:
    """Mappings inside of mappings, from dotted keys."""
    document: dict[str, object] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        inner = document
        for section in sections:
            deeper = inner.setdefault(section, {})
            assert isinstance(deeper, dict)
            inner = deeper
        inner[name] = value
    return document


def by_section(settings: Settings) -> dict[str, dict[str, object]]:
    """Settings by what stands before the last dot of their keys, in the order of the first of each section."""
    sections: dict[str, dict[str, object]] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    return dict(sorted(sections.items(), key=lambda item: item[0] != ""))  # what has no section comes first


@dataclass(frozen=True, slots=True)
class _SectionLines:
    """How a text of lines marks its sections and settings."""

    assign: str
    indent: str
    section_of: Callable[[str], str | None]
    """The section that a line opens; None where it opens none."""
    header: Callable[[str], str]
    setting: re.Pattern[str]
    """Groups: indentation, key, value, and what stands behind it."""
    is_in_section: Callable[[str, str], bool]
    """Whether a setting with this indentation belongs to this section: YAML's sections end where indentation does."""

    def edit(self, text: str, changes: Settings) -> str:
        lines, wanted = text.splitlines(), dict(changes)
        kept: list[str] = []
        ends: dict[str, int] = {"": 0}
        section, skips = "", 0
        for line in lines:
            if skips:  # the rest of a list over several lines, whose setting was replaced
                skips += line.count("[") - line.count("]")
                continue
            opened = self.section_of(line)
            match = self.setting.match(line) if opened is None else None
            if opened is not None:
                section = opened
            elif match and not self.is_in_section(match[1], section):
                section = ""
            key = f"{section}.{match[2]}" if match and section else match[2] if match else ""
            if match and key in wanted:
                value = wanted.pop(key)
                skips = max(0, match[3].count("[") - match[3].count("]"))
                if value is not None:
                    kept.append(f"{match[1]}{match[2]}{self.assign}{quoted(value)}{match[4]}")
                    ends[section] = len(kept)
                continue
            kept.append(line)
            if line.strip() and (opened is not None or match):
                ends[section] = len(kept)
        return self._with_new(kept, ends, {key: value for key, value in wanted.items() if value is not None})

    def _with_new(self, kept: list[str], ends: Mapping[str, int], new: Settings) -> str:
        """The lines with settings added behind the last of their section, or in a section of their own at the end."""
        sections = by_section(new)
        for section in sorted(sections, key=lambda name: ends.get(name, len(kept)), reverse=True):
            indent = self.indent if section else ""
            added = [f"{indent}{key}{self.assign}{quoted(value)}" for key, value in sections[section].items()]
            if section in ends:
                kept[ends[section] : ends[section]] = added
            else:
                kept += [self.header(section), *added]
        return "\n".join(kept) + "\n"

    def render(self, head: Sequence[str], settings: Settings) -> str:
        lines = [f"# {one_line(line)}" for line in head]
        for section, values in by_section(settings).items():
            lines += ["", self.header(section)] if section else [""] if self.indent == "" and values else []
            indent = self.indent if section else ""
            lines += [f"{indent}{key}{self.assign}{quoted(value)}" for key, value in values.items()]
        return "\n".join(lines) + "\n"


def _toml_section(line: str) -> str | None:
    match = re.match(r"\s*\[([\w.\-]+)\]", line)
    return match[1] if match else None


def _yaml_section(line: str) -> str | None:
    match = re.match(r"([\w\-]+):\s*(#.*)?$", line)
    return match[1] if match else None


_TOML_LINES = _SectionLines(
    assign=" = ",
    indent="",
    section_of=_toml_section,
    header=lambda section: f"[{section}]",
    setting=re.compile(r"(\s*)([\w\-]+)\s*=\s*(\"[^\"]*\"|'[^']*'|[^#]*?)(\s*(?:#.*)?)$"),
    is_in_section=lambda indent, section: True,
)
_YAML_LINES = _SectionLines(
    assign=": ",
    indent="  ",
    section_of=_yaml_section,
    header=lambda section: f"{section}:",
    setting=re.compile(r"(\s*)([\w\-]+):\s+(\"[^\"]*\"|'[^']*'|[^#]*?)(\s*(?:#.*)?)$"),
    is_in_section=lambda indent, section: bool(indent),
)


@dataclass(frozen=True, slots=True)
class _TomlText:
    def parse(self, text: str) -> dict[str, object]:
        try:
            return flattened(tomllib.loads(text))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"this is no TOML: {error}.") from error

    def render(self, head: Sequence[str], settings: Settings) -> str:
        return _TOML_LINES.render(head, settings)

    def edit(self, text: str, changes: Settings) -> str:
        return _TOML_LINES.edit(text, changes) if changes else text


@dataclass(frozen=True, slots=True)
class _YamlText:
    """YAML with at most one level of sections, as the tools that are known here write it."""

    def parse(self, text: str) -> dict[str, object]:
        try:
            import yaml
        except ImportError as error:
            raise FormatError("reading YAML needs PyYAML; install it: pip install pyyaml.") from error
        try:
            return flattened(yaml.safe_load(text))
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise FormatError(f"this is no YAML: {error}.") from error

    def render(self, head: Sequence[str], settings: Settings) -> str:
        return _YAML_LINES.render(head, settings)

    def edit(self, text: str, changes: Settings) -> str:
        return _YAML_LINES.edit(text, changes) if changes else text


@dataclass(frozen=True, slots=True)
class _JsonText:
    """JSON has no comments: what a file says first is left to the README beside it."""

    def parse(self, text: str) -> dict[str, object]:
        return flattened(self._document(text))

    def render(self, head: Sequence[str], settings: Settings) -> str:
        return json.dumps(nested(settings), indent=2) + "\n"

    def edit(self, text: str, changes: Settings) -> str:
        document = self._document(text)
        for key, value in changes.items():
            *sections, name = key.split(".")
            inner = document
            for section in sections:
                deeper = inner.setdefault(section, {}) if value is not None else inner.get(section, {})
                inner = deeper if isinstance(deeper, dict) else {}
            if value is None:
                inner.pop(name, None)
                if len(sections) == 1 and not inner:  # a section of which nothing is left
                    document.pop(sections[0], None)
            else:
                inner[name] = value
        return json.dumps(document, indent=2) + "\n"

    def _document(self, text: str) -> dict[str, object]:
        document = parse_json(text, "this", "a config in JSON", is_foreign=True)
        if not isinstance(document, dict):
            raise FormatError(f"this JSON is a {type(document).__name__}; expected an object.")
        return document


TOML: ConfigText = _TomlText()
YAML: ConfigText = _YamlText()
JSON: ConfigText = _JsonText()
