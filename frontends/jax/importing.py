"""Import a JAX model: lower its loss with gradients at a prime batch size, build the graph, check the batch at another.

A loss is lowered together with its gradients (`_lower_loss`); a whole step as it is (`_lower_step`). The batch is
lowered as a prime that divides no dimension of the model, so that every dimension it divides is made of the batch; a
second trace at another prime checks that each dimension has grown as predicted (`_grows_with_batch`). Where that fails,
and for what is already lowered, batch factors are followed from the first dimension of the batch arguments instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from phaze.errors import GraphError, ImportModelError
from phaze.frontends.jax.traceable_functions import (
    CHECKPOINTS,
    Leaf,
    TraceableFunction,
    as_traceable,
    explaining_failures,
    keeping_everything,
)
from phaze.frontends.paused_collection import paused_collection
from phaze.frontends.stablehlo.argument_roles import ModuleRoles, Selector, infer_roles, read_selectors, select
from phaze.frontends.stablehlo.batch_and_expert_dims import follow_batch, mark_routed_experts
from phaze.frontends.stablehlo.interpreter import SymbolicRun, run_main
from phaze.frontends.stablehlo.mlir_reader import read_module
from phaze.frontends.stablehlo.module import Module
from phaze.frontends.stablehlo.training_graph import argument_names, build_graph
from phaze.ir import Graph, Role

__all__ = ["import_model"]

_PALLAS_PLATFORMS = ("tpu", "cuda")
"""For which chips a function with Pallas kernels is lowered on a host that has none, the first that works."""

_PRIMES = (31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139)
"""Batch sizes to lower at: primes, two of which should divide no dimension of the model; small, to trace quickly."""

_MOST_BATCH_SIZES = 4
"""How many first dimensions of arguments are tried as the batch; a wrong one fails at its first trace."""

MOST_SHAPES = 4
"""How many shapes of a module's output a message shows: enough to recognise them."""

_NOT_BATCH = ("params", "state", "key", "rest")
"""The arguments of a flax module's objective that are no inputs of the module."""

_GIVING_WAY = {
    "remat2": "jax.checkpoint in the model gives way: the plan's recompute says what backward computes again",
    "checkpoint": "jax.checkpoint in the model gives way: the plan's recompute says what backward computes again",
    "sharding_constraint": "sharding constraints in the model give way: the plan says what lies where",
}
"""What is said about a primitive that states how the model is run, which a plan decides anew."""

_KEPT_IN_STEPS = "jax.checkpoint in the step runs as it is written; what it computes again is not priced"
"""What is said about a whole step that recomputes."""

Shapes = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
"""Every primitive of a trace, and the shapes that it makes."""


def import_model(model: Any, inputs: object, options: Mapping[str, object]) -> Graph:
    """The training graph of a function, a module of linen or nnx, a lowered or traced function, or a jaxpr."""
    with paused_collection():
        lowered = _already_lowered(model, inputs)
        if lowered is not None:
            graph = _import_lowered(lowered, options)
        else:
            if isinstance(model, jax.extend.core.ClosedJaxpr):
                model, inputs = _from_jaxpr(model, inputs)
            function = as_traceable(model, inputs, options)
            graph = _import_function(_import_task(function, options))
    size = options.get("micro_batch_size")
    return graph if size is None else graph.with_micro_batch(size)  # type: ignore[arg-type]


def _already_lowered(model: Any, inputs: object) -> jax.stages.Lowered | None:
    """A lowered function as it is, and a traced one lowered; None for anything else."""
    if hasattr(model, "compiler_ir") or (hasattr(model, "lower") and hasattr(model, "jaxpr")):
        if inputs is not None:
            raise ImportModelError("a lowered function has its own inputs; pass it without any.")
        return model if hasattr(model, "compiler_ir") else model.lower()
    return None


def _from_jaxpr(jaxpr: jax.extend.core.ClosedJaxpr, inputs: object) -> tuple[Any, object]:
    """The function of a jaxpr, and its own shapes where no inputs are given."""
    if inputs is None:
        inputs = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals)
    return jax.extend.core.jaxpr_as_fun(jaxpr), inputs


def _import_lowered(lowered: jax.stages.Lowered, options: Mapping[str, object]) -> Graph:
    for option in ("loss_fn", "targets"):
        if options.get(option) is not None:
            raise ImportModelError(f"{option} goes with linen and nnx modules; a lowered function has its loss.")
    module = _module_of(lowered)
    names = argument_names(module)
    parameters, batch = read_selectors(options, "parameters"), read_selectors(options, "batch")
    graph = build_graph(
        module,
        names,
        lambda run: infer_roles(run, names, parameters, batch),
        name=module.name.removeprefix("jit_"),
    )
    return _with_note(follow_batch(graph), "lowered by JAX")


