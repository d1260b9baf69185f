"""A model at one microbatch size, sliced, priced and scheduled at every tensor width: what placement chooses from.

Equal layers may be sliced differently (the first block reads a whole tensor, the others one that is split along the
sequence), so layers share profiles only where they are equal and sliced alike at every width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from phaze.cost import cast_graph
from phaze.errors import ShardError
from phaze.hardware import Cluster
from phaze.ir import Graph, RecomputeMode
from phaze.place import LayerProfile, PlacementGraph
from phaze.place.problem import ProfileKey
from phaze.planner.profiles import LayerReport, ProfileOptions, placement_graph, profile_and_report
from phaze.planner.request import Request
from phaze.planner.watch import Watch
from phaze.shard import (
    Axis,
    LayerTask,
    SequenceParallel,
    ShardedLayer,
    ShardedModel,
    ShardOptions,
    shard_model,
    unsharded,
)

__all__ = ["Slices", "slice_model"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slices:
    """The profiles of all layers at one microbatch size.

    Attributes:
        graph: in the types of the precision recipe, at this microbatch.
        placement: its layers as placement sees them.
        sharded: the sharding at every width that the model can be split.
        profiles: by layer, width and recompute mode.
        reports: the passes behind the profiles.
        refused: why a width is missing.
    """

    micro_batch_size: int
    graph: Graph
    placement: PlacementGraph
    sharded: Mapping[int, ShardedModel]
    profiles: Mapping[ProfileKey, LayerProfile]
    reports: Mapping[ProfileKey, LayerReport]
    refused: Mapping[int, str]

    def report(self, layer: int, width: int, mode: RecomputeMode) -> LayerReport:
        """The passes of one layer of the graph."""
        return self.reports[self.placement.layers[layer].key, width, mode]


def slice_model(
    request: Request,
    size: int,
    watch: Watch,
    *,
    widths: Sequence[int] | None = None,
    sequence_parallel: SequenceParallel = SequenceParallel.FREE,
    cluster: Cluster | None = None,
    options: ProfileOptions | None = None,
) -> Slices:
    """Slice, price and schedule every distinct layer once per width.

    `widths` and `cluster` stand for those of the request; `options` carries schedules from one call to the next.
    """
    options = options or ProfileOptions(gap=request.gap / 2, prices=request.prices)
    graph = cast_graph(request.graph.with_micro_batch(size), request.recipe)
    sharded: dict[int, ShardedModel] = {}
    refused: dict[int, str] = {}
    for width in request.tensor_widths if widths is None else widths:
        watch.report(f"microbatch {size}: slicing layers {width} ways")
        axis = Axis(cluster or request.cluster, width, request.calibration)
        try:
            sharded[width] = _shard(request, graph, axis, sequence_parallel)
        except ShardError as error:
            refused[width] = str(error)
    variants = _variants(graph, sharded.values())
    profiles: dict[ProfileKey, LayerProfile] = {}
    reports: dict[ProfileKey, LayerReport] = {}
    for width, model in sharded.items():
        watch.report(f"microbatch {size}: scheduling layers sliced {width} ways")
        for key, layer in _one_of_each(variants, model.layers).items():
            for mode, (profile, report) in profile_and_report(layer, tuple(RecomputeMode), options).items():
                profiles[key, width, mode] = profile
                reports[key, width, mode] = report
    return Slices(
        micro_batch_size=size,
        graph=graph,
        placement=placement_graph(graph, variants),
        sharded=sharded,
        profiles=profiles,
        reports=reports,
        refused=refused,
    )


def _shard(request: Request, graph: Graph, axis: Axis, sequence_parallel: SequenceParallel) -> ShardedModel:
    if axis.width > 1:
        return shard_model(
            graph,
            axis,
            ShardOptions(
                sequence_parallel=sequence_parallel,
                constraints=request.constraints,
                may_stride_parameters=request.capabilities.allows_strided_parameters,
            ),
        )
    whole = {layer.key: unsharded(LayerTask(graph=graph, layer=layer, axis=axis)) for layer in graph.distinct_layers}
    return ShardedModel(
        graph=graph,
        axis=axis,
        layers=tuple(whole[layer.key] for layer in graph.layers),
        parameters={},
        is_sequence_split=(False,) * len(graph.layers),
    )


def _variants(graph: Graph, models: Iterable[ShardedModel]) -> list[str]:
    """A key per layer: that of its content, and which of its slices it got at each width."""
    numbers: dict[tuple[str, tuple[int, ...]], int] = {}
    per_key: dict[str, int] = {}
    models = tuple(models)
    keys = []
    for layer in graph.layers:
        slices = (layer.key, tuple(id(model.layers[layer.index]) for model in models))
        if slices not in numbers:
            numbers[slices] = per_key.get(layer.key, 0)
            per_key[layer.key] = numbers[slices] + 1
        keys.append(f"{layer.key}#{numbers[slices]}")
    return keys


def _one_of_each(variants: Sequence[str], layers: Sequence[ShardedLayer]) -> dict[str, ShardedLayer]:
    return dict(zip(variants, layers, strict=True))
