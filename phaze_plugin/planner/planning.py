"""`phaze.optimize` and `phaze.evaluate`: one call from a model to a plan, or to the price of one's own strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Unpack

from phaze.errors import PlanError, QuestionError, explained_by, shown
from phaze.installed import installed_plugins
from phaze.objective import ObjectiveKind
from phaze.parallelism import ALL_DEVICES, Offload, Parallelism, PipelineSchedule
from phaze.place import PreparedProblem, evaluate_placement, find_placement
from phaze.plan.plan import Plan, PlanStatus, RunFacts
from phaze.planner import explanation
from phaze.planner.device_counts import answered_question, find_answer, price_given_stages
from phaze.planner.explainer import FoundSearch, PlanExplainer
from phaze.planner.launch import active_world, plan_together
from phaze.planner.plan_building import build_plan
from phaze.planner.progress import Progress, Watch, rare_collections
from phaze.planner.strategy_search import Answer
from phaze.question import Question, QuestionOptions, ask
from phaze.report.html_views import evaluation_view
from phaze.report.plan_text import reached_text, strategy_text, summary
from phaze.targets import ONE_STAGE, Capabilities
from phaze.tolerances import EQUAL_RESULTS

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["Evaluation", "evaluate", "optimize", "plan_for"]


@explained_by("strategy")
def optimize(
    model: object,
    inputs: object = None,
    *,
    explain: bool = False,
    time_limit_s: float | None = None,
    progress: Callable[[Progress], object] | None = None,
    plugins: PluginManager | None = None,
    **options: Unpack[QuestionOptions],
) -> Plan:
    """Find the fastest way to train a model on a cluster, or the best one by another objective.

    Args:
        model: a torch module, a JAX loss function, a known name, the path of a file, or a Graph.
        inputs: examples of the model's inputs; modules and functions need them, other models have their own.
        explain: also look for the best plans of other kinds, and for what other hardware would bring. If False,
            `plan.explain()` does this later.
        time_limit_s: seconds after which the search ends with the best plan so far; Ctrl-C does the same.
        progress: a function that is called with a `phaze.planner.Progress` after every piece of work.
        plugins: the plugins to use; by default all that are installed.
        **options: all are optional; `QuestionOptions` explains each of them:

            - the devices: cluster, such as "a100-80gb:64" (by default those that this process sees)
            - the training: global_batch_size, optimizer, precision, sequence_length, loss_fn, targets
            - what may be chosen: micro_batch_size, tp, cp, ep, recompute, constraints, expert_imbalance
            - what runs the plan: target ("auto", the name of a tool, or None for an analysis)
            - what is best: objective, price, step_time, gap
            - how it is predicted: calibration, attention, solver, frontend_options

    If the model does not fit, the plan says so, and names changes that would make it fit. In a launch of several
    processes, rank 0 plans for all of them.

    Raises QuestionError (a ValueError) for a wrong argument, and other errors of `phaze.errors` for models, clusters
    and plans that are not possible.
    """
    watch = _watch(progress, time_limit_s)
    plugins = plugins or installed_plugins()
    world = active_world(plugins)
    if world is None:
        return plan_for(ask(model, inputs, options, plugins), watch, explain=explain)
    return plan_together(
        world,
        lambda: ask(model, inputs, options, plugins),
        lambda question: plan_for(question, watch, explain=explain),
    )


_SO_FAR = " of those that there was time for"

_COMPARED = {
    ObjectiveKind.THROUGHPUT: ("faster", "slower"),
    ObjectiveKind.COST: ("cheaper", "dearer"),
    ObjectiveKind.ENERGY: ("below it", "above it"),
    ObjectiveKind.DEVICES: ("below it", "above it"),
}
"""What is said of a strategy that has less, or more, of what is made small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What `phaze.evaluate` returns: the given strategy's plan, the best plan, and the change that helps most.

    `change` is None if nothing was compared, or if no single change helps. `is_interrupted` is True if the time was
    over before everything was compared.
    """

    plan: Plan
    best: Plan | None
    change: str | None
    is_interrupted: bool = False

    @property
    def step_time_s(self) -> float:
        """The step time of the strategy that was priced."""
        return self.plan.step_time_s

    @property
    def is_feasible(self) -> bool:
        """Whether the strategy fits into memory."""
        return self.plan.is_feasible

    @property
    def slower_than_best(self) -> float | None:
        """How much longer the strategy's step takes than the best plan's: 0.1 for 10 %."""
        return None if self.best is None else self.plan.step_time_s / self.best.step_time_s - 1

    @property
    def worse_than_best(self) -> float | None:
        """As `slower_than_best`, for what the objective makes least: seconds, money, joules or devices."""
        return None if self.best is None else self.plan.value.reached / self.best.value.reached - 1

    def _repr_html_(self) -> str:
        return evaluation_view(self.plan, self.best, self.change)

    def __str__(self) -> str:
        lines = [summary(self.plan)]
        if self.best is not None and self.worse_than_best is not None:
            less, more = _COMPARED[self.plan.question.objective.kind]
            lines += [
                "",
                f"the best plan takes {reached_text(self.best)}; this strategy is "
                f"{abs(self.worse_than_best):.2%} {more if self.worse_than_best >= 0 else less}"
                f"{'' if self.is_feasible else ', but does not fit'}.",
                f"best: {strategy_text(self.best.strategy)}",
                f"most valuable single change{_SO_FAR if self.is_interrupted else ''}: {self.change or 'none helps'}",
            ]
        elif self.is_interrupted:
            lines += ["", "the time was over before a best plan to compare with was found."]
        return "\n".join(lines)


@explained_by("strategy")
def evaluate(
    model: object,
    inputs: object = None,
    *,
    strategy: Mapping[str, object] | None = None,
    compares: bool = True,
    time_limit_s: float | None = None,
    progress: Callable[[Progress], object] | None = None,
    plugins: PluginManager | None = None,
    **options: Unpack[QuestionOptions],
) -> Evaluation:
    """Predict what a strategy of your own takes, and compare it with the best plan.

    `strategy` has some of the fields of `phaze.Parallelism` (dp, tp, pp, micro_batch_size, schedule, chunks, zero,
    sequence_parallel, recompute, ...) and `stages` (the number of layers in each stage). Fields that are left out are
    chosen as well as possible. A program that was captured on several devices (an HLO dump) needs no strategy: it is
    priced as it runs, with its own batch. A strategy that does not fit is priced, too; its plan says that it does not
    fit. With `compares=False` the best plan is not looked for. All other arguments are those of `optimize`.

    Raises what `optimize` raises, and QuestionError for a key or value that a strategy cannot have.
    """
    watch = _watch(progress, time_limit_s)
    question = ask(model, inputs, options, plugins or installed_plugins(), strategy)
    if strategy is None:
        question = _as_it_runs(question, options)
    plan = plan_for(question, watch)
    if not compares:
        return Evaluation(plan=plan, best=None, change=None)
    free = _free_question(question)
    try:
        best = plan_for(free, watch)
    except (PlanError, KeyboardInterrupt) as error:
        if isinstance(error, PlanError) and not watch.is_over:
            raise
        # What was priced is worth keeping without a comparison.
        return Evaluation(plan=plan, best=None, change=None, is_interrupted=True)
    change, is_interrupted = _best_change(free, question, plan, watch)
    is_interrupted |= best.status is PlanStatus.INTERRUPTED
    return Evaluation(plan=plan, best=best, change=change, is_interrupted=is_interrupted)


def _as_it_runs(question: Question, options: QuestionOptions) -> Question:
    """The question with the strategy and the batch of a program that was captured on several devices."""
    runs_as = dict(question.graph.runs_as)
    if not runs_as:
        raise QuestionError(
            "strategy is not given, and the model does not show one: only programs that were captured on several "
            "devices do. Pass strategy=, or --strategy such as dp=8,tp=8."
        )
    used = math.prod(runs_as.get(name, 1) for name in ("dp", "cp", "tp"))
    if used > question.cluster.device_count:
        raise QuestionError(
            f"the program runs on {used} devices, but the cluster has {question.cluster.device_count}; name one with "
            "at least as many."
        )
    if options.get("global_batch_size") is None:
        question = replace(question, global_batch_size=question.graph.micro_batch_size)
    micro_batch_size = max(1, question.graph.micro_batch_size // runs_as.get("dp", 1))
    return question.with_strategy({"pp": 1, **runs_as, "micro_batch_size": micro_batch_size})


def _free_question(question: Question) -> Question:
    """The question without its strategy, whose microbatch size and degrees are offered among the others."""
    names = ("micro_batch_size", "tp", "cp", "ep")
    joined = {name: _joined(getattr(question.offered, name), question.fixed.get(name)) for name in names}
    offered = replace(question.offered, **joined)  # type: ignore[arg-type]
    return replace(question, offered=offered, choices=offered, strategy={}, fixed={})


def _joined(offered: tuple[int, ...] | None, fixed: object) -> tuple[int, ...]:
    """The offered values and the fixed one, if there is one, ascending."""
    return tuple(sorted({*(offered or ()), *((fixed,) if isinstance(fixed, int) else ())}))


def _watch(progress: Callable[[Progress], object] | None, time_limit_s: float | None) -> Watch:
    if time_limit_s is not None and not (isinstance(time_limit_s, int | float) and time_limit_s > 0):
        raise QuestionError(f"time_limit_s is {shown(time_limit_s)}; expected a positive number of seconds, or None.")
    if progress is not None and not callable(progress):
        raise QuestionError(f"progress is {shown(progress)}; expected a function of one phaze.planner.Progress.")
    return Watch(listener=progress, time_limit_s=time_limit_s)


@rare_collections()
def plan_for(question: Question, watch: Watch, *, explain: bool = False) -> Plan:
    """The best plan for a question, explained at once or when somebody asks.

    Where the user fixed a strategy, the plan is priced whether it fits or not, and there is nothing more to explain.
    """
    if question.strategy:
        return _priced_plan(question, watch)
    answer = find_answer(question, watch)
    question = answered_question(question, answer)
    plan = build_plan(question, answer)
    plan = replace(plan, binds=explanation.binding(plan))
    if not answer.is_feasible:
        plan = replace(plan, remedies=explanation.remedies(question, answer))
    else:
        explainer = PlanExplainer(lambda model, inputs: FoundSearch(question, answer))
        plan = replace(plan, is_explained=False, explainer=explainer)
        if explain and not answer.is_interrupted:
            explainer.watch = watch
            plan = explainer.explained(plan)
            explainer.watch = Watch()
    return replace(plan, run=RunFacts(seconds=watch.elapsed_s))


def _priced_plan(question: Question, watch: Watch) -> Plan:
    """The plan of a user's strategy, whether it fits or not; its bound is that of the strategy itself."""
    _check_devices(question)
    _check_target(question)
    if question.choices.stages is not None:
        answer = price_given_stages(question, watch)
    else:
        answer = find_answer(question, watch)
        if not answer.is_feasible:
            answer = _without_memory_limit(answer)
    plan = build_plan(answered_question(question, answer), answer)
    return replace(plan, binds=explanation.binding(plan), run=RunFacts(seconds=watch.elapsed_s))