def _module_of(lowered: jax.stages.Lowered) -> Module:
    return Module.from_document(read_module(lowered.compiler_ir("stablehlo")))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImportTask:
    """A function with the roles of its leaves as far as they are known; those of a step are inferred later.

    `batch_size` is the first dimension of those batch arguments that grow with the batch. `notes` say what of the model
    gives way to a plan.
    """

    function: TraceableFunction
    parameters: frozenset[int]
    batch: frozenset[int]
    is_loss: bool
    options: Mapping[str, object]
    notes: tuple[str, ...] = ()
    batch_size: int | None = None

    @property
    def possible_batch_sizes(self) -> list[int]:
        """The first dimensions of batch arguments: first those that most arguments have, then those of whole numbers.

        Frozen parameters may be among these arguments: many arrays in one argument, and none of whole numbers.
        """
        leaves = [self.function.leaves[i] for i in sorted(self.batch) if self.function.leaves[i].spec.shape]
        sizes = Counter(leaf.spec.shape[0] for leaf in leaves)
        arguments = Counter(size for size, _ in {(leaf.spec.shape[0], leaf.argument) for leaf in leaves})
        whole = {leaf.spec.shape[0] for leaf in leaves if not jnp.issubdtype(leaf.spec.dtype, jnp.floating)}
        return sorted(sizes, key=lambda size: (-arguments[size], size not in whole, -sizes[size]))

    def leaves(self, batch_size: int | None) -> list[Leaf]:
        """The leaves at another batch size."""
        return [
            _resized(leaf, batch_size)
            if batch_size is not None and index in self.batch and leaf.spec.shape[:1] == (self.batch_size,)
            else leaf
            for index, leaf in enumerate(self.function.leaves)
        ]

    @property
    def lowered_order(self) -> list[int]:
        """The leaves in the order of the lowered arguments: a loss has its parameters first."""
        indices = range(len(self.function.leaves))
        if not self.is_loss:
            return list(indices)
        return [*sorted(self.parameters), *(index for index in indices if index not in self.parameters)]


def _resized(leaf: Leaf, size: int) -> Leaf:
    return replace(leaf, spec=jax.ShapeDtypeStruct((size, *leaf.spec.shape[1:]), leaf.spec.dtype))


def _import_task(function: TraceableFunction, options: Mapping[str, object]) -> _ImportTask:
    with explaining_failures(function.name):
        traced, output = jax.make_jaxpr(function.call, return_shape=True)([leaf.spec for leaf in function.leaves])
    is_loss = _is_loss(function, output)
    given_parameters, given_batch = read_selectors(options, "parameters"), read_selectors(options, "batch")
    selected = _select_leaves(function, given_parameters if given_parameters is not None else [0], "parameters")
    parameters = frozenset(i for i in selected if _is_float(function.leaves[i]))
    if is_loss and not parameters:
        raise ImportModelError(
            f"{function.name} has no floating point arrays among its parameters, so there is nothing to differentiate; "
            "pass parameters= as argument numbers or pytree paths."
        )
    if given_batch is not None:
        batch = _select_leaves(function, given_batch, "batch") - parameters
    elif function.is_module:
        batch = {i for i, leaf in enumerate(function.leaves) if leaf.name.split(".")[0] not in _NOT_BATCH}
    else:
        batch = {i for i, leaf in enumerate(function.leaves) if i not in selected and not _is_scalar_or_key(leaf)}
    return _ImportTask(
        function=function,
        parameters=parameters,
        batch=frozenset(batch),
        is_loss=is_loss,
        options=options,
        notes=_notes(traced.jaxpr, is_loss=is_loss),
    )


def _notes(jaxpr: jax.extend.core.Jaxpr, *, is_loss: bool) -> tuple[str, ...]:
    """What is said about how the model states that it is run."""
    primitives = {name for name, _ in _shapes(jaxpr)}
    if not is_loss:
        return () if primitives.isdisjoint(CHECKPOINTS) else (_KEPT_IN_STEPS,)
    return tuple(dict.fromkeys(note for name, note in _GIVING_WAY.items() if name in primitives))


def _select_leaves(function: TraceableFunction, selectors: Sequence[Selector], what: str) -> set[int]:
    """Leaves by argument number or path."""
    numbers = {selector for selector in selectors if isinstance(selector, int)}
    arguments = {leaf.argument for leaf in function.leaves}
    for number in numbers:
        if number not in arguments:
            raise ImportModelError(
                f"{what} names argument {number} of {function.name}, which has no arrays; arguments with arrays: "
                f"{', '.join(str(argument) for argument in sorted(arguments)) or 'none'}."
            )
    paths = [selector for selector in selectors if isinstance(selector, str)]
    by_number = {index for index, leaf in enumerate(function.leaves) if leaf.argument in numbers}
    return by_number | select(paths, [leaf.name for leaf in function.leaves], what)


