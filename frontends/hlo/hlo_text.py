"""Read HLO text into plain values: computations of instructions with shapes, and what the header says of the module.

The grammar is small, and XLA changes it from version to version: attributes come and go, layouts grow, tables of source
lines stand between the header and the computations. So nothing here depends on which attributes there are. A module is,
often without its header in the tests of compilers,

    HloModule NAME, ATTRIBUTE=VALUE, ...
    [ENTRY] %NAME (...) -> SHAPE {
      [ROOT] %NAME = SHAPE OPCODE(OPERANDS), ATTRIBUTE=VALUE, ...
    }

where a value is anything up to the next comma outside of brackets and quotes. What the attributes of the header mean is
read at the end of this file: donated arguments (`aliases_of`), devices (`replica_count`, `partition_count`), and
whether the module is partitioned (`is_partitioned`). What those of an instruction mean is known to `hlo_lowering.py`
and `opcode_attributes.py` alone.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "Computation",
    "HloModule",
    "HloTextError",
    "Instruction",
    "Shape",
    "aliases_of",
    "is_partitioned",
    "partition_count",
    "read_hlo_text",
    "replica_count",
    "split_list",
]

MOST_SHOWN = 80
"""How many characters of a line that cannot be read its message shows."""

MOST_NESTED_TUPLES = 100
"""How deep tuples may stand inside tuples: far more than programs nest, few enough for Python's own stack."""


