"""Families with an encoder written out: BERT and ViT, and T5 and Whisper, whose decoder reads what the encoder made.

BERT       a post-norm encoder with a pooler or a masked-language-model head
ViT        a convolution that makes patches of an image, an encoder, a classifier
Whisper    convolutions over sound, an encoder, and a decoder that reads it
T5         an encoder and a decoder with relative position biases
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from phaze.errors import ImportModelError
from phaze.frontends.families.config_fields import ConfigFields
from phaze.frontends.families.transformer_writer import Attention, TransformerWriter
from phaze.ir import DType, GraphBuilder, OpKind, Role

__all__ = ["write_bert", "write_t5", "write_vit", "write_whisper"]


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


DEFAULT_CLASSES = 2
"""The classes of a classifier whose config does not say them, as in transformers."""


def write_vit(fields: ConfigFields, builder: GraphBuilder) -> str:
    """ViT with its classifier: patches of an image and a class token through a pre-norm encoder."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    image, patch = fields.size("image_size", default=224), fields.size("patch_size", default=16)
    if image % patch:
        raise ImportModelError(f"{fields.where}: image_size={image} is not a multiple of patch_size={patch}.")
    if fields.requested_length is not None:
        raise ImportModelError(f"{fields.where}: the image's patches make the sequence; sequence_length cannot be set.")
    side = image // patch
    sizes = {"s": side * side + 1, "t": side * side + 1, "i": hidden, "f": fields.size("intermediate_size")}
    writer = TransformerWriter(builder, b=builder.micro_batch_size, **sizes)
    builder.notes.append(f"images of {image} x {image}: sequences of {side * side + 1} positions")
    attention = Attention(
        heads=heads,
        head_size=fields.head_size(hidden, heads),
        is_causal=False,
        dropout=fields.number("attention_probs_dropout_prob", 0),
    )
    norm = partial(writer.norm, function="layer_norm", epsilon=fields.number("layer_norm_eps", 1e-12))
    drop, activation = fields.number("hidden_dropout_prob", 0), fields.activation("hidden_act", "gelu")
    bias = fields.flag("qkv_bias", True)
    x = _embed_patches(fields, writer, "vit.embeddings", side, patch)
    x = writer.dropout("vit.embeddings", x, drop)
    for index in range(fields.count("num_hidden_layers")):
        path = f"vit.layers.{index}"
        y = norm(f"{path}.layernorm_before", x)
        attend = partial(writer.project_and_attend, attention=attention, out="o_proj", bias=bias, out_bias=True)
        y = attend(f"{path}.attention", y, y)
        x = writer.residual(path, x, writer.dropout(f"{path}.attention", y, drop))
        y = writer.mlp(f"{path}.mlp", norm(f"{path}.layernorm_after", x), ("fc1", "fc2"), activation, bias=True)
        x = writer.residual(f"{path}.mlp", x, writer.dropout(f"{path}.mlp", y, drop))
    return _classify(fields, writer, norm("vit.layernorm", x))


def _embed_patches(fields: ConfigFields, writer: TransformerWriter, path: str, side: int, patch: int) -> str:
    """A linear map of every patch, a class token in front, and learned positions."""
    builder, hidden, colours = writer.builder, writer.sizes["i"], fields.size("num_channels", default=3)
    pixels = side * patch
    images = builder.argument("pixel_values", (writer.sizes["b"], colours, pixels, pixels), Role.BATCH)
    root = f"{path}.patch_embeddings.projection"
    sizes = {"c": colours, "y": side, "x": side, "p": patch, "q": patch}
    weight = builder.parameter(f"{root}.weight", hidden, colours, patch, patch)
    text = f"b c (y p)@{pixels} (x q)@{pixels}, i c p q -> b i y x"
    attributes = {"stride": (patch, patch)}
    (y,) = writer.op(
        root, "", OpKind.CONVOLUTION, "convolution", text, images, weight, sizes=sizes, attributes=attributes
    )
    bias = builder.parameter(f"{root}.bias", hidden)
    y = writer.elementwise(root, "add", "b i y x, i -> b i y x", y, bias, sizes=sizes)
    (y,) = writer.op(path, "patches", OpKind.VIEW, "transpose", "b i y x -> b (y x) i", y, sizes=sizes)
    token = builder.parameter(f"{path}.cls_token", 1, 1, hidden)
    (token,) = writer.op(path, "tokens", OpKind.VIEW, "expand", "1 1 i -> b 1 i", token)
    text = f"b s@1 i, b s@{side * side} i -> b s i"
    (y,) = writer.op(path, "sequence", OpKind.COPY, "concatenate", text, token, y, whole="s")
    positions = builder.parameter(f"{path}.position_embeddings", 1, writer.sizes["s"], hidden)
    return writer.elementwise(path, "add", "b s i, 1 s i -> b s i", y, positions)


