"""Tensor parallelism of a whole model: every distinct layer once, boundary layouts chosen over the layer graph.

Between layers an activation [batch, sequence, ...] is whole or split along the sequence; other tensors are whole. Each
distinct layer is solved for every combination of what enters (a), what leaves (b) and the layouts of its tied
parameters (c), and a small integer program picks one combination per layer:

    minimise    sum over layers l of y[l,a,b,c] seconds[l,a,b,c]
    such that   one combination per layer; a layer's b is the a of every layer it feeds; tied parameters agree

Gradients of boundary tensors have the layouts of the tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from phaze.errors import ShardError
from phaze.ir import Graph, Layer, Phase, Role
from phaze.shard.candidates import check_heads, layer_strategies
from phaze.shard.constraints import LayoutConstraint, check_constraints
from phaze.shard.layout import Layout, Split
from phaze.shard.moves import Axis
from phaze.shard.program import shard_layer
from phaze.shard.task import LayerTask, ShardedLayer, leaving
from phaze.solvers import ProblemBuilder, WorkLimits, solve_linear

__all__ = ["SequenceParallel", "ShardOptions", "ShardedModel", "sequence_lengths", "shard_model"]


class SequenceParallel(StrEnum):
    """Whether activations between layers are split along the sequence."""

    ON = "on"
    OFF = "off"
    FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """What the search may do: sequence parallelism, layout constraints, and what the target can run."""

    sequence_parallel: SequenceParallel = SequenceParallel.FREE
    constraints: tuple[LayoutConstraint, ...] = ()
    may_stride_parameters: bool = True
    may_split_norms: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """The sharding of every layer (equal layers share one answer) and of every parameter."""

    graph: Graph
    axis: Axis
    layers: tuple[ShardedLayer, ...]
    parameters: Mapping[str, Layout]
    is_sequence_split: tuple[bool, ...]

    @property
    def seconds(self) -> float:
        """Forward and backward of all layers, one after the other."""
        return sum(layer.seconds for layer in self.layers)


@dataclass(frozen=True, slots=True)
class _Combination:
    """What enters, what leaves, and the layouts of tied parameters, in the order of their names."""

    enters_split: bool
    leaves_split: bool
    tied: tuple[Layout, ...] = ()


def shard_model(graph: Graph, axis: Axis, options: ShardOptions | None = None) -> ShardedModel:
    """Shard every layer of a graph.

    Raises ShardError where a layer is not tensor-parallel at this width, or where constraints contradict each other or
    match nothing.
    """
    options = options or ShardOptions()
    check_constraints(options.constraints, graph.tensors)
    tables: dict[str, dict[_Combination, ShardedLayer]] = {}
    for layer in graph.distinct_layers:
        try:
            tables[layer.key] = {
                combination: sharded
                for combination in _combinations(graph, layer, axis, options)
                if (sharded := _solve(graph, layer, axis, options, combination)) is not None
            }
        except ShardError as error:
            raise ShardError(f"layer {layer.name!r}, {error}") from error
        if not tables[layer.key]:
            raise ShardError(f"layer {layer.name!r} has no sharding {axis.width} ways under these constraints.")
    chosen = _choose(graph, tables)
    layers = tuple(tables[layer.key][choice] for layer, choice in zip(graph.layers, chosen, strict=True))
    parameters: dict[str, Layout] = {}
    for layer, sharded in zip(graph.layers, layers, strict=True):
        parameters |= dict(zip(_used(graph, layer), sharded.parameters.values(), strict=True))
    return ShardedModel(
        graph=graph,
        axis=axis,
        layers=layers,
        parameters=parameters,
        is_sequence_split=tuple(choice.leaves_split for choice in chosen),
    )


def _used(graph: Graph, layer: Layer) -> list[str]:
    """Parameters in the order in which the layer's forward first reads them."""
    inputs = (name for op in layer.forward for name in op.inputs)
    return list(dict.fromkeys(name for name in inputs if graph.tensors[name].role is Role.PARAMETER))


def _combinations(graph: Graph, layer: Layer, axis: Axis, options: ShardOptions) -> Iterator[_Combination]:
    allowed = {
        SequenceParallel.ON: (True,),
        SequenceParallel.OFF: (False,),
        SequenceParallel.FREE: (False, True),
    }[options.sequence_parallel]
    enters = allowed if _sequence_tensors(graph, layer.inputs, axis) else (False,)
    leaves = allowed if _sequence_tensors(graph, layer.outputs, axis) else (False,)
    tied = [_layouts_of(graph, layer, axis, options, name) for name in _tied(graph, layer)]
    for enter, leave in itertools.product(enters, leaves):
        for layouts in itertools.product(*tied):
            yield _Combination(enter, leave, layouts)


def _tied(graph: Graph, layer: Layer) -> list[str]:
    tied = graph.layer_graph.tied_parameters
    return [name for name in _used(graph, layer) if name in tied]


def _layouts_of(graph: Graph, layer: Layer, axis: Axis, options: ShardOptions, name: str) -> list[Layout]:
    """The layouts that some strategy of the layer gives a parameter."""
    task = _task(graph, layer, axis, options, {})
    strategies = layer_strategies(task, layer.forward)
    found: dict[Layout, None] = {}
    for op in layer.forward:
        for strategy in strategies[op.id]:
            for operand, layout in zip(op.inputs, strategy.operands, strict=True):
                if operand == name:
                    found[layout] = None
    return list(found)


