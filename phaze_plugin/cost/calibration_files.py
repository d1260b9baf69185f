"""Calibrations as files: what `phaze calibrate` writes, and what `--calibration` and ``calibration=`` read."""

from __future__ import annotations

import json
import os
from typing import Any

from phaze.cost.calibration import Calibration
from phaze.errors import FormatError, shown
from phaze.json_records import from_document, read_document, to_document, write_whole

__all__ = ["load_calibration", "save_calibration"]

_KIND, _VERSION = "phaze calibration", 1


def save_calibration(
    path: str | os.PathLike[str], calibration: Calibration, *, report: dict[str, Any] | None = None
) -> None:
    """Write a calibration; ``report`` says how it was obtained and is not read again."""
    document = {"kind": _KIND, "version": _VERSION, "calibration": to_document(calibration), "report": report or {}}
    write_whole(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Read a calibration; raises FormatError where the file is none, is damaged or is of another version."""
    document = read_document(path, "a calibration")
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise FormatError(f"{os.fspath(path)} is no calibration; expected a file that `phaze calibrate` wrote.")
    if document.get("version") != _VERSION:
        raise FormatError(
            f"{os.fspath(path)} has version {shown(document.get('version'))}; this program reads version {_VERSION}. "
            "Calibrate again."
        )
    return from_document(Calibration, document.get("calibration"), "calibration")
