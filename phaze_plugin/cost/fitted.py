"""Calibrations of real chips, fitted to published runs by `benchmarks/fit_published.py`.

``hardware/data/calibrations.json`` holds one per family of chips: the fitted numbers, what the stack does, the runs
behind them, and the errors that remain (in sample, with each row left out, with each dataset left out).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phaze.cost.calibration import IDEAL, Calibration, Stack
from phaze.hardware import Accelerator, preset
from phaze.hardware.packaged import packaged_table
from phaze.hardware.presets import preset_names

__all__ = ["calibration_of", "fitted_families"]


def fitted_families() -> Mapping[str, Mapping[str, Any]]:
    """Every fitted family as its file says it."""
    families: Mapping[str, Mapping[str, Any]] = packaged_table("calibrations")["families"]
    return families


def calibration_of(accelerator: Accelerator) -> Calibration:
    """The calibration that belongs to ``accelerator``; ideal where none was fitted.

    It takes the whole accelerator, because another chip under a preset's name has nothing of its calibration. A chip
    that has more or less memory is the same chip: its size is in no price.
    """
    if accelerator.name not in preset_names():
        return IDEAL
    if replace(preset(accelerator.name).accelerator, hbm_bytes=accelerator.hbm_bytes) != accelerator:
        return IDEAL
    for family in fitted_families().values():
        if accelerator.name in family["chips"]:
            return Calibration(name=family["name"], **family["terms"], stack=Stack(**family["stack"]))
    return IDEAL
