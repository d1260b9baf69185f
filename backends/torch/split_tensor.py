"""A tensor of which every device of an axis holds a part, seen by the model's own code as if it were whole.

The model runs as it was written: shapes are those of the whole tensor, and every function of torch that meets a split
tensor is answered here. A function with a rule works on the parts; every other one gets whole tensors, gathered first,
so that an unknown function costs time and never a wrong number. Whole tensors are plain ones. Rules work above
autograd: gradients follow from what they call. An `autograd.Function` is asked nothing of that kind and would lose the
gradient: the wrapper requires one where its part does, so that such a function is seen and refused.

This file needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from phaze.backends.torch.split_collectives import Axis, copied, gathered, parted

__all__ = ["RULES", "NoRule", "SplitTensor", "is_split", "rule_for"]

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
"""By the name of torch's function or method; filled by `split_rules`."""


class NoRule(Exception):  # noqa: N818 - a signal between rules, never seen by users
    """A rule does not know this form of its function: it runs on whole tensors."""


class SplitTensor(torch.Tensor):
    """A part of a tensor: dimension `dim` is cut, inside each of `outer` equal runs, into a chunk per device."""

    local: torch.Tensor
    axis: Axis
    dim_: int
    outer: int

    @staticmethod
    def __new__(cls, local: torch.Tensor, axis: Axis, shape: Any, dim: int, outer: int = 1) -> SplitTensor:
        """A wrapper of the whole tensor's shape around the part."""
        made: SplitTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        made.local, made.axis, made.dim_, made.outer = local, axis, dim, outer
        if local.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse)
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:
        return f"SplitTensor(shape={list(self.shape)}, dim={self.dim_}, outer={self.outer}, local={self.local})"

    @property
    def length(self) -> int:
        """Elements of the whole dimension that is cut."""
        return int(self.shape[self.dim_])

    @property
    def is_even(self) -> bool:
        """Whether all devices hold as much."""
        return self.length % (self.outer * self.axis.size) == 0

    @property
    def requires_grad(self) -> bool:
        """Whether the part does."""
        return bool(self.local.requires_grad)

    def whole(self, *, sums: bool = False) -> torch.Tensor:
        """The whole tensor, on every device."""
        return gathered(self.local, self.axis, self.dim_, self.outer, self.length, sums=sums)

    def like(self, local: torch.Tensor, shape: Any = None, dim: int | None = None, outer: int | None = None) -> Any:
        """Another tensor on the same axis, cut likewise unless said otherwise."""
        return SplitTensor(
            local,
            self.axis,
            self.shape if shape is None else shape,
            self.dim_ if dim is None else dim,
            self.outer if outer is None else outer,
        )

    def part(self, value: Any, dim: int) -> torch.Tensor:
        """The part of another tensor that belongs to this one, where `dim` of it stands beside the cut dimension.

        A tensor that does not have that dimension, or has it once, is whole.
        """
        if isinstance(value, SplitTensor):
            if (value.dim_, value.outer, value.length) == (dim, self.outer, self.length):
                return value.local
            value = value.whole()
        if dim < 0 or value.shape[dim] == 1:
            return copied(value, self.axis)
        if value.shape[dim] != self.length:
            raise NoRule
        return parted(value, self.axis, dim, self.outer)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if any(_is_output(one) for one in args):
            _refuse()
        if func == torch.Tensor.T.__get__:
            return args[0].permute(*range(len(args[0].shape) - 1, -1, -1))
        if func == torch.Tensor.mT.__get__:
            return args[0].transpose(-1, -2)
        if name == "__get__" or name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(kwargs.get("out"), SplitTensor) or (name == "__setitem__" and isinstance(args[0], SplitTensor)):
            raise _in_place(name)
        rule = RULES.get(name)
        if rule is not None:
            try:
                return rule(func, *args, **{_NUMPY_NAMES.get(key, key): value for key, value in kwargs.items()})
            except NoRule:
                pass
        changes = name in _CHANGES or (name.endswith("_") and not name.endswith("__"))
        if changes and isinstance(args[0], SplitTensor):
            raise _in_place(name)
        whole_args, whole_kwargs = tree_map(_whole, (args, kwargs), is_leaf=is_split)
        return func(*whole_args, **whole_kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(
            f"{func} met a tensor that is split over devices below the level where it is known; call it through "
            "torch's own functions, or plan with tensor_widths=1."
        )


def _is_output(value: Any) -> bool:
    """Whether autograd itself made a split tensor."""
    if not isinstance(value, SplitTensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return value.grad_fn is not None


def _refuse(*_: Any) -> None:
    raise NotImplementedError(
        "an autograd.Function was applied to a tensor that is split over devices, whose gradient it would lose; write "
        "it with torch's own functions, or plan with tensor_widths=1."
    )


def _in_place(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} changes a tensor that is split over devices in place, which tensor parallelism cannot follow; write "
        "it out of place, or plan with tensor_widths=1."
    )


def is_split(value: Any) -> bool:
    """Whether something is a split tensor."""
    return isinstance(value, SplitTensor)


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, SplitTensor) else value


_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}
_CHANGES = ("__iadd__", "__isub__", "__imul__", "__itruediv__")
_METADATA_NAMES = (
    "size dim ndimension numel nelement element_size is_contiguous is_floating_point is_complex stride storage_offset "
    "get_device __hash__ __len__ __repr__ is_same_size __format__ is_sparse_csr is_inference"
)
_METADATA = frozenset(_METADATA_NAMES.split())


def rule_for(*names: str) -> Callable[[Rule], Rule]:
    """Mark the rule of some functions, by name."""

    def mark(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = rule
        return rule

    return mark