def _is_float(leaf: Leaf) -> bool:
    return bool(jnp.issubdtype(leaf.spec.dtype, jnp.inexact))


def _is_scalar_or_key(leaf: Leaf) -> bool:
    """Whether a leaf is a scalar or a random key, typed or as two or four integers, and so no data."""
    shape, dtype = leaf.spec.shape, leaf.spec.dtype
    is_typed_key = jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    return bool(is_typed_key or not shape or (str(dtype) == "uint32" and shape in ((2,), (4,))))


def _is_loss(function: TraceableFunction, output: Any) -> bool:
    """Whether a function returns a scalar (perhaps with more beside it) that is still to be differentiated.

    One that returns arrays for all of its first argument is a step, or has its gradients already.
    """
    first = output[0] if isinstance(output, tuple | list) and output else output
    is_scalar = getattr(first, "shape", None) == () and "float" in str(getattr(first, "dtype", ""))
    if function.is_module and not is_scalar:
        shapes = [list(leaf.shape) for leaf in jax.tree_util.tree_leaves(output) if hasattr(leaf, "shape")]
        raise ImportModelError(
            f"{function.name} returns arrays of shapes {shapes[:MOST_SHAPES]}, which hold no scalar loss; pass "
            "loss_fn=(a function of the output, and of targets= where those are given)."
        )
    if not is_scalar:
        return False
    first_argument = [leaf.spec.shape for leaf in function.leaves if leaf.argument == 0]
    beside_loss = [leaf.shape for leaf in jax.tree_util.tree_leaves(output)[1:] if hasattr(leaf, "shape")]
    has_gradients = first_argument and beside_loss and all(shape in beside_loss for shape in first_argument)
    return not has_gradients


def _import_function(task: _ImportTask) -> Graph:
    if not task.is_loss:
        task = _with_inferred_roles(task)
    tasks = [replace(task, batch_size=size) for size in task.possible_batch_sizes[:_MOST_BATCH_SIZES]]
    graph = next((graph for sized in tasks if (graph := _graph_of_any_batch(sized)) is not None), None)
    if graph is None:
        graph = _with_note(
            follow_batch(_graph(task, None)), "lowered at the batch of its inputs: another one did not trace alike"
        )
    return mark_routed_experts(replace(graph, notes=(*graph.notes, *task.notes)))


def _with_inferred_roles(task: _ImportTask) -> _ImportTask:
    """A step with the roles of its arguments, inferred from a first run."""
    module, names = _lowered(task, None)
    roles = _find_roles(task, run_main(module, names)).arguments
    parameters, batch = (
        frozenset(index for index, given in enumerate(roles) if given is role) for role in (Role.PARAMETER, Role.BATCH)
    )
    return replace(task, parameters=parameters, batch=batch)


def _graph_of_any_batch(task: _ImportTask) -> Graph | None:
    """The graph with its batch factors marked, at the caller's size; None where it cannot be lowered so."""
    assert task.batch_size is not None
    small, large = _fitting_primes(task)
    try:
        shapes = [_traced_shapes(task.function, task.leaves(prime)) for prime in (small, large)]
        if not _grows_with_batch(shapes[0], shapes[1], small, large):
            return None
        return _graph(task, small).with_micro_batch(task.batch_size)
    except (GraphError, ImportModelError):  # said again, at the caller's own size
        return None


def _graph(task: _ImportTask, batch_size: int | None) -> Graph:
    module, names = _lowered(task, batch_size)
    graph = build_graph(
        module, names, lambda run: _find_roles(task, run), name=task.function.name, batch_size=batch_size
    )
    return _with_note(graph, "traced by JAX" if task.is_loss else "traced by JAX as a whole step")


def _lowered(task: _ImportTask, batch_size: int | None) -> tuple[Module, list[str]]:
    """The module at a batch size, and the names of its arguments."""
    function, leaves = task.function, task.leaves(batch_size)
    with explaining_failures(function.name):
        if task.is_loss:
            lowered = _lower_loss(function, leaves, sorted(task.parameters))
        else:
            lowered = _lower_step(function, leaves)
    return _module_of(lowered), [leaves[index].name for index in task.lowered_order]


def _find_roles(task: _ImportTask, run: SymbolicRun) -> ModuleRoles:
    """A loss has its gradients behind it, in the order of the parameters; the roles of a step are inferred."""
    if task.is_loss:
        known = dict.fromkeys(task.parameters, Role.PARAMETER) | dict.fromkeys(task.batch, Role.BATCH)
        roles = tuple(known.get(index, Role.OTHER) for index in task.lowered_order)
        gradients = {index: index + 1 for index in range(len(task.parameters))}
        return ModuleRoles(arguments=roles, loss=0, gradients=gradients)
    chosen: list[list[Selector] | None] = []
    for name in ("parameters", "batch"):
        selectors = read_selectors(task.options, name)
        chosen.append(None if selectors is None else sorted(_select_leaves(task.function, selectors, name)))
    return infer_roles(run, [leaf.name for leaf in task.function.leaves], chosen[0], chosen[1])


