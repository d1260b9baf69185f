"""What the page of a plan tells, ready to be shown: sentences, the links that traffic crosses, the timeline in columns.

Sentences tell a plan's strategy (`strategy_sentence`) and its certainty (`uncertainty_text`) to people who do not know
the letters.

`places` says which devices work together under a strategy, and `link_traffic` which links of the cluster their traffic
crosses. Ranks stand as plans list them: tensor-parallel neighbours side by side, then the parts of a sequence, then the
copies, then the pipeline's places.

`timeline_columns` is a timeline as a page holds it: columns of whole numbers, deflated, in base64. A pipeline of many
stages and microbatches has a hundred thousand events. As differences in whole ticks they repeat themselves, so that a
page stays far below a megabyte.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from phaze.cost.calibration import fitted_families
from phaze.hardware import InterconnectLevel
from phaze.parallelism import Parallelism
from phaze.place.simulation.timeline import KINDS, Timeline
from phaze.plan.plan import Plan

__all__ = ["Traffic", "link_traffic", "places", "plural", "strategy_sentence", "timeline_columns", "uncertainty_text"]

_ZERO_WORDS = {
    1: "their optimizer state",
    2: "their optimizer state and gradients",
    3: "parameters, gradients and optimizer state",
}

_SCHEDULE_WORDS = {
    "gpipe": "all forwards before all backwards (GPipe)",
    "1f1b": "forwards and backwards in turn (1F1B)",
    "eager-1f1b": "forwards and backwards in turn, more forwards first (eager 1F1B)",
    "interleaved-1f1b": "interleaved 1F1B",
    "zero-bubble": "weight gradients put off into the bubbles (zero-bubble)",
    "zb-v": "stages that go down the devices and come back, and weight gradients put off into the bubbles (ZB-V)",
    "dualpipe-v": "stages that go down the devices and come back, with forwards between backwards (DualPipeV)",
}

_RECOMPUTE_WORDS = {
    "full": "everything is recomputed in backward",
    "selective": "attention is recomputed in backward",
    "budget-75": "a quarter of what could be kept is recomputed, where that takes least",
    "budget-50": "half of what could be kept is recomputed, where that takes least",
    "budget-25": "three quarters of what could be kept are recomputed, where that takes least",
    "products": "every other product is recomputed in backward",
}


def plural(count: int, noun: str) -> str:
    """A count and its noun: 1 stage, 2 stages."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def strategy_sentence(plan: Plan) -> str:
    """What every device does, in two or three sentences."""
    strategy = plan.strategy
    whole = "the whole model" if strategy.pp == 1 else f"a pipeline of {plural(strategy.pp, 'stage')}"
    if strategy.chunks > 1:
        whole = f"a pipeline of {strategy.pp} devices with {plural(strategy.chunks, 'chunk')} each"
    copies = f"{strategy.dp:,} copies of {whole}" if strategy.dp > 1 else f"One copy of {whole}"
    parts = [copies]
    if strategy.pp > 1:
        parts.append(f"run with {_SCHEDULE_WORDS.get(strategy.schedule, strategy.schedule)}")
    if strategy.tp > 1:
        along = " and activations between layers split along the sequence" if strategy.sequence_parallel else ""
        parts.append(f"every layer split over {strategy.tp} devices{along}")
    if strategy.cp > 1:
        parts.append(f"every sequence split over {strategy.cp} devices")
    if strategy.ep > 1 or strategy.expert_tp == 1:
        owners = strategy.ep * (strategy.tp if strategy.expert_tp == 1 else 1)
        parts.append(f"experts divided over {owners} devices")
    if strategy.replicas > 1 and strategy.zero:
        over = "the copies" if strategy.shard_groups == 1 else f"groups of {plural(strategy.shard_devices, 'device')}"
        parts.append(f"{_ZERO_WORDS[strategy.zero]} sharded over {over} (ZeRO-{strategy.zero})")
    each = f"Each copy runs {plural(plan.micro_batches, 'microbatch').replace('batchs', 'batches')} of "
    each += f"{plural(strategy.micro_batch_size, 'sequence')} a step"
    return f"{', '.join(parts)}. {each}; {_recompute_words(strategy)}."


def _recompute_words(strategy: Parallelism) -> str:
    counts = Counter(str(mode) for mode in strategy.recompute)
    if set(counts) <= {"none"}:
        return "nothing is recomputed"
    if len(counts) == 1:
        return _RECOMPUTE_WORDS.get(next(iter(counts)), "some work is recomputed in backward")
    total = sum(counts.values())
    told = [
        f"{_RECOMPUTE_WORDS.get(mode, mode)} on {count} of {total} stages"
        for mode, count in counts.items()
        if mode != "none"
    ]
    return " and ".join(told)


def uncertainty_text(plan: Plan) -> str:
    """How far such predictions were off where they could be checked, or that nothing was checked."""
    calibration, runs = plan.question.calibration, plan.provenance.comparable
    if runs is not None:
        return (
            f"{runs} of what was predicted for them by a fit that had not seen them. Steps that differ by less than "
            f"{runs.spread:.0%} may come out the other way round."
        )
    if calibration.is_ideal:
        return "Prices are ideal: nothing was fitted to measurements, and real steps take longer."
    if calibration.has_measured_kernels_only:
        return f"Prices: {calibration.name}; no comparable runs are known, and real steps take longer."
    family = next((family for family in fitted_families().values() if family["name"] == calibration.name), None)
    if family is None:
        return f"Prices: {calibration.name}; no comparable runs are known, so that how far they are off is not either."
    errors = [row.get("group_left_out") or row["row_left_out"] for row in family["errors"].values()]
    count = sum(row["rows"] for row in family["errors"].values())
    return (
        f"Prices: {calibration.name}. Too few of its {count} runs are like this one to say where such runs lie. "
        f"By table, runs left out of the fit were missed by {min(errors):.0%} to {max(errors):.0%} on average."
    )


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


_TICKS = 1 << 24
"""Ticks in a step: finer than a pixel at any zoom that a person uses, and small enough for a whole number in JSON."""


def timeline_columns(timeline: Timeline) -> dict[str, object]:
    """The events by device and start: per event its kind, stage and microbatch, the pause before it, and its length.

    Columns are little-endian, one after the other: kind (1 byte), stage and microbatch (2 bytes, 65535 for none), pause
    and length in ticks (4 bytes each). `counts` says how many events each device has.
    """
    table = timeline.table
    start, end = (
        np.rint(seconds / timeline.time_s * _TICKS).astype(np.int64) for seconds in (table.start_s, table.end_s)
    )
    counts = np.bincount(table.device, minlength=timeline.devices)
    firsts = np.concatenate([[0], np.cumsum(counts)[:-1]])[counts > 0]
    before = np.concatenate([[0], end[:-1]])
    before[firsts] = 0
    columns = (
        table.kind.astype("<u1"),
        (table.stage & 0xFFFF).astype("<u2"),
        (table.micro_batch & 0xFFFF).astype("<u2"),
        np.maximum(start - before, 0).astype("<u4"),
        (end - start).astype("<u4"),
    )
    packed = zlib.compress(b"".join(column.tobytes() for column in columns), 9)
    return {
        "seconds": timeline.time_s,
        "ticks": _TICKS,
        "kinds": [kind.value for kind in KINDS],
        "counts": counts.tolist(),
        "columns": base64.b64encode(packed).decode(),
    }
