"""The least time that any step takes: its matrix products at peak speed on all devices."""

from __future__ import annotations

from phaze.ir import Phase
from phaze.question import Question

__all__ = ["least_time_s", "step_flops"]


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
