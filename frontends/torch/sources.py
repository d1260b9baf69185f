"""What can be imported: a module, a graph module with shapes, an exported program."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phaze.errors import ImportModelError
from phaze.frontends.torch.examples import Examples, Spec, read_examples

__all__ = ["Source", "read_source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A module to call and its example inputs; `is_flat` where it is a graph that already knows its module paths."""

    name: str
    module: Any
    examples: Examples
    is_flat: bool = False


def read_source(model: Any, inputs: object, options: Mapping[str, object]) -> Source:
    """The module inside a model, and its inputs as the caller or the model itself describes them."""
    import torch

    if isinstance(model, torch.export.ExportedProgram):
        module = model.module(check_guards=False)
        if inputs is None:
            inputs = model.example_inputs
        return _graph_source(module, inputs, options, name=getattr(model.graph_module, "_model_name", "exported"))
    if isinstance(model, torch.fx.GraphModule):
        return _graph_source(model, inputs, options, name=type(model).__name__)
    examples = read_examples(model, inputs, options)
    _check_call(model, examples)
    return Source(name=type(model).__name__, module=model, examples=examples)


def _graph_source(module: Any, inputs: object, options: Mapping[str, object], *, name: str) -> Source:
    examples = _recorded(module) if inputs is None else read_examples(module, inputs, options)
    if inputs is None and options.get("targets") is not None:
        examples = Examples(
            args=examples.args, kwargs={}, targets=read_examples(module, (), options).targets, note=examples.note
        )
    calls = [node for node in module.graph.nodes if node.op in ("call_function", "call_module", "call_method")]
    is_flat = bool(calls) and all(node.op == "call_function" and "nn_module_stack" in node.meta for node in calls)
    if is_flat and examples.kwargs:
        order = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        named = dict(examples.kwargs)
        args = (*examples.args, *(named[key] for key in order[len(examples.args) :] if key in named))
        is_flat = len(args) == len(order)
        if is_flat:
            examples = Examples(args=args, kwargs={}, targets=examples.targets, note=examples.note)
    return Source(name=name, module=module, examples=examples, is_flat=is_flat)


def _recorded(module: Any) -> Examples:
    """The inputs that a graph's placeholders remember."""
    found = []
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        values = [node.meta.get(key) for key in ("val", "example_value", "tensor_meta")]
        value: Any = next((value for value in values if value is not None), None)
        if not hasattr(value, "shape"):
            raise ImportModelError(
                f"the graph module {type(module).__name__} has no shape for its input {node.name!r}; pass inputs, or "
                "run torch.fx.passes.shape_prop.ShapeProp on it first."
            )
        found.append(Spec(tuple(int(size) for size in value.shape), value.dtype))
    shapes = ", ".join(str(list(spec.shape)) for spec in found)
    return Examples(args=tuple(found), kwargs={}, note=f"inputs were found, not given: {shapes}")


def _check_call(model: Any, examples: Examples) -> None:
    """Say which inputs are missing or unknown before anything is captured."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*examples.args, **examples.kwargs)
    except TypeError as error:
        raise ImportModelError(
            f"the inputs do not fit {type(model).__name__}.forward{_shortened(signature)}: {error}. Pass a tuple of "
            "positional inputs or a dict of keywords."
        ) from None


def _shortened(signature: inspect.Signature) -> str:
    names = [
        f"{'*' * (parameter.kind - 1) if parameter.kind in (2, 4) else ''}{name}"
        for name, parameter in signature.parameters.items()
    ]
    return f"({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})"
