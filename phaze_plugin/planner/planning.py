"""The planner's front door: one call from a model to a plan, and the price of a strategy of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import TYPE_CHECKING

from phaze.cost import Calibration
from phaze.errors import QuestionError, shown
from phaze.hardware import Cluster, PrecisionRecipe
from phaze.parallelism import NO_SCHEDULE, Limits, read_limits
from phaze.place import Ground, evaluate_placement, find_placement
from phaze.plan.plan import UNEXPLAINED, Plan, RunFacts, Strategy
from phaze.planner import explanation
from phaze.planner.fixed_stages import priced
from phaze.planner.launch import active_world, plan_together
from phaze.planner.plan_building import build_plan
from phaze.planner.progress import Progress, TimeLimitError, Watch
from phaze.planner.strategy_search import Answer, choose
from phaze.question import Request, read_request
from phaze.report.plan_text import seconds_text, strategy_text, summary

if TYPE_CHECKING:
    from phaze.hooks import PluginManager
    from phaze.shard import LayoutConstraint

__all__ = ["Evaluation", "evaluate", "optimize", "plan_within"]


def optimize(
    model: object,
    inputs: object = None,
    *,
    cluster: str | Cluster | None = None,
    global_batch_size: int | None = None,
    optimizer: str = "adamw",
    precision: str | PrecisionRecipe = "bf16",
    micro_batch_sizes: Sequence[int] | None = None,
    tensor_widths: Sequence[int] | None = None,
    sequence_length: int | None = None,
    loss_fn: Callable[..., object] | None = None,
    targets: object = None,
    target: str | None = "auto",
    constraints: Sequence[LayoutConstraint] | Mapping[str, int | None] | None = None,
    calibration: Calibration | str | PathLike[str] | None = None,
    objective: str = "throughput",
    time_limit_s: float | None = None,
    gap: float = 0.01,
    seed: int = 0,
    progress: Callable[[Progress], object] | None = None,
) -> Plan:
    """The fastest way to train a model on a cluster.

    `model` is anything that `import_graph` takes, `cluster` text such as "a100-80gb:64". Batches and microbatches count
    sequences. A module that returns no loss needs `loss_fn`, of its output, and of `targets` where those are given
    (examples, as `inputs` are); its plan is applied with the same `loss_fn`. `target` names what is to run
    the plan, "auto" the one of the model's framework, None none. `time_limit_s` and Ctrl-C end the search with the best
    so far, marked as interrupted. A model that does not fit gets a plan that says so, with the changes after which it
    would. In a launch of several processes rank 0 plans for all.

    Raises QuestionError (a ValueError) naming a wrong argument, and other PhazeErrors for models, clusters and plans
    that cannot be.
    """
    asked = dict(locals())
    for name in ("time_limit_s", "progress"):
        asked.pop(name)
    watch = _watch(progress, time_limit_s)
    plugins = _plugins()
    world = active_world(plugins)
    if world is None:
        return plan_within(_request(asked, plugins), Limits(), {}, watch)
    return plan_together(
        world, lambda: _request(asked, plugins), lambda request: plan_within(request, Limits(), {}, watch)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A strategy of one's own, priced: its plan, the best plan, and the single change that brings most.

    `change` is None where nothing was compared or no single change helps.
    """

    plan: Plan
    best: Plan | None
    change: str | None

    @property
    def step_time_s(self) -> float:
        """Of the strategy that was priced."""
        return self.plan.step_time_s

    @property
    def is_feasible(self) -> bool:
        """Whether it fits."""
        return self.plan.is_feasible

    @property
    def slower_than_best(self) -> float | None:
        """By which part its step takes longer than the best plan's."""
        return None if self.best is None else self.plan.step_time_s / self.best.step_time_s - 1

    def __str__(self) -> str:
        lines = [summary(self.plan)]
        if self.best is not None and self.slower_than_best is not None:
            lines += [
                "",
                f"the best plan takes {seconds_text(self.best.step_time_s)}; this strategy is "
                f"{self.slower_than_best:.2%} slower.",
                f"best: {strategy_text(self.best.strategy)}",
                f"most valuable single change: {self.change or 'none helps'}",
            ]
        return "\n".join(lines)


