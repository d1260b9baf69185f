"""Build the training graph of a module, step by step: run, roles, phases, module paths, backward, fusion, notes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from phaze.errors import ImportModelError
from phaze.frontends.stablehlo.argument_roles import ModuleRoles
from phaze.frontends.stablehlo.dataflow import (
    Dataflow,
    find_gradient,
    find_phases,
    minimize_saved_bytes,
    saved_activations,
    sorted_by_depth,
)
from phaze.frontends.stablehlo.interpreter import SymbolicRun, run_main, slot_name
from phaze.frontends.stablehlo.module import Module
from phaze.frontends.stablehlo.module_paths import OpFacts, find_module_paths, parameter_path, repeated_blocks
from phaze.frontends.stablehlo.name_scopes import Scope, path_keys
from phaze.frontends.stablehlo.op_rules.collectives_and_custom_calls import EMPTY_MESH
from phaze.frontends.stablehlo.partitioned_modules import (
    WholeProgramError,
    argument_tiles,
    find_strategy,
    strategy_note,
    whole_program,
)
from phaze.frontends.stablehlo.symbols import CONSTANT_PREFIX, Constant, Stack, Tensor, Value, tensors_of
from phaze.frontends.stablehlo.vector_fusion import fuse_vector_ops
from phaze.ir import Dim, Factor, FactorKind, Graph, Op, OpKind, Phase, Role, Rule
from phaze.ir import Tensor as GraphTensor
from phaze.ir.backward import split_tied_gradients
from phaze.ir.factor_following import refine_factors
from phaze.ir.graph_builder import reduction_rule

__all__ = ["argument_names", "build_graph"]

MOST_SHARDINGS = 5
"""The most arguments whose sharding is noted one by one; the rest are counted."""

MOST_CHARACTERS = 200
"""Where the text of a sharding or a mesh is cut in a note."""


def argument_names(module: Module) -> tuple[str, ...]:
    """Dotted paths of the arguments of `main`, as their locations tell; `argument3` where they tell nothing."""
    names: list[str] = []
    for index, argument in enumerate(module.main.arguments):
        name = ".".join(path_keys(argument.name)) or f"argument{index}"
        names.append(name if name not in names else f"{name}.{index}")
    return tuple(names)


def build_graph(
    module: Module,
    names: Sequence[str],
    find_roles: Callable[[SymbolicRun], ModuleRoles],
    *,
    name: str,
    batch_size: int | None = None,
    is_shuffled: bool = False,
) -> Graph:
    """The graph of a module, with backward, layers and factors.

    `names` are those of the arguments; `find_roles` says their roles after a first run. With `batch_size`, a prime that
    divides no other dimension, every factor that it divides is marked as batch. `is_shuffled` says that operations are
    not listed in the order of the program, as in HLO.
    """
    run = run_main(module, names)
    if not run.results:
        others = ", ".join(sorted(set(module.functions) - {run.function.name})) or "none"
        raise ImportModelError(
            f"the function {run.function.name!r} returns nothing, so that nothing it computes is seen outside of it, "
            f"as in a test; nothing to import. Other functions of the module (entry=, --entry): {others}."
        )
    if not run.arguments and not run.recorder.builder.ops:
        raise ImportModelError(
            f"the function {run.function.name!r} takes no arguments and computes from constants of the module alone, "
            "so that no work is left at run time; nothing to import."
        )
    roles = find_roles(run)
    stacked = _stacked_arguments(run, roles)
    if stacked:  # once more, with the parameters of each layer apart
        run = run_main(module, names, stacked)
    run = _with_scalar_loss(run, roles)
    graph = _graph(run, roles, name, names, batch_size or 1)
    partitioned_notes: tuple[str, ...] = ()
    if module.partitions * module.replicas > 1:
        graph, partitioned_notes = _of_all_devices(module, run, roles, graph)
    if is_shuffled:
        graph = replace(graph, ops=tuple(_forward_first(sorted_by_depth(graph.ops))))
    refined = refine_factors(split_tied_gradients(graph), batch_size)
    stacking = run.stacking
    stacked_tensors = {name for op in refined.ops if op.id in stacking for name in op.outputs}
    graph = fuse_vector_ops(minimize_saved_bytes(refined, stacked_tensors))
    graph = replace(graph, saved=saved_activations(graph))
    # Backward by rule follows the joined ops: gradients of ops that were joined afterwards would lose their forward op.
    if roles.loss is not None and not graph.gradients:
        graph = graph.with_backward()
    notes = [*roles.notes, *partitioned_notes, *_notes(module, run, stacked, names)]
    if len(graph.ops) < len(refined.ops):
        notes.append(
            f"vector ops are joined as a compiler would join them: {len(graph.ops):,} ops of {len(refined.ops):,}"
        )
    return replace(graph, notes=(*graph.notes, *notes))


def _of_all_devices(
    module: Module, run: SymbolicRun, roles: ModuleRoles, graph: Graph
) -> tuple[Graph, tuple[str, ...]]:
    """The graph of a module that runs on several devices, with the strategy that it runs, and notes."""
    devices = module.partitions * module.replicas
    strategy = find_strategy(module, roles, graph)
    notes = [strategy_note(strategy, devices)] if strategy else []
    graph = replace(graph, runs_as=strategy)
    if not module.is_partitioned:
        return graph, tuple(notes)
    parts: dict[str, tuple[int, ...]] = {}
    for argument, tiles in zip(run.arguments, argument_tiles(module), strict=True):
        for tensor in tensors_of((argument,)) if tiles is not None else ():
            # Of a stacked argument each slot has the other dimensions.
            tiled = tiles.parts if tiles is not None else ()
            parts[tensor.id] = argument.without(tiled) if isinstance(argument, Stack) else tiled
    try:
        whole = whole_program(graph, parts)
        notes.append(f"partitioned over {module.partitions} devices; made whole again by the shardings of arguments")
        return whole, tuple(notes)
    except WholeProgramError as error:
        notes.append(f"partitioned over {module.partitions} devices: these are the shapes of one device ({error})")
        return graph, tuple(notes)


def _with_scalar_loss(run: SymbolicRun, roles: ModuleRoles) -> SymbolicRun:
    """The run with the sum of a loss that has several elements, as the caller named it, in its place."""
    value = None if roles.loss is None else run.results[roles.loss]
    if value is None or not value.shape:
        return run
    run.recorder.note(f"the loss is the sum over a result of shape {list(value.shape)}")
    rule = reduction_rule(value.shape, tuple(range(len(value.shape))))
    inputs = (run.recorder.id(value, Scope()),)
    (total,) = run.recorder.emit(OpKind.REDUCTION, "sum", rule, inputs, (value.dtype,), Scope(), "loss")
    results = list(run.results)
    results[roles.loss or 0] = Tensor(total, (), value.dtype)
    return replace(run, results=tuple(results))


def _stacked_arguments(run: SymbolicRun, roles: ModuleRoles) -> dict[int, int]:
    """Parameters that the trips of a loop read slot by slot, and the optimizer state that goes with them.

    Each with the dimension that is taken apart.
    """
    stacked = {index: dim for index, dim in run.sliced.items() if roles.arguments[index] is Role.PARAMETER}
    dims = {run.arguments[index].shape: dim for index, dim in stacked.items()}
    for index, role in enumerate(roles.arguments):
        if role is Role.OPTIMIZER_STATE and run.arguments[index].shape in dims:
            stacked[index] = dims[run.arguments[index].shape]
    return stacked


def _graph(run: SymbolicRun, roles: ModuleRoles, name: str, names: Sequence[str], batch_size: int) -> Graph:
    """The graph of what a run recorded, with phases, roles and module paths."""
    builder = run.recorder.builder
    gradients, frozen = _gradients(run, roles)
    outputs = list(dict.fromkeys(tensor.id for tensor in tensors_of(_outputs(run, roles))))
    live = Dataflow(builder.ops, run.recorder.handed_on).ancestors([*outputs, *(gradient for _, gradient in gradients)])
    ops = [op for op in builder.ops if op.id in live]
    dataflow = Dataflow(ops, run.recorder.handed_on)
    loss = [] if roles.loss is None else [tensor.id for tensor in tensors_of((run.results[roles.loss],))]
    if roles.is_updated:
        gradients = _behind_updates(run, dataflow, gradients)
    gradient_ids = [gradient for _, gradient in gradients]
    states = [tensor.id for _, tensor in _tensors_with_role(run, roles, Role.OPTIMIZER_STATE)]
    ends = loss if loss or gradient_ids else outputs
    phases = find_phases(dataflow, ends, gradient_ids, states, run.recorder.repeats, run.stacking)
    _assign_roles(run, roles, frozen)
    facts = OpFacts(
        dataflow=dataflow,
        tensors=builder.tensors,
        scopes=run.recorder.scopes,
        repeats=run.recorder.repeats,
        phases=phases,
        loops=run.loops,
        parameters={t.id: parameter_path(names[i]) for i, t in _tensors_with_role(run, roles, Role.PARAMETER)},
        gradients=gradients,
    )
    modules = find_module_paths(facts)
    ops = [replace(op, phase=phases[op.id], module=modules.get(op.id, "")) for op in ops]
    _drop_unread(builder.tensors, ops, [*outputs, *gradient_ids])
    builder.ops = _forward_first(ops)
    builder.name = name
    builder.micro_batch_size = batch_size
    builder.gradients = gradients
    graph = builder.build(list(dict.fromkeys([*loss, *outputs])))
    blocks = None if modules else repeated_blocks(graph)
    if blocks is None:
        return graph
    modules = find_module_paths(facts, blocks)
    return replace(graph, ops=tuple(replace(op, module=modules.get(op.id, "")) for op in graph.ops))


def _tensors_with_role(run: SymbolicRun, roles: ModuleRoles, role: Role) -> Iterator[tuple[int, Tensor]]:
    """The tensors of the arguments with a role, each with the index of its argument."""
    for index, argument_role in enumerate(roles.arguments):
        if argument_role is role:
            for tensor in tensors_of((run.arguments[index],)):
                yield index, tensor


def _outputs(run: SymbolicRun, roles: ModuleRoles) -> list[Value]:
    """The results that are no gradients. New parameters are outputs."""
    gradients = set() if roles.is_updated else set(roles.gradients.values())
    return [value for index, value in enumerate(run.results) if index not in gradients]


def _gradients(run: SymbolicRun, roles: ModuleRoles) -> tuple[list[tuple[str, str]], set[str]]:
    """Pairs of parameter and gradient, slot by slot where they are stacked, and parameters that are frozen.

    These have a gradient of zeros (`jax.lax.stop_gradient`), or come out of a step as they went in.
    """
    pairs: list[tuple[str, str]] = []
    frozen: set[str] = set()
    for argument, result in roles.gradients.items():
        parameter, gradient = run.arguments[argument], run.results[result]
        if isinstance(parameter, Stack):
            if isinstance(gradient, Stack) and gradient.dim == parameter.dim:
                matched = zip(parameter.slots, gradient.slots, strict=True)
            else:
                matched = zip(parameter.slots, _slots(run, gradient, parameter), strict=True)
        else:
            matched = zip((parameter,), (gradient,), strict=True)
        for part, part_gradient in matched:
            is_zero = isinstance(part_gradient, Constant) and part_gradient.value == 0
            if not isinstance(part, Tensor):
                continue
            if is_zero or (isinstance(part_gradient, Tensor) and part_gradient.id == part.id):
                frozen.add(part.id)
            else:
                pairs.append((part.id, run.recorder.id(part_gradient, Scope())))
    return pairs, frozen if pairs else set()


def _slots(run: SymbolicRun, value: Value, parameter: Stack) -> list[Value]:
    """The slices of a whole tensor along the dimension that a parameter is taken apart in, as views."""
    if isinstance(value, Constant):
        return [value] * len(parameter.slots)
    source = run.recorder.id(value, Scope())
    dims = tuple(Dim((f"d{index}",)) for index in range(len(value.shape)))
    factors = tuple(
        Factor(f"d{i}", size, FactorKind.WHOLE if i == parameter.dim else FactorKind.FREE)
        for i, size in enumerate(value.shape)
    )
    rule = Rule((dims,), (parameter.without(dims),), factors)
    slots: list[Value] = []
    for index in range(len(parameter.slots)):
        attributes = {"index": index}
        (slot,) = run.recorder.emit(
            OpKind.VIEW, "select", rule, (source,), (value.dtype,), Scope(), "slice", attributes=attributes
        )
        slots.append(Tensor(slot, parameter.slot_shape, value.dtype))
    return slots


def _behind_updates(run: SymbolicRun, dataflow: Dataflow, updated: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The gradient that each new parameter was computed from."""
    arguments = frozenset(t.id for t in run.recorder.builder.tensors.values() if t.role is not None)
    pairs = ((parameter, find_gradient(dataflow, new, arguments)) for parameter, new in updated)
    return [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]


