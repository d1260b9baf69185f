"""Products with split parameters, laid open: each device multiplies its own parts, and sums where the plan sums.

Left alone, the compiler settles a partial sum behind every single product, also behind three whose sum is wanted in
backward. Here products that read one activation with parameters split along what they make (columns) run together: the
activation enters whole, and the sum of its gradients is taken once. A product over what the parameter is split along
(rows) is summed right behind it. Where activations between layers are split along the sequence, the first gather them
and the second scatter their sum. A parameter that is stored as a view (see `stored.py`) is flattened on every device,
and what is made with it is seen as the same view (see `views.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from phaze.backends.jax.traced import run_equation
from phaze.backends.jax.views import View, apart, joined, with_views

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

__all__ = ["vectors_of_whole", "with_open_products"]

_SEQUENCE_DIM = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Product:
    """One dot with a split parameter: which operand that is, and the dimensions that the tensor axis cuts.

    `parts` is how many parts lie side by side in the parameter's and in the result's dimension, seen as (parts, part).
    """

    equation: Any
    weight: int
    weight_dim: int
    activation_dim: int | None
    result_dim: int | None
    parts: int = 1

    @property
    def activation(self) -> Any:
        """The other operand."""
        return self.equation.invars[1 - self.weight]

    def multiply(self, activation: Any, weight: Any) -> Any:
        """The product of parts."""
        flat = weight if self.parts == 1 else joined(weight, self.weight_dim)
        (result,) = run_equation(self.equation, (activation, flat) if self.weight == 1 else (flat, activation))
        return result if self.parts == 1 else apart(result, self.result_dim, self.parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Open:
    """Products of one activation on every device of the tensor axis."""

    products: tuple[_Product, ...]
    gathers: bool
    scatters: bool

    @property
    def invars(self) -> list[Any]:
        """The activation, then the parameters."""
        return [self.products[0].activation, *(one.equation.invars[one.weight] for one in self.products)]

    @property
    def outvars(self) -> list[Any]:
        """What each product makes."""
        return [one.equation.outvars[0] for one in self.products]

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """All products.

        Backward is written out: what is summed in forward is not summed again there, and what is gathered is not kept.
        """
        import jax

        run = jax.custom_vjp(lambda *given: self._everywhere(self._forward, given, self._entering, self._leaving))
        run.defvjp(
            lambda *given: (self._everywhere(self._forward, given, self._entering, self._leaving), given),
            lambda kept, gradients: tuple(self._pull(kept, gradients)),
        )
        return list(run(*operands))

    def _pull(self, kept: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Gradients of the operands; the compiler must not keep what forward gathered instead of gathering it again."""
        import jax

        given = (*kept, *gradients)
        given = jax.lax.optimization_barrier(given) if self.gathers else given
        return self._everywhere(self._backward, given, [*self._entering, *self._leaving], self._entering)

    def _everywhere(self, work: Any, operands: Sequence[Any], entering: Any, leaving: Any) -> list[Any]:
        """A function of local parts on every device of the tensor axis."""
        import jax

        mapped = jax.shard_map(
            work, in_specs=tuple(entering), out_specs=list(leaving), axis_names={"tp"}, check_vma=False
        )
        return list(mapped(*operands))

    @property
    def _entering(self) -> list[PartitionSpec]:
        activation = _spec(self.invars[0], _SEQUENCE_DIM if self.gathers else self.products[0].activation_dim)
        pairs = zip(self.invars[1:], self.products, strict=True)
        return [activation, *(_spec(v, one.weight_dim, one.parts) for v, one in pairs)]

    @property
    def _leaving(self) -> list[PartitionSpec]:
        pairs = zip(self.outvars, self.products, strict=True)
        return [_spec(v, _SEQUENCE_DIM if self.scatters else one.result_dim, one.parts) for v, one in pairs]

    def _forward(self, activation: Any, *weights: Any) -> list[Any]:
        import jax

        whole = _gather(activation) if self.gathers else activation
        made = [one.multiply(whole, weight) for one, weight in zip(self.products, weights, strict=True)]
        return [
            result if one.result_dim is not None else _scatter(result) if self.scatters else jax.lax.psum(result, "tp")
            for one, result in zip(self.products, made, strict=True)
        ]

    def _backward(self, activation: Any, *rest: Any) -> list[Any]:
        import jax

        weights, gradients = rest[: len(self.products)], rest[len(self.products) :]
        whole = _gather(activation) if self.gathers else activation
        total, found = None, []
        for one, weight, gradient in zip(self.products, weights, gradients, strict=True):
            own = _gather(gradient) if self.scatters else gradient
            _, pull = jax.vjp(one.multiply, whole, weight)
            of_activation, of_weight = pull(own)
            total = of_activation if total is None else total + of_activation
            found.append(of_weight)
        if self.products[0].activation_dim is None:
            total = _scatter(total) if self.gathers else jax.lax.psum(total, "tp")
        return [total, *found]


def _gather(value: Any) -> Any:
    import jax

    return jax.lax.all_gather(value, "tp", axis=_SEQUENCE_DIM, tiled=True)


def _scatter(value: Any) -> Any:
    import jax

    return jax.lax.psum_scatter(value, "tp", scatter_dimension=_SEQUENCE_DIM, tiled=True)


