"""Random ops of every kind, and the same ops with one factor larger."""

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from phaze.ir import DType, Op, OpKind, Phase, Rule, Tensor
from phaze.ir.graph_builder import convolution_rule

FLOATS = st.sampled_from([DType.BFLOAT16, DType.FLOAT32, DType.FLOAT8])


@dataclass(frozen=True)
class Template:
    """A kind of op: its rule's text and which factors are marked."""

    kind: OpKind
    function: str
    text: str
    lookup: str = ""
    normalized: str = ""
    whole: str = ""
    phase: Phase = Phase.FORWARD


BACKWARD = "b s h d, b t h d, b t h e, b s h e, b s h e -> b s h d, b t h d, b t h e"
GROUPED_BACKWARD = (
    "b s g r d, b t g d, b t g e, b s g r e, b s g r e -> b s g r d, b t g d, b t g e"  # several queries share a key
)
TEMPLATES = [
    Template(OpKind.CONTRACTION, "einsum", "b m k, b k n -> b m n"),
    Template(OpKind.CONTRACTION, "einsum", "b m k, n k -> b m n"),
    Template(OpKind.CONTRACTION, "einsum", "e b c k, e n k -> e b c n"),
    Template(OpKind.ATTENTION, "attention", "b s h d, b t h d, b t h e -> b s h e"),
    Template(OpKind.ATTENTION, "attention_backward", BACKWARD, phase=Phase.BACKWARD),
    Template(OpKind.ATTENTION, "attention", "b s g r d, b t g d, b t g e -> b s g r e"),
    Template(OpKind.ATTENTION, "attention_backward", GROUPED_BACKWARD, phase=Phase.BACKWARD),
    Template(OpKind.ATTENTION, "attention", "b h d, b t h d, b t h e -> b h e"),
    Template(OpKind.ELEMENTWISE, "gelu", "b m -> b m"),
    Template(OpKind.ELEMENTWISE, "add", "b m n, n -> b m n"),
    Template(OpKind.DROPOUT, "dropout", "b m -> b m, b m"),
    Template(OpKind.SOFTMAX, "softmax", "b m n -> b m n", normalized="n"),
    Template(OpKind.NORM, "layer_norm", "b m, m, m -> b m", normalized="m"),
    Template(OpKind.REDUCTION, "sum", "b m n -> n"),
    Template(OpKind.LOOKUP, "embedding", "v i, b s -> b s i", lookup="v"),
    Template(OpKind.SCATTER, "scatter_add", "b s i, b s -> v i", lookup="v"),
    Template(OpKind.COPY, "stack", "b m, b m -> b c m", whole="c"),
    Template(OpKind.SORT, "top_k", "b e -> b k, b k", whole="e k"),
    Template(OpKind.OPAQUE, "unheard_of", "b m, n -> b n m"),
]


@dataclass(frozen=True)
class SampleOp:
    """An op with its tensors, and the same with one factor larger."""

    op: Op
    tensors: dict[str, Tensor]
    larger: Op
    grown: str


@st.composite
def sample_ops(draw: st.DrawFn) -> SampleOp:
    if draw(st.integers(0, len(TEMPLATES) // 2)) == 0:
        return draw(convolutions())
    template = draw(st.sampled_from(TEMPLATES))
    names = sorted(set(template.text.replace(",", " ").replace("->", " ").split()))
    sizes = {name: draw(st.integers(1, 5000 if len(names) < 4 else 300)) for name in names}
    grown = draw(st.sampled_from(names))
    more = sizes | {grown: sizes[grown] + draw(st.integers(1, 3000))}
    marks = {"lookup": template.lookup, "normalized": template.normalized, "whole": template.whole}
    rule, larger = (Rule.of(template.text, chosen, **marks) for chosen in (sizes, more))
    return _sample(template, rule, larger, grown, draw(FLOATS))


@st.composite
def convolutions(draw: st.DrawFn) -> SampleOp:
    sizes = {name: draw(st.integers(1, 80)) for name in ("batch", "inner", "outer", "side")}
    kernel, groups = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    grown = draw(st.sampled_from(sorted(sizes)))
    more = sizes | {grown: sizes[grown] + draw(st.integers(1, 50))}
    rule, larger = (
        convolution_rule(
            (chosen["batch"], groups * chosen["inner"], *[chosen["side"] + kernel - 1] * 2),
            (groups * chosen["outer"], chosen["inner"], kernel, kernel),
            (chosen["batch"], groups * chosen["outer"], chosen["side"], chosen["side"]),
            groups,
        )
        for chosen in (sizes, more)
    )
    gradient_of = draw(st.sampled_from([None, 0, 1]))
    if gradient_of is not None:
        rule, larger = (_gradient(whole, gradient_of) for whole in (rule, larger))
    return _sample(Template(OpKind.CONVOLUTION, "convolution", ""), rule, larger, grown, draw(FLOATS))


def _gradient(rule: Rule, operand: int) -> Rule:
    """The product that gives one operand's gradient from the result's and the other operand."""
    reads = [rule.results[0], rule.operands[1 - operand]]
    return Rule(tuple(reads[::-1] if operand else reads), (rule.operands[operand],), rule.factors)


def _sample(template: Template, rule: Rule, larger: Rule, grown: str, dtype: DType) -> SampleOp:
    inputs = tuple(f"in{index}" for index in range(len(rule.operands)))
    outputs = tuple(f"out{index}" for index in range(len(rule.results)))
    op = Op(
        id="op",
        kind=template.kind,
        function=template.function,
        rule=rule,
        inputs=inputs,
        outputs=outputs,
        phase=template.phase,
    )
    shapes = [rule.shape(dims) for dims in rule.tensors()]
    tensors = {name: Tensor(name, shape, dtype) for name, shape in zip((*inputs, *outputs), shapes, strict=True)}
    return SampleOp(op, tensors, replace(op, rule=larger), grown)
