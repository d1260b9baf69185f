import math

import pytest

from phaze.cost import VIEW, CoreKind, Product, Work, matmul_work, vector_work
from phaze.errors import CostError


def test_the_kind_follows_from_what_is_computed() -> None:
    product = matmul_work(1, 8, 8, 8)
    assert product.kind is CoreKind.TENSOR
    assert vector_work(5, 10).kind is CoreKind.VECTOR
    assert Work(products=product.products, tilings=product.tilings, vector_operations=1).kind is CoreKind.BOTH
    assert VIEW.kind is CoreKind.NONE


@pytest.mark.parametrize(
    "fields",
    [
        {"vector_operations": 5.0},
        {"streamed_bytes": 5.0},
        {"products": (Product(batch=1, m=1, n=1, k=1, dtype="bf16"),)},
        {"vector_operations": -1.0, "streamed_bytes": 5.0},
        {"vector_operations": 1.0, "streamed_bytes": float("nan")},
        {"vector_operations": float("inf"), "streamed_bytes": 1.0},
    ],
)
def test_work_that_would_be_priced_too_low_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(CostError):
        Work(**fields)


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (1, -1, 1, 1), (1, 1, 1, 0)])
def test_products_have_sizes(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(CostError, match="at least 1"):
        matmul_work(*sizes)


def test_equal_works_are_one() -> None:
    assert len({matmul_work(1, 2, 3, 4), matmul_work(1, 2, 3, 4), matmul_work(1, 2, 4, 3)}) == 2


def test_a_result_may_have_another_type_than_its_operands() -> None:
    assert matmul_work(1, 2, 3, 4, dtype="bf16", output_dtype="fp32").compulsory_bytes == 2 * (8 + 12) + 4 * 6


@pytest.mark.parametrize("m", [math.inf, math.nan, 2.5, 0, -1, True, "4", 10**400])
def test_a_product_of_no_whole_size_is_refused(m: int) -> None:
    with pytest.raises(CostError, match="matrix product: m is"):
        matmul_work(1, m, 4, 4)
    with pytest.raises(CostError, match="matrix product: m is"):
        Product(batch=1, m=m, n=4, k=4, dtype="bfloat16")
