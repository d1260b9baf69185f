"""What a plan's reader asks next: what binds, what other kinds of plans cost, what other hardware would bring.

Every figure comes from the same search on the same slices with one thing changed, cut short: what is found is reached,
and may be beaten by a little. All microbatch sizes that were sliced are tried, the plan's own one first. Faster links
change the slices themselves, so only the plan's own microbatch and width are sliced again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from phaze.capabilities import Capabilities, PipelineSchedule
from phaze.hardware import Cluster
from phaze.ir import RecomputeMode
from phaze.place import Effort, Ground, LeverKind, Placement, PlacementProblem
from phaze.place.assemble import assemble
from phaze.place.search_degrees import search_degrees
from phaze.plan import Change, Lever, Plan, RunnerUp
from phaze.planner.build_plan import MEMORY_ITEMS, strategy_of
from phaze.planner.choose import Answer, Candidate, placement_problem
from phaze.planner.request import Request
from phaze.planner.slices import slice_model
from phaze.planner.watch import Watch

__all__ = ["best_of", "binding", "changes", "levers", "runners_up", "unrestricted_s"]

_EFFORT = Effort(nodes=400, nodes_per_choice=60, choices=100)
_GAP = 0.01


def binding(plan: Plan) -> tuple[str, ...]:
    """What keeps the plan from being faster, from its own numbers."""
    parts, total = plan.step_time_parts, plan.step_time_s
    named = {
        "compute": parts.compute_s,
        "exposed communication": parts.exposed_communication_s,
        "the pipeline's bubble": parts.bubble_s,
        "the update": parts.update_s,
    }
    name, seconds = max(named.items(), key=lambda item: item[1])
    found = [f"time: {name} is {seconds / total:.1%} of the step"]
    if len(plan.stages) > 1:
        slowest = max(range(len(plan.stages)), key=lambda at: plan.stages[at].forward_s + plan.stages[at].backward_s)
        mean = sum(stage.forward_s + stage.backward_s for stage in plan.stages) / len(plan.stages)
        stage = plan.stages[slowest]
        over = (stage.forward_s + stage.backward_s) / mean - 1
        found.append(f"balance: stage {slowest} is the slowest, {over:.1%} above the average stage")
    fullest = max(plan.stages, key=lambda stage: stage.memory_bytes["total"])
    memory = fullest.memory_bytes
    item = max(MEMORY_ITEMS, key=lambda one: memory[one])
    found.append(
        f"memory: stage {plan.stages.index(fullest)} is the fullest, {memory['total'] / 2**30:.1f} of "
        f"{memory['capacity'] / 2**30:.1f} GiB, {memory[item] / 2**30:.1f} of it {item}"
    )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Another kind of plan: what to call it, and how the problem becomes one that has only such plans."""

    name: str
    narrow: Callable[[PlacementProblem], PlacementProblem | None]


def runners_up(answer: Answer, watch: Watch) -> tuple[RunnerUp, ...]:
    """The best plan of each other kind."""
    sizes = [one for one in answer.candidates if one is not answer.candidate]
    kinds = list(_other_kinds(answer.placement))
    watch.expect(len(kinds) + len(sizes))
    found = []
    for kind in kinds:
        watch.report(f"the best plan of another kind: {kind.name}")
        found.append(_runner_up(kind, answer))
        watch.step()
    for candidate in sizes:
        watch.report(f"the best plan of another kind: microbatch {candidate.slices.micro_batch_size}")
        found.append(_named_best(f"microbatch {candidate.slices.micro_batch_size}", [(candidate, candidate.problem)]))
        watch.step()
    return tuple(found)


def _own_first(answer: Answer) -> list[Candidate]:
    return [answer.candidate, *(one for one in answer.candidates if one is not answer.candidate)]


