"""What workers compute: bounds of a box's best case, schedules of layers, and the best plan of a model on a design.

Every task is a function of values to values, so that any process can run it. An evaluation is the planner's own: the
slices are scheduled on the accelerator, placed, and simulated. Slicings come with the bound that is known of each, and
one that cannot beat the best so far is not scheduled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from phaze.explore.design_bounds import FORWARD, TO_INPUTS, TO_WEIGHTS, PassColumn, Slicing
from phaze.hardware import Accelerator
from phaze.ir import SEARCHED_MODES, RecomputeMode, recomputed_ops
from phaze.ir.layers import single_layer
from phaze.json_documents import to_document
from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place import (
    Bounded,
    LayerProfile,
    PlacementProblem,
    SearchEffort,
    bound_placement,
    find_placement,
    place_as_paper,
)
from phaze.planner.plan_building import strategy_of
from phaze.planner.strategy_search import Answer, Candidate
from phaze.planner.time_and_energy import step_energy
from phaze.profile.layer_passes import ProfileOptions, priced_pass
from phaze.profile.layer_profile import ProfileKey
from phaze.profile.model_profiles import layer_variants, profile_model, profile_options, sequence_parallel_of
from phaze.question import Question
from phaze.schedule import Compatibility, schedule_layer
from phaze.shard import ShardedLayer, ShardedModel, slice_layer
from phaze.tolerances import PASS_BOUND_MARGIN

__all__ = [
    "BoundTask",
    "EvaluateTask",
    "Evaluation",
    "ScheduleTask",
    "bound_step_time",
    "evaluate_design",
    "on_accelerator",
    "one_device_delay_s",
    "placement_degrees",
    "schedule_pass_bounds",
]

_PLACEMENT_SHARE_OF_GAP = 0.5
"""The part of the search's gap that placement may leave unproven; the rest is left to schedules (`profile_options`)."""

_PAPER_BACKWARD = "backward"
"""The name of the whole backward pass, which the paper's program does not cut in two."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundTask:
    """A placement problem whose step time is to be bounded; bounds above the cutoff are of no interest."""

    problem: PlacementProblem
    cutoff_s: float
    is_paper: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluateTask:
    """One model on one accelerator, whose best plan is wanted if it takes less than the cutoff.

    Attributes:
        model_question: what is asked of the model.
        accelerator: the accelerator with its memory.
        slicings: the slicings to choose from, each after the bound on its step time that is known.
        cutoff_s: plans that take longer are of no interest.
        likely: the parallelism of another accelerator's best plan. If it is the best here, too, it is found sooner.
    """

    model_question: Question
    accelerator: Accelerator
    slicings: tuple[tuple[float, Slicing], ...]
    cutoff_s: float
    likely: Parallelism | None = None

    def with_slicing_of(self, evaluation: Evaluation) -> EvaluateTask:
        """The same task with nothing but the slicing of another accelerator's plan to choose from."""
        likely = evaluation.parallelism
        assert likely is not None
        slicings = [
            (bound_s, slicing)
            for bound_s, slicing in self.slicings
            if (slicing.micro_batch_size, slicing.tp) == (likely.micro_batch_size, likely.tp)
        ]
        return replace(self, slicings=tuple(slicings), likely=likely)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduleTask:
    """The layers of a slicing, to be scheduled on a few accelerators and not placed."""

    slicing: Slicing
    accelerators: tuple[Accelerator, ...]
    options: ProfileOptions
    cutoff_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The best plan of a model on an accelerator, as far as an evaluation looked for it.

    Attributes:
        time_s: seconds of a step; None where no plan takes less than the cutoff.
        bound_s: no plan of any slicing that was given takes less; at most the cutoff. None where nothing fits.
        energy_j: joules of a step; None where energy is not counted.
        parallelism: the plan's strategy; None without a plan.
        stages: how many layers each stage of the plan has.
        needed_bytes: memory of the fullest device.
        scheduled: slicings whose layers were scheduled.
        placed: slicings that were placed.
    """

    time_s: float | None
    bound_s: float | None
    energy_j: float | None = None
    parallelism: Parallelism | None = None
    stages: tuple[int, ...] = ()
    needed_bytes: float = 0.0
    scheduled: int = 0
    placed: int = 0

    def __post_init__(self) -> None:
        """Check that times are positive, and that there is a plan exactly where there is a time."""
        if min((value for value in (self.time_s, self.bound_s) if value is not None), default=1.0) < 0:
            raise ValueError(f"time_s is {self.time_s} and bound_s {self.bound_s}; expected no negative time")
        if self.time_s == 0 or (self.time_s is None) != (self.parallelism is None):
            raise ValueError(f"time_s is {self.time_s} where the plan is {self.parallelism}")

    def strategy(self) -> dict[str, object]:
        """The plan's strategy with its cuts, in the form that `phaze.evaluate` takes."""
        document: dict[str, object] = to_document(self.parallelism)
        return {**document, "stages": list(self.stages)}


