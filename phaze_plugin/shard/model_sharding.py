"""Tensor parallelism of a whole model: every distinct layer is solved once, and layouts between layers are chosen.

Between layers an activation [batch, sequence, ...] is whole or split along the sequence; other tensors are whole. Each
distinct layer is solved (`layer_sharding.py`) for every combination of what enters (a), what leaves (b) and the layouts
of its tied parameters (c). A small integer program, `_CombinationProgram`, picks one combination per layer:

Variables
    y[l,a,b,c]  binary, 1 where layer l has this combination

Objective, in microseconds
    minimise    sum over layers l of y[l,a,b,c] seconds[l,a,b,c]

Constraints
 1. each layer has one combination                                   `one_combination_per_layer`
 2. what a layer leaves is what every layer that it feeds receives   `boundaries_agree`
 3. layers that share a tied parameter give it the same layout       `tied_parameters_agree`

Gradients of boundary tensors have the layouts of the tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from phaze.errors import GraphError, ShardError
from phaze.ir import Graph, Layer, Phase, Role
from phaze.shard.layer_sharding import MICROSECONDS, ShardedLayer, shard_layer
from phaze.shard.layout import Layout, LayoutConstraint, Split, check_constraints
from phaze.shard.resharding import Axis
from phaze.shard.sharding_problem import ShardingProblem, check_heads, leaving_tensors, splits_of_layer
from phaze.solvers import AUTOMATIC_SOLVERS, ProblemBuilder, SolverChain, WorkLimits, solve_linear

__all__ = ["SequenceParallel", "ShardOptions", "ShardedModel", "sequence_lengths", "shard_model", "shard_variants"]

SEQUENCE_DIM = 1
"""The dimension of an activation [batch, sequence, ...] that runs along the sequence."""

FEWEST_DIMS = 3
"""The dimensions of an activation: batch, sequence and at least one of features. With fewer it has no sequence."""


class SequenceParallel(StrEnum):
    """Whether activations between layers are split along the sequence."""

    ON = "on"
    OFF = "off"
    FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """What the search may do: sequence parallelism, layout constraints, what the target can run, and who solves it."""

    sequence_parallel: SequenceParallel = SequenceParallel.FREE
    constraints: tuple[LayoutConstraint, ...] = ()
    may_stride_parameters: bool = True
    may_split_norms: bool = False
    solver: SolverChain = AUTOMATIC_SOLVERS


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
    """What enters, what leaves, and the layouts of tied parameters, in the order of `_tied_names`."""

    enters_split: bool
    leaves_split: bool
    tied: tuple[Layout, ...] = ()


def shard_model(graph: Graph, axis: Axis, options: ShardOptions | None = None) -> ShardedModel:
    """Shard every layer of a graph.

    Raises ShardError where a layer is not tensor-parallel at this tp, or where constraints contradict each other or
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
                if (sharded := _solve_layer(graph, layer, axis, options, combination)) is not None
            }
        except (GraphError, ShardError) as error:  # a GraphError says which factor of a rule cannot be split
            raise ShardError(f"layer {layer.name!r}, {error}") from error
        if not tables[layer.key]:
            raise ShardError(f"layer {layer.name!r} has no sharding {axis.tp} ways under these constraints.")
    chosen = _CombinationProgram(graph, tables).solve(options.solver)
    layers = tuple(tables[layer.key][combination] for layer, combination in zip(graph.layers, chosen, strict=True))
    parameters: dict[str, Layout] = {}
    for layer, sharded in zip(graph.layers, layers, strict=True):
        # Equal layers share one answer under the first one's names, which are in the same order as this layer's.
        parameters |= dict(zip(_parameters_read(graph, layer), sharded.parameters.values(), strict=True))
    return ShardedModel(
        graph=graph,
        axis=axis,
        layers=layers,
        parameters=parameters,
        is_sequence_split=tuple(combination.leaves_split for combination in chosen),
    )


def shard_variants(
    graph: Graph,
    axis: Axis,
    options: ShardOptions | None = None,
    modes: Sequence[SequenceParallel] = (SequenceParallel.ON, SequenceParallel.OFF),
) -> dict[SequenceParallel, ShardedModel]:
    """The best sharding under each of several modes of sequence parallelism; modes that have none are left out.

    The mode of `options` is not read. Raises the first mode's ShardError where no mode has a sharding.
    """
    options = options or ShardOptions()
    variants: dict[SequenceParallel, ShardedModel] = {}
    errors: list[ShardError] = []
    for mode in modes:
        try:
            variants[mode] = shard_model(graph, axis, replace(options, sequence_parallel=mode))
        except ShardError as error:
            errors.append(error)
    if errors and not variants:
        raise errors[0]
    return variants


