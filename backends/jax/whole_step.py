"""A whole train step, with its optimizer and metrics, as the user wrote it: compiled for the plan's layouts.

A step takes a training state (or parameters and an optimizer's state) and a batch, and returns the state that it was
given, updated, with metrics beside it. It runs on all rows of the batch at once, and the compiler divides it: what the
user wrote about clipping, schedules, statistics of batches, padding and random numbers holds as on one device. So a
plan for a step has one stage, one microbatch for each copy, and computes again what the step itself computes again.

A step of nnx takes modules and an `nnx.Optimizer`, updates these objects in place and returns a loss or metrics. It is
seen as a function of a state that returns it updated (`InPlaceStep`): the arrays in the objects become one tree, in
which the first module is under "model": that of a whole training state. Planning and `plan.apply` then see a step of
(state, *batch); the frontend names its arrays alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phaze.backends.jax.jax_mesh import mesh_for_plan
from phaze.backends.jax.loss_function import PyTree, is_a, is_nnx_module
from phaze.backends.jax.user_shardings import specs_of_trees
from phaze.errors import PlanError, explained_by
from phaze.hooks import PluginManager
from phaze.ir import Graph
from phaze.model_import import import_with_plugins
from phaze.plan.plan import Plan
from phaze.verify.saved_plan import model_differences

__all__ = ["AppliedStep", "InPlaceStep", "apply_plan_to_step", "as_in_place_step", "is_whole_step", "planned_graph"]

_OBJECT = "flax.nnx.pytreelib.Pytree"
"""The class of all objects of nnx that hold arrays: modules, optimizers, metrics, random numbers."""

_OPTIMIZER = "flax.nnx.training.optimizer.Optimizer"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InPlaceStep:
    """A step that changes some of its arguments.

    Attributes:
        function: as the user wrote it.
        names: what the arguments that are objects of nnx are called in the state, by their places.
        definition: nnx's description of these objects without their arrays.
    """

    function: Callable[..., Any]
    names: Mapping[int, str]
    definition: Any

    def run(self, state: Any, *others: Any) -> tuple[Any, Any]:
        """The state after the step, and what the step returns; `others` are the arguments that are no objects."""
        from flax import nnx  # here, because only a model of flax brings flax along

        objects, remaining = nnx.merge(self.definition, state), iter(others)
        count = len(self.names) + len(others)
        given = [objects[self.names[place]] if place in self.names else next(remaining) for place in range(count)]
        result = self.function(*given)
        return nnx.state(objects), result

    def arguments(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of `run`, of those that the user's function takes."""
        from flax import nnx  # here, because only a model of flax brings flax along

        others = [value for place, value in enumerate(given) if place not in self.names]
        return (nnx.state(self._objects(given)), *others)

    def update(self, given: tuple[Any, ...], state: Any) -> None:
        """Put the arrays of a state into the objects that the user's function was given."""
        from flax import nnx  # here, because only a model of flax brings flax along

        nnx.update(self._objects(given), state)

    def _objects(self, given: tuple[Any, ...]) -> dict[str, Any]:
        return {name: given[place] for place, name in self.names.items()}


def as_in_place_step(model: Any, inputs: object) -> InPlaceStep | None:
    """The step, where a function takes an optimizer of nnx among its arguments; None for anything else."""
    if not callable(model) or not isinstance(inputs, tuple | list):
        return None
    if not any(is_a(value, _OPTIMIZER) for value in inputs):
        return None
    from flax import nnx  # here, because only a model of flax brings flax along

    places = [place for place, value in enumerate(inputs) if is_a(value, _OBJECT)]
    first_module = next((place for place in places if is_nnx_module(inputs[place])), None)
    names = {place: "model" if place == first_module else f"object{place}" for place in places}
    definition, _ = nnx.split({name: inputs[place] for place, name in names.items()})
    return InPlaceStep(function=model, names=names, definition=definition)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class AppliedStep:
    """A train step on a mesh: called like the user's function, whose state it takes over (donates).

    Attributes:
        mesh: axes pp, dp, tp.
        specs: a PartitionSpec for every array of every argument, in their structures.
        shardings: the same as NamedShardings.
        compiled: the step, from `jax.jit`.
        in_place: how a step of nnx changes its arguments; None for one that returns its state.
    """

    mesh: Mesh
    specs: tuple[PyTree, ...]
    shardings: tuple[PyTree, ...]
    compiled: jax.stages.Wrapped
    in_place: InPlaceStep | None = None

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in dict(self.mesh.shape).items())
        return f"AppliedStep({sizes}: called as the step itself, place(*arguments))"

    def __call__(self, *arguments: PyTree) -> PyTree:
        """Run the step; arguments are laid out where they are not yet."""
        if self.in_place is None:
            return self.compiled(*self.place(*arguments))
        state, result = self.compiled(*self.place(*self.in_place.arguments(arguments)))
        self.in_place.update(arguments, state)
        return result

    @explained_by("jax")
    def place(self, *arguments: PyTree) -> tuple[PyTree, ...]:
        """The arguments on the mesh, laid out as planned."""
        if jax.tree.structure(arguments) != jax.tree.structure(self.shardings):
            raise PlanError(
                f"the arguments have the structure {jax.tree.structure(arguments)}; the plan was made for "
                f"{jax.tree.structure(self.shardings)}."
            )
        placed: tuple[PyTree, ...] = jax.tree.map(_placed, arguments, self.shardings)
        return placed

    def lower(self, *arguments: PyTree) -> jax.stages.Lowered:
        """What `jax.jit(...).lower(...)` gives."""
        given = arguments if self.in_place is None else self.in_place.arguments(arguments)
        return self.compiled.lower(*self.place(*given))


