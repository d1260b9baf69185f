"""Mixtures of experts: a router, the experts that it chooses for each token, and experts that all tokens share.

Load is balanced: each expert takes ceil(tokens x experts per token / experts) tokens of every sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phaze.errors import ImportModelError
from phaze.frontends.families.config_fields import ConfigFields
from phaze.frontends.families.transformer_writer import TransformerWriter
from phaze.ir import Attribute, DType, OpKind

__all__ = ["Experts", "read_experts", "write_experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a layer.

    `size` is the MLP size of one expert. `scores` says how the router's logits become weights: `softmax` over all
    experts or `sigmoid` of each, then the chosen ones divided by their sum; or `chosen_softmax` over the chosen ones.
    Of `groups` groups of experts only the best `chosen_groups` may be chosen from. Weights are stored with the input
    dimension first where `is_input_first`. `shared` names the MLP that all tokens pass, `shared_size` is its size,
    `shared_gate` the linear map, if any, whose sigmoid weighs it.
    """

    count: int
    chosen: int
    size: int
    activation: str = "silu"
    router: str = "gate"
    scores: str = "softmax"
    groups: int = 1
    chosen_groups: int = 1
    is_input_first: bool = False
    has_bias: bool = False
    shared: str = ""
    shared_size: int = 0
    shared_gate: str = ""


