"""The whole way of a JAX model: what it is, lowering, walking, batch.

A loss is lowered together with its gradients; a step as it is. The batch is lowered as a prime that divides no
dimension of the model, so that every dimension it divides is made of the batch; a second trace at another prime checks
that each dimension has grown as predicted. Where that fails, and for what is already lowered, batch factors are
followed from the first dimension of the batch arguments instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phaze.errors import GraphError, ImportModelError
from phaze.frontends.jax.traceable_functions import Leaf, Source, explained, read_source
from phaze.frontends.stablehlo.argument_roles import Parts, Selector, infer_parts, read_selectors, select
from phaze.frontends.stablehlo.batch_factors import follow_batch
from phaze.frontends.stablehlo.interpreter import Walked, walk
from phaze.frontends.stablehlo.mlir_reader import read_module
from phaze.frontends.stablehlo.module import Module
from phaze.frontends.stablehlo.training_graph import argument_names, assemble
from phaze.ir import Graph, Role

__all__ = ["Shapes", "import_model", "lower_loss", "lower_step", "traced_shapes"]

_PRIMES = (31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139)


def import_model(model: Any, inputs: object, options: Mapping[str, object]) -> Graph:
    """The training graph of a function, a module of linen or nnx, a lowered or traced function, or a jaxpr."""
    lowered = _already_lowered(model, inputs)
    if lowered is not None:
        graph = _import_lowered(lowered, options)
    else:
        source = read_source(_as_function(model), _inputs_of(model, inputs), options)
        graph = _import_function(_task(source, options))
    size = options.get("micro_batch_size")
    return graph if size is None else graph.with_micro_batch(size)  # type: ignore[arg-type]


def _already_lowered(model: Any, inputs: object) -> Any:
    if hasattr(model, "compiler_ir") or (hasattr(model, "lower") and hasattr(model, "jaxpr")):
        if inputs is not None:
            raise ImportModelError("a lowered function has its own inputs; pass it without any.")
        return model if hasattr(model, "compiler_ir") else model.lower()
    return None


def _as_function(model: Any) -> Any:
    if type(model).__name__ != "ClosedJaxpr":
        return model
    import jax.extend.core

    return jax.extend.core.jaxpr_as_fun(model)


def _inputs_of(model: Any, inputs: object) -> object:
    if type(model).__name__ != "ClosedJaxpr" or inputs is not None:
        return inputs
    import jax

    return tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in model.in_avals)


def _import_lowered(lowered: Any, options: Mapping[str, object]) -> Graph:
    for option in ("loss_fn", "targets"):
        if options.get(option) is not None:
            raise ImportModelError(f"{option} goes with linen and nnx modules; a lowered function has its loss.")
    module = Module.from_document(read_module(lowered.compiler_ir("stablehlo")))
    names = argument_names(module)
    parameters, batch = read_selectors(options, "parameters"), read_selectors(options, "batch")
    graph = assemble(
        module,
        names,
        lambda walked: infer_parts(walked, names, parameters, batch),
        name=module.name.removeprefix("jit_"),
    )
    return _with_note(follow_batch(graph), "lowered by JAX")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A source with the roles of its leaves as far as they are known; those of a step are inferred later."""

    source: Source
    parameters: frozenset[int]
    batch: frozenset[int]
    is_loss: bool
    options: Mapping[str, object]

    @property
    def batch_size(self) -> int | None:
        """The first dimension that most batch arguments have; of several, that of the first argument."""
        sizes = [self.source.leaves[i].spec.shape[:1] for i in sorted(self.batch)]
        common = Counter(size[0] for size in sizes if size).most_common(1)
        return common[0][0] if common else None

    def leaves(self, batch_size: int | None) -> list[Leaf]:
        """The leaves at another batch size."""
        own = self.batch_size
        return [
            _resized(leaf, batch_size)
            if batch_size is not None and index in self.batch and leaf.spec.shape[:1] == (own,)
            else leaf
            for index, leaf in enumerate(self.source.leaves)
        ]


def _resized(leaf: Leaf, size: int) -> Leaf:
    import jax

    return replace(leaf, spec=jax.ShapeDtypeStruct((size, *leaf.spec.shape[1:]), leaf.spec.dtype))


def _task(source: Source, options: Mapping[str, object]) -> _Task:
    is_loss = _is_loss(source)
    wanted, given_batch = read_selectors(options, "parameters"), read_selectors(options, "batch")
    chosen = _select(source, wanted if wanted is not None else [0], "parameters")
    parameters = frozenset(i for i in chosen if _is_float(source.leaves[i]))
    if is_loss and not parameters:
        raise ImportModelError(
            f"{source.name} has no floating point arrays among its parameters, so there is nothing to differentiate; "
            "pass parameters= as argument numbers or pytree paths."
        )
    if given_batch is not None:
        batch = _select(source, given_batch, "batch") - parameters
    elif source.is_module:
        batch = {
            i
            for i, leaf in enumerate(source.leaves)
            if leaf.name.split(".")[0] not in ("params", "state", "key", "rest")
        }
    else:
        batch = {i for i, leaf in enumerate(source.leaves) if i not in chosen and not _is_key(leaf)}
    return _Task(source=source, parameters=parameters, batch=frozenset(batch), is_loss=is_loss, options=options)


