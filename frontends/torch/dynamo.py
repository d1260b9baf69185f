"""`torch.compile(model, backend="phaze")`: imports each graph that dynamo captures, then has another backend run it.

Options: `inner` names that backend: inductor (the default; aot_eager with a warning where there is no C++ compiler),
aot_eager or eager. What the compiled model computes is what the inner backend computes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from phaze.compiled_graphs import remember_compiled
from phaze.frontends.torch.capture import Argument, ArgumentKind, Capture
from phaze.frontends.torch.clone import fake_copy
from phaze.frontends.torch.surroundings import untouched
from phaze.frontends.torch.translate import translate
from phaze.ir import Graph
from phaze.ir.refine import refine

__all__ = ["compile_graph"]

INNER_BACKENDS = ("inductor", "aot_eager", "eager")
_OPTIONS = ("inner",)


def compile_graph(module: Any, example_inputs: Sequence[Any], *, options: Mapping[str, object] | None = None) -> Any:
    """The entry point of group `torch_dynamo_backends`; raises ValueError for an unknown option or inner backend.

    A graph that cannot be imported is warned about and runs all the same.
    """
    from torch._dynamo import lookup_backend

    inner = _inner_backend(options or {})
    try:
        graph = _import(module, example_inputs)
    except Exception as error:
        warnings.warn(
            f"phaze could not import a graph of {len(module.graph.nodes)} nodes and leaves it to {inner}: "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
    else:
        remember_compiled(replace(graph, notes=(*graph.notes, f"runs through {inner}")))
    return lookup_backend(inner)(module, example_inputs)


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


def _import(module: Any, example_inputs: Sequence[Any]) -> Graph:
    """The graph, with the backward of every output that has one; fixed to the sizes that dynamo saw."""
    import torch
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    is_trained = torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in example_inputs)
    with tracing(None), untouched():
        copy = fake_copy(module, mode)
        inputs = tuple(_fake_input(value, mode) for value in example_inputs)
        arguments = _arguments(module, example_inputs)
        trace = _capture_jointly if is_trained else _capture_forward
        captured = trace(copy, mode, inputs, arguments)
        graph = translate(captured, copy, name=type(module).__name__, batch_size=1)
    return refine(graph)


def _fake_input(value: Any, mode: Any) -> Any:
    import torch

    if isinstance(value, torch.SymInt):
        return int(value)
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        shape, stride = (tuple(int(size) for size in sizes) for sizes in (value.shape, value.stride()))
        made = torch.empty_strided(shape, stride, dtype=value.dtype, device="cpu")
    return made.requires_grad_(value.requires_grad)


def _arguments(module: Any, example_inputs: Sequence[Any]) -> list[Argument]:
    """What each placeholder is: dynamo lifts parameters and buffers to inputs and remembers where they came from."""
    import torch

    found = []
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, example_inputs, strict=True):
        source = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
        name = _plain_name(source() if callable(source) else source) or node.name
        kind = ArgumentKind.INPUT
        if isinstance(value, torch.nn.Parameter) or "_parameters" in node.name:
            kind = ArgumentKind.PARAMETER
        elif "_buffers" in node.name:
            kind = ArgumentKind.BUFFER
        found.append(Argument(kind, name))
    return found


def _plain_name(source: str) -> str:
    """`blocks.0.weight` of "L['self']._modules['blocks']._modules['0']._parameters['weight']"."""
    words = [first or second for first, second in re.findall(r"\['?(\w+)'?\]|\.(\w+)", source)]
    return ".".join(word for word in words if word not in ("self", "_modules", "_parameters", "_buffers"))


def _capture_forward(module: Any, mode: Any, inputs: tuple[Any, ...], arguments: Sequence[Argument]) -> Capture:
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode, torch.fx.traceback.preserve_node_meta():
        traced = make_fx(torch.fx.Interpreter(module).run)(*inputs)
    nodes = tuple(traced.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    results = torch.utils._pytree.tree_leaves(nodes[-1].args[0])
    return Capture(
        recipe="dynamo",
        nodes=nodes[:-1],
        arguments=dict(zip(placeholders, arguments, strict=True)),
        outputs=tuple(node for node in results if isinstance(node, torch.fx.Node)),
        gradients={},
    )


def _capture_jointly(module: Any, mode: Any, inputs: tuple[Any, ...], arguments: Sequence[Argument]) -> Capture:
    import torch
    from torch._functorch._aot_autograd import descriptors
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phaze_model = module

        def forward(self, *values: Any) -> Any:
            return torch.fx.Interpreter(self.phaze_model).run(*values)

    with contextlib.ExitStack() as stack, mode, torch.fx.traceback.preserve_node_meta():
        joint = aot_export_joint_with_descriptors(stack, Flat(), inputs)
    nodes = tuple(joint.graph_module.graph.nodes)
    found: dict[Any, Argument] = {}
    for node in nodes:
        if node.op == "placeholder":
            what = node.meta["desc"]
            is_input = isinstance(what, descriptors.PlainAOTInput)
            found[node] = arguments[what.idx] if is_input else Argument(ArgumentKind.TANGENT, f"{node.name}.gradient")
    outputs, gradients = [], {}
    for value, what in zip(nodes[-1].args[0], nodes[-1].meta["desc"], strict=True):
        if isinstance(what, descriptors.PlainAOTOutput):
            outputs.append(value)
        elif value is not None and isinstance(getattr(what, "grad_of", None), descriptors.PlainAOTInput):
            argument = arguments[what.grad_of.idx]
            if argument.kind is ArgumentKind.PARAMETER:
                gradients[argument.name] = value
    return Capture(recipe="dynamo", nodes=nodes[:-1], arguments=found, outputs=tuple(outputs), gradients=gradients)
