"""A plan applied to a JAX model: its mesh, the layout of its parameters, and a compiled training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaze.backends.jax.losses import Arrangement
from phaze.backends.jax.meshes import mesh_of
from phaze.backends.jax.models import Model, read_model
from phaze.backends.jax.optimizers import Adam, Optimizer, Sgd
from phaze.backends.jax.segments import layer_numbers
from phaze.backends.jax.steps import StepRules, TrainState, local_gradients, local_step
from phaze.backends.jax.stored import Stored, store
from phaze.backends.jax.traced import Traced, trace
from phaze.errors import PlanError, shown
from phaze.imports import import_graph
from phaze.ir import Graph, RecomputeMode
from phaze.plan import Plan, SplitDim
from phaze.planner.belongs import differences

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = ["Applied", "apply_plan_to"]

MANUAL = frozenset({"pp", "dp"})
OPTIONS = ("inputs", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Applied:
    """A model arranged on a mesh.

    Attributes:
        mesh: axes pp, dp, tp, all automatic.
        specs: a PartitionSpec for every parameter, in the structure of the user's.
        shardings: the same as NamedShardings.
        step: `step(state, *batch) -> (state, loss)`, compiled at its first call; the old state is given up.
        gradients: `gradients(state, *batch) -> (loss, gradients)`, these as the user has parameters.
    """

    mesh: Mesh
    specs: Any
    shardings: Any
    step: Callable[..., Any]
    gradients: Callable[..., Any]
    _start: Callable[[Any], TrainState]
    _parameters: Callable[[TrainState], Any]

    def start(self, parameters: Any) -> TrainState:
        """The state before the first step: parameters laid out as planned, and the optimizer's state beside them."""
        return self._start(parameters)

    def parameters(self, state: TrainState) -> Any:
        """The parameters of a state as the user has them."""
        return self._parameters(state)


def apply_plan_to(plan: Plan, model: Any, mesh: Any, options: Mapping[str, object]) -> Applied:
    """Check that plan, model and mesh belong together, and arrange the model."""
    for name in options:
        if name not in OPTIONS:
            raise PlanError(f"apply has no option {shown(name)} for JAX; expected some of {', '.join(OPTIONS)}.")
    read = read_model(model, options.get("inputs"))
    graph = import_graph(model, options["inputs"])
    found = differences(plan, graph, None, None)
    if found:
        listed = "\n  ".join(found)
        raise PlanError(f"the model is not the one that was planned:\n  {listed}\nPlan this one.")
    rules = _rules(plan, read, graph, options.get("optimizer"))
    return _applied(plan, read, rules, mesh_of(plan, mesh))


def _rules(plan: Plan, model: Model, graph: Graph, optimizer: object) -> StepRules:
    import jax.numpy as jnp

    chosen, recipe = plan.strategy, plan.question.precision
    if optimizer is None:
        optimizer = Adam() if recipe.state_bytes else Sgd()
    if not isinstance(optimizer, Optimizer):
        raise PlanError(f"optimizer is {shown(optimizer)}; expected an object with init and update, such as optax's.")
    size = _batch_size(model)
    is_whole = tuple(leaf.shape[:1] != (size,) for leaf in model.batch)
    traced = _traced(plan, model, is_whole)
    modes = {RecomputeMode(mode) for mode in chosen.recompute}
    strongest = next(mode for mode in reversed(RecomputeMode) if mode in modes)
    how = Arrangement(
        traced=traced,
        stored=_stored(plan, model, traced),
        layers=layer_numbers(model.names, graph),
        mode=strongest,
        is_gathered=chosen.zero == 3 and chosen.dp > 1,
        tensor=chosen.tp,
        splits_sequence=bool(plan.layouts.boundaries),
    )
    return StepRules(
        how=how,
        optimizer=optimizer,
        data=chosen.dp,
        stages=chosen.pp,
        zero=chosen.zero if chosen.dp > 1 else 0,
        micro_batch_size=chosen.micro_batch_size,
        is_whole=is_whole,
        gradient_dtype=jnp.float32 if recipe.gradient_bytes == 4 else jnp.dtype(recipe.compute_dtype),
    )


def _batch_size(model: Model) -> int:
    size = next((leaf.shape[0] for leaf in model.batch if leaf.shape), None)
    if size is None:
        raise PlanError("the model has no batch: no argument behind its parameters has a first dimension.")
    return int(size)


def _compute_dtype(plan: Plan, leaf: Any) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(plan.question.precision.compute_dtype)


