"""What can be imported, and with which example inputs: a module, a graph module or an exported program.

Inputs are kept as shapes and element types only. They are what the caller gave, else what an fx graph or an exported
program remembers, else what a Hugging Face model says of itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch._dynamo.eval_frame import OptimizedModule

from phaze.errors import ImportModelError

__all__ = ["ExampleInputs", "ModelWithInputs", "TensorSpec", "read_inputs", "read_model"]

_INTEGER_NAMES = ("ids", "labels", "mask", "positions", "targets", "tokens", "indices")
"""How the names of inputs end that hold integers when only their shape was given."""

_IMAGE_SIZE = 224
"""Pixels a side of an image, where a config names none: what most image classifiers are trained on."""

_SOURCE_POSITIONS = 1500
"""Positions of a speech encoder, where a config names none: Whisper's; each takes two frames of sound."""

_SOUND_SAMPLES = 16_000
"""Samples of raw sound: one second at the usual 16 kHz."""

_NAMES_SHOWN = 8
"""How many parameters of a signature an error message shows: enough to recognise it, and still one line."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without contents; `dtype` is None where only a shape was given."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleInputs:
    """The arguments of a call, in which a TensorSpec stands for every tensor, at any depth.

    `note` says where the arguments came from, if not from the caller.
    """

    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object]
    targets: object = None
    note: str = ""

    @property
    def batch_size(self) -> int | None:
        """The size of dimension 0 of the first tensor that has one."""
        return next((spec.shape[0] for spec in self.specs() if spec.shape), None)

    def specs(self) -> Iterator[TensorSpec]:
        """Every tensor: positional arguments, those by keyword, targets."""
        for value in (*self.args, *self.kwargs.values(), self.targets):
            yield from _specs(value)

    def mapped(self, change: Callable[[TensorSpec], object]) -> ExampleInputs:
        """The same arguments with every TensorSpec replaced by what `change` makes of it."""
        return ExampleInputs(
            args=tuple(_mapped(value, change) for value in self.args),
            kwargs={name: _mapped(value, change) for name, value in self.kwargs.items()},
            targets=_mapped(self.targets, change),
            note=self.note,
        )

    def with_batch(self, size: int) -> ExampleInputs:
        """The same arguments at another batch size: dimension 0 changes where it is as long as the first tensor's."""
        old_size = self.batch_size

        def resized(spec: TensorSpec) -> TensorSpec:
            is_batch = bool(spec.shape) and spec.shape[0] == old_size
            return TensorSpec((size, *spec.shape[1:]), spec.dtype) if is_batch else spec

        return self.mapped(resized)


def _specs(value: object) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _specs(item)


def _mapped(value: object, change: Callable[[TensorSpec], object]) -> object:
    if isinstance(value, TensorSpec):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_mapped(item, change) for item in value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWithInputs:
    """A module to call and its example inputs.

    `is_flat` tells that the module is a graph of operators, each of which remembers the path of its module.
    """

    name: str
    module: torch.nn.Module
    examples: ExampleInputs
    is_flat: bool = False


def read_model(
    model: torch.nn.Module | torch.export.ExportedProgram, inputs: object, options: Mapping[str, object]
) -> ModelWithInputs:
    """Find the module inside a model, and its inputs; raises ImportModelError where inputs lack or do not fit."""
    if isinstance(model, torch.export.ExportedProgram):
        module = model.module(check_guards=False)
        name = getattr(model.graph_module, "_model_name", "exported")
        return _read_graph_module(module, model.example_inputs if inputs is None else inputs, options, name=name)
    if isinstance(model, torch.fx.GraphModule):
        return _read_graph_module(model, inputs, options, name=type(model).__name__)
    if isinstance(model, OptimizedModule):  # what torch.compile returns, which is the model under other names
        model = model._orig_mod
    examples = read_inputs(model, inputs, options)
    _check_signature(model, examples)
    return ModelWithInputs(name=type(model).__name__, module=model, examples=examples)


def _read_graph_module(
    module: torch.fx.GraphModule, inputs: object, options: Mapping[str, object], *, name: str
) -> ModelWithInputs:
    if inputs is None:
        examples = replace(_recorded_inputs(module), targets=_read(options.get("targets"), "targets"))
    else:
        examples = read_inputs(module, inputs, options)
    calls = [node for node in module.graph.nodes if node.op in ("call_function", "call_module", "call_method")]
    is_flat = bool(calls) and all(node.op == "call_function" and "nn_module_stack" in node.meta for node in calls)
    if is_flat and examples.kwargs:
        # A flat graph is run by an interpreter, which takes positional inputs only.
        order = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        by_name = dict(examples.kwargs)
        args = (*examples.args, *(by_name[name] for name in order[len(examples.args) :] if name in by_name))
        is_flat = len(args) == len(order)
        if is_flat:
            examples = replace(examples, args=args, kwargs={})
    return ModelWithInputs(name=name, module=module, examples=examples, is_flat=is_flat)


