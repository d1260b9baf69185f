"""Find the module path of every op, from name scopes, parameter paths, scans or repetition, so that layers follow.

Ops get *anchors*: the numbered module that their name scope is in (`layer_3`), the trip of a scan over stacked
parameters, or the numbered container on the path of a parameter that they read (`params.h.3.w`). Names are taken where
they tell at least two modules with parameters apart, else parameter paths (`_forward_anchors`). A backward op is
anchored by its own scope, the forward op that it repeats, or the forward tensors that it reads (`_backward_anchors`).
What lies between two anchors belongs to the first up to the narrowest place, where the fewest bytes are alive
(`_fill_between_anchors`).

Where neither scopes nor parameters have numbered names, layers are cut at narrow waists, and a block may be several
such parts. The longest run of parts that repeats gives the blocks (`repeated_blocks`); what stands before and after it
is a layer each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from phaze.frontends.stablehlo.dataflow import Dataflow
from phaze.frontends.stablehlo.interpreter import Loop
from phaze.frontends.stablehlo.name_scopes import Scope, path_keys, scope_words, split_number
from phaze.frontends.stablehlo.symbols import CONSTANT_PREFIX
from phaze.ir import Graph, Op, OpKind, Phase, Tensor
from phaze.ir.layers import canonical_key

__all__ = ["OpFacts", "find_module_paths", "parameter_path", "repeated_blocks"]

Path = tuple[str, ...]
"""A module path as words, numbers apart: `("h", "3", "attn")`."""

OUTSIDE = ""
"""The group of ops that are in no numbered module."""


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What is known of all ops and tensors before modules are.

    `scopes`, `repeats` and `phases` are by op: where it stands, the earlier op that it computes again, its phase.
    `parameters` has the path of every parameter; `gradients` pairs parameters with their gradients.
    """

    dataflow: Dataflow
    tensors: Mapping[str, Tensor]
    scopes: Mapping[str, Scope]
    repeats: Mapping[str, str]
    phases: Mapping[str, Phase]
    loops: Sequence[Loop]
    parameters: Mapping[str, Path]
    gradients: Sequence[tuple[str, str]]


def parameter_path(name: str) -> Path:
    """The words of a parameter's path, numbers apart."""
    return tuple(word for key in path_keys(name) for word in split_number(key))


def find_module_paths(facts: OpFacts, blocks: Mapping[str, str] | None = None) -> dict[str, str]:
    """The module path of every op of forward and backward; none where no module is numbered.

    `blocks` are groups of forward ops that were found in another way.
    """
    ops, phases = facts.dataflow.ops, facts.phases
    forward = [op for op in ops if phases[op.id] is Phase.FORWARD]
    backward = [op for op in ops if phases[op.id] in (Phase.BACKWARD, Phase.RECOMPUTE)]
    paths = {op.id: _scope_path(facts, op) for op in (*forward, *backward)}
    groups = blocks or _forward_groups(facts, forward, paths)
    if not groups:
        return {}
    modules = {op.id: _module(paths[op.id], groups[op.id]) for op in forward}
    anchors = _backward_anchors(facts, backward, groups, paths) | _gradient_ends(facts, groups)
    backward_groups = _fill_between_anchors(facts, backward, anchors, {}, is_backward=True)
    return modules | _backward_modules(backward, backward_groups, forward, groups, modules, paths)


def repeated_blocks(graph: Graph) -> dict[str, str] | None:
    """Names of blocks by forward op, for a graph without module paths; None where nothing repeats."""
    layers = graph.layers
    rule_texts: dict[int, str] = {}
    run = _longest_run([canonical_key(graph, layer.forward, layer.outputs, rule_texts) for layer in layers])
    if run is None:
        return None
    names = ["first"] * run.start
    names += [f"block.{index // run.period}" for index in range(run.length)]
    names += ["last"] * (len(layers) - len(names))
    return {op.id: names[layer.index] for layer in layers for op in layer.forward}


@dataclass(frozen=True, slots=True)
class _Run:
    """Keys that repeat: where they start, after how many they repeat, and how often they stand there."""

    start: int
    period: int
    count: int

    @property
    def length(self) -> int:
        return self.period * self.count