def _check_devices(question: Question) -> None:
    """Raise QuestionError where what is fixed takes more devices than there are."""
    axes = ("dp", "cp", "tp", "pp")
    fixed = {name: int(str(degree)) for name, degree in question.fixed.items() if name in axes}
    needed, count = math.prod(fixed.values()), question.cluster.device_count
    if needed > count:
        told = " x ".join(f"{name} {fixed[name]}" for name in axes if name in fixed)
        raise QuestionError(f"strategy has {told}, {needed} devices; the cluster has {count}.")


def _check_target(question: Question) -> None:
    """Raise QuestionError where what is fixed is nothing that the target runs."""
    fixed, wrong = question.fixed, []
    degrees = {name: int(str(fixed[name])) for name in ("tp", "cp", "ep") if name in fixed}
    if pair := question.capabilities.excluded_together(**degrees):
        wrong.append(" beside ".join(f"{axis} {fixed[axis]}" for axis in pair))
    runs = question.capabilities.at_degrees(**degrees)
    zero, schedule, pp = fixed.get("zero"), fixed.get("schedule"), int(str(fixed.get("pp", 1)))
    if zero is not None and fixed.get("dp") != 1 and zero not in runs.zero_stages:
        known = ", ".join(map(str, sorted(runs.zero_stages)))
        beside = "".join(f", {axis} {degree}" for axis, degree in degrees.items() if degree > 1)
        wrong.append(f"zero {zero} (it runs {known} in {question.recipe.name}{beside})")
    if schedule not in (None, PipelineSchedule.NONE, *runs.schedules) or (pp > 1 and not runs.schedules):
        one_stage = next((note for note in question.target.notes if note.startswith(ONE_STAGE)), ONE_STAGE)
        known = ", ".join(sorted(runs.schedules)) or one_stage.replace(" pipeline", "")
        wrong.append(f"a pipeline with schedule {schedule or 'of any kind'} (it runs {known})")
    wrong += _axes_not_run(question, runs)
    dp, size = (int(str(fixed.get(name, 0))) for name in ("dp", "micro_batch_size"))
    if runs.needs_single_micro_batch and dp * size not in (0, question.global_batch_size):
        micro_batches = question.global_batch_size / (dp * size)
        wrong.append(
            f"{micro_batches:g} microbatches a copy (it runs one, of {question.global_batch_size // dp} samples)"
        )
    modes = question.choices.recompute if "recompute" in fixed else ()
    unknown = sorted(set(modes) - runs.recompute_modes)
    if unknown:
        known = ", ".join(sorted(runs.recompute_modes))
        wrong.append(f"recompute {unknown[0]} (it runs {known})")
    if wrong:
        raise QuestionError(
            f"strategy has {' and '.join(wrong)}, which target {question.target} does not run. Change it, or price it "
            "with target=None."
        )


