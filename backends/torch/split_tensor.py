"""SplitTensor: a tensor that is split over devices and that the model's own code uses as if it were whole.

The model runs as it was written. A split tensor has the shape of the whole tensor, and every function of torch that
meets one is answered by `SplitTensor.__torch_function__`. Where a rule for the function is known (`RULES`, filled by
`split_rules` and `split_products`), the function works on the parts. Every other function gets whole tensors, which
are gathered first: an unknown function costs time and never gives a wrong number. Whole tensors are plain ones.

Rules work above autograd: gradients follow from the functions that they call. An `autograd.Function` does not pass
through `__torch_function__` and would lose the gradient. The wrapper therefore requires a gradient where its part
does, so that such a function is seen and refused.

Two axes may split a tensor. A `ContextTensor` is split over contexts, and the part that it holds may be a SplitTensor
of the tensor-parallel axis. Rules are the same for both and see one axis at a time (`is_split`): first that of
contexts, for which tensors that are split over the other axis count as whole.

This file needs torch alone: target 'fsdp' exports it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, TypeAlias, TypeGuard

import torch
from torch.utils._pytree import tree_leaves, tree_map

from phaze.backends.torch import split_collectives
from phaze.backends.torch.split_collectives import Axis

__all__ = [
    "RULES",
    "ContextTensor",
    "NoRule",
    "SplitTensor",
    "TorchFunction",
    "all_reduced",
    "copied",
    "is_split",
    "reduce_scattered",
    "rule_for",
    "rules_see",
    "scattered",
    "to_whole",
    "watch_whole_calls",
]

TorchFunction: TypeAlias = Callable[..., Any]
"""A function or method of torch. It returns whatever torch says: a tensor, several of them, or a number."""

Rule: TypeAlias = Callable[..., Any]
"""Takes a function of torch and its arguments, some of them split; returns what the function would return."""

RULES: dict[str, Rule] = {}
"""Rules by the name of torch's function or method."""

_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}
"""torch takes these names of NumPy's for its own; rules know torch's own names only."""
_IN_PLACE_OPERATORS = ("__iadd__", "__isub__", "__imul__", "__itruediv__")
_METADATA_NAMES = (
    "size dim ndimension numel nelement element_size is_contiguous is_floating_point is_complex stride storage_offset "
    "get_device __hash__ __len__ __repr__ is_same_size __format__ is_sparse_csr is_inference"
)
_METADATA = frozenset(_METADATA_NAMES.split())
"""Functions that read no element: the wrapper, which has the whole tensor's shape, answers them itself."""


class NoRule(Exception):  # noqa: N818 - a signal between rules, never seen by users
    """A rule does not know this form of its function, which then runs on whole tensors."""


