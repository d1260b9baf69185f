"""What layers of a model share, and the combination of it for each layer with which all agree in least seconds.

Layers share tensors between them, whole or split along the sequence, and tied parameters. A `Combination` is what one
layer is sharded for: whether what enters is split, whether what leaves is, and the layouts of its parameters that other
layers use, too. Gradients of boundary tensors have the layouts of the tensors.

`choose_combinations` picks one for each layer by an integer program.

Variables
    y[l,a,b,c]  binary, 1 where layer l has the combination of what enters (a), what leaves (b) and tied layouts (c)

Objective, in microseconds
    minimise    sum over layers l of y[l,a,b,c] seconds[l,a,b,c]

Constraints
 1. each layer has one combination                                   `one_combination_per_layer`
 2. what a layer leaves is what every layer that it feeds receives   `boundaries_agree`
 3. layers that share a tied parameter give it the same layout       `tied_parameters_agree`

Without a named solver the same is found by elimination (`eliminate_combinations`), over one variable for each layer
with a value for each of its combinations, and a table for each two layers that must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from phaze.errors import ShardError
from phaze.ir import Graph, Layer, Phase, Role
from phaze.shard.elimination import FloatArray, plan_elimination
from phaze.shard.layer_tables import MICROSECONDS
from phaze.shard.layout import Layout, Split
from phaze.shard.mesh_axes import Axis
from phaze.shard.sharding_problem import leaving_tensors
from phaze.solvers import AUTOMATIC_SOLVERS, ProblemBuilder, SolverChain, WorkLimits, solve_linear

__all__ = [
    "Combination",
    "SequenceParallel",
    "choose_combinations",
    "combination_layouts",
    "entering_names",
    "has_sequence",
    "leaving_names",
    "parameters_read",
    "sequence_layouts",
    "sequence_lengths",
    "tied_names",
]

SEQUENCE_DIM = 1
"""The dimension of an activation [batch, sequence, ...] that runs along the sequence."""

FEWEST_DIMS = 3
"""The dimensions of an activation: batch, sequence and at least one of features. With fewer it has no sequence."""


class SequenceParallel(StrEnum):
    """Whether activations between layers are split along the sequence."""

    ON = "on"
    OFF = "off"
    FREE = "free"

    @property
    def may_be_split(self) -> tuple[bool, ...]:
        """What may be chosen for an activation between layers: that it is split, that it is not, or either."""
        return {SequenceParallel.ON: (True,), SequenceParallel.OFF: (False,), SequenceParallel.FREE: (False, True)}[
            self
        ]


@dataclass(frozen=True, slots=True)
class Combination:
    """What enters, what leaves, and the layouts of tied parameters, in the order of `tied_names`."""

    enters_split: bool
    leaves_split: bool
    tied: tuple[Layout, ...] = ()


def parameters_read(graph: Graph, layer: Layer) -> list[str]:
    """Parameters in the order in which the layer's forward first reads them."""
    inputs = (name for op in layer.forward for name in op.inputs)
    return list(dict.fromkeys(name for name in inputs if graph.tensors[name].role is Role.PARAMETER))


def tied_names(graph: Graph, layer: Layer) -> list[str]:
    """The layer's parameters that other layers use, too."""
    tied = graph.layer_graph.tied_parameters
    return [name for name in parameters_read(graph, layer) if name in tied] if tied else []


def entering_names(graph: Graph, layer: Layer) -> tuple[str, ...]:
    """The tensors that have the layout of what enters: those that enter forward, and gradients that leave backward."""
    leaving = (name for name, phase in leaving_tensors(graph, layer) if phase is Phase.BACKWARD)
    return (*layer.inputs, *leaving)


def leaving_names(graph: Graph, layer: Layer) -> tuple[str, ...]:
    """The tensors that have the layout of what leaves: those that leave forward, and gradients that enter backward."""
    made = {name for op in (*layer.forward, *layer.backward) for name in op.outputs}
    read = dict.fromkeys(name for op in layer.backward for name in op.inputs)
    producers = {name: graph.producer(name) for name in read if name not in made}
    return (*layer.outputs, *(name for name, op in producers.items() if op is not None and op.phase is Phase.BACKWARD))