class HloTextError(ValueError):
    """The text is not HLO; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a value: an array with its element type, dimensions and layout, or a tuple of shapes.

    `layout` has the dimensions minor to major, None where the text has none. A dimension whose size is not known is -1.
    """

    element: str = ""
    dims: tuple[int, ...] = ()
    layout: tuple[int, ...] | None = None
    parts: tuple[Shape, ...] | None = None

    @property
    def leaves(self) -> tuple[Shape, ...]:
        """The arrays of a shape in order, those inside tuples with the others."""
        if self.parts is None:
            return (self,)
        return tuple(leaf for part in self.parts for leaf in part.leaves)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `argument` is the text between the parentheses of a constant, a parameter or an iota."""

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    argument: str
    attributes: Mapping[str, str]
    line: int

    def integers(self, attribute: str) -> tuple[int, ...]:
        """The integers of an attribute such as `dimensions={0,1}`; none where it is absent."""
        return tuple(int(word) for word in re.findall(r"-?\d+", self.attributes.get(attribute, "")))


@dataclass(slots=True)
class Computation:
    """A computation: its instructions in order, and the name of the one whose value it gives."""

    name: str
    is_entry: bool
    line: int
    instructions: list[Instruction] = field(default_factory=list)
    root: str = ""

    @property
    def parameters(self) -> list[Instruction]:
        """The parameters, in the order of their numbers."""
        given = [instruction for instruction in self.instructions if instruction.opcode == "parameter"]
        return sorted(given, key=lambda instruction: int(instruction.argument or 0))


@dataclass(frozen=True, slots=True)
class HloModule:
    """A module: its name, the attributes of its header, and its computations by name."""

    name: str
    attributes: Mapping[str, str]
    computations: Mapping[str, Computation]

    @property
    def entry(self) -> Computation:
        """The computation that a program starts with: the one marked so, else the last."""
        marked = [computation for computation in self.computations.values() if computation.is_entry]
        return marked[0] if marked else list(self.computations.values())[-1]


_STRING = re.compile(r'"(?:\\.|[^"\\])*"')
_BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_DELIMITER = re.compile(r'"(?:\\.|[^"\\])*"|[(){}\[\],]')
_HEADER = re.compile(r"HloModule\s+%?([^\s,]+)\s*(.*)$")
_COMPUTATION = re.compile(r"\s*(?:(ENTRY)\b\s*)?(?:%?([A-Za-z_][\w.$~<>:-]*)\s*)?(?:\(.*\)\s*->\s*.*\{\s*$|\{)")
_ASSIGNMENT = re.compile(r"\s*(ROOT\b)?\s*%?([^\s=]+)\s*=\s*")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_LAYOUT = re.compile(r"\{([^{}]*)\}")
_CALL = re.compile(r"[a-z0-9_-]\(")
"""The end of an opcode and its parenthesis; tiles of layouts, `T(8,128)`, are written in capitals."""

_OPCODE = re.compile(r"\s*([a-z][\w-]*)\(")
_TOLD_BY_OPERANDS = frozenset(
    {"abs", "add", "copy", "divide", "exponential", "log", "maximum", "minimum", "multiply", "negate", "power", "rsqrt"}
    | {"sqrt", "subtract", "tanh", "tuple"}
)
"""Opcodes whose shape follows from those of their operands alone."""

_OPENING = {"(": ")", "{": "}", "[": "]"}


def read_hlo_text(text: str) -> HloModule:
    """The module that a text holds; raises HloTextError."""
    name, attributes, has_header = "module", {}, False
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    for line, statement in _statements(_BLOCK_COMMENT.sub("", text)):
        stripped = statement.strip()
        if current is not None:
            if stripped.startswith("}"):
                _close(current)
                current = None
            else:
                _add_instruction(current, statement, line)
            continue
        header = None if has_header else _HEADER.match(stripped)
        if header is not None:
            name, attributes, has_header = header[1], _attributes(header[2].lstrip(",")), True
            continue
        opening = _COMPUTATION.match(statement)
        if opening is not None and stripped.endswith("{"):
            current = Computation(opening[2] or f"computation{len(computations)}", bool(opening[1]), line)
            computations[current.name] = current
        elif " = " in stripped and "{" not in stripped[: stripped.index("=")] and _OPCODE.search(stripped):
            raise HloTextError(f"line {line}: an instruction outside of a computation: {stripped[:MOST_SHOWN]!r}")
    if current is not None:
        raise HloTextError(f"the computation {current.name!r} of line {current.line} has no end: the text is cut.")
    if not computations:
        raise HloTextError(
            "the module has no computations." if has_header else "the text has no line that begins with 'HloModule'."
        )
    return HloModule(name, attributes, computations)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """The statements of a text with the number of their line.

    A statement is the line that opens a computation, the brace that closes it, or anything else: one line, or several
    where brackets stay open.
    """
    held: list[str] = []
    balance, first, is_inside = 0, 0, False
    for number, line in enumerate(text.split("\n"), start=1):
        line, bare = _without_comment(line)
        opening = None if is_inside or held else _COMPUTATION.match(line)
        if opening is not None:
            yield number, line[: opening.end()]
            is_inside, line = True, line[opening.end() :]
            bare = _STRING.sub("", line)
        if not bare.strip():
            continue
        first = first if held else number
        held.append(line)
        balance += sum(map(bare.count, "({[")) - sum(map(bare.count, ")}]"))
        statement = " ".join(held)
        if balance > 0 or (balance == 0 and (bare.rstrip().endswith(",") or (is_inside and _is_begun(statement)))):
            continue
        if is_inside and balance < 0:  # the brace that closes the computation
            statement, is_inside = statement[: statement.rindex("}")], False
            if statement.strip():
                yield first, statement
            yield number, "}"
        else:
            yield first, statement
        held, balance = [], 0
    if held:
        yield first, " ".join(held)


def _is_begun(statement: str) -> bool:
    """Whether a statement has a name and a shape, and its opcode is still to come on the next line."""
    assignment = _ASSIGNMENT.match(statement)
    return assignment is not None and statement.rstrip()[-1] in "])}" and not _CALL.search(statement, assignment.end())


def _without_comment(line: str) -> tuple[str, str]:
    """A line without the comment at its end, and the same without quoted texts."""
    bare = _STRING.sub("", line) if '"' in line else line
    if "//" not in bare:
        return line, bare
    quoted = [match.span() for match in _STRING.finditer(line)]
    starts = (match.start() for match in re.finditer("//", line))
    cut = next(start for start in starts if not any(a <= start < b for a, b in quoted))
    return line[:cut], _STRING.sub("", line[:cut])


def _close(computation: Computation) -> None:
    if not computation.instructions:
        raise HloTextError(f"line {computation.line}: the computation {computation.name!r} has no instructions.")
    computation.root = computation.root or computation.instructions[-1].name


def _add_instruction(computation: Computation, statement: str, line: int) -> None:
    assignment = _ASSIGNMENT.match(statement)
    if assignment is None:
        raise HloTextError(f"line {line}: expected NAME = SHAPE OPCODE(...), not {statement.strip()[:MOST_SHOWN]!r}")
    try:
        opcode = _OPCODE.match(statement, assignment.end())  # some write no shape where operands tell it
        shape, offset = (None, 0) if opcode else _shape(statement, assignment.end(), 0)
        opcode = opcode or _OPCODE.match(statement, offset)
        if opcode is None:
            raise HloTextError("no opcode follows the shape")
        end = _closing(statement, opcode.end() - 1)
    except (HloTextError, ValueError) as error:
        raise HloTextError(f"line {line}: {error}: {statement.strip()[:MOST_SHOWN]!r}") from None
    inside = statement[opcode.end() : end]
    is_literal = opcode[1] in ("constant", "parameter", "iota")
    operands = () if is_literal else tuple(_operand_name(part) for part in split_list(inside))
    shape = _told_shape(computation, opcode[1], operands, line) if shape is None else shape
    instruction = Instruction(
        name=assignment[2],
        shape=shape,
        opcode=opcode[1],
        operands=operands,
        argument=inside.strip() if is_literal else "",
        attributes=_attributes(statement[end + 1 :]),
        line=line,
    )
    if instruction.opcode == "parameter" and not instruction.argument.isdigit():
        raise HloTextError(f"line {line}: the parameter {instruction.name!r} has no number.")
    computation.instructions.append(instruction)
    if assignment[1]:
        computation.root = instruction.name


def _told_shape(computation: Computation, opcode: str, operands: Sequence[str], line: int) -> Shape:
    """The shape of an instruction without one: a tuple has those of its operands, others here that of the first."""
    known = {instruction.name: instruction.shape for instruction in computation.instructions}
    if not operands or any(name not in known for name in operands) or opcode not in _TOLD_BY_OPERANDS:
        raise HloTextError(f"line {line}: expected a shape such as f32[2,3] before {opcode!r}.")
    return Shape(parts=tuple(known[name] for name in operands)) if opcode == "tuple" else known[operands[0]]


def _shape(text: str, start: int, depth: int) -> tuple[Shape, int]:
    """The shape at an offset of a text, and where it ends."""
    while start < len(text) and text[start].isspace():
        start += 1
    if text[start : start + 1] == "(":
        return _tuple_shape(text, start + 1, depth + 1)
    array = _ARRAY.match(text, start)
    if array is None:
        raise HloTextError("expected a shape such as f32[2,3]")
    dims = tuple(_dimension(word) for word in array[2].split(",") if word.strip())
    end, layout = array.end(), None
    given = _LAYOUT.match(text, end)
    if given is not None:
        end = given.end()
        order = tuple(int(word) for word in given[1].partition(":")[0].split(",") if word.strip().isdigit())
        layout = order if sorted(order) == list(range(len(dims))) else None
    return Shape(array[1], dims, layout), end


def _tuple_shape(text: str, start: int, depth: int) -> tuple[Shape, int]:
    if depth > MOST_NESTED_TUPLES:
        raise HloTextError(f"tuples are nested more than {MOST_NESTED_TUPLES} deep")
    parts: list[Shape] = []
    while True:
        while start < len(text) and (text[start].isspace() or text[start] == ","):
            start += 1
        if text[start : start + 1] == ")":
            return Shape(parts=tuple(parts)), start + 1
        part, start = _shape(text, start, depth)
        parts.append(part)


def _dimension(word: str) -> int:
    """A size; one that is only bounded (`<=5`) counts as its bound, an unknown one (`?`) as -1."""
    word = word.strip().removeprefix("<=")
    return -1 if word == "?" else int(word)


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at an offset is closed."""
    depth = 0
    for delimiter in _DELIMITER.finditer(text, start):
        letter = delimiter[0]
        if letter in _OPENING:
            depth += 1
        elif letter in ")}]":
            depth -= 1
            if depth == 0:
                return delimiter.start()
    raise HloTextError("a bracket is not closed")


