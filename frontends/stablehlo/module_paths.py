"""Module paths of ops, so that layers can be found.

Ops get *anchors*: the numbered module that their name scope is in (`layer_3`), the trip of a scan over stacked
parameters, or the numbered container on the path of a parameter that they read (`params.h.3.w`). Names are taken where
they tell at least two modules with parameters apart, else parameter paths. A backward op is anchored by its own scope,
the parameters that it reads, the forward op that it repeats, or the forward tensors that it reads. What lies between
two anchors belongs to the first up to the narrowest place: where the fewest bytes are alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phaze.frontends.stablehlo.dataflow import Net
from phaze.frontends.stablehlo.interpreter import Loop
from phaze.frontends.stablehlo.name_scopes import scope_words, split_number, tokens
from phaze.frontends.stablehlo.symbols import CONSTANT
from phaze.ir import Op, OpKind, Phase, Tensor

__all__ = ["Place", "find_places", "parameter_path"]

OUTSIDE = ""
"""The group of what is in no numbered module."""


@dataclass(frozen=True, slots=True)
class Place:
    """What is known of all ops: scopes by op, parameters with their paths, loops, repeated ops, phases, tensors."""

    scopes: Mapping[str, str]
    parameters: Mapping[str, tuple[str, ...]]
    loops: Sequence[Loop]
    again: Mapping[str, str]
    phases: Mapping[str, Phase]
    tensors: Mapping[str, Tensor]


def find_places(
    net: Net, place: Place, gradients: Sequence[tuple[str, str]], blocks: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The module path of every op of forward and backward; none where no module is numbered.

    `gradients` pairs parameters with theirs; `blocks` are groups of forward ops that were found in another way.
    """
    forward = [op for op in net.ops if place.phases[op.id] is Phase.FORWARD]
    backward = [op for op in net.ops if place.phases[op.id] in (Phase.BACKWARD, Phase.RECOMPUTE)]
    paths = {op.id: _path(place, op) for op in (*forward, *backward)}
    groups = blocks or _forward_groups(net, place, forward, paths)
    if not groups:
        return {}
    modules = {op.id: _module(paths[op.id], groups[op.id]) for op in forward}
    known = _backward_anchors(net, place, backward, groups, paths) | _tails(net, gradients, groups)
    later = _filled(net, place, backward, known, {}, is_backward=True)
    return modules | _backward_modules(backward, later, forward, groups, modules, paths)


