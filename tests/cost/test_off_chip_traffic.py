import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaze.cost.off_chip_traffic import AttentionTiling, ProductTiling
from phaze.errors import CostError

SMALL = st.integers(1, 12)


def product(m: int, n: int, k: int, batch: int = 1) -> ProductTiling:
    return ProductTiling(
        batch=batch,
        m=m,
        n=n,
        k=k,
        left_bytes=2.0 * batch * m * k,
        right_bytes=2.0 * batch * k * n,
        output_bytes=2.0 * batch * m * n,
        element_bytes=2,
    )


def traffic(tiling: ProductTiling | AttentionTiling, memory_bytes: float) -> float:
    return float(tiling.traffic_bytes(np.array([float(memory_bytes)]))[0])


def by_hand(tiling: ProductTiling, memory_bytes: float) -> float:
    """The least over all whole block sizes."""
    x, w, m, n, k = tiling.left_bytes, tiling.right_bytes, tiling.m, tiling.n, tiling.k
    forms = [x * n + w * m]
    for rows in range(1, m + 1):
        for cols in range(1, n + 1):
            if 4 * rows * cols + 4 * (rows + cols) <= memory_bytes:
                forms.append(x * math.ceil(n / cols) + w * math.ceil(m / rows))
    for depth in range(1, k + 1):
        spilled = 8 * tiling.batch * m * n * (math.ceil(k / depth) - 1)
        for near, kept, passing in ((m, x, w), (n, w, x)):
            for side in range(1, near + 1):
                if 2 * side * depth + 4 * depth + 8 * side <= memory_bytes:
                    forms.append(kept + passing * math.ceil(near / side) + spilled)
    return min(forms) + tiling.output_bytes


@given(SMALL, SMALL, SMALL, st.integers(1, 3), st.integers(1, 600))
def test_traffic_is_near_the_least_over_all_block_sizes(m: int, n: int, k: int, batch: int, memory: int) -> None:
    tiling = product(m, n, k, batch)
    least = by_hand(tiling, memory)
    assert least <= traffic(tiling, memory) <= 1.5 * least


def test_a_large_memory_leaves_only_compulsory_traffic() -> None:
    tiling = product(1000, 2000, 3000)
    assert traffic(tiling, 2**40) == tiling.compulsory_bytes == 2 * (1000 * 3000 + 3000 * 2000 + 1000 * 2000)


def test_without_memory_every_operand_is_read_for_every_result() -> None:
    tiling = product(100, 200, 300)
    assert traffic(tiling, 1) == tiling.left_bytes * 200 + tiling.right_bytes * 100 + tiling.output_bytes


def test_traffic_falls_about_with_the_root_of_the_memory() -> None:
    tiling = product(2**14, 2**14, 2**14)
    ratio = traffic(tiling, 2**20) / traffic(tiling, 2**24)
    assert ratio == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize("change", [{"m": 0}, {"batch": -1}, {"left_bytes": 0.0}, {"output_bytes": -1.0}])
def test_a_product_without_size_is_refused(change: dict[str, float]) -> None:
    fields = {name: getattr(product(2, 2, 2), name) for name in ProductTiling.__slots__}
    with pytest.raises(CostError):
        ProductTiling(**(fields | change))


def attention(queries: int, keys: int, accumulated_bytes: float = 0.0) -> AttentionTiling:
    return AttentionTiling(
        heads=1,
        queries=queries,
        keys=keys,
        query_width=128,
        key_width=128,
        query_bytes=2.0 * 128 * queries,
        key_bytes=2.0 * 128 * keys,
        accumulated_bytes=accumulated_bytes,
        element_bytes=2,
    )


def test_attention_moves_no_scores() -> None:
    tiling = attention(2048, 2048)
    assert traffic(tiling, 2**27) == tiling.compulsory_bytes
    assert tiling.compulsory_bytes < 2048 * 2048


def test_attention_reads_keys_once_per_block_of_queries() -> None:
    tiling = attention(1000, 10_000)
    per_query, sliver = 4 * 128 + 8, 2 * 2 * 128
    assert traffic(tiling, 100 * per_query + sliver) == tiling.query_bytes + 10 * tiling.key_bytes


def test_attention_reads_and_writes_the_gradients_of_keys_on_every_pass_but_the_first() -> None:
    forward, backward = attention(1000, 10_000), attention(1000, 10_000, 1e6)
    memory = 100 * (4 * 128 + 8) + 2 * 2 * 128
    assert traffic(backward, memory) == traffic(forward, memory) + 19 * 1e6
    assert traffic(backward, 2**40) == backward.compulsory_bytes == forward.compulsory_bytes + 1e6


def test_attention_without_size_is_refused() -> None:
    with pytest.raises(CostError, match="attention"):
        attention(0, 5)
