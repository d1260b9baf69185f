"""The price of the toy format's shuffle: memory-bound, and three times as slow as a plain copy."""

from phaze.cost import BINDINGS, Binding, CoreKind, Estimate
from phaze.hardware import AcceleratorArray
from phaze.ir import Graph, Op, op_bytes

SHUFFLE = "toy_shuffle"
SHUFFLE_BACKWARD = "toy_shuffle_backward"
SLOWDOWN = 3.0


def price_shuffle(graph: Graph, op: Op, accelerators: AcceleratorArray) -> Estimate:
    """Bytes over bandwidth, slowed down; it uses a vector core and gains nothing from more of them."""
    estimate = Estimate.empty([CoreKind.VECTOR], len(accelerators))
    moved_bytes = op_bytes(graph, op)
    for array in (estimate.core_bytes, estimate.spread_bytes):
        array[:] = moved_bytes
    for array in (estimate.core_s, estimate.spread_s):
        array[:] = SLOWDOWN * moved_bytes / accelerators.hbm_bandwidth_bytes_per_s
    for codes in (estimate.core_binding, estimate.spread_binding):
        codes[:] = BINDINGS.index(Binding.MEMORY)
    return estimate
