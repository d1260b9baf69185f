"""Which scores fused attention computes, against a count of every block that a mask leaves anything of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaze.cost import op_work
from phaze.cost.off_chip_traffic import BLOCK, seen_gemms
from phaze.ir import DType, Op, OpKind, Phase, Rule, Tensor

FORWARD = "b s g r d, b t g d, b t g e -> b s g r e"
BACKWARD = f"{FORWARD.split(' -> ')[0]}, b s g r e, b s g r e -> b s g r d, b t g d, b t g e"


def attention(queries: int, keys: int, phase: Phase = Phase.FORWARD, **mask: int | str) -> Op:
    sizes = {"b": 2, "s": queries, "g": 2, "r": 3, "d": 16, "t": keys, "e": 8}
    rule = Rule.of(FORWARD if phase is Phase.FORWARD else BACKWARD, sizes)
    return Op(
        id="attend",
        kind=OpKind.ATTENTION,
        function="attention" if phase is Phase.FORWARD else "attention_backward",
        rule=rule,
        inputs=tuple(f"x{index}" for index in range(len(rule.operands))),
        outputs=tuple(f"y{index}" for index in range(len(rule.results))),
        phase=phase,
        attributes=tuple(sorted(mask.items())),
    )


def counted_scores(queries: int, keys: int, window: int | None, chunk: int | None) -> int:
    """Scores in blocks of which a mask leaves some, for queries that are the last positions of the keys."""
    positions = np.arange(queries)[:, None] + keys - queries
    others = np.arange(keys)[None, :]
    seen = others <= positions
    if window is not None:
        seen &= others > positions - window
    if chunk is not None:
        seen &= others // chunk == positions // chunk
    rows, columns = queries // BLOCK, keys // BLOCK
    blocks = seen.reshape(rows, BLOCK, columns, BLOCK).any(axis=(1, 3))
    return int(blocks.sum()) * BLOCK * BLOCK


def computed_scores(op: Op) -> int:
    scores = seen_gemms(op)[0]
    return scores.batch * scores.m * scores.n // (2 * 2 * 3)


blocks = st.integers(1, 12)
spans = st.none() | blocks.map(lambda count: count * BLOCK)


@given(first=blocks, second=blocks, window=spans)
def test_causal_and_sliding_attention_computes_the_blocks_that_are_seen(
    first: int, second: int, window: int | None
) -> None:
    queries, keys = sorted((first * BLOCK, second * BLOCK))
    mask = {"causal": "s"} | ({} if window is None else {"window": window})
    assert computed_scores(attention(queries, keys, **mask)) == counted_scores(queries, keys, window, None)


@given(count=blocks, chunk=blocks)
def test_chunks_compute_at_least_the_blocks_that_are_seen(count: int, chunk: int) -> None:
    """Every chunk is counted as if it were behind another one: a block sees the most that any of its place does."""
    length, size = count * BLOCK, chunk * BLOCK
    computed = computed_scores(attention(length, length, causal="s", chunk=size))
    assert computed >= counted_scores(length, length, None, size)
    assert computed <= min(length, size) * length


@given(queries=st.integers(1, 700), keys=st.integers(1, 700), window=st.none() | st.integers(1, 700))
def test_a_mask_never_adds_work_and_more_positions_never_take_less(queries: int, keys: int, window: int | None) -> None:
    mask = {"causal": "s"} | ({} if window is None else {"window": window})
    assert computed_scores(attention(queries, keys, **mask)) <= queries * keys
    more = [attention(queries + 1, keys, **mask), attention(queries, keys + 1, **mask)]
    assert all(computed_scores(op) >= computed_scores(attention(queries, keys, **mask)) for op in more)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_causal_work_is_halved_and_matmul_flops_count_the_whole_square(phase: Phase) -> None:
    whole, causal = attention(8192, 8192, phase), attention(8192, 8192, phase, causal="s")
    tensors = {name: Tensor(name, (1,), DType.BFLOAT16) for name in (*whole.inputs, *whole.outputs)}
    plain, halved = op_work(whole, tensors), op_work(causal, tensors)
    half = (64 + 1) / (2 * 64)  # 64 blocks of 128, the diagonal computed whole
    assert halved.macs == pytest.approx(half * plain.macs)
    assert halved.vector_operations == pytest.approx(half * plain.vector_operations)
    assert halved.compulsory_bytes == pytest.approx(plain.compulsory_bytes)
    assert causal.matmul_flops == whole.matmul_flops


def test_backward_computes_five_products_where_four_count() -> None:
    op = attention(256, 256, Phase.BACKWARD)
    tensors = {name: Tensor(name, (1,), DType.BFLOAT16) for name in (*op.inputs, *op.outputs)}
    assert len(op.gemms) == 4
    assert len(op_work(op, tensors).products) == 5


def test_positions_that_are_several_factors_are_masked_alike() -> None:
    rule = Rule.parse("b h (s u) d, b h t d, b h t e -> b h (s u) e | b=1 h=1 s=8 u=128 d=16 t=1024~ e=16")
    split = Op(
        id="attend",
        kind=OpKind.ATTENTION,
        function="attention",
        rule=rule,
        inputs=("q", "k", "v"),
        outputs=("y",),
        attributes=(("causal", "s u"),),
    )
    assert seen_gemms(split)[0].m == 36 * BLOCK  # 1 + 2 + .. + 8 blocks
