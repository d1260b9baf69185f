"""The frontend for JAX: functions, lowered functions, jaxprs, linen and nnx modules into graphs, without their weights.

The door of the package: JAX and `importing.py` are loaded when a first model is imported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from phaze.hooks import hookimpl
from phaze.interfaces import Frontend
from phaze.ir import Graph

__all__ = [
    "LINEN_MODULE",
    "NNX_MODULE",
    "NNX_OBJECT",
    "NNX_OPTIMIZER",
    "JaxFrontend",
    "class_names",
    "phaze_frontends",
]

LINEN_MODULE = "flax.linen.module.Module"
NNX_MODULE = "flax.nnx.module.Module"
NNX_OBJECT = "flax.nnx.pytreelib.Pytree"
NNX_OPTIMIZER = "flax.nnx.training.optimizer.Optimizer"
NNX_JITTED = "flax.nnx.transforms.compilation.JitWrapped"


def class_names(model: object) -> set[str]:
    """The whole names of a model's class and its bases: flax modules are told by them, so that flax is not imported."""
    return {f"{base.__module__}.{base.__name__}" for base in type(model).__mro__}


@dataclass(frozen=True, slots=True)
class JaxFrontend:
    """Takes a loss function or a whole train step, plain or jitted, a `Lowered`, a jaxpr, a linen or an nnx module.

    Options: `parameters` and `batch` (argument numbers or pytree paths; by default the first argument of a loss holds
    the parameters, and those of a step are inferred), `loss_fn` (of a module's output, and of `targets` where those are
    given), `micro_batch_size` (other than the inputs').
    """

    name: str = "jax"
    libraries: tuple[str, ...] = ("jax",)
    options: tuple[str, ...] = ("parameters", "batch", "loss_fn", "targets", "micro_batch_size")

    def accepts(self, model: object) -> bool:
        """Whether this is something of JAX, or a function where JAX is in use; JAX is not imported to find out."""
        if "jax" not in sys.modules:
            return False
        module = type(model).__module__
        if module.startswith(("jax.", "jaxlib.", "jax._src")) and type(model).__name__ != "ArrayImpl":
            return True
        if not class_names(model).isdisjoint({LINEN_MODULE, NNX_MODULE}):
            return True
        return inspect.isroutine(model) or isinstance(model, partial) or NNX_JITTED in class_names(model)

    def import_model(self, model: object, inputs: object, options: Mapping[str, object]) -> Graph:
        """The training graph; raises ImportModelError where the model cannot be traced."""
        from phaze.frontends.jax.importing import import_model

        return import_model(model, inputs, options)


@hookimpl
def phaze_frontends() -> tuple[Frontend, ...]:
    """The frontend for JAX."""
    return (JaxFrontend(),)