def evaluate(
    model: object,
    inputs: object = None,
    *,
    strategy: Mapping[str, object],
    cluster: str | Cluster | None = None,
    global_batch_size: int | None = None,
    optimizer: str = "adamw",
    precision: str | PrecisionRecipe = "bf16",
    micro_batch_sizes: Sequence[int] | None = None,
    tensor_widths: Sequence[int] | None = None,
    sequence_length: int | None = None,
    loss_fn: Callable[..., object] | None = None,
    targets: object = None,
    target: str | None = "auto",
    constraints: Sequence[LayoutConstraint] | Mapping[str, int | None] | None = None,
    calibration: Calibration | str | PathLike[str] | None = None,
    objective: str = "throughput",
    time_limit_s: float | None = None,
    gap: float = 0.01,
    seed: int = 0,
    progress: Callable[[Progress], object] | None = None,
    compares: bool = True,
) -> Evaluation:
    """The price of a strategy of one's own on the model of `optimize`, and what the best plan would bring.

    `strategy` has some of the keys of `phaze.plan.plan.Strategy` (dp, tp, pp, micro_batch_size, schedule, chunks, zero,
    sequence_parallel, recompute) and `stages` (layers per stage); what is left out is optimised. A strategy that does
    not fit is priced all the same, and says so. With `compares=False` the best plan is not looked for.

    Raises as `optimize` does; QuestionError also for a key or value that a strategy cannot have.
    """
    asked = dict(locals())
    for name in ("time_limit_s", "progress", "strategy", "compares"):
        asked.pop(name)
    limits = read_limits(strategy)
    if limits.micro_batch_size is not None:
        asked["micro_batch_sizes"] = (limits.micro_batch_size,)
    if limits.tp is not None:
        asked["tensor_widths"] = (limits.tp,)
    watch = _watch(progress, time_limit_s)
    plugins = _plugins()
    own_request = _request(asked, plugins)
    own = plan_within(own_request, limits, strategy, watch)
    if not compares:
        return Evaluation(plan=own, best=None, change=None)
    asked |= {"micro_batch_sizes": micro_batch_sizes, "tensor_widths": tensor_widths, "model": own_request.graph}
    asked |= {"inputs": None, "sequence_length": None, "loss_fn": None, "targets": None}
    request = _including(replace(_request(asked, plugins), target=own_request.target), limits)
    best = plan_within(request, Limits(), {}, watch)
    return Evaluation(plan=own, best=best, change=_best_change(request, limits, own, watch))


def _including(request: Request, limits: Limits) -> Request:
    """The request with the microbatch size and tensor width of a strategy among its own."""
    sizes, widths = set(request.micro_batch_sizes), set(request.tensor_widths)
    sizes |= set() if limits.micro_batch_size is None else {limits.micro_batch_size}
    widths |= set() if limits.tp is None else {limits.tp}
    return replace(request, micro_batch_sizes=tuple(sorted(sizes)), tensor_widths=tuple(sorted(widths)))


def _plugins() -> PluginManager:
    from phaze.hooks import PluginManager

    return PluginManager.load()


def _request(asked: dict[str, object], plugins: PluginManager) -> Request:
    return read_request(**asked, plugins=plugins)  # type: ignore[arg-type]


def _watch(progress: Callable[[Progress], object] | None, time_limit_s: float | None) -> Watch:
    if time_limit_s is not None and not (isinstance(time_limit_s, int | float) and time_limit_s > 0):
        raise QuestionError(f"time_limit_s is {shown(time_limit_s)}; expected a positive number of seconds, or None.")
    if progress is not None and not callable(progress):
        raise QuestionError(f"progress is {shown(progress)}; expected a function of one phaze.planner.Progress.")
    return Watch(listener=progress, time_limit_s=time_limit_s)


def plan_within(request: Request, limits: Limits, asked: Mapping[str, object], watch: Watch) -> Plan:
    """The best plan within limits.

    `asked` is what the user fixed, as it was written: such a plan is priced whether it fits or not. Where nothing was
    fixed, the plan is explained.
    """
    if asked:
        return _priced_plan(request, limits, asked, watch)
    answer = choose(request, limits, watch)
    plan = _explained(request, answer, build_plan(request, answer, asked), watch)
    return replace(plan, run=RunFacts(seconds=watch.elapsed_s))


def _explained(request: Request, answer: Answer, plan: Plan, watch: Watch) -> Plan:
    """The plan with what its reader asks next; an interruption leaves that out."""
    plan = replace(plan, binds=explanation.binding(plan))
    if not answer.is_feasible:
        return replace(plan, levers=explanation.levers(request, answer))
    if answer.is_interrupted:
        return plan
    try:
        plan = replace(plan, runners_up=explanation.runners_up(answer, watch))
        plan = replace(plan, changes=explanation.changes(request, answer, watch))
        if request.target.name is not None:
            facts = replace(plan.provenance, unrestricted_step_time_s=explanation.unrestricted_s(answer))
            plan = replace(plan, provenance=facts)
    except (TimeLimitError, KeyboardInterrupt):
        facts = replace(plan.provenance, notes=(*plan.provenance.notes, UNEXPLAINED))
        return replace(plan, provenance=facts)
    return plan