def _with_note(graph: Graph, note: str) -> Graph:
    return replace(graph, notes=(note, *graph.notes))


def _lower_loss(function: TraceableFunction, leaves: Sequence[Leaf], parameters: Sequence[int]) -> jax.stages.Lowered:
    """`value_and_grad` lowered: parameters come first among the arguments, and their gradients behind the loss."""
    others = [index for index in range(len(leaves)) if index not in set(parameters)]

    def objective(learned: list[Any], rest: list[Any]) -> Any:
        values = dict(zip(parameters, learned, strict=True)) | dict(zip(others, rest, strict=True))
        return _scalar(function, function.call([values[index] for index in range(len(leaves))]))

    learned_specs, other_specs = ([leaves[index].spec for index in indices] for indices in (parameters, others))
    kept = keeping_everything(objective, learned_specs, other_specs)
    return _lower(jax.jit(jax.value_and_grad(kept), keep_unused=True), learned_specs, other_specs)


def _scalar(function: TraceableFunction, output: Any) -> Any:
    first = output[0] if isinstance(output, tuple | list) else output
    if getattr(first, "shape", None) != ():
        raise ImportModelError(f"{function.name} returned no scalar loss.")
    return first


def _lower_step(function: TraceableFunction, leaves: Sequence[Leaf]) -> jax.stages.Lowered:
    """A function lowered as it is, its arguments flat."""

    def step(values: list[Any]) -> Any:
        return function.call(values)

    return _lower(jax.jit(step, keep_unused=True), [leaf.spec for leaf in leaves])


def _lower(function: Any, *arguments: Any) -> jax.stages.Lowered:
    """A function lowered for this host; one with Pallas kernels, which a CPU does not run, for a chip that does."""
    try:
        lowered: jax.stages.Lowered = function.lower(*arguments)
        return lowered
    except ValueError as error:
        if "interpret mode" not in str(error):
            raise
        refusal = error
    traced = function.trace(*arguments)
    for platform in _PALLAS_PLATFORMS:
        try:
            for_platform: jax.stages.Lowered = traced.lower(lowering_platforms=(platform,))
            return for_platform
        except Exception as error:  # a kernel of the one chip fails in the lowering of the other in any way
            refusal = ValueError(f"{refusal}; for {platform}: {type(error).__name__}: {error}")
    raise ImportModelError(
        f"the function has Pallas kernels that cannot be lowered: {refusal}. Import it where their chip is, or with "
        "the same computation in plain JAX in their place."
    )


def _fitting_primes(task: _ImportTask) -> tuple[int, int]:
    """Two primes that divide no dimension of an argument but the batch itself."""
    sizes: set[int] = set()
    for index, leaf in enumerate(task.function.leaves):
        is_batch = index in task.batch and leaf.spec.shape[:1] == (task.batch_size,)
        sizes.update(leaf.spec.shape[1:] if is_batch else leaf.spec.shape)
    fitting = [prime for prime in _PRIMES if all(size % prime or not size for size in sizes)]
    return (fitting[0], fitting[1]) if len(fitting) > 1 else (_PRIMES[-2], _PRIMES[-1])


def _traced_shapes(function: TraceableFunction, leaves: Sequence[Leaf]) -> Shapes:
    """What a trace of the forward makes at these shapes."""
    with explaining_failures(function.name):
        closed = jax.make_jaxpr(function.call)([leaf.spec for leaf in leaves])
    return tuple(_shapes(closed.jaxpr))


def _shapes(jaxpr: jax.extend.core.Jaxpr) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    for equation in jaxpr.eqns:
        shapes = tuple(tuple(getattr(result.aval, "shape", ())) for result in equation.outvars)
        yield str(equation.primitive), shapes
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner_jaxpr = getattr(inner, "jaxpr", inner)
                if hasattr(inner_jaxpr, "eqns"):
                    yield from _shapes(inner_jaxpr)


def _grows_with_batch(small_shapes: Shapes, large_shapes: Shapes, small: int, large: int) -> bool:
    """Whether two traces are the same but for the batch: each dimension that `small` divides has grown, others not."""
    if len(small_shapes) != len(large_shapes):
        return False
    for (small_name, shapes), (large_name, grown_shapes) in zip(small_shapes, large_shapes, strict=True):
        predicted = tuple(tuple(_grown(size, small, large) for size in shape) for shape in shapes)
        if small_name != large_name or predicted != grown_shapes:
            return False
    return True


def _grown(size: int, small: int, large: int) -> int:
    return size // small * large if size and math.gcd(size, small) == small else size
