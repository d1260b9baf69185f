"""The explanation of a plan: what binds, runners-up of other kinds, and what more memory, links or devices would bring.

Runners-up come out of the search that found the plan, as far as it came across their kind (`_seen`). What is missing is
looked for by the same search on the same slices with one thing changed (`_short_search`). That search is cut short: the
step time that it reports is reached, but a longer search might find a better one. The most promising slices are tried,
the plan's own first, and those that were pruned by their bound last: they are scheduled only now. Faster links change
the slices themselves, so only the plan's own ones are made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from phaze.errors import PhazeError
from phaze.hardware import Cluster, parse_cluster
from phaze.hardware.hardware_numbers import LARGEST_BYTES
from phaze.ir import BUDGET_MODES, RecomputeMode
from phaze.parallelism import ALL_DEVICES, HOST_WORDS, PIPELINE_SCHEDULES, Offload, Parallelism, PipelineSchedule
from phaze.place import FoundPlan, Placement, PlacementProblem, PreparedProblem, RemedyKind
from phaze.place.memory.remedies import Remedy as PlacementRemedy
from phaze.place.model.network_prices import Network
from phaze.place.search.parallelism_search import try_parallelism
from phaze.place.search.short_search import short_search
from phaze.place.simulation.placement import assemble
from phaze.plan.plan import Change, Plan, Remedy, RunnerUp
from phaze.plan.plan_integrity import MEMORY_ITEMS
from phaze.planner.candidate_slicings import CandidateSlicing, most_promising
from phaze.planner.plan_building import complete_strategy, strategy_of
from phaze.planner.progress import Watch
from phaze.planner.strategy_search import Answer, Candidate, narrowed_problem
from phaze.profile.model_profiles import (
    ModelProfiles,
    profile_model,
    profile_options,
    sequence_parallel_of,
    slice_model,
)
from phaze.question import Question
from phaze.targets import Capabilities

__all__ = ["best_of", "binding", "changes", "remedies", "runners_up", "unrestricted_s"]

_MOST_SLICES = 2
"""How many of the slices that were placed a short search tries; more rarely change what it reports."""


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
    findings = [f"time: {name} is {seconds / total:.1%} of the step"]
    if len(plan.stages) > 1:
        stage_times_s = [stage.forward_s + stage.backward_s for stage in plan.stages]
        slowest = stage_times_s.index(max(stage_times_s))
        over = stage_times_s[slowest] / (sum(stage_times_s) / len(stage_times_s)) - 1
        findings.append(f"balance: stage {slowest} is the slowest, {over:.1%} above the average stage")
    fullest = max(plan.stages, key=lambda stage: stage.memory_bytes["total"])
    memory = fullest.memory_bytes
    item = max(MEMORY_ITEMS, key=lambda name: memory[name])
    findings.append(
        f"memory: stage {plan.stages.index(fullest)} is the fullest, {memory['total'] / 2**30:.1f} of "
        f"{memory['capacity'] / 2**30:.1f} GiB, {memory[item] / 2**30:.1f} of it {item}"
    )
    return tuple(findings)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Another kind of plan, such as "no pipeline".

    Attributes:
        name: what people read.
        has: whether a strategy is of this kind.
        narrow: a problem whose only plans are of this kind; None where there are none.
        includes: whether a slicing has plans of this kind at all.
    """

    name: str
    has: Callable[[Parallelism], bool]
    narrow: Callable[[PlacementProblem], PlacementProblem | None] = lambda problem: problem
    includes: Callable[[ModelProfiles | CandidateSlicing], bool] = lambda slices: True


def runners_up(answer: Answer, watch: Watch) -> tuple[RunnerUp, ...]:
    """The best plan of each other kind: one that the search came across, else one that is looked for now."""
    kinds = [*_other_kinds(answer.placement), *_other_budgets(answer), *_other_axes(answer), *_other_sizes(answer)]
    watch.expect(len(kinds))
    found: dict[str, RunnerUp] = {}
    searchable = _Searchable(answer)
    for kind in kinds:
        watch.report(f"the best plan of another kind: {kind.name}")
        found[kind.name] = _seen(kind, answer) or _runner_up(kind, searchable)
        watch.step()
    return tuple(_best_of_kind(kind, found) for kind in kinds)