def _parameters_read(graph: Graph, layer: Layer) -> list[str]:
    """Parameters in the order in which the layer's forward first reads them."""
    inputs = (name for op in layer.forward for name in op.inputs)
    return list(dict.fromkeys(name for name in inputs if graph.tensors[name].role is Role.PARAMETER))


def _tied_names(graph: Graph, layer: Layer) -> list[str]:
    """The layer's parameters that other layers use, too."""
    tied = graph.layer_graph.tied_parameters
    return [name for name in _parameters_read(graph, layer) if name in tied]


def _combinations(graph: Graph, layer: Layer, axis: Axis, options: ShardOptions) -> Iterator[_Combination]:
    """Every combination that a layer is solved for."""
    allowed = {
        SequenceParallel.ON: (True,),
        SequenceParallel.OFF: (False,),
        SequenceParallel.FREE: (False, True),
    }[options.sequence_parallel]
    enters = allowed if _sequence_layouts(graph, layer.inputs, axis) else (False,)
    leaves = allowed if _sequence_layouts(graph, layer.outputs, axis) else (False,)
    tied = [_layouts_of_parameter(graph, layer, axis, options, name) for name in _tied_names(graph, layer)]
    for enters_split, leaves_split in itertools.product(enters, leaves):
        for layouts in itertools.product(*tied):
            yield _Combination(enters_split, leaves_split, layouts)


def _layouts_of_parameter(graph: Graph, layer: Layer, axis: Axis, options: ShardOptions, name: str) -> list[Layout]:
    """The layouts that some split of the layer's ops gives a parameter."""
    splits = splits_of_layer(_problem(graph, layer, axis, options, {}), layer.forward)
    layouts = (
        layout
        for op in layer.forward
        for split in splits[op.id]
        for operand, layout in zip(op.inputs, split.operands, strict=True)
        if operand == name
    )
    return list(dict.fromkeys(layouts))


def _solve_layer(
    graph: Graph, layer: Layer, axis: Axis, options: ShardOptions, combination: _Combination
) -> ShardedLayer | None:
    """The best sharding under a combination; None where constraints and tied layouts leave none."""
    layouts: dict[str, Layout] = {}
    if combination.enters_split:
        layouts |= _sequence_layouts(graph, (*layer.inputs, *_gradients_leaving(graph, layer)), axis)
    if combination.leaves_split:
        layouts |= _sequence_layouts(graph, (*layer.outputs, *_gradients_entering(graph, layer)), axis)
    layouts |= dict(zip(_tied_names(graph, layer), combination.tied, strict=True))
    problem = _problem(graph, layer, axis, options, layouts)
    # Heads that do not divide are an error under every combination, so that they are named and not passed over below.
    for op in layer.forward:
        check_heads(problem, op)
    if not combination.tied and not options.constraints:
        return shard_layer(problem)
    try:
        return shard_layer(problem)
    except ShardError:
        return None


def _problem(
    graph: Graph, layer: Layer, axis: Axis, options: ShardOptions, layouts: Mapping[str, Layout]
) -> ShardingProblem:
    return ShardingProblem(
        graph=graph,
        layer=layer,
        axis=axis,
        layouts=layouts,
        constraints=options.constraints,
        may_split_sequence=options.sequence_parallel is not SequenceParallel.OFF,
        may_stride_parameters=options.may_stride_parameters,
        may_split_norms=options.may_split_norms,
        solver=options.solver,
    )


