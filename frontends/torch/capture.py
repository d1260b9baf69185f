"""Capturing a model's forward and backward operators from torch, and saying why where no way of capturing works.

The ways, each of which is tried only when the one before has failed:

    direct     autograd traced over the module itself; first where the model brings autograd functions of its own, and
               for graphs that are flat already; otherwise not at all
    joint      torch.export without dynamo, then autograd traced ahead of time: one aten graph, forward and backward
    dynamo     the same, with dynamo in front
    export     torch.export alone: forward only; backward follows by rule
    make_fx    the loss and its gradient traced as a function of the parameters: no module paths

All but `export` return the backward that torch itself would run. Only this file, `fake_model.py` and `dynamo.py` use
parts of torch that are not public.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.fx.traceback
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from phaze.errors import ImportModelError, PhazeError
from phaze.frontends.torch.fake_model import MODEL_PREFIX, LossCall, ValuesAssumed, as_exported

__all__ = [
    "CAPTURE_METHODS",
    "Argument",
    "ArgumentKind",
    "Capture",
    "CaptureError",
    "CaptureMethod",
    "capture_joint_graph",
    "capture_loss",
    "explain_failed_capture",
    "explain_failed_forward",
    "is_data_dependent",
    "preserved_torch_state",
]

_ERROR_LENGTH = 300
"""How many characters of an error of torch are shown: its first line may hold a whole graph."""


class ArgumentKind(StrEnum):
    """What a placeholder of a trace stands for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    TANGENT = "tangent"


class CaptureMethod(StrEnum):
    """The ways of capturing, as the module's docstring explains them."""

    DIRECT = "direct"
    JOINT = "joint"
    DYNAMO = "dynamo"
    EXPORT = "export"
    MAKE_FX = "make_fx"


