"""Stages of a pipeline: the model's own code, run with holes.

A stage runs the whole forward of the model, in which only its own modules are there. Modules of other stages are
absent: they return tensors of the right shapes full of NaN, which cost nothing and must never reach a result. A cut
stands before the call of a module. The stage before it runs up to that call and hands over those of its arguments that
depend on parameters; the stage behind it runs up to the same call, puts what it received in their place, and goes on.
What is made of the batch alone (masks, positions) every stage makes itself.

Which modules belong to which stage, what absent ones return and what crosses each cut are found by one run on fake
tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from phaze.backends.torch.split_tensor import is_split
from phaze.errors import PlanError

__all__ = ["Rehearsal", "Relay", "StageCut", "StagePart", "build_stage", "cut_paths", "rehearse"]


@dataclass(frozen=True, slots=True)
class Relay:
    """What crosses a cut: leaves of the arguments of the module behind it, by place, and their shapes and types.

    `places` has a tuple for each tensor: all leaves that are that same tensor.
    """

    places: tuple[tuple[int, ...], ...]
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that depends on parameters, the stage that has it, and whether NaN would not show in it."""

    tensor: torch.Tensor
    stage: int
    hides: bool


@dataclass(slots=True)
class Rehearsal:
    """What a run of the whole model tells: stages of every module with parameters, results of calls, relays.

    `made` are tensors that depend on parameters, by their ids, and `received` those that crossed a cut, by the ids of
    the tensors that they stand for; both are kept while the run lasts.
    """

    stages: dict[str, set[int]] = field(default_factory=dict)
    results: dict[str, list[Any]] = field(default_factory=dict)
    relays: list[Relay] = field(default_factory=list)
    made: dict[int, Made] = field(default_factory=dict)
    received: dict[int, torch.Tensor] = field(default_factory=dict)


class StageCut(Exception):  # noqa: N818 - ends a stage's forward, never seen by users
    """The forward has come to the end of its stage."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        super().__init__()
        self.values = values


def cut_paths(stages: Sequence[Sequence[str]], module: Any) -> list[str]:
    """The module before whose call each stage but the first begins: the outermost one that holds no earlier layer.

    Raises PlanError where a stage begins with something that is no module.
    """
    modules = dict(module.named_modules())
    known = {name for name, part in modules.items() if type(part).forward is not torch.nn.Module.forward}
    firsts = [_module_of(layer, known) for layers in stages for layer in layers]
    found: list[str] = []
    position = 0
    for layers in stages[:-1]:
        position += len(layers)
        before = [path for path in firsts[:position] if path]
        path = firsts[position]
        if not path:
            name = stages[len(found) + 1][0]
            raise PlanError(
                f"layer {name!r} begins outside of any module, so {type(module).__name__} cannot be cut there; plan "
                "with strategy pp=1, or cut elsewhere with `stages`."
            )
        words = path.split(".")
        outer = [".".join(words[: count + 1]) for count in range(len(words))]
        outer = [one for one in outer if one in known]
        found.append(next(one for one in outer if not any(_is_inside(other, one) for other in before)))
    return found


def _module_of(layer: str, known: set[str]) -> str:
    """The first module of a layer named `number:first .. last`, or the nearest one that exists around either end."""
    for path in layer.partition(":")[2].split(" .. "):
        while path and path not in known:
            path = path.rpartition(".")[0]
        if path:
            return path
    return ""


def _is_inside(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def skeleton_of(module: Any, make: Callable[[Any], Any]) -> Any:
    """A copy of the module tree whose tensors are made anew; ties are kept."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in memo:
            made = make(tensor)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    return copy.deepcopy(module, memo)


