"""What is asked of a planner: a model, a cluster, a batch, and what may be chosen; every argument checked by name."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING

from phaze.capabilities import Capabilities
from phaze.cost import Calibration, calibration_of, load_calibration, plugin_prices
from phaze.cost.calibration import why_ideal
from phaze.errors import PlanError, QuestionError, UnknownNameError, shown
from phaze.hardware import Cluster, PrecisionRecipe, parse_cluster, precision_recipe, precision_recipe_names
from phaze.hardware.hardware_files import cluster_to_json
from phaze.ir import Graph
from phaze.ir.backward import derive_backward
from phaze.ir.graph_json import graph_content_json
from phaze.shard import LayoutConstraint
from phaze.shard.layout import check_constraints
from phaze.target_choice import ChosenTarget, find_target

if TYPE_CHECKING:
    from phaze.hooks import PluginManager
    from phaze.interfaces import OpPricer

__all__ = [
    "OBJECTIVES",
    "Request",
    "content_hash",
    "marks_batch",
    "read_request",
    "settled_cluster",
    "tokens_per_sample",
]

OBJECTIVES = ("throughput",)
MICRO_BATCH_SIZES = (1, 2, 4, 8)
TENSOR_WIDTHS = (1, 2, 4, 8)
SAMPLES_PER_DEVICE = 8
_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "sgd": "sgd"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A question that can be answered: everything is settled, and nothing of it is looked up again.

    `graph` has a backward by rule, so that its ops can be sliced like those of forward (the captured one is kept only
    where no loss is known); `notes` say which defaults were taken.
    """

    graph: Graph
    cluster: Cluster
    global_batch_size: int
    micro_batch_sizes: tuple[int, ...]
    tensor_widths: tuple[int, ...]
    recipe: PrecisionRecipe
    target: ChosenTarget
    constraints: tuple[LayoutConstraint, ...] = ()
    calibration: Calibration
    prices: Mapping[str, OpPricer] = field(default_factory=dict)
    objective: str = "throughput"
    gap: float = 0.01
    seed: int = 0
    notes: tuple[str, ...] = ()

    @property
    def capabilities(self) -> Capabilities:
        """What the target can run in this precision."""
        return self.target.capabilities.with_master(self.recipe.master_bytes)

    @property
    def graph_hash(self) -> str:
        """Of the graph's content; notes and the microbatch that it happens to have do not count."""
        graph = self.graph.with_micro_batch(1) if marks_batch(self.graph) else self.graph
        return content_hash(graph_content_json(graph))

    @property
    def hardware_hash(self) -> str:
        """Of the cluster's content."""
        return content_hash(json.dumps(cluster_to_json(self.cluster), sort_keys=True))


