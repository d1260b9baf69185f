"""What workers do: bound a corner, or evaluate an accelerator. Functions of values to values, so that any process can.

An evaluation is the planner's own: the slices are scheduled on the accelerator, placed, and simulated. Cells come with
the bound that is known under each; one that cannot beat the best so far is not scheduled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from phaze.explore.design_bounds import Cell
from phaze.hardware import Accelerator
from phaze.ir import SEARCHED_MODES, RecomputeMode, recomputed_ops
from phaze.ir.layers import single_layer
from phaze.json_records import to_document
from phaze.parallelism import Parallelism, read_strategy
from phaze.place import (
    Bounded,
    LayerProfile,
    Placement,
    PlacementProblem,
    SearchEffort,
    bound_placement,
    find_placement,
    place_as_paper,
)
from phaze.place.model.placement_problem import ProfileKey
from phaze.planner.plan_building import strategy_of
from phaze.planner.plan_energy import step_energy
from phaze.planner.strategy_search import Answer, Candidate
from phaze.profile.layer_passes import ProfileOptions, priced_pass
from phaze.profile.model_profiles import layer_variants, profile_model, profile_options
from phaze.question import Question
from phaze.schedule import Compatibility, schedule_layer
from phaze.shard import Axis, ShardedLayer, ShardedModel, slice_layer

__all__ = [
    "BoundTask",
    "EvaluateTask",
    "Outcome",
    "ScheduleTask",
    "bound_corner",
    "evaluate_point",
    "schedule_options",
    "schedule_rows",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundTask:
    """Which seconds no placement of a problem beats; more than the cutoff is of no interest."""

    problem: PlacementProblem
    cutoff_s: float
    is_paper: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluateTask:
    """The best plan of one model on one accelerator, if it takes less than the cutoff.

    `cells` come with the bound that is known under each. `likely` is the strategy of an `Outcome` elsewhere that may
    well be the best here, too: if so, it is found sooner.
    """

    model_question: Question
    accelerator: Accelerator
    cells: tuple[tuple[float, Cell], ...]
    cutoff_s: float
    likely: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduleTask:
    """A cell on a few accelerators, to be scheduled and not placed."""

    cell: Cell
    accelerators: tuple[Accelerator, ...]
    options: ProfileOptions
    cutoff_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an evaluation found; times are None where no plan takes less than the cutoff.

    `bound_s` is under every plan of every cell that was given, at most the cutoff (None: nothing fits). `strategy` has
    the keys that `phaze.evaluate` takes, `needed_bytes` is the fullest device's. `scheduled` and `placed` count cells.
    """

    time_s: float | None
    bound_s: float | None
    energy_j: float | None = None
    strategy: Mapping[str, object] = field(default_factory=dict)
    needed_bytes: float = 0.0
    scheduled: int = 0
    placed: int = 0


def bound_corner(task: BoundTask) -> float:
    """At most the cutoff; infinite if nothing fits."""
    if task.is_paper:
        found = place_as_paper(task.problem)
        return math.inf if found is None else min(found.time_s, task.cutoff_s)
    effort = None if math.isinf(task.cutoff_s) else SearchEffort()
    return bound_placement(task.problem, cutoff_s=task.cutoff_s, effort=effort)


def schedule_rows(task: ScheduleTask) -> list[list[float]]:
    """A row an accelerator, from the proven bounds of the schedules that an evaluation would use."""
    found = []
    for accelerator in task.accelerators:
        if task.cell.is_paper:
            profiles = _paper_profiles(task.cell, accelerator, task.options)[1]
        else:
            profiles = dict(profile_model(_moved(task.cell.sharded, accelerator), task.options).profiles)
        found.append([_bound_of(profiles, task.cell.tp, key, name) for key, name in task.cell.numbers])
    return found


def _bound_of(profiles: Mapping[ProfileKey, LayerProfile], tp: int, key: str, name: str) -> float:
    """One number of a row."""
    mode = RecomputeMode(name) if name in list(RecomputeMode) else RecomputeMode.NONE
    profile = profiles[key, tp, mode]
    parts = {
        "forward": profile.forward_s,
        "to_inputs": profile.backward_input_s,
        "to_weights": profile.backward_weight_s,
    }
    return float(parts.get(name, profile.recompute_s).bound[0]) * (1 - 1e-12)


def schedule_options(model_question: Question) -> ProfileOptions:
    """How passes are scheduled: to half of the gap, which leaves the other half to placement."""
    return profile_options(replace(model_question, gap=model_question.gap / 2))


def evaluate_point(task: EvaluateTask) -> Outcome:
    """Schedule and place the cells, the lowest bound first."""
    best = Outcome(time_s=None, bound_s=None)
    bound_s, cutoff_s, scheduled, placed = math.inf, task.cutoff_s, 0, 0
    for least_s, cell in sorted(task.cells, key=lambda pair: (pair[0], pair[1].name)):
        if least_s >= cutoff_s * (1 - task.model_question.gap / 2):
            bound_s = min(bound_s, least_s)
            continue
        scheduled += 1
        found = _paper_outcome(task, cell) if cell.is_paper else _outcome(task, cell, cutoff_s)
        placed += found.placed
        bound_s = min(bound_s, max(least_s, math.inf if found.bound_s is None else found.bound_s))
        if found.time_s is not None and found.time_s < cutoff_s:
            best, cutoff_s = found, found.time_s
    return replace(best, bound_s=None if math.isinf(bound_s) else bound_s, scheduled=scheduled, placed=placed)


