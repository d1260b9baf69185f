"""Scheduling problems in the JSON form of the published instances.

An instance has `name`, `tensor_cores`, `vector_cores`, `intra_op_exclusive`, `ops` (`id`, `core` one of TC, VC,
TCandVC, Nop, Link, `latency`, `intra_op_latency`), `edges` as pairs of ids, and if known its optimum, `makespan`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phaze.errors import FormatError
from phaze.schedule.scheduling_problem import Job, Resource, SchedulingProblem

__all__ = ["Instance", "read_instances"]

_RESOURCES = {
    "TC": Resource.TENSOR,
    "VC": Resource.VECTOR,
    "TCandVC": Resource.BOTH,
    "Nop": Resource.NONE,
    "Link": Resource.LINK,
}


@dataclass(frozen=True, slots=True)
class Instance:
    """A problem with its known optimum, if any."""

    problem: SchedulingProblem
    makespan: float | None


def read_instances(path: Path) -> list[Instance]:
    """All instances of a file; FormatError says what is wrong with which one, ScheduleError what it asks for."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read as JSON ({error}); expected a list of instances") from error
    if not isinstance(entries, list):
        raise FormatError(f"{path}: holds a {type(entries).__name__}; expected a list of instances")
    return [_instance(entry, f"{path.name}[{number}]") for number, entry in enumerate(entries)]


def _instance(entry: Any, where: str) -> Instance:
    try:
        name = str(entry.get("name", where))
        position = {op["id"]: at for at, op in enumerate(entry["ops"])}
        problem = SchedulingProblem(
            jobs=tuple(_job(op, where) for op in entry["ops"]),
            edges=tuple((position[before], position[after]) for before, after in entry["edges"]),
            tensor_cores=int(entry["tensor_cores"]),
            vector_cores=int(entry["vector_cores"]),
            intra_op_exclusive=bool(entry["intra_op_exclusive"]),
            name=name,
        )
        known = entry.get("makespan")
        return Instance(problem, None if known is None else float(known))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{where}: {type(error).__name__} {error}; expected the fields of a schedule instance"
        ) from error


def _job(entry: dict[str, Any], where: str) -> Job:
    if entry["core"] not in _RESOURCES:
        raise FormatError(
            f"{where}: op {entry['id']} has core {entry['core']!r}; expected one of {', '.join(_RESOURCES)}"
        )
    return Job(
        str(entry["id"]),
        _RESOURCES[entry["core"]],
        float(entry["latency"]),
        float(entry.get("intra_op_latency", math.inf)),
    )