def split_list(text: str) -> list[str]:
    """The parts of a text between the commas that stand outside of brackets and quotes."""
    parts, depth, start = [], 0, 0
    for delimiter in _DELIMITER.finditer(text):
        letter = delimiter[0]
        if letter in _OPENING:
            depth += 1
        elif letter in ")}]":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start : delimiter.start()])
            start = delimiter.end()
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _operand_name(text: str) -> str:
    """The name of an operand, which may stand behind its shape."""
    return text.split()[-1].removeprefix("%")


def _attributes(text: str) -> dict[str, str]:
    """`name=value` pairs; a word without a value has an empty one."""
    attributes: dict[str, str] = {}
    for part in split_list(text):
        name, _, value = part.partition("=")
        attributes[name.strip()] = value.strip()
    return attributes


_SHARDING_TARGETS = re.compile(r"xla\.sdy\.|SPMDFullToShardShape|SPMDShardToFullShape")
"""Marks of annotations that the partitioner has yet to carry out."""


def _count(module: HloModule, name: str) -> int:
    given = module.attributes.get(name, "1")
    return int(given) if given.isdigit() and int(given) > 0 else 1


def replica_count(module: HloModule) -> int:
    """How many replicas of the program run, each with its own part of the batch."""
    return _count(module, "replica_count")