def _other_kinds(placement: Placement) -> Iterator[_Kind]:
    degrees = placement.degrees
    if degrees.devices > 1:
        yield _Kind("no pipeline", lambda problem: replace(problem, stage_counts=(1,)))
        for schedule in PipelineSchedule:
            if schedule is not degrees.schedule:
                yield _Kind(f"schedule {schedule}", _with_schedule(schedule))
    else:
        yield _Kind("a pipeline", _with_stages)
    if degrees.width > 1:
        yield _Kind("no tensor parallelism", lambda problem: _with_widths(problem, lambda width: width == 1))
    else:
        yield _Kind("tensor parallelism", lambda problem: _with_widths(problem, lambda width: width > 1))
    if degrees.zero_stage:
        yield _Kind("no ZeRO", lambda problem: replace(problem, zero_stages=(0,)))
    else:
        yield _Kind("ZeRO", lambda problem: _with_zero(problem))
    if any(stage.recompute is not RecomputeMode.NONE for stage in placement.stages):
        yield _Kind("no recompute", lambda problem: replace(problem, recompute_modes=(RecomputeMode.NONE,)))
    else:
        yield _Kind("full recompute", lambda problem: replace(problem, recompute_modes=(RecomputeMode.FULL,)))


def _with_schedule(schedule: PipelineSchedule) -> Callable[[PlacementProblem], PlacementProblem | None]:
    def narrow(problem: PlacementProblem) -> PlacementProblem | None:
        if schedule not in problem.schedules or schedule not in problem.capabilities.schedules:
            return None
        return _with_stages(replace(problem, schedules=(schedule,)))

    return narrow


def _with_stages(problem: PlacementProblem) -> PlacementProblem | None:
    most = min(len(problem.graph.layers), problem.cluster.device_count)
    allowed = range(2, most + 1) if problem.stage_counts is None else [n for n in problem.stage_counts if n > 1]
    return replace(problem, stage_counts=tuple(allowed)) if len(allowed) else None


def _with_widths(problem: PlacementProblem, is_meant: Callable[[int], bool]) -> PlacementProblem | None:
    widths = tuple(width for width in problem.widths if is_meant(width))
    return replace(problem, tensor_widths=widths) if widths else None


def _with_zero(problem: PlacementProblem) -> PlacementProblem | None:
    stages = tuple(zero for zero in problem.zero_stages if zero and zero in problem.capabilities.zero_stages)
    return replace(problem, zero_stages=stages) if stages else None


def _runner_up(kind: _Kind, answer: Answer) -> RunnerUp:
    narrowed = [(one, problem) for one in _own_first(answer) if (problem := kind.narrow(one.problem)) is not None]
    if not narrowed:
        return RunnerUp(kind=kind.name, strategy=None, step_time_s=None, reason="not possible here")
    return _named_best(kind.name, narrowed)


def _named_best(name: str, narrowed: Sequence[tuple[Candidate, PlacementProblem]]) -> RunnerUp:
    best: RunnerUp | None = None
    is_proven = True
    for candidate, problem in narrowed:
        cutoff_s = math.inf if best is None or best.step_time_s is None else best.step_time_s
        placement, is_searched = _quick(problem, cutoff_s)
        is_proven &= is_searched
        if placement is not None:
            strategy = strategy_of(candidate, placement)
            best = RunnerUp(kind=name, strategy=strategy, step_time_s=placement.time_s, reason="")
    reason = "nothing fits" if is_proven else "a short search found nothing that fits"
    return best or RunnerUp(kind=name, strategy=None, step_time_s=None, reason=reason)


def best_of(narrowed: Sequence[tuple[Candidate, PlacementProblem]], least_s: float = math.inf) -> float | None:
    """The least time that a short search of several problems finds, or what is already known to be reached."""
    best_s = least_s
    for _, problem in narrowed:
        placement, _ = _quick(problem, best_s)
        best_s = best_s if placement is None else placement.time_s
    return best_s if best_s < math.inf else None


