"""All plans of a small question, tried one by one: every slicing, and every placement of each slicing.

Every microbatch size, tp, cp, ep, way to split sequences, and place of states and activations that a question offers is
sliced, and for each of them `placement_brute_force` tries every dp, ZeRO stage, group, pp, schedule, number of chunks,
cut into stages and recompute mode of each stage. Slices and the seconds of single layers are the product's; nothing is
bounded, ordered or left out.
"""

import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from placement_brute_force import brute_force

from phaze.errors import ShardError
from phaze.objective import ObjectiveKind
from phaze.parallelism import MIXED_SEQUENCES, Parallelism
from phaze.place import PlacementProblem
from phaze.profile.local_graphs import LocalGraphs
from phaze.profile.model_profiles import ModelProfiles, profile_model, profile_options, profiled_modes, slicings
from phaze.question import Question
from phaze.verify.bound_checks import plain_times_below

__all__ = ["SlicingTimes", "least_value", "try_everything"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicingTimes:
    """One slicing with its placement problem, and the least simulated time of every strategy that fits with it."""

    slices: ModelProfiles
    problem: PlacementProblem
    times_s: dict[Parallelism, float]


def try_everything(question: Question) -> list[SlicingTimes]:
    """Every slicing of a question with the times of its strategies."""
    tried = []
    for slices in _every_slicing(question):
        problem = _problem(question, slices)
        tried.append(SlicingTimes(slices=slices, problem=problem, times_s=brute_force(problem)))
    return tried


def least_value(question: Question, tried: list[SlicingTimes]) -> float:
    """The least of what a question makes small: seconds, device-seconds or devices; infinite where nothing does.

    Of energy it is what the passes, collectives and watts of a strategy take at least, in joules of a step.
    """
    objective, values = question.objective, [math.inf]
    for slicing in tried:
        for strategy, time_s in slicing.times_s.items():
            devices = strategy.dp * strategy.cp * strategy.tp * strategy.pp
            match objective.kind:
                case ObjectiveKind.THROUGHPUT:
                    values.append(time_s)
                case ObjectiveKind.COST:
                    values.append(devices * time_s)
                case ObjectiveKind.DEVICES:
                    values.append(devices if time_s <= (objective.step_time_s or math.inf) else math.inf)
                case ObjectiveKind.ENERGY:
                    values.append(_least_energy_j(question, slicing, strategy, time_s))
    return min(values)


def _least_energy_j(question: Question, slicing: SlicingTimes, strategy: Parallelism, time_s: float) -> float:
    """Joules of a step of so many seconds: the line of the seconds that plain code allows for a value, turned round."""
    value = 1.0
    while not (seconds := plain_times_below(question, slicing.slices, slicing.problem, value)(strategy)):
        value *= 2
    twice_s = plain_times_below(question, slicing.slices, slicing.problem, 2 * value)(strategy)
    return value + (time_s - seconds) * value / (twice_s - seconds)


def _every_slicing(question: Question) -> Iterator[ModelProfiles]:
    """Every slicing of the model once, with all passes of its layers scheduled."""
    graphs, options = LocalGraphs(question), profile_options(question, profiled_modes(question))
    known = set()
    for size, tp, cp, ep in product(
        question.micro_batch_sizes, question.tp_degrees, question.cp_degrees, question.ep_degrees
    ):
        if tp * max(cp, ep) > question.cluster.device_count:
            continue
        asked = question.choices.sequence_parallel
        for sequences in (True, False, MIXED_SEQUENCES) if asked is None and tp > 1 else (asked,):
            choices = replace(question.choices, sequence_parallel=sequences)
            graph = graphs.at(size, tp=tp, cp=cp, ep=ep)
            try:
                models = slicings(replace(question, choices=choices), graph, tp, cp=cp, ep=ep)
            except ShardError:  # heads, experts or sequences that cannot be divided so
                continue
            for model, offload in product(models, question.choices.offload):
                slices = replace(profile_model(model, options), offload=offload)
                layers = range(len(slices.placement.layers))
                content = [slices.placed(layer, mode) for layer in layers for mode in slices.modes]
                key = pickle.dumps((size, tp, cp, ep, offload, content))
                if key not in known:
                    known.add(key)
                    yield slices


def _problem(question: Question, slices: ModelProfiles) -> PlacementProblem:
    """The placements of a slicing that a question offers.

    Where the objective chooses how many devices are used, the others may idle, and every stage takes tp devices.
    """
    runs = question.capabilities.at_degrees(tp=slices.tp, cp=slices.cp, ep=slices.ep)
    if question.objective.kind is not ObjectiveKind.THROUGHPUT:
        runs = replace(runs, allows_idle_devices=True, allows_mixed_tp=False)
    return PlacementProblem(
        graph=slices.placement,
        profiles=slices.profiles,
        cluster=question.cluster,
        micro_batches=question.global_batch_size // slices.micro_batch_size,
        recipe=question.recipe,
        capabilities=runs,
        choices=question.choices,
        memory_margin=question.calibration.margin,
        calibration=question.calibration,
        cp=slices.cp,
        ep=slices.ep,
        offload=slices.offload,
    )