def partition_count(module: HloModule) -> int:
    """For how many devices a module is: as its header says, or the shardings of parameters (protos keep no header)."""
    given = _count(module, "num_partitions")
    if given > 1:
        return given
    for parameter in module.entry.parameters:
        tiles = re.search(r"devices=\[([\d,]+)\]", parameter.attributes.get("sharding", ""))
        if tiles is not None:
            return max(1, math.prod(int(size) for size in tiles[1].split(",") if size))
    return 1


def is_partitioned(module: HloModule) -> bool:
    """Whether a module for several devices has the shapes of one: no instruction is left that is to be partitioned.

    One that is scheduled was compiled, whatever its instructions still say.
    """
    if partition_count(module) == 1:
        return False
    if module.attributes.get("is_scheduled") == "true":
        return True
    entry = module.entry
    return not any(
        "sharding" in instruction.attributes or _SHARDING_TARGETS.search(str(instruction.attributes))
        for computation in module.computations.values()
        for instruction in computation.instructions
        # Copies of parameters keep their sharding to the end.
        if instruction.opcode not in ("parameter", "copy") and instruction.name != entry.root
    )


def aliases_of(module: HloModule) -> list[list[int]]:
    """Pairs of an argument and the result that is written over it, both as numbers among all arrays."""
    entry = module.entry
    starts = list(itertools.accumulate((len(p.shape.leaves) for p in entry.parameters), initial=0))
    shapes = {instruction.name: instruction.shape for instruction in entry.instructions}
    pairs: list[list[int]] = []
    for part in split_list(module.attributes.get("input_output_alias", "")[1:-1]):
        match = re.fullmatch(r"\{([\d,\s]*)\}:\s*\((\d+),\s*\{([\d,\s]*)\}.*", part)
        if match is None or int(match[2]) >= len(entry.parameters):
            continue
        result = _leaf_number(shapes[entry.root], match[1])
        argument = _leaf_number(entry.parameters[int(match[2])].shape, match[3])
        if result is not None and argument is not None:
            pairs.append([starts[int(match[2])] + argument, result])
    return pairs


def _leaf_number(shape: Shape, path: str) -> int | None:
    """The number of an array among the arrays of a shape, by the indices that lead to it."""
    number = 0
    for word in path.replace(",", " ").split():
        if shape.parts is None or int(word) >= len(shape.parts):
            return None
        number += sum(len(part.leaves) for part in shape.parts[: int(word)])
        shape = shape.parts[int(word)]
    return number if shape.parts is None else None
