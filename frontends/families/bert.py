"""The BERT family written out: a post-norm encoder with a pooler or a masked-language-model head."""

from __future__ import annotations

from phaze.frontends.families.config_fields import ConfigFields
from phaze.frontends.families.transformer_writer import Attention, TransformerWriter
from phaze.ir import GraphBuilder, OpKind

__all__ = ["write_bert"]


def write_bert(fields: ConfigFields, builder: GraphBuilder) -> str:
    """BERT: post-norm encoder. Ends in the pooler, or in the masked-language-model head where the config names one."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    positions = fields.size("max_position_embeddings")
    writer = TransformerWriter.for_config(
        fields, builder, i=hidden, f=fields.size("intermediate_size"), max_length=positions
    )
    drop, epsilon = fields.number("hidden_dropout_prob", 0.1), fields.number("layer_norm_eps", 1e-12)
    attention = Attention(
        heads=heads,
        head_size=fields.head_size(hidden, heads),
        is_causal=False,
        dropout=fields.number("attention_probs_dropout_prob", 0.1),
    )
    activation = fields.activation("hidden_act", "gelu")
    has_head = any(name.endswith("MaskedLM") for name in fields.names("architectures"))
    root = "bert." if has_head else ""
    x = writer.embedding(f"{root}embeddings.word_embeddings", writer.batch("input_ids"), writer.sizes["v"])
    types, table = writer.batch("token_type_ids"), f"{root}embeddings.token_type_embeddings"
    y = writer.embedding(table, types, fields.size("type_vocab_size", default=2))
    x = writer.elementwise(f"{root}embeddings", "add", "b s i, b s i -> b s i", x, y)
    x = writer.positions(
        f"{root}embeddings.position_embeddings", x, positions, writer.constant("positions", writer.sizes["s"])
    )
    x = writer.norm(f"{root}embeddings.LayerNorm", x, "layer_norm", epsilon=epsilon)
    x = writer.dropout(f"{root}embeddings", x, drop)
    for index in range(fields.count("num_hidden_layers")):
        path = f"{root}encoder.layer.{index}"
        names = ("self.query", "self.key", "self.value")
        y = writer.project_and_attend(f"{path}.attention", x, x, attention, names=names, out="output.dense", bias=True)
        x = writer.residual(f"{path}.attention.output", x, writer.dropout(f"{path}.attention.output", y, drop))
        x = writer.norm(f"{path}.attention.output.LayerNorm", x, "layer_norm", epsilon=epsilon)
        y = writer.linear(f"{path}.intermediate.dense", x, "b s i, f i -> b s f", bias=True)
        y = writer.elementwise(f"{path}.intermediate", activation, "b s f -> b s f", y)
        y = writer.linear(f"{path}.output.dense", y, "b s f, i f -> b s i", bias=True)
        x = writer.residual(f"{path}.output", x, writer.dropout(f"{path}.output", y, drop))
        x = writer.norm(f"{path}.output.LayerNorm", x, "layer_norm", epsilon=epsilon)
    if has_head:
        table = f"{root}embeddings.word_embeddings.weight"
        return writer.masked_language_head("cls.predictions", x, table, activation)
    return _pooler_loss(writer, x)


def _pooler_loss(writer: TransformerWriter, x: str) -> str:
    """The first position through a dense layer and tanh; its mean stands in for the loss of a task."""
    first = writer.op("pooler", "first", OpKind.VIEW, "select", "b s i -> b i", x, attributes={"index": 0}, whole="s")[
        0
    ]
    y = writer.linear("pooler.dense", first, "b i, j i -> b j", bias=True, sizes={"j": writer.sizes["i"]})
    y = writer.elementwise("pooler", "tanh", "b i -> b i", y)
    return writer.op("loss", "mean", OpKind.REDUCTION, "mean", "b i -> .", y)[0]
