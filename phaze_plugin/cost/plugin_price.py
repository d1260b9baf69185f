"""Prices that plugins bring, and what is asked of them.

A price is named after an op's kind and function (``elementwise.gelu``), its function (``gelu``) or its kind
(``elementwise``); the first of these that exists wins. Its answer is an `Estimate` of one op on the accelerators asked
about: finite, never negative, above zero seconds unless the op is a view, and no slower on all cores than on one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from phaze.cost.estimate import BINDINGS, CoreKind, Estimate
from phaze.errors import PluginError
from phaze.hardware import AcceleratorArray
from phaze.ir import Graph, Op, OpKind

if TYPE_CHECKING:
    from phaze.hooks import PluginManager
    from phaze.interfaces import OpPricer

__all__ = ["plugin_price", "plugin_price_name", "plugin_prices"]


def plugin_prices(manager: PluginManager | None = None) -> dict[str, OpPricer]:
    """The prices that plugins bring: those of ``manager``, or of all installed ones.

    Two plugins that price the same ops are a `PluginError`.
    """
    from phaze.hooks import PluginManager

    return (manager or PluginManager.load()).op_prices().to_mapping()


def plugin_price_name(op: Op, prices: Mapping[str, OpPricer]) -> str | None:
    """The name of the price that wins for ``op``, or None where no plugin prices it."""
    return next((name for name in (f"{op.kind}.{op.function}", op.function, str(op.kind)) if name in prices), None)


def plugin_price(name: str, price: OpPricer, graph: Graph, op: Op, chips: AcceleratorArray) -> Estimate:
    """The checked answer of one price; a `PluginError` says what is wrong with it."""
    try:
        answer: object = price(graph, op, chips)
    except Exception as error:
        raise PluginError(f"the price {name!r} failed on op {op.id!r}: {type(error).__name__}: {error}") from error
    if not isinstance(answer, Estimate) or not _has_shape(answer, (1, len(chips))):
        raise PluginError(
            f"the price {name!r} of op {op.id!r} is not an Estimate of 1 op on {len(chips)} accelerators."
        )
    if complaint := _complaint(answer, op):
        raise PluginError(f"the price {name!r} of op {op.id!r}: {complaint}.")
    return answer


def _has_shape(answer: Estimate, shape: tuple[int, int]) -> bool:
    arrays = [getattr(answer, field.name) for field in fields(Estimate) if field.name != "kinds"]
    is_shaped = all(isinstance(array, np.ndarray) and array.shape == shape for array in arrays)
    return is_shaped and len(answer.kinds) == 1 and isinstance(answer.kinds[0], CoreKind)


def _complaint(answer: Estimate, op: Op) -> str:
    """What is wrong with the numbers, or nothing."""
    for name in ("core_s", "spread_s", "core_bytes", "spread_bytes", "core_energy_j", "spread_energy_j"):
        values = getattr(answer, name)
        may_be_zero = op.kind is OpKind.VIEW or not name.endswith("_s")
        is_right = np.isfinite(values) & ((values >= 0) if may_be_zero else (values > 0))
        if not is_right.all():
            expected = "at least 0" if may_be_zero else "above 0: only views cost nothing"
            return f"{name} is {float(values[~is_right][0])}; expected finite numbers, {expected}"
    if (answer.spread_s > answer.core_s).any():
        return "spread_s exceeds core_s; an op spread over all cores is never slower than on one"
    if max(answer.core_binding.max(initial=0), answer.spread_binding.max(initial=0)) >= len(BINDINGS):
        return f"a binding code is outside 0 to {len(BINDINGS) - 1}"
    return ""
