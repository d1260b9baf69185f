"""Tensors that are seen with one dimension as two, (parts, part), because the tensor axis cuts every part of it.

The columns of a fused projection are query, key and value side by side, and each device has its heads of all three. No
sharding says so of one dimension, but one of two does. So a parameter that is stored like this, and what is made with
it, keep that view through elementwise equations and broadcasts until a split, a slice or a reshape takes the parts from
each other. Any other equation sees the tensor flat, for which the compiler must gather it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phaze.backends.jax.traced import run_equation

__all__ = ["ELEMENTWISE", "View", "apart", "joined", "with_views"]


ELEMENTWISE = frozenset(
    {
        *("abs", "add", "add_any", "convert_element_type", "copy", "div", "erf", "exp", "integer_pow", "log"),
        *("logistic", "max", "min", "mul", "neg", "rsqrt", "select_n", "sqrt", "sub", "tanh"),
    }
)


@dataclass(frozen=True, slots=True)
class View:
    """The dimension, as the trace has it, that is seen as (parts, part)."""

    dim: int
    parts: int


def apart(value: Any, dim: int | None, parts: int) -> Any:
    """A flat tensor as a view."""
    assert dim is not None
    return value.reshape(*value.shape[:dim], parts, -1, *value.shape[dim + 1 :])


def joined(value: Any, dim: int) -> Any:
    """A view as the flat tensor."""
    return value.reshape(*value.shape[:dim], -1, *value.shape[dim + 2 :])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Viewing:
    """An equation of which some operands are views; `form` says what becomes of them."""

    equation: Any
    views: tuple[View | None, ...]
    form: str

    @property
    def invars(self) -> list[Any]:
        """Those of the equation."""
        return list(self.equation.invars)

    @property
    def outvars(self) -> list[Any]:
        """Those of the equation."""
        return list(self.equation.outvars)

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """The equation on views."""
        view = next(view for view in self.views if view is not None)
        match self.form:
            case "elementwise":
                return run_equation(self.equation, operands)
            case "broadcast":
                return [self._broadcast(operands[0], view)]
            case "split":
                return [one.squeeze(view.dim) for one in _pieces(operands[0], view)]
            case "slice":
                first = self.equation.params["start_indices"][view.dim] // self._part(view)
                return [_pieces(operands[0], view)[first].squeeze(view.dim)]
            case "reshape":
                return [operands[0].reshape(self.equation.params["new_sizes"])]
        flat = [
            value if own is None else joined(value, own.dim) for value, own in zip(operands, self.views, strict=True)
        ]
        return run_equation(self.equation, flat)

    def _part(self, view: View) -> int:
        return int(self.equation.invars[0].aval.shape[view.dim]) // view.parts

    def _broadcast(self, value: Any, view: View) -> Any:
        import jax

        dims, shape = self.equation.params["broadcast_dimensions"], list(self.equation.params["shape"])
        at = dims[view.dim]
        shape[at : at + 1] = [view.parts, shape[at] // view.parts]
        moved = [dim + (dim > at) for dim in dims]
        moved.insert(view.dim + 1, at + 1)
        return jax.lax.broadcast_in_dim(value, tuple(shape), tuple(moved))


def _pieces(value: Any, view: View) -> list[Any]:
    import jax

    return [jax.lax.slice_in_dim(value, at, at + 1, axis=view.dim) for at in range(view.parts)]


def with_views(equations: Sequence[Any], viewed: Mapping[Any, View]) -> list[Any]:
    """The equations behind those that make the viewed variables, each knowing which of its operands are views."""
    from jax.extend import core

    views, found = dict(viewed), []
    for equation in equations:
        own = tuple(None if isinstance(v, core.Literal) else views.get(v) for v in equation.invars)
        if not views or all(view is None for view in own):
            found.append(equation)
            continue
        form, result = _form(equation, own) if hasattr(equation, "primitive") else ("flat", None)
        if result is not None:
            views[equation.outvars[0]] = result
        found.append(_Viewing(equation=equation, views=own, form=form))
    return found


def _form(equation: Any, own: Sequence[View | None]) -> tuple[str, View | None]:
    """What an equation makes of views, and the view of its result if that is one."""
    name, params, (view, *_) = str(equation.primitive), equation.params, [one for one in own if one is not None]
    shape, made = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    part = max((v.aval.shape[one.dim] for v, one in zip(equation.invars, own, strict=True) if one), default=0)
    part //= view.parts
    is_even = all(one == view or v.aval.shape == () for one, v in zip(own, equation.invars, strict=True))
    if name in ELEMENTWISE and is_even:
        return "elementwise", view
    if name == "broadcast_in_dim" and made[params["broadcast_dimensions"][view.dim]] == part * view.parts:
        return "broadcast", View(params["broadcast_dimensions"][view.dim], view.parts)
    if name == "split" and params["axis"] == view.dim and params["sizes"] == (part,) * view.parts:
        return "split", None
    if name == "slice" and params["strides"] is None and _is_one_part(params, view, part, shape):
        return "slice", None
    if name == "reshape" and params["dimensions"] is None and _keeps_parts(shape, params["new_sizes"], view, part):
        return "reshape", None
    return "flat", None


def _is_one_part(params: Mapping[str, Any], view: View, part: int, shape: Sequence[int]) -> bool:
    starts, limits = params["start_indices"], params["limit_indices"]
    rest = [dim for dim in range(len(shape)) if dim != view.dim]
    is_whole = all(starts[dim] == 0 and limits[dim] == shape[dim] for dim in rest)
    return is_whole and starts[view.dim] % part == 0 and limits[view.dim] - starts[view.dim] == part


def _keeps_parts(shape: Sequence[int], sizes: Sequence[int], view: View, part: int) -> bool:
    """Whether a reshape leaves what is in front alone, then has the parts, then divides one part."""
    before, after = tuple(shape[: view.dim]), math.prod(shape[view.dim + 1 :])
    behind = math.prod(sizes[view.dim + 1 :])
    return tuple(sizes[: view.dim]) == before and sizes[view.dim] == view.parts and behind == part * after
