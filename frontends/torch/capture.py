"""Capturing a model's operators: each way is taken only when the one before fails.

    direct     autograd traced over the module itself; first where the model brings autograd functions of its own, and
               for graphs that are flat already; otherwise not at all
    joint      torch.export without dynamo, then autograd traced ahead of time: one aten graph, forward and backward
    dynamo     the same, with dynamo in front
    export     torch.export alone: forward only; backward follows by rule
    make_fx    the loss and its gradient traced as a function of the parameters: no module paths

All but `export` return the backward that torch itself would run. Parts of torch that are not public are used here, in
`clone.py`, `rehearsal.py` and `surroundings.py`, and nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from phaze.errors import ImportModelError, PhazeError
from phaze.frontends.torch.clone import FakeModel
from phaze.frontends.torch.examples import Examples
from phaze.frontends.torch.surroundings import as_exported

__all__ = ["Argument", "ArgumentKind", "Capture", "CaptureError", "Target", "capture"]

PREFIX = "phaze_model."
"""The path of the model inside its objective."""


class ArgumentKind(StrEnum):
    """What a placeholder of a trace stands for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    TANGENT = "tangent"


@dataclass(frozen=True, slots=True)
class Argument:
    """A placeholder: what it is, and its name in the model."""

    kind: ArgumentKind
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is captured: a fake model with its loss, and fake inputs."""

    fake: FakeModel
    objective: Any
    inputs: Examples
    is_flat: bool = False

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The objective's arguments."""
        return (self.inputs.args, dict(self.inputs.kwargs), self.inputs.targets)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The name of every leaf of the arguments, in the order in which torch flattens them."""
        from torch.utils._pytree import tree_flatten_with_path

        leaves, _ = tree_flatten_with_path(self.arguments)
        return tuple(_leaf_name(path) for path, _ in leaves)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A trace: its nodes, what each placeholder is, its outputs, and the gradient of each parameter that has one."""

    recipe: str
    nodes: tuple[Any, ...]
    arguments: Mapping[Any, Argument]
    outputs: tuple[Any, ...]
    gradients: Mapping[str, Any]

    @property
    def has_backward(self) -> bool:
        """Whether the trace holds the backward."""
        return bool(self.gradients)


class CaptureError(ImportModelError):
    """No way of capturing worked; `errors` holds what each of them said."""

    def __init__(self, message: str, errors: Mapping[str, Exception]) -> None:
        super().__init__(message)
        self.errors = errors


def capture(target: Target, *, directly: bool = False) -> Capture:
    """Capture by the first way that works; raises what Phaze itself refuses, else CaptureError."""
    errors: dict[str, Exception] = {}
    for recipe, trace in (({"direct": _directly} if directly or target.is_flat else {}) | _RECIPES).items():
        try:
            found = trace(target)
        except Exception as error:
            for inner in _chain(error):
                if isinstance(inner, PhazeError):
                    raise inner from None
            errors[recipe] = error
        else:
            return found
    raise CaptureError("no way of capturing the model worked", errors)


def _export(target: Target, *, strict: bool) -> Any:
    import torch

    with target.fake.mode:
        return torch.export.export(target.objective, target.arguments, strict=strict)


def _directly(target: Target) -> Capture:
    with as_exported(), _module_paths(target):
        return _traced_jointly(target, target.objective, "direct")


def _jointly(target: Target, *, strict: bool = False) -> Capture:
    module = _export(target, strict=strict).module(check_guards=False)
    return _traced_jointly(target, module, "dynamo" if strict else "joint")


def _traced_jointly(target: Target, module: Any, recipe: str) -> Capture:
    import torch.fx.traceback
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with contextlib.ExitStack() as stack, target.fake.mode, torch.fx.traceback.preserve_node_meta():
        joint = aot_export_joint_with_descriptors(stack, module, target.arguments)
    return _read_joint(target, joint.graph_module.graph, recipe)