def _solve(
    graph: Graph, layer: Layer, axis: Axis, options: ShardOptions, combination: _Combination
) -> ShardedLayer | None:
    """The best sharding under a combination; None where constraints and tied layouts leave none."""
    layouts: dict[str, Layout] = {}
    if combination.enters_split:
        layouts |= _sequence_tensors(graph, (*layer.inputs, *_gradients_leaving(graph, layer)), axis)
    if combination.leaves_split:
        layouts |= _sequence_tensors(graph, (*layer.outputs, *_gradients_entering(graph, layer)), axis)
    layouts |= dict(zip(_tied(graph, layer), combination.tied, strict=True))
    task = _task(graph, layer, axis, options, layouts)
    for op in layer.forward:
        check_heads(task, op)
    if not combination.tied and not options.constraints:
        return shard_layer(task)
    try:
        return shard_layer(task)
    except ShardError:
        return None


def _task(graph: Graph, layer: Layer, axis: Axis, options: ShardOptions, layouts: Mapping[str, Layout]) -> LayerTask:
    return LayerTask(
        graph=graph,
        layer=layer,
        axis=axis,
        layouts=layouts,
        constraints=options.constraints,
        may_split_sequence=options.sequence_parallel is not SequenceParallel.OFF,
        may_stride_parameters=options.may_stride_parameters,
        may_split_norms=options.may_split_norms,
    )


def _sequence_tensors(graph: Graph, names: tuple[str, ...], axis: Axis) -> dict[str, Layout]:
    """The tensors [batch, sequence, ...] of at least 3 dimensions among some, split along the sequence."""
    found = {}
    for name in names:
        producer = graph.producer(name)
        shape = graph.tensors[name].shape
        if producer is None or len(shape) < 3 or shape[1] < axis.width:
            continue
        dims = producer.rule.results[producer.outputs.index(name)]
        if any(producer.rule.factor(factor).is_batch for factor in dims[0].factors):
            found[name] = Layout((Split(1, 1, -(-shape[1] // axis.width), axis.width),))
    return found


def _gradients_entering(graph: Graph, layer: Layer) -> tuple[str, ...]:
    made = {name for op in (*layer.forward, *layer.backward) for name in op.outputs}
    read = dict.fromkeys(name for op in layer.backward for name in op.inputs)
    producers = {name: graph.producer(name) for name in read if name not in made}
    return tuple(n for n, op in producers.items() if op is not None and op.phase is Phase.BACKWARD)


def _gradients_leaving(graph: Graph, layer: Layer) -> tuple[str, ...]:
    return tuple(name for name, phase in leaving(graph, layer) if phase is Phase.BACKWARD)


def _choose(graph: Graph, tables: Mapping[str, Mapping[_Combination, ShardedLayer]]) -> list[_Combination]:
    """One combination per layer, agreeing along edges and on tied parameters, of least total seconds."""
    builder = ProblemBuilder("boundary layouts")
    options = [list(tables[layer.key]) for layer in graph.layers]
    chosen = [
        builder.binaries(len(option), cost=[1e6 * tables[layer.key][choice].seconds for choice in option]).tolist()
        for layer, option in zip(graph.layers, options, strict=True)
    ]
    for variables in chosen:
        builder.rows(variables, lower=1.0, upper=1.0)

    def agree(one: list[int], other: list[int]) -> None:
        builder.rows([*one, *other], [1.0] * len(one) + [-1.0] * len(other), lower=0.0, upper=0.0)

    def where(layer: int, test: object, value: object) -> list[int]:
        return [v for v, choice in zip(chosen[layer], options[layer], strict=True) if test(choice) == value]  # type: ignore[operator]

    for boundary in graph.layer_graph.boundaries:
        if _is_sequence(graph, boundary.tensor):
            for consumer in boundary.consumers:
                agree(
                    where(boundary.producer, lambda choice: choice.leaves_split, True),
                    where(consumer, lambda choice: choice.enters_split, True),
                )
    for name, users in graph.layer_graph.tied_parameters.items():
        places = [(user, _tied(graph, graph.layers[user]).index(name)) for user in users]
        first, first_place = places[0]
        for user, place in places[1:]:
            layouts = {c.tied[first_place] for c in options[first]} | {c.tied[place] for c in options[user]}
            for layout in sorted(layouts, key=str):
                agree(
                    where(first, lambda choice, at=first_place: choice.tied[at], layout),
                    where(user, lambda choice, at=place: choice.tied[at], layout),
                )
    result = solve_linear(builder.build(), WorkLimits())
    if result.solution is None:
        raise ShardError("layers cannot agree on boundary layouts and tied parameters under these constraints.")
    return [
        next(choice for v, choice in zip(variables, option, strict=True) if result.solution[v] > 0.5)
        for variables, option in zip(chosen, options, strict=True)
    ]


def sequence_lengths(graph: Graph) -> tuple[int, ...]:
    """The lengths along which tensors between layers could be split, ascending."""
    names = [boundary.tensor for boundary in graph.layer_graph.boundaries]
    return tuple(sorted({graph.tensors[name].shape[1] for name in names if _is_sequence(graph, name)}))


def _is_sequence(graph: Graph, name: str) -> bool:
    producer = graph.producer(name)
    assert producer is not None
    dims = producer.rule.results[producer.outputs.index(name)]
    return len(dims) >= 3 and any(producer.rule.factor(factor).is_batch for factor in dims[0].factors)