def rehearse(module: Any, paths: Sequence[str], batch: Mapping[str, Any], dtype: Any) -> Rehearsal:
    """Run the whole model once on fake tensors and write down what stages need; numbers cross cuts in `dtype`.

    Raises PlanError where the model cannot be cut so.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fake(tensor: Any) -> Any:
        return torch.empty_like(tensor, device="cpu")

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        clone = skeleton_of(module, fake)
        inputs = tree_map(lambda leaf: fake(leaf) if isinstance(leaf, torch.Tensor) else leaf, dict(batch))
    seen, reached = Rehearsal(), [0]
    for name, part in clone.named_modules():
        part.register_forward_pre_hook(_entering(name, part, _Cuts(paths, reached, dtype), seen), with_kwargs=True)
        part.register_forward_hook(_leaving(name, part, reached, seen))
    with mode, _Dependence(seen, reached):
        clone(**inputs)
    seen.made.clear()
    seen.received.clear()
    if reached[0] < len(paths):
        raise PlanError(f"{paths[reached[0]]!r} is never called, so {type(module).__name__} cannot be cut before it.")
    return seen


class _Dependence(TorchFunctionMode):
    """Follows what depends on parameters although it has no gradient: comparisons, indices, what is detached.

    Absent modules give NaN for numbers, which shows where it leaks; of such values it would not show.
    """

    def __init__(self, seen: Rehearsal, reached: list[int]) -> None:
        super().__init__()
        self.seen, self.reached = seen, reached

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        read = [leaf for leaf in tree_flatten((args, kwargs or {}))[0] if isinstance(leaf, torch.Tensor)]
        if not made or not any(leaf.requires_grad or id(leaf) in self.seen.made for leaf in read):
            return result
        known = [self.seen.made[id(leaf)] for leaf in read if id(leaf) in self.seen.made]
        if any(one.hides and one.stage < self.reached[0] for one in known):
            raise PlanError(
                f"{getattr(func, '__name__', func)} reads what an earlier stage compared or counted and what is no "
                "argument of the module where this stage begins; cut elsewhere, or plan with strategy pp=1."
            )
        for leaf in made:
            if not leaf.requires_grad:
                hides = not leaf.is_floating_point() or any(one.hides for one in known)
                self.seen.made.setdefault(id(leaf), Made(leaf, self.reached[0], hides))
        return result


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Where stages begin, how many were reached, and the type in which numbers cross."""

    paths: Sequence[str]
    reached: list[int]
    dtype: Any


def _entering(name: str, part: Any, cuts: _Cuts, seen: Rehearsal) -> Callable[..., Any]:
    def hook(_: Any, args: Any, kwargs: Any) -> Any:
        reached = cuts.reached
        if reached[0] < len(cuts.paths) and cuts.paths[reached[0]] == name:
            seen.relays.append(_relay((args, kwargs), seen, cuts.dtype))
            _hand_over((args, kwargs), seen, reached[0] + 1)
            reached[0] += 1
        if part._parameters:
            seen.stages.setdefault(name, set()).add(reached[0])
        leaves, tree = tree_flatten((args, kwargs))
        return tree_unflatten([seen.received.get(id(leaf), leaf) for leaf in leaves], tree)

    return hook


def _hand_over(arguments: Any, seen: Rehearsal, stage: int) -> None:
    """Put other tensors in the place of those that cross, as the stage behind the cut will see them."""
    leaves, _ = tree_flatten(arguments)
    for same in seen.relays[-1].places:
        leaf = leaves[same[0]]
        other = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        hides = id(leaf) in seen.made and seen.made[id(leaf)].hides
        seen.made.setdefault(id(leaf), Made(leaf, stage - 1, hides))
        seen.made[id(other)] = Made(other, stage, hides)
        seen.received[id(leaf)] = other


def _leaving(name: str, part: Any, reached: list[int], seen: Rehearsal) -> Callable[..., None]:
    has_parameters = any(True for _ in part.parameters())

    def hook(_: Any, __: Any, result: Any) -> None:
        leaves = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)] if has_parameters else []
        for leaf in leaves:
            seen.made.setdefault(id(leaf), Made(leaf, reached[0], not leaf.is_floating_point()))
        if part._parameters:  # a module around a cut may read its own parameters on both sides of it
            seen.stages[name].update(range(min(seen.stages[name]), reached[0] + 1))
        shapes = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, result)
        seen.results.setdefault(name, []).append(shapes)

    return hook


def _relay(arguments: Any, seen: Rehearsal, dtype: Any) -> Relay:
    leaves, _ = tree_flatten(arguments)
    places: dict[int, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and (leaf.requires_grad or id(leaf) in seen.made):
            places.setdefault(id(leaf), []).append(place)
    found = tuple(tuple(same) for same in places.values())
    tensors = []
    for same in found:
        leaf = leaves[same[0]]
        made = leaf.detach().to("meta", dtype if leaf.is_floating_point() else leaf.dtype)
        tensors.append(made.requires_grad_(leaf.requires_grad))
    return Relay(found, tuple(tensors))


class _Absent(torch.nn.Module):
    """Stands for a module of another stage: its results have the right shapes, and NaN where they have numbers."""

    def __init__(self, original: Any, results: Sequence[Any]) -> None:
        super().__init__()
        object.__setattr__(self, "original", (original,))
        self.results, self.calls = tuple(results), 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.results[self.calls % len(self.results)]
        self.calls += 1

        def made(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            value = float("nan") if leaf.is_floating_point() else 0
            return torch.full((), value, dtype=leaf.dtype, device=_device((args, kwargs))).expand(leaf.shape)

        return tree_map(made, result)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "original")[0], name)


