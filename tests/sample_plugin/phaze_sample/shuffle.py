"""The price of the toy format's shuffle: memory-bound, and three times as slow as a plain copy."""

import numpy as np

from phaze.cost import BINDINGS, Binding, CoreKind, Estimate
from phaze.hardware import AcceleratorArray
from phaze.ir import Graph, Op, op_bytes

SHUFFLE = "toy_shuffle"
SHUFFLE_BACKWARD = "toy_shuffle_backward"
SLOWDOWN = 3.0


def price_shuffle(graph: Graph, op: Op, accelerators: AcceleratorArray) -> Estimate:
    """Bytes over bandwidth, slowed down; it uses one vector core and gains nothing from more."""
    moved = np.full(len(accelerators), float(op_bytes(graph, op)))
    seconds = SLOWDOWN * moved / accelerators.hbm_bandwidth_bytes_per_s
    binding = np.full(len(accelerators), BINDINGS.index(Binding.MEMORY), np.uint8)
    energy = np.zeros(len(accelerators))
    return Estimate(
        kind=CoreKind.VECTOR,
        core_s=seconds,
        spread_s=seconds,
        core_binding=binding,
        spread_binding=binding,
        core_bytes=moved,
        spread_bytes=moved,
        core_energy_j=energy,
        spread_energy_j=energy,
    )
