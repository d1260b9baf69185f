"""A module on fake tensors: the same classes, flags, ties and names, with shapes instead of weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phaze.errors import ImportModelError
from phaze.frontends.torch.examples import Examples, Spec

__all__ = ["FakeModel", "fake_copy", "fake_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """The clone, the mode in which its tensors live, and its parameters by name: ties map to the first name.

    `input_dtype` is that of inputs given as bare shapes: integers where the first module with parameters is an
    embedding.
    """

    module: Any
    mode: Any
    dtype: Any
    input_dtype: Any
    names: Mapping[str, str]
    trainable: tuple[str, ...]

    def tensors(self, examples: Examples) -> Examples:
        """Examples as fake tensors."""
        import torch

        def made(spec: Spec) -> Any:
            dtype = self.input_dtype if spec.dtype is None else spec.dtype
            if spec.dtype is not None and spec.dtype.is_floating_point and self.dtype.is_floating_point:
                dtype = self.dtype
            return torch.empty(spec.shape, dtype=dtype, device="cpu")

        with self.mode:
            return examples.mapped(made)


def fake_model(module: Any, dtype: Any = None) -> FakeModel:
    """Clone a module onto fake CPU tensors; nothing of the module itself changes and no weights are allocated.

    Floating point parameters and buffers become `dtype` where it is given. Raises ImportModelError where the module
    cannot be copied, has parameters without a shape, or has none that trains.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _check_parameters(module)
    clone = fake_copy(module, mode, dtype)
    _quiet(clone)
    parameters = dict(clone.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in clone.named_parameters()}
    floats = [p.dtype for p in clone.parameters() if p.is_floating_point()]
    own = dtype or (floats[0] if floats else torch.float32)
    start = next(part for part in clone.modules() if part._parameters)
    return FakeModel(
        module=clone,
        mode=mode,
        dtype=own,
        input_dtype=torch.int64 if isinstance(start, torch.nn.Embedding) else own,
        names={name: first[id(parameter)] for name, parameter in parameters.items()},
        trainable=tuple(name for name, parameter in clone.named_parameters() if parameter.requires_grad),
    )


def fake_copy(module: Any, mode: Any, dtype: Any = None) -> Any:
    """A copy of a module whose parameters, buffers and other tensors are fake; raises ImportModelError."""
    import torch

    memo: dict[int, Any] = {}

    def fake(tensor: Any) -> Any:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device="cpu")
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made

    for tensor in (*module.parameters(), *module.buffers(), *_plain_tensors(module)):
        if id(tensor) not in memo:
            memo[id(tensor)] = fake(tensor)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ImportModelError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}), and Phaze captures a copy so "
            "that the model itself stays as it is; make it work with copy.deepcopy."
        ) from error


def _check_parameters(module: Any) -> None:
    import torch

    for name, parameter in module.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
            raise ImportModelError(f"parameter {name!r} has no shape yet (a lazy module); run the model once first.")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ImportModelError(
            f"{type(module).__name__} has no trainable parameters ({sum(1 for _ in module.parameters())} frozen ones); "
            "Phaze plans training: set requires_grad on what is to be trained."
        )


def _plain_tensors(module: Any) -> list[Any]:
    """Tensors that modules keep as ordinary attributes."""
    import torch

    return [value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor)]


def _quiet(clone: Any) -> None:
    """Switch off in the clone what branches on chance (LayerDrop) or only serves generation (caches of keys)."""
    for part in clone.modules():
        config = getattr(part, "config", None)
        if hasattr(part, "layerdrop") or (hasattr(part, "layers") and hasattr(config, "layerdrop")):
            part.training = False
        if config is not None and getattr(config, "use_cache", False):
            config.use_cache = False
