"""`LayerProfile`, what one microbatch of a layer costs under one tp and recompute mode, and the graph of the layers.

These are the values that placement reads. Seconds come as a value with a proven lower bound, for one accelerator or
for many (a leading accelerator axis). Sizes are those of one device. A layer's stash holds its inputs and what its own
ops keep for backward, but not its outputs, because those are the inputs of the layers that read them. A tensor that
several layers read, or that a later layer than the next one reads, is one `Flow` with all its readers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phaze.errors import GraphError, PlacementError
from phaze.hardware.element_types import dtype_bytes
from phaze.ir import RecomputeMode
from phaze.tolerances import CLAIM_MARGIN

__all__ = [
    "BoundaryTensor",
    "Bounded",
    "Flow",
    "LayerProfile",
    "PlacementGraph",
    "PlacementLayer",
    "ProfileKey",
    "RecomputeMode",
]

ProfileKey = tuple[str, int, RecomputeMode]
"""What a profile is found by: a distinct layer's key, tp and a recompute mode."""


@dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """Seconds per accelerator, and a proven bound under each.

    Raises:
        PlacementError: a number is negative, infinite or NaN, or a bound exceeds its value.
    """

    value: NDArray[np.float64]
    bound: NDArray[np.float64]

    def __post_init__(self) -> None:
        """Settle the types and check the numbers."""
        for name in ("value", "bound"):
            numbers = np.atleast_1d(np.asarray(getattr(self, name), dtype=np.float64))
            if not (np.isfinite(numbers) & (numbers >= 0)).all():
                raise PlacementError(f"seconds are {getattr(self, name)}; expected finite numbers of at least 0.")
            object.__setattr__(self, name, numbers)
        if self.value.shape != self.bound.shape or (self.bound > self.value * (1 + CLAIM_MARGIN)).any():
            raise PlacementError(f"bounds {self.bound} do not lie under their values {self.value}.")

    @classmethod
    def exact(cls, seconds: ArrayLike) -> Bounded:
        """Seconds that are their own bound."""
        numbers = np.atleast_1d(np.asarray(seconds, dtype=np.float64))
        return cls(numbers, numbers)


@dataclass(frozen=True, slots=True)
class BoundaryTensor:
    """A tensor that leaves its layer: bytes on each device of the stage, and how it lies on them."""

    size_bytes: float
    layout: str = "whole"

    @property
    def is_whole(self) -> bool:
        """Whether every device of the stage holds all of it."""
        return self.layout == "whole"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerProfile:
    """One microbatch of one distinct layer under one tp and recompute mode, on one device of the stage.

    Attributes:
        forward_s: forward, with the collectives of tensor parallelism.
        backward_input_s: the part of backward that makes the gradients of inputs.
        backward_weight_s: the part that makes the gradients of parameters.
        recompute_s: what runs again before backward.
        parameter_bytes: of the parameters on this device, per data type; only float types can be trained.
        stashed_bytes: what stays between forward and backward.
        peak_working_bytes: the most that lives on top of that while the layer runs.
        outputs: tensors that other layers read.
        is_tensor_parallel: whether the layer is sliced at this tp.
        tied_parameters: how many of the parameters are shared with other layers, by the name of the tie.
        expert_parameters: how many of the trained parameters on this device belong to experts that are divided over ep
            devices; no parameter of an expert is tied.
        frozen_parameters: how many of the parameters of float types are read and not trained.
        frozen_expert_parameters: how many of these belong to such experts.
        frozen_ties: how many of these are shared with other layers, by the name of the tie.
        host_bytes: what goes to the host between forward and backward instead.
        moved_at_once: how many parameters ZeRO gathers or scatters at once, no more than the layer has.

    Raises:
        PlacementError: a size is negative, infinite or NaN, or a part has more parameters than the layer.
    """

    forward_s: Bounded
    backward_input_s: Bounded
    backward_weight_s: Bounded
    recompute_s: Bounded
    parameter_bytes: Mapping[str, float]
    stashed_bytes: float
    peak_working_bytes: float
    outputs: tuple[BoundaryTensor, ...] = ()
    is_tensor_parallel: bool = False
    tied_parameters: Mapping[str, float] = field(default_factory=dict)
    expert_parameters: float = 0.0
    frozen_parameters: float = 0.0
    frozen_expert_parameters: float = 0.0
    frozen_ties: Mapping[str, float] = field(default_factory=dict)
    host_bytes: float = 0.0
    moved_at_once: float = math.inf

    def __post_init__(self) -> None:
        """Check the sizes."""
        sizes = {
            "expert_parameters": self.expert_parameters,
            "frozen_parameters": self.frozen_parameters,
            "frozen_expert_parameters": self.frozen_expert_parameters,
            "stashed_bytes": self.stashed_bytes,
            "peak_working_bytes": self.peak_working_bytes,
            **{f"parameter_bytes[{dtype}]": size for dtype, size in self.parameter_bytes.items()},
            **{f"outputs[{index}]": tensor.size_bytes for index, tensor in enumerate(self.outputs)},
            **{f"tied_parameters[{name}]": count for name, count in self.tied_parameters.items()},
            **{f"frozen_ties[{name}]": count for name, count in self.frozen_ties.items()},
        }
        for name, size in sizes.items():
            if not (np.isfinite(size) and size >= 0):
                raise PlacementError(f"{name} is {size}; expected a finite number of at least 0.")
        if self.frozen_parameters > self._float_parameters * (1 + CLAIM_MARGIN):
            raise PlacementError(
                f"frozen_parameters is {self.frozen_parameters}; expected at most the {self._float_parameters} "
                "parameters of float types on the device."
            )
        if self.expert_parameters > self.parameters * (1 + CLAIM_MARGIN):
            raise PlacementError(
                f"expert_parameters is {self.expert_parameters}; expected at most the {self.parameters} parameters "
                "that are trained on the device."
            )

    @property
    def parameters(self) -> float:
        """How many parameters are trained on this device."""
        return max(self._float_parameters - self.frozen_parameters, 0.0)

    @property
    def _float_parameters(self) -> float:
        return sum(size / dtype_bytes(dtype) for dtype, size in self.parameter_bytes.items() if _is_float(dtype))

    @property
    def table_bytes(self) -> float:
        """Bytes of parameters of whole numbers, such as tables of indices: these are never trained or sharded."""
        return sum(size for dtype, size in self.parameter_bytes.items() if not _is_float(dtype))


