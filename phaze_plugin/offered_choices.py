"""What a search may choose from: microbatch sizes and degrees of tp, cp and ep, as they were given or by default."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from phaze.errors import QuestionError, shown
from phaze.hardware import Cluster
from phaze.ir import BUDGET_MODES, SEARCHED_MODES, Graph, RecomputeMode
from phaze.ir.factor_following import token_lengths
from phaze.ir.kept_activations import BUDGET, recompute_mode
from phaze.parallelism import PIPELINE_SCHEDULES, Choices, Offload
from phaze.shard.expert_slicing import expert_counts
from phaze.targets import ChosenTarget

__all__ = [
    "DEFAULT_EP",
    "DEFAULT_MICRO_BATCH_SIZES",
    "DEFAULT_TP",
    "MOST_FIRST_CP",
    "check_host",
    "growing",
    "marks_batch",
    "offered_choices",
    "offered_cp",
    "offered_ep",
    "offered_offload",
    "offered_recompute",
    "offered_sizes",
    "offered_tp",
    "positive",
    "refuse_tp",
    "usable_sizes",
]

DEFAULT_MICRO_BATCH_SIZES = (1, 2, 4, 8)
"""Sizes that are tried first unless others are given: larger ones rarely fit, and every size is profiled anew. While
the largest one is the best, twice as large ones are tried, too."""

DEFAULT_TP = (1, 2, 4, 8)
"""Tensor-parallel degrees that are tried first unless others are given: up to the eight devices of a usual node. While
the largest one is the best, twice as many devices are tried, too, as far as a node has them."""

SEARCHED_SCHEDULES = tuple(kind for kind in PIPELINE_SCHEDULES if not kind.is_v_shaped)
"""The schedules of pipelines that are searched; those in the shape of a V are priced where a strategy names them. No
target runs them, they take 1 to 7 % off the steps of large models, and looking for them takes two to ten times as long:
their bounds are far below them where stages are uneven or layers branch."""

LONG_SEQUENCE = 8_192
"""The shortest sequence that cp is offered for from the beginning where the question does not name it: below, splitting
sequences seldom beats more copies, and every cp is sliced and scheduled anew. From it on, large models are often
fastest so (llama3-70b on 64 H100s by 5 %), also where nothing is recomputed without it. Shorter ones are split where
the best plan recomputes. While the largest cp is the best, or nothing fits, twice as many devices are tried, too."""

MOST_FIRST_CP = 2
"""The largest cp that is tried at first."""

DEFAULT_EP = (1, 2, 4, 8)
"""Devices that experts are divided over which are tried first unless others are given, as far as they divide the
experts. While the largest is the best, or nothing fits, twice as many are tried, too."""


def positive(name: str, value: object) -> int:
    """A value that is a whole number of at least 1; any other is a QuestionError that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise QuestionError(f"{name} is {shown(value)}; expected a whole number of at least 1.")
    return value


def numbers(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, int) and not isinstance(values, bool):
        values = (values,)
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise QuestionError(f"{name} is {shown(values)}; expected whole numbers such as (1, 2, 4).")
    numbers = tuple(sorted({positive(name, value) for value in values}))
    if not numbers:
        raise QuestionError(f"{name} is empty; expected at least one whole number, or None for the default.")
    return numbers


def offered_choices(
    options: Mapping[str, object],
    cluster: Cluster,
    graph: Graph,
    target: ChosenTarget,
    batch_size: int,
    notes: list[str],
    *,
    trains: bool,
) -> Choices:
    """What may be chosen where no strategy is given; `notes` are told what the graph does not leave open."""
    return Choices(
        tp=offered_tp(options.get("tp"), cluster),
        cp=offered_cp(options.get("cp"), cluster, graph, target),
        ep=offered_ep(options.get("ep"), cluster, graph, target),
        micro_batch_size=offered_sizes(options.get("micro_batch_size"), batch_size, graph, notes, cluster, target),
        recompute=offered_recompute(options.get("recompute"), target),
        offload=offered_offload(cluster, target, trains=trains),
        schedule=SEARCHED_SCHEDULES,
    )


