"""The Mamba families written out: selective state spaces, as transformers computes them without fused kernels.

Mamba keeps the states of all positions, which a fused kernel would compute again; what comes out of the states counts
as a sum of products, not as matmul flops. Mamba-2 works in chunks of positions:
products inside of each chunk, and a product over chunks that carries the states on. Dimensions beside the usual ones:
c inner channels, n state size, q taps of the convolution, p head size, h heads, l and m positions of a chunk,
x and y chunks (the state before the first one counts as one), a groups of heads that share B and C.
"""

from __future__ import annotations

from functools import partial

from phaze.errors import ImportModelError
from phaze.frontends.families.config_fields import ConfigFields
from phaze.frontends.families.transformer_writer import TransformerWriter
from phaze.ir import GraphBuilder, OpKind

__all__ = ["write_mamba", "write_mamba2"]


def write_mamba(fields: ConfigFields, builder: GraphBuilder) -> str:
    """Mamba: a state of n numbers for every channel, scanned over the positions."""
    hidden = fields.size("hidden_size")
    inner = fields.size("intermediate_size", default=hidden * fields.size("expand", default=2))
    writer = TransformerWriter.for_config(
        fields, builder, i=hidden, c=inner, n=fields.size("state_size", default=16), r=_time_step_rank(fields, hidden)
    )
    return _write_stack(fields, writer, partial(_write_mixer, fields, writer))


