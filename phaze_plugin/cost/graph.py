"""Prices of a graph's ops, singly or fused, on every accelerator.

A plugin's price wins over the built-in one; callers pass the prices that they want (`plugin_prices` finds those of the
installed plugins, which takes longer than pricing a layer, so it is asked once and not here). A fused group with an op
that a plugin prices is priced as its ops one after the other. Equal works are priced once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phaze.cost.calibration import IDEAL, Calibration
from phaze.cost.estimate import Estimate, stack_estimates, total_estimate
from phaze.cost.fusion import OpGroup, group_work, single_groups
from phaze.cost.op_work import op_work
from phaze.cost.plugin_price import plugin_price, plugin_price_name
from phaze.cost.price import price_works
from phaze.cost.work import Work
from phaze.hardware import Accelerator, AcceleratorArray
from phaze.hardware.energy import EnergyModel
from phaze.ir import Graph, Op

if TYPE_CHECKING:
    from phaze.interfaces import OpPricer

__all__ = ["price_groups", "price_ops"]


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
    """Prices of groups: row i is ``groups[i]``; ``prices`` win over the built-in ones.

    An op that nobody prices is a `CostError`; a price that fails or cannot be a `PluginError`.
    """
    chips = AcceleratorArray.of([accelerators]) if isinstance(accelerators, Accelerator) else accelerators
    offered = prices or {}
    works: dict[Work, int] = {}
    rows: list[int | Estimate] = []
    for group in groups:
        if any(plugin_price_name(op, offered) for op in group.ops):
            apart = [_price_alone(graph, op, chips, calibration, energy, offered) for op in group.ops]
            rows.append(total_estimate(stack_estimates(apart)))
        else:
            rows.append(works.setdefault(group_work(group, graph.tensors), len(works)))
    if not rows:
        return Estimate.empty([], len(chips))
    built_in = price_works(tuple(works), chips, calibration=calibration, energy=energy)
    return stack_estimates([built_in.rows([row]) if isinstance(row, int) else row for row in rows])


def _price_alone(
    graph: Graph,
    op: Op,
    chips: AcceleratorArray,
    calibration: Calibration,
    energy: EnergyModel | None,
    prices: Mapping[str, OpPricer],
) -> Estimate:
    name = plugin_price_name(op, prices)
    if name is not None:
        return plugin_price(name, prices[name], graph, op, chips)
    return price_works([op_work(op, graph.tensors)], chips, calibration=calibration, energy=energy)
