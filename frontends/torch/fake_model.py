"""A model with its loss on fake tensors, with shapes instead of weights, and what is assumed of values it asks for.

`make_fake_model` copies a module: the same classes, flags, ties and names. `Objective` puts the loss behind it,
`LossCall` is the objective with its inputs.

`ValuesAssumed` answers what a model asks of values while it is captured without any. Models that read images between
words check that as many words stand for parts of images as there are parts, and put the parts in the places of those
words. Which places these are is in the values alone, and nothing that is planned depends on it:

- checks by `torch._check_tensor_all_with`, such as Hugging Face's of placeholders, are taken as passed;
- `bincount` of indices below `minlength`, such as of the experts that tokens chose, has so many counts;
- `x[mask] = values` becomes a `masked_scatter`, whose shapes are known; where every place gets the same, a `where`.

Features of images are also made a list of samples and joined again, which is a view of the whole (`_joined_again`):
a trace would hold as many tensors as the batch has samples.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import KeyPath, tree_flatten_with_path

from phaze.errors import ImportModelError
from phaze.frontends.torch.example_inputs import ExampleInputs, TensorSpec
from phaze.model_import import loss_candidates

__all__ = [
    "MODEL_PREFIX",
    "FakeModel",
    "LossCall",
    "Objective",
    "ValuesAssumed",
    "as_exported",
    "fake_copy",
    "make_fake_model",
    "path_in_model",
]


class _Holds:
    """Stands for a tensor of one truth value, which is assumed to hold."""

    def item(self) -> bool:
        """True."""
        return True


class ValuesAssumed(TorchFunctionMode):
    """While this is entered, functions that need values are replaced as the module's docstring says."""

    def __init__(self) -> None:
        super().__init__()
        self._lists: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor._is_all_true:
            return _Holds()
        if func is torch.Tensor.__setitem__ and _is_mask(args[1]):
            target, mask, values = args
            target.copy_(_placed(target, mask, values))
            return None
        if func in (torch.bincount, torch.Tensor.bincount) and (kwargs or {}).get("minlength"):
            return _counted(*args, **(kwargs or {}))
        if func in (torch.cat, torch.stack) and len(args) == 1:
            joined = self._joined_again(func, args[0], (kwargs or {}).get("dim", 0))
            if joined is not None:
                return joined
        result = func(*args, **(kwargs or {}))
        if func in (torch.unbind, torch.Tensor.unbind) and args[1:] in ((), (0,)) and not kwargs:
            self._lists.append((args[0], tuple(result)))
        return result

    def _joined_again(self, func: Any, tensors: object, dim: object) -> torch.Tensor | None:
        """The tensor whose samples these are, all of them in their order; None where they are anything else."""
        if dim != 0 or not isinstance(tensors, list | tuple):
            return None
        for whole, samples in self._lists:
            if len(samples) == len(tensors) and all(map(operator.is_, samples, tensors)):
                is_flat = func is torch.cat and whole.dim() > 1
                return whole.flatten(0, 1) if is_flat else whole
        return None


def _counted(indices: torch.Tensor, weights: torch.Tensor | None = None, *, minlength: int) -> torch.Tensor:
    """How often each index occurs, or the sum of its weights."""
    added = torch.ones_like(indices) if weights is None else weights
    return added.new_zeros(minlength).scatter_add(0, indices, added)


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.dim() > 0


def _placed(target: torch.Tensor, mask: torch.Tensor, values: Any) -> torch.Tensor:
    """A tensor in which the values stand where the mask is true, each row of them once or the only one everywhere."""
    rows = torch.as_tensor(values, dtype=target.dtype, device=target.device)
    features = target.dim() - mask.dim()
    has_rows = rows.dim() == features + 1 and rows.shape[0] > 1
    mask = mask.reshape(*mask.shape, *(1 for _ in range(features)))
    return target.masked_scatter(mask, rows) if has_rows else torch.where(mask, rows, target)