def content_hash(text: str) -> str:
    """What differs whenever the text does."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_request(
    model: object,
    inputs: object,
    *,
    cluster: object,
    global_batch_size: int | None,
    optimizer: str,
    precision: str | PrecisionRecipe,
    micro_batch_sizes: Sequence[int] | None,
    tensor_widths: Sequence[int] | None,
    sequence_length: int | None,
    target: str | None,
    constraints: object,
    calibration: Calibration | str | PathLike[str] | None,
    objective: str,
    gap: float,
    seed: int,
    plugins: PluginManager,
    loss_fn: object = None,
    targets: object = None,
) -> Request:
    """Check and settle the arguments of `optimize`.

    Raises QuestionError naming the argument, and what importing the model and reading the cluster raise.
    """
    if objective not in OBJECTIVES:
        raise QuestionError(f"objective is {shown(objective)}; expected one of {', '.join(OBJECTIVES)}.")
    if isinstance(gap, bool) or not isinstance(gap, int | float) or not 0.0 <= gap < 1.0:
        raise QuestionError(f"gap is {shown(gap)}; expected a number from 0 (optimal) to below 1, such as 0.01.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise QuestionError(f"seed is {shown(seed)}; expected a whole number.")
    if loss_fn is not None and not callable(loss_fn):
        raise QuestionError(f"loss_fn is {shown(loss_fn)}; expected a function of the model's output.")
    devices = settled_cluster(cluster, plugins)
    recipe = _recipe(precision, optimizer)
    options = {"sequence_length": sequence_length, "loss_fn": loss_fn, "targets": targets}
    graph, chosen = _import(model, inputs, options, target, plugins)
    notes: list[str] = []
    if global_batch_size is None:
        global_batch_size = SAMPLES_PER_DEVICE * devices.device_count
        notes.append(
            f"no global_batch_size was given: {SAMPLES_PER_DEVICE} per device, {global_batch_size}, is assumed"
        )
    batch = _positive("global_batch_size", global_batch_size)
    if calibration is None and (reason := why_ideal(devices.accelerator)):
        notes.append(reason)
    return Request(
        graph=graph,
        cluster=devices,
        global_batch_size=batch,
        micro_batch_sizes=_micro_batch_sizes(micro_batch_sizes, batch, graph, notes),
        tensor_widths=_tensor_widths(tensor_widths, devices),
        recipe=recipe,
        target=chosen,
        constraints=_constraints(constraints, graph),
        calibration=_calibration(calibration, devices),
        prices=plugin_prices(plugins),
        objective=objective,
        gap=float(gap),
        seed=seed,
        notes=(*graph.notes, *notes),
    )


def settled_cluster(cluster: object, plugins: PluginManager) -> Cluster:
    """The cluster that an argument means."""
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, str):
        return parse_cluster(cluster, plugins)
    if cluster is not None:
        raise QuestionError(
            f"cluster is {shown(cluster)}; expected text such as 'a100-80gb:64' or a phaze.hardware.Cluster."
        )
    for world in plugins.worlds():
        found = world.value.visible_devices()
        if found is not None:
            return parse_cluster(f"{found[0]}:{found[1]}", plugins)
    raise PlanError(
        "no cluster was given and no known accelerators are visible to this process; pass for example "
        "cluster='a100-80gb:64' (`phaze chips` lists the known ones)."
    )


def _import(
    model: object, inputs: object, options: Mapping[str, object], target: str | None, plugins: PluginManager
) -> tuple[Graph, ChosenTarget]:
    from phaze.model_import import import_with_plugins

    options = {name: value for name, value in options.items() if value is not None}
    if "sequence_length" in options:
        _positive("sequence_length", options["sequence_length"])
    graph = derive_backward(import_with_plugins(plugins, model, inputs, frontend=None, options=options))
    return graph, find_target(target, model, plugins, graph)


def _recipe(precision: str | PrecisionRecipe, optimizer: str) -> PrecisionRecipe:
    if isinstance(precision, PrecisionRecipe):
        return precision
    if optimizer not in _OPTIMIZERS:
        raise QuestionError(f"optimizer is {shown(optimizer)}; expected one of {', '.join(_OPTIMIZERS)}.")
    if not isinstance(precision, str):
        raise QuestionError(f"precision is {shown(precision)}; expected text such as 'bf16' or a PrecisionRecipe.")
    known = precision_recipe_names()
    name = precision if precision in known else f"{precision}-{_OPTIMIZERS[optimizer]}"
    if name not in known:
        short = sorted({one.partition("-")[0] for one in known})
        raise UnknownNameError(f"precision with optimizer {optimizer!r}", precision, (*short, *known))
    return precision_recipe(name)


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise QuestionError(f"{name} is {shown(value)}; expected a whole number of at least 1.")
    return value


def _numbers(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, int) and not isinstance(values, bool):
        values = (values,)
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise QuestionError(f"{name} is {shown(values)}; expected whole numbers such as (1, 2, 4).")
    found = tuple(sorted({_positive(name, value) for value in values}))
    if not found:
        raise QuestionError(f"{name} is empty; expected at least one whole number, or None for the default.")
    return found


def _micro_batch_sizes(sizes: Sequence[int] | None, batch: int, graph: Graph, notes: list[str]) -> tuple[int, ...]:
    is_fixed = not marks_batch(graph)
    captured = graph.micro_batch_size
    if sizes is None and not is_fixed:
        return tuple(size for size in MICRO_BATCH_SIZES if batch % size == 0)
    if is_fixed:
        notes.append(f"the graph is fixed to the microbatch that it was captured with, {captured}")
    wanted = (captured,) if sizes is None else _numbers("micro_batch_sizes", sizes)
    if is_fixed and wanted != (captured,):
        raise QuestionError(
            f"micro_batch_sizes is {list(wanted)}, but the graph marks no batch and is fixed to microbatches of "
            f"{captured}; capture it with inputs of another size, or leave the argument out."
        )
    usable = tuple(size for size in wanted if batch % size == 0)
    if not usable:
        raise QuestionError(
            f"no microbatch size of {list(wanted)} divides the global batch of {batch}; pass micro_batch_sizes or a "
            "global_batch_size of which one divides the other."
        )
    return usable


def _tensor_widths(widths: Sequence[int] | None, cluster: Cluster) -> tuple[int, ...]:
    if widths is None:
        return tuple(width for width in TENSOR_WIDTHS if width <= cluster.device_count)
    wanted = _numbers("tensor_widths", widths)
    if min(wanted) > cluster.device_count:
        raise QuestionError(
            f"tensor_widths is {list(wanted)}, but the cluster has {cluster.device_count} devices; expected a width of "
            "at most that."
        )
    return tuple(width for width in wanted if width <= cluster.device_count)


def _constraints(constraints: object, graph: Graph) -> tuple[LayoutConstraint, ...]:
    found: tuple[object, ...] = ()
    if isinstance(constraints, Mapping):
        found = tuple(LayoutConstraint(str(pattern), dim) for pattern, dim in constraints.items())
    elif isinstance(constraints, Iterable) and not isinstance(constraints, str):
        found = tuple(constraints)
    usable = tuple(one for one in found if isinstance(one, LayoutConstraint))
    if (found or constraints in (None, (), [])) and len(usable) == len(found):
        check_constraints(usable, graph.tensors)
        return usable
    raise QuestionError(
        f"constraints is {shown(constraints)}; expected phaze.shard.LayoutConstraints, or a mapping from patterns of "
        "names to the dimension to split (None: whole)."
    )


def _calibration(calibration: Calibration | str | PathLike[str] | None, cluster: Cluster) -> Calibration:
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


def marks_batch(graph: Graph) -> bool:
    """Whether the graph knows which of its factors are the batch, and so can be rescaled."""
    return any(factor.is_batch for op in graph.ops for factor in op.rule.factors)


def tokens_per_sample(graph: Graph) -> int:
    """The length of the longest sequence of tokens among the inputs; 1 where there is none."""
    from phaze.ir import Role

    lengths = [
        math.prod(tensor.shape[1:])
        for tensor in graph.tensors.values()
        if tensor.role is Role.BATCH and tensor.dtype.value.startswith("int") and len(tensor.shape) == 2
    ]
    return max(lengths, default=1)
