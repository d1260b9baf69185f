"""Where a torch model is cut into pipeline stages, and what crosses each cut: found by a dry run on fake tensors.

A cut stands before the call of a module. `cut_paths` finds that module for each stage. `dry_run` runs the whole model
once on fake tensors and writes down which modules belong to which stage, what every module returns, and which tensors
cross each cut (`Boundary`). `stage_models` builds the stages from this.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from phaze.backends.torch.arrange import without_caches
from phaze.backends.torch.expert_devices import answer_with_shapes_only, expert_modules
from phaze.backends.torch.split_tensor import TorchFunction
from phaze.errors import PlanError

__all__ = [
    "Boundary",
    "DependentTensor",
    "DryRun",
    "PreHook",
    "block_paths",
    "clone_with_tensors",
    "cut_paths",
    "dry_run",
    "is_inside",
    "tensors_in",
]

PreHook: TypeAlias = Callable[[torch.nn.Module, tuple[object, ...], dict[str, object]], Any]
"""A hook before a module's forward; it may return other arguments."""


# ------------------------------------------------------------------------------------------------- where to cut


def block_paths(layers: Sequence[str], module: torch.nn.Module) -> list[str]:
    """The paths of those of a stage's layers that are modules of their own: its blocks."""
    known = {name for name, _ in module.named_modules()}
    return [path for path in layers if path in known]


def cut_paths(stages: Sequence[Sequence[str]], module: torch.nn.Module) -> list[str]:
    """The path of the module before whose call each stage but the first begins.

    It is the outermost module that holds no earlier layer. Raises PlanError where a stage begins with something that
    is no module.
    """
    modules = dict(module.named_modules())
    callable_paths = {
        name for name, submodule in modules.items() if type(submodule).forward is not torch.nn.Module.forward
    }
    layer_modules = [_first_module(layer, callable_paths) for layers in stages for layer in layers]
    cuts: list[str] = []
    position = 0
    for layers in stages[:-1]:
        position += len(layers)
        earlier = [path for path in layer_modules[:position] if path]
        path = layer_modules[position]
        if not path:
            name = stages[len(cuts) + 1][0]
            raise PlanError(
                f"layer {name!r} begins outside of any module, so {type(module).__name__} cannot be cut there; plan "
                "with strategy pp=1, or cut elsewhere with `stages`."
            )
        words = path.split(".")
        around = [".".join(words[: count + 1]) for count in range(len(words))]  # from the outermost to `path` itself
        cuts.append(
            next(
                candidate
                for candidate in around
                if candidate in callable_paths and not any(is_inside(layer, candidate) for layer in earlier)
            )
        )
    return cuts


def _first_module(layer: str, callable_paths: set[str]) -> str:
    """The first module of a layer whose path is `first .. last`, or the nearest one that exists around either end."""
    for path in layer.split(" .. "):
        while path and path not in callable_paths:
            path = path.rpartition(".")[0]
        if path:
            return path
    return ""


def is_inside(path: str, outer: str) -> bool:
    """Whether a module is another one, or a part of it, by their paths."""
    return path == outer or path.startswith(f"{outer}.")


# ------------------------------------------------------------------------------------------------- what stages need


@dataclass(frozen=True, slots=True)
class Boundary:
    """The tensors that cross a cut, among the arguments of the module behind it.

    Attributes:
        places: for each tensor all its positions among the flattened arguments, which may hold one tensor repeatedly.
        tensors: shapes and types, as tensors without storage.
    """

    places: tuple[tuple[int, ...], ...]
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class DependentTensor:
    """A tensor that depends on parameters, and the stage that has it.

    `hides_nan` says that a NaN which it was computed from would not show in it: it is a comparison or an index. The
    tensor itself is kept so that no other one gets its id.
    """

    tensor: torch.Tensor
    stage: int
    hides_nan: bool


