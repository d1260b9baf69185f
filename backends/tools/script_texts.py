"""Settings that stand in scripts: options of a command in a shell script, and constants and keywords in a Python file.

Scripts are read and edited, never run.

Options of a command (`OptionText`) stand in a shell script or in a list of arguments. Two styles are known:
`--name value` (Megatron-LM) and `name=value` (MaxText). Assignments of plain values and whole-number arithmetic are
followed, and what another file or the caller sets stays as the text `$NAME`, which no reader takes for a number.

Settings in Python files (`PythonText`) are constants of a module, keywords and attributes of a recipe; they are read
from the syntax only. Keys are what a reader of the file would say: `PARALLELISM = {"tensor_parallel_degree": 8}` and
`config.parallelism.tensor_parallel_degree = 8` are both "parallelism.tensor_parallel_degree", a keyword of a call is
"Callee.keyword", and the default of a function's parameter "function.parameter".
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from phaze.backends.tools.config_texts import Settings, by_section, one_line
from phaze.errors import FormatError

__all__ = ["ASSIGNED_OPTIONS", "DASHED_OPTIONS", "PYTHON", "OptionText", "PythonText"]

_ASSIGNMENT = re.compile(
    r"(?:^|[;\s])(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\$\(\([^)]*\)\)|[^\s;()]*)", re.MULTILINE
)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^}]*))?\}|\$(\w+)|\$\(\(([^)]*)\)\)")
_ROUNDS = 8
"""How often variables inside of variables are looked up; scripts nest two or three deep."""


@dataclass(frozen=True, slots=True)
class OptionText:
    """Options with this prefix, and with this between a name and its value."""

    prefix: str
    assign: str

    def parse(self, text: str) -> dict[str, object]:
        """Values by option, the last one of each; True for an option without a value."""
        return dict(_options(self, _expanded(text)))

    def render(self, head: Sequence[str], settings: Settings) -> str:
        """A script that a shell sources: an array with an option in each line."""
        lines = [f"# {one_line(line)}" for line in head]
        return "\n".join([*lines, "PLANNED=(", *(f"  {self.written(*pair)}" for pair in settings.items()), ")"]) + "\n"

    def written(self, name: str, value: object) -> str:
        """One option as a shell reads it."""
        if value is True:
            return f"{self.prefix}{name}" if self.prefix else f"{name}=True"
        values = value if isinstance(value, list | tuple) else (value,)
        return f"{self.prefix}{name}{self.assign}{' '.join(shlex.quote(str(part)) for part in values)}"

    def edit(self, text: str, changes: Settings) -> str:
        """The script with other options where they stand; new ones behind the last option that is changed or kept."""
        current, new = self.parse(text), []
        for name, value in changes.items():
            written = "" if value is None else self.written(name, value)
            if name in current:
                pattern = self._pattern(name, has_value=current[name] is not True)
                text = _replaced(pattern, written, text)
            elif value is not None:
                new.append(written)
        text = re.sub(r"\n[ \t]*\\?(?=\n[ \t]*\\?\n)", "", text)  # lines that a removed option leaves empty
        if not new:
            return text
        anchors = [
            match for name in {*current, *changes} for match in self._pattern(name, has_value=True).finditer(text)
        ]
        if not anchors:
            return text + " ".join(new) + "\n"
        end = max(match.end() for match in anchors)
        return f"{text[:end]} {' '.join(_placed(option, text, end) for option in new)}{text[end:]}"

    def _pattern(self, name: str, *, has_value: bool) -> re.Pattern[str]:
        value = r"(?:[ \t]+|=)(?!--)(?:'[^']*'|\$\{[^}]*\}|[^\s\\()\"']+)" if self.prefix else r"=[^\s\\()\"]*"
        return re.compile(
            rf"(?<![\w\-]){re.escape(self.prefix + name)}(?![\w\-])(?:{value}){'' if has_value else '{0}'}"
        )


def _replaced(pattern: re.Pattern[str], written: str, text: str) -> str:
    """A script with an option in place of what a pattern finds."""
    return pattern.sub(lambda match: _placed(written, text, match.start()), text)


def _placed(written: str, text: str, offset: int) -> str:
    """An option as it is written at a place of a script: quotes inside of quotes would become a part of its value."""
    before = re.sub(r"(^|\s)#[^\n]*|\\.|'[^'\"\n]*'", "", text[:offset])
    return written.replace("'", "") if before.count('"') % 2 else written


DASHED_OPTIONS = OptionText("--", " ")
ASSIGNED_OPTIONS = OptionText("", "=")


def _options(style: OptionText, text: str) -> list[tuple[str, object]]:
    words = [word.strip("'();") for word in text.replace('"', " ").split()]
    if not style.prefix:
        pairs = [word.partition("=") for word in words if re.match(r"[A-Za-z_]\w*=", word)]
        return [(name, value) for name, _, value in pairs]
    options: list[tuple[str, object]] = []
    for word, following in zip(words, [*words[1:], style.prefix], strict=True):
        if word.startswith(style.prefix) and len(word) > len(style.prefix):
            name, equals, value = word.removeprefix(style.prefix).partition("=")
            is_alone = following.startswith(style.prefix) or not following
            options.append((name, value if equals else True if is_alone else following))
    return options


def _expanded(script: str) -> str:
    """The script on long lines, without comments, variables replaced by what it sets them to."""
    text = re.sub(r"(^|\s)#[^\n]*", r"\1", script.replace("\\\n", " "))
    variables: dict[str, str] = {}
    for name, value in _ASSIGNMENT.findall(text):
        variables[name] = _filled(value.strip("\"'"), variables)
    return _filled(text, variables)


def _filled(text: str, variables: Mapping[str, str]) -> str:
    def value_of(match: re.Match[str]) -> str:
        braced, fallback, plain, sum_text = match.groups()
        if sum_text is not None:
            return _arithmetic(sum_text, variables) or match[0]
        return variables.get(braced or plain, fallback if fallback is not None else match[0])

    for _ in range(_ROUNDS):
        filled = _VARIABLE.sub(value_of, text)
        if filled == text or len(filled) > 10 * len(text) + 10_000:  # a script whose variables hold themselves
            break
        text = filled
    return text


_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def _arithmetic(text: str, variables: Mapping[str, str]) -> str | None:
    """The value of whole-number arithmetic over known variables, as the shell computes it; None where it has none."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return int(_OPERATIONS[type(node.op)](value(node.left), value(node.right)))
        return int(variables[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node))

    try:
        return str(value(ast.parse(text.replace("$", ""), mode="eval").body))
    except (SyntaxError, KeyError, ValueError, TypeError, ZeroDivisionError, RecursionError, OverflowError):
        return None


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
