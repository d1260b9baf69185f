"""Microbatch sizes and degrees beyond those that are offered at first: the next one to try, if there is one.

A search that begins with fewer of them meets other strategies on its way than one that may choose from all at once;
`as_first_asked` is for those who ask a plan's question again.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from phaze.ir.sequence_factors import token_lengths
from phaze.offered_choices import offered_cp, offered_ep, offered_sizes, offered_tp
from phaze.question import Question
from phaze.shard.expert_slicing import expert_counts

__all__ = ["as_first_asked", "next_cp", "next_ep", "next_size", "next_tp", "offering"]

_SPLITTABLE_SEQUENCE = 4_096
"""The shortest sequence that is split where nothing fits otherwise, or the best plan recomputes: of shorter ones
activations are seldom the most."""


def next_size(question: Question) -> int | None:
    """The microbatch size to offer after the largest one; None where there is none, or the user said which."""
    size = 2 * max(question.micro_batch_sizes)
    dp = 1 if question.choices.dp is None else question.choices.dp[0]
    is_possible = question.global_batch_size % size == 0 and question.global_batch_size // size >= dp
    return size if is_possible and "micro_batch_size" in question.grows - question.fixed.keys() else None


def next_tp(question: Question) -> int | None:
    """The tp to offer after the largest one; None beyond a node, or where the user said which."""
    cluster, tp = question.cluster, 2 * max(question.tp_degrees)
    node = cluster.levels[0].size if cluster.levels else 1
    is_possible = tp <= min(node, cluster.device_count)
    return tp if is_possible and "tp" in question.grows - question.fixed.keys() else None


def next_cp(question: Question) -> int | None:
    """The cp to offer after the largest one; None where sequences are short or the target does not split them."""
    lengths, cp = token_lengths(question.graph).values(), 2 * max(question.cp_degrees)
    is_possible = max(lengths, default=0) >= _SPLITTABLE_SEQUENCE and not any(length % cp for length in lengths)
    is_run = question.capabilities.allows_context_parallel and cp <= question.cluster.device_count
    return cp if is_possible and is_run and "cp" in question.grows - question.fixed.keys() else None


def next_ep(question: Question) -> int | None:
    """The ep to offer after the largest one; None where that does not divide the experts or the target has no ep."""
    experts, ep = math.gcd(*expert_counts(question.graph).values()), 2 * max(question.ep_degrees)
    is_possible = experts and experts % ep == 0 and ep <= question.cluster.device_count
    is_run = question.capabilities.allows_expert_parallel
    return ep if is_possible and is_run and "ep" in question.grows - question.fixed.keys() else None


def offering(question: Question, name: str, degree: int) -> Question:
    """The same question with a further microbatch size (or tp, cp or ep) to choose from."""
    offered = getattr(question.choices, name) or (1,)
    return replace(question, choices=replace(question.choices, **{name: (*offered, degree)}))  # type: ignore[arg-type]


def as_first_asked(question: Question, left_open: Collection[str]) -> Question:
    """The question before more of what was left open was offered: what was offered at first, free to grow."""
    cluster, graph, target = question.cluster, question.graph, question.target
    at_first = {
        "micro_batch_size": offered_sizes(None, question.global_batch_size, graph, [], cluster, target),
        "tp": offered_tp(None, cluster),
        "cp": offered_cp(None, cluster, graph, target),
        "ep": offered_ep(None, cluster, graph, target),
    }
    grows = frozenset(at_first.keys() & set(left_open))
    offered = replace(question.offered, **{name: at_first[name] for name in grows})  # type: ignore[arg-type]
    return replace(question, offered=offered, grows=grows).with_strategy(question.strategy)
