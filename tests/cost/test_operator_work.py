import math
from dataclasses import replace

import pytest
from graphs import TINY_CONFIGS, tiny_graph

from phaze.cost import VIEW, CoreKind, Product, Work, matmul_work, op_work, price_ops, vector_work
from phaze.cost.off_chip_traffic import AttentionTiling
from phaze.errors import CostError
from phaze.hardware import preset
from phaze.ir import DType, Op, OpKind, Phase, Rule, Tensor
from phaze.ir.graph_builder import convolution_rule, opaque_rule

CHIP = preset("tpuv4").accelerator


def op_of(kind: OpKind, rule: Rule, function: str = "", phase: Phase = Phase.FORWARD) -> tuple[Op, dict[str, Tensor]]:
    names = [f"t{index}" for index in range(len(rule.operands) + len(rule.results))]
    count = len(rule.operands)
    op = Op(
        id="op",
        kind=kind,
        function=function or kind,
        rule=rule,
        inputs=tuple(names[:count]),
        outputs=tuple(names[count:]),
        phase=phase,
    )
    shapes = (rule.shape(dims) for dims in rule.tensors())
    return op, {name: Tensor(name, shape, DType.BFLOAT16) for name, shape in zip(names, shapes, strict=True)}


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_every_op_of_every_family_is_priced_and_only_views_are_free(name: str) -> None:
    graph = tiny_graph(name).with_backward()
    estimate = price_ops(graph, graph.ops, CHIP, prices={})
    for row, op in enumerate(graph.ops):
        is_view = op.kind is OpKind.VIEW
        assert (estimate.kinds[row] is CoreKind.NONE) == is_view
        for values in (estimate.core_s, estimate.spread_s, estimate.spread_bytes, estimate.spread_energy_j):
            assert (values[row, 0] == 0) == is_view, op.id


def test_a_contraction_is_the_product_of_its_rule_on_operands_as_stored() -> None:
    rule = Rule.of("b s i, o i -> b s o", {"b": 2, "s": 3, "i": 5, "o": 7})
    work = op_work(*op_of(OpKind.CONTRACTION, rule))
    (product,), (tiling,) = work.products, work.tilings
    assert (product.batch, product.m, product.n, product.k, product.dtype) == (1, 6, 7, 5, "bfloat16")
    assert work.kind is CoreKind.TENSOR
    assert tiling.compulsory_bytes == 2 * (2 * 3 * 5 + 7 * 5 + 2 * 3 * 7)


def test_expert_products_are_a_batch_over_experts() -> None:
    rule = Rule.of("e c i, e o i -> e c o", {"e": 8, "c": 100, "i": 16, "o": 32})
    (product,) = op_work(*op_of(OpKind.CONTRACTION, rule)).products
    assert (product.batch, product.m, product.n, product.k) == (8, 100, 32, 16)


def test_a_convolution_computes_its_unfolded_product_and_moves_its_image() -> None:
    rule = convolution_rule((8, 64, 58, 58), (128, 64, 3, 3), (8, 128, 56, 56))
    work = op_work(*op_of(OpKind.CONVOLUTION, rule))
    (product,) = work.products
    assert (product.batch, product.m, product.n, product.k) == (1, 8 * 56 * 56, 128, 64 * 9)
    image, weight, result = 8 * 64 * 58 * 58, 128 * 64 * 9, 8 * 128 * 56 * 56
    assert work.compulsory_bytes == 2 * (image + weight + result)


def attention(phase: Phase) -> tuple[Op, dict[str, Tensor]]:
    text = "b s h d, b t h d, b t h e -> b s h e"
    if phase is Phase.BACKWARD:
        text = "b s h d, b t h d, b t h e, b s h e, b s h e -> b s h d, b t h d, b t h e"
    sizes = {"b": 2, "s": 512, "t": 1024, "h": 4, "d": 64, "e": 32}
    return op_of(OpKind.ATTENTION, Rule.of(text, sizes), phase=phase)


def test_fused_attention_moves_operands_and_result_but_no_scores() -> None:
    work = op_work(*attention(Phase.FORWARD))
    assert work.compulsory_bytes == 2 * 2 * 4 * (512 * (64 + 32) + 1024 * (64 + 32))
    assert work.macs == 2 * 4 * 512 * 1024 * (64 + 32)
    assert work.vector_operations >= 2 * 4 * 512 * 1024
    assert work.kind is CoreKind.BOTH