def _classify(fields: ConfigFields, writer: TransformerWriter, x: str) -> str:
    """Logits of the class token and their loss."""
    labels = fields.values.get("id2label")
    classes = len(labels) if isinstance(labels, Mapping) else fields.size("num_labels", default=DEFAULT_CLASSES)
    attributes, sizes = {"index": 0}, {"v": classes}
    (x,) = writer.op("classifier", "first", OpKind.VIEW, "select", "b s i -> b i", x, attributes=attributes, whole="s")
    logits = writer.linear("classifier", x, "b i, v i -> b v", bias=True, sizes=sizes)
    target = writer.builder.argument("labels", (writer.sizes["b"],), Role.BATCH, DType.INT64)
    return writer.loss("loss", logits, target, "b", sizes)


def write_whisper(fields: ConfigFields, builder: GraphBuilder) -> str:
    """Whisper: an encoder over frames of sound, a decoder over tokens that reads it."""
    hidden = fields.size("d_model")
    source = fields.size("max_source_positions", default=1500)
    writer = TransformerWriter.for_config(
        fields,
        builder,
        i=hidden,
        f=fields.size("decoder_ffn_dim"),
        max_length=fields.size("max_target_positions", default=448),
    )
    sizes = {**writer.sizes, "s": source, "t": source, "f": fields.size("encoder_ffn_dim")}
    sound = TransformerWriter(builder, **sizes)
    x = _embed_sound(fields, sound, "model.encoder", source)
    x = _write_side(fields, sound, "encoder", x)
    crossed = TransformerWriter(builder, **{**writer.sizes, "t": source})
    root = "model.decoder"
    y = writer.embedding(f"{root}.embed_tokens", writer.batch("input_ids"), writer.sizes["v"])
    ids = writer.constant("positions", writer.sizes["s"])
    y = writer.positions(f"{root}.embed_positions", y, fields.size("max_target_positions", default=448), ids)
    y = writer.dropout(root, y, fields.number("dropout", 0))
    y = _write_side(fields, writer, "decoder", y, crossed, x)
    tied = fields.tied_table(f"{root}.embed_tokens.weight", True)
    return writer.head("proj_out", y, writer.batch("labels"), tied_to=tied)


def _embed_sound(fields: ConfigFields, writer: TransformerWriter, path: str, source: int) -> str:
    """Two convolutions of the spectrum, the second of which halves its length; fixed positions."""
    bands, frames, taps = fields.size("num_mel_bins", default=80), 2 * source, 3
    builder, hidden = writer.builder, writer.sizes["i"]
    x = builder.argument("input_features", (writer.sizes["b"], bands, frames), Role.BATCH)
    for name, channels, length, stride in (("conv1", bands, frames, 1), ("conv2", hidden, source, 2)):
        root = f"{path}.{name}"
        sizes = {"c": channels, "y": length, "q": taps}
        weight = builder.parameter(f"{root}.weight", hidden, channels, taps)
        text = f"b c (y q)@{frames}, i c q -> b i y"
        (x,) = writer.op(
            root,
            "",
            OpKind.CONVOLUTION,
            "convolution",
            text,
            x,
            weight,
            sizes=sizes,
            attributes={"stride": (stride,), "padding": (1,)},
        )
        bias = builder.parameter(f"{root}.bias", hidden)
        x = writer.elementwise(root, "add", "b i y, i -> b i y", x, bias, sizes=sizes)
        x = writer.activate(path, "gelu", x, "b i y", sizes)
    (x,) = writer.op(path, "frames", OpKind.VIEW, "transpose", "b i s -> b s i", x)
    ids = writer.constant("frames", source)
    x = writer.positions(f"{path}.embed_positions", x, source, ids)
    return writer.dropout(path, x, fields.number("dropout", 0))


def _write_side(
    fields: ConfigFields,
    writer: TransformerWriter,
    side: str,
    x: str,
    crossed: TransformerWriter | None = None,
    encoded: str | None = None,
) -> str:
    """The encoder, or the decoder where the encoder's result is given; `crossed` writes attention to that."""
    hidden, heads = writer.sizes["i"], fields.size(f"{side}_attention_heads")
    attention = Attention(
        heads=heads,
        head_size=fields.head_size(hidden, heads),
        is_causal=encoded is not None,
        dropout=fields.number("attention_dropout", 0),
    )
    norm, drop = partial(writer.norm, function="layer_norm"), fields.number("dropout", 0)
    activation = fields.activation("activation_function", "gelu")
    for index in range(fields.count(f"{side}_layers")):
        path = f"model.{side}.layers.{index}"
        y = norm(f"{path}.self_attn_layer_norm", x)
        attend = partial(TransformerWriter.project_and_attend, out="out_proj", bias=True, key_bias=False)
        y = attend(writer, f"{path}.self_attn", y, y, attention)
        x = writer.residual(path, x, writer.dropout(f"{path}.self_attn", y, drop))
        if crossed is not None and encoded is not None:
            y = norm(f"{path}.encoder_attn_layer_norm", x)
            y = attend(crossed, f"{path}.encoder_attn", y, encoded, replace(attention, is_causal=False))
            x = writer.residual(f"{path}.encoder_attn", x, writer.dropout(f"{path}.encoder_attn", y, drop))
        y = writer.mlp(path, norm(f"{path}.final_layer_norm", x), ("fc1", "fc2"), activation, bias=True)
        x = writer.residual(f"{path}.fc2", x, writer.dropout(path, y, drop))
    return norm(f"model.{side}.layer_norm", x)