def _seen(kind: _Kind, answer: Answer) -> RunnerUp | None:
    """The fastest plan of a kind that the search of the answer came across."""
    best: tuple[float, Parallelism] | None = None
    for candidate in answer.candidates:
        plans = dict.fromkeys(candidate.result.best_by_kind.values())
        for plan in plans if best is None else (plan for plan in plans if plan.time_s < best[0]):
            strategy = _strategy_of_found(candidate, plan)
            if kind.has(strategy) and (best is None or plan.time_s < best[0]):
                best = (plan.time_s, strategy)
    return None if best is None else RunnerUp(kind=kind.name, strategy=best[1], step_time_s=best[0], reason="")


def _strategy_of_found(candidate: Candidate, plan: FoundPlan) -> Parallelism:
    """The complete strategy of a plan that the search of a candidate came across."""
    modes = candidate.problem.choices.recompute
    return complete_strategy(candidate.slices, plan.parallelism, [modes[mode] for _, mode in plan.stages])


def _best_of_kind(kind: _Kind, found: Mapping[str, RunnerUp]) -> RunnerUp:
    """The fastest of all plans that were found for any kind: a plan may be of several kinds."""
    best = found[kind.name]
    for runner in found.values():
        if runner.strategy is None or runner.step_time_s is None or not kind.has(runner.strategy):
            continue
        if best.step_time_s is None or runner.step_time_s < best.step_time_s:
            best = replace(runner, kind=kind.name)
    return best


def _promising(answer: Answer) -> list[Candidate]:
    """The plan's own slices, then others by the time that was found for them, then those most like the plan's own."""
    plan_slices, names = answer.candidate.slices, ("tp", "cp", "ep", "micro_batch_size")

    def order(candidate: Candidate) -> tuple[bool, float, float]:
        best, slices = candidate.result.best, candidate.slices
        unlike = sum(abs(math.log2(getattr(slices, name) / getattr(plan_slices, name))) for name in names)
        return candidate is not answer.candidate, math.inf if best is None else best.time_s, unlike

    return sorted(answer.candidates, key=order)


def _other_kinds(placement: Placement) -> Iterator[_Kind]:
    parallelism = placement.parallelism
    if parallelism.pp > 1:
        yield _Kind("no pipeline", lambda plan: plan.pp == 1, lambda problem: problem.choosing(pp=(1,)))
        for schedule in PIPELINE_SCHEDULES:
            if schedule is not parallelism.schedule:
                yield _Kind(f"schedule {schedule}", _is_scheduled(schedule), _with_schedule(schedule))
    else:
        yield _Kind("a pipeline", lambda plan: plan.pp > 1, _with_stages)
    if parallelism.tp > 1:
        yield _Kind("no tensor parallelism", lambda plan: plan.tp == 1, includes=lambda slices: slices.tp == 1)
    else:
        yield _Kind("tensor parallelism", lambda plan: plan.tp > 1, includes=lambda slices: slices.tp > 1)
    if parallelism.zero:
        yield _Kind("no ZeRO", lambda plan: not plan.zero, lambda problem: problem.choosing(zero=(0,)))
        if parallelism.shard_groups > 1:
            yield _Kind("ZeRO over all devices", _is_sharded_over_all, _with_zero_over_all)
    else:
        yield _Kind("ZeRO", lambda plan: plan.zero > 0, _with_zero)
    mode, name = RecomputeMode.FULL, "full recompute"
    if any(stage.recompute is not RecomputeMode.NONE for stage in placement.stages):
        mode, name = RecomputeMode.NONE, "no recompute"
    yield _Kind(name, lambda plan: set(plan.recompute) == {mode.value}, _with_recompute(mode))


def _other_budgets(answer: Answer) -> Iterator[_Kind]:
    """Plans without the budgets that stages recompute within, or with them where they were offered and not chosen."""
    offered = answer.candidate.problem.choices.recompute
    named, budgets = (tuple(mode for mode in offered if (mode in BUDGET_MODES) == is_one) for is_one in (False, True))
    is_used = any(stage.recompute in BUDGET_MODES for stage in answer.placement.stages)
    modes = named if is_used else budgets
    if not named or not budgets:
        return
    yield _Kind(
        "no budgets of recompute" if is_used else "recompute within budgets",
        lambda plan: BUDGET_NAMES.isdisjoint(plan.recompute) == is_used,
        lambda problem: problem.choosing(recompute=modes),
    )


BUDGET_NAMES = frozenset(mode.value for mode in BUDGET_MODES)
"""The modes with a budget as strategies name them."""


_AXES: tuple[tuple[str, object, str, str], ...] = (
    ("cp", 1, "no context parallelism", "context parallelism"),
    ("ep", 1, "no expert parallelism", "expert parallelism"),
)
"""Axes by which slicings differ beside tp: their name, their value where they are not used, and plans without them and
with them in words."""


