"""The parts that transformers are made of, written as ops: linear maps, norms, attention, embeddings, heads, losses.

Activations keep their natural dimensions (`b s h d`, not `b s (h d)`), so that heads are factors from the start and no
views are needed. Dimension names: b batch, s query positions, t key positions, i hidden, h heads, g key/value heads,
r query heads per key/value head, d head size, z size of a value's head where it is another, f MLP size, v vocabulary,
e experts, k experts per token, c tokens per expert and sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phaze.frontends.families.config_fields import ConfigFields
from phaze.ir import Attribute, DType, GraphBuilder, OpKind, Role

__all__ = ["Attention", "TransformerWriter"]

Sizes = Mapping[str, int] | None

PrepareHeads = Callable[[str, str, str], str]
"""What is done to queries and keys before they meet, given a projection's path, a tensor and its head dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """How queries meet keys.

    A query sees the last `window` positions, or those of its own chunk of `chunk` positions; all earlier ones where
    both are None. `softcap` bounds the scores by its hyperbolic tangent. `value_size` is the head size of values where
    it is not that of keys.
    """

    heads: int
    head_size: int
    key_value_heads: int | None = None
    value_size: int | None = None
    is_causal: bool = True
    scale: float | None = None
    dropout: float = 0.0
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Factor sizes by name."""
        groups = self.key_value_heads or self.heads
        sizes = {"h": self.heads, "g": groups, "r": self.heads // groups, "d": self.head_size}
        return sizes if self.value_size is None else {**sizes, "z": self.value_size}

    @property
    def value_dim(self) -> str:
        """The dimension within a head of values and of what attention gives."""
        return "d" if self.value_size is None else "z"

    @property
    def mask(self) -> dict[str, Attribute]:
        """Attributes of the softmax that say which keys a query sees."""
        mask: dict[str, Attribute] = {"causal": "s"} if self.is_causal else {}
        for name, size in (("window", self.window), ("chunk", self.chunk)):
            if size is not None:
                mask[name] = size
        return mask

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

    def scale(self, path: str, x: str, factor: float, dims: str = "b s i", sizes: Sizes = None) -> str:
        """x times a constant."""
        text, attributes = f"{dims} -> {dims}", {"factor": factor}
        return self.op(path, "scale", OpKind.ELEMENTWISE, "scale", text, x, sizes=sizes, attributes=attributes)[0]

    def softcap(self, path: str, x: str, cap: float, dims: str, *, scale: float = 1.0, sizes: Sizes = None) -> str:
        """cap * tanh(scale * x / cap)"""
        x = self.scale(path, x, scale / cap, dims, sizes)
        x = self.elementwise(path, "tanh", f"{dims} -> {dims}", x, sizes=sizes)
        return self.scale(path, x, cap, dims, sizes)

    def activate(self, path: str, activation: str, x: str, dims: str = "b s f", sizes: Sizes = None) -> str:
        """An activation function of each element; `relu2` is the square of the rectified value."""
        for function in ("relu", "square") if activation == "relu2" else (activation,):
            x = self.elementwise(path, function, f"{dims} -> {dims}", x, sizes=sizes)
        return x

    def slice(self, path: str, x: str, text: str, start: int, sizes: Sizes = None) -> str:
        """A part of x; the rule marks the dimension that is cut, such as 'b s r@12 -> b s r'."""
        attributes = {"start": start}
        return self.op(path, "part", OpKind.VIEW, "slice", text, x, sizes=sizes, attributes=attributes)[0]

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

    def norm(
        self,
        path: str,
        x: str,
        function: str,
        *,
        epsilon: float = 1e-5,
        offset: int = 0,
        dims: str = "b s i",
        over: str = "i",
        sizes: Sizes = None,
        has_weight: bool = True,
    ) -> str:
        """A layer norm (with bias) or root-mean-square norm over `over`; `offset` is added to the weight."""
        names = over.strip("()")
        size = math.prod({**self.sizes, **(sizes or {})}[name] for name in names.split())
        parameters = [self.builder.parameter(f"{path}.weight", size)] if has_weight else []
        if function == "layer_norm" and has_weight:
            parameters.append(self.builder.parameter(f"{path}.bias", size))
        text = f"{dims}{f', {over}' * len(parameters)} -> {dims}"
        attributes: dict[str, Attribute] = {"epsilon": epsilon, "offset": offset}
        (y,) = self.op(
            path,
            "out",
            OpKind.NORM,
            function,
            text,
            x,
            *parameters,
            sizes=sizes,
            attributes=attributes,
            normalized=names,
        )
        return y

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
        """Rotate pairs of elements of each head by an angle that grows with the position.

        Where only a part of a head is rotated, the tables hold ones and zeros for the rest.
        """
        text = f"b s {heads} d, s d, s d -> b s {heads} d"
        inputs = (x, *tables)
        return self.op(path, "rotary", OpKind.ELEMENTWISE, "rotary", text, *inputs, sizes=attention.sizes, whole="d")[0]

    def rotary_tables(self, size: int, name: str = "rotary") -> tuple[str, str]:
        """Cosines and sines of the angles of all positions."""
        length, dtype = self.sizes["s"], self.builder.dtype
        return (
            self.constant(f"{name}_cosine", length, size, dtype=dtype),
            self.constant(f"{name}_sine", length, size, dtype=dtype),
        )

    def attend(
        self,
        path: str,
        query: str,
        key: str,
        value: str,
        attention: Attention,
        *,
        bias: str | None = None,
        bias_dims: str = "h s t",
        sinks: str | None = None,
        query_dims: str | None = None,
    ) -> str:
        """Scores, softmax (with scale, mask and position bias, or sinks), dropout and context.

        `query_dims` are the head dimensions of the query where its heads are one dimension, such as `(g r)`. `sinks`
        are scores, one a head, that take part in the softmax and give nothing.
        """
        h, g, sizes = attention.query_dims, attention.key_dims, attention.sizes
        scale = attention.head_size**-0.5 if attention.scale is None else attention.scale
        square = f"b {h} s t"
        text = f"b s {query_dims or h} d, b t {g} d -> {square}"
        (scores,) = self.op(path, "scores", OpKind.CONTRACTION, "einsum", text, query, key, sizes=sizes)
        if attention.softcap is not None:
            scores = self.softcap(path, scores, attention.softcap, square, scale=scale, sizes=sizes)
            scale = 1.0
        function, text = "softmax", square
        inputs: tuple[str, ...] = (scores,)
        if bias is not None:
            function, text, inputs = "biased_softmax", f"{square}, {bias_dims}", (scores, bias)
        elif sinks is not None:
            function, text, inputs = "sink_softmax", f"{square}, ({h})", (scores, sinks)
        (weights,) = self.op(
            path,
            "softmax",
            OpKind.SOFTMAX,
            function,
            f"{text} -> {square}",
            *inputs,
            sizes=sizes,
            attributes={"scale": scale, **attention.mask},
            normalized="t",
        )
        weights = self.dropout(path, weights, attention.dropout, square, sizes)
        text = f"{square}, b t {g} {attention.value_dim} -> b s {h} {attention.value_dim}"
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
        key_bias: bool | None = None,
        out_bias: bool | None = None,
        prepare: PrepareHeads | None = None,
        position_bias: str | None = None,
        sinks: str | None = None,
    ) -> str:
        """Attention with a weight each for query, key, value and result; keys and values come from `memory`.

        `names` and `out` are the names of the four linear maps; `key_bias` and `out_bias` are `bias` unless given.
        """
        h, g, sizes = attention.query_dims, attention.key_dims, attention.sizes
        query_path, key_path, value_path = (f"{path}.{name}" for name in names)
        m = "s" if memory == x else "t"
        query = self.linear(query_path, x, f"b s i, ({h} d) i -> b s {h} d", bias=bias, sizes=sizes)
        has_bias = bias if key_bias is None else key_bias
        key = self.linear(key_path, memory, f"b {m} i, ({g} d) i -> b {m} {g} d", bias=has_bias, sizes=sizes)
        value = self.linear(value_path, memory, f"b {m} i, ({g} d) i -> b {m} {g} d", bias=bias, sizes=sizes)
        if prepare is not None:
            query, key = prepare(query_path, query, h), prepare(key_path, key, g)
        y = self.attend(path, query, key, value, attention, bias=position_bias, sinks=sinks)
        return self.attention_result(f"{path}.{out}", y, attention, bias if out_bias is None else out_bias)

    def attention_result(self, path: str, y: str, attention: Attention, bias: bool) -> str:
        """The linear map of what all heads found."""
        h, d = attention.query_dims, attention.value_dim
        return self.linear(path, y, f"b s {h} {d}, i ({h} {d}) -> b s i", bias=bias, sizes=attention.sizes)

    def mlp(self, path: str, x: str, names: tuple[str, str], activation: str, *, bias: bool) -> str:
        """A linear map, an activation and a linear map back."""
        y = self.linear(f"{path}.{names[0]}", x, "b s i, f i -> b s f", bias=bias)
        y = self.activate(path, activation, y)
        return self.linear(f"{path}.{names[1]}", y, "b s f, i f -> b s i", bias=bias)

    def gated_mlp(self, path: str, x: str, activation: str, *, bias: bool = False, sizes: Sizes = None) -> str:
        """down(activation(gate(x)) * up(x))"""
        gate = self.linear(f"{path}.gate_proj", x, "b s i, f i -> b s f", bias=bias, sizes=sizes)
        up = self.linear(f"{path}.up_proj", x, "b s i, f i -> b s f", bias=bias, sizes=sizes)
        gate = self.activate(path, activation, gate, sizes=sizes)
        y = self.elementwise(path, "multiply", "b s f, b s f -> b s f", gate, up, sizes=sizes)
        return self.linear(f"{path}.down_proj", y, "b s f, i f -> b s i", bias=bias, sizes=sizes)

    def split_query_key_value(self, path: str, x: str, dims: str, attention: Attention) -> tuple[str, ...]:
        """Query, key and value as views of one tensor, in which the factor c counts the three."""
        part = dims.replace("c ", "")
        text = f"{dims} -> {part}, {part}, {part}"
        return self.split(path, x, text, ("query", "key", "value"), "c", sizes={"c": 3, **attention.sizes})

    def split(self, path: str, x: str, text: str, names: tuple[str, ...], whole: str, sizes: Sizes) -> tuple[str, ...]:
        """Views of the parts of x along one factor."""
        return self.op(path, "split", OpKind.VIEW, "split", text, x, sizes=sizes, results=names[1:], whole=whole)

    def loss(self, path: str, logits: str, labels: str, dims: str = "b s", sizes: Sizes = None) -> str:
        """Mean cross entropy, in single precision."""
        text, dtypes = f"{dims} v -> {dims} v", (DType.FLOAT32,)
        (single,) = self.op(path, "logits", OpKind.ELEMENTWISE, "cast", text, logits, sizes=sizes, dtypes=dtypes)
        return self.op(
            path,
            "cross_entropy",
            OpKind.SOFTMAX,
            "cross_entropy",
            f"{dims} v, {dims} -> .",
            single,
            labels,
            sizes=sizes,
            dtypes=dtypes,
            normalized="v",
        )[0]

    def head(
        self,
        path: str,
        x: str,
        labels: str,
        *,
        tied_to: str | None = None,
        bias: bool = False,
        dims: str = "i",
        softcap: float | None = None,
    ) -> str:
        """Logits over the vocabulary and their loss; the weight is the embedding's table where it is tied."""
        weight = tied_to or self.builder.parameter(f"{path}.weight", self.sizes["v"], self.sizes[dims])
        text = f"b s {dims}, v {dims} -> b s v"
        (logits,) = self.op(path, "matmul", OpKind.CONTRACTION, "einsum", text, x, weight)
        if bias:
            parameter = self.builder.parameter(f"{path}.bias", self.sizes["v"])
            logits = self.elementwise(path, "add", "b s v, v -> b s v", logits, parameter, name="bias_add")
        if softcap is not None:
            logits = self.softcap(path, logits, softcap, "b s v")
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