def sequence_layouts(graph: Graph, names: tuple[str, ...], axis: Axis) -> dict[str, Layout]:
    """Among some tensors those with a sequence of at least tp positions, each with the layout split along it."""
    layouts = {}
    for name in names:
        if graph.producer(name) is None or not has_sequence(graph, name):
            continue
        length = graph.tensors[name].shape[SEQUENCE_DIM]
        if length >= axis.tp:
            split = Split(dim=SEQUENCE_DIM, outer=1, chunk=-(-length // axis.tp), ways=axis.tp)
            layouts[name] = Layout((split,))
    return layouts


def combination_layouts(graph: Graph, layer: Layer, axis: Axis, combination: Combination) -> dict[str, Layout]:
    """The layouts of boundary tensors and tied parameters under a combination; what is left out is whole."""
    layouts: dict[str, Layout] = {}
    if combination.enters_split:
        layouts |= sequence_layouts(graph, entering_names(graph, layer), axis)
    if combination.leaves_split:
        layouts |= sequence_layouts(graph, leaving_names(graph, layer), axis)
    return layouts | dict(zip(tied_names(graph, layer), combination.tied, strict=True))


def sequence_lengths(graph: Graph) -> tuple[int, ...]:
    """The lengths along which tensors between layers could be split, ascending."""
    names = [boundary.tensor for boundary in graph.layer_graph.boundaries]
    return tuple(sorted({graph.tensors[name].shape[SEQUENCE_DIM] for name in names if has_sequence(graph, name)}))


def has_sequence(graph: Graph, name: str) -> bool:
    """Whether a tensor that some op makes is an activation [batch, sequence, ...]."""
    producer = graph.producer(name)
    assert producer is not None
    dims = producer.rule.results[producer.outputs.index(name)]
    return len(dims) >= FEWEST_DIMS and any(producer.rule.factor(factor).is_batch for factor in dims[0].factors)


SecondsByCombination = Mapping[Combination, float]
"""The least seconds of a layer under each combination that it can be sharded for."""


def choose_combinations(
    graph: Graph, seconds: Mapping[str, SecondsByCombination], solver: SolverChain
) -> list[Combination]:
    """One combination per layer, of least total seconds; raises ShardError where layers cannot agree."""
    chosen = eliminate_combinations(graph, seconds) if solver is AUTOMATIC_SOLVERS else None
    return chosen or _CombinationProgram(graph, seconds).solve(solver)


def eliminate_combinations(graph: Graph, seconds: Mapping[str, SecondsByCombination]) -> list[Combination] | None:
    """The best combinations by elimination; None where its tables would be too large, or where layers cannot agree."""
    offered = {key: list(by_combination) for key, by_combination in seconds.items()}
    costs = {key: np.array(list(by_combination.values())) for key, by_combination in seconds.items()}
    keys = [layer.key for layer in graph.layers]
    pairs: dict[tuple[int, int], list[FloatArray]] = {}
    known: dict[object, FloatArray] = {}
    for first, second, is_agreed, kind in _agreements(graph):
        pair = (keys[first], keys[second], kind)
        if pair not in known:
            agreed = [[is_agreed(left, right) for right in offered[pair[1]]] for left in offered[pair[0]]]
            known[pair] = np.where(agreed, 0.0, np.inf)
        if known[pair].any():
            pairs.setdefault((first, second), []).append(known[pair])
    # Layers that agree with all others whatever they choose take what is best for themselves.
    tied = sorted({layer for pair in pairs for layer in pair})
    number = {layer: place for place, layer in enumerate(tied)}
    scopes: list[tuple[int, ...]] = [(place,) for place in range(len(tied))]
    tables: list[FloatArray] = [costs[keys[layer]] for layer in tied]
    for (first, second), agreements in pairs.items():
        scopes += [(number[first], number[second])] * len(agreements)
        tables += agreements
    plan = plan_elimination([len(table) for table in tables[: len(tied)]], scopes)
    minimum = None if plan is None else plan.minimise(tables)
    if minimum is None or not np.isfinite(minimum.costs):
        return None
    values = minimum.values()
    alone = {key: int(by_combination.argmin()) for key, by_combination in costs.items()}
    chosen = (values[number[layer]] if layer in number else alone[key] for layer, key in enumerate(keys))
    return [offered[key][place] for key, place in zip(keys, chosen, strict=True)]


def _agreements(
    graph: Graph,
) -> Iterator[tuple[int, int, Callable[[Combination, Combination], bool], object]]:
    """Constraints 2 and 3: two layers, whether combinations of them agree, and a name for what they agree on."""
    for boundary in graph.layer_graph.boundaries:
        if has_sequence(graph, boundary.tensor):
            for consumer in boundary.consumers:
                yield boundary.producer, consumer, _is_received_as_left, "boundary"
    for name, (first, *others) in graph.layer_graph.tied_parameters.items():
        place = tied_names(graph, graph.layers[first]).index(name)
        for other in others:
            other_place = tied_names(graph, graph.layers[other]).index(name)
            yield first, other, _SameLayout(place, other_place), (place, other_place)


def _is_received_as_left(producer: Combination, consumer: Combination) -> bool:
    return producer.leaves_split is consumer.enters_split


@dataclass(frozen=True, slots=True)
class _SameLayout:
    """Whether two layers give a tied parameter one layout; its places in their `Combination.tied` are given."""

    first: int
    second: int

    def __call__(self, left: Combination, right: Combination) -> bool:
        return left.tied[self.first] == right.tied[self.second]


class _CombinationProgram:
    """Variables and rows of the integer program in the module's docstring."""

    def __init__(self, graph: Graph, seconds: Mapping[str, SecondsByCombination]) -> None:
        self.graph = graph
        self.builder = ProblemBuilder("boundary layouts")
        self.combinations = [list(seconds[layer.key]) for layer in graph.layers]
        self.chosen = [
            self.builder.binaries(
                len(combinations),
                cost=[MICROSECONDS * seconds[layer.key][combination] for combination in combinations],
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
            if has_sequence(self.graph, boundary.tensor):
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
        place = tied_names(self.graph, self.graph.layers[layer]).index(name)
        return [combination.tied[place] for combination in self.combinations[layer]]

    def _where_tied(self, layer: int, name: str, layout: Layout) -> list[int]:
        layouts = self._tied_layouts(layer, name)
        return [variable for variable, given in zip(self.chosen[layer], layouts, strict=True) if given == layout]

    def _where(self, layer: int, is_meant: Callable[[Combination], bool]) -> list[int]:
        """The variables of a layer's combinations for which something holds."""
        pairs = zip(self.chosen[layer], self.combinations[layer], strict=True)
        return [variable for variable, combination in pairs if is_meant(combination)]

    def _equal(self, left: list[int], right: list[int]) -> None:
        """The sums of two lists of variables are equal."""
        coefficients = [1.0] * len(left) + [-1.0] * len(right)
        self.builder.rows([*left, *right], coefficients, lower=0.0, upper=0.0)

    def solve(self, solver: SolverChain) -> list[Combination]:
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
