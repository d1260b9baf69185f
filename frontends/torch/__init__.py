"""The torch frontend: modules, fx graphs and exported programs into graphs, forward and backward, without weights.

This file is the door of the package and imports no framework; the modules behind it import torch at their top.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from phaze.hooks import hookimpl
from phaze.interfaces import Frontend
from phaze.ir import Graph

__all__ = ["TorchFrontend", "phaze_frontends"]


@dataclass(frozen=True, slots=True)
class TorchFrontend:
    """Takes an nn.Module (fx.GraphModule included) or an ExportedProgram.

    Options: `loss_fn` (of the output, and of `targets` where those are given), `dtype` (a torch dtype to capture in),
    `sequence_length` (for Hugging Face models captured without inputs), `micro_batch_size` (other than the inputs').
    """

    name: str = "torch"
    libraries: tuple[str, ...] = ("torch",)
    options: tuple[str, ...] = ("loss_fn", "targets", "dtype", "sequence_length", "micro_batch_size")

    def accepts(self, model: object) -> bool:
        """Whether this is a module or an exported program; torch is not imported to find out."""
        torch = sys.modules.get("torch")
        if torch is None:
            return False
        return isinstance(model, torch.nn.Module | torch.export.ExportedProgram)

    def import_model(self, model: object, inputs: object, options: Mapping[str, object]) -> Graph:
        """The training graph; raises ImportModelError where the model cannot be captured."""
        # Here and not at the top, because plugins are loaded before anyone knows whether torch is needed.
        from phaze.frontends.torch.importing import import_module

        return import_module(model, inputs, options)


@hookimpl
def phaze_frontends() -> tuple[Frontend, ...]:
    """The frontend for torch."""
    return (TorchFrontend(),)
