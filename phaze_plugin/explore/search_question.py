"""What is asked of a search; every argument checked by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

import phaze
from phaze.capabilities import PipelineSchedule
from phaze.cost import IDEAL, Calibration
from phaze.errors import FormatError, QuestionError, shown
from phaze.explore.objectives import Metric
from phaze.hardware import AcceleratorArray, PrecisionRecipe, parse_cluster
from phaze.json_records import from_document, to_document
from phaze.question import Request, read_request
from phaze.space import MOST_POINTS, from_description, from_points, load, paper, to_description

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["COMBINATIONS", "PROVABLE_SCHEDULES", "REFERENCE", "SearchQuestion", "question_of", "read_question"]

REFERENCE = "tpuv4-paper"
"""Slices are chosen on it, and several models are compared by their ratios to it."""

PROVABLE_SCHEDULES = (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.ZERO_BUBBLE)
"""Pipelines whose bounds are tight. Interleaved and gpipe ones may be asked for; their bounds leave a larger gap."""

COMBINATIONS = ("average", "worst")
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchQuestion:
    """A question that can be answered.

    `requests` are those of the models on the reference accelerator with the largest memory; `points` have that memory,
    too. `names` are the models', told apart where they are equal.
    """

    names: tuple[str, ...]
    requests: tuple[Request, ...]
    points: AcceleratorArray
    hbm_bytes: tuple[int, ...]
    schedules: tuple[PipelineSchedule, ...]
    is_paper: bool
    metric: Metric
    weights: tuple[float, ...]
    takes_worst: bool
    wants_front: bool
    gap: float
    seed: int
    network: str
    sequence_length: int | None = None

    @property
    def device_count(self) -> int:
        """Devices of the cluster that each accelerator would make."""
        return self.requests[0].cluster.device_count

    @property
    def counts_energy(self) -> bool:
        """Whether less memory may be better than more: the fastest plan that fits into it may draw less."""
        return self.wants_front or self.metric is Metric.PER_ENERGY

    def header(self) -> dict[str, object]:
        """What a journal keeps of the question; two questions with equal headers have equal answers."""
        first = self.requests[0]
        return {
            "phaze": phaze.__version__,
            "models": {name: one.graph_hash for name, one in zip(self.names, self.requests, strict=True)},
            "space": to_description(self.points),
            "prices": sorted(first.prices or ()),
            "question": {
                "devices": self.device_count,
                "network": self.network,
                "hbm_gib": [size / _GIB for size in self.hbm_bytes],
                "micro_batch_sizes": list(first.micro_batch_sizes),
                "tensor_widths": list(first.tensor_widths),
                "global_batch_size": first.global_batch_size,
                "precision": to_document(first.recipe),
                "calibration": to_document(first.calibration),
                "sequence_length": self.sequence_length,
                "compatibility": "paper" if self.is_paper else None,
                "schedules": [one.value for one in self.schedules],
                "objective": self.metric.value,
                "weights": list(self.weights),
                "combine": COMBINATIONS[self.takes_worst],
                "front": self.wants_front,
                "gap": self.gap,
                "seed": self.seed,
            },
        }


def read_question(
    models: object,
    inputs: object,
    *,
    devices: int,
    space: object,
    hbm_gib: Sequence[float],
    micro_batch_sizes: Sequence[int],
    global_batch_size: int,
    tensor_widths: Sequence[int] | None = None,
    network: str = "paper",
    optimizer: str = "adamw",
    precision: str | PrecisionRecipe = "bf16",
    sequence_length: int | None = None,
    schedules: Sequence[str] = PROVABLE_SCHEDULES,
    compatibility: str | None = None,
    objective: str = "throughput",
    combine: str = "average",
    weights: Sequence[float] | None = None,
    front: bool = False,
    calibration: Calibration | None = None,
    gap: float = 0.01,
    seed: int = 0,
    plugins: PluginManager,
) -> SearchQuestion:
    """Check and settle the arguments of `search`; raises QuestionError naming the argument."""
    if compatibility not in (None, "paper"):
        raise QuestionError(f"compatibility is {shown(compatibility)}; expected None or 'paper'.")
    if objective not in list(Metric):
        raise QuestionError(f"objective is {shown(objective)}; expected one of {', '.join(Metric)}.")
    if combine not in COMBINATIONS:
        raise QuestionError(f"combine is {shown(combine)}; expected one of {', '.join(COMBINATIONS)}.")
    is_paper = compatibility == "paper"
    if is_paper and (front or objective == Metric.PER_ENERGY):
        raise QuestionError("the paper's counting has no energy; leave compatibility out, or ask for throughput.")
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise QuestionError(f"devices is {shown(devices)}; expected a whole number of at least 1.")
    sizes = _memory_sizes(hbm_gib)
    points = _points(space, sizes[-1])
    cluster = parse_cluster(f"{REFERENCE}:{devices}@{network}", plugins)
    cluster = replace(cluster, accelerator=replace(cluster.accelerator, hbm_bytes=sizes[-1]))
    given = list(models) if isinstance(models, list | tuple) else [models]
    if not given:
        raise QuestionError("models is empty; expected at least one model.")
    requests = tuple(
        read_request(
            model,
            one,
            cluster=cluster,
            global_batch_size=global_batch_size,
            optimizer=optimizer,
            precision=precision,
            micro_batch_sizes=micro_batch_sizes,
            tensor_widths=tensor_widths,
            sequence_length=sequence_length,
            target=None,
            constraints=None,
            calibration=calibration or IDEAL,
            objective="throughput",
            gap=gap,
            seed=seed,
            plugins=plugins,
        )
        for model, one in zip(given, _inputs(inputs, len(given)), strict=True)
    )
    return SearchQuestion(
        names=_told_apart([request.graph.name for request in requests]),
        requests=requests,
        points=points,
        hbm_bytes=sizes,
        schedules=_schedules(schedules),
        is_paper=is_paper,
        metric=Metric(objective),
        weights=_weights(weights, len(given)),
        takes_worst=combine == "worst",
        wants_front=bool(front),
        gap=float(gap),
        seed=seed,
        network=network,
        sequence_length=sequence_length,
    )


def question_of(
    header: Mapping[str, Any], models: object, inputs: object = None, *, plugins: PluginManager
) -> SearchQuestion:
    """The question of a journal's first line, asked of models again.

    Raises FormatError if the line is damaged, and QuestionError where it is about more models, or fewer.
    """
    try:
        names, count = list(header["models"]), len(models) if isinstance(models, list | tuple) else 1
        if count != len(names):
            raise QuestionError(
                f"the search was for {len(names)} models ({', '.join(names)}) and {count} given; give each of them, in "
                "this order (on the command line with a --model of its own)."
            )
        asked = dict(header["question"])
        asked["precision"] = from_document(PrecisionRecipe, asked["precision"], "question.precision")
        asked["calibration"] = from_document(Calibration, asked["calibration"], "question.calibration")
        return read_question(
            models, inputs, space=from_points(header["space"]), optimizer="adamw", plugins=plugins, **asked
        )
    except (KeyError, TypeError) as error:
        raise FormatError(f"the journal's first line lacks a part of its question: {error}.") from error


def _memory_sizes(hbm_gib: object) -> tuple[int, ...]:
    values = (hbm_gib,) if isinstance(hbm_gib, int | float) else hbm_gib
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise QuestionError(f"hbm_gib is {shown(hbm_gib)}; expected sizes in GiB such as (32, 64, 80).")
    sizes = list(values)
    if not sizes or not all(
        isinstance(size, int | float) and not isinstance(size, bool) and 0 < size < math.inf for size in sizes
    ):
        raise QuestionError(f"hbm_gib is {shown(hbm_gib)}; expected at least one positive size in GiB.")
    return tuple(sorted({round(size * _GIB) for size in sizes}))


def _points(space: object, hbm_bytes: int) -> AcceleratorArray:
    if isinstance(space, str) and space == "paper":
        points = paper()
    elif isinstance(space, str) and space.endswith(".json"):
        points = load(space)
    elif isinstance(space, Mapping):
        points = from_description(dict(space))
    elif isinstance(space, AcceleratorArray):
        points = space
    else:
        raise QuestionError(
            f"space is {shown(space)}; expected 'paper', the path of a space's JSON file, or what phaze.space.paper() "
            "and phaze.space.grid(...) give."
        )
    if not len(points):
        raise QuestionError("space has no accelerators; loosen what was asked of its points.")
    if len(points) > MOST_POINTS:
        raise QuestionError(
            f"space has {len(points):,} accelerators; at most {MOST_POINTS:,} fit in memory. Search it in parts."
        )
    if len(set(points.names)) != len(points):
        raise QuestionError("two accelerators of the space have the same name; give every one a name of its own.")
    return replace(points, hbm_bytes=np.full(len(points), hbm_bytes, dtype=np.int64))


def _inputs(inputs: object, count: int) -> list[object]:
    if count == 1:
        return [inputs]
    if inputs is None:
        return [None] * count
    if isinstance(inputs, list | tuple) and len(inputs) == count:
        return list(inputs)
    raise QuestionError(f"inputs is {shown(inputs)}; expected None, or one entry for each of the {count} models.")


def _schedules(schedules: object) -> tuple[PipelineSchedule, ...]:
    if isinstance(schedules, str) or not isinstance(schedules, Iterable):
        raise QuestionError(f"schedules is {shown(schedules)}; expected some of {', '.join(PipelineSchedule)}.")
    found = list(schedules)
    for one in found:
        if one not in list(PipelineSchedule):
            raise QuestionError(f"schedules has {shown(one)}; expected some of {', '.join(PipelineSchedule)}.")
    return tuple(kind for kind in PipelineSchedule if kind in found)


def _weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    if weights is None:
        return (1.0,) * count
    found = tuple(float(one) for one in weights)
    if len(found) != count or not all(0 < one < math.inf for one in found):
        raise QuestionError(f"weights is {shown(weights)}; expected a positive number for each of the {count} models.")
    return found


def _told_apart(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(
        name if names.count(name) == 1 else f"{name}#{names[: at + 1].count(name)}" for at, name in enumerate(names)
    )
