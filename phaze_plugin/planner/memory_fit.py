"""`phaze.fit`: whether a model fits on a cluster, what takes the memory, how sure that is, and what would make it fit.

Without a strategy the question is whether any plan fits; the answer is that of the fastest one. With a strategy it is
that strategy which fits or not; where it does not, or only by using the margin, single changes of it are priced and
those that fit are told, the quickest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from phaze.errors import PhazeError, explained_by
from phaze.installed import installed_plugins
from phaze.ir import RecomputeMode
from phaze.parallelism import ZERO_STAGES, Parallelism
from phaze.plan.plan import Plan
from phaze.plan.plan_integrity import BESIDE_ITEMS
from phaze.planner.planning import evaluate, plan_for
from phaze.planner.progress import Watch
from phaze.question import QuestionOptions, ask
from phaze.report.plan_text import seconds_text, strategy_text

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["MemoryChange", "MemoryFit", "fit"]

_MOST_CHANGES = 3
"""Changes that are told: the three that cost least are enough to choose from."""

_GIB = 2**30

_WORST_FIRST = ("over", "marginal", "fits")
"""How devices may be, the worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChange:
    """A change after which everything fits: what it is, and the step's time with it where that was priced."""

    text: str
    step_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Whether a model fits.

    Attributes:
        fit: "fits", "marginal" (only by using the memory that should stay free) or "over".
        items_gib: what the fullest device holds, by item.
        total_gib: all of it.
        capacity_gib: what a device has.
        margin: the part of it that should stay free, because measured runs needed so much more than was predicted.
        changes: the cheapest single changes that make it fit; empty where it fits.
        plan: the plan that this is about.
    """

    fit: str
    items_gib: Mapping[str, float]
    total_gib: float
    capacity_gib: float
    margin: float
    changes: tuple[MemoryChange, ...]
    plan: Plan

    def __str__(self) -> str:
        verdict = {
            "fits": "FITS",
            "marginal": "MARGINAL: it fits only by using memory that should stay free",
            "over": "DOES NOT FIT",
        }[self.fit]
        cluster, sure = self.plan.cluster, self.plan.question.calibration
        lines = [
            f"{verdict}: {self.plan.model.name} on {cluster.device_count} x {cluster.accelerator.name}",
            f"strategy  {strategy_text(self.plan.strategy)}",
            f"fullest   {self.total_gib:.1f} of {self.capacity_gib:.1f} GiB",
            *(f"          {item:<12}{gib:7.2f} GiB" for item, gib in self.items_gib.items()),
        ]
        if sure.is_ideal:
            lines.append(f"how sure  nothing was fitted to measured memory here; {self.margin:.0%} should stay free")
        else:
            lines.append(
                f"how sure  {sure.name}: measured runs held up to {self.margin:.0%} more than predicted, so that much "
                "should stay free"
            )
        if self.fit != "fits":
            lines.append("would fit" if self.changes else "would fit  none of the single changes that were tried")
            lines += [f"          {_change_text(change, self.plan)}" for change in self.changes]
        return "\n".join(lines)


def _change_text(change: MemoryChange, plan: Plan) -> str:
    if change.step_time_s is None:
        return change.text
    slower = change.step_time_s / plan.step_time_s - 1
    return f"{change.text}: {seconds_text(change.step_time_s)} a step ({slower:+.1%})"


@explained_by("memory")
def fit(
    model: object,
    inputs: object = None,
    *,
    strategy: Mapping[str, object] | None = None,
    plugins: PluginManager | None = None,
    **options: Unpack[QuestionOptions],
) -> MemoryFit:
    """Whether a model fits on a cluster, with a given strategy or, without one, with any.

    The arguments are those of `phaze.optimize`; `strategy` is that of `phaze.evaluate`. It raises what these raise.
    """
    plugins = plugins or installed_plugins()
    if not strategy:
        plan = plan_for(ask(model, inputs, options, plugins), Watch())
        changes = tuple(MemoryChange(text=remedy.text, step_time_s=None) for remedy in plan.remedies)
        return _fit_of(plan, changes[:_MOST_CHANGES])
    plan = evaluate(model, inputs, strategy=strategy, compares=False, plugins=plugins, **options).plan
    if _worst(plan) == "fits":
        return _fit_of(plan, ())
    changed: list[MemoryChange] = []
    for kind in _single_changes(plan.strategy):
        for text, change in kind:
            keys = {**_kept(strategy, plan), **change}
            try:
                other = evaluate(model, inputs, strategy=keys, compares=False, plugins=plugins, **options).plan
            except PhazeError:  # the change is none that this model, batch or target allows
                continue
            if _worst(other) == "fits":
                changed.append(MemoryChange(text=text, step_time_s=other.step_time_s))
                break
    changed.sort(key=lambda change: change.step_time_s or 0.0)
    return _fit_of(plan, tuple(changed[:_MOST_CHANGES]))


def _worst(plan: Plan) -> str:
    """How the worst device is; a plan that does not fit is over, whatever its devices are called."""
    if not plan.is_feasible:
        return "over"
    fits = {stage.fit for stage in plan.stages}
    return next(kind for kind in _WORST_FIRST if kind in fits)


def _fit_of(plan: Plan, changes: tuple[MemoryChange, ...]) -> MemoryFit:
    fullest = max((stage.memory_bytes for stage in plan.stages), key=lambda memory: memory["total"])
    return MemoryFit(
        fit=_worst(plan),
        items_gib={item: size / _GIB for item, size in fullest.items() if item not in BESIDE_ITEMS and size},
        total_gib=fullest["total"] / _GIB,
        capacity_gib=fullest["capacity"] / _GIB,
        margin=plan.question.calibration.margin,
        changes=changes,
        plan=plan,
    )


def _kept(strategy: Mapping[str, object], plan: Plan) -> dict[str, object]:
    """The strategy with what it left open as the plan chose it, but for what follows from other degrees."""
    settled, modes = plan.strategy, set(plan.strategy.recompute)
    degrees = {name: getattr(settled, name) for name in ("dp", "tp", "pp", "zero", "micro_batch_size")}
    kept = {key: value for key, value in strategy.items() if key not in ("stages", "sequence_parallel", "recompute")}
    return {**degrees, **kept, "recompute": modes.pop().value if len(modes) == 1 else None}


_Change = tuple[str, dict[str, object]]
"""A change in words, and the keys of the strategy that it sets."""


def _single_changes(strategy: Parallelism) -> Iterator[Iterator[_Change]]:
    """Changes that spare memory, by kind: within a kind the mildest first, so that the first that fits is enough."""
    modes = (RecomputeMode.SELECTIVE, RecomputeMode.FULL)
    lighter = [mode for mode in modes if not {mode, RecomputeMode.FULL} & set(strategy.recompute)]
    yield ((f"recompute {mode.value}", {"recompute": mode.value}) for mode in lighter)
    stages = [zero for zero in ZERO_STAGES if zero > strategy.zero and strategy.dp > 1]
    yield ((f"ZeRO-{zero}", {"zero": zero}) for zero in stages)
    sizes = [strategy.micro_batch_size >> halvings for halvings in range(1, strategy.micro_batch_size.bit_length())]
    yield ((f"microbatches of {size}", {"micro_batch_size": size}) for size in sizes)
    for name, most in (("tp", _MOST_TP), ("pp", strategy.pp * strategy.dp)):
        yield _fewer_copies(strategy, name, most)


def _fewer_copies(strategy: Parallelism, name: str, most: int) -> Iterator[_Change]:
    """Half, a quarter, ... of the copies, each on twice, four times, ... as many devices along one axis."""
    factor = 2
    while strategy.dp % factor == 0 and getattr(strategy, name) * factor <= most:
        degree, dp = getattr(strategy, name) * factor, strategy.dp // factor
        open_keys: dict[str, object] = {"schedule": None, "chunks": None} if name == "pp" else {}
        yield f"{name} {degree}, dp {dp}", {name: degree, "dp": dp, **open_keys}
        factor *= 2


_MOST_TP = 8
"""The largest tp that is tried: beyond a node its collectives cost more than any other change."""
