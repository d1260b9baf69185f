"""The training state: stored parameters, the optimizer's state and the fp32 master copy, and how they lie on the mesh.

Optimizers have the shape that optax has: `init(parameters)` and `update(gradients, state, parameters)`. They see whole
arrays; what they compute element by element runs on the shards that each device holds. Some parameters are stored in
another shape than the user's (see `parameter_storage.py`). An optimizer that asks for shapes (weight decay of matrices
only, factored moments, products) sees the user's, for which the compiler gathers fused parameters; any other sees the
stored ones (`asks_for_shapes`). `Adam` and `Sgd` are there for those who pass no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike

from phaze.backends.jax.loss_function import LossFunction, PyTree, is_nnx_module, user_parameters
from phaze.backends.jax.parameter_storage import ParameterStorage
from phaze.backends.jax.stacked_layers import LayerStacks
from phaze.backends.jax.tensor_parts import ELEMENTWISE
from phaze.backends.jax.trace_rewriting import inlined
from phaze.backends.jax.traced_loss import read_variables
from phaze.errors import PlanError

__all__ = ["Adam", "Optimizer", "Sgd", "StateLayout", "TrainState", "asks_for_shapes"]

Tree = TypeVar("Tree")


@runtime_checkable
class Optimizer(Protocol):
    """What a step needs of an optimizer; trees have the structure of the user's parameters."""

    def init(self, parameters: PyTree) -> PyTree:
        """The state before the first step: trees like that of the parameters, and scalars."""
        ...

    def update(self, gradients: PyTree, state: PyTree, parameters: PyTree) -> tuple[PyTree, PyTree]:
        """What to add to the parameters, and the next state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2).

    The decays, epsilon and learning rate are the defaults of Adam's paper (Kingma and Ba, arXiv:1412.6980).
    """

    learning_rate: float = 1e-3
    first_decay: float = 0.9
    second_decay: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def init(self, parameters: PyTree) -> Mapping[str, PyTree]:
        """Two moments and a count of steps."""
        zeros = jax.tree.map(lambda parameter: jnp.zeros(parameter.shape, jnp.float32), parameters)
        return {"count": jnp.zeros((), jnp.int32), "first": zeros, "second": jax.tree.map(jnp.copy, zeros)}

    def update(
        self, gradients: PyTree, state: Mapping[str, PyTree], parameters: PyTree
    ) -> tuple[PyTree, Mapping[str, PyTree]]:
        """What to add to the parameters, and the next moments; m, v, g, p are the paper's symbols."""
        count = state["count"] + 1
        first = jax.tree.map(lambda m, g: self.first_decay * m + (1 - self.first_decay) * g, state["first"], gradients)
        second = jax.tree.map(
            lambda v, g: self.second_decay * v + (1 - self.second_decay) * g * g, state["second"], gradients
        )
        first_scale, second_scale = 1 - self.first_decay**count, 1 - self.second_decay**count

        def change(m: jax.Array, v: jax.Array, p: jax.Array) -> jax.Array:
            step = (m / first_scale) / (jnp.sqrt(v / second_scale) + self.epsilon)
            return -self.learning_rate * (step + self.weight_decay * p)

        return jax.tree.map(change, first, second, parameters), {"count": count, "first": first, "second": second}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """Plain gradient descent: no state."""

    learning_rate: float = 1e-2
    """The usual first guess for gradient descent; who trains in earnest passes an optimizer."""

    def init(self, parameters: PyTree) -> tuple[()]:
        """The empty state."""
        return ()

    def update(self, gradients: PyTree, state: tuple[()], parameters: PyTree) -> tuple[PyTree, tuple[()]]:
        """What to add to the parameters, and the empty state."""
        return jax.tree.map(lambda gradient: -self.learning_rate * gradient, gradients), state