def _spec(variable: Any, dim: int | None, parts: int = 1) -> PartitionSpec:
    """The dimension of a variable that is cut; where it is seen as (parts, part), the second of them."""
    from jax.sharding import PartitionSpec

    names = ["tp" if index == dim else None for index in range(len(variable.aval.shape))]
    if parts > 1 and dim is not None:
        names.insert(dim, None)
    return PartitionSpec(*names)


def with_open_products(
    equations: Sequence[Any],
    split: Mapping[Any, int],
    ways: int,
    sequence_shapes: frozenset[tuple[int, ...]],
    views: Mapping[Any, View] | None = None,
) -> list[Any]:
    """The equations with products of split parameters laid open.

    `split` gives the dimension of each parameter that the tensor axis cuts (evenly); `sequence_shapes` those of
    activations that are split along the sequence between layers; `views` those parameters that are seen as such.
    """
    cut, views = dict(split), dict(views or {})
    viewed = dict(views)
    columns: dict[Any, list[_Product]] = {}
    rows: list[_Product] = []
    for equation in equations:
        _follow(equation, cut)
        if str(getattr(equation, "primitive", "")) == "convert_element_type" and equation.invars[0] in views:
            views[equation.outvars[0]] = views[equation.invars[0]]
        product = _product(equation, cut, ways) or _viewed_product(equation, views)
        if product is None:
            continue
        if product.parts > 1:
            viewed[equation.outvars[0]] = View(product.result_dim or 0, product.parts)
        if product.activation_dim is None:
            columns.setdefault(product.activation, []).append(product)
        else:
            rows.append(product)
    opened = [
        _Open(
            products=tuple(group),
            gathers=tuple(group[0].activation.aval.shape) in sequence_shapes,
            scatters=False,
        )
        for group in columns.values()
    ]
    for row in rows:
        shape = tuple(row.equation.outvars[0].aval.shape)
        opened.append(
            _Open(products=(row,), gathers=False, scatters=row.result_dim is None and shape in sequence_shapes)
        )
    taken = {id(product.equation) for one in opened for product in one.products}
    return [*with_views([one for one in equations if id(one) not in taken], viewed), *opened]


def _viewed_product(equation: Any, views: Mapping[Any, View]) -> _Product | None:
    """A product with a parameter that is seen as a view of what it makes."""
    found = _product(equation, {v: view.dim for v, view in views.items()}, 1)
    if found is None or found.result_dim is None or found.activation_dim is not None:
        return None
    return replace(found, parts=views[equation.invars[found.weight]].parts)


def vectors_of_whole(equations: Sequence[Any], split: Mapping[Any, int], ways: int) -> set[Any]:
    """Split vectors (biases, scales) that only meet activations which are not: these are to be gathered, not those."""
    cut, found = dict(split), set[Any]()
    vectors = {v: v for v in split if len(v.aval.shape) == 1}
    activations: set[Any] = set()
    for equation in equations:
        _follow(equation, cut)
        product = _product(equation, cut, ways)
        inputs = [v for v in equation.invars if not hasattr(v, "val")]
        own = {vectors[v] for v in inputs if v in vectors}
        others = [v for v in inputs if v not in vectors]
        if product is not None:
            is_split = product.result_dim is not None
        elif own and not others:
            vectors |= {v: next(iter(own)) for v in equation.outvars}
            continue
        else:
            is_split = any(v in activations for v in others)
        if is_split:
            activations.update(equation.outvars)
        else:
            found |= own
    return found


def _follow(equation: Any, cut: dict[Any, int]) -> None:
    """Parameters stay split through transposes and changes of type."""
    from jax.extend import core

    name = str(getattr(equation, "primitive", ""))
    source = equation.invars[0] if equation.invars else None
    if isinstance(source, core.Literal) or source not in cut:
        return
    if name == "convert_element_type":
        cut[equation.outvars[0]] = cut[source]
    elif name == "transpose":
        cut[equation.outvars[0]] = list(equation.params["permutation"]).index(cut[source])


def _product(equation: Any, cut: Mapping[Any, int], ways: int) -> _Product | None:
    """The equation as a product with one split parameter; None for anything else."""
    from jax.extend import core

    if str(getattr(equation, "primitive", "")) != "dot_general":
        return None
    sides = [side for side in (0, 1) if not isinstance(equation.invars[side], core.Literal)]
    weights = [side for side in sides if equation.invars[side] in cut]
    if len(weights) != 1 or len(sides) != 2:
        return None
    (weight,) = weights
    other, dim = 1 - weight, cut[equation.invars[weight]]
    contracted, batched = equation.params["dimension_numbers"]
    activation_dim = result_dim = None
    if dim in contracted[weight]:
        activation_dim = contracted[other][contracted[weight].index(dim)]
    elif dim in batched[weight]:
        place = batched[weight].index(dim)
        activation_dim, result_dim = batched[other][place], place
    else:
        ranks = [len(equation.invars[side].aval.shape) for side in (0, 1)]
        free = [d for d in range(ranks[weight]) if d not in contracted[weight] and d not in batched[weight]]
        others = ranks[other] - len(contracted[other]) - len(batched[other])
        result_dim = len(batched[0]) + (others if weight == 1 else 0) + free.index(dim)
    sizes = [equation.invars[weight].aval.shape[dim]]
    return (
        None
        if any(size % ways for size in sizes)
        else _Product(
            equation=equation, weight=weight, weight_dim=dim, activation_dim=activation_dim, result_dim=result_dim
        )
    )
