"""Which devices work together under a strategy, and which links of the cluster their traffic crosses.

Ranks stand as plans list them: tensor-parallel neighbours side by side, then the parts of a sequence, then the copies,
then the pipeline's places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from phaze.hardware import InterconnectLevel
from phaze.plan.plan import Plan

__all__ = ["Traffic", "link_traffic", "places"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One kind of traffic: who takes part, what they send, and the outermost level of links that it crosses.

    `level` is the number of that level from inside, None where everything stays on one device.
    """

    name: str
    devices: int
    sends: str
    level: int | None


def places(plan: Plan) -> list[tuple[int, tuple[int, ...]]]:
    """The tp and the ranks of every place along the pipeline."""
    by_place = {stage.place: (stage.tp, stage.devices) for stage in plan.stages}
    return [by_place[place] for place in sorted(by_place)]


def link_traffic(plan: Plan) -> list[Traffic]:
    """Tensor, context, expert, data and pipeline traffic of a plan, as far as it has any."""
    strategy, levels, rows = plan.strategy, plan.cluster.levels, places(plan)
    traffic = []
    groups: list[tuple[int, ...]]
    tp, ranks = max(rows, key=lambda row: row[0])
    if tp > 1:
        sends = "gathers and scatters of activations" if strategy.sequence_parallel else "sums of activations"
        groups = [ranks[first : first + tp] for first in range(0, len(ranks), tp)]
        traffic.append(_traffic("tensor parallel (tp)", tp, f"{sends}, in every layer", groups, levels))
    copies = ranks[::tp]  # the other tensor-parallel ranks lie beside them
    for name, size, sends in (
        ("context parallel (cp)", strategy.cp, "keys and values, in every layer with attention"),
        ("expert parallel (ep)", strategy.ep, "tokens to their experts and back, in every layer with experts"),
    ):
        if size > 1:
            groups = [copies[first : first + size] for first in range(0, len(copies), size)]
            traffic.append(_traffic(name, size, sends, groups, levels))
    shard = strategy.shard_devices if strategy.zero else strategy.replicas
    if shard > 1:
        groups = [copies[first : first + shard] for first in range(0, len(copies), shard)]
        sends = "gradients, once a step" if strategy.zero < 2 else "gradients, with every microbatch"
        sends += {0: "", 3: "; parameters in every pass"}.get(strategy.zero, "; updated parameters")
        name = "data parallel (dp)" if strategy.cp == 1 else "data parallel (dp x cp)"
        name = name if shard == strategy.replicas else f"ZeRO-{strategy.zero} group"
        traffic.append(_traffic(name, shard, sends, groups, levels))
    if shard < strategy.replicas:
        groups = [copies[first::shard] for first in range(shard)]
        count = strategy.replicas // shard
        traffic.append(_traffic("copies of the group", count, "shards of gradients, once a step", groups, levels))
    if strategy.pp > 1:
        groups = [(before[1][0], after[1][0]) for before, after in pairwise(rows)]
        sends = "activations and their gradients, with every microbatch"
        traffic.append(_traffic("pipeline (pp)", strategy.pp, sends, groups, levels))
    return traffic


def _traffic(
    name: str, devices: int, sends: str, groups: Sequence[Sequence[int]], levels: Sequence[InterconnectLevel]
) -> Traffic:
    crossed = [_crossed_level(group, levels) for group in groups]
    level = max((number for number in crossed if number is not None), default=None)
    return Traffic(name=name, devices=devices, sends=sends, level=level)


def _crossed_level(ranks: Sequence[int], levels: Sequence[InterconnectLevel]) -> int | None:
    """The innermost level whose devices include all of these ranks."""
    if len(set(ranks)) < 2 or not levels:
        return None
    for number in range(len(levels)):
        size = math.prod(level.size for level in levels[: number + 1])
        if len({rank // size for rank in ranks}) == 1:
            return number
    return len(levels) - 1
