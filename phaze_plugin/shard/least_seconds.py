"""A lower bound on the time of a model on tp devices that holds for every slicing, found without one.

However an op is split over tp devices, the largest part has at least 1/tp of its multiply-accumulates and of the bytes
that its operands have. Matrix products read their operands whether or not something is fused behind them, so that for
the forward ops of a layer, and likewise for its backward ops,

    seconds >= max( sum of macs / (tp x peak of all tensor cores),  sum of operand bytes / (tp x bandwidth) )

over the matrix ops alone. Vector work and collectives count as nothing, and neither does the padding of shapes. Where a
GPU's product kernels were measured, its peak and bandwidth are the largest shares of them that any product reaches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from phaze.cost import Calibration, op_work
from phaze.cost.operator_work import read_bytes
from phaze.ir import Graph, Op
from phaze.shard.resharding import Axis

__all__ = ["least_model_seconds"]

_SLOWED_TO = "float32"
"""The type at whose rate a stack may run products that are not aligned; on some chip that rate may be the higher."""


def least_model_seconds(graph: Graph, axis: Axis, *, priced_elsewhere: Collection[str] = ()) -> float:
    """Seconds that one microbatch takes at least, forward and backward through all layers one after the other.

    It holds for every slicing and schedule on the axis. Plugins may price ops below any roofline: the kinds and
    functions that they price are named in `priced_elsewhere` and count as nothing.
    """
    once = {
        layer.key: sum(
            _least_pass_s(graph, axis, (op for op in ops if not _is_named(op, priced_elsewhere)))
            for ops in (layer.forward, layer.backward)
        )
        for layer in graph.distinct_layers
    }
    return sum(once[layer.key] for layer in graph.layers)


def _is_named(op: Op, names: Collection[str]) -> bool:
    return not {f"{op.kind}.{op.function}", op.function, str(op.kind)}.isdisjoint(names)


def _least_pass_s(graph: Graph, axis: Axis, ops: Iterable[Op]) -> float:
    """The bound of the module's docstring for the ops of one pass of one layer."""
    chip, calibration = axis.cluster.accelerator, axis.calibration
    kernels = calibration.products
    share = _largest_product_share(calibration) * (max(kernels.arithmetic, kernels.attention) if kernels else 1.0)
    product_s = moved_bytes = 0.0
    for op in ops:
        if not op.kind.is_matrix:
            continue
        moved_bytes += sum(read_bytes(op, graph.tensors))
        for product in op_work(op, graph.tensors).products:
            peak = max(chip.peak_flops_per_s(product.dtype), chip.peak_flops_per_s(_SLOWED_TO))
            product_s += 2 * product.macs / (peak * share)
    memory_s = moved_bytes / (chip.hbm_bandwidth_bytes_per_s * _largest_memory_share(calibration))
    return max(product_s, memory_s) / axis.tp


def _largest_memory_share(calibration: Calibration) -> float:
    """The share of HBM's bandwidth at which no product moves its operands any quicker."""
    if calibration.products is None:
        return calibration.memory
    return max(calibration.memory, calibration.products.memory * _largest_product_share(calibration))


def _largest_product_share(calibration: Calibration) -> float:
    """The share of the measured or the ideal rate that products of no type exceed."""
    return calibration.matrix * max(1.0, calibration.narrow_matrix)
