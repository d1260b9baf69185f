"""The least that any step takes: the time of its matrix products at peak speed on all devices."""

from __future__ import annotations

from phaze.ir import Phase
from phaze.objective import ObjectiveKind
from phaze.question import Question

__all__ = ["least_time_s", "least_value", "step_flops"]


def step_flops(question: Question) -> float:
    """Matrix flops of one step: forward and backward of the whole batch, without anything recomputed."""
    graph = question.graph
    once = graph.matmul_flops(Phase.FORWARD) + graph.matmul_flops(Phase.BACKWARD)
    return once / graph.micro_batch_size * question.global_batch_size


def least_time_s(question: Question) -> float:
    """Seconds that no plan beats: the matrix products of a step at peak speed on all devices."""
    accelerator = question.cluster.accelerator
    return step_flops(question) / (
        accelerator.peak_flops_per_s(question.recipe.compute_dtype) * question.cluster.device_count
    )


def least_value(question: Question) -> float | None:
    """What no plan on any number of the devices falls below: device-seconds, joules or devices, as is made small.

    Devices at peak speed take as many device-seconds however many they are. None for throughput.
    """
    match question.objective.kind:
        case ObjectiveKind.THROUGHPUT:
            return None
        case ObjectiveKind.COST:
            return least_time_s(question) * question.cluster.device_count
        case ObjectiveKind.ENERGY:
            return 0.0
        case ObjectiveKind.DEVICES:
            return 1.0
