"""What is asked of a search over accelerators; every argument of `phaze.search` is checked here by its name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict, cast

import numpy as np

import phaze
from phaze.cost import IDEAL, Calibration
from phaze.errors import FormatError, QuestionError, meant, shown
from phaze.explore.objectives import Metric
from phaze.hardware import AcceleratorArray, Cluster, PrecisionRecipe, parse_cluster
from phaze.json_documents import from_document, to_document
from phaze.offered_choices import DEFAULT_MICRO_BATCH_SIZES
from phaze.parallelism import PIPELINE_SCHEDULES, PipelineSchedule
from phaze.question import Question, QuestionOptions, ask
from phaze.space import MOST_POINTS, from_description, from_points, load, paper, to_description

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = [
    "COMBINATIONS",
    "PROVABLE_SCHEDULES",
    "REFERENCE",
    "SearchOptions",
    "SearchQuestion",
    "ask_search",
    "question_from_header",
]

REFERENCE = "tpuv4-paper"
"""The reference accelerator: slices are chosen on it, and several models count by their ratios to it."""

PROVABLE_SCHEDULES = (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.ZERO_BUBBLE)
"""Pipelines whose bounds are tight. Interleaved and gpipe ones may be asked for; their bounds leave a larger gap."""

COMBINATIONS = ("average", "worst")
"""How the ratios of several models may be joined."""

FIXED_KEYS = ("dp", "shard", "zero", "tp", "pp", "schedule", "chunks", "micro_batch_size")
"""The keys of a strategy that a search over accelerators may be given; cuts, recompute and slices follow the chip."""

DEFAULT_GLOBAL_BATCH_SIZE = 4096
"""Sequences in one step unless others are given, as in the paper's experiments."""

DEFAULT_HBM_GIB = (32, 64, 80)
"""Memories that are tried unless others are given: the paper's."""

DEFAULT_GAP = 0.01
"""How far from the proven optimum an answer may stay unless told: one percent ends most searches in minutes."""

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchQuestion:
    """Everything that is asked of a search, checked and settled.

    Attributes:
        names: the models' names, with numbers where two are equal.
        questions: what is asked of each model, on the reference accelerator with the largest memory.
        points: the space, every accelerator with the largest memory.
        hbm_bytes: the memories to try, ascending.
        schedules: pipeline schedules to choose from.
        is_paper: whether everything is counted as the paper does.
        metric: what is made large.
        weights: weights of the models in an average.
        takes_worst: whether the worst ratio counts instead of the average.
        wants_front: whether the whole front of throughput, area and energy is wanted.
        gap: how far from the proven optimum the answer may stay.
        network: how the devices are joined.
        sequence_length: tokens in a sequence, where it is not the models' own.
        top: how many of the best designs are wanted.
    """

    names: tuple[str, ...]
    questions: tuple[Question, ...]
    points: AcceleratorArray
    hbm_bytes: tuple[int, ...]
    schedules: tuple[PipelineSchedule, ...]
    is_paper: bool
    metric: Metric
    weights: tuple[float, ...]
    takes_worst: bool
    wants_front: bool
    gap: float
    network: str
    sequence_length: int | None = None
    top: int = 1

    @property
    def device_count(self) -> int:
        """Devices of the cluster that each accelerator would make."""
        return self.questions[0].cluster.device_count

    @property
    def counts_energy(self) -> bool:
        """Whether less memory may be better than more: the fastest plan that fits into it may draw less."""
        return self.wants_front or self.metric is Metric.PER_ENERGY

    @property
    def objective_name(self) -> str:
        """What is made large: the metric of a single model, or the joined ratio of several."""
        return self.metric.value if len(self.questions) == 1 else "ratio"

    def asked(self) -> dict[str, object]:
        """The question but for models and space, spelled as the options of `phaze.search`."""
        first = self.questions[0]
        strategies = [dict(question.fixed) for question in self.questions]
        return {
            "devices": self.device_count,
            "network": self.network,
            "hbm_gib": [size / _GIB for size in self.hbm_bytes],
            "micro_batch_size": list(first.micro_batch_sizes),
            "tp": list(first.tp_degrees),
            "global_batch_size": first.global_batch_size,
            "precision": to_document(first.recipe),
            "calibration": to_document(first.calibration),
            "attention": first.attention.value,
            "sequence_length": self.sequence_length,
            "compatibility": "paper" if self.is_paper else None,
            "schedule": [kind.value for kind in self.schedules],
            "objective": self.metric.value,
            "weights": list(self.weights),
            "combine": "worst" if self.takes_worst else "average",
            "front": self.wants_front,
            "gap": self.gap,
            **({"strategy": to_document(strategies)} if any(strategies) else {}),
            **({"top": self.top} if self.top > 1 else {}),
        }

    def journal_header(self) -> dict[str, object]:
        """What the first line of a journal says; two questions with equal headers have equal answers."""
        return {
            "phaze": phaze.__version__,
            "models": {
                name: model_question.graph_hash for name, model_question in zip(self.names, self.questions, strict=True)
            },
            "space": to_description(self.points),
            "prices": sorted(self.questions[0].prices or ()),
            "question": self.asked(),
        }


