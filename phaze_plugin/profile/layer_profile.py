"""`LayerProfile`, what one microbatch of a layer costs on a device, the graph of the layers, and the bytes of a layer.

Profiles are the values that placement reads, one for each layer, tp and recompute mode. Seconds come as a value with a
proven lower bound, for one accelerator or for many (a leading accelerator axis). Sizes are those of one device. A
layer's stash holds its inputs and what its own ops keep for backward, but not its outputs, because those are the inputs
of the layers that read them. A tensor that several layers read, or that a later layer than the next one reads, is one
`Flow` with all its readers.

The functions at the end count how many bytes a sharded layer holds on one device: its parameters, its working set at
the fullest (`peak_working_bytes`), and what leaves it (`layer_outputs`). What a layer keeps between forward and
backward is decided in `phaze.ir` (`Recomputation`); the working set is what lives on top of that while the layer runs,
tensor by tensor, until each is read for the last time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phaze.cost import Stack
from phaze.cost.stack_fusions import runs_xla
from phaze.errors import GraphError, PlacementError
from phaze.hardware import Accelerator
from phaze.hardware.precision import PRODUCT_DTYPE, dtype_bytes
from phaze.ir import Graph, Layer, Op, OpKind, Recomputation, RecomputeMode, Role
from phaze.shard import WHOLE, ShardedLayer
from phaze.shard.expert_slicing import DIVIDED_OVER
from phaze.shard.mesh_axes import EXPERT_AXIS, WAYS, is_ring
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
    "expert_parameters",
    "frozen_parameters",
    "kept_bytes",
    "layer_outputs",
    "layer_parameter_bytes",
    "moved_at_once",
    "peak_working_bytes",
    "shared_parameters",
    "total_bytes",
    "trained_tensors",
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
        trained_tensors: how many tensors the trained parameters are.

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
    trained_tensors: int = 0

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


def layer_parameter_bytes(local: Graph) -> dict[str, float]:
    """The bytes of a layer's parameters, by element type."""
    sizes: dict[str, float] = {}
    for tensor in local.parameters:
        sizes[tensor.dtype.value] = sizes.get(tensor.dtype.value, 0.0) + tensor.size_bytes
    return sizes


def expert_parameters(local: Graph, *, frozen: bool = False) -> float:
    """How many of the trained (or of the frozen) parameters on a device belong to experts divided over ep devices."""
    names = {
        name
        for op in local.ops
        if op.attribute(DIVIDED_OVER) == EXPERT_AXIS
        for name in op.inputs
        if (local.tensors[name].is_frozen if frozen else local.tensors[name].is_trained)
    }
    return float(sum(local.tensors[name].elements for name in names))


def frozen_parameters(local: Graph) -> float:
    """How many float parameters on a device are read and not trained."""
    return float(sum(tensor.elements for tensor in local.parameters if tensor.is_frozen and tensor.dtype.is_float))


def trained_tensors(local: Graph) -> int:
    """How many tensors the trained parameters of a layer are."""
    return sum(tensor.is_trained for tensor in local.parameters)


def moved_at_once(local: Graph, accelerator: Accelerator) -> float:
    """How many parameters of a layer ZeRO gathers or scatters at once, in a buffer.

    Torch's FSDP and DeepSpeed have one collective for a layer; XLA has one for each operand of a product, which it
    schedules beside the product before (xla/service/latency_hiding_scheduler.cc).
    """
    if not runs_xla(accelerator):
        return math.inf
    return max((float(tensor.elements) for tensor in local.parameters if tensor.dtype.is_float), default=0.0)


def shared_parameters(local: Graph, ties: Iterable[str], *, frozen: bool = False) -> dict[str, float]:
    """How many of the trained (or of the frozen) parameters of a layer other layers share, by the name of the tie."""
    return {
        name: float(local.tensors[name].elements)
        for name in ties
        if name in local.tensors and local.tensors[name].is_frozen == frozen
    }


def total_bytes(local: Graph, names: Iterable[str]) -> float:
    """The bytes of some tensors together."""
    return float(sum(local.tensors[name].size_bytes for name in names))


