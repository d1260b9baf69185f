"""All of it together: a module into a verified graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from phaze.errors import ImportModelError
from phaze.frontends.stablehlo.argument_roles import Parts
from phaze.frontends.stablehlo.dataflow import Net, by_depth, repeated_blocks
from phaze.frontends.stablehlo.interpreter import Walked, slot_name, walk
from phaze.frontends.stablehlo.module import Module
from phaze.frontends.stablehlo.module_paths import Place, find_places, parameter_path
from phaze.frontends.stablehlo.name_scopes import tokens
from phaze.frontends.stablehlo.op_rules.collectives import EMPTY_MESH
from phaze.frontends.stablehlo.saved_for_backward import keep_least
from phaze.frontends.stablehlo.symbols import CONSTANT, Constant, Stack, Tensor, Value, tensors_of
from phaze.frontends.stablehlo.training_phases import find_gradient, find_phases
from phaze.frontends.stablehlo.vector_fusion import fuse
from phaze.ir import Dim, Factor, FactorKind, Graph, Op, OpKind, Phase, Role, Rule
from phaze.ir import Tensor as GraphTensor
from phaze.ir.backward import split_tied_gradients
from phaze.ir.refinement import refine_factors

__all__ = ["argument_names", "assemble"]

MOST_SHARDINGS = 5
MOST_CHARACTERS = 200


def argument_names(module: Module) -> tuple[str, ...]:
    """Dotted paths of the arguments of `main`, as their locations tell; `argument3` where they tell nothing."""
    main = module.functions.get("main")
    if main is None:
        known = ", ".join(module.functions) or "none at all"
        raise ImportModelError(
            f"the module {module.name!r} has no function 'main' (functions: {known}); nothing to import."
        )
    names: list[str] = []
    for index, argument in enumerate(main.arguments):
        name = ".".join(tokens(argument.name)) or f"argument{index}"
        names.append(name if name not in names else f"{name}.{index}")
    return tuple(names)


def assemble(
    module: Module,
    names: Sequence[str],
    find_parts: Callable[[Walked], Parts],
    *,
    name: str,
    batch_size: int | None = None,
    is_shuffled: bool = False,
) -> Graph:
    """The graph of a module, with backward, layers and factors.

    `find_parts` says the roles of arguments after a first walk. With `batch_size`, a prime that divides no other
    dimension, every factor that it divides is marked as batch. `is_shuffled` where operations are not listed in the
    order of the program.
    """
    walked = walk(module, names)
    parts = find_parts(walked)
    stacked = _stacked(walked, parts)
    if stacked:
        walked = walk(module, names, stacked)
    graph = _graph(walked, parts, name, names, batch_size or 1)
    if is_shuffled:
        graph = replace(graph, ops=tuple(_ordered(by_depth(graph.ops))))
    if parts.loss is not None and not graph.gradients:
        graph = graph.with_backward()
    refined = refine_factors(split_tied_gradients(graph), batch_size)
    graph = fuse(keep_least(refined))
    notes = _notes(module, walked, stacked, names)
    if len(graph.ops) < len(refined.ops):
        notes.append(
            f"vector ops are joined as a compiler would join them: {len(graph.ops):,} ops of {len(refined.ops):,}"
        )
    return replace(graph, notes=(*graph.notes, *notes))


def _stacked(walked: Walked, parts: Parts) -> set[int]:
    """Parameters that are read by trips, and the optimizer state that goes with them."""
    found = {index for index in walked.sliced if parts.roles[index] is Role.PARAMETER}
    shapes = {walked.arguments[index].shape for index in found}
    states = (index for index, role in enumerate(parts.roles) if role is Role.OPTIMIZER_STATE)
    return found | {index for index in states if walked.arguments[index].shape in shapes}


def _graph(walked: Walked, parts: Parts, name: str, names: Sequence[str], batch_size: int) -> Graph:
    builder = walked.recorder.builder
    gradients, states = _gradients(walked, parts)
    outputs = list(dict.fromkeys(tensor.id for tensor in tensors_of(_outputs(walked, parts))))
    ops = _living(builder.ops, [*outputs, *(gradient for _, gradient in gradients)])
    net = Net(ops)
    loss = [] if parts.loss is None else [tensor.id for tensor in tensors_of((walked.results[parts.loss],))]
    if parts.is_updated:
        gradients = _behind_updates(walked, net, gradients)
    phases = find_phases(net, loss or outputs, [g for _, g in gradients], states, walked.recorder.again)
    _assign_roles(walked, parts)
    parameters = {
        tensor.id: parameter_path(names[index])
        for index, role in enumerate(parts.roles)
        if role is Role.PARAMETER
        for tensor in tensors_of((walked.arguments[index],))
    }
    place = Place(
        scopes=walked.recorder.scopes,
        parameters=parameters,
        loops=walked.loops,
        again=walked.recorder.again,
        phases=phases,
        tensors=builder.tensors,
    )
    modules = find_places(net, place, gradients)
    placed = _placed(ops, phases, modules)
    _drop_unread(builder.tensors, placed, [*outputs, *(gradient for _, gradient in gradients)])
    builder.ops = _ordered(placed)
    builder.name = name
    builder.micro_batch_size = batch_size
    builder.gradients = gradients
    graph = builder.build(list(dict.fromkeys([*loss, *outputs])))
    blocks = None if modules else repeated_blocks(graph)
    if blocks is None:
        return graph
    modules = find_places(net, place, gradients, blocks)
    return replace(graph, ops=tuple(replace(op, module=modules.get(op.id, "")) for op in graph.ops))


def _outputs(walked: Walked, parts: Parts) -> list[Value]:
    """The results that are no gradients; those of an update are outputs as well."""
    left_out = set() if parts.is_updated else set(parts.gradients.values())
    return [value for index, value in enumerate(walked.results) if index not in left_out]


def _gradients(walked: Walked, parts: Parts) -> tuple[list[tuple[str, str]], list[str]]:
    """Pairs of parameter and gradient (slot by slot where they are stacked), and the tensors of optimizer state."""
    pairs: list[tuple[str, str]] = []
    for argument, result in parts.gradients.items():
        parameter, gradient = walked.arguments[argument], walked.results[result]
        if isinstance(parameter, Stack):
            slots = gradient.slots if isinstance(gradient, Stack) else _slots(walked, gradient)
            both = zip(parameter.slots, slots, strict=True)
        else:
            both = zip((parameter,), (gradient,), strict=True)
        for own, found in both:
            if isinstance(own, Tensor) and not (isinstance(found, Constant) and found.value == 0):
                pairs.append((own.id, walked.recorder.id(found, "")))
    states = [
        tensor.id
        for index, role in enumerate(parts.roles)
        if role is Role.OPTIMIZER_STATE
        for tensor in tensors_of((walked.arguments[index],))
    ]
    return pairs, states


def _slots(walked: Walked, value: Value) -> list[Value]:
    """The slices of a whole tensor, as views."""
    if isinstance(value, Constant):
        return [value] * value.shape[0]
    source = walked.recorder.id(value, "")
    dims = tuple(Dim((f"d{index}",)) for index in range(len(value.shape)))
    factors = tuple(
        Factor(f"d{i}", size, FactorKind.FREE if i else FactorKind.WHOLE) for i, size in enumerate(value.shape)
    )
    rule = Rule((dims,), (dims[1:],), factors)
    found: list[Value] = []
    for index in range(value.shape[0]):
        attributes = {"index": index}
        (made,) = walked.recorder.emit(
            OpKind.VIEW, "select", rule, (source,), (value.dtype,), "", "slice", attributes=attributes
        )
        found.append(Tensor(made, value.shape[1:], value.dtype))
    return found


def _behind_updates(walked: Walked, net: Net, updated: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The gradient that each new parameter was computed from."""
    arguments = frozenset(t.id for t in walked.recorder.builder.tensors.values() if t.role is not None)
    found = ((parameter, find_gradient(net, new, arguments)) for parameter, new in updated)
    return [(parameter, gradient) for parameter, gradient in found if gradient is not None]