def _axes_not_run(question: Question, runs: Capabilities) -> list[str]:
    """The axes beside dp, tp and pp that are fixed and that the target does not run, in words."""
    fixed = question.fixed
    wrong = []
    for name, is_run in (("cp", runs.allows_context_parallel), ("ep", runs.allows_expert_parallel)):
        if fixed.get(name, 1) != 1 and not is_run:
            wrong.append(f"{name} {fixed[name]} (it runs {name} 1)")
    if fixed.get("expert_tp") == 1 and runs.cuts_experts:
        wrong.append("expert_tp 1 (it cuts every expert over the tp devices)")
    offload = fixed.get("offload", Offload.NONE)
    if offload not in runs.offloads:
        wrong.append(f"offload {offload} (it runs {', '.join(sorted(runs.offloads))})")
    replicas = fixed.get("dp", 0), fixed.get("cp", 1)
    all_devices = (ALL_DEVICES, math.prod(int(str(degree)) for degree in replicas))
    shard = fixed.get("shard", ALL_DEVICES)
    if isinstance(shard, int) and shard not in all_devices:
        zero, cp, ep = (int(str(fixed.get(name, default))) for name, default in (("zero", 3), ("cp", 1), ("ep", 1)))
        if not runs.allows_shard_groups:
            wrong.append(f"shard {shard} (it shards over all of dp x cp)")
        elif not runs.runs_groups(shard, zero=zero, cp=cp, ep=ep):
            wrong.append(f"shard {shard} with zero {zero}, cp {cp} and ep {ep}")
    return wrong


