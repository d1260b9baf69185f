"""Options of a command in a shell script or a list of arguments: read through the script's variables, and edited.

Two styles are known: `--name value` (Megatron-LM) and `name=value` (MaxText). Scripts are read, never run: assignments
of plain values and whole-number arithmetic are followed, and what another file or the caller sets stays as the text
`$NAME`, which no reader takes for a number.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phaze.backends.tools.config_texts import Settings, one_line

__all__ = ["ASSIGNED_OPTIONS", "DASHED_OPTIONS", "OptionText"]

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
