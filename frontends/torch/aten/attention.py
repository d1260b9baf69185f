"""Fused attention: whatever kernel torch chose for the capture, the IR's attention op."""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.torch.call import Call, Shape, Unsupported, Value
from phaze.ir import Dim, Dims, Factor, FactorKind, OpKind, Rule

__all__ = ["ATTENTION"]


class _Shapes:
    """query[b, h, s, d], key[b, g, t, d], value[b, g, t, e]: h is g, or (g r) where query heads share a key."""

    def __init__(self, query: Shape, key: Shape, value: Shape) -> None:
        if len(query) != 4 or len(key) != 4 or query[1] % key[1]:
            raise Unsupported
        self.sizes = {"b": query[0], "g": key[1], "r": query[1] // key[1], "s": query[2], "d": query[3]}
        self.sizes |= {"t": key[2], "e": value[3]}
        heads = Dim(("g", "r")) if self.sizes["r"] > 1 else Dim(("g",))
        b, g = Dim(("b",)), Dim(("g",))
        self.query: Dims = (b, heads, Dim(("s",)), Dim(("d",)))
        self.key: Dims = (b, g, Dim(("t",)), Dim(("d",)))
        self.value: Dims = (b, g, Dim(("t",)), Dim(("e",)))
        self.context: Dims = (b, heads, Dim(("s",)), Dim(("e",)))
        self.statistics: Dims = (b, heads, Dim(("s",)))

    def mask(self, shape: Shape) -> Dims:
        """A mask broadcast over the scores."""
        scores = (self.query[0], self.query[1], self.query[2], self.key[2])
        aligned = scores[len(scores) - len(shape) :]
        return tuple(dim if size != 1 else Dim() for size, dim in zip(shape, aligned, strict=True))

    def rule(self, operands: tuple[Dims, ...], results: tuple[Dims, ...]) -> Rule:
        names = {name for dims in (*operands, *results) for dim in dims for name in dim.factors}
        kinds = {"t": FactorKind.NORMALIZED}
        factors = (Factor(n, s, kinds.get(n, FactorKind.FREE)) for n, s in self.sizes.items() if n in names)
        return Rule(operands, results, tuple(factors))


def _shapes(call: Call) -> tuple[_Shapes, tuple[str, ...]]:
    inputs = (call.tensor("query"), call.tensor("key"), call.tensor("value"))
    return _Shapes(*(call.shape(tensor_id) for tensor_id in inputs)), inputs


def _forward(call: Call) -> Value:
    shapes, inputs = _shapes(call)
    operands: tuple[Dims, ...] = (shapes.query, shapes.key, shapes.value)
    mask = call.optional("attn_mask") or call.optional("attn_bias")
    if mask is not None and not call.is_constant(mask):  # kernels apply a mask known beforehand without reading it
        inputs += (mask,)
        operands += (shapes.mask(call.shape(mask)),)
    sizes = shapes.sizes
    heads = sizes["g"] * sizes["r"]
    has_statistics = len(call.outputs) > 1 and call.out_shape(1) == (sizes["b"], heads, sizes["s"])
    results = (shapes.context, shapes.statistics) if has_statistics else (shapes.context,)
    return call.emit(
        OpKind.ATTENTION, "attention", shapes.rule(operands, results), *inputs, outputs=range(len(results))
    )


def _backward(call: Call) -> Value:
    shapes, inputs = _shapes(call)
    reads: tuple[str, ...] = (*inputs, call.tensor("out"), call.tensor("grad_out", "grad_out_"))
    operands: tuple[Dims, ...] = (shapes.query, shapes.key, shapes.value, shapes.context, shapes.context)
    statistics = call.optional("logsumexp")
    if statistics is not None and len(call.shape(statistics)) == 3:
        reads, operands = (*reads, statistics), (*operands, shapes.statistics)
    results = (shapes.query, shapes.key, shapes.value)
    return call.emit(OpKind.ATTENTION, "attention_backward", shapes.rule(operands, results), *reads, outputs=(0, 1, 2))


_KERNELS = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)

ATTENTION: dict[str, Callable[[Call], Value]] = {
    **dict.fromkeys(_KERNELS, _forward),
    "scaled_dot_product_attention": _forward,
    **{f"{name}_backward": _backward for name in _KERNELS},
}
