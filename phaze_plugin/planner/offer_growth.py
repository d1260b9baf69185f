"""Microbatch sizes and values of tp beyond those that are offered at first: the next one to try, if there is one."""

from __future__ import annotations

from dataclasses import replace

from phaze.question import Question

__all__ = ["next_size", "next_tp", "offering"]


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


def offering(question: Question, *, micro_batch_size: int | None = None, tp: int | None = None) -> Question:
    """The same question with a further microbatch size or tp to choose from."""
    choices = question.choices
    if micro_batch_size is not None:
        choices = replace(choices, micro_batch_size=(*question.micro_batch_sizes, micro_batch_size))
    if tp is not None:
        choices = replace(choices, tp=(*question.tp_degrees, tp))
    return replace(question, choices=choices)
