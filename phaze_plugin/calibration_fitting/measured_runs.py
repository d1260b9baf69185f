"""Measured runs: what was trained, how, and how long a step took; read from a CSV table of one run a line.

The first line names the columns:

model, cluster, global_batch, seconds                    must be there
name, precision, sequence_length, memory_gib,            may be
dp, cp, ep, tp, expert_tp, pp, micro_batch_size,         and are the keys of a strategy
schedule, chunks, zero, shard, sequence_parallel,
recompute
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from phaze.cost import Stack
from phaze.errors import FormatError, meant, shown
from phaze.file_access import read_text
from phaze.hardware import Cluster, PrecisionRecipe

__all__ = [
    "COLUMNS",
    "OPTIONAL",
    "REQUIRED",
    "Run",
    "read_steps",
]

_Value = TypeVar("_Value")
REQUIRED = ("model", "cluster", "global_batch", "seconds")
_COUNTS = ("dp", "cp", "ep", "tp", "expert_tp", "pp", "micro_batch_size", "chunks", "zero", "shard")
_WORDS = ("schedule", "recompute")
OPTIONAL = ("name", "precision", "attention", "sequence_length", "memory_gib", *_COUNTS, *_WORDS, "sequence_parallel")
COLUMNS = (*REQUIRED, *OPTIONAL)

_BYTES_PER_GIB = 2**30
_MOST_DIGITS = 18
"""Digits of a count: more do not fit 64 bits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A run that somebody measured.

    Attributes:
        name: what it is called in reports.
        model: anything that `phaze.import_graph` takes.
        cluster: as `phaze.optimize` takes it.
        global_batch_size: sequences per step.
        strategy: as `phaze.evaluate` takes it; what it lacks is filled in by `complete_strategy`.
        seconds: of one step.
        precision: as `phaze.optimize` takes it.
        sequence_length: instead of the model's own.
        memory_bytes: of the fullest device, where known.
        stack: where it differs from that of the other runs.
        attention: how it ran, "fused" or "unfused"; None for what the chip's software does.
        weight: how much the run counts in a fit.
        blocks: how many equal blocks the model has in a row, where ``model`` shows four of them only: whoever prepares
            runs of many depths imports and slices one.
    """

    name: str
    model: object
    cluster: str | Cluster
    global_batch_size: int
    strategy: Mapping[str, object]
    seconds: float
    precision: str | PrecisionRecipe = "bf16"
    sequence_length: int | None = None
    memory_bytes: float | None = None
    stack: Stack | None = None
    attention: str | None = None
    weight: float = 1.0
    blocks: int | None = None


def read_steps(path: str | os.PathLike[str]) -> list[Run]:
    """The runs of a table; raises FormatError naming the file, the line and the column that is wrong."""
    where = os.fspath(path)
    text = read_text(path, "a CSV table of measured steps", encoding="utf-8-sig")
    reader = csv.DictReader(text.splitlines())
    runs = []
    try:
        columns = [column.strip() for column in reader.fieldnames or ()]
        _check_columns(where, columns)
        for line in reader:
            cells = {str(key).strip(): (value or "").strip() for key, value in line.items() if key is not None}
            if any(cells.values()):
                runs.append(_run(where, reader.line_num, cells))
    except csv.Error as error:
        raise FormatError(f"{where}, line {reader.line_num} is no line of a CSV table: {error}.") from error
    if not runs:
        raise FormatError(f"{where} has no rows; expected one measured step a line under {', '.join(REQUIRED)}.")
    return runs


def _check_columns(where: str, columns: list[str]) -> None:
    if missing := [name for name in REQUIRED if name not in columns]:
        raise FormatError(
            f"{where} has the columns {', '.join(columns) or 'none'} and lacks {', '.join(missing)}; expected "
            f"{', '.join(REQUIRED)}, and of {', '.join(OPTIONAL)} those that are known."
        )
    for column in columns:
        if column not in COLUMNS:
            hint = meant(column, COLUMNS)
            raise FormatError(f"{where} has the unknown column {shown(column)}.{hint} Known: {', '.join(COLUMNS)}.")


def _run(path: str, line: int, cells: dict[str, str]) -> Run:
    """The run in one line of the table at ``path``."""
    where = f"{path}, line {line}"
    strategy: dict[str, object] = {name: _cell(where, cells, name, _COUNT) for name in _COUNTS if cells.get(name)}
    strategy |= {name: cells[name] for name in _WORDS if cells.get(name)}
    if cells.get("sequence_parallel"):
        strategy["sequence_parallel"] = _cell(where, cells, "sequence_parallel", _FLAG)
    memory = _cell(where, cells, "memory_gib", _POSITIVE) if cells.get("memory_gib") else None
    if not cells["model"] or not cells["cluster"]:
        raise FormatError(f"{where}: model or cluster is empty; expected such as gpt2 and a100-80gb:8.")
    return Run(
        name=cells.get("name") or f"line {line}: {cells['model']} on {cells['cluster']}",
        model=cells["model"],
        cluster=cells["cluster"],
        global_batch_size=_cell(where, cells, "global_batch", _COUNT),
        strategy=strategy,
        seconds=_cell(where, cells, "seconds", _POSITIVE),
        precision=cells.get("precision") or "bf16",
        attention=cells.get("attention") or None,
        sequence_length=_cell(where, cells, "sequence_length", _COUNT) if cells.get("sequence_length") else None,
        memory_bytes=None if memory is None else memory * _BYTES_PER_GIB,
    )


@dataclass(frozen=True, slots=True)
class _CellType(Generic[_Value]):
    """How a cell's text is read (None where it cannot be), and what is expected there, in words."""

    read: Callable[[str], _Value | None]
    expected: str


def _cell(where: str, cells: dict[str, str], name: str, cell_type: _CellType[_Value]) -> _Value:
    value = cell_type.read(cells.get(name, ""))
    if value is None:
        raise FormatError(f"{where}: {name} is {shown(cells.get(name, ''))}; expected {cell_type.expected}.")
    return value


def _count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _flag(text: str) -> bool | None:
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(text.casefold())


_COUNT = _CellType(_count, "a whole number")
_POSITIVE = _CellType(_positive, "a positive number")
_FLAG = _CellType(_flag, "true or false")
