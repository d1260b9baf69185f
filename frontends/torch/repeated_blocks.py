"""Capturing a model with repeated blocks: few of them are captured, the others are copied, and a run proves it right.

A capture takes far longer than a run on fake tensors, and most of it goes into blocks that are equal. So:

 1. the trial run of the whole model, forward and backward, shows which blocks run the same operators
    (`choose_repeats`);
 2. the same model runs with five groups of each run of equal blocks (`shortened`); its record with copies put in
    (`block_copies.py`) must be equal to that of the whole model, entry by entry: operators, their numbers, what they
    read, shapes, blocks, parameters, gradients (`_check_record`);
 3. the model with few blocks is captured, and copies are put into its trace in the same way.

A model for which any of this fails is captured whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from phaze.frontends.torch.block_copies import FORWARD, KEPT_GROUPS, Copy, Entry, Irregular, Repeat, add_copies
from phaze.frontends.torch.capture import Argument, Capture, capture_loss
from phaze.frontends.torch.fake_model import LossCall, path_in_model
from phaze.frontends.torch.trial_run import BACKWARD, BUFFER, GRADIENT, PARAMETER, TrialRun, run_trial

__all__ = ["capture_repeated", "choose_repeats", "find_containers", "shortened"]

LONGEST_PERIOD = 8
"""The most blocks that alternate, such as five with a sliding window and one without. Longer periods would need more
blocks than most models have before anything is saved."""

LEAST_LEFT_OUT = 2
"""The fewest blocks that must be saved: the second run costs about as much as capturing one block."""


def find_containers(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The lists of blocks in a module, by path, that are long enough for some to be left out.

    Blocks that stand in a list twice, or share parameters with others, are no copies of each other.
    """
    uses: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    containers = {}
    for path, part in module.named_modules():
        children = list(part._modules)
        if (
            isinstance(part, torch.nn.ModuleList | torch.nn.Sequential)
            and len(children) >= KEPT_GROUPS + LEAST_LEFT_OUT
            and children == [str(number) for number in range(len(children))]
            and all(uses[id(parameter)] == 1 for parameter in part.parameters())
        ):
            containers[path] = part
    return containers


def choose_repeats(trial: TrialRun, containers: Mapping[str, torch.nn.Module]) -> list[Repeat]:
    """The longest run of equal groups in each list of blocks; in lists inside of other runs none is looked for."""
    repeats: list[Repeat] = []
    kinds = _kinds(trial.record, containers)
    for path, container in containers.items():
        if any(repeat.child_of(path) is not None for repeat in repeats):
            continue
        keys = [hash(tuple(kinds[path].get(child, ()))) for child in range(len(container._modules))]
        repeat = _longest_run(path, keys)
        if repeat is not None:
            repeats.append(repeat)
    return repeats


def _kinds(record: Sequence[Entry], containers: Mapping[str, torch.nn.Module]) -> dict[str, dict[int, list[object]]]:
    """What the arguments and the forward of each child are, by container and number of the child.

    To what an entry does belongs what it reads of that which was made before the container's first child ran: masks of
    several kinds have equal shapes.
    """
    kinds: dict[str, dict[int, list[object]]] = {path: {} for path in containers}
    starts: dict[str, int] = {}
    for index, entry in enumerate(record):
        if entry.section == FORWARD:
            for name in entry.names:
                path, _, child = name.rpartition(".")
                start = starts.setdefault(path, index)
                shared = [read for read in entry.reads if read < start and record[read].reads]
                kinds[path].setdefault(int(child), []).append((entry.key, *shared))
        elif entry.section in (PARAMETER, BUFFER):
            words = entry.names[0].split(".")
            for length in range(len(words) - 1):
                path = ".".join(words[:length])
                if path in kinds and words[length].isdigit():
                    kinds[path].setdefault(int(words[length]), []).append((tuple(words[length + 1 :]), entry.key))
    return kinds


