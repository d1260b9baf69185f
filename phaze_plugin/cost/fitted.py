"""Calibrations of real chips, fitted to published runs by `benchmarks/fit_published.py`.

``hardware/data/calibrations.json`` holds one per family of chips: the fitted numbers, what the stack does, the runs
behind them, and the errors that remain (in sample, with each row left out, with each dataset left out).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from phaze.cost.calibration import IDEAL, Calibration, Stack
from phaze.hardware import Accelerator, preset
from phaze.hardware.packaged import packaged_table
from phaze.hardware.presets import preset_names

__all__ = ["calibration_of", "fitted_families", "why_ideal"]


def fitted_families() -> Mapping[str, Mapping[str, Any]]:
    """Every fitted family as its file says it."""
    families: Mapping[str, Mapping[str, Any]] = packaged_table("calibrations")["families"]
    return families


def calibration_of(accelerator: Accelerator) -> Calibration:
    """The calibration that belongs to ``accelerator``; ideal where none was fitted.

    It takes the whole accelerator, because another chip under a preset's name has nothing of its calibration. A chip
    that has more or less memory is the same chip: its size is in no price.
    """
    family = _family_of(accelerator.name)
    if family is None or _changed_fields(accelerator):
        return IDEAL
    return Calibration(name=family["name"], **family["terms"], stack=Stack(**family["stack"]))


def why_ideal(accelerator: Accelerator) -> str | None:
    """What keeps a chip that has a fitted one's name from its calibration, in words; None where nothing does."""
    family, changed = _family_of(accelerator.name), _changed_fields(accelerator)
    if family is None or not changed:
        return None
    return (
        f"{accelerator.name} has another {' and '.join(changed)} than the chip of that name, so that its calibration "
        f"({family['name']}) is not used and prices are ideal; give a calibration to use one"
    )


def _family_of(name: str) -> Mapping[str, Any] | None:
    return next((family for family in fitted_families().values() if name in family["chips"]), None)


def _changed_fields(accelerator: Accelerator) -> list[str]:
    """Fields in which a chip differs from the preset of its name, but for its memory's size."""
    if accelerator.name not in preset_names():
        return []
    known = preset(accelerator.name).accelerator
    names = [field.name for field in fields(Accelerator) if field.name != "hbm_bytes"]
    return [name for name in names if getattr(known, name) != getattr(accelerator, name)]