@dataclass(slots=True)
class DryRun:
    """What one run of the whole model on fake tensors tells.

    Attributes:
        stages: the stages that need the parameters of each module which has some itself, by the module's path.
        called: the stages in which the call of each module runs, by the module's path.
        results: what each call of a module returned, without storage, by the module's path.
        boundaries: what crosses each cut.
        reached: the stage that the run has reached.
        dependents: tensors that depend on parameters, by id; kept while the run lasts.
        replacements: for each tensor that crossed a cut, by id, the one that stands for it behind the cut; kept while
            the run lasts.
    """

    stages: dict[str, set[int]] = field(default_factory=dict)
    called: dict[str, set[int]] = field(default_factory=dict)
    results: dict[str, list[object]] = field(default_factory=dict)
    boundaries: list[Boundary] = field(default_factory=list)
    reached: int = 0
    dependents: dict[int, DependentTensor] = field(default_factory=dict)
    replacements: dict[int, torch.Tensor] = field(default_factory=dict)


def dry_run(module: torch.nn.Module, paths: Sequence[str], batch: Mapping[str, object], dtype: torch.dtype) -> DryRun:
    """Run the whole model once on fake tensors and write down what stages need; numbers cross cuts in `dtype`.

    Raises PlanError where the model cannot be cut before the modules at these paths.
    """

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu")

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        clone = clone_with_tensors(module, fake)
        inputs = tree_map(lambda leaf: fake(leaf) if isinstance(leaf, torch.Tensor) else leaf, dict(batch))
    for experts in expert_modules(clone).values():
        answer_with_shapes_only(experts)  # torch's grouped products of fake tensors know bfloat16 alone
    run = DryRun()
    for name, submodule in clone.named_modules():
        submodule.register_forward_pre_hook(_note_call(name, paths, dtype, run), with_kwargs=True)
        submodule.register_forward_hook(_note_result(name, submodule, run))
    for part in clone.modules():
        if getattr(part, "layerdrop", None) == 0:
            part.training = False  # it would draw a number and drop no layer
    try:
        with mode, without_caches(clone), _FollowsDependence(run):
            clone(**inputs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise PlanError(
            f"{type(module).__name__} decides by the values of tensors what it runs ({error.func}), so that its stages "
            "cannot be found; plan with strategy pp=1."
        ) from error
    run.dependents.clear()
    run.replacements.clear()
    run.stages.update(_stages_of_parameters(clone, run))
    if run.reached < len(paths):
        raise PlanError(f"{paths[run.reached]!r} is never called, so {type(module).__name__} cannot be cut before it.")
    return run


def _stages_of_parameters(module: torch.nn.Module, run: DryRun) -> dict[str, set[int]]:
    """The stages that need the parameters of each module which has some itself.

    A module that is never called, such as the output projection of torch.nn's attention, is read by the nearest one
    around it that is. Where that one runs in several stages, the module is left out: nothing tells which of them reads
    it, and mostly it is another name of a tied module, or unused.
    """
    stages = {}
    for name, submodule in module.named_modules():
        reader = name
        while reader and reader not in run.called:
            reader = reader.rpartition(".")[0]
        if submodule._parameters and (reader == name or len(run.called[reader]) == 1):
            stages[name] = set(run.called[reader])
    return stages


def clone_with_tensors(module: torch.nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    """A copy of the module tree whose tensors are made anew; tied parameters stay tied."""
    memo: dict[int, torch.Tensor] = {}  # deepcopy takes what it finds here for a copy that was made already
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in memo:
            new = make(tensor)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(new, tensor.requires_grad) if is_parameter else new
    return copy.deepcopy(module, memo)


class _FollowsDependence(TorchFunctionMode):
    """Follows tensors that depend on parameters although they require no gradient: comparisons, indices, detached ones.

    What absent modules return is NaN where it is a number, so that a leak into a result shows. It would not show
    through comparisons and indices; a stage that reads such a tensor of an earlier stage is refused here.
    """

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(
        self,
        func: TorchFunction,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        if func is torch.Tensor._is_all_true:  # a check by values, such as Hugging Face's of placeholders of images
            return torch.tensor(True)
        result, dependents = func(*args, **(kwargs or {})), self.run.dependents
        results, operands = tensors_in(result), tensors_in((args, kwargs or {}))
        if not results or not any(operand.requires_grad or id(operand) in dependents for operand in operands):
            return result
        known = [dependents[id(operand)] for operand in operands if id(operand) in dependents]
        if any(dependent.hides_nan and dependent.stage < self.run.reached for dependent in known):
            raise PlanError(
                f"{getattr(func, '__name__', func)} reads what an earlier stage compared or counted and what is no "
                "argument of the module where this stage begins; cut elsewhere, or plan with strategy pp=1."
            )
        for tensor in results:
            if not tensor.requires_grad:
                hides_nan = not tensor.is_floating_point() or any(dependent.hides_nan for dependent in known)
                dependents.setdefault(id(tensor), DependentTensor(tensor, self.run.reached, hides_nan))
        return result


def tensors_in(tree: object) -> list[torch.Tensor]:
    """The tensors among arguments or results, however deep they lie."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _note_call(name: str, paths: Sequence[str], dtype: torch.dtype, run: DryRun) -> PreHook:
    """Before a module's call: begin a stage where a cut stands, and note which stage runs the module."""

    def hook(_: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if run.reached < len(paths) and paths[run.reached] == name:
            run.boundaries.append(_boundary((args, kwargs), run, dtype))
            _replace_crossing_tensors((args, kwargs), run)
            run.reached += 1
        run.called.setdefault(name, set()).add(run.reached)
        leaves, tree = tree_flatten((args, kwargs))
        return tree_unflatten([run.replacements.get(id(leaf), leaf) for leaf in leaves], tree)

    return hook


def _boundary(arguments: object, run: DryRun, dtype: torch.dtype) -> Boundary:
    """Those of a module's arguments that depend on parameters; numbers cross in `dtype`."""
    leaves, _ = tree_flatten(arguments)
    places: dict[int, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and (leaf.requires_grad or id(leaf) in run.dependents):
            places.setdefault(id(leaf), []).append(place)
    tensors = []
    for same in places.values():
        leaf = leaves[same[0]]
        crossing = leaf.detach().to("meta", dtype if leaf.is_floating_point() else leaf.dtype)
        tensors.append(crossing.requires_grad_(leaf.requires_grad))
    return Boundary(tuple(tuple(same) for same in places.values()), tuple(tensors))


def _replace_crossing_tensors(arguments: object, run: DryRun) -> None:
    """Put other tensors in the place of those that cross a cut, as the stage behind the cut will see them."""
    leaves, _ = tree_flatten(arguments)
    stage = run.reached + 1  # the one behind the cut
    for same in run.boundaries[-1].places:
        leaf = leaves[same[0]]
        replacement = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        hides_nan = id(leaf) in run.dependents and run.dependents[id(leaf)].hides_nan
        run.dependents.setdefault(id(leaf), DependentTensor(leaf, stage - 1, hides_nan))
        run.dependents[id(replacement)] = DependentTensor(replacement, stage, hides_nan)
        run.replacements[id(leaf)] = replacement


def _note_result(name: str, module: torch.nn.Module, run: DryRun) -> Callable[..., None]:
    """Behind a module's call: note what it returned, and that this depends on parameters where the module has some."""
    has_parameters = any(True for _ in module.parameters())

    def hook(_: torch.nn.Module, __: tuple[object, ...], result: object) -> None:
        for tensor in tensors_in(result) if has_parameters else []:
            dependent = DependentTensor(tensor, run.reached, not tensor.is_floating_point())
            run.dependents.setdefault(id(tensor), dependent)
        # A module around a cut may read its own parameters on both sides of it.
        run.called[name].update(range(min(run.called[name]), run.reached + 1))
        shapes = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, result)
        run.results.setdefault(name, []).append(shapes)

    return hook
