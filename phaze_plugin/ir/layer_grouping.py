"""How forward ops are grouped into layers: by module path, or else by cutting the graph where it is narrow.

`group_by_module` makes the children of a container of alike blocks (`h.0`, `h.1`, ...) a layer each. A module that is
called several times is such a container too: its calls are written `block@0`, `block@1`. On an op's path the outermost
container with at least two children that compute the same decides, and with it all containers whose paths differ from
its own in numbers only (the stages of a vision model); without any, the outermost numbered one. Children without
parameters are no blocks. What stands outside of every block forms a layer per connected piece (the embedding; final
norm, logits and loss), except that a piece without parameters (a mask, a position table) joins the layer that reads it,
or the embedding where several layers do, so that these stay equal.

`cut_at_waists` is for graphs whose paths say nothing: it cuts after ops where a single tensor carries everything that
follows needs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import networkx as nx

from phaze.ir.graph import Graph, Role
from phaze.ir.op import Op, Phase
from phaze.ir.rule import Rule

__all__ = ["PIECE", "cut_at_waists", "group_by_module", "rule_text"]

PIECE = " #"
"""Stands between a piece's name and its number, which tells apart pieces of one name."""


def group_by_module(graph: Graph, forward: Sequence[Op]) -> dict[str, str] | None:
    """Name the group of each forward op; None where no path has a numbered container."""
    alike = _containers_of_alike_children(forward)
    groups: dict[str, str] = {}
    for op in forward:
        numbered = _numbered(op.module)
        if numbered:
            _, groups[op.id] = next((pair for pair in numbered if _pattern(pair[0]) in alike), numbered[0])
    with_parameters = {groups[op.id] for op in forward if op.id in groups and reads_parameter(graph, (op,))}
    groups = {op_id: block for op_id, block in groups.items() if block in with_parameters}
    if not groups:
        return None
    return groups | _group_leftovers(graph, [op for op in forward if op.id not in groups], groups)


def _numbered(path: str) -> list[tuple[str, str]]:
    """Every (container, child) on a module path, outermost first; both as whole paths."""
    words = path.split(".")
    pairs = []
    for index, word in enumerate(words):
        child = ".".join(words[: index + 1])
        if "@" in word:
            pairs.append((child.rpartition("@")[0], child))
        elif word.isdigit():
            pairs.append((".".join(words[:index]), child))
    return pairs


def _pattern(container: str) -> str:
    """The path of a container with its numbers left open, so that the stages of a vision model are alike."""
    return ".".join("*" if word.isdigit() else word for word in container.split("."))


def _containers_of_alike_children(forward: Sequence[Op]) -> set[str]:
    """Patterns of containers with two children whose ops have the same functions and rules."""
    work: dict[tuple[str, str], list[str]] = {}
    rule_texts: dict[int, str] = {}
    for op in forward:
        text = rule_text(op.rule, rule_texts)
        for pair in _numbered(op.module):
            work.setdefault(pair, []).append(f"{op.function} {text}")
    counts = Counter(
        (container, hashlib.sha256("\n".join(lines).encode()).digest()) for (container, _), lines in work.items()
    )
    return {_pattern(container) for (container, _), count in counts.items() if count > 1}


def rule_text(rule: Rule, rule_texts: dict[int, str]) -> str:
    """The text of a rule, written once for each object: ops share rules, and texts are long."""
    if id(rule) not in rule_texts:
        rule_texts[id(rule)] = str(rule)
    return rule_texts[id(rule)]


def _group_leftovers(graph: Graph, leftovers: Sequence[Op], blocks: Mapping[str, str]) -> dict[str, str]:
    """Pieces of connected leftover ops that wait for the same blocks; those without parameters join another layer."""
    levels = _levels(graph, blocks)
    pieces = nx.utils.UnionFind(op.id for op in leftovers)
    ids = {op.id for op in leftovers}
    for op in leftovers:
        for tensor_id in op.inputs:
            producer = graph.producer(tensor_id)
            if producer is not None and producer.id in ids and levels[producer.id] == levels[op.id]:
                pieces.union(producer.id, op.id)
    members: dict[str, list[Op]] = {}
    for op in leftovers:
        members.setdefault(pieces[op.id], []).append(op)
    groups: dict[str, str] = {}
    for number, ops in enumerate(members.values()):
        groups |= dict.fromkeys((op.id for op in ops), f"{_piece_name(ops)}{PIECE}{number}")
    readers = _readers(graph)
    first = next((ops for ops in members.values() if not levels[ops[0].id] and reads_parameter(graph, ops)), None)
    for ops in reversed(list(members.values())):
        if not reads_parameter(graph, ops):
            reading = _reading(graph, ops, {**blocks, **groups}, readers)
            is_shared = first is not None and not levels[ops[0].id] and len(set(reading)) > 1
            joined = groups[first[0].id] if first is not None and is_shared else reading[0]
            groups |= dict.fromkeys((op.id for op in ops), joined)
    return groups