class SplitTensor(torch.Tensor):
    """This device's part of a tensor, with the shape of the whole.

    Attributes:
        local: the part that this device holds.
        axis: the devices that hold the parts.
        split_dim: the dimension that is split.
        outer: the number of equal runs of that dimension; each run is split into one chunk per device.
        unrepeated: a tensor of which this one has every element, or every slice of a dimension, several times; None
            where none is known. Attention sends keys before they are repeated.
    """

    local: torch.Tensor
    axis: Axis
    split_dim: int
    outer: int
    unrepeated: SplitTensor | None = None

    @staticmethod
    def __new__(cls, local: torch.Tensor, axis: Axis, shape: Sequence[int], dim: int, outer: int = 1) -> SplitTensor:
        """A wrapper of the whole tensor's shape around the part."""
        wrapper: SplitTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        wrapper.local, wrapper.axis, wrapper.split_dim, wrapper.outer = local, axis, dim, outer
        if local.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                wrapper.register_hook(_refuse_autograd_function)  # gradients go to the part, never to the wrapper
        return wrapper

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __repr__(self, **_: object) -> str:
        return f"SplitTensor(shape={list(self.shape)}, dim={self.split_dim}, outer={self.outer}, local={self.local})"

    @property
    def length(self) -> int:
        """The number of elements of the whole dimension that is split."""
        return int(self.shape[self.split_dim])

    @property
    def is_even(self) -> bool:
        """Whether all devices hold equally much."""
        return self.length % (self.outer * self.axis.size) == 0

    @property
    def requires_grad(self) -> bool:
        """Whether the part requires a gradient."""
        return bool(self.local.requires_grad)

    def whole(self, *, sums_gradient: bool = False) -> torch.Tensor:
        """The whole tensor, gathered on every device."""
        gather = partial(
            split_collectives.all_gathered,
            axis=self.axis,
            dim=self.split_dim,
            outer=self.outer,
            length=self.length,
            sums_gradient=sums_gradient,
        )
        return _of_innermost(gather, self.local, self.split_dim)

    def with_part(
        self,
        local: torch.Tensor,
        shape: Sequence[int] | None = None,
        dim: int | None = None,
        outer: int | None = None,
    ) -> SplitTensor:
        """Another split tensor on the same axis, whose shape and split are this one's unless they are given."""
        return type(self)(
            local,
            self.axis,
            self.shape if shape is None else shape,
            self.split_dim if dim is None else dim,
            self.outer if outer is None else outer,
        )

    def matching_part(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """The part of another operand that meets this tensor's part, where its `dim` meets this one's split dimension.

        An operand without that dimension (`dim` below 0), or with one element there, is needed whole.
        """
        if is_split(value):
            if (value.split_dim, value.outer, value.length) == (dim, self.outer, self.length):
                return value.local
            value = value.whole()
        if dim < 0 or value.shape[dim] == 1:
            return copied(value, self.axis)
        if value.shape[dim] != self.length:
            raise NoRule
        return scattered(value, self.axis, dim, self.outer)

    @classmethod
    def __torch_function__(
        cls,
        func: TorchFunction,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if any(_is_made_by_autograd(argument) for argument in args):
            _refuse_autograd_function()
        if func == torch.Tensor.T.__get__:
            return args[0].permute(*range(len(args[0].shape) - 1, -1, -1))
        if func == torch.Tensor.mT.__get__:
            return args[0].transpose(-1, -2)
        if name == "__get__" or name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with rules_see(cls):
            return cls._run(func, name, args, kwargs)

    @classmethod
    def _run(cls, func: TorchFunction, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function by its rule on parts, or on whole tensors."""
        if is_split(kwargs.get("out")) or (name == "__setitem__" and is_split(args[0])):
            raise _in_place_error(name)
        rule = RULES.get(name)
        named = {_NUMPY_NAMES.get(key, key): value for key, value in kwargs.items()}
        if rule is not None and _takes(rule, named):
            try:
                return rule(func, *args, **named)
            except NoRule:
                pass  # the function runs on whole tensors, below
        is_in_place = name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
        if is_in_place and is_split(args[0]):
            raise _in_place_error(name)
        note = _NOTES_WHOLE_CALLS.get()
        if note is not None:
            gathered = [leaf for leaf in tree_leaves((args, kwargs), is_leaf=is_split) if is_split(leaf)]
            note(name, gathered, is_context=cls is ContextTensor)
        whole_args, whole_kwargs = tree_map(to_whole, (args, kwargs), is_leaf=is_split)
        return func(*whole_args, **whole_kwargs)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: TorchFunction,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        raise NotImplementedError(
            f"{func} met a tensor that is split over devices below the level where it is known; call it through "
            "torch's own functions, or plan with strategy tp=1."
        )


class ContextTensor(SplitTensor):
    """A tensor that is split over contexts. What torch calls for it comes before what it calls for SplitTensors."""


_NOTES_WHOLE_CALLS: ContextVar[Callable[..., None] | None] = ContextVar("notes_whole_calls", default=None)
"""What is told of every function that runs on gathered tensors: its name, those tensors, and `is_context`."""


@contextmanager
def watch_whole_calls(note: Callable[..., None]) -> Iterator[None]:
    """While this is entered, functions that run on gathered tensors are told to `note`."""
    token = _NOTES_WHOLE_CALLS.set(note)
    try:
        yield
    finally:
        _NOTES_WHOLE_CALLS.reset(token)


_SEEN_KIND: ContextVar[type[SplitTensor] | None] = ContextVar("seen_kind", default=None)
"""The kind of split tensors that the rule at hand sees: those of one axis."""


@contextmanager
def rules_see(kind: type[SplitTensor]) -> Iterator[None]:
    """While this is entered, only split tensors of this kind count as split."""
    token = _SEEN_KIND.set(kind)
    try:
        yield
    finally:
        _SEEN_KIND.reset(token)


def _takes(rule: Rule, named: Mapping[str, object]) -> bool:
    """Whether a rule knows all arguments that are given by name."""
    return not named or (known := _names_of_arguments(rule)) is None or named.keys() <= known


@cache
def _names_of_arguments(rule: Rule) -> frozenset[str] | None:
    """The names of a rule's arguments; None where it takes any."""
    parameters = inspect.signature(rule).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if takes_any else frozenset(parameters)


def _is_made_by_autograd(value: object) -> bool:
    """Whether autograd itself made a split tensor: it is the output of an `autograd.Function`."""
    if not isinstance(value, SplitTensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return value.grad_fn is not None


def _refuse_autograd_function(*_: torch.Tensor) -> None:
    raise NotImplementedError(
        "an autograd.Function was applied to a tensor that is split over devices, whose gradient it would lose; write "
        "it with torch's own functions, or plan with strategy tp=1."
    )


def _in_place_error(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} changes a tensor that is split over devices in place, which tensor parallelism cannot follow; write "
        "it out of place, or plan with strategy tp=1."
    )


def is_split(value: object) -> TypeGuard[SplitTensor]:
    """Whether a leaf of some arguments is split over the axis that a rule sees; outside of rules, over any axis."""
    kind = _SEEN_KIND.get()
    return isinstance(value, SplitTensor) and (kind is None or type(value) is kind)


def to_whole(value: Any) -> Any:
    """A split tensor gathered, outside of rules over all axes; anything else as it is."""
    while is_split(value):
        value = value.whole()
    return value


# ------------------------------------------------------------------------- collectives on what another axis may split


def _of_innermost(collective: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor, dim: int) -> torch.Tensor:
    """A collective that changes at most the length of one dimension, on what this device holds of a tensor.

    Where the other axis splits the same dimension, the tensor is gathered over that axis first.
    """
    if isinstance(value, SplitTensor) and value.split_dim == dim:
        value = value.whole()
    if not isinstance(value, SplitTensor):
        return collective(value)
    local = collective(value.local)
    shape = [size if place == value.split_dim else local.shape[place] for place, size in enumerate(value.shape)]
    return value.with_part(local, shape)


def copied(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A whole tensor for an operator that works on parts; see `split_collectives.copied`."""
    return _of_innermost(partial(split_collectives.copied, axis=axis), value, -1)


def scattered(value: torch.Tensor, axis: Axis, dim: int, outer: int = 1) -> torch.Tensor:
    """This device's part of a whole tensor."""
    return _of_innermost(partial(split_collectives.scattered, axis=axis, dim=dim, outer=outer), value, dim)


def all_reduced(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of what every device has."""
    return _of_innermost(partial(split_collectives.all_reduced, axis=axis), value, -1)


def reduce_scattered(value: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This device's part of the sum of what every device has."""
    return _of_innermost(partial(split_collectives.reduce_scattered, axis=axis, dim=dim), value, dim)


def rule_for(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of these functions of torch."""

    def register(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = rule
        return rule

    return register