def _sequence_layouts(graph: Graph, names: tuple[str, ...], axis: Axis) -> dict[str, Layout]:
    """Among some tensors those with a sequence of at least tp positions, each with the layout split along it."""
    layouts = {}
    for name in names:
        if graph.producer(name) is None or not _has_sequence(graph, name):
            continue
        length = graph.tensors[name].shape[SEQUENCE_DIM]
        if length >= axis.tp:
            split = Split(dim=SEQUENCE_DIM, outer=1, chunk=-(-length // axis.tp), ways=axis.tp)
            layouts[name] = Layout((split,))
    return layouts


def _gradients_entering(graph: Graph, layer: Layer) -> tuple[str, ...]:
    made = {name for op in (*layer.forward, *layer.backward) for name in op.outputs}
    read = dict.fromkeys(name for op in layer.backward for name in op.inputs)
    producers = {name: graph.producer(name) for name in read if name not in made}
    return tuple(name for name, op in producers.items() if op is not None and op.phase is Phase.BACKWARD)


def _gradients_leaving(graph: Graph, layer: Layer) -> tuple[str, ...]:
    return tuple(name for name, phase in leaving_tensors(graph, layer) if phase is Phase.BACKWARD)


class _CombinationProgram:
    """Variables and rows of the integer program in the module's docstring."""

    def __init__(self, graph: Graph, tables: Mapping[str, Mapping[_Combination, ShardedLayer]]) -> None:
        self.graph = graph
        self.builder = ProblemBuilder("boundary layouts")
        self.combinations = [list(tables[layer.key]) for layer in graph.layers]
        self.chosen = [
            self.builder.binaries(
                len(combinations),
                cost=[MICROSECONDS * tables[layer.key][combination].seconds for combination in combinations],
            ).tolist()
            for layer, combinations in zip(graph.layers, self.combinations, strict=True)
        ]
        self.one_combination_per_layer()
        self.boundaries_agree()
        self.tied_parameters_agree()

    def one_combination_per_layer(self) -> None:
        """Add constraint 1."""
        for variables in self.chosen:
            self.builder.rows(variables, lower=1.0, upper=1.0)

    def boundaries_agree(self) -> None:
        """Add constraint 2."""
        for boundary in self.graph.layer_graph.boundaries:
            if _has_sequence(self.graph, boundary.tensor):
                for consumer in boundary.consumers:
                    self._equal(
                        self._where(boundary.producer, lambda combination: combination.leaves_split),
                        self._where(consumer, lambda combination: combination.enters_split),
                    )

    def tied_parameters_agree(self) -> None:
        """Add constraint 3."""
        for name, users in self.graph.layer_graph.tied_parameters.items():
            first, *further = users
            for user in further:
                layouts = {*self._tied_layouts(first, name)} | {*self._tied_layouts(user, name)}
                for layout in sorted(layouts, key=str):
                    self._equal(self._where_tied(first, name, layout), self._where_tied(user, name, layout))

    def _tied_layouts(self, layer: int, name: str) -> list[Layout]:
        """The layout of a tied parameter in each combination of a layer."""
        place = _tied_names(self.graph, self.graph.layers[layer]).index(name)
        return [combination.tied[place] for combination in self.combinations[layer]]

    def _where_tied(self, layer: int, name: str, layout: Layout) -> list[int]:
        layouts = self._tied_layouts(layer, name)
        return [variable for variable, given in zip(self.chosen[layer], layouts, strict=True) if given == layout]

    def _where(self, layer: int, is_meant: Callable[[_Combination], bool]) -> list[int]:
        """The variables of a layer's combinations for which something holds."""
        pairs = zip(self.chosen[layer], self.combinations[layer], strict=True)
        return [variable for variable, combination in pairs if is_meant(combination)]

    def _equal(self, left: list[int], right: list[int]) -> None:
        """The sums of two lists of variables are equal."""
        coefficients = [1.0] * len(left) + [-1.0] * len(right)
        self.builder.rows([*left, *right], coefficients, lower=0.0, upper=0.0)

    def solve(self, solver: SolverChain) -> list[_Combination]:
        """One combination per layer, of least total seconds; raises ShardError where layers cannot agree."""
        result = solve_linear(self.builder.build(), WorkLimits(), solver)
        if result.solution is None:
            raise ShardError("layers cannot agree on boundary layouts and tied parameters under these constraints.")
        return [
            next(
                combination
                for variable, combination in zip(variables, combinations, strict=True)
                if result.solution[variable] > 0.5
            )
            for variables, combinations in zip(self.chosen, self.combinations, strict=True)
        ]


def sequence_lengths(graph: Graph) -> tuple[int, ...]:
    """The lengths along which tensors between layers could be split, ascending."""
    names = [boundary.tensor for boundary in graph.layer_graph.boundaries]
    return tuple(sorted({graph.tensors[name].shape[SEQUENCE_DIM] for name in names if _has_sequence(graph, name)}))


def _has_sequence(graph: Graph, name: str) -> bool:
    """Whether a tensor that some op makes is an activation [batch, sequence, ...]."""
    producer = graph.producer(name)
    assert producer is not None
    dims = producer.rule.results[producer.outputs.index(name)]
    return len(dims) >= FEWEST_DIMS and any(producer.rule.factor(factor).is_batch for factor in dims[0].factors)
