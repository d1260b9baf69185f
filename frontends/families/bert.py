"""The BERT family written out: a post-norm encoder with a pooler or a masked-language-model head."""

from __future__ import annotations

from functools import partial

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
    drop = fields.number("hidden_dropout_prob", 0.1)
    norm = partial(writer.norm, function="layer_norm", epsilon=fields.number("layer_norm_eps", 1e-12))
    attention = Attention(
        heads=heads,
        head_size=fields.head_size(hidden, heads),
        is_causal=False,
        dropout=fields.number("attention_probs_dropout_prob", 0.1),
    )
    names = ("self.query", "self.key", "self.value")
    attend = partial(writer.project_and_attend, attention=attention, names=names, out="output.dense", bias=True)
    activation = fields.activation("hidden_act", "gelu")
    has_head = any(name.endswith("MaskedLM") for name in fields.names("architectures"))
    root = "bert." if has_head else ""
    x = _write_embeddings(fields, writer, f"{root}embeddings", positions)
    x = norm(f"{root}embeddings.LayerNorm", x)
    x = writer.dropout(f"{root}embeddings", x, drop)
    for index in range(fields.count("num_hidden_layers")):
        path = f"{root}encoder.layer.{index}"
        y = attend(f"{path}.attention", x, x)
        x = writer.residual(f"{path}.attention.output", x, writer.dropout(f"{path}.attention.output", y, drop))
        x = norm(f"{path}.attention.output.LayerNorm", x)
        y = writer.linear(f"{path}.intermediate.dense", x, "b s i, f i -> b s f", bias=True)
        y = writer.elementwise(f"{path}.intermediate", activation, "b s f -> b s f", y)
        y = writer.linear(f"{path}.output.dense", y, "b s f, i f -> b s i", bias=True)
        x = writer.residual(f"{path}.output", x, writer.dropout(f"{path}.output", y, drop))
        x = norm(f"{path}.output.LayerNorm", x)
    if has_head:
        return writer.masked_language_head("cls.predictions", x, f"{root}embeddings.word_embeddings.weight", activation)
    return _pooler_loss(writer, x)


def _write_embeddings(fields: ConfigFields, writer: TransformerWriter, path: str, positions: int) -> str:
    """The sum of the embeddings of words, of token types and of positions."""
    x = writer.embedding(f"{path}.word_embeddings", writer.batch("input_ids"), writer.sizes["v"])
    token_types, count = writer.batch("token_type_ids"), fields.size("type_vocab_size", default=2)
    y = writer.embedding(f"{path}.token_type_embeddings", token_types, count)
    x = writer.elementwise(path, "add", "b s i, b s i -> b s i", x, y)
    ids = writer.constant("positions", writer.sizes["s"])
    return writer.positions(f"{path}.position_embeddings", x, positions, ids)


def _pooler_loss(writer: TransformerWriter, x: str) -> str:
    """The first position through a dense layer and tanh; its mean stands in for the loss of a task."""
    attributes = {"index": 0}
    (first,) = writer.op("pooler", "first", OpKind.VIEW, "select", "b s i -> b i", x, attributes=attributes, whole="s")
    y = writer.linear("pooler.dense", first, "b i, j i -> b j", bias=True, sizes={"j": writer.sizes["i"]})
    y = writer.elementwise("pooler", "tanh", "b i -> b i", y)
    return writer.op("loss", "mean", OpKind.REDUCTION, "mean", "b i -> .", y)[0]
