"""A plan applied to a live JAX model: checks that they belong together, and compiles the training step on the mesh.

`apply_plan_to` reads the model's loss (`loss_function.py`), traces it at the plan's microbatch (`traced_loss.py`),
decides how each parameter is stored (`parameter_storage.py`) and makes of these a `TrainingStep`, which it compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phaze.backends.jax import equal_layers
from phaze.backends.jax.context_trace import SequenceInput, loss_of_context, sequence_inputs
from phaze.backends.jax.expert_trace import loss_of_experts
from phaze.backends.jax.jax_mesh import axis_names, mesh_axes, mesh_for_plan
from phaze.backends.jax.loss_function import BatchShare, LossFunction, PyTree, batch_share, read_loss_function
from phaze.backends.jax.mean_over_samples import Counts, weighting_of_micro_batches
from phaze.backends.jax.micro_batch_loss import ArrangedLoss
from phaze.backends.jax.parameter_storage import ParameterStorage, choose_storage
from phaze.backends.jax.samples_apart import check_samples_apart
from phaze.backends.jax.stacked_layers import EMPTY_SHAPE, LayerStacks, stack_equal_layers
from phaze.backends.jax.trace_rewriting import RowsOfBatch, draws_of_samples, paired_equations, with_draws_of_rows
from phaze.backends.jax.traced_loss import (
    TracedLoss,
    first_layers,
    loss_of_trace,
    needed_equations,
    read_variables,
    trace_loss,
)
from phaze.backends.jax.train_state import Adam, Optimizer, Sgd, StateLayout, TrainState, asks_for_shapes
from phaze.backends.jax.training_step import TrainingStep, WholeBatch, gradients_on_mesh
from phaze.backends.jax.whole_step import (
    AppliedStep,
    apply_plan_to_step,
    as_in_place_step,
    is_whole_step,
    planned_graph,
)
from phaze.cost import planned_graph as graph_as_planned
from phaze.errors import PlanError, explained_by, shown
from phaze.hooks import PluginManager
from phaze.ir import Graph, RecomputeMode
from phaze.parallelism import PipelineSchedule
from phaze.plan.plan import Plan, SplitDim
from phaze.profile.model_profiles import recomputed_keys
from phaze.shard.expert_slicing import expert_dims

__all__ = ["AppliedPlan", "apply_plan_to"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class AppliedPlan:
    """A model arranged on a mesh: what `plan.apply` returns.

    Attributes:
        mesh: the user's own; where none was given, one with axes pp, dp, tp and those of `jax_mesh.py`, all automatic.
        specs: a PartitionSpec for every parameter, in the structure and for the shapes of the user's.
        shardings: the same as NamedShardings, with which `jax.device_put` lays out the user's own tree.
        step: `step(state, *batch) -> (state, loss)`, compiled at its first call; the old state is given up.
        gradients: `gradients(state, *batch) -> (loss, gradients)`, these as the user has parameters.
    """

    mesh: Mesh
    specs: PyTree
    shardings: PyTree
    step: CompiledProgram
    gradients: CompiledProgram
    _layout: StateLayout

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in dict(self.mesh.shape).items())
        calls = "start(parameters), step(state, *batch), gradients(state, *batch), parameters(state), checkpoint(state)"
        return f"AppliedPlan({sizes}: {calls})"

    def start(self, parameters: PyTree) -> TrainState:
        """The state before the first step: parameters laid out as planned, and the optimizer's state beside them.

        Instead of arrays it takes a function without arguments that makes them: then each device makes its own part.
        """
        return self._layout.start(parameters)

    def checkpoint(self, state: TrainState) -> TrainState:
        """The state in the shapes of the user's parameters: any library saves such a tree, any plan resumes it."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.checkpoint_shapes())
        saved: TrainState = jax.jit(self._layout.in_user_shapes, out_shardings=shardings)(state)
        return saved

    def checkpoint_shapes(self) -> TrainState:
        """Shapes, types and shardings of what `checkpoint` gives, as restoring libraries such as Orbax take them."""
        return self._layout.checkpoint_shapes()

    def resume(self, saved: TrainState) -> TrainState:
        """The state that goes on from a checkpoint, of this plan or of another one of the same model."""
        layout = self._layout
        if jax.tree.structure(saved) != jax.tree.structure(self.checkpoint_shapes()):
            raise PlanError(
                f"the checkpoint has the structure {jax.tree.structure(saved)}; expected that of checkpoint_shapes(): "
                "the same model, precision and optimizer."
            )
        shardings = layout.shardings(layout.state_specs())
        state: TrainState = jax.jit(layout.in_stored_shapes, out_shardings=shardings)(saved)
        return state

    def parameters(self, state: TrainState) -> PyTree:
        """The parameters of a state as the user has them."""
        return self._layout.with_fixed(
            self._layout.as_user_has_them(state.parameters if state.master is None else state.master)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledProgram:
    """A compiled function of a state and a batch; at every call the batch is compared with the planned one.

    Attributes:
        compiled: a function of a state and a flat batch, from `jax.jit`.
        read_batch: gives the arrays of a batch, and raises PlanError for one that is not as planned.
    """

    compiled: jax.stages.Wrapped
    read_batch: Callable[[tuple[PyTree, ...]], list[jax.Array]]

    @explained_by("jax")
    def __call__(self, state: TrainState, *batch: PyTree) -> PyTree:
        """Run the program."""
        if not isinstance(state, TrainState):
            raise PlanError(f"state is a {type(state).__name__}; expected what start(parameters) or a step returned.")
        return self.compiled(state, self.read_batch(batch))

    def lower(self, state: TrainState, *batch: PyTree) -> jax.stages.Lowered:
        """What `jax.jit(...).lower(...)` gives, for a state and a list of the batch's arrays."""
        return self.compiled.lower(state, self.read_batch(batch))


def apply_plan_to(
    plan: Plan,
    model: object,
    mesh: object,
    *,
    plugins: PluginManager,
    inputs: object,
    optimizer: object,
    takes_mean: bool,
    loss_fn: object = None,
    targets: object = None,
) -> AppliedPlan | AppliedStep:
    """Check that plan, model and mesh belong together, and arrange the model.

    Args:
        plan: made for this model.
        model: a loss function of (parameters, *batch), a linen or nnx module that returns its loss, or a whole train
            step of (state, *batch).
        mesh: a `jax.sharding.Mesh` of the plan's sizes, or None for one of the first devices.
        plugins: whose frontends import the model, to compare it with the planned one.
        inputs: the arguments that `optimize` took, arrays or shapes.
        optimizer: an object with `init` and `update`, such as optax's; None for Adam or plain gradient descent, as the
            plan's precision says.
        takes_mean: whether the mean of the microbatches' losses is wanted where the loss is no mean over samples.
        loss_fn: the loss of what a module returns, and of `targets` where these are given, as `optimize` took them.
        targets: they stand last in every batch.
    """
    in_place = as_in_place_step(model, inputs)
    if in_place is not None or is_whole_step(model, inputs):
        if optimizer is not None:
            raise PlanError("a whole train step has its own optimizer; apply it without optimizer=.")
        return apply_plan_to_step(plan, model, mesh, plugins=plugins, inputs=inputs, in_place=in_place)
    loss_function = read_loss_function(model, inputs, loss_fn, targets)
    imported = planned_graph(plan, model, inputs, plugins, loss_fn=loss_fn, targets=targets)
    graph = graph_as_planned(imported, plan.question.attention)
    checked_optimizer = _optimizer(plan, optimizer)
    step = _training_step(plan, loss_function, graph, takes_mean=takes_mean)
    return _applied_plan(plan, loss_function, step, checked_optimizer, mesh)


def _optimizer(plan: Plan, optimizer: object) -> Optimizer:
    if optimizer is None:
        return Adam() if plan.question.precision.state_bytes else Sgd()
    if not isinstance(optimizer, Optimizer):
        raise PlanError(f"optimizer is {shown(optimizer)}; expected an object with init and update, such as optax's.")
    return optimizer


def _training_step(plan: Plan, loss_function: LossFunction, graph: Graph, *, takes_mean: bool) -> TrainingStep:
    strategy, precision, axes = plan.strategy, plan.question.precision, mesh_axes(plan)
    compute_dtype = jnp.dtype(precision.compute_dtype)
    specs = loss_function.batch.specs
    shares = tuple(batch_share(spec, graph.micro_batch_size) for spec in specs)
    if BatchShare.ROWS not in shares:
        raise PlanError("the model has no batch: no argument behind its parameters has a first dimension.")
    dtypes = tuple(compute_dtype if jnp.issubdtype(spec.dtype, jnp.floating) else None for spec in specs)

    def trace_at(micro_batch_size: int) -> TracedLoss:
        batch = [
            jax.ShapeDtypeStruct(_shape_with_rows(spec, share, micro_batch_size), dtype or spec.dtype)
            for spec, dtype, share in zip(specs, dtypes, shares, strict=True)
        ]
        parameters = [jax.ShapeDtypeStruct(spec.shape, compute_dtype) for spec in loss_function.parameters]
        return trace_loss(loss_function.loss, parameters, batch)

    trace = trace_at(strategy.micro_batch_size)
    sizes = RowsOfBatch(strategy.micro_batch_size, plan.question.global_batch_size)
    draws, counts, whole_batch = dict[int, int](), Counts(), None
    if sizes.batch_rows > sizes.rows:
        twice = trace_at(2 * strategy.micro_batch_size)
        counts = Counts() if takes_mean else _weighting(trace_at, strategy.micro_batch_size, shares, loss_function)
        draws = draws_of_samples(trace.flat, twice.flat)
    if counts.totals:
        whole_batch = _whole_batch(counts, trace, trace_at(sizes.batch_rows), draws)
    if draws or counts.totals:
        totals = [trace.equations[number].outvars[place] for number, place in counts.totals]
        trace = loss_of_trace(with_draws_of_rows(trace.flat, draws, sizes, totals), len(trace.parameters))
    has_sequence = (False,) * len(specs)
    if axes.context:
        lengths = [
            spec.shape[1:2] if share is BatchShare.ROWS else () for spec, share in zip(specs, shares, strict=True)
        ]
        has_sequence, trace = _context(trace, [length == (graph.tokens_per_sample,) for length in lengths], strategy.cp)
    experts = _expert_dims(graph, loss_function) if axes.experts else {}
    if experts:
        trace = loss_of_experts(trace, experts, strategy.ep, _expert_tiles(plan, graph))
    stacks = LayerStacks()
    if strategy.pp > 1 and trace.scan is None:
        of_parameters = first_layers(loss_function.names, graph)
        trace, stacks = stack_equal_layers(trace, of_parameters, equal_layers(graph), axes.in_traces)
    _check_stages(plan, trace)
    return TrainingStep(
        arranged=_arranged_loss(plan, loss_function, graph, trace, stacks, experts),
        stacks=stacks,
        experts=experts,
        axes=axes,
        zero=strategy.zero if axes.shards else 0,
        micro_batch_size=strategy.micro_batch_size,
        batch_shares=shares,
        has_sequence=has_sequence,
        batch_dtypes=dtypes,
        numbers_rows=bool(draws or counts.totals),
        whole_batch=whole_batch,
        is_sum=counts.is_sum,
        alternates=strategy.schedule is PipelineSchedule.EAGER,
        compute_dtype=compute_dtype,
        gradient_dtype=jnp.float32 if precision.gradient_bytes == 4 else compute_dtype,
    )


def _context(trace: TracedLoss, has_sequence: Sequence[bool], cp: int) -> tuple[tuple[bool, ...], TracedLoss]:
    """The trace of one device of a sequence, behind which of the given arguments reach it as parts of sequences."""
    of_trace = [*has_sequence, *[False] * (len(trace.batch) - len(has_sequence))]
    inputs = sequence_inputs(trace, of_trace, cp)
    are_parts = tuple(form is SequenceInput.PART for form in inputs[: len(has_sequence)])
    return are_parts, loss_of_context(trace, inputs, cp)


def _weighting(
    trace_at: Callable[[int], TracedLoss],
    micro_batch_size: int,
    shares: tuple[BatchShare, ...],
    loss_function: LossFunction,
) -> Counts:
    """How the losses of microbatches make up that of the batch; raises PlanError for a loss that mixes samples."""
    counts = weighting_of_micro_batches(trace_at, micro_batch_size, shares)
    arrays = (*loss_function.parameters, *loss_function.batch.specs)
    check_samples_apart(trace_at, micro_batch_size, {size for spec in arrays for size in spec.shape})
    return counts


def _whole_batch(counts: Counts, micro_batch: TracedLoss, whole: TracedLoss, draws: Mapping[int, int]) -> WholeBatch:
    """What microbatches take from the whole batch, which is found at the same places of its trace."""

    pairs = paired_equations(micro_batch.equations, whole.equations)
    of_whole = {id(small): large for small, large in pairs or () if small is not None}

    def at(places: Sequence[tuple[int, int]], *, is_whole: bool) -> tuple[core.Var, ...]:
        variables = []
        for number, place in places:
            equation: core.JaxprEqn | None = micro_batch.equations[number]
            if is_whole:
                equation = of_whole.get(id(equation))
            if equation is None:
                raise PlanError("the loss counts samples and is traced differently for other numbers of samples.")
            variables.append(equation.outvars[place])
        return tuple(variables)

    sums = at(counts.sums, is_whole=False)
    if any(id(equation) in draws for equation in needed_equations(micro_batch.equations, sums, {})):
        raise PlanError(
            "the loss counts samples that it draws at random, which microbatches cannot count together; draw the mask "
            "outside of the loss, or pass takes_mean=True to take the mean of the microbatches' losses as the loss."
        )
    return WholeBatch(
        micro_batch=micro_batch,
        sums=sums,
        whole=whole,
        whole_sums=at(counts.sums, is_whole=True),
        totals=at(counts.totals, is_whole=True),
    )


def _shape_with_rows(spec: jax.ShapeDtypeStruct, share: BatchShare, rows: int) -> tuple[int, ...]:
    """The shape of an argument of the batch where the batch has so many rows."""
    return (rows, *spec.shape[1:]) if share is BatchShare.ROWS else tuple(spec.shape)


def _arranged_loss(
    plan: Plan,
    loss_function: LossFunction,
    graph: Graph,
    trace: TracedLoss,
    stacks: LayerStacks,
    experts: Mapping[int, int],
) -> ArrangedLoss:
    strategy = plan.strategy
    keys = recomputed_keys(graph, plan.question.calibration)
    arranged = ArrangedLoss(
        trace=trace,
        storages=_storages(plan, loss_function, trace, stacks, experts),
        parameter_layers=first_layers(loss_function.names, graph),
        # All stages run one program, so that the strongest of their modes holds for all.
        recompute=next(mode for mode in reversed(RecomputeMode) if mode in strategy.recompute),
        recomputed_layers=frozenset(layer.index for layer in graph.layers if layer.key in keys),
        last_layer=len(graph.layers) - 1,
        gathers_keys=strategy.cp > 1,
        gathers_parameters=strategy.zero == 3 and bool(mesh_axes(plan).shards),
        tp=strategy.tp,
        sequence_parallel=bool(plan.layouts.boundaries),
    )
    return arranged.with_gathered_vectors()


def _check_stages(plan: Plan, trace: TracedLoss) -> None:
    """A plan with stages needs a scan that can be cut into them."""
    if plan.strategy.pp == 1:
        return
    scan = trace.scan
    if scan is None or scan.equation.params["reverse"]:
        raise PlanError(
            "the plan has several stages, and the model has no scan over equal stacked layers to cut that begins with "
            "the first."
        )
    read = {variable for equation in trace.equations for variable in read_variables(equation)}
    if any(variable in read for variable in scan.collected):
        raise PlanError(
            "the plan has several stages, and the loss reads what the scan collects from all layers; carry it from "
            "layer to layer instead, or plan with strategy pp=1."
        )
    if scan.length % plan.strategy.pp:
        raise PlanError(f"{scan.length} layers cannot be cut into {plan.strategy.pp} equal stages.")


def _storages(
    plan: Plan,
    loss_function: LossFunction,
    trace: TracedLoss,
    stacks: LayerStacks,
    experts: Mapping[int, int],
    *,
    keeps_shape: bool = False,
) -> tuple[ParameterStorage, ...]:
    """How parameters are stored: with layers stacked, or (with `keeps_shape`) each in the user's own shape.

    `experts` has the dimension of the user's shape that counts experts, by parameter, where these are divided.
    """
    stacked = set() if trace.scan is None else set(trace.scan.stacked.values())
    stacked -= set(stacks.layers_of) if keeps_shape else set()
    strategy, axes = plan.strategy, mesh_axes(plan)

    def storage(number: int, name: str, shape: tuple[int, ...]) -> ParameterStorage:
        is_stacked = number in stacked
        layers = [f"{name}[{layer}]" for layer in range(shape[0])] if is_stacked else [name]
        if is_stacked and number in stacks.layers_of:
            layers = [loss_function.names[layer] for layer in stacks.layers_of[number]]
            shape = (len(layers), *shape)
        expert_dim = experts.get(number)
        if expert_dim is not None:
            expert_dim += len(shape) - len(loss_function.parameters[number].shape)
        own_axes = axes.experts if expert_dim is not None else ()
        shard_axes = tuple(axis for axis in axes.shards if axis not in own_axes)
        return choose_storage(
            name,
            shape,
            _splits(plan, name, layers),
            is_stacked=is_stacked,
            tp=strategy.tp,
            shards=axes.size(shard_axes),
            shard_axes=shard_axes,
            pp=strategy.pp,
            keeps_shape=keeps_shape,
            expert_dim=expert_dim,
            ep=strategy.ep,
        )

    absent = frozenset[int]() if keeps_shape else stacks.absent
    return tuple(
        ParameterStorage(name=name, shape=EMPTY_SHAPE) if number in absent else storage(number, name, tuple(spec.shape))
        for number, (name, spec) in enumerate(zip(loss_function.names, loss_function.parameters, strict=True))
    )


def _expert_dims(graph: Graph, loss_function: LossFunction) -> dict[int, int]:
    """The dimension of the user's shape that counts experts, by the number of a parameter.

    A stacked parameter is one for each layer in the graph, `name[layer]`, and has its layers first.
    """
    of_graph = expert_dims(graph)
    stacked = {name.rpartition("[")[0]: dim + 1 for name, dim in of_graph.items() if name.endswith("]")}
    found = {number: (stacked | of_graph).get(name) for number, name in enumerate(loss_function.names)}
    return {number: dim for number, dim in found.items() if dim is not None}


def _expert_tiles(plan: Plan, graph: Graph) -> int:
    """Into how many parts the tensor axis divides experts: all of them, or none where it cuts some in another way."""
    splits = [(plan.layouts.parameters.get(name, ()), dim) for name, dim in expert_dims(graph).items()]
    is_along = [of_parameter[0].dim == dim for of_parameter, dim in splits if of_parameter]
    return plan.strategy.tp if is_along and all(is_along) else 1


def _splits(plan: Plan, name: str, layers: Sequence[str]) -> tuple[SplitDim, ...]:
    """How the plan splits a parameter, by the names that it has in the plan's layers: all must be split alike."""
    different_splits = {plan.layouts.parameters.get(layer, ()) for layer in layers}
    if len(different_splits) > 1:
        raise PlanError(
            f"the plan splits {name!r} differently in different layers, and stacked layers share one layout; plan with "
            f"constraints={{'{name}*': DIM}}, or write the layers one after the other."
        )
    return different_splits.pop()


def _applied_plan(
    plan: Plan, loss_function: LossFunction, training_step: TrainingStep, optimizer: Optimizer, given_mesh: object
) -> AppliedPlan:
    mesh, stacks = mesh_for_plan(plan, given_mesh), training_step.stacks
    trace, experts = training_step.arranged.trace, training_step.experts
    user_storages = _storages(plan, loss_function, trace, stacks, experts, keeps_shape=True)
    layout = StateLayout(
        loss_function=loss_function,
        storages=training_step.storages,
        user_storages=user_storages,
        stacks=stacks,
        mesh=mesh,
        optimizer=optimizer,
        sees_user_shapes=asks_for_shapes(
            optimizer, training_step.storages, user_storages, stacks, loss_function.structure
        ),
        zero=training_step.zero,
        has_stages=training_step.pp > 1,
        has_master=plan.question.precision.master_bytes > 0,
        compute_dtype=training_step.compute_dtype,
    )
    compute_gradients = gradients_on_mesh(training_step, layout)

    def step(state: TrainState, batch: Sequence[jax.Array]) -> tuple[TrainState, jax.Array]:
        loss, stored_gradients = compute_gradients(jax.tree.leaves(state.parameters), batch)
        return layout.updated(state, stored_gradients), loss

    def gradients(state: TrainState, batch: Sequence[jax.Array]) -> tuple[jax.Array, PyTree]:
        loss, stored_gradients = compute_gradients(jax.tree.leaves(state.parameters), batch)
        return loss, layout.as_user_has_them(stored_gradients)

    def read_batch(batch: tuple[PyTree, ...]) -> list[jax.Array]:
        return _read_batch(loss_function, training_step.batch_shares, plan.question.global_batch_size, batch)

    user_mesh, names = (mesh, {}) if given_mesh is None else (given_mesh, axis_names(plan, given_mesh))
    assert isinstance(user_mesh, Mesh)
    specs = layout.as_user_has_leaves([_renamed(spec, names) for spec in layout.user_specs()])
    return AppliedPlan(
        mesh=user_mesh,
        specs=specs,
        shardings=layout.as_user_has_leaves(
            [NamedSharding(user_mesh, _renamed(spec, names)) for spec in layout.user_specs()]
        ),
        step=CompiledProgram(compiled=jax.jit(step, donate_argnums=0), read_batch=read_batch),
        gradients=CompiledProgram(compiled=jax.jit(gradients), read_batch=read_batch),
        _layout=layout,
    )


def _renamed(spec: PartitionSpec, names: Mapping[str, str]) -> PartitionSpec:
    """A spec in the names that the user's mesh has for the axes."""
    renamed = [
        tuple(names.get(axis, axis) for axis in entry) if isinstance(entry, tuple) else names.get(entry, entry)
        for entry in spec
    ]
    return PartitionSpec(*renamed)


def _read_batch(
    loss_function: LossFunction, shares: Sequence[BatchShare], global_batch_size: int, batch: tuple[PyTree, ...]
) -> list[jax.Array]:
    """The arrays of a batch; raises PlanError where their structure or shapes are not the planned ones."""
    arrays = loss_function.batch.arrays_of(batch, "the batch has")
    for value, spec, share in zip(arrays, loss_function.batch.specs, shares, strict=True):
        shape = _shape_with_rows(spec, share, global_batch_size)
        if jnp.shape(value) != shape:
            raise PlanError(f"the batch has an array of shape {list(jnp.shape(value))}; the plan's is {list(shape)}.")
    return arrays
