"""Factor rules: text, shapes, local shapes, flops and their numpy meaning."""

import math
import string
from dataclasses import replace

import numpy as np
import pytest
from graphs import rules
from hypothesis import given
from hypothesis import strategies as st
from oracles.numpy_reference import evaluate_op

from phaze.errors import GraphError
from phaze.ir import Dim, Factor, FactorKind, Gemm, Op, OpKind, Phase, Rule
from phaze.ir.op import gemm_view

LINEAR = Rule.parse("b s i, (h d) i -> b s h d | b=2* s=5 i=12 h=3 d=4")


@given(rules())
def test_text_and_rule_are_inverse_to_each_other(rule: Rule) -> None:
    assert Rule.parse(str(rule)) == rule


def test_a_dimension_of_two_factors_has_their_product_as_its_size() -> None:
    assert LINEAR.shape(LINEAR.operands[1]) == (12, 12)
    assert LINEAR.shape(LINEAR.results[0]) == (2, 5, 3, 4)


def test_a_looked_up_factor_is_not_looped_over() -> None:
    rule = Rule.parse("v i, b s -> b s i | v=100? i=8 b=2 s=3")
    assert rule.work == 2 * 3 * 8
    op = _op(rule, OpKind.LOOKUP, "embedding")
    assert op.elements_read == (48, 6)
    assert op.elements_written == (48,)


@pytest.mark.parametrize(("ways", "shard", "expected"), [(3, None, 4), (3, 0, 4), (3, 1, 4), (3, 2, 3), (1, 0, 11)])
def test_uneven_splits_give_the_rest_to_the_last_part(ways: int, shard: int | None, expected: int) -> None:
    rule = Rule.parse("v i -> i v | v=11 i=2")
    local = rule.local({"v": ways}, None if shard is None else {"v": shard})
    assert local.shape(rule.operands[0]) == (expected, 2)
    assert local.shape(rule.results[0]) == (2, expected)


@given(st.integers(1, 60), st.integers(1, 60))
def test_parts_add_up_to_the_whole(size: int, ways: int) -> None:
    ways = min(size, ways)
    rule = Rule((), ((Dim(("v",)),),), (Factor("v", size),))
    parts = range(math.ceil(size / math.ceil(size / ways)))
    assert sum(rule.local({"v": ways}, {"v": part}).size("v") for part in parts) == size
    assert rule.local({"v": ways}).size("v") == math.ceil(size / ways)


def test_factors_of_a_mesh_are_split_independently() -> None:
    local = Rule.parse("b v -> v b | b=4 v=11").local({"b": 2, "v": 3}, {"b": 1, "v": 2})
    assert (local.size("b"), local.size("v")) == (2, 3)


@pytest.mark.parametrize(
    ("ways", "shards", "message"),
    [
        ({"z": 2}, {}, "has no factor 'z' to split"),
        ({"s": 2}, {}, "factor 's' of rule .* must stay whole"),
        ({"p": 2}, {}, "factor 'p' of rule .* must stay whole"),
        ({"v": 9}, {}, "factor v=5 cannot be split 9 ways"),
        ({"v": 0}, {}, "factor v=5 cannot be split 0 ways"),
        ({"v": 4}, {"v": 3}, "factor v=5 split 4 ways in parts of 2 has no part 3"),
        ({"v": 2}, {"v": -1}, "has no part -1"),
    ],
)
def test_an_impossible_split_is_refused(ways: dict[str, int], shards: dict[str, int], message: str) -> None:
    rule = Rule.parse("v s (p k)@8 -> v s p | v=5 s=4! p=6 k=3")
    with pytest.raises(GraphError, match=message):
        rule.local(ways, shards)


def test_a_dimension_covered_in_part_grows_with_the_batch() -> None:
    rule = Rule.parse("b@4 i, b@4 i -> b i | b=8* i=3").with_batch_scaled(8, 16)
    assert [rule.shape(dims) for dims in rule.tensors()] == [(8, 3), (8, 3), (16, 3)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("b s i, o i -> b s o | b=2 s=3 i=4 o=5", Gemm(1, 6, 5, 4)),
        ("b s h d, b t h d -> b h s t | b=2 s=3 t=4 h=5 d=6", Gemm(10, 3, 4, 6)),
        ("b s g r d, b t g d -> b g r s t | b=1 s=3 t=4 g=2 r=5 d=6", Gemm(2, 15, 4, 6)),
        ("e b c i, e f i -> e b c f | e=8 b=1 c=3 i=4 f=5", Gemm(8, 3, 5, 4)),
        ("b (g i) (p k)@8, (g o) i k -> b (g o) p | b=2 g=3 i=4 o=5 p=6 k=3", Gemm(3, 12, 5, 12)),
    ],
)
def test_the_gemm_view_sorts_factors_into_batch_m_n_k(text: str, expected: Gemm) -> None:
    assert gemm_view(Rule.parse(text)) == expected


