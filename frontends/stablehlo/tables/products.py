"""Matrix products and convolutions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from phaze.frontends.stablehlo.call import Call, Values
from phaze.frontends.stablehlo.values import Shape, Unsupported
from phaze.ir import Dim, Dims, Factor, OpKind, Rule
from phaze.ir.shape_rules import contraction_rule

__all__ = ["PRODUCTS"]

_LAYOUT = re.compile(r"\[([\w, ?]*)\]x\[([\w, ?]*)\]->\[([\w, ?]*)\]")


def _dot_general(call: Call) -> Values:
    numbers = call.attribute("dot_dimension_numbers") or {}
    if not isinstance(numbers, dict):
        numbers = {}
    batch = tuple(tuple(numbers.get(f"{side}_batching_dimensions", ())) for side in ("lhs", "rhs"))
    contracted = tuple(tuple(numbers.get(f"{side}_contracting_dimensions", ())) for side in ("lhs", "rhs"))
    return _contraction(call, (batch[0], batch[1]), (contracted[0], contracted[1]))


def _dot(call: Call) -> Values:
    """Vectors and matrices: the last dimension of the left meets the first of the right."""
    return _contraction(call, ((), ()), ((len(call.shape(0)) - 1,), (0,)))


def _contraction(call: Call, batch: tuple[Shape, Shape], contracted: tuple[Shape, Shape]) -> Values:
    try:
        rule = contraction_rule(call.shape(0), call.shape(1), batch=batch, contracted=contracted)
    except (ValueError, IndexError):
        raise Unsupported from None
    return call.emit(OpKind.CONTRACTION, "einsum", rule, call.id(0), call.id(1))


class _Layout:
    """Where batch and features (inputs and outputs of a kernel) and positions stand, such as `b, 0, 1, f`."""

    def __init__(self, text: str) -> None:
        words = [word.strip() for word in text.split(",")]
        self.batch = words.index("b" if "b" in words else "i")
        self.feature = words.index("f" if "f" in words else "o")
        self.spatial = [words.index(str(n)) for n in range(len(words) - 2)]

    def dims(self, batch: Dim, feature: Dim, spatial: list[Dim]) -> Dims:
        """Dimensions in this order."""
        found: dict[int, Dim] = {self.batch: batch, self.feature: feature}
        found |= dict(zip(self.spatial, spatial, strict=True))
        return tuple(found[index] for index in range(len(found)))


def _convolution(call: Call) -> Values:
    """x, kernel -> y for any order of dimensions.

    A dilated x has zeros between its elements, which are multiplied with nothing: it is the gradient of a convolution
    with strides, and its loop runs over the positions of x.
    """
    text = call.attribute("dimension_numbers")
    match = _LAYOUT.search(text["text"] if isinstance(text, dict) else str(text))
    if not match:
        raise Unsupported
    x, kernel, y = (_Layout(part) for part in match.groups())
    groups, batch_groups = (int(call.attribute(f"{n}_group_count") or 1) for n in ("feature", "batch"))
    shapes = call.shape(0), call.shape(1), call.out_shape()
    dilation = _optional(call, "lhs_dilation", len(x.spatial))
    is_dilated = math.prod(dilation) > 1
    sizes = {
        "b": shapes[0][x.batch] // batch_groups,
        "g": groups,
        "h": batch_groups,
        "i": shapes[1][kernel.batch],
        "o": shapes[1][kernel.feature] // (groups * batch_groups),
    }
    windows, positions, taps = [], [], []
    for n in range(len(x.spatial)):
        small, large = shapes[0][x.spatial[n]], shapes[2][y.spatial[n]]
        sizes |= {f"p{n}": small if is_dilated else large, f"k{n}": shapes[1][kernel.spatial[n]]}
        whole, part = Dim((f"p{n}", f"k{n}"), large if is_dilated else small), Dim((f"p{n}",))
        windows.append(part if is_dilated else whole)
        positions.append(whole if is_dilated else part)
        taps.append(Dim((f"k{n}",)))
    outputs = tuple(n for n in ("g", "h") if sizes[n] > 1)
    operand = x.dims(
        Dim(("h", "b") if batch_groups > 1 else ("b",)), Dim(("g", "i") if groups > 1 else ("i",)), windows
    )
    weight = kernel.dims(Dim(("i",)), Dim((*outputs, "o")), taps)
    result = y.dims(Dim(("b",)), Dim((*outputs, "o")), positions)
    used = {name for dims in (operand, weight, result) for dim in dims for name in dim.factors}
    factors = tuple(Factor(name, size) for name, size in sizes.items() if name in used)
    return call.emit(
        OpKind.CONVOLUTION,
        "convolution_input" if is_dilated else "convolution",
        Rule((operand, weight), (result,), factors),
        call.id(0),
        call.id(1),
    )


def _optional(call: Call, name: str, count: int) -> Shape:
    return call.integers(name) if call.attribute(name) is not None else (1,) * count


PRODUCTS: dict[str, Callable[[Call], Values]] = {
    "dot_general": _dot_general,
    "dot": _dot,
    "convolution": _convolution,
}