def _device(arguments: Any) -> Any:
    leaves, _ = tree_flatten(arguments)
    return next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))


class _Exit(torch.nn.Module):
    """Stands for the module behind a stage's end: its call hands over what crosses the cut."""

    def __init__(self, original: Any, relay: Relay, received: dict[int, Any]) -> None:
        super().__init__()
        object.__setattr__(self, "original", (original,))
        self.relay, self.received = relay, received

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = tree_flatten((args, kwargs), is_leaf=is_split)
        values = (leaves[same[0]] for same in self.relay.places)
        raise StageCut(tuple(self.received.get(id(value), value) for value in values))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "original")[0], name)


@dataclass(slots=True)
class StagePart:
    """A stage's module, and the tensors that it received for the run at hand, by the tensor that they stand for."""

    module: Any
    relay_in: Relay | None
    relay_out: Relay | None
    incoming: list[Any] = field(default_factory=list)
    received: dict[int, Any] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    axis: Any = None


def build_stage(module: Any, paths: Sequence[str], seen: Rehearsal, stage: int) -> StagePart:
    """The model with the modules of one stage; its parameters are the model's own."""
    live = {name for name, stages in seen.stages.items() if stage in stages}
    clone = skeleton_of(module, lambda tensor: torch.empty_like(tensor, device="meta"))
    originals = dict(module.named_modules(remove_duplicate=False))
    for name, part in clone.named_modules():
        if name in live:
            for key in part._parameters:
                part._parameters[key] = originals[name]._parameters[key]
        for key in part._buffers:
            part._buffers[key] = originals[name]._buffers[key]
    relay_in = seen.relays[stage - 1] if stage else None
    relay_out = seen.relays[stage] if stage < len(paths) else None
    built = StagePart(clone, relay_in, relay_out)
    exit_path = paths[stage] if stage < len(paths) else None
    _put_holes(clone, "", live, exit_path, seen, built)
    _drop_unheld(clone, originals)
    if relay_in is not None:
        entry = paths[stage - 1]
        clone.get_submodule(entry).register_forward_pre_hook(_receiving(built, relay_in), with_kwargs=True)
        for name, part in clone.named_modules():
            if name != entry and any(_is_inside(one, name) for one in live):
                part.register_forward_pre_hook(_replacing(built), with_kwargs=True)
    return built


def _put_holes(part: Any, path: str, live: set[str], exit_path: str | None, seen: Rehearsal, built: StagePart) -> None:
    for key, child in list(part._modules.items()):
        if child is None:
            continue
        name = f"{path}.{key}".lstrip(".")
        if name == exit_path:
            assert built.relay_out is not None
            part._modules[key] = _Exit(child, built.relay_out, built.received)
        elif not any(True for _ in child.parameters()):
            continue
        elif not any(_is_inside(one, name) for one in live):
            if name in seen.results:
                part._modules[key] = _Absent(child, seen.results[name])
            else:  # a container that is never called itself
                _put_holes(child, name, live, exit_path, seen, built)
        else:
            _put_holes(child, name, live, exit_path, seen, built)


def _drop_unheld(clone: Any, originals: Mapping[str, Any]) -> None:
    """Modules that are never called keep what the stage holds anyway (tied parameters), and nothing else."""
    held = {id(parameter) for parameter in clone.parameters() if parameter.device.type != "meta"}
    for name, part in clone.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and parameter.device.type == "meta" and name in originals:
                original = originals[name]._parameters[key]
                if original is not parameter:
                    part._parameters[key] = original if id(original) in held else None


def _receiving(built: StagePart, relay: Relay) -> Callable[..., Any]:
    def hook(_: Any, args: Any, kwargs: Any) -> Any:
        if not built.incoming:
            return None
        leaves, tree = tree_flatten((args, kwargs), is_leaf=is_split)
        for same, value in zip(relay.places, built.incoming, strict=True):
            for place in same:
                built.kept.append(leaves[place])  # so that no other tensor gets its id
                built.received[id(leaves[place])] = value
                leaves[place] = value
        built.incoming.clear()
        return tree_unflatten(leaves, tree)

    return hook


def _replacing(built: StagePart) -> Callable[..., Any]:
    def hook(_: Any, args: Any, kwargs: Any) -> Any:
        if not built.received:
            return None
        leaves, tree = tree_flatten((args, kwargs), is_leaf=is_split)
        return tree_unflatten([built.received.get(id(leaf), leaf) for leaf in leaves], tree)

    return hook
