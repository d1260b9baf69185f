"""Checks of a plan by somebody who trusts none of its numbers.

1. It belongs to the model, and was made by this version.
2. Its strategy is added up and simulated a second time by the plain code of `plain.py`, from slices whose schedules
   pass the schedule verifier: seconds and memory of every stage, whether they fit, the step and its parts.
3. The question is asked again. Every number of the answer, the bound included, must be what the plan says. Of a plan
   that was interrupted or priced for a user's strategy, only what follows from the strategy is asked again.

Prices of single ops and collectives, and the choice of slices, are shared with planning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import phaze
from phaze.installed import installed_plugins
from phaze.json_records import to_document
from phaze.parallelism import PipelineSchedule
from phaze.plan.plan import Plan, PlanStatus
from phaze.planner.fixed_stages import price_fixed_stages
from phaze.planner.plan_building import MEMORY_ITEMS, build_plan
from phaze.planner.planning import plan_for
from phaze.planner.progress import Watch
from phaze.planner.strategy_search import Answer
from phaze.question import Question
from phaze.verify.plain_placement import PlainCosts, PlainStage, plain_in_flight, plain_simulation
from phaze.verify.saved_plan import differences, question_for

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["Finding", "check_plan"]

_TOLERANCE = 1e-6
"""Sums in another order differ in the last digits."""

_SEARCHED = (
    "run",
    "question",
    "status",
    "bound_s",
    "gap",
    "binds",
    "runners_up",
    "changes",
    "remedies",
    "provenance",
    "is_explained",
)
"""What an interrupted search leaves different."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked: what the plan says, and what was found."""

    what: str
    claimed: str
    found: str
    holds: bool


def check_plan(
    plan: Plan,
    model: object,
    inputs: object = None,
    *,
    plugins: PluginManager | None = None,
    watch: Watch | None = None,
) -> list[Finding]:
    """Everything that was checked, in order; a plan is good if every finding holds."""
    watch, plugins = watch or Watch(), plugins or installed_plugins()
    findings = list(_belonging(plan, model, inputs, plugins))
    if not all(finding.holds for finding in findings):
        return findings
    question = question_for(plan, model, inputs, plugins)
    watch.report("pricing the strategy a second time")
    answer = price_fixed_stages(question.with_strategy(_whole_strategy(plan)), watch)
    findings += _plain_checks(plan, answer)
    findings += _asked_again(plan, question, answer, watch)
    return findings


def _belonging(plan: Plan, model: object, inputs: object, plugins: PluginManager) -> Iterator[Finding]:
    found = differences(plan, model, inputs, None, plugins)
    yield Finding("the plan is for this model", plan.model.name, "; ".join(found) or "the same graph", not found)
    now = phaze.__version__
    yield Finding("it was made by this version", plan.hashes.version, now, plan.hashes.version == now)