def _levels(graph: Graph, blocks: Mapping[str, str]) -> dict[str, int]:
    """For each forward op, the number of the last block (by appearance) that it waits for or is in."""
    number: dict[str, int] = {}
    levels: dict[str, int] = {}
    for op in graph.ops_of(Phase.FORWARD):
        producers = (graph.producer(tensor_id) for tensor_id in op.inputs)
        waits = max((levels[producer.id] for producer in producers if producer is not None), default=0)
        block = blocks.get(op.id)
        levels[op.id] = waits if block is None else max(waits, number.setdefault(block, len(number) + 1))
    return levels | _levels_by_readers(graph, blocks, levels)


def _levels_by_readers(graph: Graph, blocks: Mapping[str, str], levels: Mapping[str, int]) -> dict[str, int]:
    """The levels of ops that wait for nothing but parameters, such as a transposed weight.

    These are made where they are read: they have the level of the first reader, unless a reader is in a block.
    """
    forward, readers = graph.ops_of(Phase.FORWARD), _readers(graph)
    from_data: set[str] = set()
    for op in forward:
        if any(graph.tensors[name].role is Role.BATCH or name in from_data for name in op.inputs):
            from_data.update(op.outputs)
    earlier: dict[str, int] = {}
    for op in reversed(forward):
        using = [reader for tensor_id in op.outputs for reader in readers.get(tensor_id, ())]
        if op.id in blocks or from_data.intersection(op.outputs) or not using or blocks.keys() & set(using):
            continue
        earlier[op.id] = min(earlier.get(reader, levels[reader]) for reader in using)
    return earlier


def _piece_name(ops: Sequence[Op]) -> str:
    """The module of a piece, or its first and last one."""
    modules = list(dict.fromkeys(op.module or op.id for op in ops))
    return modules[0] if len(modules) == 1 else f"{modules[0]} .. {modules[-1]}"


def _readers(graph: Graph) -> dict[str, list[str]]:
    """The forward ops that read each tensor, in order."""
    readers: dict[str, list[str]] = {}
    for op in graph.ops_of(Phase.FORWARD):
        for tensor_id in op.inputs:
            readers.setdefault(tensor_id, []).append(op.id)
    return readers


def _reading(
    graph: Graph, ops: Sequence[Op], groups: Mapping[str, str], readers: Mapping[str, Sequence[str]]
) -> list[str]:
    """The groups of the ops that read from a piece, or of the last that it reads from where nobody does."""
    piece = {op.id for op in ops}
    made = (tensor_id for op in ops for tensor_id in op.outputs)
    reading = [groups[reader] for tensor_id in made for reader in readers.get(tensor_id, ()) if reader not in piece]
    if reading:
        return reading
    producers = [graph.producer(tensor_id) for op in ops for tensor_id in op.inputs]
    before = [groups[producer.id] for producer in producers if producer is not None and producer.id not in piece]
    return before[-1:] or [groups[ops[0].id]]


def cut_at_waists(graph: Graph, forward: Sequence[Op]) -> dict[str, str]:
    """Name a group for every forward op: runs of ops between waists, each holding at least one parameter.

    Tensors that depend on no parameter (masks, position tables) do not widen a waist.
    """
    last_use = {tensor_id: position for position, op in enumerate(forward) for tensor_id in op.inputs}
    learned = {tensor.id for tensor in graph.parameters}
    alive: set[str] = set()
    runs: list[list[Op]] = [[]]
    for position, op in enumerate(forward):
        runs[-1].append(op)
        if learned.intersection(op.inputs):
            learned.update(op.outputs)
            alive.update(tensor_id for tensor_id in op.outputs if tensor_id in last_use)
        alive = {tensor_id for tensor_id in alive if last_use[tensor_id] > position}
        if len(alive) == 1 and reads_parameter(graph, runs[-1]):
            runs.append([])
    if len(runs) > 1 and not reads_parameter(graph, runs[-1]):
        last = runs.pop()
        runs[-1].extend(last)
    return {op.id: f"part {index}" for index, run in enumerate(runs) for op in run}


def reads_parameter(graph: Graph, ops: Iterable[Op]) -> bool:
    """Whether some op reads a parameter."""
    return any(graph.tensors[tensor_id].role is Role.PARAMETER for op in ops for tensor_id in op.inputs)
