"""Accelerators and clusters as JSON documents with a schema version.

{"version": 1, "kind": "accelerator", "accelerator": {<fields>, "rates": {<dtype>: rate}}}
{"version": 1, "kind": "cluster", "cluster": {"device_count": n, "accelerator": {...} or "NAME",
 "levels": [{"size": n, "bandwidth_bytes_per_s": x, "latency_s": x}, ...]}}

A level may also have "links": "ring" or "line" for a dimension of a torus; a switch is not written. A cluster may have
"price_per_device_hour": money that one device costs in an hour, and "host": {"bandwidth_bytes_per_s": x,
"memory_bytes": n}, what each device has of its host, per direction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from phaze.errors import FormatError, HardwareError, shown
from phaze.file_access import read_document, write_whole
from phaze.hardware.accelerator import Accelerator, MatrixRates
from phaze.hardware.chip_presets import known_accelerator
from phaze.hardware.cluster import Cluster, HostLink, InterconnectLevel, Links
from phaze.json_documents import DRAFT, SchemaCheck

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = [
    "FILE_SCHEMAS",
    "accelerator_from_json",
    "accelerator_to_json",
    "cluster_from_json",
    "cluster_to_json",
    "load_accelerator",
    "load_cluster",
    "save_accelerator",
    "save_cluster",
]

_VERSION = 1
"""Of both documents; a file of another version is refused instead of being read wrongly."""
_Value = TypeVar("_Value")


def _fields(kind: type, **others: object) -> dict[str, object]:
    """The schema of a dataclass whose fields are numbers, but for some others; those with a default may be left out."""
    properties = {field.name: others.get(field.name, {"type": "number"}) for field in fields(kind)}
    required = [field.name for field in fields(kind) if field.default is MISSING]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_ACCELERATOR = _fields(Accelerator, name={"type": "string"}, rates=_fields(MatrixRates))
_LEVEL = _fields(InterconnectLevel, links={"enum": [links.value for links in Links]})
_CLUSTER = _fields(
    Cluster,
    accelerator={"anyOf": [_ACCELERATOR, {"type": "string"}]},
    levels={"type": "array", "items": _LEVEL},
    host=_fields(HostLink),
)


def _file_schema(kind: str, body: Mapping[str, object]) -> dict[str, object]:
    properties = {"version": {"const": _VERSION}, "kind": {"const": kind}, kind: body}
    about = {"$schema": DRAFT, "title": f"a saved {kind}", "type": "object"}
    return {**about, "properties": properties, "required": list(properties), "additionalProperties": False}


FILE_SCHEMAS: Mapping[str, Mapping[str, object]] = {
    "accelerator": _file_schema("accelerator", _ACCELERATOR),
    "cluster": _file_schema("cluster", _CLUSTER),
}
"""What the files are made of. Whether numbers can be those of a chip or a network, their classes check."""

_check_accelerator, _check_cluster = SchemaCheck(_ACCELERATOR), SchemaCheck(_CLUSTER)
_check_file = {kind: SchemaCheck(schema) for kind, schema in FILE_SCHEMAS.items()}


def accelerator_to_json(accelerator: Accelerator) -> dict[str, object]:
    """The accelerator's fields as JSON values."""
    return asdict(accelerator)


def accelerator_from_json(document: object) -> Accelerator:
    """The accelerator that ``document`` describes.

    Fields that are missing, unknown or of the wrong type are a `FormatError`, values that cannot be a `HardwareError`.
    """
    _check_accelerator(document, "accelerator")
    return _accelerator(cast("dict[str, Any]", document))


def _accelerator(body: Mapping[str, Any]) -> Accelerator:
    rates = _construct("rates", MatrixRates, body.get("rates", {}))
    return _construct("accelerator", Accelerator, {**body, "rates": rates})


def cluster_to_json(cluster: Cluster) -> dict[str, object]:
    """The cluster's fields as JSON values."""
    document = asdict(cluster)
    for level in document["levels"]:
        links = level.pop("links")
        if links.is_row:
            level["links"] = links.value
    return {name: value for name, value in document.items() if value is not None}


def cluster_from_json(document: object, plugins: PluginManager | None = None) -> Cluster:
    """The cluster that ``document`` describes; its accelerator is an object, or a name as `known_accelerator` takes it.

    It raises as `accelerator_from_json` does, and `UnknownNameError` for a name that nobody knows.
    """
    _check_cluster(document, "cluster")
    body = cast("dict[str, Any]", document)
    chip = body["accelerator"]
    accelerator = known_accelerator(chip, plugins) if isinstance(chip, str) else _accelerator(chip)
    levels = tuple(_construct("level", InterconnectLevel, level) for level in body.get("levels", []))
    host = {"host": _construct("host", HostLink, body["host"])} if "host" in body else {}
    return _construct("cluster", Cluster, {**body, "accelerator": accelerator, "levels": levels, **host})


def save_accelerator(accelerator: Accelerator, path: str | Path) -> None:
    """Write ``accelerator`` to ``path``."""
    _write(path, "accelerator", accelerator_to_json(accelerator))


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write ``cluster`` to ``path``."""
    _write(path, "cluster", cluster_to_json(cluster))


def load_accelerator(path: str | Path) -> Accelerator:
    """Read the accelerator in ``path``; a missing, damaged or foreign file is a `FormatError`."""
    return accelerator_from_json(_load(path, "accelerator"))


def load_cluster(path: str | Path, plugins: PluginManager | None = None) -> Cluster:
    """Read the cluster in ``path``; a missing, damaged or foreign file is a `FormatError`."""
    return cluster_from_json(_load(path, "cluster"), plugins)


def _write(path: str | Path, kind: str, body: dict[str, object]) -> None:
    write_whole(path, json.dumps({"version": _VERSION, "kind": kind, kind: body}, indent=1) + "\n")


def _load(path: str | Path, kind: str) -> object:
    envelope = read_document(path, f"the file of a saved {kind}")
    if not isinstance(envelope, dict) or envelope.get("kind") != kind:
        found = shown(envelope.get("kind")) if isinstance(envelope, dict) else "not there"
        raise FormatError(f"{path}: kind is {found}; expected {kind!r}.")
    if envelope.get("version") != _VERSION:
        found = shown(envelope.get("version"))
        raise FormatError(f"{path}: version is {found}; this Phaze reads version {_VERSION}.")
    _check_file[kind](envelope, str(path))
    return envelope[kind]


def _construct(owner: str, kind: Callable[..., _Value], body: Mapping[str, object]) -> _Value:
    try:
        return kind(**body)
    except HardwareError as error:
        raise HardwareError(f"{owner}: {error}") from error