def read_experts(fields: ConfigFields, *, size: int, **traits: str | int | bool) -> Experts:
    """The experts that a config names; the count and the chosen ones go by several names."""
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    count, chosen = fields.size(*counts), fields.size("num_experts_per_tok")
    if chosen > count:
        raise ImportModelError(f"{fields.where}: num_experts_per_tok is {chosen}, but there are {count} experts.")
    groups, chosen_groups = fields.size("n_group", default=1), fields.size("topk_group", default=1)
    if count % groups or chosen_groups > groups or chosen > chosen_groups * (count // groups):
        raise ImportModelError(
            f"{fields.where}: {chosen} of {count} experts cannot be chosen from topk_group={chosen_groups} of "
            f"n_group={groups} groups."
        )
    activation = fields.activation("hidden_act", "silu")
    return Experts(
        count=count,
        chosen=chosen,
        size=size,
        activation=activation,
        groups=groups,
        chosen_groups=chosen_groups,
        **traits,  # type: ignore[arg-type]
    )


def write_experts(writer: TransformerWriter, path: str, x: str, experts: Experts) -> str:
    """What the chosen experts say of each token, weighted, and what the shared one says."""
    rows = -(-writer.sizes["s"] * experts.chosen // experts.count)
    sizes = {"e": experts.count, "k": experts.chosen, "c": rows, "u": 2, "f": experts.size}
    weights, ids = _route(writer, f"{path}.{experts.router}", x, experts, sizes)
    text, experts_path = "b s i, b s k -> e b c i", f"{path}.experts"
    (y,) = writer.op(experts_path, "dispatch", OpKind.LOOKUP, "dispatch", text, x, ids, sizes=sizes, lookup="s k")
    y = _run_experts(writer, experts_path, y, experts, sizes)
    text = "e b c i, b s k, b s k -> b s i"
    (y,) = writer.op(
        experts_path, "combine", OpKind.LOOKUP, "combine", text, y, weights, ids, sizes=sizes, lookup="e c"
    )
    return y if not experts.shared else _add_shared(writer, path, x, y, experts)


def _run_experts(writer: TransformerWriter, path: str, x: str, experts: Experts, sizes: Mapping[str, int]) -> str:
    """A gated MLP in each expert, on the rows that came to it.

    What gpt-oss does besides (it clamps gate and up, and adds 1 to up) is left out, and so is that Llama 4 weighs what
    goes into an expert, not what comes out of it: neither changes sizes or products.
    """
    # gpt-oss interleaves the columns of gate and up, the others put one after the other.
    both = "(f u)" if experts.has_bias else "(u f)"
    up_text = f"e i {both}" if experts.is_input_first else f"e {both} i"
    down_text = "e f i" if experts.is_input_first else "e i f"
    y = _expert_matmul(writer, path, "gate_up_proj", x, f"e b c i, {up_text} -> e b c u f", sizes)
    if experts.has_bias:
        y = _add_bias(writer, path, "gate_up_proj_bias", y, "e b c u f", f"e {both}", sizes)
    gate, up = writer.split(path, y, "e b c u f -> e b c f, e b c f", ("gate", "up"), "u", sizes=sizes)
    gate = writer.activate(path, experts.activation, gate, "e b c f", sizes)
    y = writer.elementwise(path, "multiply", "e b c f, e b c f -> e b c f", gate, up, sizes=sizes)
    y = _expert_matmul(writer, path, "down_proj", y, f"e b c f, {down_text} -> e b c i", sizes)
    if experts.has_bias:
        y = _add_bias(writer, path, "down_proj_bias", y, "e b c i", "e i", sizes)
    return y


def _expert_matmul(writer: TransformerWriter, path: str, name: str, x: str, text: str, sizes: Mapping[str, int]) -> str:
    rule = writer.builder.rule(text, {**writer.sizes, **sizes})
    weight = writer.builder.parameter(f"{path}.{name}", *rule.shape(rule.operands[1]))
    return writer.builder.add(f"{path}.{name}.matmul", OpKind.CONTRACTION, "einsum", rule, (x, weight), module=path)[0]


def _add_bias(
    writer: TransformerWriter, path: str, name: str, x: str, dims: str, bias: str, sizes: Mapping[str, int]
) -> str:
    rule = writer.builder.rule(f"{dims}, {bias} -> {dims}", {**writer.sizes, **sizes})
    parameter = writer.builder.parameter(f"{path}.{name}", *rule.shape(rule.operands[1]))
    return writer.builder.add(f"{path}.{name}.add", OpKind.ELEMENTWISE, "add", rule, (x, parameter), module=path)[0]


def _add_shared(writer: TransformerWriter, path: str, x: str, y: str, experts: Experts) -> str:
    """What all tokens pass, added to what the chosen experts say."""
    sizes = {"f": experts.shared_size}
    shared = writer.gated_mlp(f"{path}.{experts.shared}", x, experts.activation, sizes=sizes)
    if experts.shared_gate:
        gate_path = f"{path}.{experts.shared_gate}"
        gate = writer.linear(gate_path, x, "b s i, o i -> b s o", sizes={"o": 1})
        gate = writer.elementwise(gate_path, "sigmoid", "b s o -> b s o", gate, sizes={"o": 1})
        shared = writer.elementwise(gate_path, "multiply", "b s i, b s 1 -> b s i", shared, gate)
    return writer.elementwise(path, "add", "b s i, b s i -> b s i", y, shared, name="with_shared")


def _route(writer: TransformerWriter, path: str, x: str, experts: Experts, sizes: Mapping[str, int]) -> tuple[str, str]:
    """Weights of the chosen experts, and which they are."""
    scores = writer.linear(path, x, "b s i, e i -> b s e", bias=experts.has_bias, sizes=sizes)
    if experts.scores == "softmax":
        scores = _softmax(writer, path, scores, "e", sizes)
    elif experts.scores == "sigmoid":
        scores = writer.elementwise(path, "sigmoid", "b s e -> b s e", scores, sizes=sizes)
    attributes: dict[str, Attribute] = {}
    if experts.groups > 1:
        attributes = {"groups": experts.groups, "chosen_groups": experts.chosen_groups}
    weights, ids = writer.op(
        path,
        "top_k",
        OpKind.SORT,
        "top_k",
        "b s e -> b s k, b s k",
        scores,
        sizes=sizes,
        dtypes=(writer.builder.dtype, DType.INT64),
        results=("ids",),
        attributes=attributes,
        whole="e k",
    )
    if experts.scores == "chosen_softmax":
        return _softmax(writer, path, weights, "k", sizes), ids
    (total,) = writer.op(path, "total", OpKind.REDUCTION, "sum", "b s k -> b s", weights, sizes=sizes)
    return writer.elementwise(path, "divide", "b s k, b s -> b s k", weights, total, sizes=sizes), ids


def _softmax(writer: TransformerWriter, path: str, x: str, over: str, sizes: Mapping[str, int]) -> str:
    text = f"b s {over} -> b s {over}"
    return writer.op(path, "softmax", OpKind.SOFTMAX, "softmax", text, x, sizes=sizes, normalized=over)[0]