def _plain_checks(plan: Plan, answer: Answer) -> Iterator[Finding]:
    """Time and memory by the plain code."""
    parallelism = plan.strategy
    problem = answer.candidate.problem
    name = "1f1b" if parallelism.schedule is PipelineSchedule.NONE else parallelism.schedule.value
    mixed = problem.capabilities.allows_mixed_tp and parallelism.chunks == 1
    costs = PlainCosts(
        problem, parallelism.tp, parallelism.dp, parallelism.zero, parallelism.pp, name == "zero-bubble", mixed
    )
    stages = _plain_stages(costs, plan)
    rounds = -(-problem.micro_batches // parallelism.dp)
    step = plain_simulation(name, parallelism.pp, rounds, stages)
    yield _number("step time, simulated plainly", plan.step_time_s, step)
    parts = plan.step_time_parts
    total = parts.compute_s + parts.exposed_communication_s + parts.bubble_s + parts.update_s
    yield _number("its parts add up", plan.step_time_s, total)
    yield Finding("the bound is not above it", f"{plan.bound_s}", f"{step}", plan.bound_s <= step * (1 + _TOLERANCE))
    for index, (claimed, stage) in enumerate(zip(plan.stages, stages, strict=True)):
        yield _number(f"stage {index}: forward", claimed.forward_s, stage.forward)
        yield _number(f"stage {index}: backward", claimed.backward_s, stage.backward + stage.weight)
    is_fitting = True
    for place in range(parallelism.pp):
        chunks = [stages[chunk * parallelism.pp + place] for chunk in range(parallelism.chunks)]
        flights = [
            plain_in_flight(name, parallelism.pp, rounds, parallelism.chunks, place, chunk)
            for chunk in range(parallelism.chunks)
        ]
        items = _plain_memory(chunks, flights)
        is_fitting &= sum(items.values()) <= problem.usable_bytes
        memory = next(stage.memory_bytes for stage in plan.stages if stage.place == place)
        for item in MEMORY_ITEMS:
            yield _number(f"place {place}: {item} bytes", memory.get(item, math.nan), items[item])
    yield Finding("feasibility", str(plan.is_feasible), str(is_fitting), plan.is_feasible == is_fitting)


def _plain_stages(costs: PlainCosts, plan: Plan) -> list[PlainStage]:
    stages, first = [], 0
    for stage, mode in zip(plan.stages, plan.strategy.recompute, strict=True):
        count = len(stage.layers)
        stages.append(costs.stage(set(range(first)), set(range(first, first + count)), mode))
        first += count
    return stages


def _whole_strategy(plan: Plan) -> dict[str, object]:
    """A strategy that leaves nothing but this plan; whether sequences are split is as open as when it was made."""
    strategy = {**to_document(plan.strategy), "stages": [len(stage.layers) for stage in plan.stages]}
    strategy["sequence_parallel"] = plan.question.strategy.get("sequence_parallel")
    return strategy


def _plain_memory(chunks: Sequence[PlainStage], flights: Sequence[int]) -> dict[str, float]:
    items = {name: sum(stage.held[name] for stage in chunks) for name in ("parameters", "gradients", "optimizer")}
    largest = max(chunks, key=lambda stage: stage.scratch)
    return {
        **items,
        "activations": sum(count * stage.stash for stage, count in zip(chunks, flights, strict=True)),
        "working": largest.working,
        "buffers": largest.buffers,
    }


def _asked_again(plan: Plan, question: Question, answer: Answer, watch: Watch) -> Iterator[Finding]:
    """Every number of the plan against that of the question asked again."""
    left_out: tuple[str, ...] = ("run",)
    if plan.status is PlanStatus.INTERRUPTED:
        again, left_out = build_plan(question, answer), _SEARCHED
    else:
        again = plan_for(question.with_strategy(plan.question.strategy), watch)
        if not plan.is_explained:
            left_out = ("run", "runners_up", "changes", "provenance", "is_explained")
    claimed, found = (_leaves(one, left_out) for one in (plan, again))
    wrong = [name for name in dict.fromkeys((*claimed, *found)) if not _is_equal(claimed.get(name), found.get(name))]
    yield Finding("every number, asked again", f"{len(claimed)} values", f"{len(wrong)} differ", not wrong)
    for name in wrong:
        yield Finding(name, str(claimed.get(name)), str(found.get(name)), False)


def _leaves(plan: Plan, left_out: Sequence[str]) -> dict[str, object]:
    """Every value of a plan's document by its path."""
    found: dict[str, object] = {}

    def walk(where: str, value: object) -> None:
        if isinstance(value, Mapping):
            for name, item in value.items():
                walk(f"{where}.{name}" if where else str(name), item)
        elif isinstance(value, list):
            found[f"{where}.count"] = len(value)
            for index, item in enumerate(value):
                walk(f"{where}[{index}]", item)
        else:
            found[where] = value

    walk("", {name: value for name, value in to_document(plan).items() if name not in left_out})
    return found


def _is_equal(one: object, other: object) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        if not isinstance(one, int | float) or not isinstance(other, int | float):
            return False
        return math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-15)
    return one == other


def _number(what: str, claimed: float, found: float) -> Finding:
    holds = math.isclose(claimed, found, rel_tol=_TOLERANCE, abs_tol=1e-12)
    return Finding(what, f"{claimed:.9g}", f"{found:.9g}", holds)
