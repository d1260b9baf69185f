"""Accelerators and clusters as JSON documents with a schema version.

{"version": 1, "kind": "accelerator", "accelerator": {<fields>, "rates": {<dtype>: rate}}}
{"version": 1, "kind": "cluster", "cluster": {"device_count": n, "accelerator": {...} or "NAME",
 "levels": [{"size": n, "bandwidth_bytes_per_s": x, "latency_s": x}, ...]}}

A level may also have "links": "ring" or "line" for a dimension of a torus; a switch is not written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from phaze.errors import FormatError, HardwareError, shown
from phaze.file_reading import read_document
from phaze.file_writing import write_whole
from phaze.hardware.accelerator import Accelerator, MatrixRates
from phaze.hardware.chip_presets import known_accelerator
from phaze.hardware.cluster import Cluster, InterconnectLevel

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = [
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


def accelerator_to_json(accelerator: Accelerator) -> dict[str, object]:
    """The accelerator's fields as JSON values."""
    return asdict(accelerator)


def accelerator_from_json(document: object) -> Accelerator:
    """The accelerator that ``document`` describes.

    Fields that are missing, unknown or of the wrong type are a `FormatError`, values that cannot be a `HardwareError`.
    """
    body = dict(_json_object("accelerator", document))
    rates = _construct("rates", MatrixRates, _json_object("rates", body.pop("rates", {})))
    return _construct("accelerator", Accelerator, body | {"rates": rates})


def cluster_to_json(cluster: Cluster) -> dict[str, object]:
    """The cluster's fields as JSON values."""
    document = asdict(cluster)
    for level in document["levels"]:
        links = level.pop("links")
        if links.is_row:
            level["links"] = links.value
    return document


def cluster_from_json(document: object, plugins: PluginManager | None = None) -> Cluster:
    """The cluster that ``document`` describes; its accelerator is an object, or a name as `known_accelerator` takes it.

    It raises as `accelerator_from_json` does, and `UnknownNameError` for a name that nobody knows.
    """
    body = dict(_json_object("cluster", document))
    chip = body.pop("accelerator", None)
    accelerator = known_accelerator(chip, plugins) if isinstance(chip, str) else accelerator_from_json(chip)
    levels = body.pop("levels", [])
    if not isinstance(levels, list):
        raise FormatError(f"cluster: levels is {type(levels).__name__}; expected a list, innermost first.")
    links = tuple(_construct("level", InterconnectLevel, _json_object("level", level)) for level in levels)
    return _construct("cluster", Cluster, body | {"accelerator": accelerator, "levels": links})


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
    envelope = _json_object(str(path), read_document(path, f"the file of a saved {kind}"))
    if envelope.get("kind") != kind:
        raise FormatError(f"{path}: kind is {shown(envelope.get('kind'))}; expected {kind!r}.")
    if envelope.get("version") != _VERSION:
        found = shown(envelope.get("version"))
        raise FormatError(f"{path}: version is {found}; this Phaze reads version {_VERSION}.")
    return envelope.get(kind)


def _json_object(owner: str, document: object) -> dict[str, object]:
    if not isinstance(document, dict):
        raise FormatError(f"{owner}: expected a JSON object, found {type(document).__name__}.")
    return document


def _construct(owner: str, kind: Callable[..., _Value], body: dict[str, object]) -> _Value:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(body) - known):
        raise FormatError(f"{owner}: unknown field {unknown[0]!r}; known fields are {', '.join(sorted(known))}.")
    try:
        return kind(**body)
    except TypeError as error:
        raise FormatError(f"{owner}: {error}.") from error
    except HardwareError as error:
        raise HardwareError(f"{owner}: {error}") from error
