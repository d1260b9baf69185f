"""A plan applied to a JAX model: its mesh, the layout of its parameters, and a compiled training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaze.backends.jax.losses import Arrangement
from phaze.backends.jax.means import check_mean
from phaze.backends.jax.meshes import mesh_of
from phaze.backends.jax.micro_batches import Share, share_of
from phaze.backends.jax.models import Model, read_model
from phaze.backends.jax.optimizers import Adam, Optimizer, Sgd
from phaze.backends.jax.segments import layer_numbers
from phaze.backends.jax.state import StateLayout, TrainState
from phaze.backends.jax.steps import StepRules, local_gradients
from phaze.backends.jax.stored import Stored, store
from phaze.backends.jax.traced import Traced, trace
from phaze.errors import PlanError, shown
from phaze.ir import Graph, RecomputeMode
from phaze.model_import import import_graph
from phaze.plan.plan import Plan, SplitDim
from phaze.profile.model_profiles import recomputed_keys
from phaze.verify.saved_plan import differences

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = ["Applied", "apply_plan_to"]

MANUAL = frozenset({"pp", "dp"})
OPTIONS = ("inputs", "optimizer", "takes_mean")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
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
    step: Program
    gradients: Program
    _layout: StateLayout

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        return f"Applied({sizes}: start(parameters), step(state, *batch), gradients(state, *batch), parameters(state))"

    def start(self, parameters: Any) -> TrainState:
        """The state before the first step: parameters laid out as planned, and the optimizer's state beside them.

        Instead of arrays it takes a function without arguments that makes them: then each device makes its own part.
        """
        return self._layout.start(parameters)

    def parameters(self, state: TrainState) -> Any:
        """The parameters of a state as the user has them."""
        return self._layout.seen(state.parameters if state.master is None else state.master)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A compiled function of a state and a batch; the batch is held against the planned one at every call."""

    compiled: Any
    read_batch: Callable[[tuple[Any, ...]], list[Any]]

    def __call__(self, state: TrainState, *batch: Any) -> Any:
        """Run it."""
        if not isinstance(state, TrainState):
            raise PlanError(f"state is a {type(state).__name__}; expected what start(parameters) or a step returned.")
        return self.compiled(state, self.read_batch(batch))

    def lower(self, state: TrainState, *batch: Any) -> Any:
        """What `jax.jit(...).lower(...)` gives, for a state and a list of the batch's arrays."""
        return self.compiled.lower(state, self.read_batch(batch))


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
    optimizer = _optimizer(plan, options.get("optimizer"))
    rules = _rules(plan, read, graph, takes_mean=bool(options.get("takes_mean")))
    return _applied(plan, read, rules, optimizer, mesh_of(plan, mesh))


def _optimizer(plan: Plan, given: object) -> Optimizer:
    if given is None:
        return Adam() if plan.question.precision.state_bytes else Sgd()
    if not isinstance(given, Optimizer):
        raise PlanError(f"optimizer is {shown(given)}; expected an object with init and update, such as optax's.")
    return given


def _rules(plan: Plan, model: Model, graph: Graph, *, takes_mean: bool) -> StepRules:
    import jax.numpy as jnp

    chosen, recipe = plan.strategy, plan.question.precision
    compute_dtype = jnp.dtype(recipe.compute_dtype)
    specs = model.batch.specs
    shares = tuple(share_of(spec, graph.micro_batch_size) for spec in specs)
    if Share.ROWS not in shares:
        raise PlanError("the model has no batch: no argument behind its parameters has a first dimension.")
    dtypes = tuple(compute_dtype if jnp.issubdtype(one.dtype, jnp.floating) else None for one in specs)
    traced = _traced(model, compute_dtype, dtypes, shares, chosen.micro_batch_size)
    if plan.question.global_batch_size > chosen.micro_batch_size and not takes_mean:
        check_mean(traced, _traced(model, compute_dtype, dtypes, shares, 2 * chosen.micro_batch_size), shares)
    _check_stages(plan, traced)
    keys = recomputed_keys(graph, plan.question.calibration)
    modes = {RecomputeMode(mode) for mode in chosen.recompute}
    how = Arrangement(
        traced=traced,
        stored=_stored(plan, model, traced),
        layers=layer_numbers(model.names, graph),
        mode=next(mode for mode in reversed(RecomputeMode) if mode in modes),
        again=frozenset(layer.index for layer in graph.layers if layer.key in keys),
        last_layer=len(graph.layers) - 1,
        is_gathered=chosen.zero == 3 and chosen.dp > 1,
        tensor=chosen.tp,
        splits_sequence=bool(plan.layouts.boundaries),
    )
    return StepRules(
        how=how.with_whole_vectors(),
        data=chosen.dp,
        stages=chosen.pp,
        zero=chosen.zero if chosen.dp > 1 else 0,
        micro_batch_size=chosen.micro_batch_size,
        shares=shares,
        batch_dtypes=dtypes,
        compute_dtype=compute_dtype,
        gradient_dtype=jnp.float32 if recipe.gradient_bytes == 4 else compute_dtype,
    )


