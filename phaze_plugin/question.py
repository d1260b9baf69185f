"""`Question`: every argument of optimize, evaluate and search checked and settled, with defaults for what is not given.

`Question` is built once, by `phaze.optimize`, `phaze.evaluate`, `phaze.search` or the command line, and passed on; no
later room looks anything up again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, TypedDict

from phaze.asked_model import as_target_runs, import_asked
from phaze.cost import (
    AttentionMode,
    Calibration,
    calibration_of,
    fuses_loss,
    load_calibration,
    plugin_prices,
    settled_attention,
)
from phaze.cost.calibration import why_ideal
from phaze.errors import PlanError, QuestionError, meant, shown
from phaze.hardware import (
    OPTIMIZERS,
    PRECISIONS,
    Cluster,
    PrecisionRecipe,
    parse_cluster,
    precision_recipe,
    recipe_of,
)
from phaze.hardware.hardware_files import cluster_to_json
from phaze.hardware.precision import known_optimizer, known_precision
from phaze.ir import Graph
from phaze.ir.graph_json import graph_content_json
from phaze.limits import check_limit
from phaze.objective import Objective, settled_objective
from phaze.offered_choices import (
    check_host,
    growing,
    marks_batch,
    offered_choices,
    positive,
    refuse_tp,
    usable_sizes,
)
from phaze.parallelism import Choices, PipelineSchedule, read_strategy
from phaze.shard import LayoutConstraint
from phaze.shard.expert_slicing import expert_counts, expert_dims
from phaze.shard.layout import check_constraints
from phaze.solvers import SolverChain, choose_solver
from phaze.targets import Capabilities, ChosenTarget

if TYPE_CHECKING:
    from phaze.hooks import PluginManager
    from phaze.interfaces import OpPricer

__all__ = [
    "Question",
    "QuestionOptions",
    "ask",
    "content_hash",
    "default_notes",
    "hash_graph",
    "marks_batch",
    "settled_cluster",
]

SAMPLES_PER_DEVICE = 8
"""The global batch per device that is assumed when none is given: enough microbatches to fill a short pipeline."""


MOST_IMBALANCE = 1000
"""The largest expert_imbalance: models have fewer experts, and no expert takes more than all tokens."""


class QuestionOptions(TypedDict, total=False):
    """The keyword arguments that `phaze.optimize` and `phaze.evaluate` share.

    Attributes:
        cluster: text such as "a100-80gb:64", or a Cluster; by default the devices that this process sees.
        global_batch_size: sequences in one step; by default 8 for every device.
        optimizer: "adamw" (the default), "adam", "sgd", "momentum-sgd", "adafactor", "lion", "adam8bit" or "muon";
            "none" plans inference: the forward alone, without gradients and optimizer state.
        precision: "bf16" (the default), "fp16", "fp32", "tf32", "fp8" and its recipes, "mxfp8", "nvfp4", the name of a
            recipe ("bf16-adam-bf16-gradients"), or a PrecisionRecipe.
        micro_batch_size: sizes to try, one or several.
        tp: tensor-parallel degrees to try, one or several.
        cp: devices to split each sequence over, one or several values to try.
        ep: devices to divide experts over, one or several values to try.
        recompute: recompute modes to try, by name; "budget" stands for budget-75, budget-50 and budget-25. By default
            none, selective and full, as far as the target runs them.
        expert_imbalance: how many times its equal share of tokens each expert is assumed to take; 1 by default.
        sequence_length: tokens in a sequence, instead of the model's own length.
        loss_fn: the loss of a module's output (and of `targets`), for a module that returns none.
        targets: examples of what `loss_fn` compares with.
        frontend_options: what the model's frontend takes, such as `parameters`, `batch` and `loss` of an HLO file.
        target: what the plan is to run on: a target's name, "auto" for the model's own framework, None for analysis.
        constraints: layouts that parameters or tensors must have.
        calibration: a Calibration or the file of one, instead of the chip's own.
        attention: "fused" (one kernel that stores no scores) or "unfused"; by default what the chip's software does.
        objective: what is made least: "throughput" (the step time on all devices, the default), "cost" (money per
            million tokens), "energy" (joules per token) or "devices". All but the first also choose how many devices
            are used.
        price: the money for one device-hour, for the cost; by default that of the cluster.
        step_time: the most seconds that a step may take, for the fewest devices; by default any plan that fits will do.
        gap: the search may end when the answer is proven to be so near to the best; 0.01 is 1 %.
        solver: the linear solver for sharding and schedules (highs, scip, cp-sat, gurobi, or a plugin's). By default
            none: both are solved by exact methods of Phaze's own.
    """

    cluster: str | Cluster | None
    global_batch_size: int | None
    optimizer: str
    precision: str | PrecisionRecipe
    micro_batch_size: int | Sequence[int] | None
    tp: int | Sequence[int] | None
    cp: int | Sequence[int] | None
    ep: int | Sequence[int] | None
    recompute: str | Sequence[str] | None
    expert_imbalance: float
    sequence_length: int | None
    loss_fn: Callable[..., object] | None
    targets: object
    frontend_options: Mapping[str, object] | None
    target: str | None
    constraints: Sequence[LayoutConstraint] | Mapping[str, int | None] | None
    calibration: Calibration | str | PathLike[str] | None
    attention: str | None
    objective: str
    price: float | None
    step_time: float | None
    gap: float
    solver: str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """Everything that is asked, settled: nothing of it is looked up again.

    Attributes:
        graph: the model as it is planned (`planned_graph`): without a backward for inference.
        cluster: devices and links.
        global_batch_size: sequences in one step.
        recipe: bytes and types of the precision.
        target: what the plan is for.
        offered: what may be chosen where no strategy is given.
        choices: what may be chosen now; always names `tp`, `cp`, `ep` and `micro_batch_size`.
        strategy: what the user fixed, as it was written; empty where everything is open.
        fixed: the settled values of the strategy, by key.
        constraints: layouts that tensors must have.
        calibration: how far the chip stays behind its ideal.
        attention: how attention runs, which the graph shows already.
        expert_imbalance: how many times its equal share of tokens each expert is priced with.
        expert_dims: the dimension that counts experts of each of their parameters in the graph.
        prices: prices of ops that plugins bring.
        objective: what is made small.
        most_devices: how many devices a plan might have used, where `cluster` is as many of them as it uses.
        gap: how far from the proven optimum the answer may stay.
        solver: the solver that was asked for, with the ones behind it; None for the automatic choice.
        notes: which defaults were taken.
        grows: fields of `Choices` whose offer is the default one: it grows while its largest value is the best.
    """

    graph: Graph
    cluster: Cluster
    global_batch_size: int
    recipe: PrecisionRecipe
    target: ChosenTarget
    offered: Choices
    choices: Choices
    calibration: Calibration
    attention: AttentionMode
    expert_imbalance: float = 1.0
    expert_dims: Mapping[str, int] = field(default_factory=dict)
    strategy: Mapping[str, object] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    constraints: tuple[LayoutConstraint, ...] = ()
    prices: Mapping[str, OpPricer] = field(default_factory=dict)
    objective: Objective = field(default_factory=Objective)
    most_devices: int | None = None
    gap: float = 0.01
    solver: SolverChain | None = None
    notes: tuple[str, ...] = ()
    grows: frozenset[str] = frozenset()

    @property
    def capabilities(self) -> Capabilities:
        """What the target can run in this precision."""
        return self.target.capabilities.with_master(self.recipe.master_bytes)

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Microbatch sizes that may be chosen."""
        assert self.choices.micro_batch_size is not None
        return self.choices.micro_batch_size

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that may be chosen."""
        assert self.choices.tp is not None
        return self.choices.tp

    @property
    def cp_degrees(self) -> tuple[int, ...]:
        """Devices that each sequence may be split over."""
        return self.choices.cp or (1,)

    @property
    def ep_degrees(self) -> tuple[int, ...]:
        """Devices that experts may be divided over."""
        return self.choices.ep or (1,)

    @property
    def graph_hash(self) -> str:
        """A hash of the graph's content, as `hash_graph` makes it."""
        return hash_graph(self.graph)

    @property
    def hardware_hash(self) -> str:
        """A hash of the cluster's content."""
        return content_hash(json.dumps(cluster_to_json(self.cluster), sort_keys=True))

    def with_strategy(self, strategy: Mapping[str, object]) -> Question:
        """The same question with what a strategy fixes kept, and everything else as open as it was offered.

        Raises QuestionError for a strategy that contradicts itself, the batch or the graph.
        """
        return replace(self.with_fixed(read_strategy(strategy)), strategy=strategy)

    def with_fixed(self, fixed: Mapping[str, object]) -> Question:
        """As `with_strategy`, for values that are settled already."""
        check_host(fixed, self.cluster)
        choices = self._with_several_devices(self.offered.within(fixed), fixed)
        if "micro_batch_size" in fixed:
            sizes = usable_sizes(choices.micro_batch_size or (), self.global_batch_size, self.graph)
            choices = replace(choices, micro_batch_size=sizes)
        if choices.tp is not None and min(choices.tp) > self.cluster.device_count:
            refuse_tp(choices.tp, self.cluster)
        if choices.dp is not None:
            choices = replace(choices, micro_batch_size=self._sizes_for(choices))
        return replace(self, choices=choices, strategy=fixed, fixed=fixed)

    def _with_several_devices(self, choices: Choices, fixed: Mapping[str, object]) -> Choices:
        """The choices without a single stage where a pipeline is asked for, and without tp 1 for split sequences."""
        most = min(len(self.graph.layers), self.cluster.device_count)
        is_pipeline = (
            fixed.get("chunks", 1) != 1 or fixed.get("schedule", PipelineSchedule.NONE) != PipelineSchedule.NONE
        )
        if is_pipeline and choices.pp is None:
            if most < 2:
                raise QuestionError(
                    f"strategy asks for a pipeline, but {len(self.graph.layers)} layers on {self.cluster.device_count} "
                    "devices have no two stages; leave out schedule and chunks."
                )
            choices = replace(choices, pp=tuple(range(2, most + 1)))
        if choices.sequence_parallel not in (None, False):
            several = tuple(tp for tp in choices.tp or () if tp > 1)
            if not several:
                raise QuestionError(
                    f"strategy has sequence_parallel {choices.sequence_parallel}, which splits sequences over tp "
                    "devices; only tp 1 is offered. Offer a larger tp, or leave sequence_parallel out."
                )
            choices = replace(choices, tp=several)
        return choices

    def _sizes_for(self, choices: Choices) -> tuple[int, ...]:
        """The microbatch sizes that leave at least one microbatch to each of the dp pipelines."""
        assert choices.micro_batch_size is not None
        assert choices.dp is not None
        dp, sizes = choices.dp[0], choices.micro_batch_size
        usable = tuple(size for size in sizes if self.global_batch_size // size >= dp)
        if not usable:
            raise QuestionError(
                f"strategy has dp {dp}, but {self.global_batch_size} samples are only "
                f"{self.global_batch_size // min(sizes)} microbatches of {min(sizes)}; expected at least one for "
                "each of the dp copies. Use a smaller dp, a larger batch or smaller microbatches."
            )
        return usable


def content_hash(text: str) -> str:
    """A hash that differs whenever the text does."""
    return hashlib.sha256(text.encode()).hexdigest()


def hash_graph(graph: Graph) -> str:
    """A hash of a graph's content; notes and the microbatch that it happens to have do not count."""
    graph = graph.with_micro_batch(1) if marks_batch(graph) else graph
    return content_hash(graph_content_json(graph))


def ask(
    model: object,
    inputs: object,
    options: QuestionOptions,
    plugins: PluginManager,
    strategy: Mapping[str, object] | None = None,
) -> Question:
    """Check and settle what was asked.

    Raises QuestionError naming the argument that is wrong, and what importing the model and reading the cluster raise.
    """
    _check_options(options, inputs)
    cluster = settled_cluster(options.get("cluster"), plugins)
    check_limit("devices", cluster.device_count, "the cluster's number of devices")
    recipe = _recipe(options.get("precision", "bf16"), options.get("optimizer", "adamw"))
    attention = settled_attention(options.get("attention"), cluster.accelerator)
    if options.get("sequence_length") is not None:
        positive("sequence_length", options.get("sequence_length"))
    calibration = _calibration(options.get("calibration"), cluster)
    has_fused_loss = fuses_loss(cluster.accelerator, calibration)
    graph, target = import_asked(
        model, inputs, options, attention, plugins, trains=recipe.trains, has_fused_loss=has_fused_loss
    )
    graph, calibration = as_target_runs(graph, calibration, target, trains=recipe.trains)
    _check_target(target, recipe, cluster)
    notes = list(_precision_notes(recipe, cluster, target))
    batch_size = options.get("global_batch_size")
    if batch_size is None:
        batch_size = SAMPLES_PER_DEVICE * cluster.device_count
        notes.append(_assumed_batch_note(cluster))
    batch_size = positive("global_batch_size", batch_size)
    check_limit("batch", batch_size, "global_batch_size")
    imbalance = _expert_imbalance(options.get("expert_imbalance", 1.0), graph)
    if imbalance != 1:
        notes.append(f"it is assumed that every expert takes {imbalance:g} times its equal share of tokens")
    if options.get("calibration") is None and (reason := why_ideal(cluster.accelerator)):
        notes.append(reason)
    offered = offered_choices(options, cluster, graph, target, batch_size, notes, trains=recipe.trains)
    question = Question(
        graph=graph,
        cluster=cluster,
        global_batch_size=batch_size,
        recipe=recipe,
        target=target,
        offered=offered,
        choices=offered,
        constraints=_constraints(options.get("constraints"), graph),
        calibration=calibration,
        attention=attention,
        expert_imbalance=imbalance,
        expert_dims=expert_dims(graph),
        prices=plugin_prices(plugins),
        objective=_objective(options, cluster),
        gap=float(options.get("gap", 0.01)),
        solver=_solver(options.get("solver"), plugins),
        grows=growing(options, graph),
        notes=(*graph.notes, *notes),
    )
    return question if strategy is None else question.with_strategy(strategy)


def _objective(options: QuestionOptions, cluster: Cluster) -> Objective:
    named = (options.get("objective", "throughput"), options.get("price"), options.get("step_time"))
    return settled_objective(*named, cluster.price_per_device_hour)


def _expert_imbalance(given: object, graph: Graph) -> float:
    """How many times its equal share of tokens an expert is priced with."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not 1 <= given <= MOST_IMBALANCE:
        raise QuestionError(
            f"expert_imbalance is {shown(given)}; expected a number from 1 (equal shares) to {MOST_IMBALANCE}."
        )
    if given != 1 and not expert_counts(graph):
        raise QuestionError(
            f"expert_imbalance is {given:g}, but model {graph.name!r} sends no tokens to experts; leave it out."
        )
    return float(given)


def default_notes(cluster: Cluster) -> frozenset[str]:
    """The notes that a question has on a cluster only because something was not given."""
    reason = why_ideal(cluster.accelerator)
    return frozenset({_assumed_batch_note(cluster), *([reason] if reason else [])})


def _assumed_batch_note(cluster: Cluster) -> str:
    batch_size = SAMPLES_PER_DEVICE * cluster.device_count
    return f"no global_batch_size was given: {SAMPLES_PER_DEVICE} per device, {batch_size}, is assumed"


def _check_options(options: QuestionOptions, inputs: object) -> None:
    """Raise for options that are unknown, or wrong whatever the model is."""
    if isinstance(inputs, str) and "cluster" not in options:
        raise QuestionError(f"inputs is {shown(inputs)}; a cluster is given by name: cluster={shown(inputs)}.")
    known = QuestionOptions.__annotations__
    for name in options:
        if name not in known:
            listed = ", ".join(known)
            raise TypeError(f"unexpected keyword argument {name!r}; expected some of {listed}.{meant(name, known)}")
    gap = options.get("gap", 0.01)
    if isinstance(gap, bool) or not isinstance(gap, int | float) or not 0.0 <= gap < 1.0:
        raise QuestionError(f"gap is {shown(gap)}; expected a number from 0 (optimal) to below 1, such as 0.01.")
    loss_fn = options.get("loss_fn")
    if loss_fn is not None and not callable(loss_fn):
        raise QuestionError(f"loss_fn is {shown(loss_fn)}; expected a function of the model's output.")


def settled_cluster(cluster: object, plugins: PluginManager) -> Cluster:
    """The cluster that an argument means; where there is none, the devices that this process sees."""
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, str):
        return parse_cluster(cluster, plugins)
    if cluster is not None:
        raise QuestionError(
            f"cluster is {shown(cluster)}; expected text such as 'a100-80gb:64' or a phaze.hardware.Cluster."
        )
    for world in plugins.worlds():
        visible = world.value.visible_devices()
        if visible is not None:
            chip, count = visible
            return parse_cluster(f"{chip}:{count}", plugins)
    raise PlanError(
        "cluster is not given, and no known accelerators are visible to this process; pass for example "
        "cluster='a100-80gb:64' (`phaze chips` lists the known ones)."
    )


def _recipe(precision: str | PrecisionRecipe, optimizer: str) -> PrecisionRecipe:
    if isinstance(precision, PrecisionRecipe):
        return precision
    if not isinstance(optimizer, str):
        raise QuestionError(f"optimizer is {shown(optimizer)}; expected one of {', '.join(OPTIMIZERS)}.")
    if not isinstance(precision, str):
        raise QuestionError(f"precision is {shown(precision)}; expected text such as 'bf16' or a PrecisionRecipe.")
    update = known_optimizer(optimizer)
    return recipe_of(precision, update) if known_precision(precision) in PRECISIONS else precision_recipe(precision)


def _check_target(target: ChosenTarget, recipe: PrecisionRecipe, cluster: Cluster) -> None:
    """Raise QuestionError where the target runs nothing in this precision or on these devices."""
    runs = target.capabilities
    if runs.compute_dtypes is not None and recipe.compute_dtype not in runs.compute_dtypes:
        known = ", ".join(sorted(runs.compute_dtypes))
        raise QuestionError(
            f"target {target.name} computes in {known}; the precision {recipe.name} computes in "
            f"{recipe.compute_dtype}. Choose another precision, or target=None to price it alone."
        )
    if runs.needs_whole_nodes and not cluster.has_whole_nodes:
        raise QuestionError(
            f"target {target.name} uses all devices of every node (or slice); the cluster has {cluster.device_count} "
            f"devices on nodes of {cluster.node_devices}. Plan for whole nodes, or with target=None."
        )


def _precision_notes(recipe: PrecisionRecipe, cluster: Cluster, target: ChosenTarget) -> Iterator[str]:
    """What the price of a precision leaves out, and where the chip or the target does not have it."""
    if recipe.note:
        yield f"{recipe.name}: {recipe.note}"
    if not recipe.product_dtype:
        return
    chip = cluster.accelerator
    if chip.rates.of(recipe.product_dtype) <= chip.rates.of(recipe.compute_dtype):
        yield f"{chip.name} runs {recipe.product_dtype} no faster than {recipe.compute_dtype}"
    runs_products = recipe.product_dtype in target.capabilities.product_dtypes
    if target.name is not None and recipe.quantizes_products and not runs_products:
        yield f"target {target.name} runs products in {recipe.compute_dtype}: this plan is priced, and not run"


def _constraints(constraints: object, graph: Graph) -> tuple[LayoutConstraint, ...]:
    given: tuple[object, ...] = ()
    if isinstance(constraints, Mapping):
        given = tuple(LayoutConstraint(str(pattern), dim) for pattern, dim in constraints.items())
    elif isinstance(constraints, Iterable) and not isinstance(constraints, str):
        given = tuple(constraints)
    usable = tuple(constraint for constraint in given if isinstance(constraint, LayoutConstraint))
    if (given or constraints in (None, (), [])) and len(usable) == len(given):
        check_constraints(usable, graph.tensors)
        return usable
    raise QuestionError(
        f"constraints is {shown(constraints)}; expected phaze.shard.LayoutConstraints, or a mapping from patterns of "
        "names to the dimension to split (None: whole)."
    )


def _calibration(calibration: object, cluster: Cluster) -> Calibration:
    if calibration is None:
        return calibration_of(cluster.accelerator)
    if isinstance(calibration, str | PathLike):
        return load_calibration(calibration)
    if not isinstance(calibration, Calibration):
        raise QuestionError(
            f"calibration is {shown(calibration)}; expected a phaze.cost.Calibration, a file of `phaze calibrate`, or "
            "None."
        )
    return calibration


def _solver(name: object, plugins: PluginManager) -> SolverChain | None:
    if name is not None and not isinstance(name, str):
        raise QuestionError(f"solver is {shown(name)}; expected a solver's name, or None for the automatic choice.")
    return None if name is None else choose_solver(name, plugins)