def _other_axes(answer: Answer) -> Iterator[_Kind]:
    """Plans without an axis that the plan uses, and with one that it does not use and that was looked at."""
    looked_at: list[ModelProfiles | CandidateSlicing] = [candidate.slices for candidate in answer.candidates]
    looked_at += [pruned.slicing for pruned in answer.pruned]
    for kept in Offload:
        if kept is not answer.placement.parallelism.offload and any(slices.offload is kept for slices in looked_at):
            yield _with_offload(kept)
    for name, unused, without, using in _AXES:
        if getattr(answer.placement.parallelism, name) != unused:
            yield _of_axis(name, unused, without, is_used=False)
        elif any(getattr(slices, name) != unused for slices in looked_at):
            yield _of_axis(name, unused, using, is_used=True)


def _with_offload(kept: Offload) -> _Kind:
    def has(chosen: Parallelism | ModelProfiles | CandidateSlicing) -> bool:
        return chosen.offload is kept

    return _Kind(f"{HOST_WORDS.get(kept, 'nothing')} on the host", has, includes=has)


def _of_axis(name: str, unused: object, text: str, *, is_used: bool) -> _Kind:
    def has(chosen: Parallelism | ModelProfiles | CandidateSlicing) -> bool:
        return bool((getattr(chosen, name) != unused) == is_used)

    return _Kind(text, has, includes=has)


def _with_recompute(mode: RecomputeMode) -> Callable[[PlacementProblem], PlacementProblem | None]:
    """One mode in all stages, where the target runs it."""
    return lambda problem: problem.choosing(recompute=(mode,)) if mode in problem.capabilities.recompute_modes else None


def _is_scheduled(schedule: PipelineSchedule) -> Callable[[Parallelism], bool]:
    return lambda plan: plan.schedule == schedule.value


def _with_schedule(schedule: PipelineSchedule) -> Callable[[PlacementProblem], PlacementProblem | None]:
    def narrow(problem: PlacementProblem) -> PlacementProblem | None:
        if schedule not in problem.choices.schedule or schedule not in problem.capabilities.schedules:
            return None
        return _with_stages(problem.choosing(schedule=(schedule,)))

    return narrow


def _with_stages(problem: PlacementProblem) -> PlacementProblem | None:
    most = min(len(problem.graph.layers), problem.cluster.device_count)
    allowed = range(2, most + 1) if problem.choices.pp is None else [n for n in problem.choices.pp if n > 1]
    return problem.choosing(pp=tuple(allowed)) if len(allowed) else None


def _with_zero(problem: PlacementProblem) -> PlacementProblem | None:
    stages = tuple(zero for zero in problem.choices.zero if zero and zero in problem.capabilities.zero_stages)
    return problem.choosing(zero=stages) if stages else None


def _is_sharded_over_all(plan: Parallelism) -> bool:
    return plan.zero > 0 and plan.shard_groups == 1


def _with_zero_over_all(problem: PlacementProblem) -> PlacementProblem | None:
    sharded = _with_zero(problem)
    return None if sharded is None else sharded.choosing(shard=(ALL_DEVICES,))


def _other_sizes(answer: Answer) -> Iterator[_Kind]:
    sizes = {candidate.slices.micro_batch_size for candidate in answer.candidates}
    sizes |= {pruned.slicing.micro_batch_size for pruned in answer.pruned}
    for size in sorted(sizes - {answer.candidate.slices.micro_batch_size}):
        yield _of_size(size)


def _of_size(wanted: int) -> _Kind:
    return _Kind(
        f"microbatch {wanted}",
        lambda plan: plan.micro_batch_size == wanted,
        includes=lambda slices: slices.micro_batch_size == wanted,
    )