def _recorded_inputs(module: torch.fx.GraphModule) -> ExampleInputs:
    """The inputs that the placeholders of a graph remember."""
    specs = []
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        recorded = (node.meta.get(key) for key in ("val", "example_value", "tensor_meta"))
        value = next((value for value in recorded if value is not None), None)
        if not hasattr(value, "shape"):
            raise ImportModelError(
                f"the graph module {type(module).__name__} has no shape for its input {node.name!r}; pass inputs, or "
                "run torch.fx.passes.shape_prop.ShapeProp on it first."
            )
        specs.append(_spec_of(value))
    shapes = ", ".join(str(list(spec.shape)) for spec in specs)
    return ExampleInputs(args=tuple(specs), kwargs={}, note=f"inputs were found, not given: {shapes}")


def _check_signature(model: torch.nn.Module, examples: ExampleInputs) -> None:
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
    stars: Mapping[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = [f"{stars.get(parameter.kind, '')}{name}" for name, parameter in signature.parameters.items()]
    return f"({', '.join(names[:_NAMES_SHOWN])}{', ...' if len(names) > _NAMES_SHOWN else ''})"


def read_inputs(model: torch.nn.Module, inputs: object, options: Mapping[str, object]) -> ExampleInputs:
    """The inputs that the caller gave, else those that the model itself describes."""
    targets = _read(options.get("targets"), "targets")
    if inputs is None:
        return replace(_described_inputs(model, options), targets=targets)
    args, kwargs = _arguments(inputs)
    return ExampleInputs(
        args=tuple(_read(value, "") for value in args),
        kwargs={name: _read(value, name) for name, value in kwargs.items()},
        targets=targets,
    )


def _arguments(inputs: object) -> tuple[tuple[object, ...], Mapping[str, object]]:
    """The positional and the keyword arguments that a caller meant."""
    if isinstance(inputs, tuple) and len(inputs) == 2:
        args, kwargs = inputs
        if isinstance(args, tuple | list) and not _is_leaf(args) and isinstance(kwargs, Mapping):
            return tuple(args), kwargs
    if isinstance(inputs, Mapping):
        return (), inputs
    if isinstance(inputs, list | tuple) and not _is_leaf(inputs):
        return tuple(inputs), {}
    return (inputs,), {}


def _is_leaf(value: object) -> bool:
    """Whether this is a tensor or a shape."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return True
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(size, int) and not isinstance(size, bool) for size in value)
    )


def _read(value: object, name: str) -> object:
    """Replace every tensor and every shape in an argument by a TensorSpec."""
    if isinstance(value, TensorSpec):
        return value
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _spec_of(value)
    if isinstance(value, list | tuple) and _is_leaf(value):
        if min(value) < 1:
            raise ImportModelError(f"input {name or 'shape'} has shape {list(value)}; every size must be at least 1.")
        return TensorSpec(tuple(value), torch.int64 if name.endswith(_INTEGER_NAMES) else None)
    if isinstance(value, Mapping):
        return {key: _read(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_read(item, name) for item in value)
    return value


def _spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(int(size) for size in tensor.shape), tensor.dtype)


def _described_inputs(model: torch.nn.Module, options: Mapping[str, object]) -> ExampleInputs:
    """Inputs of a Hugging Face model: its `dummy_inputs`, or what its config says of images and sound, and labels."""
    if getattr(model, "config", None) is None or not hasattr(model, "dummy_inputs"):
        raise ImportModelError(
            f"{type(model).__name__} needs inputs to be captured with, and describes none itself; pass inputs: tensors "
            "(meta tensors will do) or shapes, as a tuple of positional ones or a dict of keywords."
        )
    specs = _main_inputs(model)
    length = options.get("sequence_length")
    if isinstance(length, int) and "input_ids" in specs:
        specs = {
            name: TensorSpec((spec.shape[0], length), spec.dtype) if len(spec.shape) == 2 else spec
            for name, spec in specs.items()
        }
    if "labels" in inspect.signature(model.forward).parameters:
        specs |= _labels(model, specs)
    shapes = ", ".join(f"{name} {list(spec.shape)}" for name, spec in specs.items())
    return ExampleInputs(kwargs=specs, note=f"inputs were found, not given: {shapes}")


def _main_inputs(model: torch.nn.Module) -> dict[str, TensorSpec]:
    config = model.config
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", _IMAGE_SIZE)
        sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
        return {main: TensorSpec((1, getattr(vision, "num_channels", 3), *sides))}
    if main == "input_features" and hasattr(config, "num_mel_bins"):
        frames = 2 * getattr(config, "max_source_positions", _SOURCE_POSITIONS)
        return {main: TensorSpec((1, config.num_mel_bins, frames))}
    if main == "input_values":
        return {main: TensorSpec((1, _SOUND_SAMPLES))}
    return {name: _spec_of(value) for name, value in model.dummy_inputs.items() if isinstance(value, torch.Tensor)}


def _labels(model: torch.nn.Module, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Labels of the shape that the kind of head asks for; decoder inputs are made from them by the model itself."""
    kind = type(model).__name__
    main = next(iter(specs.values()))
    if kind.endswith(("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")):
        return {"labels": TensorSpec(main.shape[:1], torch.int64)}
    if "input_ids" in specs:
        return {"labels": TensorSpec(specs.get("decoder_input_ids", specs["input_ids"]).shape, torch.int64)}
    if hasattr(model.config, "max_target_positions"):
        return {"labels": TensorSpec((main.shape[0], model.config.max_target_positions), torch.int64)}
    return {}
