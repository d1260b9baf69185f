"""Prices of a graph's ops, singly or fused, on every accelerator.

A plugin's price (hook `phaze_op_prices`) wins over the built-in one. It is named after an op's kind and function
(``elementwise.gelu``), its function (``gelu``) or its kind (``elementwise``); the first of these that exists wins. A
fused group with an op that a plugin prices is priced as its ops one after the other. Equal works are priced once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phaze.cost.calibration import IDEAL, Calibration
from phaze.cost.estimate import Estimate, stack_estimates, total_estimate
from phaze.cost.fusion import OpGroup, group_work, single_groups
from phaze.cost.op_work import op_work
from phaze.cost.price import price_works
from phaze.cost.work import Work
from phaze.errors import PluginError
from phaze.hardware import Accelerator, AcceleratorArray
from phaze.hardware.energy import EnergyModel
from phaze.ir import Graph, Op

if TYPE_CHECKING:
    from phaze.interfaces import OpPricer

__all__ = ["plugin_prices", "price_groups", "price_ops"]


def plugin_prices() -> dict[str, OpPricer]:
    """The prices that installed plugins bring.

    Raises:
        PluginError: two plugins price the same ops.
    """
    from phaze.hooks import PluginManager

    return PluginManager.load().op_prices().to_mapping()


def price_ops(
    graph: Graph,
    ops: Sequence[Op],
    accelerators: AcceleratorArray | Accelerator,
    *,
    calibration: Calibration = IDEAL,
    energy: EnergyModel | None = None,
    prices: Mapping[str, OpPricer] | None = None,
) -> Estimate:
    """Prices of single ops: row i is ``ops[i]``; see `price_groups`."""
    return price_groups(graph, single_groups(ops), accelerators, calibration=calibration, energy=energy, prices=prices)


def price_groups(
    graph: Graph,
    groups: Sequence[OpGroup],
    accelerators: AcceleratorArray | Accelerator,
    *,
    calibration: Calibration = IDEAL,
    energy: EnergyModel | None = None,
    prices: Mapping[str, OpPricer] | None = None,
) -> Estimate:
    """Prices of groups: row i is ``groups[i]``. ``prices`` defaults to those of the installed plugins.

    Raises:
        CostError: nobody prices an op.
        PluginError: a plugin's price failed, or has another shape than was asked for.
    """
    chips = AcceleratorArray.of([accelerators]) if isinstance(accelerators, Accelerator) else accelerators
    offered = plugin_prices() if prices is None else prices
    works: dict[Work, int] = {}
    rows: list[int | Estimate] = []
    for group in groups:
        if any(_plugin_name(op, offered) for op in group.ops):
            apart = [_price_alone(graph, op, chips, calibration, energy, offered) for op in group.ops]
            rows.append(total_estimate(stack_estimates(apart)))
        else:
            rows.append(works.setdefault(group_work(group, graph.tensors), len(works)))
    if not rows:
        return Estimate.empty([], len(chips))
    built_in = price_works(tuple(works), chips, calibration=calibration, energy=energy)
    return stack_estimates([built_in.rows([row]) if isinstance(row, int) else row for row in rows])


def _plugin_name(op: Op, prices: Mapping[str, OpPricer]) -> str | None:
    return next((name for name in (f"{op.kind}.{op.function}", op.function, str(op.kind)) if name in prices), None)


def _price_alone(
    graph: Graph,
    op: Op,
    chips: AcceleratorArray,
    calibration: Calibration,
    energy: EnergyModel | None,
    prices: Mapping[str, OpPricer],
) -> Estimate:
    name = _plugin_name(op, prices)
    if name is None:
        work = op_work(op, graph.tensors)
        return price_works([work], chips, calibration=calibration, energy=energy)
    try:
        answer: object = prices[name](graph, op, chips)
    except Exception as error:
        raise PluginError(f"the price {name!r} failed on op {op.id!r}: {type(error).__name__}: {error}") from error
    if not isinstance(answer, Estimate) or answer.core_s.shape != (1, len(chips)):
        raise PluginError(
            f"the price {name!r} of op {op.id!r} is not an Estimate of 1 op on {len(chips)} accelerators."
        )
    return answer