def _forward_groups(
    net: Net, place: Place, forward: Sequence[Op], paths: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    learned = _learned(place, forward)
    anchors = _forward_anchors(learned, forward, paths)
    if not any(anchors.values()):
        return {}
    return _with_runs(learned, forward, _filled(net, place, forward, anchors, learned))


def _learned(place: Place, forward: Sequence[Op]) -> dict[str, tuple[str, ...]]:
    """Tensors made of parameters alone (a transposed or cast weight), with the path of the first of those."""
    learned = dict(place.parameters)
    for op in forward:
        inputs = [tensor_id for tensor_id in op.inputs if not tensor_id.startswith(CONSTANT)]
        if inputs and all(tensor_id in learned for tensor_id in inputs):
            learned.update((tensor_id, learned[inputs[0]]) for tensor_id in op.outputs)
    return learned


def _path(place: Place, op: Op) -> tuple[str, ...]:
    """The words of an op's scope; a trip of a scan over stacked parameters is a numbered child of `scan`."""
    words: list[str] = []
    for word in scope_words(place.scopes.get(op.id, "")):
        if isinstance(word, str):
            words.append(word)
            continue
        number, trip = word
        loop = place.loops[number]
        owner = number
        if loop.follows is not None and place.loops[loop.follows].reads_arguments:
            owner = loop.follows
        if place.loops[owner].reads_arguments:
            used = loop.indices.get(trip, set())
            words += [f"scan{owner or ''}", str(next(iter(used)) if len(used) == 1 else trip)]
    return tuple(words)


def _children(path: Sequence[str]) -> list[tuple[str, str]]:
    """Every (container, numbered child) on a path, outermost first."""
    return [(".".join(path[:i]), ".".join(path[: i + 1])) for i, word in enumerate(path) if i and word.isdigit()]


def _group(path: Sequence[str], containers: frozenset[str]) -> str:
    """The outermost numbered module on a path that is in one of these containers."""
    return next((child for container, child in _children(path) if container in containers), OUTSIDE)


def _containers(paths: Mapping[str, Sequence[str]], ops: Sequence[Op]) -> frozenset[str]:
    """Containers with two children that compute the same; where there are none, those with two children at all."""
    work: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for op in ops:
        for pair in _children(paths.get(op.id, ())):
            work.setdefault(pair, []).append((op.function, id(op.rule)))
    alike = Counter((container, tuple(sorted(lines))) for (container, _), lines in work.items())
    found = frozenset(container for (container, _), count in alike.items() if count > 1)
    counts = Counter(container for container, _ in work)
    return found or frozenset(container for container, count in counts.items() if count > 1)


def _forward_anchors(
    learned: Mapping[str, tuple[str, ...]], forward: Sequence[Op], paths: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    """Groups by scope where scopes tell at least two modules with parameters apart, else by parameter."""
    reading = [op for op in forward if any(tensor_id in learned for tensor_id in op.inputs)]
    by_parameter = {op.id: next(learned[t] for t in op.inputs if t in learned) for op in reading}
    found: dict[str, str] = {}
    for known, ops in ((paths, forward), (by_parameter, reading)):
        containers = _containers(known, ops)
        groups = {op.id: _group(known[op.id], containers) for op in ops}
        found = {op_id: group for op_id, group in groups.items() if group}
        if len({groups[op.id] for op in reading} - {OUTSIDE}) > 1:
            break
    return {op.id: OUTSIDE for op in reading} | found


def _filled(
    net: Net,
    place: Place,
    ops: Sequence[Op],
    anchors: Mapping[str, str],
    learned: Mapping[str, tuple[str, ...]],
    *,
    is_backward: bool = False,
) -> dict[str, str]:
    """The group of every op: that of its anchor, or of a neighbour, cut where the fewest bytes are alive.

    Of several such places it is the first, backward the last: a norm at the end of a module, or at the start of the
    next one, is as narrow inside as at its ends. Ops on parameters alone stand anywhere in a program: they are
    nobody's neighbours.
    """
    aside = {op.id: anchors.get(op.id, OUTSIDE) for op in ops if op.outputs[0] in learned}
    ops = [op for op in ops if op.id not in aside]
    alive = _alive(net, place, ops)
    fixed = [index for index, op in enumerate(ops) if op.id in anchors]
    groups = [anchors.get(op.id, OUTSIDE) for op in ops]
    if not fixed:
        return aside | {op.id: OUTSIDE for op in ops}
    _absorb(groups, fixed)
    for index in range(fixed[0]):
        groups[index] = groups[fixed[0]]
    for first, last in zip(fixed, [*fixed[1:], len(ops)], strict=True):
        cut = last
        if last < len(ops) and groups[first] != groups[last]:
            places = range(last, first, -1) if is_backward else range(first + 1, last + 1)
            cut = min(places, key=lambda index: alive[index])
        for index in range(first + 1, last):
            groups[index] = groups[first] if index < cut else groups[last]
    return aside | {op.id: group for op, group in zip(ops, groups, strict=True)}


def _absorb(groups: list[str], fixed: Sequence[int]) -> None:
    """What reads a parameter of no module inside of a module belongs to the module."""
    for before, here, after in zip(fixed, fixed[1:], fixed[2:], strict=False):
        if groups[here] == OUTSIDE and groups[before] == groups[after]:
            groups[here] = groups[before]


def _alive(net: Net, place: Place, ops: Sequence[Op]) -> list[int]:
    """Bytes that cross the place before each op, and after the last; views are the tensor that they look at."""
    position = {op.id: index for index, op in enumerate(ops)}
    last_use: dict[str, int] = {}
    for index, op in enumerate(ops):
        for tensor_id in op.inputs:
            last_use[_storage(net, tensor_id)] = index
    change = [0] * (len(ops) + 2)
    for tensor_id, end in last_use.items():
        producer = net.producers.get(tensor_id)
        if producer is not None and producer.id in position and position[producer.id] < end:
            size = place.tensors[tensor_id].size_bytes
            change[position[producer.id] + 1] += size
            change[end + 1] -= size
    total, found = 0, []
    for step in change[:-1]:
        total += step
        found.append(total)
    return found


def _storage(net: Net, tensor_id: str) -> str:
    op = net.producers.get(tensor_id)
    while op is not None and op.kind is OpKind.VIEW:
        tensor_id = op.inputs[0]
        op = net.producers.get(tensor_id)
    return tensor_id


def _with_runs(
    learned: Mapping[str, tuple[str, ...]], forward: Sequence[Op], groups: Mapping[str, str]
) -> dict[str, str]:
    """The groups with a name for every run of ops outside of all modules; ops on parameters go where they are read."""
    found: dict[str, str] = {}
    names: list[str] = []
    run: list[Op] = []

    def close() -> None:
        if run:
            name = _name_of_run(learned, run)
            names.append(name if name not in names else f"{name}_{len(names)}")
            found.update((op.id, names[-1]) for op in run)
            run.clear()

    for op in forward:
        if op.outputs[0] in learned:
            continue
        if groups[op.id] == OUTSIDE:
            run.append(op)
        else:
            close()
            found[op.id] = groups[op.id]
    close()
    readers: dict[str, str] = {}
    for op in reversed(forward):
        if op.id not in found:
            at = next((readers[t] for t in op.outputs if t in readers), names[0] if names else OUTSIDE)
            found[op.id] = groups[op.id] or at
        readers.update((tensor_id, found[op.id]) for tensor_id in op.inputs)
    return found


def _name_of_run(learned: Mapping[str, tuple[str, ...]], run: Sequence[Op]) -> str:
    """The first path of a parameter that the ops read, without numbers, which would make it a module's child."""
    for op in run:
        for tensor_id in op.inputs:
            if tensor_id in learned:
                words = [word for word in learned[tensor_id] if not word.isdigit()]
                return ".".join(words[:-1] if len(words) > 2 else words) or "outside"
    return "outside"


def _module(path: Sequence[str], group: str) -> str:
    """An op's own path where it is inside of its group, else the group."""
    own = ".".join(path)
    return own if own.startswith(f"{group}.") else group


def _backward_anchors(
    net: Net,
    place: Place,
    backward: Sequence[Op],
    groups: Mapping[str, str],
    paths: Mapping[str, tuple[str, ...]],
) -> dict[str, str]:
    known = set(groups.values())
    users = _users(net, groups)
    anchors: dict[str, str] = {}
    for op in backward:
        own = next((child for _, child in _children(paths[op.id]) if child in known), OUTSIDE)
        if own:
            anchors[op.id] = own
        elif place.again.get(op.id) in groups:
            anchors[op.id] = groups[place.again[op.id]]
        else:
            found = [_belongs(net, tensor_id, groups, users) for tensor_id in op.inputs]
            given = [group for group in found if group is not None]
            if given:
                anchors[op.id] = next((group for group in given if group[-1:].isdigit()), given[0])
    return anchors


def _tails(net: Net, gradients: Sequence[tuple[str, str]], groups: Mapping[str, str]) -> dict[str, str]:
    """Ops at the end of a parameter's gradient, up to the first with two operands: they belong where it is used."""
    users = _users(net, groups)
    counts = Counter(tensor_id for op in net.ops for tensor_id in set(op.inputs))
    found: dict[str, str] = {}
    for parameter, gradient in gradients:
        using = users.get(parameter, set())
        tensor_id: str | None = gradient if len(using) == 1 else None
        while tensor_id is not None:
            op = net.producers.get(tensor_id)
            if op is None or op.id in groups or (tensor_id != gradient and counts[tensor_id] > 1):
                break
            found[op.id] = next(iter(using))
            tensor_id = op.inputs[0] if len(op.inputs) == 1 else None
    return found


def _users(net: Net, groups: Mapping[str, str]) -> dict[str, set[str]]:
    """The groups that read each tensor forward."""
    users: dict[str, set[str]] = {}
    for op in net.ops:
        if op.id in groups:
            for tensor_id in op.inputs:
                users.setdefault(tensor_id, set()).add(groups[op.id])
    return users


def _belongs(net: Net, tensor_id: str, groups: Mapping[str, str], users: Mapping[str, set[str]]) -> str | None:
    """The group that a tensor of the forward tells: that of its readers, or its maker's where they are several."""
    producer = net.producers.get(tensor_id)
    reading = users.get(tensor_id, set())
    if producer is None:
        return next(iter(reading)) if len(reading) == 1 else None
    if producer.id not in groups:
        return None
    return next(iter(reading)) if len(reading) == 1 else groups[producer.id]


def _backward_modules(
    backward: Sequence[Op],
    later: Mapping[str, str],
    forward: Sequence[Op],
    groups: Mapping[str, str],
    modules: Mapping[str, str],
    paths: Mapping[str, tuple[str, ...]],
) -> dict[str, str]:
    """A module that forward ops have: the op's own path, or any of its group."""
    known: dict[str, str] = {}
    for op in forward:
        known.setdefault(groups[op.id], modules[op.id])
    paths_known = set(modules.values())
    found = {}
    for op in backward:
        own = _module(paths[op.id], later[op.id])
        found[op.id] = own if own in paths_known else known.get(later[op.id], "")
    return found


def parameter_path(name: str) -> tuple[str, ...]:
    """The words of a parameter's path, numbers apart."""
    return tuple(word for token in tokens(name) for word in split_number(token))
