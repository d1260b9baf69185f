"""A placement problem as the paper's program reads it, for one accelerator or for many at once.

`paper_instance` converts a problem of the default mode, leaving out what the paper does not count.

Layers form a chain in which extra edges may skip ahead: the paper's program walks through a stage layer by layer and
refuses graphs in which two neighbours are not joined. Times carry an accelerator axis; sizes do not, because slicing a
layer does not depend on the chip.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phaze.errors import GraphError, PlacementError
from phaze.place.model.placement_problem import PlacementProblem
from phaze.profile.layer_profile import RecomputeMode

__all__ = ["BoolArray", "FloatArray", "IntArray", "PaperInstance", "paper_instance"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaperInstance:
    """What the paper's program places.

    Attributes:
        layer_ids: names of the layers, in the order of the chain.
        tp_degrees: the values of tp that were profiled.
        forward_s: seconds of one forward per (tp, accelerator, layer).
        backward_s: seconds of one backward, recompute not included.
        parameter_bytes: per (tp, layer).
        activation_bytes: all activations of one microbatch per (tp, layer).
        is_tensor_parallel: whether the layer is sliced at that tp, per (tp, layer).
        edges: pairs of positions in the chain.
        edge_bytes: what crosses each edge, per (tp, edge).
        memory_bytes: capacity of one device, per accelerator.
        bandwidth_bytes_per_s: of every link.
        device_count: devices at hand.
        micro_batches: microbatches in one batch, over all pipelines.
        recompute: the choices of activation recomputation to try; the better one wins.
        uses_adam: whether the optimizer keeps a third copy of the parameters.

    Raises:
        PlacementError: a count is below 1, or a size, time or bandwidth is negative, zero where it must not be, or NaN.
        GraphError: there is no layer, an edge goes backward, or the graph branches.
    """

    layer_ids: tuple[int | str, ...]
    tp_degrees: tuple[int, ...]
    forward_s: FloatArray
    backward_s: FloatArray
    parameter_bytes: FloatArray
    activation_bytes: FloatArray
    is_tensor_parallel: BoolArray
    edges: tuple[tuple[int, int], ...]
    edge_bytes: FloatArray
    memory_bytes: FloatArray
    bandwidth_bytes_per_s: float
    device_count: int
    micro_batches: int
    recompute: tuple[bool, ...] = (False,)
    uses_adam: bool = True

    def __post_init__(self) -> None:
        """Check shapes, signs and the chain."""
        if not self.layer_ids:
            raise GraphError("the layer graph is empty; expected at least one layer.")
        self._check_counts()
        degrees, accelerators, layers = len(self.tp_degrees), len(self.memory_bytes), len(self.layer_ids)
        for field, shape in (
            ("forward_s", (degrees, accelerators, layers)),
            ("backward_s", (degrees, accelerators, layers)),
            ("parameter_bytes", (degrees, layers)),
            ("activation_bytes", (degrees, layers)),
            ("edge_bytes", (degrees, len(self.edges))),
        ):
            _check_array(field, np.asarray(getattr(self, field)), shape)
        if self.is_tensor_parallel.shape != (degrees, layers):
            raise PlacementError(f"is_tensor_parallel has shape {self.is_tensor_parallel.shape}.")
        self._check_chain()

    def _check_counts(self) -> None:
        """Check counts, the values of tp, the bandwidth and the memory."""
        for field in ("device_count", "micro_batches"):
            if (count := getattr(self, field)) < 1:
                raise PlacementError(f"{field} is {count}; expected at least 1.")
        if not self.tp_degrees or min(self.tp_degrees) < 1 or len(set(self.tp_degrees)) < len(self.tp_degrees):
            raise PlacementError(f"tp_degrees is {self.tp_degrees}; expected distinct whole numbers of at least 1.")
        if not self.bandwidth_bytes_per_s > 0:
            raise PlacementError(f"bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s}; expected a number above 0.")
        if not (np.asarray(self.memory_bytes) > 0).all():
            raise PlacementError(f"memory_bytes is {self.memory_bytes}; expected numbers above 0.")
        if not self.recompute:
            raise PlacementError("recompute is empty; expected False, True or both.")

    def _check_chain(self) -> None:
        """Check that edges lead forward and that neighbours are joined."""
        present = set(self.edges)
        if len(present) < len(self.edges):
            raise GraphError("two edges join the same layers; add their bytes up into one.")
        for source, target in self.edges:
            if not 0 <= source < target < len(self.layer_ids):
                raise GraphError(f"edge {source} -> {target} is not between two layers in the order of the chain.")
        for position in range(len(self.layer_ids) - 1):
            if (position, position + 1) not in present:
                raise GraphError(
                    f"the layer graph branches: {self.layer_ids[position]!r} and {self.layer_ids[position + 1]!r} are "
                    "neighbours without an edge. The paper's program places chains; use the default mode."
                )


def _check_array(field: str, values: FloatArray, shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise PlacementError(f"{field} has shape {values.shape}; expected {shape}.")
    wrong = ~(values >= 0) | np.isinf(values)
    if wrong.any():
        raise PlacementError(f"{field} holds {values[wrong][0]}; expected finite numbers of at least 0.")


def paper_instance(problem: PlacementProblem) -> PaperInstance:
    """The problem as the paper's program reads it, for every accelerator that was profiled.

    Schedules, ZeRO, ties, margins and latencies are left out; the outermost links serve for all transfers.

    Raises:
        PlacementError: no profile without recompute, or no links to send over.
    """
    if RecomputeMode.NONE not in problem.choices.recompute:
        raise PlacementError("the paper's program needs profiles without recompute; add recompute mode none.")
    layers, tp_degrees = range(len(problem.graph.layers)), problem.tp_degrees
    rows = [[problem.profile(layer, tp, RecomputeMode.NONE) for layer in layers] for tp in tp_degrees]
    pairs = sorted({(flow.producer, consumer) for flow in problem.graph.flows for consumer in flow.consumers})
    sizes = np.zeros((len(tp_degrees), len(pairs)))
    for flow in problem.graph.flows:
        for consumer in flow.consumers:
            for index, profiles in enumerate(rows):
                sizes[index, pairs.index((flow.producer, consumer))] += (
                    profiles[flow.producer].outputs[flow.output].size_bytes
                )
    levels, accelerator = problem.cluster.levels, problem.cluster.accelerator
    forward, backward_input, weight = (
        np.array([[getattr(profile, name).value for profile in profiles] for profiles in rows]).transpose(0, 2, 1)
        for name in ("forward_s", "backward_input_s", "backward_weight_s")
    )
    return PaperInstance(
        layer_ids=tuple(layer.name for layer in problem.graph.layers),
        tp_degrees=tp_degrees,
        forward_s=forward,
        backward_s=backward_input + weight,
        parameter_bytes=np.array(
            [[sum(profile.parameter_bytes.values()) for profile in profiles] for profiles in rows]
        ),
        activation_bytes=np.array([[profile.stashed_bytes for profile in profiles] for profiles in rows]),
        is_tensor_parallel=np.array([[profile.is_tensor_parallel for profile in profiles] for profiles in rows]),
        edges=tuple(pairs),
        edge_bytes=sizes,
        memory_bytes=np.full(forward.shape[1], float(accelerator.hbm_bytes)),
        bandwidth_bytes_per_s=levels[-1].bandwidth_bytes_per_s if levels else 1.0,
        device_count=problem.cluster.device_count,
        micro_batches=problem.micro_batches,
        recompute=(False, True) if RecomputeMode.FULL in problem.choices.recompute else (False,),
        uses_adam=problem.recipe.state_bytes > 0,
    )