class _Searchable:
    """The candidates of an answer with the tables of their problems, made when first needed and shared by all kinds."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._networks = known_networks(answer)
        self._prepared: dict[int, PreparedProblem] = {}
        self._unpruned: dict[int, Candidate] = {}

    def of(self, candidate: Candidate) -> PreparedProblem:
        """The tables of one candidate."""
        if id(candidate) not in self._prepared:
            cluster, calibration = candidate.problem.cluster, candidate.problem.calibration
            network = self._networks.setdefault(cluster, Network(cluster, calibration))
            self._prepared[id(candidate)] = PreparedProblem.of(candidate.problem, network=network)
        return self._prepared[id(candidate)]

    def with_plans_of(self, kind: _Kind, cutoff_s: Callable[[], float]) -> Iterator[tuple[Candidate, PlacementProblem]]:
        """Candidates that may have plans of a kind, narrowed to it: the placed ones first, then what was pruned.

        Of these, the ones that provably have no plan below the cutoff by then are left out.
        """
        for candidate in _promising(self.answer):
            slices = candidate.slices
            if kind.includes(slices) and (problem := kind.narrow(candidate.problem)):
                yield candidate, problem
        pruned = {id(pruned.slicing): pruned for pruned in self.answer.pruned if kind.includes(pruned.slicing)}
        waiting = [entry.slicing for entry in pruned.values() if self._is_possible(kind, entry.slicing)]
        for slicing, is_ruled_out in most_promising(waiting, cutoff_s):
            if is_ruled_out:
                continue
            if id(slicing) not in self._unpruned:
                self._unpruned[id(slicing)] = pruned[id(slicing)].candidate(self.answer.question)
            candidate = self._unpruned[id(slicing)]
            problem = kind.narrow(candidate.problem)
            assert problem is not None  # a problem with the same choices has plans of the kind
            yield candidate, problem

    def _is_possible(self, kind: _Kind, slicing: CandidateSlicing) -> bool:
        """Whether the choices that a slicing leaves include plans of a kind; its profiles are not asked for."""
        runs = self.answer.question.capabilities.at_degrees(tp=slicing.tp, cp=slicing.cp, ep=slicing.ep)
        return kind.narrow(replace(self.answer.candidate.problem, capabilities=runs)) is not None


def _runner_up(kind: _Kind, searchable: _Searchable) -> RunnerUp:
    """The best plan of a kind, or why there is none."""
    best: tuple[Candidate, Placement] | None = None
    is_proven, tried = True, 0

    def reached_s() -> float:
        return math.inf if best is None else best[1].time_s

    for candidate, problem in searchable.with_plans_of(kind, reached_s):
        if tried == _MOST_SLICES:
            is_proven = False
            break
        tried += 1
        cutoff_s = reached_s()
        placement: Placement | None
        if problem is candidate.problem and candidate.result.best is not None:
            placement, is_searched = candidate.result.best, True
        else:
            placement, is_searched = _short_search(problem, cutoff_s, searchable.of(candidate))
        is_proven &= is_searched
        if placement is not None and placement.time_s < cutoff_s:
            best = (candidate, placement)
    if best is not None:
        strategy = strategy_of(*best)
        return RunnerUp(kind=kind.name, strategy=strategy, step_time_s=best[1].time_s, reason="")
    if not tried:
        reason = "not possible here"
    else:
        reason = "nothing fits" if is_proven else "a short search found nothing that fits"
    return RunnerUp(kind=kind.name, strategy=None, step_time_s=None, reason=reason)


def known_networks(answer: Answer) -> dict[Cluster, Network]:
    """The prices of links that the search behind an answer asked for: they serve its explanation again."""
    known = (candidate.known for candidate in answer.candidates)
    networks = (strategies.prepared.network for strategies in known if strategies is not None)
    return {network.cluster: network for network in networks}


def best_of(
    problems: Iterable[PlacementProblem],
    least_s: float = math.inf,
    known: dict[Cluster, Network] | None = None,
    likely: Parallelism | None = None,
) -> float | None:
    """The least time that a short search of several problems finds, or what is already known to be reached.

    ``known`` are prices of links from before, of problems with the same calibration. ``likely`` is a strategy that is
    tried first on each: what a change brings to a plan may be less than a short search looks for.
    """
    best_s, networks = least_s, dict(known or {})
    for problem in problems:
        network = networks.setdefault(problem.cluster, Network(problem.cluster, problem.calibration))
        prepared = PreparedProblem.of(problem, network=network)
        if likely is not None and (plan := try_parallelism(prepared, likely, cutoff_s=best_s)):
            best_s = plan.time_s
        placement, _ = _short_search(problem, best_s, prepared)
        best_s = best_s if placement is None else placement.time_s
    return best_s if best_s < math.inf else None


def _short_search(problem: PlacementProblem, cutoff_s: float, known: PreparedProblem) -> tuple[Placement | None, bool]:
    """A fast placement below the cutoff if a short search finds one, and whether everything was looked at.

    ``known`` has the tables of the same problem, maybe under other choices.
    """
    prepared = known.with_problem(problem)
    plan, is_searched = short_search(prepared, cutoff_s)
    return None if plan is None else assemble(prepared, plan.parallelism, plan.stages), is_searched


def changes(question: Question, answer: Answer, watch: Watch) -> tuple[Change, ...]:
    """What twice the memory, twice the links' bandwidth or twice the devices would bring."""
    cluster = question.cluster
    chip = cluster.accelerator
    larger = replace(cluster, accelerator=replace(chip, hbm_bytes=min(2 * chip.hbm_bytes, LARGEST_BYTES)))
    changed_clusters = [
        (f"twice the memory ({2 * chip.hbm_bytes / 2**30:.0f} GiB)", larger),
        (f"twice the devices ({2 * cluster.device_count})", twice_the_devices(cluster)),
    ]
    watch.expect(3)
    outcomes = []
    plan = answer.placement
    for text, changed in changed_clusters:
        watch.report(text)
        least_s = plan.time_s if changed.device_count == cluster.device_count else math.inf
        problems = [replace(candidate.problem, cluster=changed) for candidate in _promising(answer)[:_MOST_SLICES]]
        best_s = best_of(problems, least_s, known_networks(answer), plan.parallelism)
        outcomes.append(Change(text=text, step_time_s=best_s))
        watch.step()
    if cluster.levels:
        watch.report("twice the bandwidth of all links")
        outcomes.append(_faster_links(question, answer))
    watch.step()
    return tuple(outcomes)