def _traced(model: Model, compute_dtype: Any, dtypes: Sequence[Any], shares: Sequence[Share], size: int) -> Traced:
    """The loss of one microbatch."""
    import jax

    batch = [
        jax.ShapeDtypeStruct((size, *one.shape[1:]) if share is Share.ROWS else one.shape, dtype or one.dtype)
        for one, dtype, share in zip(model.batch.specs, dtypes, shares, strict=True)
    ]
    return trace(model.loss, [jax.ShapeDtypeStruct(one.shape, compute_dtype) for one in model.parameters], batch)


def _check_stages(plan: Plan, traced: Traced) -> None:
    """A plan with stages needs a scan that can be cut into them."""
    if plan.strategy.pp == 1:
        return
    scan = traced.scan
    if scan is None or len(scan.stacked) < len(scan.scanned) or scan.equation.params["reverse"]:
        raise PlanError(
            "the plan has several stages, and the model has no scan over equal stacked layers to cut (one that takes "
            "nothing but parameters apart, first layer first)."
        )
    read = {id(variable) for equation in traced.equations for variable in equation.invars}
    if any(id(variable) in read for variable in scan.collected):
        raise PlanError(
            "the plan has several stages, and the loss reads what the scan collects from all layers; carry it from "
            "layer to layer instead, or plan with strategy pp=1."
        )
    if scan.length % plan.strategy.pp:
        raise PlanError(f"{scan.length} layers cannot be cut into {plan.strategy.pp} equal stages.")


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


def _applied(plan: Plan, model: Model, rules: StepRules, optimizer: Optimizer, mesh: Mesh) -> Applied:
    import jax

    layout = StateLayout(
        model=model,
        stored=rules.how.stored,
        mesh=mesh,
        optimizer=optimizer,
        zero=rules.zero,
        is_staged=rules.stages > 1,
        has_master=plan.question.precision.master_bytes > 0,
        compute_dtype=rules.compute_dtype,
    )
    everywhere = _everywhere(rules, layout)

    def step(state: TrainState, batch: Sequence[Any]) -> tuple[TrainState, Any]:
        loss, gradients = everywhere(jax.tree.leaves(state.parameters), batch)
        return layout.updated(state, gradients), loss

    def gradients(state: TrainState, batch: Sequence[Any]) -> tuple[Any, Any]:
        loss, found = everywhere(jax.tree.leaves(state.parameters), batch)
        return loss, layout.seen(found)

    def read_batch(batch: tuple[Any, ...]) -> list[Any]:
        return _read_batch(model, rules, plan.question.global_batch_size, batch)

    specs = layout.tree(layout.parameters())
    return Applied(
        mesh=mesh,
        specs=specs,
        shardings=layout.shardings(specs),
        step=Program(compiled=jax.jit(step, donate_argnums=0), read_batch=read_batch),
        gradients=Program(compiled=jax.jit(gradients), read_batch=read_batch),
        _layout=layout,
    )


def _everywhere(rules: StepRules, layout: StateLayout) -> Callable[..., Any]:
    """Loss and gradients of flat parameters and a flat batch, on every device of the mesh."""
    import jax
    from jax.sharding import PartitionSpec

    batch = [PartitionSpec("dp") if share is Share.ROWS else PartitionSpec() for share in rules.shares]
    mapped = jax.shard_map(
        lambda own, given: local_gradients(rules, own, given),
        mesh=layout.mesh,
        in_specs=(layout.parameters(tensor=""), batch),
        out_specs=(PartitionSpec(), layout.owned(tensor="")),
        axis_names=MANUAL,
        check_vma=False,
    )
    return lambda own, given: mapped(own, layout.placed(batch, given))


def _read_batch(model: Model, rules: StepRules, size: int, batch: tuple[Any, ...]) -> list[Any]:
    import jax.numpy as jnp

    arrays = model.batch.arrays(batch)
    for value, spec, share in zip(arrays, model.batch.specs, rules.shares, strict=True):
        shape = (size, *spec.shape[1:]) if share is Share.ROWS else tuple(spec.shape)
        if jnp.shape(value) != shape:
            raise PlanError(f"the batch has an array of shape {list(jnp.shape(value))}; the plan's is {list(shape)}.")
    return arrays
