"""Example inputs of a model as shapes and types only: what was given, or what a Hugging Face model says of itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phaze.errors import ImportModelError

__all__ = ["Examples", "Spec", "read_examples"]

_INTEGER_NAMES = ("ids", "labels", "mask", "positions", "targets", "tokens", "indices")


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor without contents; `dtype` is torch's, None where only a shape was given."""

    shape: tuple[int, ...]
    dtype: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Arguments of a call in which every tensor is a Spec; `note` says where they came from if not from the caller."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any]
    targets: Any = None
    note: str = ""

    @property
    def batch_size(self) -> int | None:
        """The size of dimension 0 of the first tensor that has one."""
        return next((spec.shape[0] for _, spec in self.specs() if spec.shape), None)

    def specs(self) -> Iterator[tuple[str, Spec]]:
        """Every tensor with its name: keyword, position, and the way inside nested ones."""
        for index, value in enumerate(self.args):
            yield from _specs(f"input_{index}", value)
        for name, value in self.kwargs.items():
            yield from _specs(name, value)
        yield from _specs("targets", self.targets)

    def mapped(self, change: Callable[[Spec], Any]) -> Examples:
        """The same arguments with every Spec replaced."""
        return Examples(
            args=tuple(_mapped(value, change) for value in self.args),
            kwargs={name: _mapped(value, change) for name, value in self.kwargs.items()},
            targets=_mapped(self.targets, change),
            note=self.note,
        )

    def with_batch(self, size: int) -> Examples:
        """The same arguments with another size of the batch: of dimension 0 wherever it is the first tensor's."""
        old = self.batch_size

        def resized(spec: Spec) -> Spec:
            is_batch = bool(spec.shape) and spec.shape[0] == old
            return Spec((size, *spec.shape[1:]), spec.dtype) if is_batch else spec

        return self.mapped(resized)


def read_examples(model: Any, inputs: object, options: Mapping[str, object]) -> Examples:
    """The inputs that the caller gave, else those that the model itself describes."""
    targets = _read(options.get("targets"), "targets")
    if inputs is None:
        found = _found(model, options)
        return Examples(kwargs=found.kwargs, targets=targets, note=found.note)
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    if _is_pair(inputs):
        args, kwargs = inputs  # type: ignore[misc]
    elif isinstance(inputs, Mapping):
        kwargs = inputs
    elif _is_leaf(inputs) or not isinstance(inputs, list | tuple):
        args = (inputs,)
    else:
        args = tuple(inputs)
    return Examples(
        args=tuple(_read(value, "") for value in args),
        kwargs={name: _read(value, name) for name, value in kwargs.items()},
        targets=targets,
    )


def _is_pair(inputs: object) -> bool:
    """Whether this is (positional arguments, keyword arguments)."""
    return (
        isinstance(inputs, tuple)
        and len(inputs) == 2
        and isinstance(inputs[0], tuple | list)
        and not _is_leaf(inputs[0])
        and isinstance(inputs[1], Mapping)
    )


def _is_leaf(value: object) -> bool:
    """Whether this is a tensor or a shape."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return True
    is_sequence = isinstance(value, list | tuple) and bool(value)
    return is_sequence and all(isinstance(size, int) and not isinstance(size, bool) for size in value)  # type: ignore[attr-defined]


def _read(value: Any, name: str) -> Any:
    if isinstance(value, Spec):
        return value
    if _is_leaf(value):
        if hasattr(value, "dtype"):
            return Spec(tuple(int(size) for size in value.shape), value.dtype)
        if min(value) < 1:
            raise ImportModelError(f"input {name or 'shape'} has shape {list(value)}; every size must be at least 1.")
        return Spec(tuple(value), _integer() if name.endswith(_INTEGER_NAMES) else None)
    if isinstance(value, Mapping):
        return {key: _read(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_read(item, name) for item in value)
    return value


def _integer() -> Any:
    import torch

    return torch.int64


def _specs(name: str, value: Any) -> Iterator[tuple[str, Spec]]:
    if isinstance(value, Spec):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _specs(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _specs(f"{name}.{index}", item)


def _mapped(value: Any, change: Callable[[Spec], Any]) -> Any:
    if isinstance(value, Spec):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_mapped(item, change) for item in value)
    return value


def _found(model: Any, options: Mapping[str, object]) -> Examples:
    """Inputs of a Hugging Face model: its `dummy_inputs`, or what its config says of images and sound, and labels."""
    config, parameters = getattr(model, "config", None), _parameter_names(model)
    if config is None or not hasattr(model, "dummy_inputs"):
        raise ImportModelError(
            f"{type(model).__name__} needs inputs to be captured with, and describes none itself; pass inputs: tensors "
            "(meta tensors will do) or shapes, as a tuple of positional ones or a dict of keywords."
        )
    kwargs = _main_inputs(model, config, options)
    length = options.get("sequence_length")
    if isinstance(length, int) and "input_ids" in kwargs:
        kwargs = {n: Spec((s.shape[0], length), s.dtype) if len(s.shape) == 2 else s for n, s in kwargs.items()}
    if "labels" in parameters:
        kwargs |= _labels(model, kwargs)
    shapes = ", ".join(f"{name} {list(spec.shape)}" for name, spec in kwargs.items())
    return Examples(kwargs=kwargs, note=f"inputs were found, not given: {shapes}")


def _parameter_names(model: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(model.forward).parameters)


def _main_inputs(model: Any, config: Any, options: Mapping[str, object]) -> dict[str, Spec]:
    import torch

    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
        return {main: Spec((1, getattr(vision, "num_channels", 3), *sides), None)}
    if main == "input_features" and hasattr(config, "num_mel_bins"):
        positions = 2 * getattr(config, "max_source_positions", 1500)
        return {main: Spec((1, config.num_mel_bins, positions), None)}
    if main == "input_values":
        return {main: Spec((1, 16000), None)}
    dummies = {name: value for name, value in model.dummy_inputs.items() if isinstance(value, torch.Tensor)}
    return {name: Spec(tuple(value.shape), value.dtype) for name, value in dummies.items()}


def _labels(model: Any, kwargs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Labels of the shape that the kind of head asks for; decoder inputs are made from them by the model itself."""
    import torch

    kind = type(model).__name__
    main = next(iter(kwargs.values()))
    if kind.endswith(("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")):
        return {"labels": Spec(main.shape[:1], torch.int64)}
    if "input_ids" in kwargs:
        return {"labels": Spec(kwargs.get("decoder_input_ids", kwargs["input_ids"]).shape, torch.int64)}
    if hasattr(model.config, "max_target_positions"):
        return {"labels": Spec((main.shape[0], model.config.max_target_positions), torch.int64)}
    return {}