class SearchOptions(TypedDict, total=False):
    """The keyword arguments of `phaze.search` that say what is searched; `devices` is needed, the others have defaults.

    Attributes:
        devices: accelerators to train on.
        space: "paper" (the default), the path of a space's JSON file, or what phaze.space.paper() and .grid() give.
        hbm_gib: memory sizes to try with each accelerator.
        micro_batch_size: microbatch sizes to try.
        tp: tensor-parallel degrees to try.
        global_batch_size: sequences in one step.
        network: how the devices are joined; several texts are searched one after another, for one model.
        optimizer: as `phaze.optimize` takes it.
        precision: as `phaze.optimize` takes it.
        sequence_length: tokens in a sequence, instead of the models' own length.
        schedule: pipeline schedules to try.
        compatibility: "paper" counts time and memory as the paper does.
        objective: what is made large: "throughput", "throughput-per-area" or "throughput-per-energy".
        combine: how ratios of several models are joined: "average" or "worst".
        weights: of the models in an average.
        front: whether to find all designs that no other beats in throughput, area and energy.
        strategy: a strategy that is fixed (dp, tp, pp, schedule, chunks, zero, shard, micro_batch_size), so that only
            the accelerator is searched; one for all models, or a sequence with one for each.
        calibration: a Calibration or the file of one; without it, accelerators are ideal.
        attention: "fused" or "unfused" (the default, as in the paper).
        gap: the search may end when the answer is proven to be so near to the best; 0.01 is 1 %.
        top: how many of the best designs to return; no other design is better than the last of them by more than `gap`.
    """

    devices: int
    space: AcceleratorArray | str
    hbm_gib: float | Sequence[float]
    micro_batch_size: int | Sequence[int] | None
    tp: int | Sequence[int] | None
    global_batch_size: int
    network: str | Sequence[str]
    optimizer: str
    precision: str | PrecisionRecipe
    sequence_length: int | None
    schedule: Sequence[str]
    compatibility: str | None
    objective: str
    combine: str
    weights: Sequence[float] | None
    front: bool
    strategy: Mapping[str, object] | Sequence[Mapping[str, object]] | None
    calibration: Calibration | None
    attention: str | None
    gap: float
    top: int


def ask_search(models: object, inputs: object, options: SearchOptions, plugins: PluginManager) -> SearchQuestion:
    """Check and settle the arguments of `search`; raises QuestionError naming the argument."""
    unknown = [name for name in options if name not in SearchOptions.__annotations__]
    if unknown or "devices" not in options:
        wrong = f"unexpected keyword argument {unknown[0]!r}" if unknown else "devices is missing"
        hint = meant(unknown[0], SearchOptions.__annotations__) if unknown else ""
        raise TypeError(f"{wrong}; expected some of {', '.join(SearchOptions.__annotations__)}.{hint}")
    compatibility, objective = options.get("compatibility"), options.get("objective", "throughput")
    combine, front = options.get("combine", "average"), bool(options.get("front", False))
    devices = options["devices"]
    if compatibility not in (None, "paper"):
        raise QuestionError(f"compatibility is {shown(compatibility)}; expected None or 'paper'.")
    if objective not in list(Metric):
        raise QuestionError(f"objective is {shown(objective)}; expected one of {', '.join(Metric)}.")
    if combine not in COMBINATIONS:
        raise QuestionError(f"combine is {shown(combine)}; expected one of {', '.join(COMBINATIONS)}.")
    is_paper = compatibility == "paper"
    if is_paper and options.get("strategy"):
        raise QuestionError("the paper's program chooses its degrees itself; leave strategy or compatibility out.")
    if is_paper and (front or objective == Metric.PER_ENERGY):
        raise QuestionError("the paper's counting has no energy; leave compatibility out, or ask for throughput.")
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise QuestionError(f"devices is {shown(devices)}; expected a whole number of at least 1.")
    top, network = options.get("top", 1), options.get("network", "paper")
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise QuestionError(f"top is {shown(top)}; expected a whole number of at least 1.")
    if not isinstance(network, str):
        raise QuestionError(f"network is {shown(network)}; expected the text of one network, such as '25GB/s'.")
    sizes = _memory_sizes(options.get("hbm_gib", DEFAULT_HBM_GIB))
    points = _points(options.get("space", "paper"), sizes[-1])
    cluster = parse_cluster(f"{REFERENCE}:{devices}@{network}", plugins)
    cluster = replace(cluster, accelerator=replace(cluster.accelerator, hbm_bytes=sizes[-1]))
    questions = _model_questions(models, inputs, options, cluster, plugins)
    return SearchQuestion(
        names=_distinct_names([question.graph.name for question in questions]),
        questions=questions,
        points=points,
        hbm_bytes=sizes,
        schedules=_offered_schedules(_schedules(options.get("schedule", PROVABLE_SCHEDULES)), questions),
        is_paper=is_paper,
        metric=Metric(objective),
        weights=_weights(options.get("weights"), len(questions)),
        takes_worst=combine == "worst",
        wants_front=front,
        gap=questions[0].gap,
        network=network,
        sequence_length=options.get("sequence_length"),
        top=min(top, len(points)),
    )


