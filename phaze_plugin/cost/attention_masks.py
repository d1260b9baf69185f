"""How many keys the queries of an attention see: the work of kernels that pass over what a mask hides.

Fused kernels go over the square of scores in blocks and leave out those that a causal mask, a sliding window or chunks
hide altogether (Dao, arXiv:2307.08691, section 3.1.1; JAX's splash attention likewise); a block that is seen in part is
computed whole. With S queries that are the last of T positions, in units of blocks, the query block at position p (the
last one at T - 1) sees

    causal   p + 1
    window   of w positions: at most w + 1, the one that its first query still sees and its own
    chunk    of c positions: at most c

Queries that are a part of the sequence, because it is split over devices, are taken for the last part: that device
works longest. Where each of n devices has an early and a late part (attribute `balanced_over`), it sees 1/n of what all
queries see. A mask that is known as a tensor only is computed whole, as kernels that take one do.
"""

from __future__ import annotations

import math

from phaze.ir import Gemm, Op
from phaze.ir.op import attention_gemms
from phaze.ir.rule import names_of

__all__ = ["BALANCED_OVER", "seen_gemms"]

BALANCED_OVER = "balanced_over"
"""The attribute of a causal attention that says over how many devices its queries are divided so that all see alike."""

BLOCK = 128
"""Positions in a block of scores: what FlashAttention-2 uses for queries and splash attention at least for both."""


def seen_blocks(op: Op) -> int | None:
    """Blocks of each head's scores that an attention op computes; None where it computes all scores."""
    query, key, value = (names_of(dims) for dims in op.rule.operands[:3])
    causal = op.attribute("causal")
    if not isinstance(causal, str):
        return None
    queries = math.prod(op.rule.size(name) for name in causal.split())
    keys = math.prod(op.rule.size(name) for name in (key & value) - query)
    balanced = op.attribute(BALANCED_OVER)
    devices = balanced if isinstance(balanced, int) else 1
    blocks = -(-_seen_blocks(-(-queries * devices // BLOCK), -(-keys // BLOCK), _span(op)) // devices)
    return blocks if blocks * BLOCK * BLOCK < queries * keys else None


def seen_gemms(op: Op) -> tuple[Gemm, ...]:
    """The matrix products of an attention op on what is seen: its blocks of queries, each with a block of keys.

    `Op.gemms` are those of the whole square.
    """
    blocks, causal = seen_blocks(op), op.attribute("causal")
    if blocks is None:
        return op.gemms
    query, key = (names_of(dims) for dims in op.rule.operands[:2])
    repeats = math.prod(op.rule.size(name) for name in query - key - frozenset(str(causal).split()))
    return attention_gemms(op, rows=repeats * blocks * BLOCK, keys=BLOCK)


def _span(op: Op) -> int | None:
    """The most blocks that a query block sees because of a window or chunk."""
    window, chunk = op.attribute("window"), op.attribute("chunk")
    spans = []
    if isinstance(window, int):
        spans.append(-(-window // BLOCK) + 1)
    if isinstance(chunk, int):
        spans.append(-(-chunk // BLOCK))
    return min(spans, default=None)


def _seen_blocks(queries: int, keys: int, span: int | None) -> int:
    """Blocks of scores that are not hidden, where the query blocks are the last ones of the key blocks."""
    beyond = max(0, queries - keys)  # queries without keys of their own see all
    rows = queries - beyond
    first = keys - rows + 1
    most = keys if span is None else min(span, keys)
    growing = max(0, min(rows, most - first + 1))  # rows that see fewer than the most
    return growing * first + growing * (growing - 1) // 2 + (rows - growing + beyond) * most
