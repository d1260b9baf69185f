"""A plan's strategy and its certainty in sentences, for people who do not know the letters."""

from __future__ import annotations

from collections import Counter

from phaze.cost.calibration import fitted_families
from phaze.parallelism import Parallelism
from phaze.plan.plan import Plan

__all__ = ["plural", "strategy_sentence", "uncertainty_text"]

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
    if strategy.ep > 1:
        parts.append(f"experts divided over {strategy.ep} devices")
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
