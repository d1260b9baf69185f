"""The backend of `torch.compile(model, backend="phaze")`: imports each graph that dynamo captures, has another run it.

Options: `inner` names that backend: inductor (the default; aot_eager with a warning where there is no C++ compiler),
aot_eager or eager. What the compiled model computes is what the inner backend computes.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.fx.traceback
from torch._dynamo import lookup_backend
from torch._functorch._aot_autograd import descriptors
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from phaze.frontends.torch.capture import (
    Argument,
    ArgumentKind,
    Capture,
    CaptureMethod,
    capture_joint_graph,
    preserved_torch_state,
)
from phaze.frontends.torch.fake_model import fake_copy
from phaze.frontends.torch.translate import translate_capture
from phaze.ir import Graph
from phaze.ir.factor_following import refine_factors
from phaze.model_import import remember_compiled

__all__ = ["compile_graph"]

INNER_BACKENDS = ("inductor", "aot_eager", "eager")
_OPTIONS = ("inner",)


def compile_graph(
    module: torch.fx.GraphModule, example_inputs: Sequence[object], *, options: Mapping[str, object] | None = None
) -> Callable[..., object]:
    """The entry point of group `torch_dynamo_backends`; raises ValueError for an unknown option or inner backend.

    A graph that cannot be imported is warned about and runs all the same.
    """
    inner = _inner_backend(options or {})
    try:
        graph = _import_graph(module, example_inputs)
    except Exception as error:
        warnings.warn(
            f"phaze could not import a graph of {len(module.graph.nodes)} nodes and leaves it to {inner}: "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
    else:
        remember_compiled(replace(graph, notes=(*graph.notes, f"runs through {inner}")))
    compiled: Callable[..., object] = lookup_backend(inner)(module, example_inputs)
    return compiled


def _inner_backend(options: Mapping[str, object]) -> str:
    for option in options:
        if option not in _OPTIONS:
            raise ValueError(f"the phaze backend takes no option {option!r}; it takes {', '.join(_OPTIONS)}")
    inner = options.get("inner", "inductor")
    if inner not in INNER_BACKENDS:
        raise ValueError(f"inner is {inner!r}; expected one of {', '.join(INNER_BACKENDS)}")
    if inner == "inductor" and not _has_compiler():
        warnings.warn(
            "no C++ compiler was found, which inductor needs; the graph runs through aot_eager. Install one, or pass "
            "options={'inner': 'aot_eager'}.",
            RuntimeWarning,
            stacklevel=3,
        )
        return "aot_eager"
    return str(inner)


def _has_compiler() -> bool:
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return any(shutil.which(name) for name in names if name)


def _import_graph(module: torch.fx.GraphModule, example_inputs: Sequence[object]) -> Graph:
    """The graph, with the backward of every output that has one; fixed to the sizes that dynamo saw."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    is_trained = torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in example_inputs)
    with tracing(None), preserved_torch_state():
        fake_module = fake_copy(module, mode)
        inputs = tuple(_fake_input(value, mode) for value in example_inputs)
        arguments = _lifted_arguments(module, example_inputs)
        trace = _capture_with_backward if is_trained else _capture_forward
        captured = trace(fake_module, mode, inputs, arguments)
        graph = translate_capture(captured, fake_module, name=type(module).__name__, batch_size=1)
    return refine_factors(graph)


def _fake_input(value: object, mode: FakeTensorMode) -> object:
    if isinstance(value, torch.SymInt):
        return int(value)
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        shape, stride = (tuple(int(size) for size in sizes) for sizes in (value.shape, value.stride()))
        empty = torch.empty_strided(shape, stride, dtype=value.dtype, device="cpu")
    return empty.requires_grad_(value.requires_grad)


def _lifted_arguments(module: torch.fx.GraphModule, example_inputs: Sequence[object]) -> list[Argument]:
    """What each placeholder stands for: dynamo lifts parameters and buffers to inputs, and remembers their sources."""
    arguments = []
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, example_inputs, strict=True):
        source = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
        name = _name_in_model(source() if callable(source) else source) or node.name
        kind = ArgumentKind.INPUT
        if isinstance(value, torch.nn.Parameter) or "_parameters" in node.name:
            kind = ArgumentKind.PARAMETER
        elif "_buffers" in node.name:
            kind = ArgumentKind.BUFFER
        arguments.append(Argument(kind, name))
    return arguments


def _name_in_model(source: str) -> str:
    """`blocks.0.weight` of "L['self']._modules['blocks']._modules['0']._parameters['weight']"."""
    words = [subscript or attribute for subscript, attribute in re.findall(r"\['?(\w+)'?\]|\.(\w+)", source)]
    return ".".join(word for word in words if word not in ("self", "_modules", "_parameters", "_buffers"))


def _capture_forward(
    module: torch.fx.GraphModule, mode: FakeTensorMode, inputs: tuple[object, ...], arguments: Sequence[Argument]
) -> Capture:
    with mode, torch.fx.traceback.preserve_node_meta():
        traced = make_fx(torch.fx.Interpreter(module).run)(*inputs)
    *nodes, output = traced.graph.nodes
    placeholders = [node for node in nodes if node.op == "placeholder"]
    return Capture(
        method=CaptureMethod.DYNAMO,
        nodes=tuple(nodes),
        arguments=dict(zip(placeholders, arguments, strict=True)),
        outputs=tuple(node for node in tree_leaves(output.args[0]) if isinstance(node, torch.fx.Node)),
        gradients={},
    )


def _capture_with_backward(
    module: torch.fx.GraphModule, mode: FakeTensorMode, inputs: tuple[object, ...], arguments: Sequence[Argument]
) -> Capture:
    def argument_of(descriptor: descriptors.AOTInput, node_name: str) -> Argument:
        if isinstance(descriptor, descriptors.PlainAOTInput):
            return arguments[int(descriptor.idx)]
        return Argument(ArgumentKind.TANGENT, f"{node_name}.gradient")

    return capture_joint_graph(_Interpreted(module), mode, inputs, argument_of, CaptureMethod.DYNAMO)


class _Interpreted(torch.nn.Module):
    """A graph run node by node, which hands the module paths that its nodes remember on to a trace."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__()
        self.phaze_model = module

    def forward(self, *inputs: object) -> object:
        return torch.fx.Interpreter(self.phaze_model).run(*inputs)