MODEL_PREFIX = "phaze_model."
"""How the paths of the model's parts begin inside its objective."""


def path_in_model(path: str) -> str:
    """The path of a module in the model, without what dynamo and the objective put in front of it."""
    plain = str(path).removeprefix("L['self']").lstrip(".")
    return "" if plain == MODEL_PREFIX.rstrip(".") else plain.removeprefix(MODEL_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """A copy of a module on fake tensors, and the mode that they live in.

    `first_names` maps every name of a parameter to its first one: tied parameters have several. `trainable` are the
    first names of those that train. `input_dtype` is the element type of inputs that were given as bare shapes:
    integers where the first module with parameters is an embedding, else that of the model.
    """

    module: torch.nn.Module
    mode: FakeTensorMode
    dtype: torch.dtype
    input_dtype: torch.dtype
    first_names: Mapping[str, str]
    trainable: tuple[str, ...]

    def fake_inputs(self, examples: ExampleInputs) -> ExampleInputs:
        """The same inputs as fake tensors; floating point ones have the model's element type."""

        def empty(spec: TensorSpec) -> torch.Tensor:
            dtype = self.input_dtype if spec.dtype is None else spec.dtype
            if spec.dtype is not None and spec.dtype.is_floating_point and self.dtype.is_floating_point:
                dtype = self.dtype
            return torch.empty(spec.shape, dtype=dtype, device="cpu")

        with self.mode:
            return examples.mapped(empty)


def make_fake_model(module: torch.nn.Module, dtype: torch.dtype | None = None) -> FakeModel:
    """Copy a module onto fake CPU tensors; the module itself stays as it is and no weights are allocated.

    Floating point parameters and buffers become `dtype` where it is given. Raises ImportModelError where the module
    cannot be copied, has parameters without a shape, or has none that trains.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _check_parameters(module)
    fake_module = fake_copy(module, mode, dtype)
    _switch_off_chance_and_caches(fake_module)
    parameters = dict(fake_module.named_parameters(remove_duplicate=False))
    first_name = {id(parameter): name for name, parameter in fake_module.named_parameters()}
    floating_dtypes = [parameter.dtype for parameter in fake_module.parameters() if parameter.is_floating_point()]
    model_dtype = dtype or (floating_dtypes[0] if floating_dtypes else torch.float32)
    first_with_parameters = next(part for part in fake_module.modules() if part._parameters)
    return FakeModel(
        module=fake_module,
        mode=mode,
        dtype=model_dtype,
        input_dtype=torch.int64 if isinstance(first_with_parameters, torch.nn.Embedding) else model_dtype,
        first_names={name: first_name[id(parameter)] for name, parameter in parameters.items()},
        trainable=tuple(name for name, parameter in fake_module.named_parameters() if parameter.requires_grad),
    )


def fake_copy(module: torch.nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Copy a module so that its parameters, buffers and other tensors are fake; raises ImportModelError."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        fake_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        with mode:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=fake_dtype, device="cpu")
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
        return empty

    # deepcopy takes a tensor that is in the memo as copied already, so no weight is ever duplicated.
    memo: dict[int, torch.Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers(), *_attribute_tensors(module)):
        if id(tensor) not in memo:
            memo[id(tensor)] = fake(tensor)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ImportModelError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}), and Phaze captures a copy so "
            "that the model itself stays as it is; make it work with copy.deepcopy."
        ) from error


def _check_parameters(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
            raise ImportModelError(f"parameter {name!r} has no shape yet (a lazy module); run the model once first.")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ImportModelError(
            f"{type(module).__name__} has no trainable parameters ({sum(1 for _ in module.parameters())} frozen ones); "
            "Phaze plans training: set requires_grad on what is to be trained."
        )


def _attribute_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors that modules keep as ordinary attributes, neither parameters nor buffers."""
    return [value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor)]