def _traced(plan: Plan, model: Model, is_whole: Sequence[bool]) -> Traced:
    import jax

    size = plan.strategy.micro_batch_size
    batch = [
        leaf if whole else jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)
        for leaf, whole in zip(model.batch, is_whole, strict=True)
    ]
    cast = [jax.ShapeDtypeStruct(leaf.shape, _compute_dtype(plan, leaf)) for leaf in model.parameters]
    traced = trace(model.loss, cast, batch)
    if plan.strategy.pp > 1:
        scan = traced.scan
        if scan is None or len(scan.stacked) < len(scan.scanned) or scan.equation.params["reverse"]:
            raise PlanError("the plan has several stages, and the model has no scan over equal stacked layers to cut.")
        if scan.length % plan.strategy.pp:
            raise PlanError(f"{scan.length} layers cannot be cut into {plan.strategy.pp} equal stages.")
    return traced


def _stored(plan: Plan, model: Model, traced: Traced) -> tuple[Stored, ...]:
    stacked = set() if traced.scan is None else set(traced.scan.stacked.values())
    chosen = plan.strategy
    return tuple(
        store(
            name,
            tuple(leaf.shape),
            _splits(plan, name, leaf.shape, index in stacked),
            is_stacked=index in stacked,
            tensor=chosen.tp,
            data=chosen.dp if chosen.zero else 1,
            stages=chosen.pp,
        )
        for index, (name, leaf) in enumerate(zip(model.names, model.parameters, strict=True))
    )


def _splits(plan: Plan, name: str, shape: Sequence[int], is_stacked: bool) -> tuple[SplitDim, ...]:
    """How the plan splits a parameter; all layers of a stacked one must be split alike."""
    layouts = plan.layouts.parameters
    if not is_stacked:
        return layouts.get(name, ())
    found = {layouts.get(f"{name}[{layer}]", ()) for layer in range(shape[0])}
    if len(found) > 1:
        raise PlanError(
            f"the plan splits {name!r} differently in different layers, and stacked layers share one layout; plan with "
            f"constraints={{'{name}*': DIM}}, or write the layers one after the other."
        )
    return found.pop()


def _applied(plan: Plan, model: Model, rules: StepRules, mesh: Mesh) -> Applied:
    import jax

    layout = _Layout(plan, model, rules, mesh)
    specs = jax.tree.unflatten(model.parameter_tree, layout.parameters)
    return Applied(
        mesh=mesh,
        specs=specs,
        shardings=jax.tree.unflatten(model.parameter_tree, layout.named(layout.parameters)),
        step=jax.jit(layout.step, donate_argnums=0),
        gradients=jax.jit(layout.gradients),
        _start=layout.start,
        _parameters=layout.whole,
    )