NO_MEMORY_LIMIT_BYTES = 1 << 50
"""A memory that everything fits into, for the price of a strategy that does not fit."""


def _without_memory_limit(answer: Answer) -> Answer:
    """The fastest placement as if everything fitted, with the memory that it would take."""
    best: Answer | None = None
    for candidate in answer.candidates:
        problem = candidate.problem
        chip = replace(problem.cluster.accelerator, hbm_bytes=NO_MEMORY_LIMIT_BYTES)
        free = find_placement(replace(problem, cluster=replace(problem.cluster, accelerator=chip)), top=1).best
        if free is None:
            continue
        stages = [(stage.layers, stage.recompute) for stage in free.stages]
        placement = evaluate_placement(PreparedProblem.of(problem), free.parallelism, stages)
        if best is None or placement.time_s < best.placement.time_s:
            best = replace(answer, placement=placement, candidate=candidate, bound_s=placement.time_s)
    return best or answer


def _best_change(free: Question, asked: Question, plan: Plan, watch: Watch) -> tuple[str | None, bool]:
    """The key whose release makes the strategy best with the value that it then takes, and whether time was over."""
    best: tuple[float, str] | None = None
    is_interrupted = False
    for name in (field.name for field in fields(Parallelism) if field.name in asked.fixed):
        kept = {key: value for key, value in asked.fixed.items() if key not in (name, "stages")}
        try:
            answer = find_answer(free.with_fixed(kept), watch)
        except KeyboardInterrupt:
            is_interrupted = True
        except PlanError:  # nothing has these values, or the time was over before something was found
            is_interrupted = watch.is_over
            if not is_interrupted:
                continue
        if is_interrupted:
            break
        if not answer.is_feasible:
            continue
        released = build_plan(answered_question(free, answer), answer)
        value, reached = getattr(released.strategy, name), released.value.reached
        is_better = not plan.is_feasible or reached < plan.value.reached * (1 - EQUAL_RESULTS)
        if value != getattr(plan.strategy, name) and is_better and (best is None or reached < best[0]):
            shown_value = ", ".join(dict.fromkeys(value)) if isinstance(value, tuple) else value
            best = (reached, f"{name} {shown_value}: {reached_text(released)}")
    return (None if best is None else best[1]), is_interrupted