def _switch_off_chance_and_caches(fake_module: torch.nn.Module) -> None:
    """Switch off what branches on chance (LayerDrop) and what only serves generation (caches of keys and values)."""
    for part in fake_module.modules():
        config = getattr(part, "config", None)
        if hasattr(part, "layerdrop") or (hasattr(part, "layers") and hasattr(config, "layerdrop")):
            part.training = False
        if config is not None and getattr(config, "use_cache", False):
            config.use_cache = False


class Objective(torch.nn.Module):
    """A model together with its loss: `forward(args, kwargs, targets)` returns the scalar loss.

    The model is the child `phaze_model`. A flat graph is run node by node, because that hands the module paths which
    its nodes remember on to the trace.
    """

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[..., object] | None, *, is_flat: bool) -> None:
        super().__init__()
        self.phaze_model = model
        self.loss_fn = loss_fn
        self.is_flat = is_flat
        self.training = model.training

    def forward(self, args: tuple[object, ...], kwargs: Mapping[str, object], targets: object) -> torch.Tensor:
        """The loss of one call of the model; raises ImportModelError where there is none."""
        call = torch.fx.Interpreter(self.phaze_model).run if self.is_flat else self.phaze_model
        output = call(*args, **kwargs)
        if self.loss_fn is None:
            return _find_loss(output)
        try:
            loss = self.loss_fn(output) if targets is None else self.loss_fn(output, targets)
        except TypeError as error:
            taken = "the output" if targets is None else "the output and targets"
            raise ImportModelError(f"loss_fn failed on {taken} ({_described(output)}): {error}.") from error
        if not _is_scalar(loss):
            raise ImportModelError(f"loss_fn returned {_described(loss)}; expected a scalar floating point tensor.")
        return loss


def _find_loss(output: object) -> torch.Tensor:
    """The scalar that a model returns: itself, under `loss`, or in a tuple; raises where there is none.

    A scalar without a gradient is taken only where no other is there; the trial run then says why it cannot be trained.
    """
    scalars = [candidate for candidate in loss_candidates(output) if _is_scalar(candidate)]
    for scalar in scalars:
        if scalar.requires_grad:
            return scalar
    if scalars:
        return scalars[0]
    raise ImportModelError(
        f"the model returns {_described(output)}, which holds no scalar loss; pass labels among the inputs where the "
        "model computes its own loss, or loss_fn=(a function of the output, and of targets= where those are given)."
    )


def _is_scalar(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} ({str(value.dtype).removeprefix('torch.')})"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(str(key) for key in value)}"
    return f"a {type(value).__name__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCall:
    """The call that is run and captured: the objective of a fake model, on fake inputs."""

    fake: FakeModel
    objective: Objective
    inputs: ExampleInputs

    @property
    def arguments(self) -> tuple[tuple[object, ...], dict[str, object], object]:
        """The arguments of the objective: positional inputs, inputs by keyword, and targets."""
        return (self.inputs.args, dict(self.inputs.kwargs), self.inputs.targets)

    @property
    def named_leaves(self) -> tuple[tuple[str, object], ...]:
        """Every leaf of the arguments with its name, in the order in which torch flattens them."""
        leaves, _ = tree_flatten_with_path(self.arguments)
        return tuple((_leaf_name(path), leaf) for path, leaf in leaves)


def _leaf_name(path: KeyPath) -> str:
    """Name a leaf by its way through `LossCall.arguments`: `input_0`, `input_ids`, `targets`, nested ones with dots."""
    argument, *inner = (str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
    if argument == "2":
        return ".".join(["targets", *inner])
    return ("input_" if argument == "0" else "") + ".".join(inner)


@contextlib.contextmanager
def as_exported() -> Iterator[None]:
    """Let models believe that torch.export runs them: many skip checks of values while they are exported.

    What they check or place by values all the same is assumed.
    """
    with _compiling_state_context(), ValuesAssumed():
        yield