def test_fused_attention_computes_its_scores_again_backward() -> None:
    op, tensors = attention(Phase.BACKWARD)
    work = op_work(op, tensors)
    assert 2 * work.macs == op.matmul_flops + 2 * 2 * 4 * 512 * 1024 * 64
    assert len(work.products) == 5


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_fused_attention_counts_softmax_and_dropout_of_every_score(phase: Phase) -> None:
    """What a softmax and a dropout of the scores cost by themselves; backward they are made again first."""
    score = Rule.of("b -> b", {"b": 1})
    kinds = {"softmax": OpKind.SOFTMAX, "dropout": OpKind.DROPOUT}
    each = {
        f"{name}{suffix}": op_work(*op_of(kind, score, f"{name}{suffix}")).vector_operations
        for name, kind in kinds.items()
        for suffix in ("", "_backward")
    }
    op, tensors = attention(phase)
    with_dropout = replace(op, attributes=(("probability", 0.1),))
    suffixes = [""] if phase is Phase.FORWARD else ["", "_backward"]
    scores = 2 * 4 * 512 * 1024
    softmax, dropout = (sum(each[f"{name}{suffix}"] for suffix in suffixes) for name in kinds)
    assert op_work(op, tensors).vector_operations == scores * softmax
    assert op_work(with_dropout, tensors).vector_operations == scores * (softmax + dropout)


def test_fused_attention_sums_the_gradients_of_keys_and_values_backward() -> None:
    (tiling,) = op_work(*attention(Phase.BACKWARD)).tilings
    assert isinstance(tiling, AttentionTiling)
    assert tiling.accumulated_bytes == tiling.key_bytes == 2 * 2 * 4 * 1024 * (64 + 32)


def test_picking_the_largest_costs_no_more_than_sorting_and_copies_their_largest_tensor() -> None:
    sizes = {"b": 100, "e": 64, "k": 8}
    ops = [("b e -> b k, b k", "top_k", "e k"), ("b e -> b e, b e", "sort", "e")]
    top, whole = (op_work(*op_of(OpKind.SORT, Rule.of(text, sizes, whole=marked), name)) for text, name, marked in ops)
    assert top.vector_operations <= whole.vector_operations == 100 * 64 * 6
    stack = Rule.of("b e, b e -> b c", {"b": 100, "e": 64, "c": 128}, whole="e c")
    assert op_work(*op_of(OpKind.COPY, stack, "concatenate")).vector_operations == 100 * 128


def test_attention_of_one_query_position_reads_everything_once() -> None:
    rule = Rule.of("b h d, b t h d, b t h e -> b h e", {"b": 2, "t": 1024, "h": 4, "d": 64, "e": 32})
    op, tensors = op_of(OpKind.ATTENTION, rule)
    assert op_work(op, tensors).streamed_bytes == 2 * 2 * 4 * (64 + 1024 * 64 + 1024 * 32 + 32)


def test_a_lookup_reads_the_rows_that_it_picks() -> None:
    rule = Rule.of("v i, b s -> b s i", {"v": 50_000, "i": 64, "b": 1, "s": 10}, lookup="v")
    assert op_work(*op_of(OpKind.LOOKUP, rule)).compulsory_bytes == 2 * (640 + 10 + 640)


def test_a_scatter_writes_the_whole_table_and_reads_what_it_adds_to() -> None:
    rule = Rule.of("b s i, b s -> v i", {"v": 500, "i": 64, "b": 1, "s": 10}, lookup="v")
    assert op_work(*op_of(OpKind.SCATTER, rule)).compulsory_bytes == 2 * (640 + 10 + 500 * 64 + 640)


def test_an_op_without_a_known_function_is_memory_bound_work_on_all_it_touches() -> None:
    work = op_work(*op_of(OpKind.OPAQUE, opaque_rule([(100, 30), (7,)], [(11, 13)]), "unheard_of"))
    assert (work.kind, work.vector_operations) == (CoreKind.VECTOR, 3000)
    assert work.compulsory_bytes == 2 * (3000 + 7 + 143)


def test_costly_functions_cost_more_than_cheap_ones() -> None:
    rule = Rule.of("b -> b", {"b": 100})
    operations = [
        op_work(*op_of(OpKind.ELEMENTWISE, rule, function)).vector_operations for function in ("relu", "exp", "gelu")
    ]
    assert operations == sorted(set(operations))


def test_a_product_runs_at_its_wider_operand() -> None:
    op, tensors = op_of(OpKind.CONTRACTION, Rule.of("b i, o i -> b o", {"b": 4, "i": 8, "o": 2}))
    mixed = tensors | {"t1": Tensor("t1", (2, 8), DType.FLOAT32)}
    assert op_work(op, mixed).products[0].dtype == "float32"


def test_a_local_rule_is_priced_at_its_local_size() -> None:
    rule = Rule.of("b i, o i -> b o", {"b": 4, "i": 8, "o": 10}).local({"o": 3})
    assert op_work(*op_of(OpKind.CONTRACTION, rule)).products[0].n == 4


def test_a_view_is_nothing() -> None:
    assert op_work(*op_of(OpKind.VIEW, Rule.of("b c -> (b c)", {"b": 2, "c": 3}))) is VIEW


def test_an_op_kind_nobody_prices_is_refused_with_what_to_do() -> None:
    op, tensors = op_of(OpKind.COLLECTIVE, Rule.of("b -> b", {"b": 4}), "all_reduce")
    with pytest.raises(CostError, match=r"'op': nobody prices ops of kind collective \(all_reduce\).*price_collective"):
        op_work(op, tensors)


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