def _quick(problem: PlacementProblem, cutoff_s: float = math.inf) -> tuple[Placement | None, bool]:
    """A fast placement if one was found soon, and whether everything was looked at."""
    ground = Ground.of(problem)
    answer = search_degrees(ground, effort=_EFFORT, cutoff_s=cutoff_s, gap=_GAP)
    if not answer.found:
        return None, answer.bound_s >= cutoff_s
    return assemble(ground, answer.found[0].degrees, answer.found[0].stages), True


def changes(request: Request, answer: Answer, watch: Watch) -> tuple[Change, ...]:
    """What twice the memory, twice the links' bandwidth or twice the devices would bring."""
    cluster = request.cluster
    chip = cluster.accelerator
    larger = replace(cluster, accelerator=replace(chip, hbm_bytes=2 * chip.hbm_bytes))
    wanted = [
        (f"twice the memory ({2 * chip.hbm_bytes / 2**30:.0f} GiB)", larger),
        (f"twice the devices ({2 * cluster.device_count})", twice_the_devices(cluster)),
    ]
    watch.expect(3)
    found = []
    for text, other in wanted:
        watch.report(text)
        least_s = answer.placement.time_s if other.device_count == cluster.device_count else math.inf
        problems = [(one, replace(one.problem, cluster=other)) for one in _own_first(answer)]
        found.append(Change(text=text, step_time_s=best_of(problems, least_s)))
        watch.step()
    if cluster.levels:
        watch.report("twice the bandwidth of all links")
        found.append(_faster_links(request, answer, watch))
    watch.step()
    return tuple(found)


def twice_the_devices(cluster: Cluster) -> Cluster:
    """Twice as many devices, the outermost level twice as large."""
    if not cluster.levels:
        return cluster
    levels = (*cluster.levels[:-1], replace(cluster.levels[-1], size=2 * cluster.levels[-1].size))
    return Cluster(cluster.accelerator, 2 * cluster.device_count, levels)


def _faster_links(request: Request, answer: Answer, watch: Watch) -> Change:
    cluster = request.cluster
    levels = tuple(replace(one, bandwidth_bytes_per_s=2 * one.bandwidth_bytes_per_s) for one in cluster.levels)
    faster = replace(cluster, levels=levels)
    widths = sorted({1, answer.placement.degrees.width} & set(request.tensor_widths))
    slices = slice_model(request, answer.candidate.slices.micro_batch_size, watch, widths=widths, cluster=faster)
    candidate = replace(answer.candidate, slices=slices, problem=placement_problem(request, slices, faster))
    step_time_s = best_of([(candidate, candidate.problem)], answer.placement.time_s)
    return Change(text="twice the bandwidth of all links", step_time_s=step_time_s)


def unrestricted_s(answer: Answer) -> float | None:
    """The step time without the target's limits, on the same slices."""
    everything = Capabilities.everything()
    problems = [(one, replace(one.problem, capabilities=everything)) for one in _own_first(answer)]
    return best_of(problems, answer.placement.time_s)


def levers(request: Request, answer: Answer) -> tuple[Lever, ...]:
    """Single changes after which something fits, as arguments of `optimize`."""
    found: dict[str, Lever] = {}
    for candidate in answer.candidates:
        reasons = candidate.result.infeasibility
        for lever in reasons.levers if reasons is not None else ():
            cluster = lever.problem.cluster
            if lever.kind is LeverKind.DEVICES:
                text = f"{request.cluster.accelerator.name}:{cluster.device_count}"
                found.setdefault(lever.kind, Lever(text=lever.text, argument="cluster", value=repr(text)))
            elif lever.kind is LeverKind.HBM:
                value = f"<{request.cluster.device_count} devices of {cluster.accelerator.hbm_bytes} bytes>"
                found.setdefault(lever.kind, Lever(text=lever.text, argument="cluster", value=value))
            elif lever.kind is LeverKind.TENSOR_WIDTH:
                found.setdefault(
                    lever.kind,
                    Lever(text=lever.text, argument="tensor_widths", value=repr(lever.problem.tensor_widths)),
                )
    return tuple(found.values())