def write_t5(fields: ConfigFields, builder: GraphBuilder) -> str:
    """T5: encoder and decoder, relative position biases made in the first block of each and shared by the others."""
    hidden = fields.size("d_model")
    writer = TransformerWriter.for_config(fields, builder, i=hidden, f=fields.size("d_ff"))
    layers = fields.count("num_layers", "num_hidden_layers")
    encoded = _write_stack(fields, writer, "encoder", layers)
    x = _write_stack(fields, writer, "decoder", fields.count("num_decoder_layers", default=layers), encoded)
    tied = fields.tied_table("shared.weight", True)
    # transformers 5 ties the logits always, and keeps in this field whether the config did.
    if tied and fields.flag("scale_decoder_outputs", True):
        x = writer.scale("lm_head", x, hidden**-0.5)
    return writer.head("lm_head", x, writer.batch("labels"), tied_to=tied)


def _write_stack(
    fields: ConfigFields, writer: TransformerWriter, root: str, layers: int, encoded: str | None = None
) -> str:
    """The encoder, or the decoder where the result of the encoder is given."""
    drop = fields.number("dropout_rate", 0.1)
    norm = partial(writer.norm, function="rms_norm", epsilon=fields.number("layer_norm_epsilon", 1e-6))
    cross_attention = Attention(
        heads=fields.size("num_heads"), head_size=fields.size("d_kv"), is_causal=False, scale=1.0, dropout=drop
    )
    self_attention = replace(cross_attention, is_causal=encoded is not None)
    attend = partial(writer.project_and_attend, names=("q", "k", "v"), out="o")
    ids = writer.batch("input_ids" if encoded is None else "decoder_input_ids")
    x = writer.embedding(f"{root}.embed_tokens", ids, writer.sizes["v"], table="shared.weight")
    x = writer.dropout(root, x, drop)
    bias = None
    for index in range(layers):
        path = f"{root}.block.{index}.layer"
        y = norm(f"{path}.0.layer_norm", x)
        bias = bias or _position_bias(fields, writer, f"{path}.0.SelfAttention", root, self_attention)
        y = attend(f"{path}.0.SelfAttention", y, y, self_attention, position_bias=bias)
        x = writer.residual(f"{path}.0", x, writer.dropout(f"{path}.0", y, drop))
        if encoded is not None:
            y = attend(f"{path}.1.EncDecAttention", norm(f"{path}.1.layer_norm", x), encoded, cross_attention)
            x = writer.residual(f"{path}.1", x, writer.dropout(f"{path}.1", y, drop))
        last = f"{path}.{1 if encoded is None else 2}"
        y = _write_feed_forward(fields, writer, f"{last}.DenseReluDense", norm(f"{last}.layer_norm", x), drop)
        x = writer.residual(last, x, writer.dropout(last, y, drop))
    x = norm(f"{root}.final_layer_norm", x)
    return writer.dropout(f"{root}.final_layer_norm", x, drop)


def _position_bias(fields: ConfigFields, writer: TransformerWriter, path: str, root: str, attention: Attention) -> str:
    """What is added to the scores of every pair of positions, by head and distance."""
    distances = writer.constant(f"{root}_distances", writer.sizes["s"], writer.sizes["t"])
    buckets = fields.size("relative_attention_num_buckets", default=32)
    table = f"{path}.relative_attention_bias"
    return writer.embedding(table, distances, buckets, "v h, s t -> h s t", sizes=attention.sizes)


def _write_feed_forward(fields: ConfigFields, writer: TransformerWriter, path: str, x: str, drop: float) -> str:
    """The MLP of a block, gated where the config says so."""
    kind = fields.text("feed_forward_proj", "relu")
    # transformers takes the GELU of 'gated-gelu' for the approximate one.
    name = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    activation = replace(fields, values={"feed_forward_proj": name}).activation("feed_forward_proj", "relu")
    first = "wi_0" if kind.startswith("gated-") else "wi"
    y = writer.linear(f"{path}.{first}", x, "b s i, f i -> b s f")
    y = writer.elementwise(path, activation, "b s f -> b s f", y)
    if kind.startswith("gated-"):
        up = writer.linear(f"{path}.wi_1", x, "b s i, f i -> b s f")
        y = writer.elementwise(path, "multiply", "b s f, b s f -> b s f", y, up)
    y = writer.dropout(path, y, drop, "b s f")
    return writer.linear(f"{path}.wo", y, "b s f, i f -> b s i")