def _is_float(dtype: str) -> bool:
    return not dtype.startswith(("int", "uint", "bool"))


@dataclass(frozen=True, slots=True)
class PlacementLayer:
    """One layer: its name, and the key that equal layers share; behind a # it may tell how they are sliced.

    ``forward_key`` is what layers with an equal forward share, where freezing some parameters gave them another
    backward.
    """

    name: str
    key: str
    forward_key: str = ""

    @property
    def kind(self) -> str:
        """What equal layers share however they are sliced, and whatever of them is frozen."""
        return self.forward_key or self.key.partition("#")[0]


@dataclass(frozen=True, slots=True)
class Flow:
    """A tensor from its producer (the `output`-th of its profile) to every layer that reads it."""

    producer: int
    consumers: tuple[int, ...]
    output: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementGraph:
    """Layers in topological order, the tensors between them, and the layers that share a parameter (by tie).

    Raises:
        GraphError: there is no layer, or a flow or tie does not lie between layers in order.
    """

    layers: tuple[PlacementLayer, ...]
    flows: tuple[Flow, ...] = ()
    ties: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that there are layers and that everything points forward."""
        if not self.layers:
            raise GraphError("the layer graph is empty; expected at least one layer.")
        for flow in self.flows:
            if not flow.consumers or not 0 <= flow.producer < min(flow.consumers):
                raise GraphError(f"{flow} does not lead from a layer to later ones; list layers in topological order.")
            if max(flow.consumers) >= len(self.layers) or flow.output < 0:
                raise GraphError(f"{flow} names a layer or an output that does not exist.")
        for name, layers in self.ties.items():
            if len(set(layers)) < 2 or not all(0 <= layer < len(self.layers) for layer in layers):
                raise GraphError(f"tie {name!r} joins layers {layers}; expected two or more of {len(self.layers)}.")

    @property
    def body(self) -> tuple[bool, ...]:
        """Whether each layer is of the most frequent kind."""
        kinds = [layer.kind for layer in self.layers]
        most = Counter(kinds).most_common(1)[0][0]
        return tuple(kind == most for kind in kinds)

    @property
    def ties_of_ends(self) -> frozenset[str]:
        """Ties between the first and the last of layers in a row, and no others."""
        steps = {(flow.producer, consumer) for flow in self.flows for consumer in flow.consumers}
        last = len(self.layers) - 1
        if any((layer, layer + 1) not in steps for layer in range(last)):
            return frozenset()
        return frozenset(name for name, members in self.ties.items() if set(members) == {0, last})

    @classmethod
    def chain(cls, keys: tuple[str, ...], ties: Mapping[str, tuple[int, ...]] | None = None) -> PlacementGraph:
        """Layers in a row, each with one output that the next one reads."""
        return cls(
            layers=tuple(PlacementLayer(f"{index}:{key}", key) for index, key in enumerate(keys)),
            flows=tuple(Flow(index, (index + 1,)) for index in range(len(keys) - 1)),
            ties=ties or {},
        )