def write_mamba2(fields: ConfigFields, builder: GraphBuilder) -> str:
    """Mamba-2: heads of p channels, each with a state of p x n numbers, in chunks of positions."""
    hidden = fields.size("hidden_size")
    heads, size = fields.size("num_heads", default=128), fields.size("head_dim", default=64)
    if heads * size != hidden * fields.size("expand", default=2):
        raise ImportModelError(
            f"{fields.where}: num_heads={heads} of head_dim={size} are not expand x hidden_size="
            f"{hidden * fields.size('expand', default=2)} channels."
        )
    groups = fields.size("n_groups", default=8)
    if heads % groups:
        raise ImportModelError(f"{fields.where}: {heads} heads cannot share n_groups={groups}: not a multiple.")
    chunk = fields.size("chunk_size", default=256)
    sizes = {"h": heads, "p": size, "n": fields.size("state_size", default=128), "a": groups, "r": heads // groups}
    writer = TransformerWriter.for_config(fields, builder, i=hidden, l=chunk, m=chunk, **sizes)
    if writer.sizes["s"] % chunk:
        raise ImportModelError(
            f"{fields.where} works in chunks of {chunk} positions; pass a sequence_length that is a multiple of it."
        )
    chunks = writer.sizes["s"] // chunk
    writer.sizes |= {"x": chunks, "y": chunks + 1, "w": chunks + 1}
    return _write_stack(fields, writer, partial(_write_chunked_mixer, fields, writer))


def _write_stack(fields: ConfigFields, writer: TransformerWriter, mix: partial[str]) -> str:
    norm = partial(writer.norm, function="rms_norm", epsilon=fields.number("layer_norm_epsilon", 1e-5))
    x = writer.embedding("backbone.embeddings", writer.batch("input_ids"), writer.sizes["v"])
    for index in range(fields.count("num_hidden_layers")):
        path = f"backbone.layers.{index}"
        x = writer.residual(path, x, mix(f"{path}.mixer", norm(f"{path}.norm", x)))
    is_tied = fields.text("model_type", "mamba") == "mamba"
    tied = fields.tied_table("backbone.embeddings.weight", is_tied)
    return writer.head("lm_head", norm("backbone.norm_f", x), writer.batch("labels"), tied_to=tied)


def _time_step_rank(fields: ConfigFields, hidden: int) -> int:
    if fields.values.get("time_step_rank") in (None, "auto"):
        return -(-hidden // 16)
    return fields.size("time_step_rank")


def _write_mixer(fields: ConfigFields, writer: TransformerWriter, path: str, x: str) -> str:
    bias, sizes = fields.flag("use_bias", False), {"u": 2}
    y = writer.linear(f"{path}.in_proj", x, "b s i, (u c) i -> b s u c", bias=bias, sizes=sizes)
    x, gate = writer.split(path, y, "b s u c -> b s c, b s c", ("x", "gate"), "u", sizes=sizes)
    x = _convolve(fields, writer, path, x)
    rank, states = writer.sizes["r"], writer.sizes["n"]
    both = rank + 2 * states
    y = writer.linear(f"{path}.x_proj", x, "b s c, o c -> b s o", sizes={"o": both})
    step = writer.slice(path, y, f"b s r@{both} -> b s r", 0)
    into, out_of = (writer.slice(path, y, f"b s n@{both} -> b s n", rank + at) for at in (0, states))
    step = writer.linear(f"{path}.dt_proj", step, "b s r, c r -> b s c", bias=True)
    step = writer.elementwise(path, "softplus", "b s c -> b s c", step)
    decay = _negative_exp(writer, path, "c n")
    decay = writer.elementwise(path, "multiply", "b s c, c n -> b s c n", step, decay)
    decay = writer.elementwise(path, "exp", "b s c n -> b s c n", decay)
    y = writer.elementwise(path, "multiply", "b s c, b s c -> b s c", step, x)
    y = writer.elementwise(path, "multiply", "b s c, b s n -> b s c n", y, into)
    text = "b s c n, b s c n -> b s c n"
    (y,) = writer.op(path, "states", OpKind.ELEMENTWISE, "linear_scan", text, decay, y, whole="s")
    y = writer.elementwise(path, "multiply", "b s c n, b s n -> b s c n", y, out_of)
    (y,) = writer.op(path, "out_of_states", OpKind.REDUCTION, "sum", "b s c n -> b s c", y)
    skip = writer.builder.parameter(f"{path}.D", writer.sizes["c"])
    skipped = writer.elementwise(path, "multiply", "b s c, c -> b s c", x, skip)
    y = writer.elementwise(path, "add", "b s c, b s c -> b s c", y, skipped)
    gate = writer.elementwise(path, "silu", "b s c -> b s c", gate)
    y = writer.elementwise(path, "multiply", "b s c, b s c -> b s c", y, gate)
    return writer.linear(f"{path}.out_proj", y, "b s c, i c -> b s i", bias=bias)


def _negative_exp(writer: TransformerWriter, path: str, dims: str) -> str:
    """-exp(A_log): how fast states decay."""
    logs = writer.builder.parameter(f"{path}.A_log", *(writer.sizes[name] for name in dims.split()))
    return writer.elementwise(
        path, "negative", f"{dims} -> {dims}", writer.elementwise(path, "exp", f"{dims} -> {dims}", logs)
    )


def _convolve(
    fields: ConfigFields, writer: TransformerWriter, path: str, x: str, sizes: dict[str, int] | None = None
) -> str:
    """Every channel with itself at the last few positions, and an activation."""
    taps, length = fields.size("conv_kernel", default=4), writer.sizes["s"]
    sizes = {**writer.sizes, **(sizes or {}), "q": taps, "o": 1}
    weight = writer.builder.parameter(f"{path}.conv1d.weight", sizes["c"], 1, taps)
    text, attributes = f"b (s q)@{length} c, c o q -> b s c", {"padding": (taps - 1,)}
    (y,) = writer.op(
        f"{path}.conv1d", "", OpKind.CONVOLUTION, "convolution", text, x, weight, sizes=sizes, attributes=attributes
    )
    if fields.flag("use_conv_bias", True):
        bias = writer.builder.parameter(f"{path}.conv1d.bias", sizes["c"])
        y = writer.elementwise(f"{path}.conv1d", "add", "b s c, c -> b s c", y, bias, sizes=sizes)
    return writer.activate(path, fields.activation("hidden_act", "silu"), y, "b s c", sizes)


def _write_chunked_mixer(fields: ConfigFields, writer: TransformerWriter, path: str, x: str) -> str:
    bias, sizes = fields.flag("use_bias", False), writer.sizes
    heads, shared = sizes["h"] * sizes["p"], sizes["a"] * sizes["n"]
    channels = heads + 2 * shared
    rows = heads + channels + sizes["h"]
    y = writer.linear(f"{path}.in_proj", x, "b s i, o i -> b s o", bias=bias, sizes={"o": rows})
    gate = writer.slice(path, y, f"b s (h p)@{rows} -> b s (h p)", 0)
    x = writer.slice(path, y, f"b s c@{rows} -> b s c", heads, {"c": channels})
    step = writer.slice(path, y, f"b s h@{rows} -> b s h", heads + channels)
    y = _convolve(fields, writer, path, x, {"c": channels})
    x = writer.slice(path, y, f"b s (h p)@{channels} -> b s (h p)", 0)
    into, out_of = (writer.slice(path, y, f"b s (a n)@{channels} -> b s (a n)", heads + at) for at in (0, shared))
    step_bias = writer.builder.parameter(f"{path}.dt_bias", sizes["h"])
    step = writer.elementwise(path, "add", "b s h, h -> b s h", step, step_bias)
    step = writer.elementwise(path, "softplus", "b s h -> b s h", step)
    y = _scan_chunks(writer, path, x, step, into, out_of)
    skip = writer.builder.parameter(f"{path}.D", sizes["h"])
    skipped = writer.elementwise(path, "multiply", "b s (h p), h -> b s (h p)", x, skip)
    y = writer.elementwise(path, "add", "b (x l) h p, b (x l) (h p) -> b (x l) (h p)", y, skipped)
    gate = writer.elementwise(path, "silu", "b s (h p) -> b s (h p)", gate)
    y = writer.elementwise(path, "multiply", "b s (h p), b s (h p) -> b s (h p)", y, gate)
    epsilon = fields.number("layer_norm_epsilon", 1e-5)
    y = writer.norm(f"{path}.norm", y, "rms_norm", epsilon=epsilon, dims="b s (h p)", over="(h p)")
    return writer.linear(f"{path}.out_proj", y, "b s (h p), i (h p) -> b s i", bias=bias)


def _scan_chunks(writer: TransformerWriter, path: str, x: str, step: str, into: str, out_of: str) -> str:
    """What the states give at every position: from inside its chunk, and from the chunks before."""
    grow = partial(writer.elementwise, path)
    contract = partial(writer.op, path, "product", OpKind.CONTRACTION, "einsum")
    decay = grow("multiply", "b s h, h -> b s h", step, _negative_exp(writer, path, "h"))
    text = "b (x l) h -> b x l h"
    (total,) = writer.op(path, "decay", OpKind.ELEMENTWISE, "cumulative_sum", text, decay, whole="l")
    x = grow("multiply", "b (x l) (h p), b (x l) h -> b x l h p", x, step)
    # The reference repeats what heads share before it multiplies.
    into, out_of = (
        writer.op(path, "repeated", OpKind.VIEW, "expand", "b (x l) (a n) -> b x l a r n", part)[0]
        for part in (into, out_of)
    )
    (square,) = contract("b x l a r n, b x m a r n -> b x a r l m", out_of, into)
    spread = grow("subtract", "b x l (a r), b x m (a r) -> b x a r l m", total, total)
    mask = writer.constant(f"{path}.mask", writer.sizes["l"], writer.sizes["m"], dtype=writer.builder.dtype)
    spread = grow("add", "b x a r l m, l m -> b x a r l m", spread, mask)
    spread = grow("exp", "b x a r l m -> b x a r l m", spread)
    square = grow("multiply", "b x a r l m, b x a r l m -> b x a r l m", square, spread)
    (inside,) = contract("b x a r l m, b x m (a r) p -> b x l a r p", square, x)
    rest = grow("exp", "b x l (a r) -> b x l a r", total)
    weighed = grow("multiply", "b x l a r n, b x l a r -> b x l a r n", into, rest)
    (states,) = contract("b x l a r n, b x l (a r) p -> b x a r n p", weighed, x)
    carried = _carry_states(writer, path, total, states)
    (before,) = contract("b x l a r n, b x a r n p -> b x l a r p", out_of, carried)
    before = grow("multiply", "b x l a r p, b x l a r -> b x l a r p", before, rest)
    return grow("add", "b x l a r p, b x l a r p -> b (x l) (a r) p", inside, before)


def _carry_states(writer: TransformerWriter, path: str, total: str, states: str) -> str:
    """The state that each chunk starts from: a product over all chunks and the empty state before them."""
    chunks = writer.sizes["x"]
    text = "b x l (a r) -> b (a r) x"
    attributes = {"index": writer.sizes["l"] - 1}
    (last,) = writer.op(path, "last", OpKind.VIEW, "select", text, total, attributes=attributes, whole="l")
    text, attributes = f"b h y@{chunks} -> b h y", {"start": 1}
    (last,) = writer.op(path, "padded", OpKind.COPY, "pad", text, last, attributes=attributes, whole="y")
    (last,) = writer.op(path, "total", OpKind.ELEMENTWISE, "cumulative_sum", "b h y -> b h y", last, whole="y")
    spread = writer.elementwise(path, "subtract", "b h y, b h w -> b h y w", last, last)
    spread = writer.elementwise(path, "exp", "b h y w -> b h y w", spread)
    text = f"b w@{chunks} a r n p -> b w a r n p"
    (states,) = writer.op(path, "padded", OpKind.COPY, "pad", text, states, attributes={"start": 1}, whole="w")
    text = "b (a r) y w, b w a r n p -> b y a r n p"
    (carried,) = writer.op(path, "carried", OpKind.CONTRACTION, "einsum", text, spread, states)
    return writer.slice(path, carried, f"b x@{chunks + 1} a r n p -> b x a r n p", 0)