class TrainState(NamedTuple):
    """Parameters as they are stored, the optimizer's state, and the master copy.

    Parameters and master have the structure of the user's parameters; `master` is None where the optimizer updates the
    parameters themselves.
    """

    parameters: PyTree
    optimizer: PyTree
    master: PyTree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateLayout:
    """Where the parts of a training state lie on the mesh.

    Attributes:
        loss_function: the model, which says the structure of its parameters.
        storages: how each parameter is stored.
        user_storages: how each parameter lies on the mesh in the user's own shape.
        stacks: which parameters are stored as one.
        mesh: the plan's mesh.
        optimizer: whose state lies beside the parameters.
        sees_user_shapes: whether the optimizer sees parameters, and keeps its state, in the user's shapes.
        zero: the plan's ZeRO stage; 0 where there is nothing to divide over.
        has_stages: whether there is more than one pipeline stage.
        has_master: whether parameters are copies, in the compute type, of fp32 ones.
        compute_dtype: the type in which the loss reads parameters.
    """

    loss_function: LossFunction
    storages: tuple[ParameterStorage, ...]
    user_storages: tuple[ParameterStorage, ...]
    stacks: LayerStacks
    mesh: Mesh
    optimizer: Optimizer
    sees_user_shapes: bool
    zero: int
    has_stages: bool
    has_master: bool
    compute_dtype: DTypeLike

    def parameter_specs(self, *axes: str) -> list[PartitionSpec]:
        """What of the parameters these axes cut: the data axis cuts them in ZeRO-3 only."""
        return self._specs(self.storages, axes, has_shards=self.zero == 3)

    def user_specs(self) -> list[PartitionSpec]:
        """The specs of the parameters in the user's own shapes."""
        return self._specs(self.user_storages, self.mesh.axis_names, has_shards=self.zero == 3)

    def owned_specs(self, *axes: str) -> list[PartitionSpec]:
        """What these axes cut of gradients, master copy and whatever else belongs to a parameter."""
        return self._specs(self.storages, axes, has_shards=self.zero > 0)

    def _specs(
        self, storages: Sequence[ParameterStorage], axes: Sequence[str], *, has_shards: bool
    ) -> list[PartitionSpec]:
        cutting = [axis for axis in axes if axis != "pp" or self.has_stages]
        return [storage.partition_spec(*cutting, has_shards=has_shards) for storage in storages]

    def in_user_structure(self, leaves: Sequence[object]) -> PyTree:
        """Leaves, one for each parameter, in the structure of the user's parameters."""
        return jax.tree.unflatten(self.loss_function.structure, leaves)

    def state_specs(self) -> TrainState:
        """The spec of everything in a state."""
        owned = self.owned_specs(*self.mesh.axis_names)
        master = self.in_user_structure(owned) if self.has_master else None
        parameters = self.in_user_structure(self.parameter_specs(*self.mesh.axis_names))
        return TrainState(parameters, self._optimizer_specs(owned), master)

    def _optimizer_specs(self, owned: Sequence[PartitionSpec]) -> PyTree:
        """Specs of the optimizer's state.

        What lies in a parameter's place inside that state and has its shape is laid out like the parameter.
        """
        if self.sees_user_shapes:
            owned = self._owned_user_specs()
        storages = self.user_storages if self.sees_user_shapes else self.storages
        shapes = [storage.stored_shape for storage in storages]

        def spec(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
            number = self._parameter_at(path, tuple(leaf.shape), shapes)
            return PartitionSpec() if number is None else owned[number]

        parameters = self.in_user_structure([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
        return jax.tree_util.tree_map_with_path(spec, jax.eval_shape(self.optimizer.init, parameters))

    def _owned_user_specs(self) -> list[PartitionSpec]:
        """What belongs to a parameter, in the user's own shape."""
        return self._specs(self.user_storages, self.mesh.axis_names, has_shards=self.zero > 0)

    def _as_optimizer_sees(self, stored: PyTree) -> PyTree:
        """Stored arrays, one for each parameter, in the shapes that the optimizer sees."""
        if not self.sees_user_shapes:
            return stored
        return self.constrain(self.in_user_structure(self._owned_user_specs()), self.as_user_has_them(stored))

    def _parameter_at(
        self, path: jax.tree_util.KeyPath, shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]
    ) -> int | None:
        """The number of the parameter that something in the optimizer's state belongs to, by its path and shape.

        Optimizers nest trees of parameters at some depth: every end of the path may be a parameter's path.
        """
        numbered = jax.tree_util.tree_leaves_with_path(self.in_user_structure(range(len(shapes))))
        known = {(own_path, shapes[number]): number for own_path, number in numbered}
        ends = ((path[start:], shape) for start in range(len(path) + 1))
        return next((known[end] for end in ends if end in known), None)

    def checkpoint_shapes(self) -> TrainState:
        """Shape, type and layout of everything in a state that has the user's shapes."""
        owned = self._owned_user_specs()
        shapes = [storage.user_shape for storage in self.user_storages]
        state = jax.eval_shape(self.in_user_shapes, jax.eval_shape(self._first_state, self.loss_function.parameters))

        def laid_out(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))

        def of_optimizer(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            number = self._parameter_at(path, tuple(leaf.shape), shapes)
            return laid_out(leaf, PartitionSpec() if number is None else owned[number])

        master = None if state.master is None else jax.tree.map(laid_out, state.master, self.in_user_structure(owned))
        return TrainState(
            jax.tree.map(laid_out, state.parameters, self.in_user_structure(self.user_specs())),
            jax.tree_util.tree_map_with_path(of_optimizer, state.optimizer),
            master,
        )

    def in_user_shapes(self, state: TrainState) -> TrainState:
        """A state with everything in the shapes of the user's parameters, which every plan of the model can take."""
        return self._reshaped(state, [storage.stored_shape for storage in self.storages], self._from_stored)

    def in_stored_shapes(self, state: TrainState) -> TrainState:
        """A state in the user's shapes, as it is stored."""
        return self._reshaped(state, [storage.user_shape for storage in self.user_storages], self._to_stored)

    def _to_stored(self, values: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
        """Arrays in the user's shapes, by the numbers of their parameters, as they are stored."""
        stacked = self.stacks.stacked(values)
        return {number: self.storages[number].to_stored(value) for number, value in stacked.items()}

    def _from_stored(self, values: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
        """Stored arrays, by the numbers of their parameters, in the user's shapes."""
        storages = self.storages
        return self.stacks.unstacked(
            {n: storages[n].to_user_shape(storages[n].from_stored(value)) for n, value in values.items()}
        )

    def _reshaped(
        self,
        state: TrainState,
        shapes: Sequence[tuple[int, ...]],
        reshape: Callable[[Mapping[int, jax.Array]], dict[int, jax.Array]],
    ) -> TrainState:
        """A state with `reshape` applied to all that belongs to parameters, which have these shapes."""

        def of_parameters(tree: PyTree) -> PyTree:
            return self.in_user_structure(list(reshape(dict(enumerate(jax.tree.leaves(tree)))).values()))

        return TrainState(
            of_parameters(state.parameters),
            state.optimizer if self.sees_user_shapes else self._reshaped_optimizer(state.optimizer, shapes, reshape),
            None if state.master is None else of_parameters(state.master),
        )

    def _reshaped_optimizer(
        self,
        optimizer: PyTree,
        shapes: Sequence[tuple[int, ...]],
        reshape: Callable[[Mapping[int, jax.Array]], dict[int, jax.Array]],
    ) -> PyTree:
        """The optimizer's state, of which every tree that is like that of the parameters is reshaped."""
        leaves_with_paths, structure = jax.tree_util.tree_flatten_with_path(optimizer)
        leaves = [leaf for _, leaf in leaves_with_paths]
        # By the path to a tree that is like that of the parameters: the place of each parameter's leaf.
        trees: dict[jax.tree_util.KeyPath, dict[int, int]] = {}
        paths = jax.tree_util.tree_leaves_with_path(self.in_user_structure(range(len(shapes))))
        lengths = {number: len(path) for path, number in paths}
        for place, (path, leaf) in enumerate(leaves_with_paths):
            number = self._parameter_at(path, tuple(leaf.shape), shapes)
            if number is not None:
                trees.setdefault(path[: len(path) - lengths[number]], {})[number] = place
        for places in trees.values():
            reshaped = reshape({number: leaves[place] for number, place in places.items()})
            for number, place in places.items():
                leaves[place] = reshaped[number]
        return jax.tree.unflatten(structure, leaves)

    def constrain(self, specs: PyTree, values: Tree) -> Tree:
        """Values laid out by specs, inside a compiled function."""

        def lay_out(spec: PartitionSpec, value: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, spec))

        laid_out: Tree = jax.tree.map(lay_out, specs, values, is_leaf=_is_spec)
        return laid_out

    def shardings(self, specs: PyTree) -> PyTree:
        """Specs as shardings on the mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=_is_spec)

    def start(self, parameters: Any) -> TrainState:
        """The state before the first step, of arrays or of a function that makes them on the mesh."""
        shardings = self.shardings(self.state_specs())
        # Modules of Equinox and nnx can be called, too: a function is what JAX sees as a single leaf.
        if callable(parameters) and jax.tree_util.all_leaves([parameters]) and not is_nnx_module(parameters):
            self._read_parameters(jax.eval_shape(parameters))
            state: TrainState = jax.jit(
                lambda: self._first_state(self._read_parameters(parameters())), out_shardings=shardings
            )()
            return state
        placed = jax.device_put(self._read_parameters(parameters), self.shardings(self.user_specs()))
        started: TrainState = jax.jit(self._first_state, out_shardings=shardings)(placed)
        return started

    def _read_parameters(self, given: PyTree) -> list[jax.Array]:
        """The trained arrays of the user's parameters; raises PlanError where they are not those that were planned."""
        planned = self.loss_function
        leaves = planned.arguments.arrays_of(user_parameters(given), "the parameters have")
        for name, leaf, spec in zip(planned.names, leaves, planned.parameters, strict=True):
            if jnp.shape(leaf) != tuple(spec.shape):
                raise PlanError(f"{name} has the shape {list(jnp.shape(leaf))}; planned was {list(spec.shape)}.")
        return leaves

    def as_user_has_leaves(self, leaves: Sequence[object]) -> PyTree:
        """Leaves, one for each trained array, in the user's whole tree."""
        return self.loss_function.arguments.with_arrays(leaves)

    def with_fixed(self, parameters: PyTree) -> PyTree:
        """A tree of trained arrays together with what is not trained in the user's tree."""
        return self.as_user_has_leaves(jax.tree.leaves(parameters))

    def _first_state(self, parameters: Sequence[jax.Array]) -> TrainState:
        stored = list(self._to_stored(dict(enumerate(parameters))).values())
        exact = self.in_user_structure([value.astype(jnp.float32) for value in stored])
        cast = self.in_user_structure([value.astype(self.compute_dtype) for value in stored])
        seen = self.as_user_has_them(exact) if self.sees_user_shapes else exact
        return TrainState(cast, self.optimizer.init(seen), exact if self.has_master else None)

    def as_user_has_them(self, stored: PyTree) -> PyTree:
        """Stored arrays (parameters or gradients) in the shapes and the structure of the user's parameters."""
        return self.in_user_structure(list(self._from_stored(dict(enumerate(jax.tree.leaves(stored)))).values()))

    def updated(self, state: TrainState, gradients: Sequence[jax.Array]) -> TrainState:
        """The next state: each device updates what it owns, and parameters are gathered where they are whole.

        The optimizer sees whole arrays, so that it may also compute norms over all of them.
        """
        owned_specs, specs = self.in_user_structure(self.owned_specs(*self.mesh.axis_names)), self.state_specs()
        before = self.constrain(owned_specs, state.parameters) if state.master is None else state.master
        owned_gradients = self.constrain(owned_specs, self.in_user_structure(gradients))
        seen_gradients, seen = self._as_optimizer_sees(owned_gradients), self._as_optimizer_sees(before)
        changes, optimizer = self.optimizer.update(seen_gradients, state.optimizer, seen)
        if self.sees_user_shapes:
            changes = self.in_user_structure(list(self._to_stored(dict(enumerate(jax.tree.leaves(changes)))).values()))
        after = jax.tree.map(lambda value, change: value + change.astype(value.dtype), before, changes)
        after = self.constrain(owned_specs, after)
        cast = jax.tree.map(lambda value: value.astype(self.compute_dtype), after)
        # Laid out as owned first, so that what is gathered has the compute type and not the master's.
        parameters = self.constrain(specs.parameters, self.constrain(owned_specs, cast))
        master = None if state.master is None else after
        return TrainState(parameters, self.constrain(specs.optimizer, optimizer), master)


def asks_for_shapes(
    optimizer: Optimizer,
    storages: Sequence[ParameterStorage],
    user_storages: Sequence[ParameterStorage],
    stacks: LayerStacks,
    structure: PyTreeDef,
) -> bool:
    """Whether an optimizer does with stored shapes anything else than with the user's, in the user's tree.

    It does not where both shapes give the same equations, each of which treats all elements alike or sums up all, and
    where it treats the layers of a stack alike.
    """
    shapes = [[storage.stored_shape for storage in storages], [storage.user_shape for storage in user_storages]]
    if shapes[0] == shapes[1]:
        return False
    traces = []
    for kind in shapes:
        arrays = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in kind])
        state = jax.eval_shape(optimizer.init, arrays)
        traces.append(inlined(jax.make_jaxpr(optimizer.update)(arrays, state, arrays)))
    if _wiring(traces[0].jaxpr) != _wiring(traces[1].jaxpr) or not all(
        _treats_elements_alike(equation) for equation in traces[0].jaxpr.eqns
    ):
        return True
    return bool(stacks.stacks) and not _treats_layers_alike(traces[1], stacks, structure.num_leaves)


def _wiring(jaxpr: core.Jaxpr) -> list[tuple[str, ...]]:
    """A trace as primitives, literals and numbers of variables, whatever their shapes."""
    numbers: dict[core.Var, int] = {}

    def written(variable: core.Var | core.Literal) -> str:
        if isinstance(variable, core.Literal):
            return f"literal {variable.val}"
        return str(numbers.setdefault(variable, len(numbers)))

    arguments = tuple(written(variable) for variable in jaxpr.invars)
    equations = [
        (str(equation.primitive), *(written(variable) for variable in (*equation.invars, *equation.outvars)))
        for equation in jaxpr.eqns
    ]
    return [arguments, *equations, tuple(written(variable) for variable in jaxpr.outvars)]


def _treats_layers_alike(update: core.ClosedJaxpr, stacks: LayerStacks, count: int) -> bool:
    """Whether an update of so many parameters changes those of a stack in the same way.

    Gradients come first among its arguments, and changes among its results. How a change is made is written down with
    the layer's own gradient as such, and with sums over arrays (norms of all gradients) as the variables that they are.
    """
    makers = {variable: equation for equation in update.jaxpr.eqns for variable in equation.outvars}
    arguments = {variable: number for number, variable in enumerate(update.jaxpr.invars)}
    reads_arrays: set[core.Var] = {variable for variable in arguments if variable.aval.shape}
    for equation in update.jaxpr.eqns:
        if not reads_arrays.isdisjoint(read_variables(equation)):
            reads_arrays.update(equation.outvars)

    def written(variable: core.Var | core.Literal, own: int, known: dict[core.Var, str]) -> str:
        if isinstance(variable, core.Literal):
            return str(variable.val)
        if variable not in known:
            known[variable] = f"#{len(known)}"  # what is read twice is written down once
            equation = makers.get(variable)
            is_sum = variable.aval.shape == () and variable in reads_arrays
            if equation is None:
                number = arguments.get(variable)
                return "gradient" if number == own else "array" if variable.aval.shape else f"argument {number}"
            if is_sum:
                return f"variable {id(variable)}"
            operands = ", ".join(written(operand, own, known) for operand in equation.invars)
            return f"{equation.primitive}{equation.params}({operands})"
        return known[variable]

    changes = update.jaxpr.outvars[:count]
    return all(
        len({written(changes[number], number, {}) for number in stack}) == 1
        for stack in stacks.stacks
        if isinstance(changes[stack[0]], core.Var)
    )


def _treats_elements_alike(equation: core.JaxprEqn) -> bool:
    reads_scalars = all(variable.aval.shape == () for variable in equation.invars)
    makes_scalars = all(variable.aval.shape == () for variable in equation.outvars)
    return str(equation.primitive) in ELEMENTWISE or reads_scalars or makes_scalars


def _is_spec(value: object) -> bool:
    return isinstance(value, PartitionSpec)
