"""What a plan's reader asks next: what binds, what other kinds of plans cost, what other hardware would bring.

Every figure comes from the same search on the same slices with one thing changed. Other kinds are searched over all
microbatch sizes that were sliced; more memory and more devices too. Faster links change the slices themselves, so only
the plan's own microbatch and width are sliced again: what is found is reached, and may be beaten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from phaze.capabilities import Capabilities, PipelineSchedule
from phaze.hardware import Cluster
from phaze.ir import RecomputeMode
from phaze.place import Effort, LeverKind, Placement, PlacementProblem, find_placement
from phaze.plan import Change, Lever, Plan, RunnerUp
from phaze.planner.build_plan import MEMORY_ITEMS, strategy_of
from phaze.planner.choose import Answer, Candidate, placement_problem
from phaze.planner.request import Request
from phaze.planner.slices import slice_model
from phaze.planner.watch import Watch

__all__ = ["best_of", "binding", "changes", "levers", "runners_up", "unrestricted_s"]

_EFFORT = Effort(nodes=2_000, nodes_per_choice=500, choices=1_000)
"""Enough to be close: these figures inform, and nothing is claimed to be optimal about them."""


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
    kinds = list(_other_kinds(answer.placement))
    watch.expect(len(kinds))
    found = []
    for kind in kinds:
        watch.report(f"the best plan of another kind: {kind.name}")
        found.append(_runner_up(kind, answer.candidates))
        watch.step()
    found += list(_other_sizes(answer))
    return tuple(found)


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


def _runner_up(kind: _Kind, candidates: Sequence[Candidate]) -> RunnerUp:
    narrowed = [(one, problem) for one in candidates if (problem := kind.narrow(one.problem)) is not None]
    if not narrowed:
        return RunnerUp(kind=kind.name, strategy=None, step_time_s=None, reason="not possible here")
    found = best_of(narrowed)
    if found is None:
        return RunnerUp(kind=kind.name, strategy=None, step_time_s=None, reason="nothing fits")
    candidate, placement = found
    return RunnerUp(kind=kind.name, strategy=strategy_of(candidate, placement), step_time_s=placement.time_s, reason="")


def best_of(
    narrowed: Sequence[tuple[Candidate, PlacementProblem]], effort: Effort = _EFFORT
) -> tuple[Candidate, Placement] | None:
    """The fastest placement of several problems."""
    best: tuple[Candidate, Placement] | None = None
    for candidate, problem in narrowed:
        found = _fastest(problem, effort, None if best is None else best[1].time_s)
        if found is not None and (best is None or found.time_s < best[1].time_s):
            best = (candidate, found)
    return best


def _fastest(problem: PlacementProblem, effort: Effort, cutoff_s: float | None) -> Placement | None:
    return find_placement(problem, top=1, effort=effort).best


def _other_sizes(answer: Answer) -> Iterator[RunnerUp]:
    for candidate in answer.candidates:
        if candidate is not answer.candidate:
            size, best = candidate.slices.micro_batch_size, candidate.result.best
            yield RunnerUp(
                kind=f"microbatch {size}",
                strategy=None if best is None else strategy_of(candidate, best),
                step_time_s=None if best is None else best.time_s,
                reason="nothing fits" if best is None else "",
            )


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
        best = best_of([(one, replace(one.problem, cluster=other)) for one in answer.candidates])
        found.append(Change(text=text, step_time_s=None if best is None else best[1].time_s))
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
    best = find_placement(placement_problem(request, slices, faster), top=1, effort=_EFFORT).best
    return Change(text="twice the bandwidth of all links", step_time_s=None if best is None else best.time_s)


def unrestricted_s(answer: Answer) -> float | None:
    """The step time without the target's limits, on the same slices."""
    everything = Capabilities.everything()
    best = best_of([(one, replace(one.problem, capabilities=everything)) for one in answer.candidates])
    return None if best is None else min(best[1].time_s, answer.placement.time_s)


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
