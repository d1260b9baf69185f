"""What a training step takes and returns, and how all of it lies on the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from phaze.backends.jax.models import Model
from phaze.backends.jax.optimizers import Optimizer
from phaze.backends.jax.stored import Stored
from phaze.errors import PlanError

if TYPE_CHECKING:
    from jax.sharding import Mesh, PartitionSpec

__all__ = ["StateLayout", "TrainState"]


class TrainState(NamedTuple):
    """Parameters as they are stored, the optimizer's state, and the master copy.

    Parameters and master have the structure of the user's; `master` is None where the optimizer updates the parameters
    themselves.
    """

    parameters: Any
    optimizer: Any
    master: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateLayout:
    """Where the parts of a state lie.

    Attributes:
        zero: the plan's ZeRO stage; 0 where there is one copy.
        is_staged: whether there is more than one stage.
        has_master: whether parameters are copies, in the compute type, of fp32 ones.
    """

    model: Model
    stored: tuple[Stored, ...]
    mesh: Mesh
    optimizer: Optimizer
    zero: int
    is_staged: bool
    has_master: bool
    compute_dtype: Any

    def parameters(self, *, tensor: str = "tp") -> list[PartitionSpec]:
        """Specs of the parameters; without a name for the tensor axis, of what one device of it sees as manual."""
        return [how.spec(data="dp" if self.zero == 3 else "", stages=self.stages, tensor=tensor) for how in self.stored]

    def owned(self, *, tensor: str = "tp") -> list[PartitionSpec]:
        """Specs of gradients, master copy and what else belongs to a parameter."""
        return [how.spec(data="dp" if self.zero else "", stages=self.stages, tensor=tensor) for how in self.stored]

    @property
    def stages(self) -> str:
        """The name of the pipeline's axis where it cuts anything."""
        return "pp" if self.is_staged else ""

    def tree(self, leaves: Sequence[Any]) -> Any:
        """Leaves in the structure of the user's parameters."""
        import jax

        return jax.tree.unflatten(self.model.tree, leaves)

    def specs(self) -> TrainState:
        """The spec of everything in a state."""
        owned = self.owned()
        master = self.tree(owned) if self.has_master else None
        return TrainState(self.tree(self.parameters()), self._of_optimizer(owned), master)

    def _of_optimizer(self, specs: Sequence[PartitionSpec]) -> Any:
        """What lies in a parameter's place inside the optimizer's state and has its shape is laid out as it is."""
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec

        shapes = [jax.ShapeDtypeStruct(how.stored_shape, jnp.float32) for how in self.stored]
        places = [path for path, _ in jax.tree_util.tree_leaves_with_path(self.tree(range(len(shapes))))]
        known = {(path, one.shape): spec for path, one, spec in zip(places, shapes, specs, strict=True)}

        def spec(path: Any, leaf: Any) -> PartitionSpec:
            ends = ((path[start:], tuple(leaf.shape)) for start in range(len(path) + 1))
            return next((known[end] for end in ends if end in known), PartitionSpec())

        return jax.tree_util.tree_map_with_path(spec, jax.eval_shape(self.optimizer.init, self.tree(shapes)))

    def placed(self, specs: Any, values: Any) -> Any:
        """Values laid out by specs, inside a compiled function."""
        import jax
        from jax.sharding import NamedSharding

        def place(spec: PartitionSpec, value: Any) -> Any:
            return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, spec))

        return jax.tree.map(place, specs, values, is_leaf=_is_spec)

    def shardings(self, specs: Any) -> Any:
        """Specs as shardings on the mesh."""
        import jax
        from jax.sharding import NamedSharding

        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=_is_spec)

    def start(self, parameters: Any) -> TrainState:
        """The state before the first step, of arrays or of a function that makes them on the mesh."""
        import jax

        make = parameters if callable(parameters) else None
        self._check(jax.eval_shape(make) if make else parameters)
        shardings = self.shardings(self.specs())
        if make:
            state: TrainState = jax.jit(lambda: self._fresh(make()), out_shardings=shardings)()
        else:
            state = jax.jit(self._fresh, out_shardings=shardings)(parameters)
        return state

    def _check(self, parameters: Any) -> None:
        import jax
        import jax.numpy as jnp

        leaves, tree = jax.tree.flatten(parameters)
        if tree != self.model.tree:
            raise PlanError(f"the parameters have the structure {tree}; planned were {self.model.tree}.")
        for name, leaf, spec in zip(self.model.names, leaves, self.model.parameters, strict=True):
            if jnp.shape(leaf) != tuple(spec.shape):
                raise PlanError(f"{name} has the shape {list(jnp.shape(leaf))}; planned was {list(spec.shape)}.")

    def _fresh(self, parameters: Any) -> TrainState:
        import jax
        import jax.numpy as jnp

        stored = [how.stored(leaf) for how, leaf in zip(self.stored, jax.tree.leaves(parameters), strict=True)]
        exact = self.tree([value.astype(jnp.float32) for value in stored])
        cast = self.tree([value.astype(self.compute_dtype) for value in stored])
        return TrainState(cast, self.optimizer.init(exact), exact if self.has_master else None)

    def seen(self, tree: Any) -> Any:
        """Stored arrays as the user has them."""
        import jax

        leaves = jax.tree.leaves(tree)
        return self.tree([how.unviewed(how.seen(value)) for how, value in zip(self.stored, leaves, strict=True)])

    def updated(self, state: TrainState, gradients: Sequence[Any]) -> TrainState:
        """The next state: each device updates what it owns, and parameters are gathered where they are whole.

        The optimizer sees whole arrays, so that it may also compute norms over all of them.
        """
        import jax

        owned_specs, specs = self.tree(self.owned()), self.specs()
        owned = self.placed(owned_specs, state.parameters) if state.master is None else state.master
        own = self.placed(owned_specs, self.tree(gradients))
        changes, optimizer = self.optimizer.update(own, state.optimizer, owned)
        after = jax.tree.map(lambda value, change: value + change.astype(value.dtype), owned, changes)
        after = self.placed(owned_specs, after)
        cast = jax.tree.map(lambda value: value.astype(self.compute_dtype), after)
        parameters = self.placed(specs.parameters, self.placed(owned_specs, cast))
        master = None if state.master is None else after
        return TrainState(parameters, self.placed(specs.optimizer, optimizer), master)


def _is_spec(value: object) -> bool:
    from jax.sharding import PartitionSpec

    return isinstance(value, PartitionSpec)
