"""A guess at the step time of the best plan of a problem, in a millisecond; it orders problems and proves nothing.

Every strategy is taken with equal stages: its closed-form bound, and the recompute of the cheapest mode with which the
fullest device seems to hold its share of the model. The most promising ones are priced once more with the collectives
of their own links. The guess is the least of these.
"""

from __future__ import annotations

import math

import numpy as np

from phaze.parallelism import PipelineSchedule
from phaze.place.model.stage_space import FloatArray
from phaze.place.search.parallelism_table import SCHEDULES, ParallelismTable
from phaze.place.search.prepared_problem import PreparedProblem

__all__ = ["estimated_step_s"]

_PRICED_EXACTLY = 64
"""How many of the most promising strategies are priced on their own links instead of the fastest ones: enough that one
which is not slowed down by its links is among them, in a millisecond."""


def estimated_step_s(prepared: PreparedProblem, strategies: ParallelismTable) -> float:
    """A guess at the least step time of some strategies of a problem; infinite where none seems to fit."""
    if not len(strategies):
        return math.inf
    layers, usable_bytes = prepared.layer_table, prepared.problem.usable_bytes
    tp_index = np.searchsorted(layers.tp_degrees, strategies.tp)
    again_s, stash_bytes = (table.sum(axis=2)[:, tp_index] for table in (layers.recompute_s, layers.stash_bytes))
    working_bytes = layers.peak_bytes.max(axis=2)[:, tp_index]
    held_bytes = layers.held_by_model_bytes(strategies)
    rounds = (strategies.micro_batches + strategies.pp - 1) / strategies.pp
    fullest_bytes = (held_bytes + _in_flight(strategies) * stash_bytes) / strategies.pp + working_bytes
    least_again_s = np.where(fullest_bytes <= usable_bytes, rounds * again_s, np.inf).min(axis=0)
    step_s = strategies.bound_s + least_again_s
    if not np.isfinite(step_s).any():
        return math.inf
    best = np.argsort(step_s, kind="stable")[:_PRICED_EXACTLY]
    likely = strategies.take(best).narrowed()  # with the prices of their own links
    terms = layers.terms(likely)
    passes_s = rounds[best] * terms.over_model(terms.through_s + terms.weight_s)
    priced_s = passes_s + terms.over_model(terms.finish_s) / likely.pp + least_again_s[best]
    return float(np.maximum(step_s[best], priced_s).min())


def _in_flight(strategies: ParallelismTable) -> FloatArray:
    """Microbatches that the first stage of each strategy keeps at once."""
    pp, micro_batches, chunks = strategies.pp, strategies.micro_batches, strategies.chunks
    is_gpipe = strategies.schedule == SCHEDULES.index(PipelineSchedule.GPIPE)
    early = pp * (1 + (pp - 1) / (pp * chunks) * (chunks > 1))
    is_eager = strategies.schedule == SCHEDULES.index(PipelineSchedule.EAGER)
    early = np.where(is_eager, 2 * pp - 1, early)
    return np.asarray(np.where(is_gpipe, micro_batches, np.minimum(micro_batches, early)))