def _living(ops: Sequence[Op], outputs: Iterable[str]) -> list[Op]:
    """The ops that some output depends on."""
    wanted = set(outputs)
    kept: list[Op] = []
    for op in reversed(ops):
        if wanted.intersection(op.outputs):
            kept.append(op)
            wanted.update(op.inputs)
    return kept[::-1]


def _placed(ops: Sequence[Op], phases: dict[str, Phase], modules: dict[str, str]) -> list[Op]:
    return [replace(op, phase=phases[op.id], module=modules.get(op.id, "")) for op in ops]


def _ordered(ops: Sequence[Op]) -> list[Op]:
    """Forward ops first: a dump lists operations in any order that respects what feeds what."""
    return [op for op in ops if op.phase is Phase.FORWARD] + [op for op in ops if op.phase is not Phase.FORWARD]


def _assign_roles(walked: Walked, parts: Parts) -> None:
    tensors = walked.recorder.builder.tensors
    for value, role in zip(walked.arguments, parts.roles, strict=True):
        for tensor in tensors_of((value,)):
            tensors[tensor.id] = replace(tensors[tensor.id], role=role)


def _drop_unread(tensors: dict[str, GraphTensor], ops: Sequence[Op], outputs: Sequence[str]) -> None:
    """Forget tensors of ops that are gone, and constants that nobody reads; arguments stay."""
    made = {tensor_id for op in ops for tensor_id in op.outputs}
    read = {tensor_id for op in ops for tensor_id in op.inputs} | set(outputs)
    for tensor_id in list(tensors):
        is_argument = tensors[tensor_id].role is not None
        if tensor_id in made or (is_argument and (tensor_id in read or not tensor_id.startswith(CONSTANT))):
            continue
        del tensors[tensor_id]


def _notes(module: Module, walked: Walked, stacked: set[int], names: Sequence[str]) -> list[str]:
    notes = [f"{text} ({count} times)" if count > 1 else text for text, count in walked.recorder.notes.items()]
    if stacked:
        first = slot_name(names[min(stacked)], 0)
        notes.append(f"{len(stacked)} stacked arguments are taken apart by the trips of a scan, such as {first}")
    given = [index for index, argument in enumerate(walked.function.arguments) if argument.sharding]
    for index in given[:MOST_SHARDINGS]:
        sharding = walked.function.arguments[index].sharding[:MOST_CHARACTERS]
        notes.append(f"sharding already present: {names[index]} {sharding}")
    if len(given) > MOST_SHARDINGS:
        notes.append(f"shardings already present on {len(given)} arguments in all")
    meshes = [mesh.strip()[:MOST_CHARACTERS] for mesh in module.meshes if EMPTY_MESH not in mesh]
    return [*notes, *(f"mesh already present: {mesh}" for mesh in meshes)]
