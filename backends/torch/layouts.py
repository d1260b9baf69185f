"""Layouts of a plan as torch stores them, and the names of layers as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phaze.plan.plan import SplitDim

__all__ = ["blocks_of", "cut_of"]


def cut_of(splits: Sequence[SplitDim]) -> tuple[int, int]:
    """A layout as one cut: a dimension, and the equal runs of it inside of which it is cut.

    Splits of several factors that lie side by side in one dimension are one cut. A layout that cuts two dimensions is
    stored cut along the first: as many bytes, and what reads it gathers where it must.
    """
    first = min(splits, key=lambda split: (split.dim, split.outer))
    return first.dim, first.outer


def blocks_of(layers: Sequence[str], module: Any) -> list[str]:
    """Those of a stage's layers (`number:path`) that are modules of their own: its blocks."""
    known = {name for name, _ in module.named_modules()}
    paths = [layer.partition(":")[2] for layer in layers]
    return [path for path in paths if path in known]