def _outcome(task: EvaluateTask, cell: Cell, cutoff_s: float) -> Outcome:
    model_question = replace(
        task.model_question, cluster=replace(task.model_question.cluster, accelerator=task.accelerator)
    )
    slices = profile_model(_moved(cell.sharded, task.accelerator), schedule_options(model_question))
    problem = replace(cell.problem, profiles=slices.profiles, cluster=model_question.cluster)
    result = find_placement(
        problem,
        top=1,
        cutoff_s=cutoff_s,
        gap=task.model_question.gap / 2,
        network=cell.network,
        likely=_degrees(task.likely, cell),
    )
    bound_s = None if math.isinf(result.bound_s) else result.bound_s
    if result.best is None:
        return Outcome(time_s=None, bound_s=bound_s, placed=1)
    candidate = Candidate(slices=slices, problem=problem, result=result)
    answer = Answer(placement=result.best, candidate=candidate, candidates=(candidate,), bound_s=result.bound_s)
    return Outcome(
        time_s=result.best.time_s,
        bound_s=bound_s,
        energy_j=step_energy(model_question, answer, 1.0)["total_j"],
        strategy=_strategy(candidate, result.best),
        needed_bytes=max(memory.total_bytes for memory in result.best.memory),
        placed=1,
    )


def _strategy(candidate: Candidate, placement: Placement) -> dict[str, object]:
    """What was chosen; slices were free to split sequences between some layers and not between others."""
    strategy = to_document(strategy_of(candidate, placement))
    del strategy["sequence_parallel"]
    return {**strategy, "stages": [len(stage.layers) for stage in placement.stages]}


def _degrees(strategy: Mapping[str, object], cell: Cell) -> Parallelism | None:
    """Those of a strategy that is one of the cell's."""
    if (strategy.get("micro_batch_size"), strategy.get("tp")) != (cell.micro_batch_size, cell.tp):
        return None
    fixed = read_strategy(strategy)
    names = ("dp", "tp", "pp", "chunks", "zero", "schedule")
    return Parallelism(**{name: fixed[name] for name in names})  # type: ignore[arg-type]


def _moved(model: ShardedModel, accelerator: Accelerator) -> ShardedModel:
    """The same slices on another accelerator; equal layers stay one object."""
    axis = Axis(replace(model.axis.cluster, accelerator=accelerator), model.axis.tp, model.axis.calibration)
    once: dict[int, ShardedLayer] = {}
    for layer in model.layers:
        once.setdefault(id(layer), replace(layer, problem=replace(layer.problem, axis=axis)))
    return replace(model, axis=axis, layers=tuple(once[id(layer)] for layer in model.layers))


def _paper_outcome(task: EvaluateTask, cell: Cell) -> Outcome:
    """As the paper counts: its schedules, its placement; bounds are those of the schedules' bounds."""
    values, bounds = _paper_profiles(cell, task.accelerator, schedule_options(task.model_question))
    cluster = replace(cell.problem.cluster, accelerator=task.accelerator)
    problem = replace(cell.problem, profiles=values, cluster=cluster)
    found = place_as_paper(problem)
    if found is None:
        return Outcome(time_s=None, bound_s=None, placed=1)
    least = place_as_paper(replace(problem, profiles=bounds))
    assert least is not None
    strategy = {
        "dp": found.dp,
        "tp": found.tp,
        "pp": len(found.stages),
        "micro_batch_size": cell.micro_batch_size,
        "recompute": found.recompute,
        "stages": [len(layers) for layers in found.stages],
    }
    return Outcome(time_s=found.time_s, bound_s=min(least.time_s, found.time_s), strategy=strategy, placed=1)


def _paper_profiles(
    cell: Cell, accelerator: Accelerator, options: ProfileOptions
) -> tuple[dict[ProfileKey, LayerProfile], dict[ProfileKey, LayerProfile]]:
    """Profiles with the seconds of schedules, and with their bounds."""
    times: dict[tuple[str, str], tuple[float, float]] = {}
    for key, layer in layer_variants(_moved(cell.sharded, accelerator)).items():
        local = slice_layer(layer)
        whole = single_layer(local)
        passes = {"forward": whole.forward, "backward": whole.backward}
        passes |= {mode.value: recomputed_ops(local, whole, mode) for mode in SEARCHED_MODES}
        for name, ops in passes.items():
            times[key, name] = (0.0, 0.0)
            if ops:
                priced = priced_pass(layer, local, ops, options, compatibility=Compatibility.PAPER)
                schedule = schedule_layer(priced.problem(), gap=options.gap, work=options.work, cache=options.cache)
                times[key, name] = (schedule.time_s, schedule.time_bound_s)
    found: list[dict[ProfileKey, LayerProfile]] = []
    for side in (0, 1):
        found.append(
            {
                (key, tp, mode): replace(
                    profile,
                    forward_s=Bounded.exact(times[key, "forward"][side]),
                    backward_input_s=Bounded.exact(times[key, "backward"][side]),
                    backward_weight_s=Bounded.exact(0.0),
                    recompute_s=Bounded.exact(times[key, mode.value][side]),
                )
                for (key, tp, mode), profile in cell.problem.profiles.items()
            }
        )
    return found[0], found[1]
