"""What layers of a model share: tensors between them, whole or split along the sequence, and tied parameters.

A `Combination` is what one layer is sharded for: whether what enters is split, whether what leaves is, and the layouts
of its parameters that other layers use, too. Gradients of boundary tensors have the layouts of the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from phaze.ir import Graph, Layer, Phase, Role
from phaze.shard.layout import Layout, Split
from phaze.shard.resharding import Axis
from phaze.shard.sharding_problem import leaving_tensors

__all__ = [
    "Combination",
    "SequenceParallel",
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