def _longest_run(keys: Sequence[str]) -> _Run | None:
    """The run of at least two repetitions that covers the most keys."""
    longest: _Run | None = None
    for period in range(1, len(keys) // 2 + 1):
        for start in range(len(keys) - 2 * period + 1):
            count = 1
            while keys[start : start + period] == keys[start + count * period : start + (count + 1) * period]:
                count += 1
            run = _Run(start, period, count)
            if count > 1 and (longest is None or run.length > longest.length):
                longest = run
    return longest


def _forward_groups(facts: OpFacts, forward: Sequence[Op], paths: Mapping[str, Path]) -> dict[str, str]:
    """The group of every forward op: a numbered module, or a run of ops outside of all; none where none is numbered."""
    learned = _made_of_parameters(facts, forward)
    anchors = _forward_anchors(learned, forward, paths)
    if not any(anchors.values()):
        return {}
    return _with_named_runs(learned, forward, _fill_between_anchors(facts, forward, anchors, learned))


def _made_of_parameters(facts: OpFacts, forward: Sequence[Op]) -> dict[str, Path]:
    """Tensors made of parameters alone (a transposed or cast weight), with the path of the first of those."""
    learned = dict(facts.parameters)
    for op in forward:
        inputs = [tensor_id for tensor_id in op.inputs if not tensor_id.startswith(CONSTANT_PREFIX)]
        if inputs and all(tensor_id in learned for tensor_id in inputs):
            learned.update((tensor_id, learned[inputs[0]]) for tensor_id in op.outputs)
    return learned


def _scope_path(facts: OpFacts, op: Op) -> Path:
    """The words of an op's scope; a trip of a scan over stacked parameters is a numbered child of `scan`."""
    words: list[str] = []
    for word in scope_words(facts.scopes.get(op.id, Scope())):
        if isinstance(word, str):
            words.append(word)
            continue
        loop = facts.loops[word.loop]
        owner = word.loop  # backward's scan counts as the forward's, whose stacks it reads
        if loop.follows is not None and facts.loops[loop.follows].reads_arguments:
            owner = loop.follows
        if facts.loops[owner].reads_arguments:
            slots = loop.slots_used.get(word.number, set())
            words += [f"scan{owner or ''}", str(next(iter(slots)) if len(slots) == 1 else word.number)]
    return tuple(words)


def _numbered_children(path: Path) -> list[tuple[str, str]]:
    """Every (container, numbered child) on a path, outermost first."""
    return [(".".join(path[:i]), ".".join(path[: i + 1])) for i, word in enumerate(path) if i and word.isdigit()]


def _group(path: Path, containers: frozenset[str]) -> str:
    """The outermost numbered module on a path that is in one of these containers."""
    return next((child for container, child in _numbered_children(path) if container in containers), OUTSIDE)


def _containers(paths: Mapping[str, Path], ops: Sequence[Op]) -> frozenset[str]:
    """Containers with two children that compute the same; where there are none, those with two children at all."""
    work: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for op in ops:
        for container_and_child in _numbered_children(paths.get(op.id, ())):
            work.setdefault(container_and_child, []).append((op.function, id(op.rule)))
    alike = Counter((container, tuple(sorted(computed))) for (container, _), computed in work.items())
    with_equal_children = frozenset(container for (container, _), count in alike.items() if count > 1)
    child_counts = Counter(container for container, _ in work)
    return with_equal_children or frozenset(container for container, count in child_counts.items() if count > 1)


def _is_loop(container: str) -> bool:
    """Whether the numbered children of a container are trips; no scope has this word, which control flow has."""
    return re.fullmatch(r"(.*\.)?scan\d*", container) is not None


def _forward_anchors(learned: Mapping[str, Path], forward: Sequence[Op], paths: Mapping[str, Path]) -> dict[str, str]:
    """Groups by scope where scopes tell at least two modules with parameters apart, else by parameter."""
    reading = [op for op in forward if any(tensor_id in learned for tensor_id in op.inputs)]
    by_parameter = {op.id: next(learned[t] for t in op.inputs if t in learned) for op in reading}
    numbered: dict[str, str] = {}
    for known_paths, ops in ((paths, forward), (by_parameter, reading)):
        containers = _containers(known_paths, ops)
        groups = {op.id: _group(known_paths[op.id], containers) for op in ops}
        if containers and all(map(_is_loop, containers)):
            return groups  # every op of a loop says so: what stands between two loops is in none
        numbered = {op_id: group for op_id, group in groups.items() if group}
        if len({groups[op.id] for op in reading} - {OUTSIDE}) > 1:
            break
    return {op.id: OUTSIDE for op in reading} | numbered


def _fill_between_anchors(
    facts: OpFacts,
    ops: Sequence[Op],
    anchors: Mapping[str, str],
    learned: Mapping[str, Path],
    *,
    is_backward: bool = False,
) -> dict[str, str]:
    """The group of every op: that of its anchor, or of a neighbour, cut where the fewest bytes are alive.

    Of several such places it is the first, backward the last: a norm at the end of a module, or at the start of the
    next one, is as narrow inside as at its ends. Ops on parameters alone stand anywhere in a program: they are
    nobody's neighbours.
    """
    on_parameters = {op.id: anchors.get(op.id, OUTSIDE) for op in ops if op.outputs[0] in learned}
    ops = [op for op in ops if op.id not in on_parameters]
    alive = _bytes_alive(facts, ops)
    anchored = [index for index, op in enumerate(ops) if op.id in anchors]
    groups = [anchors.get(op.id, OUTSIDE) for op in ops]
    if not anchored:
        return on_parameters | {op.id: OUTSIDE for op in ops}
    _absorb_outsiders(groups, anchored)
    for index in range(anchored[0]):
        groups[index] = groups[anchored[0]]
    for first, last in zip(anchored, [*anchored[1:], len(ops)], strict=True):
        cut = last
        if last < len(ops) and groups[first] != groups[last]:
            places = range(last, first, -1) if is_backward else range(first + 1, last + 1)
            cut = min(places, key=lambda index: alive[index])
        for index in range(first + 1, last):
            groups[index] = groups[first] if index < cut else groups[last]
    return on_parameters | {op.id: group for op, group in zip(ops, groups, strict=True)}


def _absorb_outsiders(groups: list[str], anchored: Sequence[int]) -> None:
    """Give an op that reads a parameter of no module to the module that the anchors before and after it are in."""
    for before, index, after in zip(anchored, anchored[1:], anchored[2:], strict=False):
        if groups[index] == OUTSIDE and groups[before] == groups[after]:
            groups[index] = groups[before]


def _bytes_alive(facts: OpFacts, ops: Sequence[Op]) -> list[int]:
    """Bytes that are alive before each op, and after the last; views are the tensor that they look at."""
    position = {op.id: index for index, op in enumerate(ops)}
    last_use: dict[str, int] = {}
    for index, op in enumerate(ops):
        for tensor_id in op.inputs:
            last_use[_storage(facts.dataflow, tensor_id)] = index
    change = [0] * (len(ops) + 2)
    for tensor_id, end in last_use.items():
        producer = facts.dataflow.producers.get(tensor_id)
        if producer is not None and producer.id in position and position[producer.id] < end:
            size_bytes = facts.tensors[tensor_id].size_bytes
            change[position[producer.id] + 1] += size_bytes
            change[end + 1] -= size_bytes
    return list(accumulate(change[:-1]))


def _storage(dataflow: Dataflow, tensor_id: str) -> str:
    """The tensor that a view, or a view of a view, looks at."""
    op = dataflow.producers.get(tensor_id)
    while op is not None and op.kind is OpKind.VIEW:
        tensor_id = op.inputs[0]
        op = dataflow.producers.get(tensor_id)
    return tensor_id


def _with_named_runs(learned: Mapping[str, Path], forward: Sequence[Op], groups: Mapping[str, str]) -> dict[str, str]:
    """The groups with a name for every run of ops outside of all modules; ops on parameters go where they are read."""
    named: dict[str, str] = {}
    run_names: list[str] = []
    run: list[Op] = []

    def close_run() -> None:
        if run:
            name = _name_of_run(learned, run)
            run_names.append(name if name not in run_names else f"{name}_{len(run_names)}")
            named.update((op.id, run_names[-1]) for op in run)
            run.clear()

    for op in forward:
        if op.outputs[0] in learned:
            continue
        if groups[op.id] == OUTSIDE:
            run.append(op)
        else:
            close_run()
            named[op.id] = groups[op.id]
    close_run()
    reader_groups: dict[str, str] = {}
    for op in reversed(forward):
        if op.id not in named:
            first_run = run_names[0] if run_names else OUTSIDE
            read_in = next((reader_groups[t] for t in op.outputs if t in reader_groups), first_run)
            named[op.id] = groups[op.id] or read_in
        reader_groups.update((tensor_id, named[op.id]) for tensor_id in op.inputs)
    return named


def _name_of_run(learned: Mapping[str, Path], run: Sequence[Op]) -> str:
    """The first path of a parameter that the ops read, without numbers, which would make it a module's child."""
    for op in run:
        for tensor_id in op.inputs:
            if tensor_id in learned:
                words = [word for word in learned[tensor_id] if not word.isdigit()]
                return ".".join(words[:-1] if len(words) > 2 else words) or "outside"
    return "outside"


def _module(path: Path, group: str) -> str:
    """An op's own path where it is inside of its group, else the group."""
    module = ".".join(path)
    return module if module.startswith(f"{group}.") else group


def _backward_anchors(
    facts: OpFacts, backward: Sequence[Op], groups: Mapping[str, str], paths: Mapping[str, Path]
) -> dict[str, str]:
    """The groups of backward ops, by their own scopes, by the forward op that they repeat, or by what they read."""
    known_groups = set(groups.values())
    readers = _reading_groups(facts.dataflow, groups)
    anchors: dict[str, str] = {}
    for op in backward:
        by_scope = next((child for _, child in _numbered_children(paths[op.id]) if child in known_groups), OUTSIDE)
        if by_scope:
            anchors[op.id] = by_scope
        elif facts.repeats.get(op.id) in groups:
            anchors[op.id] = groups[facts.repeats[op.id]]
        else:
            by_operand = [_group_of_tensor(facts.dataflow, tensor_id, groups, readers) for tensor_id in op.inputs]
            told = [group for group in by_operand if group is not None]
            if told:
                anchors[op.id] = next((group for group in told if group[-1:].isdigit()), told[0])
    return anchors


def _gradient_ends(facts: OpFacts, groups: Mapping[str, str]) -> dict[str, str]:
    """Ops at the end of a parameter's gradient, back to the first with two operands.

    They belong to the group that uses the parameter.
    """
    dataflow = facts.dataflow
    readers = _reading_groups(dataflow, groups)
    read_counts = Counter(tensor_id for op in dataflow.ops for tensor_id in set(op.inputs))
    ends: dict[str, str] = {}
    for parameter, gradient in facts.gradients:
        using = readers.get(parameter, set())
        tensor_id: str | None = gradient if len(using) == 1 else None
        while tensor_id is not None:
            op = dataflow.producers.get(tensor_id)
            if op is None or op.id in groups or (tensor_id != gradient and read_counts[tensor_id] > 1):
                break
            ends[op.id] = next(iter(using))
            tensor_id = op.inputs[0] if len(op.inputs) == 1 else None
    return ends


def _reading_groups(dataflow: Dataflow, groups: Mapping[str, str]) -> dict[str, set[str]]:
    """The groups that read each tensor forward."""
    readers: dict[str, set[str]] = {}
    for op in dataflow.ops:
        if op.id in groups:
            for tensor_id in op.inputs:
                readers.setdefault(tensor_id, set()).add(groups[op.id])
    return readers


def _group_of_tensor(
    dataflow: Dataflow, tensor_id: str, groups: Mapping[str, str], readers: Mapping[str, set[str]]
) -> str | None:
    """The group that a tensor of the forward tells: that of its readers, or its producer's where they are several."""
    producer = dataflow.producers.get(tensor_id)
    reading = readers.get(tensor_id, set())
    if producer is None:
        return next(iter(reading)) if len(reading) == 1 else None
    if producer.id not in groups:
        return None
    return next(iter(reading)) if len(reading) == 1 else groups[producer.id]


def _backward_modules(
    backward: Sequence[Op],
    backward_groups: Mapping[str, str],
    forward: Sequence[Op],
    groups: Mapping[str, str],
    modules: Mapping[str, str],
    paths: Mapping[str, Path],
) -> dict[str, str]:
    """For every backward op a module that forward ops have: that of its own path, or the first of its group."""
    first_module: dict[str, str] = {}
    for op in forward:
        first_module.setdefault(groups[op.id], modules[op.id])
    forward_modules = set(modules.values())
    backward_modules = {}
    for op in backward:
        group = backward_groups[op.id]
        module = _module(paths[op.id], group)
        backward_modules[op.id] = module if module in forward_modules else first_module.get(group, "")
    return backward_modules