def _forward_first(ops: Sequence[Op]) -> list[Op]:
    """The ops with those of the forward first: a dump lists them in any order that respects what feeds what."""
    return [op for op in ops if op.phase is Phase.FORWARD] + [op for op in ops if op.phase is not Phase.FORWARD]


def _assign_roles(run: SymbolicRun, roles: ModuleRoles, frozen: set[str]) -> None:
    tensors = run.recorder.builder.tensors
    for value, role in zip(run.arguments, roles.arguments, strict=True):
        for tensor in tensors_of((value,)):
            is_frozen = role is Role.PARAMETER and tensor.id in frozen
            tensors[tensor.id] = replace(tensors[tensor.id], role=role, is_frozen=is_frozen)


def _drop_unread(tensors: dict[str, GraphTensor], ops: Sequence[Op], outputs: Sequence[str]) -> None:
    """Drop the tensors of ops that are gone, and the constants that nobody reads. Arguments stay."""
    results = {tensor_id for op in ops for tensor_id in op.outputs}
    read = {tensor_id for op in ops for tensor_id in op.inputs} | set(outputs)
    for tensor_id in list(tensors):
        is_argument = tensors[tensor_id].role is not None
        if tensor_id in results or (is_argument and (tensor_id in read or not tensor_id.startswith(CONSTANT_PREFIX))):
            continue
        del tensors[tensor_id]


def _notes(module: Module, run: SymbolicRun, stacked: Collection[int], names: Sequence[str]) -> list[str]:
    """What a reader of the graph should know: what the run noted, stacks, and shardings that are already there."""
    notes = [f"{text} ({count} times)" if count > 1 else text for text, count in run.recorder.notes.items()]
    notes += module.notes
    if stacked:
        first = slot_name(names[min(stacked)], 0)
        notes.append(f"{len(stacked)} stacked arguments are taken apart by the trips of a scan, such as {first}")
    sharded = [index for index, argument in enumerate(run.function.arguments) if argument.sharding]
    for index in sharded[:MOST_SHARDINGS]:
        sharding = run.function.arguments[index].sharding[:MOST_CHARACTERS]
        notes.append(f"sharding already present: {names[index]} {sharding}")
    if len(sharded) > MOST_SHARDINGS:
        notes.append(f"shardings already present on {len(sharded)} arguments in all")
    meshes = [mesh.strip()[:MOST_CHARACTERS] for mesh in module.meshes if EMPTY_MESH not in mesh]
    return [*notes, *(f"mesh already present: {mesh}" for mesh in meshes)]