def offered_sizes(
    sizes: object, batch_size: int, graph: Graph, notes: list[str], cluster: Cluster, target: ChosenTarget
) -> tuple[int, ...]:
    """The microbatch sizes to try: those given, else the defaults that divide the batch.

    Where a copy runs its samples at once, these are the batch divided by every number of copies.
    """
    is_fixed = not marks_batch(graph)
    if sizes is None and not is_fixed and target.capabilities.needs_single_micro_batch:
        copies = range(1, min(cluster.device_count, batch_size) + 1)
        fitting = [dp for dp in copies if cluster.device_count % dp == 0 and batch_size % dp == 0]
        return tuple(batch_size // dp for dp in reversed(fitting))
    if sizes is None and not is_fixed:
        return tuple(size for size in DEFAULT_MICRO_BATCH_SIZES if batch_size % size == 0)
    if is_fixed:
        notes.append(f"the graph is fixed to the microbatch that it was captured with, {graph.micro_batch_size}")
    wanted = (graph.micro_batch_size,) if sizes is None else numbers("micro_batch_size", sizes)
    return usable_sizes(wanted, batch_size, graph)


def growing(options: Mapping[str, object], graph: Graph) -> frozenset[str]:
    """The choices whose values were not given and may go beyond the default ones."""
    growing = {"micro_batch_size"} if options.get("micro_batch_size") is None and marks_batch(graph) else set()
    return frozenset(growing | {name for name in ("tp", "cp", "ep") if options.get(name) is None})


def usable_sizes(wanted: tuple[int, ...], batch_size: int, graph: Graph) -> tuple[int, ...]:
    """The wanted microbatch sizes that the graph can have and that divide the batch."""
    captured = graph.micro_batch_size
    if not marks_batch(graph) and wanted != (captured,):
        raise QuestionError(
            f"micro_batch_size is {list(wanted)}, but the graph marks no batch and is fixed to microbatches of "
            f"{captured}; capture it with inputs of another size, or leave the argument out."
        )
    usable = tuple(size for size in wanted if batch_size % size == 0)
    if not usable:
        raise QuestionError(
            f"no microbatch size of {list(wanted)} divides the global batch of {batch_size}; pass a micro_batch_size "
            "that divides global_batch_size."
        )
    return usable


def offered_tp(degrees: object, cluster: Cluster) -> tuple[int, ...]:
    """The values of tp to try: those given, else the default ones that the cluster has devices for."""
    if degrees is None:
        return tuple(tp for tp in DEFAULT_TP if tp <= cluster.device_count)
    wanted = numbers("tp", degrees)
    if min(wanted) > cluster.device_count:
        refuse_tp(wanted, cluster)
    return tuple(tp for tp in wanted if tp <= cluster.device_count)


def offered_cp(degrees: object, cluster: Cluster, graph: Graph, target: ChosenTarget) -> tuple[int, ...]:
    """The values of cp to try: those given, else 1, and 2 for long sequences that the target splits."""
    if degrees is not None:
        return _within_cluster("cp", degrees, cluster)
    length = max(token_lengths(graph).values(), default=0)
    is_offered = target.capabilities.allows_context_parallel and length >= LONG_SEQUENCE and not length % MOST_FIRST_CP
    return (1, MOST_FIRST_CP) if is_offered and cluster.device_count > 1 else (1,)


def offered_ep(degrees: object, cluster: Cluster, graph: Graph, target: ChosenTarget) -> tuple[int, ...]:
    """The values of ep to try: those given, else the default ones that divide the experts, if the target does that."""
    if degrees is not None:
        return _within_cluster("ep", degrees, cluster)
    experts = math.gcd(*expert_counts(graph).values())
    if not experts or not target.capabilities.allows_expert_parallel:
        return (1,)
    return tuple(ep for ep in DEFAULT_EP if experts % ep == 0 and ep <= cluster.device_count)


def offered_offload(cluster: Cluster, target: ChosenTarget, *, trains: bool) -> tuple[Offload, ...]:
    """What may be kept on the host: nothing where the cluster names no host, and what the target cannot run never."""
    if cluster.host is None or not trains:
        return (Offload.NONE,)
    return tuple(kept for kept in Offload if kept in target.capabilities.offloads)


def check_host(fixed: Mapping[str, object], cluster: Cluster) -> None:
    """Raise QuestionError where a strategy keeps something on a host that the cluster does not name."""
    if fixed.get("offload", Offload.NONE) is not Offload.NONE and cluster.host is None:
        raise QuestionError(
            f"strategy has offload {fixed['offload']}, but the cluster names no host; write for example "
            "a100-80gb:8/host=25GB/s,200GiB (bandwidth per direction and memory of each device)."
        )


def offered_recompute(given: object, target: ChosenTarget) -> tuple[RecomputeMode, ...]:
    """The recompute modes to try: those given, else the usual ones, or all that the target runs of fewer ones."""
    runs = target.capabilities.recompute_modes
    if given is not None:
        names = (given,) if isinstance(given, str) else given
        if not isinstance(names, Iterable) or not (names := tuple(names)):
            raise QuestionError(f"recompute is {shown(given)}; expected modes such as ('none', 'budget', 'full').")
        every = [mode for name in names for mode in (BUDGET_MODES if name == BUDGET else (recompute_mode(name),))]
        asked = tuple(mode for mode in RecomputeMode if mode in every)
        if unknown := [mode for mode in asked if mode not in runs]:
            raise QuestionError(
                f"recompute has {unknown[0]}, which target {target.name} does not run; it runs "
                f"{', '.join(sorted(runs))}. Leave it out, or ask with target=None."
            )
        return asked
    return SEARCHED_MODES if runs.issuperset(SEARCHED_MODES) else tuple(mode for mode in RecomputeMode if mode in runs)


def _within_cluster(name: str, degrees: object, cluster: Cluster) -> tuple[int, ...]:
    wanted = numbers(name, degrees)
    usable = tuple(degree for degree in wanted if degree <= cluster.device_count)
    if not usable:
        raise QuestionError(
            f"{name} is {list(wanted)}, but the cluster has {cluster.device_count} devices; expected at most that."
        )
    return usable


def refuse_tp(wanted: tuple[int, ...], cluster: Cluster) -> None:
    """Raise QuestionError for values of tp that all exceed the cluster."""
    raise QuestionError(
        f"tp is {list(wanted)}, but the cluster has {cluster.device_count} devices; expected at most that."
    )


def marks_batch(graph: Graph) -> bool:
    """Whether the graph knows which of its factors are the batch, and so can be rescaled."""
    return any(factor.is_batch for op in graph.ops for factor in op.rule.factors)
