"""A guess at the step time of the best plan of a problem, in a millisecond; it orders problems and proves nothing.

Every strategy is taken with equal stages: its closed-form bound, and the recompute of the cheapest mode with which the
fullest device seems to hold its share of the model. The guess is the least over all strategies.
"""

from __future__ import annotations

import math

import numpy as np

from phaze.parallelism import PipelineSchedule
from phaze.place.model.stage_space import FloatArray
from phaze.place.search.parallelism_table import SCHEDULES, ParallelismTable
from phaze.place.search.prepared_problem import PreparedProblem

__all__ = ["estimated_step_s"]


def estimated_step_s(prepared: PreparedProblem, strategies: ParallelismTable) -> float:
    """A guess at the least step time of some strategies of a problem; infinite where none seems to fit."""
    if not len(strategies):
        return math.inf
    layers, usable_bytes = prepared.layer_table, prepared.problem.usable_bytes
    tp_index = np.searchsorted(layers.tp_degrees, strategies.tp)
    again_s, stash_bytes = (table.sum(axis=2)[:, tp_index] for table in (layers.recompute_s, layers.stash_bytes))
    working_bytes = layers.peak_bytes.max(axis=2)[:, tp_index]
    held_bytes = layers.parameters.sum(axis=1)[tp_index] * layers.sharding(strategies).held_bytes_per_parameter
    pp, micro_batches = strategies.pp, strategies.micro_batches
    fullest_bytes = (held_bytes + _in_flight(strategies) * stash_bytes) / pp + working_bytes
    step_s = strategies.bound_s + (micro_batches + pp - 1) / pp * again_s
    return float(np.where(fullest_bytes <= usable_bytes, step_s, np.inf).min())


def _in_flight(strategies: ParallelismTable) -> FloatArray:
    """Microbatches that the first stage of each strategy keeps at once."""
    pp, micro_batches, chunks = strategies.pp, strategies.micro_batches, strategies.chunks
    is_gpipe = strategies.schedule == SCHEDULES.index(PipelineSchedule.GPIPE)
    early = pp * (1 + (pp - 1) / (pp * chunks) * (chunks > 1))
    return np.asarray(np.where(is_gpipe, micro_batches, np.minimum(micro_batches, early)))