def bound_step_time(task: BoundTask) -> float:
    """A lower bound on the step time of every placement, at most the cutoff; infinite if nothing fits."""
    if task.is_paper:
        placement = place_as_paper(task.problem)
        return math.inf if placement is None else min(placement.time_s, task.cutoff_s)
    # Without a cutoff closed forms must do; a search that knows where to stop tightens them.
    effort = None if math.isinf(task.cutoff_s) else SearchEffort()
    return bound_placement(task.problem, cutoff_s=task.cutoff_s, effort=effort)


def schedule_pass_bounds(task: ScheduleTask) -> list[list[float]]:
    """The proven bounds of the schedules that an evaluation would use: a row by accelerator, a number by column."""
    rows = []
    for accelerator in task.accelerators:
        if task.slicing.is_paper:
            profiles = _paper_profiles(task.slicing, accelerator, task.options)[1]
        else:
            profiles = dict(profile_model(on_accelerator(task.slicing.sharded, accelerator), task.options).profiles)
        rows.append([_column_bound_s(profiles, task.slicing.tp, column) for column in task.slicing.columns])
    return rows


def one_device_delay_s(slicing: Slicing, accelerator: Accelerator, options: ProfileOptions) -> float:
    """Seconds of a microbatch through all layers and back on one device, one scheduled layer after another."""
    profiles = profile_model(on_accelerator(slicing.sharded, accelerator), options).profiles
    layers = [profiles[layer.key, slicing.tp, RecomputeMode.NONE] for layer in slicing.problem.graph.layers]
    passes = [(layer.forward_s, layer.backward_input_s, layer.backward_weight_s) for layer in layers]
    return sum(float(seconds.value[0]) for layer_passes in passes for seconds in layer_passes)


def _column_bound_s(profiles: Mapping[ProfileKey, LayerProfile], tp: int, column: PassColumn) -> float:
    """The bound of one pass of one layer, as its schedule proves it."""
    is_mode = column.pass_name in list(RecomputeMode)
    mode = RecomputeMode(column.pass_name) if is_mode else RecomputeMode.NONE
    profile = profiles[column.layer_key, tp, mode]
    passes = {FORWARD: profile.forward_s, TO_INPUTS: profile.backward_input_s, TO_WEIGHTS: profile.backward_weight_s}
    return float(passes.get(column.pass_name, profile.recompute_s).bound[0]) * (1 - PASS_BOUND_MARGIN)


def evaluate_design(task: EvaluateTask) -> Evaluation:
    """Schedule and place the slicings, the one with the lowest bound first."""
    best = Evaluation(time_s=None, bound_s=None)
    bound_s, cutoff_s, scheduled, placed = math.inf, task.cutoff_s, 0, 0
    for known_s, slicing in sorted(task.slicings, key=lambda pair: (pair[0], pair[1].name)):
        if known_s >= cutoff_s * (1 - task.model_question.gap * _PLACEMENT_SHARE_OF_GAP):
            bound_s = min(bound_s, known_s)
            continue
        scheduled += 1
        evaluation = _evaluate_as_paper(task, slicing) if slicing.is_paper else _evaluate(task, slicing, cutoff_s)
        placed += evaluation.placed
        bound_s = min(bound_s, max(known_s, math.inf if evaluation.bound_s is None else evaluation.bound_s))
        if evaluation.time_s is not None and evaluation.time_s < cutoff_s:
            best, cutoff_s = evaluation, evaluation.time_s
    return replace(best, bound_s=None if math.isinf(bound_s) else bound_s, scheduled=scheduled, placed=placed)


def _evaluate(task: EvaluateTask, slicing: Slicing, cutoff_s: float) -> Evaluation:
    cluster = replace(task.model_question.cluster, accelerator=task.accelerator)
    model_question = replace(task.model_question, cluster=cluster)
    slices = profile_model(on_accelerator(slicing.sharded, task.accelerator), profile_options(model_question))
    problem = replace(slicing.problem, profiles=slices.profiles, cluster=cluster)
    result = find_placement(
        problem,
        top=1,
        cutoff_s=cutoff_s,
        gap=task.model_question.gap * _PLACEMENT_SHARE_OF_GAP,
        network=slicing.network,
        likely=_likely_here(task.likely, slicing),
    )
    bound_s = None if math.isinf(result.bound_s) else result.bound_s
    if result.best is None:
        return Evaluation(time_s=None, bound_s=bound_s, placed=1)
    candidate = Candidate(slices=slices, problem=problem, result=result)
    answer = Answer(
        question=model_question,
        placement=result.best,
        candidate=candidate,
        candidates=(candidate,),
        bound_s=result.bound_s,
    )
    return Evaluation(
        time_s=result.best.time_s,
        bound_s=bound_s,
        energy_j=step_energy(model_question, answer, 1.0)["total_j"],
        parallelism=strategy_of(candidate, result.best),
        stages=tuple(len(stage.layers) for stage in result.best.stages),
        needed_bytes=max(memory.total_bytes for memory in result.best.memory),
        placed=1,
    )


