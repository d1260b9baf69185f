"""Settings in Python files: constants of a module, keywords and attributes of a recipe; read from the syntax only.

Keys are what a reader of the file would say: `PARALLELISM = {"tensor_parallel_degree": 8}` and
`config.parallelism.tensor_parallel_degree = 8` are both "parallelism.tensor_parallel_degree", a keyword of a call is
"Callee.keyword", and the default of a function's parameter "function.parameter".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phaze.backends.tools.config_texts import Settings, by_section, one_line
from phaze.errors import FormatError

__all__ = ["PYTHON", "PythonText"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the value of a setting stands in the text, and how another one would be written behind it."""

    key: str
    value: object
    start: int
    end: int
    pattern: str


@dataclass(frozen=True, slots=True)
class PythonText:
    """The settings of a whole file, or of one of its functions."""

    function: str | None = None

    def parse(self, text: str) -> dict[str, object]:
        """Values by key, the last one of each."""
        return {place.key: place.value for place in self._places(text)}

    def render(self, head: Sequence[str], settings: Settings) -> str:
        """A module with a dictionary per section. Its first two lines are ours: Python looks there for a coding."""
        lines = [
            "# Written by Phaze: the settings that a plan decides.",
            "#",
            *(f"# {one_line(line)}" for line in head),
        ]
        for section, values in by_section(settings).items():
            entries = [f"    {key!r}: {value!a}," for key, value in values.items()]
            lines += ["", f"{section.upper()} = {{", *entries, "}"]
        return "\n".join(lines) + "\n"

    def edit(self, text: str, changes: Settings) -> str:
        """The file with other values where they stand; a new one stands behind another of its section.

        A value is removed by None. What has no place in the file, because nothing of its section is there, is left out.
        """
        places = {place.key: place for place in self._places(text)}
        pieces: list[tuple[int, int, str]] = []
        for key, value in changes.items():
            section, _, name = key.rpartition(".")
            if key in places:
                pieces.append((places[key].start, places[key].end, ascii(value)))
            elif value is not None:
                siblings = [place for place in places.values() if place.key.rpartition(".")[0] == section]
                if siblings:
                    last = max(siblings, key=lambda place: place.end)
                    pieces.append((last.end, last.end, last.pattern.format(name=name, value=ascii(value))))
        data = text.encode()
        for start, end, written in sorted(pieces, key=lambda piece: piece[0], reverse=True):
            data = data[:start] + written.encode() + data[end:]
        return data.decode()

    def _places(self, text: str) -> Iterator[_Place]:
        try:
            tree: ast.AST = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise FormatError(f"this is no Python: {error}.") from error
        if self.function is not None:
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            named = [node for node in functions if node.name == self.function]
            if not named:
                known = ", ".join(node.name for node in functions) or "none"
                raise FormatError(f"this file has no function {self.function!r}; it has {known}.")
            tree = named[0]
        offsets = [0]
        for line in text.encode().splitlines(keepends=True):
            offsets.append(offsets[-1] + len(line))
        for node in ast.walk(tree):
            for key, value, pattern in _settings_of(node):
                literal = _value(value)
                if literal is _NO_VALUE:
                    continue
                assert value.end_lineno is not None
                assert value.end_col_offset is not None
                start = offsets[value.lineno - 1] + value.col_offset
                yield _Place(key, literal, start, offsets[value.end_lineno - 1] + value.end_col_offset, pattern)


_NO_VALUE = object()
"""What stands for a value that only running the file would give."""


def _value(node: ast.expr) -> object:
    """A literal; for a class of configs that is called without arguments its text, such as "FullAC.Config()"."""
    if isinstance(node, ast.Call) and (text := ast.unparse(node)).endswith(".Config()"):
        return text
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _NO_VALUE


def _settings_of(node: ast.AST) -> Iterator[tuple[str, ast.expr, str]]:
    """The settings that a node of the syntax tree makes: key, value, and how a further one is written."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        yield from _assigned(node.targets[0], node.value)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield from _assigned(node.target, node.value)
    elif isinstance(node, ast.Call):
        # `FullAC.Config(..)` is named by the class that it configures.
        callee = ast.unparse(node.func).removesuffix(".Config").rpartition(".")[2]
        # `run.Config(Strategy, tp=4)` says the keywords of its first argument.
        if node.args and isinstance(node.args[0], ast.Name | ast.Attribute) and callee in ("Config", "Partial"):
            callee = ast.unparse(node.args[0]).rpartition(".")[2]
        for keyword in node.keywords:
            if keyword.arg is not None:
                yield f"{callee}.{keyword.arg}", keyword.value, ", {name}={value}"
    elif isinstance(node, ast.FunctionDef):
        parameters = node.args.args[len(node.args.args) - len(node.args.defaults) :]
        for parameter, default in zip(parameters, node.args.defaults, strict=True):
            yield f"{node.name}.{parameter.arg}", default, ", {name}={value}"


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr, str]]:
    name = ast.unparse(target)
    if isinstance(target, ast.Name) and isinstance(value, ast.Dict):
        for key, entry in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield f"{name.lower()}.{key.value}", entry, ", '{name}': {value}"
    elif isinstance(target, ast.Attribute) and re.fullmatch(r"[\w.]+", name):
        owner = name.rpartition(".")[0]
        indent = " " * target.col_offset
        yield name.partition(".")[2], value, f"\n{indent}{owner}.{{name}} = {{value}}"
    elif isinstance(target, ast.Name):
        yield name.lower(), value, f"\n{' ' * target.col_offset}{{name}} = {{value}}"


PYTHON = PythonText()