def test_fused_attention_counts_two_products_forward_and_four_backward() -> None:
    rule = Rule.parse("b h s d, b h t d, b h t e -> b h s e | b=2 h=3 s=5 d=7 t=11 e=13")
    forward = _op(rule, OpKind.ATTENTION, "attention")
    assert forward.matmul_flops == 2 * 2 * 3 * 5 * 11 * (7 + 13)
    backward = replace(forward, function="attention_backward", phase=Phase.BACKWARD)
    assert backward.matmul_flops == 2 * forward.matmul_flops


@st.composite
def contractions(draw: st.DrawFn) -> Rule:
    """A random product of two tensors whose dimensions have one to three factors each, in any order."""
    names = list(string.ascii_lowercase[: draw(st.integers(1, 6))])
    members = {name: draw(st.sampled_from([(1, 1, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1)])) for name in names}
    sides = []
    for side in range(3):
        left = draw(st.permutations([name for name in names if members[name][side]]))
        dims = []
        while left:
            count = draw(st.integers(1, min(3, len(left))))
            dims.append(Dim(tuple(left[:count])))
            left = left[count:]
        sides.append(tuple(dims))
    factors = tuple(Factor(name, draw(st.integers(1, 4))) for name in names)
    return Rule((sides[0], sides[1]), (sides[2],), factors)


@given(contractions())
def test_the_numpy_meaning_of_a_contraction_is_einsum(rule: Rule) -> None:
    generator = np.random.default_rng(0)
    arrays = [generator.normal(size=rule.shape(dims)) for dims in rule.operands]
    terms = ["".join(name for dim in dims for name in dim.factors) for dims in (*rule.operands, *rule.results)]
    spread = [array.reshape([rule.size(name) for name in term]) for array, term in zip(arrays, terms[:2], strict=True)]
    expected = np.einsum(f"{terms[0]},{terms[1]}->{terms[2]}", *spread).reshape(rule.shape(rule.results[0]))
    (result,) = evaluate_op(_op(rule, OpKind.CONTRACTION, "einsum"), arrays)
    np.testing.assert_allclose(result, expected, atol=1e-12)


@given(contractions())
def test_the_gemm_view_has_two_flops_for_every_point_of_the_loops(rule: Rule) -> None:
    assert gemm_view(rule).flops == 2 * rule.work


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b s i", "has no '->'"),
        ("b -> b | b=0", "factor 'b' has size 0; expected an integer from 1"),
        (f"b -> b | b={2**62}", "factor 'b' has size 4611686018427387904"),
        ("b -> b | b=99999999999999999999999", "unreadable factor"),
        ("b -> b | b=-3", "unreadable factor 'b=-3'"),
        ("b -> b | b=nan", "unreadable factor 'b=nan'"),
        ("b -> b | b=2 b=3", "declares a factor twice"),
        ("b b -> b | b=2", "one factor in two dimensions"),
        ("b -> c | b=2", "uses factor 'c' without declaring its size"),
        ("b$ -> b | b=2", "unreadable dimension"),
        ("(a b -> a b | a=2 b=3", "unreadable dimension at '[(]a b'"),
        ("((a) b) -> a b | a=2 b=3", "unreadable dimension"),
        ("a) b( -> a b | a=2 b=3", "unreadable dimension"),
        ("a,, -> a | a=2", "unreadable dimension"),
        (" ".join(f"f{n}" for n in range(65)) + " -> . | " + " ".join(f"f{n}=2" for n in range(65)), "has 65 factors"),
        ("b@0 -> b | b=2", "dimension of size 0"),
    ],
)
def test_a_malformed_rule_is_refused_with_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Rule.parse(text)


def test_a_dimension_s_size_must_be_an_integer() -> None:
    with pytest.raises(GraphError, match=r"dimension of size 2\.5"):
        Rule(((Dim(("a",), 2.5),),), ((),), (Factor("a", 2),))  # type: ignore[arg-type]


def test_rule_of_names_factors_without_a_size() -> None:
    with pytest.raises(GraphError, match="factors without a size: i, o"):
        Rule.of("b i, o i -> b o", {"b": 1})


def test_marks_are_kept_in_text() -> None:
    rule = Rule.of("b s -> b s", {"b": 2, "s": 3}, normalized="s")
    assert str(rule) == "b s -> b s | b=2* s=3~"
    assert rule.factor("s").kind is FactorKind.NORMALIZED


def _op(rule: Rule, kind: OpKind, function: str) -> Op:
    inputs = tuple(f"x{index}" for index in range(len(rule.operands)))
    return Op(id="y", kind=kind, function=function, rule=rule, inputs=inputs, outputs=("y",))