def _select(source: Source, selectors: Sequence[Selector], what: str) -> set[int]:
    """Leaves by argument number or path."""
    numbers = {one for one in selectors if isinstance(one, int)}
    arguments = {leaf.argument for leaf in source.leaves}
    for number in numbers:
        if number not in arguments:
            raise ImportModelError(
                f"{what} names argument {number} of {source.name}, which has no arrays; arguments with arrays: "
                f"{', '.join(str(one) for one in sorted(arguments)) or 'none'}."
            )
    paths = [one for one in selectors if isinstance(one, str)]
    found = {index for index, leaf in enumerate(source.leaves) if leaf.argument in numbers}
    return found | select(paths, [leaf.name for leaf in source.leaves], what)


def _is_float(leaf: Leaf) -> bool:
    import jax.numpy as jnp

    return bool(jnp.issubdtype(leaf.spec.dtype, jnp.inexact))


def _is_key(leaf: Leaf) -> bool:
    import jax

    is_typed = jax.dtypes.issubdtype(leaf.spec.dtype, jax.dtypes.prng_key)
    return is_typed or not leaf.spec.shape or (str(leaf.spec.dtype) == "uint32" and leaf.spec.shape in ((2,), (4,)))


def _is_loss(source: Source) -> bool:
    """Whether a function returns a scalar (perhaps with more beside it) that is still to be differentiated.

    One that returns arrays for all of its first argument is a step, or has its gradients already.
    """
    import jax

    with explained(source.name):
        out = jax.eval_shape(source.call, [leaf.spec for leaf in source.leaves])
    first = out[0] if isinstance(out, tuple | list) and out else out
    is_scalar = getattr(first, "shape", None) == () and "float" in str(getattr(first, "dtype", ""))
    if source.is_module and not is_scalar:
        shapes = [list(leaf.shape) for leaf in jax.tree_util.tree_leaves(out) if hasattr(leaf, "shape")]
        raise ImportModelError(
            f"{source.name} returns arrays of shapes {shapes[:4]}, which hold no scalar loss; pass loss_fn=(a function "
            "of the output, and of targets= where those are given)."
        )
    if not is_scalar:
        return False
    own = [leaf.spec.shape for leaf in source.leaves if leaf.argument == 0]
    rest = [leaf.shape for leaf in jax.tree_util.tree_leaves(out)[1:] if hasattr(leaf, "shape")]
    return not (own and rest and all(shape in rest for shape in own))


def _import_function(task: _Task) -> Graph:
    if not task.is_loss:
        task = _with_roles(task)
    graph = _flexible(task)
    if graph is not None:
        return graph
    graph = _graph(task, None)
    return _with_note(follow_batch(graph), "lowered at the batch of its inputs: another one did not trace alike")


def _with_roles(task: _Task) -> _Task:
    """A step with the roles of its arguments, inferred from a first walk."""
    module, names = _lowered(task, None)
    parts = _find_parts(task, walk(module, names))
    chosen = {role: frozenset(i for i, own in enumerate(parts.roles) if own is role) for role in Role}
    return replace(task, parameters=chosen[Role.PARAMETER], batch=chosen[Role.BATCH])


def _flexible(task: _Task) -> Graph | None:
    """The graph with its batch factors marked, at the caller's size; None where it cannot be lowered so."""
    size = task.batch_size
    if size is None or not task.batch:
        return None
    first, second = _fitting_primes(task)
    try:
        shapes = [traced_shapes(task.source, task.leaves(prime)) for prime in (first, second)]
        if not _grows(shapes[0], shapes[1], first, second):
            return None
        return _graph(task, first).with_micro_batch(size)
    except (GraphError, ImportModelError):  # said again, at the caller's own size
        return None


def _graph(task: _Task, batch_size: int | None) -> Graph:
    module, names = _lowered(task, batch_size)
    graph = assemble(
        module, names, lambda walked: _find_parts(task, walked), name=task.source.name, batch_size=batch_size
    )
    return _with_note(graph, "traced by JAX" if task.is_loss else "traced by JAX as a whole step")