def _placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """A leaf on the mesh. What is there already stays; anything else is copied, so that the caller's is never donated.

    A number of Python becomes an array: as such it would be compiled for again when the step has returned an array.
    """
    if getattr(leaf, "sharding", None) == sharding:
        return leaf
    if isinstance(leaf, bool | int | float):
        return jax.device_put(np.asarray(leaf, jax.dtypes.result_type(leaf)), sharding)
    # A replica of what is laid out may be the very buffer that it was laid out from.
    return jax.device_put(jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, sharding)


def planned_graph(plan: Plan, model: object, inputs: object, plugins: PluginManager, **options: object) -> Graph:
    """The graph of a model that is arranged; raises PlanError where it is not the one that was planned.

    `options` are those of the frontend; None stands for one that was not given.
    """
    given = {name: value for name, value in options.items() if value is not None}
    graph = import_with_plugins(plugins, model, inputs, frontend=None, options=given)
    mismatches = model_differences(plan, graph)
    if mismatches:
        listed = "\n  ".join(mismatches)
        raise PlanError(f"the model is not the one that was planned:\n  {listed}\nPlan this one.")
    return graph


def is_whole_step(model: Any, inputs: object) -> bool:
    """Whether a function returns its first argument, updated: then it is a train step and no loss."""
    if not callable(model) or not isinstance(inputs, tuple) or not inputs or hasattr(model, "compiler_ir"):
        return False
    try:
        results = jax.eval_shape(model, *inputs)
    except Exception:  # whatever it is: who arranges a loss says it in words
        return False
    return bool(_returned(inputs, results).get(0))


def _returned(arguments: Sequence[PyTree], results: PyTree) -> dict[int, int]:
    """The arguments that come back among the results, with the place of the result (as one more than its number)."""
    forms = [_form(result) for result in (results if isinstance(results, tuple | list) else (results,))]
    returned: dict[int, int] = {}
    for number, argument in enumerate(arguments):
        fitting = [place + 1 for place, form in enumerate(forms) if form == _form(argument)]
        free = [place for place in fitting if place not in returned.values()]
        if free and _form(argument)[1]:
            returned[number] = free[0]
    return returned


def _form(tree: PyTree) -> tuple[object, list[tuple[int, ...]]]:
    """The structure and the shapes; a number of Python (a first count of steps) has the shape of a scalar."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [tuple(getattr(leaf, "shape", ())) for leaf in leaves]


def apply_plan_to_step(
    plan: Plan, model: Any, mesh: object, *, plugins: PluginManager, inputs: object, in_place: InPlaceStep | None = None
) -> AppliedStep:
    """The step, compiled for the plan's layouts; see the module's words."""
    assert isinstance(inputs, tuple | list)
    _check_strategy(plan)
    planned_graph(plan, model, inputs, plugins)
    inputs = tuple(inputs)
    if in_place is not None:
        model, inputs = in_place.run, in_place.arguments(inputs)
    own_mesh = mesh_for_plan(plan, mesh)
    specs = tuple(specs_of_trees(plan, inputs))
    shardings = tuple(_shardings(own_mesh, tree) for tree in specs)
    results = jax.eval_shape(model, *inputs)
    returned = _returned(inputs, results)
    compiled = jax.jit(
        _with_layouts(model, _layouts_of_results(results, returned, shardings, own_mesh)),
        in_shardings=shardings,
        donate_argnums=tuple(returned),
    )
    return AppliedStep(mesh=own_mesh, specs=specs, shardings=shardings, compiled=compiled, in_place=in_place)


def _check_strategy(plan: Plan) -> None:
    """Raise PlanError for a plan of something that a step does not do; what is planned for a step has nothing of it."""
    strategy, not_done = plan.strategy, []
    micro_batches = plan.question.global_batch_size // (strategy.dp * strategy.micro_batch_size)
    if strategy.pp > 1:
        not_done.append(f"{strategy.pp} stages")
    if micro_batches > 1:
        not_done.append(f"{micro_batches} microbatches for each copy")
    if recomputed := sorted(set(strategy.recompute) - {"none"}):
        not_done.append(f"recompute {recomputed[0]}")
    if not_done:
        raise PlanError(
            f"the plan has {', '.join(not_done)}, and a whole train step runs as it is written: in one stage, all "
            "samples of a copy at once, computing again what it says itself. Plan the step with target='jax', or plan "
            "and apply its loss."
        )


def _shardings(mesh: Mesh, specs: PyTree) -> PyTree:
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec)
    )


def _layouts_of_results(
    results: PyTree, returned: Mapping[int, int], shardings: Sequence[PyTree], mesh: Mesh
) -> PyTree:
    """What comes back lies as it came in; everything else is whole on every device."""
    is_sequence = isinstance(results, tuple | list)
    places = {place - 1: shardings[argument] for argument, place in returned.items()}
    layouts = [
        places[place] if place in places else jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), result)
        for place, result in enumerate(results if is_sequence else (results,))
    ]
    return tuple(layouts) if is_sequence else layouts[0]


def _with_layouts(step: Callable[..., PyTree], layouts: PyTree) -> Callable[..., PyTree]:
    """The step with its results laid out."""

    def run(*arguments: PyTree) -> PyTree:
        results = step(*arguments)
        leaves, structure = jax.tree.flatten(results)
        pairs = zip(leaves, jax.tree.leaves(layouts), strict=True)
        return jax.tree.unflatten(structure, [jax.lax.with_sharding_constraint(leaf, layout) for leaf, layout in pairs])

    return run
