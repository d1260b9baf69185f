"""The parts that transformers are made of, written as ops: linear maps, norms, attention, embeddings, heads, losses.

Activations keep their natural dimensions (`b s h d`, not `b s (h d)`), so that heads are factors from the start and no
views are needed. Dimension names: b batch, s query positions, t key positions, i hidden, h heads, g key/value heads,
r query heads per key/value head, d head size, f MLP size, v vocabulary, e experts, k experts per token, c tokens per
expert and sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phaze.frontends.families.config_fields import ConfigFields
from phaze.ir import Attribute, DType, GraphBuilder, OpKind, Role

__all__ = ["Attention", "TransformerWriter"]

Sizes = Mapping[str, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """How queries meet keys."""

    heads: int
    head_size: int
    key_value_heads: int | None = None
    is_causal: bool = True
    scale: float | None = None
    dropout: float = 0.0

    @property
    def sizes(self) -> dict[str, int]:
        """Factor sizes by name."""
        groups = self.key_value_heads or self.heads
        return {"h": self.heads, "g": groups, "r": self.heads // groups, "d": self.head_size}

    @property
    def query_dims(self) -> str:
        """The head dimensions of a query: `h`, or `g r` where several query heads share a key."""
        return "h" if self.key_value_heads in (None, self.heads) else "g r"

    @property
    def key_dims(self) -> str:
        """The head dimensions of a key and a value."""
        return "h" if self.query_dims == "h" else "g"


class TransformerWriter:
    """A GraphBuilder with the vocabulary of transformers.

    `sizes` are the sizes of dimensions by their names. In all methods `path` is the module path of what is written, and
    `text` the rule of an op, such as 'b s i, f i -> b s f'.
    """

    def __init__(self, builder: GraphBuilder, **sizes: int) -> None:
        self.builder = builder
        self.sizes = sizes

    @classmethod
    def for_config(
        cls, fields: ConfigFields, builder: GraphBuilder, *, max_length: int | None = None, **sizes: int
    ) -> TransformerWriter:
        """A writer with these sizes and those that every family has: batch, positions and vocabulary."""
        length = fields.sequence_length(max_length)
        is_requested = fields.requested_length is not None
        origin = "as asked" if is_requested else "the model's own; pass sequence_length to change it"
        builder.notes.append(f"sequences of {length:,} positions ({origin})")
        vocabulary = fields.size("padded_vocab_size", "vocab_size")
        return cls(builder, b=builder.micro_batch_size, s=length, t=length, v=vocabulary, **sizes)

    def op(
        self,
        path: str,
        name: str,
        kind: OpKind,
        function: str,
        text: str,
        *inputs: str,
        sizes: Sizes = None,
        dtypes: tuple[DType, ...] | None = None,
        results: tuple[str, ...] = (),
        attributes: Mapping[str, Attribute] | None = None,
        **marks: str,
    ) -> tuple[str, ...]:
        """Add an op whose rule is given as text; `marks` name the factors of a kind, such as `normalized="t"`."""
        rule = self.builder.rule(text, {**self.sizes, **(sizes or {})}, **marks)
        return self.builder.add(
            f"{path}.{name}" if name else path,
            kind,
            function,
            rule,
            inputs,
            dtypes=dtypes,
            results=results,
            module=path,
            attributes=attributes,
        )

    def elementwise(
        self, path: str, function: str, text: str, *inputs: str, name: str = "", sizes: Sizes = None
    ) -> str:
        """A function of every element."""
        return self.op(path, name or function, OpKind.ELEMENTWISE, function, text, *inputs, sizes=sizes)[0]

    def scale(self, path: str, x: str, factor: float) -> str:
        """x times a constant."""
        attributes = {"factor": factor}
        return self.op(path, "scale", OpKind.ELEMENTWISE, "scale", "b s i -> b s i", x, attributes=attributes)[0]

    def linear(self, path: str, x: str, text: str, *, bias: bool = False, sizes: Sizes = None) -> str:
        """The product of x and a weight, as `text` contracts them, and a bias.

        The weight's dimension that the result lacks is its input; the other one is its output and the bias's.
        """
        rule = self.builder.rule(text, {**self.sizes, **(sizes or {})})
        weight_dims = rule.operands[1]
        result_factors = frozenset(name for dim in rule.results[0] for name in dim.factors)
        weight = self.builder.parameter(f"{path}.weight", *rule.shape(weight_dims))
        (y,) = self.builder.add(f"{path}.matmul", OpKind.CONTRACTION, "einsum", rule, (x, weight), module=path)
        if not bias:
            return y
        bias_dims = tuple(dim for dim in weight_dims if result_factors.issuperset(dim.factors))
        parameter = self.builder.parameter(f"{path}.bias", *rule.shape(bias_dims))
        out = text.partition("->")[2].strip()
        added = f"{out}, {' '.join(str(dim) for dim in bias_dims)} -> {out}"
        return self.elementwise(path, "add", added, y, parameter, name="bias_add", sizes=sizes)

    def norm(self, path: str, x: str, function: str, *, epsilon: float = 1e-5, offset: int = 0) -> str:
        """A layer norm (with bias) or root-mean-square norm over `i`; `offset` is added to the weight."""
        size = self.sizes["i"]
        parameters = [self.builder.parameter(f"{path}.weight", size)]
        if function == "layer_norm":
            parameters.append(self.builder.parameter(f"{path}.bias", size))
        text = f"b s i{', i' * len(parameters)} -> b s i"
        attributes: dict[str, Attribute] = {"epsilon": epsilon, "offset": offset}
        inputs = (x, *parameters)
        return self.op(path, "out", OpKind.NORM, function, text, *inputs, attributes=attributes, normalized="i")[0]

    def dropout(self, path: str, x: str, probability: float, dims: str = "b s i", sizes: Sizes = None) -> str:
        """Dropout, with its mask of one byte for every element; x itself where the probability is 0."""
        if not probability:
            return x
        return self.op(
            path,
            "dropout",
            OpKind.DROPOUT,
            "dropout",
            f"{dims} -> {dims}, {dims}",
            x,
            sizes=sizes,
            dtypes=(self.builder.dtype, DType.BOOL),
            results=("mask",),
            attributes={"probability": probability},
        )[0]

    def residual(self, path: str, x: str, branch: str) -> str:
        """The sum of a branch and what it branched off from."""
        return self.elementwise(path, "add", "b s i, b s i -> b s i", x, branch, name="residual")

    def embedding(
        self,
        path: str,
        ids: str,
        rows: int,
        text: str = "v i, b s -> b s i",
        *,
        sizes: Sizes = None,
        table: str | None = None,
    ) -> str:
        """Rows of a table (by default the module's own weight) picked by ids."""
        rule = self.builder.rule(text, {**self.sizes, **(sizes or {}), "v": rows}, lookup="v")
        weight = self.builder.parameter(table or f"{path}.weight", *rule.shape(rule.operands[0]))
        return self.builder.add(path, OpKind.LOOKUP, "embedding", rule, (weight, ids), module=path)[0]

    def positions(self, path: str, x: str, rows: int, ids: str, dims: str = "i") -> str:
        """Learned positions added to x."""
        table = self.embedding(path, ids, rows, f"v {dims}, s -> s {dims}")
        return self.elementwise(path, "add", f"b s {dims}, s {dims} -> b s {dims}", x, table)

    def rotary(self, path: str, x: str, heads: str, tables: tuple[str, str], attention: Attention) -> str:
        """Rotate pairs of elements of each head by an angle that grows with the position."""
        text = f"b s {heads} d, s d, s d -> b s {heads} d"
        inputs = (x, *tables)
        return self.op(path, "rotary", OpKind.ELEMENTWISE, "rotary", text, *inputs, sizes=attention.sizes, whole="d")[0]

    def attend(self, path: str, query: str, key: str, value: str, attention: Attention, bias: str | None = None) -> str:
        """Scores, softmax (with scale, causal mask and position bias), dropout and context."""
        h, g, sizes = attention.query_dims, attention.key_dims, attention.sizes
        scale = attention.head_size**-0.5 if attention.scale is None else attention.scale
        square = f"b {h} s t"
        text = f"b s {h} d, b t {g} d -> {square}"
        (scores,) = self.op(path, "scores", OpKind.CONTRACTION, "einsum", text, query, key, sizes=sizes)
        attributes: dict[str, Attribute] = {"scale": scale} | ({"causal": "s"} if attention.is_causal else {})
        inputs = (scores,) if bias is None else (scores, bias)
        function = "softmax" if bias is None else "biased_softmax"
        text = f"{square}{'' if bias is None else f', {h} s t'} -> {square}"
        (weights,) = self.op(
            path, "softmax", OpKind.SOFTMAX, function, text, *inputs, sizes=sizes, attributes=attributes, normalized="t"
        )
        weights = self.dropout(path, weights, attention.dropout, square, sizes)
        text = f"{square}, b t {g} d -> b s {h} d"
        return self.op(path, "context", OpKind.CONTRACTION, "einsum", text, weights, value, sizes=sizes)[0]

    def project_and_attend(
        self,
        path: str,
        x: str,
        memory: str,
        attention: Attention,
        *,
        names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
        out: str,
        bias: bool = False,
        out_bias: bool | None = None,
        rotary_tables: tuple[str, str] | None = None,
        position_bias: str | None = None,
    ) -> str:
        """Attention with a weight each for query, key, value and result; keys and values come from `memory`.

        `names` and `out` are the names of the four linear maps; `out_bias` is `bias` unless it is given.
        """
        h, g, sizes = attention.query_dims, attention.key_dims, attention.sizes
        query_path, key_path, value_path = (f"{path}.{name}" for name in names)
        query = self.linear(query_path, x, f"b s i, ({h} d) i -> b s {h} d", bias=bias, sizes=sizes)
        key = self.linear(key_path, memory, f"b s i, ({g} d) i -> b s {g} d", bias=bias, sizes=sizes)
        value = self.linear(value_path, memory, f"b s i, ({g} d) i -> b s {g} d", bias=bias, sizes=sizes)
        if rotary_tables is not None:
            query = self.rotary(query_path, query, h, rotary_tables, attention)
            key = self.rotary(key_path, key, g, rotary_tables, attention)
        y = self.attend(path, query, key, value, attention, position_bias)
        has_bias = bias if out_bias is None else out_bias
        return self.linear(f"{path}.{out}", y, f"b s {h} d, i ({h} d) -> b s i", bias=has_bias, sizes=sizes)

    def split_query_key_value(self, path: str, x: str, dims: str, attention: Attention) -> tuple[str, ...]:
        """Query, key and value as views of one tensor, in which the factor c counts the three."""
        part = dims.replace("c ", "")
        text = f"{dims} -> {part}, {part}, {part}"
        return self.split(path, x, text, ("query", "key", "value"), "c", sizes={"c": 3, **attention.sizes})

    def split(self, path: str, x: str, text: str, names: tuple[str, ...], whole: str, sizes: Sizes) -> tuple[str, ...]:
        """Views of the parts of x along one factor."""
        return self.op(path, "split", OpKind.VIEW, "split", text, x, sizes=sizes, results=names[1:], whole=whole)

    def loss(self, path: str, logits: str, labels: str) -> str:
        """Mean cross entropy, in single precision."""
        text, dtypes = "b s v -> b s v", (DType.FLOAT32,)
        (single,) = self.op(path, "logits", OpKind.ELEMENTWISE, "cast", text, logits, dtypes=dtypes)
        return self.op(
            path,
            "cross_entropy",
            OpKind.SOFTMAX,
            "cross_entropy",
            "b s v, b s -> .",
            single,
            labels,
            dtypes=dtypes,
            normalized="v",
        )[0]

    def head(
        self, path: str, x: str, labels: str, *, tied_to: str | None = None, bias: bool = False, dims: str = "i"
    ) -> str:
        """Logits over the vocabulary and their loss; the weight is the embedding's table where it is tied."""
        weight = tied_to or self.builder.parameter(f"{path}.weight", self.sizes["v"], self.sizes[dims])
        text = f"b s {dims}, v {dims} -> b s v"
        (logits,) = self.op(path, "matmul", OpKind.CONTRACTION, "einsum", text, x, weight)
        if bias:
            parameter = self.builder.parameter(f"{path}.bias", self.sizes["v"])
            logits = self.elementwise(path, "add", "b s v, v -> b s v", logits, parameter, name="bias_add")
        return self.loss("loss", logits, labels)

    def masked_language_head(self, path: str, x: str, table: str, activation: str) -> str:
        """A dense layer, a norm and logits over the vocabulary tied to the embedding, with their loss."""
        sizes = {"j": self.sizes["i"]}
        x = self.linear(f"{path}.transform.dense", x, "b s i, j i -> b s j", bias=True, sizes=sizes)
        x = self.elementwise(f"{path}.transform", activation, "b s i -> b s i", x)
        x = self.norm(f"{path}.transform.LayerNorm", x, "layer_norm")
        return self.head(path, x, self.batch("labels"), tied_to=table, bias=True)

    def batch(self, name: str, length: str = "s") -> str:
        """Token ids or labels: one integer a position."""
        shape = (self.sizes["b"], self.sizes[length])
        return self.builder.argument(name, shape, Role.BATCH, DType.INT64)

    def constant(self, name: str, *shape: int, dtype: DType = DType.INT64) -> str:
        """A table that the model does not learn."""
        return self.builder.argument(name, shape, Role.OTHER, dtype)