def kept_bytes(local: Graph, layer: Layer, chosen: Recomputation, stack: Stack) -> float:
    """The bytes of what a layer keeps between forward and backward.

    Where the stack keeps inputs of 8-bit products in 8 bits, a tensor that only these read again has one byte an
    element, and one that others read as well has one more.
    """
    if not stack.keeps_narrow_inputs:
        return total_bytes(local, chosen.kept)
    readers: dict[str, list[Op]] = {}
    for op in (*chosen.again, *layer.backward):
        for name in op.inputs:
            readers.setdefault(local.storage(name), []).append(op)

    def is_narrow(op: Op) -> bool:
        if op.kind is OpKind.COLLECTIVE:  # what is gathered again for products
            following = [reader for name in op.outputs for reader in readers.get(name, ())]
            return bool(following) and all(map(is_narrow, following))
        runs_at = op.attribute(PRODUCT_DTYPE)
        return isinstance(runs_at, str) and dtype_bytes(runs_at) == 1

    total = 0.0
    for name in chosen.kept:
        tensor, narrow = local.tensors[name], [is_narrow(op) for op in readers.get(name, ())]
        total += tensor.elements if narrow and all(narrow) else tensor.size_bytes + tensor.elements * any(narrow)
    return total


def peak_working_bytes(local: Graph, layer: Layer, recomputation: Recomputation) -> float:
    """The most bytes that live beside the parameters, their gradients and the kept tensors, in forward or in backward.

    In backward, a tensor that this layer kept or computed again is freed once it was read for the last time. Tensors
    that entered the layer stay, because the layer that made them keeps them too.
    """
    kept = set(recomputation.kept)
    gradients = {gradient for _, gradient in local.gradients}
    forward = _peak_alive_bytes(local, layer.forward, kept | gradients)
    made_and_kept = {name for op in layer.forward for name in op.outputs if name in kept}
    read = {name for op in layer.forward for name in op.inputs}
    entering = [
        name
        for op in layer.backward
        for name in op.inputs
        if local.tensors[name].role is Role.OTHER and name not in read
    ]
    again = (*recomputation.again, *layer.backward)
    backward = _peak_alive_bytes(local, again, (kept - made_and_kept) | gradients, (*made_and_kept, *entering))
    return max(forward, backward - total_bytes(local, made_and_kept), 0.0)


def _peak_alive_bytes(local: Graph, ops: Sequence[Op], stays: set[str], start: Sequence[str] = ()) -> float:
    """The most bytes alive at once when ops run in order and the tensors of `start` are there before them.

    Views take no room, and tensors of `stays` are not counted. Of what goes around in a ring, one block is worked on
    while another one comes.
    """
    # The whole keys are what an exchange makes, and their whole gradients what one reads.
    rings = [(op, op.outputs if op.function == "all_gather" else op.inputs) for op in ops if is_ring(op)]
    shares = {name: min(1.0, 2 / op.rule.size(WAYS)) for op, wholes in rings for name in wholes}

    def room(name: str) -> float:
        return local.tensors[name].size_bytes * shares.get(name, 1.0)

    last_use = {local.storage(name): step for step, op in enumerate(ops) for name in (*op.inputs, *op.outputs)}
    alive = {name: room(name) for name in start}
    now = peak = sum(alive.values())
    for step, op in enumerate(ops):
        if op.kind is not OpKind.VIEW:
            for name in op.outputs:
                if name not in stays and name not in alive:
                    alive[name] = room(name)
                    now += alive[name]
        peak = max(peak, now)
        for name in [name for name in alive if last_use.get(name, -1) <= step]:
            now -= alive.pop(name)
    return float(peak)


def layer_outputs(sharded: ShardedLayer) -> tuple[BoundaryTensor, ...]:
    """The tensors that leave a layer, as they lie on one device."""
    problem = sharded.problem
    outputs = []
    for name in problem.layer.outputs:
        tensor, layout = problem.graph.tensors[name], problem.layouts.get(name, WHOLE)
        elements = math.prod(layout.local_shape(tensor.shape))
        outputs.append(BoundaryTensor(float(elements * tensor.dtype.size_bytes), str(layout)))
    return tuple(outputs)