def placement_degrees(strategy: Parallelism) -> Parallelism:
    """What a placement decides of a strategy; its slicing and its recompute modes are left out."""
    return Parallelism(
        dp=strategy.dp,
        shard=strategy.shard,
        tp=strategy.tp,
        pp=strategy.pp,
        chunks=strategy.chunks,
        zero=strategy.zero,
        schedule=strategy.schedule,
    )


def _likely_here(likely: Parallelism | None, slicing: Slicing) -> Parallelism | None:
    """The degrees of a parallelism that has the slicing's microbatch size and tp; what the placement decides, only."""
    if likely is None or (likely.micro_batch_size, likely.tp) != (slicing.micro_batch_size, slicing.tp):
        return None
    return placement_degrees(likely)


def on_accelerator(model: ShardedModel, accelerator: Accelerator) -> ShardedModel:
    """The same slices on another accelerator; equal layers stay one object."""
    axis = replace(model.axis, cluster=replace(model.axis.cluster, accelerator=accelerator))
    moved: dict[int, ShardedLayer] = {}
    for layer in model.layers:
        moved.setdefault(id(layer), replace(layer, problem=replace(layer.problem, axis=axis)))
    return replace(model, axis=axis, layers=tuple(moved[id(layer)] for layer in model.layers))


def _evaluate_as_paper(task: EvaluateTask, slicing: Slicing) -> Evaluation:
    """As the paper counts: its schedules and its placement; the bound is the placement of the schedules' bounds."""
    exact, bounds = _paper_profiles(slicing, task.accelerator, profile_options(task.model_question))
    cluster = replace(slicing.problem.cluster, accelerator=task.accelerator)
    problem = replace(slicing.problem, profiles=exact, cluster=cluster)
    placement = place_as_paper(problem)
    if placement is None:
        return Evaluation(time_s=None, bound_s=None, placed=1)
    bounding = place_as_paper(replace(problem, profiles=bounds))
    assert bounding is not None
    pp = len(placement.stages)
    repeated = RecomputeMode.FULL if placement.recompute else RecomputeMode.NONE
    parallelism = Parallelism(
        dp=placement.dp,
        tp=placement.tp,
        pp=pp,
        schedule=PipelineSchedule.ONE_F_ONE_B if pp > 1 else PipelineSchedule.NONE,
        micro_batch_size=slicing.micro_batch_size,
        sequence_parallel=sequence_parallel_of(slicing.sharded),
        recompute=(*(repeated,) * (pp - 1), RecomputeMode.NONE),  # the paper's last stage never computes again
    )
    return Evaluation(
        time_s=placement.time_s,
        bound_s=min(bounding.time_s, placement.time_s),
        parallelism=parallelism,
        stages=tuple(len(layers) for layers in placement.stages),
        placed=1,
    )


def _paper_profiles(
    slicing: Slicing, accelerator: Accelerator, options: ProfileOptions
) -> tuple[dict[ProfileKey, LayerProfile], dict[ProfileKey, LayerProfile]]:
    """Profiles with the seconds of schedules, and with their bounds."""
    exact_s: dict[PassColumn, float] = {}
    bounds_s: dict[PassColumn, float] = {}
    for key, layer in layer_variants(on_accelerator(slicing.sharded, accelerator)).items():
        local = slice_layer(layer)
        whole = single_layer(local)
        passes = {FORWARD: whole.forward, _PAPER_BACKWARD: whole.backward}
        passes |= {mode.value: recomputed_ops(local, whole, mode) for mode in SEARCHED_MODES}
        for name, ops in passes.items():
            column = PassColumn(key, name)
            exact_s[column] = bounds_s[column] = 0.0
            if ops:
                priced = priced_pass(layer, local, ops, options, compatibility=Compatibility.PAPER)
                schedule = schedule_layer(priced.problem(), gap=options.gap, work=options.work, cache=options.cache)
                exact_s[column], bounds_s[column] = schedule.time_s, schedule.time_bound_s
    return _profiles_of_passes(slicing, exact_s), _profiles_of_passes(slicing, bounds_s)


def _profiles_of_passes(slicing: Slicing, seconds: Mapping[PassColumn, float]) -> dict[ProfileKey, LayerProfile]:
    """The slicing's profiles, with passes that take the given seconds."""
    return {
        (key, tp, mode): replace(
            profile,
            forward_s=Bounded.exact(seconds[PassColumn(key, FORWARD)]),
            backward_input_s=Bounded.exact(seconds[PassColumn(key, _PAPER_BACKWARD)]),
            backward_weight_s=Bounded.exact(0.0),
            recompute_s=Bounded.exact(seconds[PassColumn(key, mode.value)]),
        )
        for (key, tp, mode), profile in slicing.problem.profiles.items()
    }
