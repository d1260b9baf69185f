"""How many bytes one layer holds on one device: its parameters, its working set at the fullest, and what leaves it.

What a layer keeps between forward and backward is decided in `phaze.ir` (`Recomputation`); here the bytes that live on
top of that while the layer runs are counted, tensor by tensor, until each is read for the last time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from phaze.cost.loss_fusion import runs_xla
from phaze.hardware import Accelerator
from phaze.ir import Graph, Layer, Op, OpKind, Recomputation, Role
from phaze.profile.layer_profile import BoundaryTensor
from phaze.shard import WHOLE, ShardedLayer
from phaze.shard.expert_slicing import DIVIDED_OVER
from phaze.shard.mesh_axes import EXPERT_AXIS, WAYS, is_ring

__all__ = [
    "expert_parameters",
    "frozen_parameters",
    "layer_outputs",
    "layer_parameter_bytes",
    "moved_at_once",
    "peak_working_bytes",
    "shared_parameters",
    "total_bytes",
]


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