def _lowered(task: _Task, batch_size: int | None) -> tuple[Module, list[str]]:
    """The module at a batch size, and the names of its arguments; a loss has its parameters first."""
    source, leaves = task.source, task.leaves(batch_size)
    with explained(source.name):
        is_loss, parameters = task.is_loss, sorted(task.parameters)
        lowered = lower_loss(source, leaves, parameters) if is_loss else lower_step(source, leaves)
    order = _order(task) if task.is_loss else range(len(leaves))
    return Module.from_document(read_module(lowered.compiler_ir("stablehlo"))), [leaves[i].name for i in order]


def _order(task: _Task) -> list[int]:
    others = (index for index in range(len(task.source.leaves)) if index not in task.parameters)
    return [*sorted(task.parameters), *others]


def _find_parts(task: _Task, walked: Walked) -> Parts:
    """A loss has its gradients behind it, in the order of the parameters; the parts of a step are inferred."""
    if task.is_loss:
        named = dict.fromkeys(task.parameters, Role.PARAMETER) | dict.fromkeys(task.batch, Role.BATCH)
        roles = tuple(named.get(index, Role.OTHER) for index in _order(task))
        return Parts(roles=roles, loss=0, gradients={index: index + 1 for index in range(len(task.parameters))})
    chosen: list[list[Selector] | None] = []
    for name in ("parameters", "batch"):
        wanted = read_selectors(task.options, name)
        chosen.append(None if wanted is None else sorted(_select(task.source, wanted, name)))
    return infer_parts(walked, [leaf.name for leaf in task.source.leaves], chosen[0], chosen[1])


def _with_note(graph: Graph, note: str) -> Graph:
    return replace(graph, notes=(note, *graph.notes))


def _fitting_primes(task: _Task) -> tuple[int, int]:
    """Two primes that divide no dimension of an argument but the batch itself."""
    sizes: set[int] = set()
    for index, leaf in enumerate(task.source.leaves):
        is_batch = index in task.batch and leaf.spec.shape[:1] == (task.batch_size,)
        sizes.update(leaf.spec.shape[1:] if is_batch else leaf.spec.shape)
    fitting = [prime for prime in _PRIMES if all(size % prime or not size for size in sizes)]
    return (fitting[0], fitting[1]) if len(fitting) > 1 else (_PRIMES[-2], _PRIMES[-1])


def _grows(first: Shapes, second: Shapes, small: int, large: int) -> bool:
    """Whether two traces are the same but for the batch: each dimension that `small` divides has grown, others not."""
    if len(first) != len(second):
        return False
    for (name, shapes), (other_name, other_shapes) in zip(first, second, strict=True):
        grown = tuple(tuple(_grown(n, small, large) for n in shape) for shape in shapes)
        if name != other_name or grown != other_shapes:
            return False
    return True


def _grown(size: int, small: int, large: int) -> int:
    return size // small * large if size and math.gcd(size, small) == small else size


Shapes = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
"""Every primitive of a trace, and the shapes that it makes."""


def lower_loss(source: Source, leaves: Sequence[Leaf], parameters: Sequence[int]) -> Any:
    """`value_and_grad` lowered: parameters come first among the arguments, and their gradients behind the loss."""
    import jax

    others = [index for index in range(len(leaves)) if index not in set(parameters)]

    def objective(learned: list[Any], rest: list[Any]) -> Any:
        values = dict(zip(parameters, learned, strict=True)) | dict(zip(others, rest, strict=True))
        return _scalar(source, source.call([values[index] for index in range(len(leaves))]))

    return jax.jit(jax.value_and_grad(objective), keep_unused=True).lower(
        [leaves[index].spec for index in parameters], [leaves[index].spec for index in others]
    )


def _scalar(source: Source, output: Any) -> Any:
    first = output[0] if isinstance(output, tuple | list) else output
    if getattr(first, "shape", None) != ():
        raise ImportModelError(f"{source.name} returned no scalar loss.")
    return first


def lower_step(source: Source, leaves: Sequence[Leaf]) -> Any:
    """A function lowered as it is, its arguments flat."""
    import jax

    def step(values: list[Any]) -> Any:
        return source.call(values)

    return jax.jit(step, keep_unused=True).lower([leaf.spec for leaf in leaves])


def traced_shapes(source: Source, leaves: Sequence[Leaf]) -> Shapes:
    """What a trace of the forward makes at these shapes."""
    import jax

    with explained(source.name):
        closed = jax.make_jaxpr(source.call)([leaf.spec for leaf in leaves])
    return tuple(_shapes(closed.jaxpr))


def _shapes(jaxpr: Any) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    for equation in jaxpr.eqns:
        made = tuple(tuple(getattr(out.aval, "shape", ())) for out in equation.outvars)
        yield str(equation.primitive), made
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inside = getattr(inner, "jaxpr", inner)
                if hasattr(inside, "eqns"):
                    yield from _shapes(inside)