def twice_the_devices(cluster: Cluster) -> Cluster:
    """Twice as many devices, the outermost level twice as large."""
    if not cluster.levels:
        return cluster
    levels = (*cluster.levels[:-1], replace(cluster.levels[-1], size=2 * cluster.levels[-1].size))
    return replace(cluster, device_count=2 * cluster.device_count, levels=levels)


def _faster_links(question: Question, answer: Answer) -> Change:
    cluster = question.cluster
    levels = tuple(replace(level, bandwidth_bytes_per_s=2 * level.bandwidth_bytes_per_s) for level in cluster.levels)
    faster = replace(cluster, levels=levels)
    slices = answer.candidate.slices
    is_split = sequence_parallel_of(slices.sharded)
    axes = {"cp": slices.cp, "ep": slices.ep}
    model = slice_model(question, slices.graph, slices.tp, sequence_parallel=is_split, cluster=faster, **axes)
    profiles = replace(profile_model(model, profile_options(question, slices.modes)), offload=slices.offload)
    problem = replace(narrowed_problem(question, profiles), cluster=faster)
    step_time_s = best_of([problem], answer.placement.time_s, likely=answer.placement.parallelism)
    return Change(text="twice the bandwidth of all links", step_time_s=step_time_s)


def unrestricted_s(answer: Answer) -> float | None:
    """The step time without the target's limits, on the same slices."""
    everything = Capabilities.everything()
    problems = (replace(pair.problem, capabilities=everything) for pair in _promising(answer)[:_MOST_SLICES])
    return best_of(problems, answer.placement.time_s, known_networks(answer))


def _cluster_value(cluster: Cluster, count: int) -> str:
    """More of the same devices as an argument: as text where text says which they are, else in words."""
    name = cluster.accelerator.name
    try:
        is_plain = parse_cluster(f"{name}:{cluster.device_count}") == cluster
    except PhazeError:
        is_plain = False
    return repr(f"{name}:{count}") if is_plain else f"<{count} devices like these>"


def remedies(question: Question, answer: Answer) -> tuple[Remedy, ...]:
    """Single changes after which something fits, as arguments of `optimize`."""
    by_kind: dict[RemedyKind, Remedy] = {}
    for candidate in answer.candidates:
        reasons = candidate.result.infeasibility
        for kind in (RemedyKind.TP, RemedyKind.DEVICES, RemedyKind.HBM) if reasons is not None else ():
            if kind in by_kind:
                continue
            assert reasons is not None
            if remedy := reasons.remedy(kind):
                by_kind[kind] = _as_argument(question, remedy)
    return tuple(by_kind.values())


def _as_argument(question: Question, remedy: PlacementRemedy) -> Remedy:
    """A remedy of placement as an argument of `optimize`."""
    cluster = remedy.problem.cluster
    match remedy.kind:
        case RemedyKind.DEVICES:
            value = _cluster_value(question.cluster, cluster.device_count)
        case RemedyKind.HBM:
            value = f"<{question.cluster.device_count} devices of {cluster.accelerator.hbm_bytes} bytes>"
        case _:
            return Remedy(text=remedy.text, argument="tp", value=repr(remedy.problem.choices.tp))
    return Remedy(text=remedy.text, argument="cluster", value=value)