def _model_questions(
    models: object, inputs: object, options: SearchOptions, cluster: Cluster, plugins: PluginManager
) -> tuple[Question, ...]:
    """The question of each model on the reference accelerator, for analysis."""
    given = list(models) if isinstance(models, list | tuple) else [models]
    if not given:
        raise QuestionError("models is empty; expected at least one model.")
    shared: QuestionOptions = {
        "cluster": cluster,
        "global_batch_size": options.get("global_batch_size", DEFAULT_GLOBAL_BATCH_SIZE),
        "optimizer": options.get("optimizer", "adamw"),
        "precision": options.get("precision", "bf16"),
        "micro_batch_size": options.get("micro_batch_size", DEFAULT_MICRO_BATCH_SIZES),
        "tp": options.get("tp"),
        "sequence_length": options.get("sequence_length"),
        "target": None,
        "calibration": options.get("calibration") or IDEAL,
        "attention": options.get("attention"),
        "gap": options.get("gap", DEFAULT_GAP),
    }
    asked = [
        _of_designs(ask(model, example, shared, plugins))
        for model, example in zip(given, _inputs(inputs, len(given)), strict=True)
    ]
    strategies = _strategies(options.get("strategy"), len(given))
    return tuple(
        question.with_strategy(strategy) if strategy else question
        for question, strategy in zip(asked, strategies, strict=True)
    )


def _of_designs(question: Question) -> Question:
    """The question without a GPU's kernels: designs are arrays and links that no library was written for."""
    return replace(question, calibration=replace(question.calibration, products=None, links=None))


def question_from_header(
    header: Mapping[str, object], models: object, inputs: object = None, *, plugins: PluginManager
) -> SearchQuestion:
    """The question of a journal's first line, asked of models again.

    Raises FormatError if the line is damaged, and QuestionError where it is about more models, or fewer.
    """
    # The journal checked that these are objects when it was read.
    names, options, space = (cast("Mapping[str, object]", header[key]) for key in ("models", "question", "space"))
    count = len(models) if isinstance(models, list | tuple) else 1
    if count != len(names):
        raise QuestionError(
            f"the search was for {len(names)} models ({', '.join(names)}) and {count} given; give each of them, in "
            "this order (on the command line with a --model of its own)."
        )
    try:
        asked = {
            **options,
            "precision": from_document(PrecisionRecipe, options["precision"], "question.precision"),
            "calibration": from_document(Calibration, options["calibration"], "question.calibration"),
            "space": from_points(space),
        }
        return ask_search(models, inputs, cast(SearchOptions, asked), plugins)
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


def _strategies(strategy: object, count: int) -> list[Mapping[str, object]]:
    """What is fixed of each model's plans; raises QuestionError for keys that a search over accelerators decides."""
    given = list(strategy) if isinstance(strategy, list | tuple) else [{} if strategy is None else strategy] * count
    strategies = [fixed for fixed in given if isinstance(fixed, Mapping)]
    if not len(given) == len(strategies) == count:
        raise QuestionError(
            f"strategy is {shown(strategy)}; expected a mapping such as {{'pp': 8}}, or one for each model."
        )
    for key in (key for fixed in strategies for key in fixed):
        if key not in FIXED_KEYS:
            raise QuestionError(f"strategy has {shown(key)}; a search may fix {', '.join(FIXED_KEYS)}.")
    return strategies


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
        raise QuestionError(f"schedule is {shown(schedules)}; expected some of {', '.join(PIPELINE_SCHEDULES)}.")
    wanted = list(schedules)
    for name in wanted:
        if name not in list(PIPELINE_SCHEDULES):
            raise QuestionError(f"schedule has {shown(name)}; expected some of {', '.join(PIPELINE_SCHEDULES)}.")
    return tuple(kind for kind in PIPELINE_SCHEDULES if kind in wanted)


def _offered_schedules(
    schedules: tuple[PipelineSchedule, ...], questions: Sequence[Question]
) -> tuple[PipelineSchedule, ...]:
    """The schedules to choose from: the fixed ones where every model has one fixed, else those that are offered."""
    fixed = {question.fixed.get("schedule") for question in questions}
    if None in fixed:
        return schedules
    return tuple(kind for kind in PIPELINE_SCHEDULES if kind in fixed)


def _weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    if weights is None:
        return (1.0,) * count
    is_listed = isinstance(weights, Iterable) and not isinstance(weights, str)
    given = tuple(weights) if is_listed else ()
    numbers = tuple(weight for weight in given if isinstance(weight, int | float) and not isinstance(weight, bool))
    if not len(given) == len(numbers) == count or not all(0 < weight < math.inf for weight in numbers):
        raise QuestionError(f"weights is {shown(weights)}; expected a positive number for each of the {count} models.")
    return numbers


def _distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """The models' names, with #1, #2 and so on behind those that occur several times."""
    return tuple(
        name if names.count(name) == 1 else f"{name}#{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    )