def _longest_run(path: str, keys: Sequence[int]) -> Repeat | None:
    """The run of equal groups that leaves out the most children; of several, the one with the shortest period."""
    best: Repeat | None = None
    for period in range(1, LONGEST_PERIOD + 1):
        first = 0
        for child in range(len(keys) - period + 1):
            goes_on = child + period < len(keys) and keys[child] == keys[child + period]
            if not goes_on:
                run = Repeat(path=path, first=first, period=period, groups=(child + period - first) // period)
                left_out = run.left_out * period
                if left_out >= LEAST_LEFT_OUT and (best is None or left_out > best.left_out * best.period):
                    best = run
                first = child + 1
    return best


@contextlib.contextmanager
def shortened(containers: Mapping[str, torch.nn.Module], repeats: Sequence[Repeat]) -> Iterator[None]:
    """Leave the blocks that are to be copied out of their lists; the others are numbered anew."""
    modules = {repeat.path: containers[repeat.path]._modules for repeat in repeats}
    try:
        for repeat in repeats:
            children = list(modules[repeat.path].values())
            kept = [children[number] for number in repeat.kept_children(len(children))]
            containers[repeat.path]._modules = {str(number): child for number, child in enumerate(kept)}
        yield
    finally:
        for path, children_by_name in modules.items():
            containers[path]._modules = children_by_name


def capture_repeated(loss_call: LossCall, trial: TrialRun, containers: Mapping[str, torch.nn.Module]) -> Capture:
    """Capture few of a model's blocks and copy them; raises Irregular where this would not be the whole capture."""
    repeats = choose_repeats(trial, containers)
    if not repeats:
        raise Irregular("no blocks repeat often enough")
    if not trial.is_whole:
        raise Irregular("the backward does not run on fake tensors")
    with shortened(containers, repeats):
        try:
            short_trial = run_trial(loss_call, tuple(containers.values()))
            _check_record(trial, short_trial, repeats)
            captured = capture_loss(loss_call, directly=trial.has_own_gradients)
        except Irregular:
            raise
        except Exception as error:  # the model was not written for fewer blocks
            raise Irregular(f"with fewer blocks: {type(error).__name__}: {error}") from error
    return _with_copies(captured, repeats)


def _check_record(whole: TrialRun, short: TrialRun, repeats: Sequence[Repeat]) -> None:
    """Raise Irregular unless the whole run's record is the short one's with copies put in."""
    if not short.is_whole:
        raise Irregular("the backward fails with fewer blocks")
    copies = add_copies(short.record, repeats)
    if len(copies) != len(whole.record):
        raise Irregular(f"the whole model has {len(whole.record)} entries, with copies {len(copies)}")
    for entry, copied in zip(whole.record, copies, strict=True):
        if entry.key != short.record[copied.source].key or entry.reads != copied.reads or entry.names != copied.names:
            raise Irregular(f"the whole model runs {entry}, a copy would be {copied}")


def _with_copies(captured: Capture, repeats: Sequence[Repeat]) -> Capture:
    """The capture of the whole model, from one with few blocks; raises Irregular where blocks are no copies."""
    entries = _entries(captured)
    graph = torch.fx.Graph()
    nodes: list[torch.fx.Node] = []
    arguments: dict[torch.fx.Node, Argument] = {}
    outputs: list[torch.fx.Node] = []
    gradients: dict[str, torch.fx.Node] = {}
    for copied in add_copies(entries, repeats):
        if copied.source < len(captured.nodes):
            source = captured.nodes[copied.source]
            node = _copied_node(graph, source, copied, nodes)
            if source.op == "placeholder":
                arguments[node] = Argument(captured.arguments[source].kind, copied.names[0])
            nodes.append(node)
        elif copied.names:
            gradients[copied.names[0]] = nodes[copied.reads[0]]
        else:
            outputs.append(nodes[copied.reads[0]])
    return Capture(
        method=captured.method,
        nodes=tuple(nodes),
        arguments=arguments,
        outputs=tuple(outputs),
        gradients=gradients,
    )


def _entries(captured: Capture) -> list[Entry]:
    """An entry for every node of a capture, then for its outputs and its gradients."""
    numbers = {node: number for number, node in enumerate(captured.nodes)}
    first_calls: dict[int, int] = {}
    entries = []
    for number, node in enumerate(captured.nodes):
        value = _described(node.meta.get("val"))
        if node.op == "placeholder":
            argument = captured.arguments[node]
            entries.append(Entry((argument.kind, value), (), (argument.name,), argument.kind))
            continue
        is_backward = node.meta.get("partitioner_tag") == "is_backward"
        reads: list[int] = []
        target = "" if node.op == "get_attr" else node.target
        given = _plain((node.args, node.kwargs), numbers, reads)
        call = node.meta.get("seq_nr")
        if call is not None and not is_backward:
            first_calls.setdefault(call, number)
        has_call = call in first_calls
        if has_call:
            reads.append(first_calls[call])
        stack = node.meta.get(_stack_key(node)) or {}
        modules = tuple((str(key).partition("@")[2], kind) for key, (_, kind) in stack.items())
        names = tuple(path_in_model(path) for path, _ in stack.values())
        key = (node.op, target, given, value, has_call, modules)
        entries.append(Entry(key, tuple(reads), names, BACKWARD if is_backward else FORWARD))
    entries += [Entry("output", (numbers[node],), (), "output") for node in captured.outputs]
    entries += [Entry("gradient", (numbers[node],), (name,), GRADIENT) for name, node in captured.gradients.items()]
    return entries


def _stack_key(node: torch.fx.Node) -> str:
    """Where a node says in which modules it was called: nodes of the backward name those of the forward."""
    return "nn_module_stack" if node.meta.get("nn_module_stack") else "fwd_nn_module_stack"


def _described(value: object) -> object:
    """Shape and element type of a recorded value, or of each of several."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_described(item) for item in value)
    return repr(value)


def _plain(value: object, numbers: Mapping[torch.fx.Node, int], reads: list[int]) -> object:
    """An argument without its nodes, whose numbers go to `reads`."""
    if isinstance(value, torch.fx.Node):
        reads.append(numbers[value])
        return torch.fx.Node
    if isinstance(value, list | tuple):
        return tuple(_plain(item, numbers, reads) for item in value)
    if isinstance(value, Mapping):
        return tuple((name, _plain(item, numbers, reads)) for name, item in value.items())
    return (type(value), repr(value))


def _copied_node(
    graph: torch.fx.Graph, source: torch.fx.Node, copied: Copy, nodes: Sequence[torch.fx.Node]
) -> torch.fx.Node:
    """A node like the source that reads other nodes, stands in other modules and belongs to another call."""
    reads = iter(copied.reads)
    args, kwargs = _with_nodes((source.args, dict(source.kwargs)), reads, nodes)
    node = graph.create_node(source.op, source.target, args, kwargs, name=source.name)
    node.meta = {key: value for key, value in source.meta.items() if key in ("val", "partitioner_tag")}
    call = next(reads, None)
    if call is not None:
        node.meta["seq_nr"] = call
    stack = source.meta.get(_stack_key(source))
    if stack and source.op != "placeholder":
        node.meta[_stack_key(source)] = {
            "@".join([path, *str(key).split("@")[1:]]): (path, kind)
            for path, (key, (_, kind)) in zip(copied.names, stack.items(), strict=True)
        }
    return node


def _with_nodes(value: Any, reads: Iterator[int], nodes: Sequence[torch.fx.Node]) -> Any:
    """An argument with other nodes in place of its own, in the order of `_plain`."""
    if isinstance(value, torch.fx.Node):
        return nodes[next(reads)]
    if isinstance(value, list | tuple):
        return type(value)(_with_nodes(item, reads, nodes) for item in value)
    if isinstance(value, Mapping):
        return {name: _with_nodes(item, reads, nodes) for name, item in value.items()}
    return value