@contextlib.contextmanager
def _module_paths(target: Target) -> Iterator[None]:
    """Have a trace of the objective write down which modules each operator was called in."""
    from torch.fx import traceback

    if target.is_flat:
        yield
        return
    calls: dict[str, int] = {}
    running: dict[str, tuple[str, str]] = {}

    def entering(path: str, module: Any) -> None:
        if module is target.objective:  # torch runs it more than once
            calls.clear()
            running.clear()
        count = calls[path] = calls.get(path, -1) + 1
        running[f"{path}@{count}" if count else path] = (path, type(module).__name__)
        traceback.current_meta["nn_module_stack"] = dict(running)

    def leaving(*_: Any) -> None:
        running.popitem()
        traceback.current_meta["nn_module_stack"] = dict(running)

    handles = []
    for name, part in target.objective.named_modules():
        handles.append(part.register_forward_pre_hook(lambda module, _, name=name: entering(name, module)))
        handles.append(part.register_forward_hook(leaving, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _read_joint(target: Target, graph: Any, recipe: str) -> Capture:
    from torch._functorch._aot_autograd import descriptors

    nodes = tuple(graph.nodes)
    names = target.input_names
    arguments: dict[Any, Argument] = {}
    for node in nodes:
        if node.op != "placeholder":
            continue
        what = node.meta["desc"]
        if isinstance(what, descriptors.ParamAOTInput):
            arguments[node] = Argument(ArgumentKind.PARAMETER, _parameter(target, what.target))
        elif isinstance(what, descriptors.BufferAOTInput):
            arguments[node] = Argument(ArgumentKind.BUFFER, what.target.removeprefix(PREFIX))
        elif isinstance(what, descriptors.TangentAOTInput):
            arguments[node] = Argument(ArgumentKind.TANGENT, "loss.gradient")
        else:
            arguments[node] = Argument(ArgumentKind.INPUT, names[what.idx])
    output = nodes[-1]
    loss, gradients = None, {}
    for value, what in zip(output.args[0], output.meta["desc"], strict=True):
        if isinstance(what, descriptors.PlainAOTOutput):
            loss = value
        elif value is not None and isinstance(getattr(what, "grad_of", None), descriptors.ParamAOTInput):
            gradients[_parameter(target, what.grad_of.target)] = value
    _check_gradients(gradients)
    return Capture(recipe=recipe, nodes=nodes[:-1], arguments=arguments, outputs=(loss,), gradients=gradients)


def _check_gradients(gradients: Mapping[str, Any]) -> None:
    """The loss has a gradient, as its rehearsal showed: a trace without any has lost it."""
    if not gradients:
        raise RuntimeError("the trace lost the gradients")


def _parameter(target: Target, name: str) -> str:
    """The first name of a parameter, without the objective's prefix."""
    return target.fake.names[name.removeprefix(PREFIX)]


def _by_export(target: Target) -> Capture:
    from torch.export.graph_signature import InputKind, OutputKind

    exported = _export(target, strict=False).run_decompositions()
    nodes = tuple(exported.graph.nodes)
    names = iter(target.input_names)
    arguments: dict[Any, Argument] = {}
    placeholders = [node for node in nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.PARAMETER:
            arguments[node] = Argument(ArgumentKind.PARAMETER, _parameter(target, spec.target))
        elif spec.kind is InputKind.USER_INPUT:
            arguments[node] = Argument(ArgumentKind.INPUT, next(names))
        else:
            arguments[node] = Argument(ArgumentKind.BUFFER, str(spec.target).removeprefix(PREFIX))
    kinds = [spec.kind for spec in exported.graph_signature.output_specs]
    loss = nodes[-1].args[0][kinds.index(OutputKind.USER_OUTPUT)]
    return Capture(recipe="export", nodes=nodes[:-1], arguments=arguments, outputs=(loss,), gradients={})


def _by_make_fx(target: Target) -> Capture:
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._pytree import tree_flatten

    fake, objective = target.fake, target.objective
    parameters = {f"{PREFIX}{name}": value for name, value in fake.module.named_parameters()}
    trained = [name for name in parameters if name.removeprefix(PREFIX) in fake.trainable]

    def step(parameters: dict[str, Any], buffers: dict[str, Any], arguments: Any) -> Any:
        loss = torch.func.functional_call(objective, (parameters, buffers), arguments)
        values = [parameters[name] for name in trained]
        return loss, torch.autograd.grad(loss, values, allow_unused=True)

    buffers = {f"{PREFIX}{name}": value for name, value in fake.module.named_buffers()}
    with fake.mode:
        traced = make_fx(step, tracing_mode="fake")(parameters, buffers, target.arguments)
    nodes = tuple(traced.graph.nodes)
    leaves = tree_flatten((parameters, buffers, target.arguments))[0]
    what = [Argument(ArgumentKind.PARAMETER, name.removeprefix(PREFIX)) for name in parameters]
    what += [Argument(ArgumentKind.BUFFER, name.removeprefix(PREFIX)) for name in buffers]
    what += [Argument(ArgumentKind.INPUT, name) for name in target.input_names]
    placeholders = [node for node in nodes if node.op == "placeholder"]
    tensors = [item for item, leaf in zip(what, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    arguments = dict(zip(placeholders, tensors if len(placeholders) == len(tensors) else what, strict=True))
    loss, *gradients = tree_flatten(nodes[-1].args[0])[0] if len(trained) else (None,)
    found = {n.removeprefix(PREFIX): g for n, g in zip(trained, gradients, strict=True) if g is not None}
    _check_gradients(found)
    return Capture(recipe="make_fx", nodes=nodes[:-1], arguments=arguments, outputs=(loss,), gradients=found)


def _leaf_name(path: Any) -> str:
    """`kwargs['input_ids']` is input_ids, `args[0]` input_0; nested ones are joined by dots."""
    words = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    first = {"0": "input_", "1": "", "2": "targets"}[words[0]]
    return first + ".".join(words[1:]) if words[0] != "2" else ".".join([first, *words[1:]])


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_RECIPES: dict[str, Callable[[Target], Capture]] = {
    "joint": _jointly,
    "dynamo": lambda target: _jointly(target, strict=True),
    "export": _by_export,
    "make_fx": _by_make_fx,
}