class _Layout:
    """The specs of a state, and the functions that run on it."""

    def __init__(self, plan: Plan, model: Model, rules: StepRules, mesh: Mesh) -> None:
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec

        self.plan, self.model, self.rules, self.mesh = plan, model, rules, mesh
        stored = rules.how.stored
        stages = "pp" if rules.stages > 1 else ""
        sharded, kept = "dp" if rules.zero == 3 else "", "dp" if rules.zero else ""
        self.parameters = [how.spec(data=sharded, stages=stages, tensor="tp") for how in stored]
        self.states = [how.spec(data=kept, stages=stages, tensor="tp") for how in stored]
        self.manual_parameters = [how.spec(data=sharded, stages=stages) for how in stored]
        self.manual_states = [how.spec(data=kept, stages=stages) for how in stored]
        self.batch = [PartitionSpec() if whole else PartitionSpec("dp") for whole in rules.is_whole]
        shapes = [jax.ShapeDtypeStruct(how.stored_shape, jnp.float32) for how in stored]
        self.optimizer_shapes = jax.eval_shape(rules.optimizer.init, shapes)
        self.has_master = plan.question.precision.master_bytes > 0

    def named(self, specs: Sequence[PartitionSpec]) -> list[NamedSharding]:
        from jax.sharding import NamedSharding

        return [NamedSharding(self.mesh, spec) for spec in specs]

    def of_optimizer(self, specs: Sequence[PartitionSpec]) -> Any:
        """Specs of the optimizer's state: leaves that end in a parameter's place and have its shape are laid out so."""
        import jax
        from jax.sharding import PartitionSpec

        shapes = {str(index): how.stored_shape for index, how in enumerate(self.rules.how.stored)}

        def spec(path: Any, leaf: Any) -> PartitionSpec:
            place = str(getattr(path[-1], "idx", "")) if path else ""
            return specs[int(place)] if shapes.get(place) == tuple(leaf.shape) else PartitionSpec()

        return jax.tree_util.tree_map_with_path(spec, self.optimizer_shapes)

    def state_specs(self, parameters: Sequence[Any], states: Sequence[Any]) -> TrainState:
        return TrainState(list(parameters), self.of_optimizer(states), list(states) if self.has_master else [])

    def mapped(self, function: Callable[..., Any], results: Any) -> Callable[..., Any]:
        """A function of a state and a batch on every device."""
        import jax

        state = self.state_specs(self.manual_parameters, self.manual_states)
        mapped: Callable[..., Any] = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(state, self.batch),
            out_specs=results,
            axis_names=MANUAL,
            check_vma=False,
        )
        return mapped

    def flat_batch(self, batch: Sequence[Any]) -> list[Any]:
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding

        leaves, tree = jax.tree.flatten(tuple(batch))
        if tree != self.model.batch_tree:
            raise PlanError(f"the batch has the structure {tree}; the plan was made for {self.model.batch_tree}.")
        wanted = self.plan.question.global_batch_size
        for leaf, spec, whole in zip(leaves, self.model.batch, self.rules.is_whole, strict=True):
            shape = tuple(spec.shape) if whole else (wanted, *spec.shape[1:])
            if jnp.shape(leaf) != shape:
                raise PlanError(
                    f"the batch has an array of shape {list(jnp.shape(leaf))}; the plan's is {list(shape)}."
                )
        return [
            jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, spec))
            for leaf, spec in zip(leaves, self.batch, strict=True)
        ]

    def step(self, state: TrainState, *batch: Any) -> tuple[TrainState, Any]:
        import jax
        from jax.sharding import PartitionSpec

        results = (self.state_specs(self.manual_parameters, self.manual_states), PartitionSpec())
        run = self.mapped(lambda own, given: local_step(self.rules, own, given), results)
        after, loss = run(state, self.flat_batch(batch))
        specs = self.state_specs(self.parameters, self.states)
        return jax.tree.map(self.constrained, specs, after, is_leaf=_is_spec), loss

    def constrained(self, spec: PartitionSpec, value: Any) -> Any:
        import jax
        from jax.sharding import NamedSharding

        return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, spec))

    def gradients(self, state: TrainState, *batch: Any) -> tuple[Any, Any]:
        from jax.sharding import PartitionSpec

        results = (PartitionSpec(), self.manual_states)
        run = self.mapped(lambda own, given: local_gradients(self.rules, own.parameters, given), results)
        loss, found = run(state, self.flat_batch(batch))
        return loss, self.seen(found)

    def seen(self, flat: Sequence[Any]) -> Any:
        import jax

        values = [how.seen(value) for how, value in zip(self.rules.how.stored, flat, strict=True)]
        return jax.tree.unflatten(self.model.parameter_tree, values)

    def whole(self, state: TrainState) -> Any:
        return self.seen(state.master or state.parameters)

    def start(self, parameters: Any) -> TrainState:
        import jax
        import jax.numpy as jnp

        leaves, tree = jax.tree.flatten(parameters)
        if tree != self.model.parameter_tree:
            raise PlanError(f"the parameters have the structure {tree}; planned were {self.model.parameter_tree}.")
        for name, leaf, spec in zip(self.model.names, leaves, self.model.parameters, strict=True):
            if jnp.shape(leaf) != tuple(spec.shape):
                raise PlanError(f"{name} has the shape {list(jnp.shape(leaf))}; planned was {list(spec.shape)}.")
        shardings = self.named_state()
        state: TrainState = jax.jit(self.fresh, out_shardings=shardings)(leaves)
        return state

    def named_state(self) -> TrainState:
        import jax
        from jax.sharding import NamedSharding

        specs = self.state_specs(self.parameters, self.states)
        named: TrainState = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=_is_spec)
        return named

    def fresh(self, leaves: Sequence[Any]) -> TrainState:
        import jax.numpy as jnp

        stored = [how.stored(leaf) for how, leaf in zip(self.rules.how.stored, leaves, strict=True)]
        cast = [value.astype(_compute_dtype(self.plan, value)) for value in stored]
        exact = [value.astype(jnp.float32) for value in stored]
        return TrainState(cast, self.rules.optimizer.init(exact), exact if self.has_master else [])


def _is_spec(value: object) -> bool:
    from jax.sharding import PartitionSpec

    return isinstance(value, PartitionSpec)
