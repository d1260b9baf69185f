"""Tensor parallelism: products with split parameters, and where their partial sums are reduced, gathered or scattered.

Left alone, the compiler reduces a partial sum behind every single product, also behind three products whose sum is
wanted in backward. Here each device multiplies its own parts, and sums where the plan sums. Products that read one
activation with parameters split along what they make (columns) run together: the activation enters whole, and the sum
of its gradients is taken once. A product over the dimension along which the parameter is split (rows) is summed right
behind it. With sequence parallelism, column products gather the activation and row products scatter their sum. A fused
parameter is joined on every device, and what is made with it is seen as separate parts (see `tensor_parts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
from jax.extend import core
from jax.sharding import PartitionSpec

from phaze.backends.jax.tensor_parts import (
    ALONG_ONE,
    ELEMENTWISE,
    MOVES,
    FusedView,
    join_parts,
    separate_parts,
    with_fused_views,
)
from phaze.backends.jax.traced_loss import Equation, primitive_name, read_variables, run_equation

__all__ = ["vectors_to_gather", "with_exchanged_tiles", "with_tensor_parallel_products"]

_SEQUENCE_DIM = 1
"""Activations between layers are (samples, sequence, ...)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SplitProduct:
    """A dot product of an activation and a parameter that the tensor axis splits.

    Attributes:
        equation: the product in the trace.
        weight: which operand the parameter is, 0 or 1.
        weight_dim: the dimension of the parameter that is split.
        activation_dim: the dimension of the activation that is split with it; None where the activation is whole.
        result_dim: the dimension of the result that is split; None where each device has a partial sum.
        parts: how many parts are fused in the split dimension of parameter and result, seen as (parts, part).
    """

    equation: core.JaxprEqn
    weight: int
    weight_dim: int
    activation_dim: int | None
    result_dim: int | None
    parts: int = 1

    @property
    def activation_variable(self) -> core.Var:
        """The variable of the operand that is no parameter."""
        return self.equation.invars[1 - self.weight]

    @property
    def weight_variable(self) -> core.Var:
        """The variable of the parameter."""
        return self.equation.invars[self.weight]

    def multiply(self, activation: jax.Array, weight: jax.Array) -> jax.Array:
        """The product of this device's parts."""
        flat = weight if self.parts == 1 else join_parts(weight, self.weight_dim)
        (result,) = run_equation(self.equation, (activation, flat) if self.weight == 1 else (flat, activation))
        return result if self.parts == 1 else separate_parts(result, self.result_dim, self.parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ProductsOfOneActivation:
    """Products that read one activation, run together on every device of the tensor axis.

    Attributes:
        products: several with column-split parameters, or a single one.
        gathers: whether the activation enters split along the sequence and is gathered.
        scatters: whether partial sums leave split along the sequence.
        cuts: whether the activation is whole, and each device takes its part of it. Left alone, the compiler would
            split what the activation is made of as well, and gather it elsewhere.
    """

    products: tuple[_SplitProduct, ...]
    gathers: bool
    scatters: bool
    cuts: bool = False

    @property
    def invars(self) -> list[core.Var]:
        """The activation, then the parameters."""
        return [self.products[0].activation_variable, *(product.weight_variable for product in self.products)]

    @property
    def outvars(self) -> list[core.Var]:
        """The result of each product."""
        return [product.equation.outvars[0] for product in self.products]

    def run(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The results of all products.

        Backward is written out: what forward sums is not summed again there, and what forward gathers is not kept.
        """

        def forward(*given: jax.Array) -> list[jax.Array]:
            return self._on_every_device(self._forward, given, self._operand_specs, self._result_specs)

        run = jax.custom_vjp(forward)
        run.defvjp(
            lambda *given: (forward(*given), given),
            lambda kept, gradients: tuple(self._operand_gradients(kept, gradients)),
        )
        activation, *weights = operands
        if self.cuts:
            activation = jax.lax.with_sharding_constraint(activation, PartitionSpec())
        return list(run(activation, *weights))

    def _operand_gradients(self, kept: Sequence[jax.Array], gradients: Sequence[jax.Array]) -> list[jax.Array]:
        given = (*kept, *gradients)
        # The barrier stops the compiler from keeping what forward gathered, instead of gathering it again.
        given = jax.lax.optimization_barrier(given) if self.gathers else given
        entering = [*self._operand_specs, *self._result_specs]
        return self._on_every_device(self._backward, given, entering, self._operand_specs)

    def _on_every_device(
        self,
        work: Callable[..., list[jax.Array]],
        operands: Sequence[jax.Array],
        entering: Sequence[PartitionSpec],
        leaving: Sequence[PartitionSpec],
    ) -> list[jax.Array]:
        """A function of local parts, run on every device of the tensor axis."""
        mapped = jax.shard_map(
            work, in_specs=tuple(entering), out_specs=list(leaving), axis_names={"tp"}, check_vma=False
        )
        return list(mapped(*operands))

    @property
    def _operand_specs(self) -> list[PartitionSpec]:
        activation_dim = _SEQUENCE_DIM if self.gathers else self.products[0].activation_dim
        return [
            _tp_spec(self.products[0].activation_variable, activation_dim),
            *(_tp_spec(product.weight_variable, product.weight_dim, product.parts) for product in self.products),
        ]

    @property
    def _result_specs(self) -> list[PartitionSpec]:
        return [
            _tp_spec(variable, _SEQUENCE_DIM if self.scatters else product.result_dim, product.parts)
            for variable, product in zip(self.outvars, self.products, strict=True)
        ]

    def _forward(self, activation: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        whole = _gather_sequence(activation) if self.gathers else activation
        pairs = zip(self.products, weights, strict=True)
        return [self._reduced(product, product.multiply(whole, weight)) for product, weight in pairs]

    def _reduced(self, product: _SplitProduct, result: jax.Array) -> jax.Array:
        if product.result_dim is not None:
            return result
        return _scatter_sequence(result) if self.scatters else jax.lax.psum(result, "tp")

    def _backward(self, activation: jax.Array, *rest: jax.Array) -> list[jax.Array]:
        weights, gradients = rest[: len(self.products)], rest[len(self.products) :]
        whole = _gather_sequence(activation) if self.gathers else activation
        activation_gradient, weight_gradients = None, []
        for product, weight, gradient in zip(self.products, weights, gradients, strict=True):
            whole_gradient = _gather_sequence(gradient) if self.scatters else gradient
            _, pull_back = jax.vjp(product.multiply, whole, weight)
            of_activation, of_weight = pull_back(whole_gradient)
            is_first = activation_gradient is None
            activation_gradient = of_activation if is_first else activation_gradient + of_activation
            weight_gradients.append(of_weight)
        if self.products[0].activation_dim is None:
            reduce = _scatter_sequence if self.gathers else lambda partial: jax.lax.psum(partial, "tp")
            activation_gradient = reduce(activation_gradient)
        return [activation_gradient, *weight_gradients]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _CollectiveOnParts:
    """A collective of another axis on a tensor that the tensor axis cuts along `dim`, run on each of its devices.

    The compiler would make the tensor whole along that axis first.
    """

    equation: core.JaxprEqn
    dim: int

    @property
    def invars(self) -> list[core.Var]:
        """The tensor."""
        return list(self.equation.invars)

    @property
    def outvars(self) -> list[core.Var]:
        """What the collective makes of it."""
        return list(self.equation.outvars)

    def run(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """What the collective makes of it."""
        collective = jax.shard_map(
            lambda part: run_equation(self.equation, [part])[0],
            in_specs=_tp_spec(self.invars[0], self.dim),
            out_specs=_tp_spec(self.outvars[0], self.dim),
            axis_names={"tp"},
            check_vma=False,
        )
        return [collective(*operands)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _WholeResult:
    """An equation whose result every device of the tensor axis has whole.

    Left alone, the compiler makes the scores of experts in parts, because each device has some experts, and gathers
    them for the choice of the largest, whose gradients it gathers as well.
    """

    equation: core.JaxprEqn

    @property
    def invars(self) -> list[core.Var]:
        """The variables that the equation reads."""
        return list(self.equation.invars)

    @property
    def outvars(self) -> list[core.Var]:
        """The variables that it makes."""
        return list(self.equation.outvars)

    def run(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The equation's results, whole."""
        results = run_equation(self.equation, operands)
        return [jax.lax.with_sharding_constraint(result, PartitionSpec()) for result in results]


_CHOICES = frozenset({"argmax", "sort", "top_k"})
"""Primitives that choose experts."""


def with_exchanged_tiles(equations: Sequence[Equation]) -> list[Equation]:
    """The equations, of which exchanges of rows of experts are run on the tiles of every device of the tensor axis.

    The rows have dimensions (owner, ..., tile, owner, expert, ...), of which one of the two owners counts devices and
    the other one is 1, and the exchange makes it the other way round. The scores by which experts are chosen are whole.
    """
    choices = [equation for equation in equations if primitive_name(equation) in _CHOICES]
    chosen_from = {variable for equation in choices for variable in read_variables(equation)}
    exchanged: list[Equation] = []
    for equation in equations:
        if not isinstance(equation, core.JaxprEqn):
            exchanged.append(equation)
        elif primitive_name(equation) == "all_to_all":
            tiles = max(equation.params["split_axis"], equation.params["concat_axis"]) - 1
            exchanged.append(_CollectiveOnParts(equation=equation, dim=tiles))
        elif primitive_name(equation) in ELEMENTWISE and not chosen_from.isdisjoint(equation.outvars):
            exchanged.append(_WholeResult(equation=equation))
        else:
            exchanged.append(equation)
    return exchanged


def _gathers_of_parts(
    equations: Sequence[Equation], products: Sequence[_SplitProduct], tp: int
) -> list[_CollectiveOnParts]:
    """The gathers of keys and values over the devices of a sequence, whose heads the tensor axis cuts."""
    made = {product.equation.outvars[0]: product.result_dim for product in products if product.parts == 1}
    dims = {variable: dim for variable, dim in made.items() if dim is not None}
    gathers = []
    for equation in equations:
        followed = _dim_behind(equation, dims, tp) if isinstance(equation, core.JaxprEqn) else None
        if followed is not None and equation.outvars[0] not in made:
            dims[equation.outvars[0]] = followed
            if isinstance(equation, core.JaxprEqn) and primitive_name(equation) == "all_gather":
                gathers.append(_CollectiveOnParts(equation=equation, dim=followed))
    return gathers


def _dim_behind(equation: core.JaxprEqn, dims: Mapping[core.Var, int], tp: int) -> int | None:
    """The dimension of a result that the tensor axis cuts, given those of activations; None where none surely is."""
    name, result = primitive_name(equation), equation.outvars[0].aval.shape
    cut = [variable for variable in read_variables(equation) if variable in dims]
    if not cut:
        return None
    dim = dims[cut[0]]
    if name in ELEMENTWISE:
        is_kept = all(dims[variable] == dim and variable.aval.shape == result for variable in cut)
        return dim if is_kept else None
    if name in MOVES:
        move = MOVES[name](equation, dim, tp)
        return None if move is None else move[0]
    if name in ALONG_ONE:
        return dim if equation.params[ALONG_ONE[name]] != dim else None
    return dim if name == "all_gather" and equation.params["all_gather_dimension"] != dim else None


def _gather_sequence(value: jax.Array) -> jax.Array:
    return jax.lax.all_gather(value, "tp", axis=_SEQUENCE_DIM, tiled=True)


def _scatter_sequence(value: jax.Array) -> jax.Array:
    return jax.lax.psum_scatter(value, "tp", scatter_dimension=_SEQUENCE_DIM, tiled=True)


def _tp_spec(variable: core.Var, dim: int | None, parts: int = 1) -> PartitionSpec:
    """The tensor axis cuts this dimension of a variable; where it is seen as (parts, part), the second of them."""
    axes = ["tp" if index == dim else None for index in range(len(variable.aval.shape))]
    if parts > 1 and dim is not None:
        axes.insert(dim, None)
    return PartitionSpec(*axes)


def with_tensor_parallel_products(
    equations: Sequence[Equation],
    split_dims: Mapping[core.Var, int],
    tp: int,
    sequence_split_shapes: frozenset[tuple[int, ...]],
    fused_views: Mapping[core.Var, FusedView],
) -> list[Equation]:
    """The equations, of which the products of split parameters are run by hand on every device.

    Args:
        equations: those of the whole loss, or of one layer.
        split_dims: the dimension of each parameter that the tensor axis cuts evenly.
        tp: the number of devices of the tensor axis.
        sequence_split_shapes: the shapes of activations that are split along the sequence between layers.
        fused_views: the fused parameters.
    """
    cut, weight_views = dict(split_dims), dict(fused_views)
    viewed = dict(fused_views)
    columns: dict[core.Var, list[_SplitProduct]] = {}
    rows: list[_SplitProduct] = []
    split_activations: set[core.Var] = set()
    cutting: set[int] = set()
    for equation in equations:
        _follow_split(equation, cut)
        if primitive_name(equation) == "convert_element_type" and equation.invars[0] in weight_views:
            weight_views[equation.outvars[0]] = weight_views[equation.invars[0]]
        product = _split_product(equation, cut, tp) or _fused_product(equation, weight_views)
        is_split = not split_activations.isdisjoint(read_variables(equation))
        if product is None:
            split_activations.update(equation.outvars if is_split else ())
            continue
        split_activations.update(equation.outvars if product.result_dim is not None else ())
        if product.parts > 1:
            viewed[equation.outvars[0]] = FusedView(product.result_dim or 0, product.parts)
        if product.activation_dim is None:
            columns.setdefault(product.activation_variable, []).append(product)
        else:
            rows.append(product)
            cutting |= set() if is_split or product.result_dim is not None else {id(equation)}
    by_hand = [
        _ProductsOfOneActivation(
            products=tuple(group),
            gathers=tuple(activation.aval.shape) in sequence_split_shapes,
            scatters=False,
        )
        for activation, group in columns.items()
    ]
    for row in rows:
        shape = tuple(row.equation.outvars[0].aval.shape)
        scatters = row.result_dim is None and shape in sequence_split_shapes
        cuts = id(row.equation) in cutting
        by_hand.append(_ProductsOfOneActivation(products=(row,), gathers=False, scatters=scatters, cuts=cuts))
    gathers = _gathers_of_parts(equations, [product for group in by_hand for product in group.products], tp)
    replaced = {id(product.equation) for group in by_hand for product in group.products}
    replaced |= {id(gather.equation) for gather in gathers}
    others = [equation for equation in equations if id(equation) not in replaced]
    return [*with_fused_views(others, viewed), *gathers, *by_hand]


def _fused_product(equation: Equation, fused_views: Mapping[core.Var, FusedView]) -> _SplitProduct | None:
    """The equation as a product with a fused parameter whose split dimension is one of the result."""
    product = _split_product(equation, {variable: view.dim for variable, view in fused_views.items()}, 1)
    if product is None or product.result_dim is None or product.activation_dim is not None:
        return None
    return replace(product, parts=fused_views[product.weight_variable].parts)


def vectors_to_gather(
    equations: Sequence[Equation], split_dims: Mapping[core.Var, int], tp: int, *, with_routers: bool = False
) -> set[core.Var]:
    """Split vectors (biases, scales) that meet whole activations only, and so split routers of experts if asked.

    Left alone, the compiler may split such an activation like the vector and gather the activation afterwards; the
    vector is smaller. So is a router: each of its devices would have a part of the gradient of every token, which is
    gathered, and a partial sum of all scores.
    """
    cut, to_gather = dict(split_dims), set[core.Var]()
    # Each variable that is made of a split vector alone, with that vector.
    vectors = {variable: variable for variable in split_dims if len(variable.aval.shape) == 1}
    split_activations: set[core.Var] = set()
    for equation in equations:
        _follow_split(equation, cut)
        product = _split_product(equation, cut, tp)
        inputs = read_variables(equation)
        read_vectors = {vectors[variable] for variable in inputs if variable in vectors}
        other_inputs = [variable for variable in inputs if variable not in vectors]
        if product is not None:
            is_split = product.result_dim is not None
            weight, activation = product.weight_variable, product.activation_variable
            is_cut = product.activation_dim is not None and not is_split and activation not in split_activations
            if with_routers and is_cut and weight in split_dims and weight.aval.size < activation.aval.size:
                to_gather.add(weight)
        elif read_vectors and not other_inputs:
            vectors |= {variable: next(iter(read_vectors)) for variable in equation.outvars}
            continue
        else:
            is_split = any(variable in split_activations for variable in other_inputs)
        if is_split:
            split_activations.update(equation.outvars)
        else:
            to_gather |= read_vectors
    return to_gather


def _follow_split(equation: Equation, cut: dict[core.Var, int]) -> None:
    """Add the result of a transpose or a change of type of a split parameter: it is split as well."""
    if not isinstance(equation, core.JaxprEqn) or not equation.invars:
        return
    source = equation.invars[0]
    if isinstance(source, core.Literal) or source not in cut:
        return
    if primitive_name(equation) == "convert_element_type":
        cut[equation.outvars[0]] = cut[source]
    elif primitive_name(equation) == "transpose":
        cut[equation.outvars[0]] = list(equation.params["permutation"]).index(cut[source])


def _split_product(equation: Equation, cut: Mapping[core.Var, int], tp: int) -> _SplitProduct | None:
    """The equation as a product with one split parameter; None for anything else."""
    if not isinstance(equation, core.JaxprEqn) or primitive_name(equation) != "dot_general":
        return None
    if len(read_variables(equation)) != 2:
        return None
    sides = [side for side in (0, 1) if equation.invars[side] in cut]
    if len(sides) != 1:
        return None
    (weight,) = sides
    weight_dim = cut[equation.invars[weight]]
    if equation.invars[weight].aval.shape[weight_dim] % tp:
        return None
    activation_dim, result_dim = _dims_split_with(equation, weight, weight_dim)
    return _SplitProduct(
        equation=equation,
        weight=weight,
        weight_dim=weight_dim,
        activation_dim=activation_dim,
        result_dim=result_dim,
    )


def _dims_split_with(equation: core.JaxprEqn, weight: int, weight_dim: int) -> tuple[int | None, int | None]:
    """The dimensions of the activation and of the result that a split of the parameter's dimension splits."""
    activation = 1 - weight
    contracted, batched = equation.params["dimension_numbers"]
    if weight_dim in contracted[weight]:
        return contracted[activation][contracted[weight].index(weight_dim)], None
    if weight_dim in batched[weight]:
        place = batched[weight].index(weight_dim)
        return batched[activation][place], place
    ranks = [len(variable.aval.shape) for variable in equation.invars]
    taken_dims = {*contracted[weight], *batched[weight]}
    free_dims = [dim for dim in range(ranks[weight]) if dim not in taken_dims]
    free_activation_dims = ranks[activation] - len(contracted[activation]) - len(batched[activation])
    # A dot's result has the batched dimensions first, then the free ones of its first and of its second operand.
    return None, len(batched[0]) + (free_activation_dims if weight == 1 else 0) + free_dims.index(weight_dim)