@dataclass(frozen=True, slots=True)
class Argument:
    """What a placeholder stands for, and its name in the model."""

    kind: ArgumentKind
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A trace: its nodes, what each placeholder stands for, its outputs, and the gradients of parameters by name."""

    method: CaptureMethod
    nodes: tuple[torch.fx.Node, ...]
    arguments: Mapping[torch.fx.Node, Argument]
    outputs: tuple[torch.fx.Node, ...]
    gradients: Mapping[str, torch.fx.Node]

    @property
    def has_backward(self) -> bool:
        """Whether the trace holds the backward."""
        return bool(self.gradients)


class CaptureError(ImportModelError):
    """No way of capturing worked; `errors` holds what each of them said."""

    def __init__(self, message: str, errors: Mapping[CaptureMethod, Exception]) -> None:
        super().__init__(message)
        self.errors = errors


def capture_loss(loss_call: LossCall, *, directly: bool = False) -> Capture:
    """Capture by the first way that works; raises what Phaze itself refuses, else CaptureError.

    `directly` says to try the `direct` way first.
    """
    errors: dict[CaptureMethod, Exception] = {}
    for method, trace in CAPTURE_METHODS.items():
        if method is CaptureMethod.DIRECT and not (directly or loss_call.objective.is_flat):
            continue
        try:
            return trace(loss_call)
        except Exception as error:
            for cause in _causes(error):
                if isinstance(cause, PhazeError):
                    raise cause from None
            errors[method] = error
    raise CaptureError("no way of capturing the model worked", errors)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _capture_directly(loss_call: LossCall) -> Capture:
    with as_exported(), _recorded_module_paths(loss_call):
        return _capture_jointly(loss_call, loss_call.objective, CaptureMethod.DIRECT)


def _capture_after_export(loss_call: LossCall) -> Capture:
    return _capture_jointly(loss_call, _export(loss_call).module(check_guards=False), CaptureMethod.JOINT)


def _capture_after_dynamo(loss_call: LossCall) -> Capture:
    exported = _export(loss_call, strict=True)
    return _capture_jointly(loss_call, exported.module(check_guards=False), CaptureMethod.DYNAMO)


def _export(loss_call: LossCall, *, strict: bool = False) -> torch.export.ExportedProgram:
    # Dynamo, which strict export runs, traces such questions itself.
    with loss_call.fake.mode, contextlib.nullcontext() if strict else ValuesAssumed():
        return torch.export.export(loss_call.objective, loss_call.arguments, strict=strict)


def _capture_jointly(loss_call: LossCall, module: torch.nn.Module, method: CaptureMethod) -> Capture:
    input_names = [name for name, _ in loss_call.named_leaves]

    def argument_of(descriptor: descriptors.AOTInput, node_name: str) -> Argument:
        if isinstance(descriptor, descriptors.ParamAOTInput):
            return Argument(ArgumentKind.PARAMETER, _parameter_name(loss_call, descriptor.target))
        if isinstance(descriptor, descriptors.BufferAOTInput):
            return Argument(ArgumentKind.BUFFER, descriptor.target.removeprefix(MODEL_PREFIX))
        if isinstance(descriptor, descriptors.TangentAOTInput):
            return Argument(ArgumentKind.TANGENT, "loss.gradient")
        return Argument(ArgumentKind.INPUT, input_names[descriptor.idx])

    capture = capture_joint_graph(module, loss_call.fake.mode, loss_call.arguments, argument_of, method)
    _check_gradients(capture.gradients)
    return capture


def capture_joint_graph(
    module: torch.nn.Module,
    mode: FakeTensorMode,
    inputs: Sequence[object],
    argument_of: Callable[[descriptors.AOTInput, str], Argument],
    method: CaptureMethod,
) -> Capture:
    """Trace a module's forward and the backward of its outputs ahead of time, as one aten graph.

    `argument_of` says what a placeholder stands for, from torch's descriptor of it and the name of its node.
    """
    with contextlib.ExitStack() as stack, mode, torch.fx.traceback.preserve_node_meta():
        joint = aot_export_joint_with_descriptors(stack, module, inputs)
    *nodes, output = joint.graph_module.graph.nodes
    placeholders = [node for node in nodes if node.op == "placeholder"]
    outputs, gradients = [], {}
    for value, descriptor in zip(output.args[0], output.meta["desc"], strict=True):
        if isinstance(descriptor, descriptors.PlainAOTOutput):
            outputs.append(value)
            continue
        differentiated = getattr(descriptor, "grad_of", None)
        if value is not None and isinstance(differentiated, descriptors.ParamAOTInput | descriptors.PlainAOTInput):
            argument = argument_of(differentiated, value.name)
            if argument.kind is ArgumentKind.PARAMETER:
                gradients[argument.name] = value
    return Capture(
        method=method,
        nodes=tuple(nodes),
        arguments={node: argument_of(node.meta["desc"], node.name) for node in placeholders},
        outputs=tuple(outputs),
        gradients=gradients,
    )


def _check_gradients(gradients: Mapping[str, torch.fx.Node]) -> None:
    """The trial run has shown that the loss has a gradient, so a trace without any has lost it."""
    if not gradients:
        raise RuntimeError("the trace lost the gradients")


def _parameter_name(loss_call: LossCall, name: str) -> str:
    """The first name of a parameter in the model, from any of its names in the objective."""
    return loss_call.fake.first_names[name.removeprefix(MODEL_PREFIX)]


@contextlib.contextmanager
def _recorded_module_paths(loss_call: LossCall) -> Iterator[None]:
    """Have a trace of the objective write down which modules each operator was called in."""
    if loss_call.objective.is_flat:  # its nodes remember their paths
        yield
        return
    calls: dict[str, int] = {}
    running: dict[str, tuple[str, str]] = {}

    def entering(path: str, module: torch.nn.Module) -> None:
        if module is loss_call.objective:  # torch runs it more than once
            calls.clear()
            running.clear()
        count = calls[path] = calls.get(path, -1) + 1
        running[f"{path}@{count}" if count else path] = (path, type(module).__name__)
        torch.fx.traceback.current_meta["nn_module_stack"] = dict(running)

    def leaving(*_: object) -> None:
        running.popitem()
        torch.fx.traceback.current_meta["nn_module_stack"] = dict(running)

    handles = []
    for path, part in loss_call.objective.named_modules():
        handles.append(part.register_forward_pre_hook(lambda module, _, path=path: entering(path, module)))
        handles.append(part.register_forward_hook(leaving, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _capture_forward_by_export(loss_call: LossCall) -> Capture:
    exported = _export(loss_call).run_decompositions()
    *nodes, output = exported.graph.nodes
    input_names = iter([name for name, _ in loss_call.named_leaves])
    arguments: dict[torch.fx.Node, Argument] = {}
    placeholders = [node for node in nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.PARAMETER:
            arguments[node] = Argument(ArgumentKind.PARAMETER, _parameter_name(loss_call, spec.target))
        elif spec.kind is InputKind.USER_INPUT:
            arguments[node] = Argument(ArgumentKind.INPUT, next(input_names))
        else:
            arguments[node] = Argument(ArgumentKind.BUFFER, str(spec.target).removeprefix(MODEL_PREFIX))
    kinds = [spec.kind for spec in exported.graph_signature.output_specs]
    loss = output.args[0][kinds.index(OutputKind.USER_OUTPUT)]
    return Capture(method=CaptureMethod.EXPORT, nodes=tuple(nodes), arguments=arguments, outputs=(loss,), gradients={})


def _capture_by_make_fx(loss_call: LossCall) -> Capture:
    fake, objective = loss_call.fake, loss_call.objective
    parameters = {f"{MODEL_PREFIX}{name}": value for name, value in fake.module.named_parameters()}
    buffers = {f"{MODEL_PREFIX}{name}": value for name, value in fake.module.named_buffers()}
    trained = [f"{MODEL_PREFIX}{name}" for name, _ in fake.module.named_parameters() if name in fake.trainable]

    def loss_and_gradients(
        parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], arguments: tuple[object, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        loss = torch.func.functional_call(objective, (parameters, buffers), arguments)
        return loss, torch.autograd.grad(loss, [parameters[name] for name in trained], allow_unused=True)

    with fake.mode:
        traced = make_fx(loss_and_gradients, tracing_mode="fake")(parameters, buffers, loss_call.arguments)
    *nodes, output = traced.graph.nodes
    loss, *gradients = tree_leaves(output.args[0])
    by_name = {
        name.removeprefix(MODEL_PREFIX): gradient
        for name, gradient in zip(trained, gradients, strict=True)
        if gradient is not None
    }
    _check_gradients(by_name)
    return Capture(
        method=CaptureMethod.MAKE_FX,
        nodes=tuple(nodes),
        arguments=_make_fx_arguments(loss_call, [node for node in nodes if node.op == "placeholder"]),
        outputs=(loss,),
        gradients=by_name,
    )


def _make_fx_arguments(loss_call: LossCall, placeholders: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, Argument]:
    """What each placeholder of `_capture_by_make_fx` stands for: they are in the order of the traced arguments."""
    module = loss_call.fake.module
    values = [
        *((Argument(ArgumentKind.PARAMETER, name), value) for name, value in module.named_parameters()),
        *((Argument(ArgumentKind.BUFFER, name), value) for name, value in module.named_buffers()),
        *((Argument(ArgumentKind.INPUT, name), value) for name, value in loss_call.named_leaves),
    ]
    # torch keeps placeholders either for all leaves or for tensors alone.
    if len(placeholders) != len(values):
        values = [(argument, value) for argument, value in values if isinstance(value, torch.Tensor)]
    return {node: argument for node, (argument, _) in zip(placeholders, values, strict=True)}


CAPTURE_METHODS: dict[CaptureMethod, Callable[[LossCall], Capture]] = {
    CaptureMethod.DIRECT: _capture_directly,
    CaptureMethod.JOINT: _capture_after_export,
    CaptureMethod.DYNAMO: _capture_after_dynamo,
    CaptureMethod.EXPORT: _capture_forward_by_export,
    CaptureMethod.MAKE_FX: _capture_by_make_fx,
}
"""The ways of capturing in the order in which they are tried; all raise what torch raises."""


@contextlib.contextmanager
def preserved_torch_state() -> Iterator[None]:
    """Leave random state and grad mode as found; keep torch's warnings and logs about its own workings quiet.

    Kernels that only exist on this machine's processor (fused recurrent layers) are switched off, so that the trace
    holds the operators that they are made of.
    """
    state = random.getstate()
    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        _portable_kernels(),
        warnings.catch_warnings(),
        _quiet_logs(),
        contextlib.redirect_stderr(_Discarded()),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(state)


@contextlib.contextmanager
def _portable_kernels() -> Iterator[None]:
    is_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(is_enabled)


class _Discarded(io.TextIOBase):
    """A stream for what torch prints about traces that failed; what a reader needs of them is in the error."""

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("torch")]
    handlers = [(handler, handler.level) for logger in loggers for handler in logger.handlers]
    for handler, _ in handlers:
        handler.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for handler, level in handlers:
            handler.setLevel(level)


_DATA_DEPENDENT = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")
"""The names of the errors by which torch says that a fake tensor was asked for its values."""


def is_data_dependent(error: Exception) -> bool:
    """Whether a forward failed because it asked for the values of a tensor."""
    return type(error).__name__ in _DATA_DEPENDENT


def explain_failed_forward(name: str, loss_call: LossCall, error: Exception) -> ImportModelError:
    """The error to raise for a forward that fails on tensors without contents."""
    line = _own_line(error)
    if is_data_dependent(error):
        return ImportModelError(
            f"{name} decides by the values of a tensor at {line}, and Phaze captures it without values; compute both "
            "sides and choose with torch.where, or move the decision out of forward."
        )
    shapes = [f"{leaf_name} {list(leaf.shape)}" for leaf_name, leaf in loss_call.named_leaves if hasattr(leaf, "shape")]
    return ImportModelError(
        f"{name}.forward failed at {line} while Phaze ran it on tensors without contents, with inputs "
        f"{', '.join(shapes) or 'none'}: {type(error).__name__}: {error}"
    )


def explain_failed_capture(name: str, failure: CaptureError) -> ImportModelError:
    """The error to raise for a model that runs, but that torch cannot capture in any way."""
    reasons = "; ".join(f"{method}: {_first_line(error)}" for method, error in failure.errors.items())
    return ImportModelError(f"{name} runs, but torch could not capture it. {reasons}")


def _own_line(error: Exception) -> str:
    """The innermost line of the traceback that is neither torch's nor Phaze's: the user's own."""
    inside = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(inside)]
    if not frames:
        return "an unknown line"
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_ERROR_LENGTH]