def _priced_plan(request: Request, limits: Limits, asked: Mapping[str, object], watch: Watch) -> Plan:
    """The plan of a user's strategy, whether it fits or not; its bound is that of the strategy itself."""
    _check_devices(request, limits)
    _check_target(request, limits)
    if limits.stages is not None:
        answer = priced(request, limits, watch)
    else:
        answer = choose(request, limits, watch)
        if not answer.is_feasible:
            answer = _without_memory_limit(answer)
    plan = build_plan(request, answer, asked)
    return replace(plan, binds=explanation.binding(plan), run=RunFacts(seconds=watch.elapsed_s))


def _check_devices(request: Request, limits: Limits) -> None:
    """Raises QuestionError where what is fixed takes more devices than there are."""
    fixed = {name: getattr(limits, name) for name in ("dp", "tp", "pp") if getattr(limits, name) is not None}
    needed, count = math.prod(fixed.values()), request.cluster.device_count
    if needed > count:
        told = " x ".join(f"{name} {degree}" for name, degree in fixed.items())
        raise QuestionError(f"strategy has {told}, {needed} devices; the cluster has {count}.")


def _check_target(request: Request, limits: Limits) -> None:
    """Raises QuestionError where what is fixed is nothing that the target runs."""
    runs, wrong = request.capabilities, []
    if limits.zero is not None and limits.dp != 1 and limits.zero not in runs.zero_stages:
        known = ", ".join(map(str, sorted(runs.zero_stages)))
        wrong.append(f"zero {limits.zero} (it runs {known} in {request.recipe.name})")
    if limits.schedule not in (None, NO_SCHEDULE, *runs.schedules) or ((limits.pp or 1) > 1 and not runs.schedules):
        known = ", ".join(sorted(runs.schedules)) or "one stage only"
        wrong.append(f"a pipeline with schedule {limits.schedule or 'of any kind'} (it runs {known})")
    unknown = sorted(set(limits.recompute or ()) - runs.recompute_modes)
    if unknown:
        known = ", ".join(sorted(runs.recompute_modes))
        wrong.append(f"recompute {unknown[0]} (it runs {known})")
    if wrong:
        raise QuestionError(
            f"strategy has {' and '.join(wrong)}, which target {request.target} does not run. Change it, or price it "
            "with target=None."
        )


def _without_memory_limit(answer: Answer) -> Answer:
    """The fastest placement as if everything fitted, with the memory that it would take."""
    best: Answer | None = None
    for candidate in answer.candidates:
        problem = candidate.problem
        chip = replace(problem.cluster.accelerator, hbm_bytes=1 << 50)
        free = find_placement(replace(problem, cluster=replace(problem.cluster, accelerator=chip)), top=1).best
        if free is None:
            continue
        stages = [(stage.layers, stage.recompute) for stage in free.stages]
        placement = evaluate_placement(Ground.of(problem), free.degrees, stages)
        if best is None or placement.time_s < best.placement.time_s:
            best = replace(answer, placement=placement, candidate=candidate, bound_s=placement.time_s)
    return best or answer


def _best_change(request: Request, limits: Limits, own: Plan, watch: Watch) -> str | None:
    """The key whose release makes the strategy fastest, and the value that it then takes."""
    fixed = [field.name for field in fields(Strategy) if getattr(limits, field.name) is not None]
    settled = {name: getattr(own.strategy, name) for name in fixed}
    best: tuple[float, str] | None = None
    for name in fixed:
        released = replace(limits, **{name: None}, stages=None)
        try:
            answer = choose(request, released, watch)
        except (TimeLimitError, KeyboardInterrupt):
            break
        if not answer.is_feasible:
            continue
        other = build_plan(request, answer, {})
        value = getattr(other.strategy, name)
        is_faster = not own.is_feasible or other.step_time_s < own.step_time_s * (1 - 1e-9)
        if value != settled[name] and is_faster and (best is None or other.step_time_s < best[0]):
            shown_value = ", ".join(dict.fromkeys(value)) if isinstance(value, tuple) else value
            best = (other.step_time_s, f"{name} {shown_value}: {seconds_text(other.step_time_s)} per step")
    return None if best is None else best[1]
