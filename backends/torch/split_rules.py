"""How torch's other functions run on split tensors: elementwise, views, indexing, softmax, norms, sums, joins.

Every rule returns what its function would return on the whole tensors, as a split or a whole tensor, or raises NoRule,
after which the function runs on whole tensors. Rules stand in this order:

- element by element: `element_by_element`, `in_place`, `converted`, `masked_scatter`, and `register_hook`;
- views: `view`, `flatten`, `unflatten` (all by `reshaped`), `unsqueeze`, `squeeze`, `transpose`, `permute`, `t`,
  `expand`, `getitem`, `split`;
- along dimensions that are whole: `along_whole_dim` (softmax, cumulative sums), `norm`, `reduce`, `cat`, `stack`,
  `repeat_interleave`.

Products, embeddings, losses and attention stand in `split_products`.

This file needs torch alone: target 'fsdp' exports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from phaze.backends.torch.split_tensor import (
    NoRule,
    SplitTensor,
    TorchFunction,
    all_reduced,
    copied,
    is_split,
    rule_for,
    to_whole,
)

__all__ = ["reshaped"]

_ELEMENTWISE = (
    "abs add addcmul addcdiv bernoulli bitwise_and bitwise_not bitwise_or bool clamp clip clone contiguous cos detach "
    "div double dropout eq erf exp expm1 float floor_divide ge gelu gt half bfloat16 int le leaky_relu lerp log log1p "
    "logical_and logical_not logical_or long lt masked_fill maximum minimum mish mul multiply ne neg negative pow "
    "reciprocal relu relu6 remainder rsqrt rsub sigmoid sign silu sin softplus sqrt square sub subtract tanh "
    "true_divide where zeros_like ones_like full_like empty_like elu celu selu hardtanh isinf isnan isfinite "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __pow__ __rpow__ __neg__ "
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __invert__ __floordiv__ __mod__"
)
_IN_PLACE = "add_ sub_ mul_ div_ masked_fill_ clamp_ relu_ __iadd__ __isub__ __imul__ __itruediv__"


@rule_for(*_ELEMENTWISE.split())
def element_by_element(func: TorchFunction, *args: object, **kwargs: object) -> SplitTensor:
    """Work element by element, with operands stretched to a common shape: the result is split as the leader is."""
    leaves, tree = tree_flatten((args, kwargs), is_leaf=is_split)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    shape = torch.broadcast_shapes(*(tuple(tensor.shape) for tensor in tensors))
    leader = _leader(tensors, shape)
    local_args, local_kwargs = tree_unflatten(_parts_beside(leader, leaves), tree)
    local = func(*local_args, **local_kwargs)
    return leader.with_part(local, shape, len(shape) - len(leader.shape) + leader.split_dim)


def _parts_beside(leader: SplitTensor, leaves: Iterable[object]) -> list[object]:
    """Take from every tensor among some operands the part that meets the leader's; other operands stay as they are.

    Dimensions that are stretched to a common shape are counted from the right.
    """
    dim_from_right = leader.split_dim - len(leader.shape)

    def part(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dim = len(leaf.shape) + dim_from_right
        return leader.matching_part(leaf, max(dim, -1))  # -1: the operand does not have that dimension

    return [part(leaf) for leaf in leaves]


def _leader(tensors: Iterable[torch.Tensor], shape: Sequence[int]) -> SplitTensor:
    """The first split operand that is not stretched along its split dimension."""
    for tensor in tensors:
        if is_split(tensor):
            dim = len(shape) - len(tensor.shape) + tensor.split_dim
            if shape[dim] == tensor.length:
                return tensor
    raise NoRule


@rule_for(*_IN_PLACE.split())
def in_place(func: TorchFunction, target: torch.Tensor, *args: object, **kwargs: object) -> SplitTensor:
    """Change the part itself, so that views of it see the change."""
    if not is_split(target):
        raise NotImplementedError(
            f"{func.__name__} puts a tensor that is split over devices into a whole one; write it out of place."
        )
    leaves, tree = tree_flatten((args, kwargs), is_leaf=is_split)
    local_args, local_kwargs = tree_unflatten(_parts_beside(target, leaves), tree)
    func(target.local, *local_args, **local_kwargs)
    target.unrepeated = None
    return target


@rule_for("to", "type_as")
def converted(func: TorchFunction, value: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """Convert to another type; a tensor among the arguments is read for its type and device only."""

    def local_part(argument: Any) -> Any:
        return argument.local if is_split(argument) else argument

    local_kwargs = {name: local_part(argument) for name, argument in kwargs.items()}
    local = func(local_part(value), *map(local_part, args), **local_kwargs)
    return value.with_part(local) if is_split(value) else local


@rule_for("requires_grad_")
def requires_grad_(func: TorchFunction, x: SplitTensor, requires_grad: bool = True) -> SplitTensor:
    """Nothing where the part requires a gradient as it is asked to, which Hugging Face asks of embeddings."""
    if x.local.requires_grad != requires_grad:
        raise NoRule
    return x


@rule_for("register_hook")
def register_hook(
    func: TorchFunction, value: SplitTensor, hook: Callable[[torch.Tensor], torch.Tensor | None]
) -> RemovableHandle:
    """Hook the gradient of the part; the hook sees it split as the tensor is."""

    def on_local_gradient(gradient: torch.Tensor) -> torch.Tensor | None:
        changed = hook(value.with_part(gradient))
        return changed if changed is None else value.matching_part(changed, value.split_dim)

    return value.local.register_hook(on_local_gradient)


@rule_for("masked_scatter")
def masked_scatter(func: TorchFunction, target: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Rows of `source` one after another where a mask [..., 1] is true: each device takes those of its positions."""
    mask, source = to_whole(mask), to_whole(source)
    if not is_split(target) or mask.shape != (*target.shape[:-1], 1) or source.shape[-1] != target.shape[-1]:
        raise NoRule
    which_row = (mask.flatten().cumsum(0) - 1).clamp_min(0).view(mask.shape[:-1])
    dim = target.split_dim
    if dim == len(target.shape) - 1:
        local_mask, local_rows = mask, which_row
    else:
        local_mask, local_rows = target.matching_part(mask, dim), target.matching_part(which_row, dim)
    rows = source.reshape(-1, source.shape[-1])
    rows = target.matching_part(rows, 1 if dim == len(target.shape) - 1 else -1)
    return target.with_part(torch.where(local_mask, rows[local_rows], target.local))


# ---------------------------------------------------------------------------------------------------------- views


def reshaped(value: SplitTensor, shape: Sequence[int]) -> SplitTensor:
    """The same elements in another shape, where the split falls on chunks of one of its dimensions; else NoRule.

    The elements are seen as (before, run, inner): `before` counts the runs that are split each by itself, and `inner`
    the elements of one run. A dimension of the new shape can be the split one if runs of it hold as many elements and
    begin in the same places. The last such dimension is taken.
    """
    if tuple(shape) == tuple(value.shape):
        return value
    before = math.prod(value.shape[: value.split_dim]) * value.outer
    inner = value.length // value.outer * math.prod(value.shape[value.split_dim + 1 :])
    runs_before_dim, split = 1, None
    for dim, size in enumerate(shape):
        if before % runs_before_dim == 0 and size % (before // runs_before_dim) == 0:
            outer = before // runs_before_dim
            run = size // outer
            if run * math.prod(shape[dim + 1 :]) == inner and _stays_split(value, run, inner):
                split = (dim, outer)
        runs_before_dim *= size
    if split is None:
        raise NoRule
    dim, outer = split
    local_shape = list(shape)
    local_run = value.local.shape[value.split_dim] // value.outer
    local_shape[dim] = shape[dim] // value.axis.size if value.is_even else outer * local_run
    result = value.with_part(value.local.reshape(local_shape), shape, dim, outer)
    result.unrepeated = _unrepeated_as(value, shape)
    return result


def _unrepeated_as(value: SplitTensor, shape: Sequence[int]) -> SplitTensor | None:
    """What was stretched along one dimension, where the new shape joins that dimension to the one before it."""
    source = value.unrepeated
    if source is None or len(source.shape) != len(value.shape):
        return None
    stretched = [dim for dim, size in enumerate(value.shape) if source.shape[dim] != size]
    if len(stretched) != 1 or stretched[0] in (0, source.split_dim):
        return None
    place = stretched[0]
    joined = (*value.shape[: place - 1], value.shape[place - 1] * value.shape[place], *value.shape[place + 1 :])
    if tuple(shape) != joined or source.shape[place] != 1:
        return None
    return reshaped(source, (*source.shape[:place], *source.shape[place + 1 :]))


def _stays_split(value: SplitTensor, run: int, inner: int) -> bool:
    """Whether chunks of a run of the new dimension are those that devices hold; unequal chunks must stay the same."""
    if value.axis.is_balanced:
        length = value.length // value.outer
        return run == length and inner == run * math.prod(value.shape[value.split_dim + 1 :])
    if value.is_even:
        return run % value.axis.size == 0
    return value.outer == 1 and run == value.length and inner == run * math.prod(value.shape[value.split_dim + 1 :])


def _listed(sizes: Sequence[Any]) -> list[Any]:
    """Sizes or dimensions, which torch takes one by one or as one sequence."""
    return list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple | torch.Size) else list(sizes)


def _complete_sizes(value: torch.Tensor, sizes: Sequence[object]) -> list[int]:
    """The sizes of a shape, with -1 replaced by what it stands for."""
    listed = _listed(sizes)
    if any(not isinstance(size, int) for size in listed):
        raise NoRule
    if -1 in listed:
        known = math.prod(size for size in listed if size != -1)
        listed[listed.index(-1)] = value.numel() // known
    return listed


@rule_for("view", "reshape")
def view(func: TorchFunction, value: torch.Tensor, *sizes: object, **kwargs: object) -> SplitTensor:
    """Another shape; `view(dtype)` is not known."""
    given = sizes or (kwargs.get("shape", kwargs.get("size")),)
    if not is_split(value) or given[0] is None:
        raise NoRule
    return reshaped(value, _complete_sizes(value, given))


@rule_for("flatten")
def flatten(func: TorchFunction, value: SplitTensor, start_dim: int = 0, end_dim: int = -1) -> SplitTensor:
    """Several dimensions joined to one."""
    first, last = _positive(value, start_dim), _positive(value, end_dim)
    joined = math.prod(value.shape[first : last + 1])
    return reshaped(value, (*value.shape[:first], joined, *value.shape[last + 1 :]))


@rule_for("unflatten")
def unflatten(func: TorchFunction, value: SplitTensor, dim: int, sizes: Sequence[int]) -> SplitTensor:
    """One dimension taken apart into several."""
    dim, parts = _positive(value, dim), list(sizes)
    if -1 in parts:
        parts[parts.index(-1)] = value.shape[dim] // math.prod(size for size in parts if size != -1)
    return reshaped(value, (*value.shape[:dim], *parts, *value.shape[dim + 1 :]))


@rule_for("unsqueeze")
def unsqueeze(func: TorchFunction, value: SplitTensor, dim: int) -> SplitTensor:
    """A new dimension of one element."""
    dim %= len(value.shape) + 1
    shape = (*value.shape[:dim], 1, *value.shape[dim:])
    return value.with_part(value.local.unsqueeze(dim), shape, value.split_dim + (dim <= value.split_dim))


@rule_for("squeeze")
def squeeze(func: TorchFunction, value: SplitTensor, dim: object = None) -> SplitTensor:
    """A dimension of one element left out."""
    if not isinstance(dim, int):
        raise NoRule
    dim = _positive(value, dim)
    if value.shape[dim] != 1:
        return value
    shape = (*value.shape[:dim], *value.shape[dim + 1 :])
    return value.with_part(value.local.squeeze(dim), shape, value.split_dim - (dim < value.split_dim))


@rule_for("transpose", "swapaxes")
def transpose(func: TorchFunction, value: SplitTensor, dim0: int, dim1: int) -> SplitTensor:
    """Two dimensions exchanged."""
    order = list(range(len(value.shape)))
    first, second = _positive(value, dim0), _positive(value, dim1)
    order[first], order[second] = order[second], order[first]
    return _permuted(value, order)


@rule_for("permute")
def permute(func: TorchFunction, value: SplitTensor, *dims: object, **kwargs: object) -> SplitTensor:
    """Dimensions in another order."""
    return _permuted(value, [_positive(value, dim) for dim in _listed(dims or (kwargs["dims"],))])


@rule_for("t")
def t(func: TorchFunction, value: SplitTensor) -> SplitTensor:
    """A matrix transposed."""
    return _permuted(value, [1, 0] if len(value.shape) == 2 else [0])


def _permuted(value: SplitTensor, order: Sequence[int]) -> SplitTensor:
    shape = tuple(value.shape[dim] for dim in order)
    return value.with_part(value.local.permute(*order), shape, list(order).index(value.split_dim))


@rule_for("expand")
def expand(func: TorchFunction, value: SplitTensor, *sizes: object) -> SplitTensor:
    """Dimensions of one element stretched, and new ones in front."""
    listed = _listed(sizes)
    new_dims = len(listed) - len(value.shape)
    shape = [value.shape[dim - new_dims] if size == -1 else size for dim, size in enumerate(listed)]
    split_dim = value.split_dim + new_dims
    if shape[split_dim] != value.length:
        raise NoRule
    local_length = value.local.shape[value.split_dim]
    local_shape = [local_length if dim == split_dim else size for dim, size in enumerate(shape)]
    stretched = value.with_part(value.local.expand(local_shape), shape, split_dim)
    stretched.unrepeated = value if not new_dims else None
    return stretched


@rule_for("__getitem__")
def getitem(func: TorchFunction, value: torch.Tensor, index: object) -> SplitTensor:
    """Indexing by whole numbers, slices, None and the ellipsis, as long as the split dimension is taken whole."""
    if not is_split(value):
        raise NoRule
    items = _complete_index(value, index if isinstance(index, tuple) else (index,))
    local_items: list[int | slice | None] = []
    dim, result_dim, split_dim = 0, 0, None
    for item in items:
        if item is None:  # a new dimension
            local_items.append(item)
            result_dim += 1
            continue
        if dim == value.split_dim:
            if not isinstance(item, slice) or item.indices(value.length) != (0, value.length, 1):
                raise NoRule
            split_dim, item = result_dim, slice(None)  # the slice counts elements of the whole, not of the part
        local_items.append(item)
        result_dim += not isinstance(item, int)
        dim += 1
    local = value.local[tuple(local_items)]
    return value.with_part(local, _with_length(local, split_dim, value), split_dim)


def _complete_index(value: SplitTensor, items: Sequence[object]) -> list[int | slice | None]:
    """An index with one item for every dimension, and None for new ones; the ellipsis is written out."""
    for item in items:
        is_known = item is None or item is Ellipsis or isinstance(item, int | slice)
        if isinstance(item, bool) or not is_known:
            raise NoRule
    indexed = sum(1 for item in items if item is not None and item is not Ellipsis)
    rest = (slice(None),) * (len(value.shape) - indexed)
    place = items.index(Ellipsis) if Ellipsis in items else len(items)
    return [*items[:place], *rest, *items[place + 1 :]]  # type: ignore[list-item]


def _with_length(local: torch.Tensor, split_dim: int | None, value: SplitTensor) -> list[int]:
    """The shape of the whole result of which a device holds `local`: the split dimension has the whole length."""
    assert split_dim is not None
    shape = list(local.shape)
    shape[split_dim] = value.length
    return shape


@rule_for("split", "chunk", "unbind", "split_with_sizes", "tensor_split")
def split(func: TorchFunction, value: SplitTensor, *args: Any, **kwargs: Any) -> tuple[SplitTensor, ...]:
    """Parts along another dimension; along the split one, its runs themselves."""
    name = func.__name__
    dim = kwargs.get("dim", args[-1] if name == "unbind" and args else args[1] if len(args) > 1 else 0)
    dim = _positive(value, dim)
    if dim != value.split_dim:
        split_dim = value.split_dim - (name == "unbind" and dim < value.split_dim)
        pieces = func(value.local, *args, **kwargs)
        return tuple(value.with_part(piece, _with_length(piece, split_dim, value), split_dim) for piece in pieces)
    how = args[0] if args else kwargs.get("split_size", kwargs.get("split_size_or_sections", kwargs.get("chunks")))
    run = value.length // value.outer
    sizes = list(how) if isinstance(how, list | tuple) else None
    count = how if name == "chunk" else None
    is_runs = sizes == [run] * value.outer or count == value.outer or (name == "split" and how == run)
    if not is_runs or value.outer == 1 or not value.is_even:
        raise NoRule
    shape = [run if place == dim else size for place, size in enumerate(value.shape)]
    return tuple(value.with_part(piece, shape, dim, 1) for piece in value.local.chunk(value.outer, dim))


# ------------------------------------------------------------------------------------- along dimensions that are whole


def _positive(value: torch.Tensor, dim: int) -> int:
    """A dimension counted from the left, where it may have been counted from the right."""
    return dim % len(value.shape)


@rule_for("softmax", "log_softmax", "cumsum")
def along_whole_dim(
    func: TorchFunction, value: SplitTensor, dim: object = None, *args: object, **kwargs: object
) -> SplitTensor:
    """Functions along one dimension, which must not be the split one."""
    if not isinstance(dim, int) or _positive(value, dim) == value.split_dim:
        raise NoRule
    return value.with_part(func(value.local, dim, *args, **kwargs))


@rule_for("layer_norm", "rms_norm")
def norm(
    func: TorchFunction, value: torch.Tensor, normalized_shape: Sequence[int], *args: object, **kwargs: object
) -> SplitTensor:
    """Norms over the last dimensions, none of them split; scale and shift are whole."""
    if not is_split(value) or value.split_dim >= len(value.shape) - len(normalized_shape):
        raise NoRule
    axis = value.axis

    def copied_whole(argument: object) -> object:
        return copied(to_whole(argument), axis) if isinstance(argument, torch.Tensor) else argument

    local_args = [copied_whole(argument) for argument in args]
    local_kwargs = {name: copied_whole(argument) for name, argument in kwargs.items()}
    return value.with_part(func(value.local, normalized_shape, *local_args, **local_kwargs))


@rule_for("sum", "mean")
def reduce(
    func: TorchFunction,
    value: SplitTensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    **kwargs: object,
) -> torch.Tensor:
    """Sums and means. Over the split dimension the parts' results are summed over devices; else they stay split."""
    dims = range(len(value.shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    reduced_dims = {_positive(value, reduced) for reduced in dims}
    if value.split_dim in reduced_dims:
        if not value.is_even:  # the mean of unequal parts' means is not the mean
            raise NoRule
        given = {} if dim is None else {"dim": dim, "keepdim": keepdim}
        total = all_reduced(func(value.local, **given, **kwargs), value.axis)
        return total / value.axis.size if func.__name__ == "mean" else total
    local = func(value.local, dim, keepdim, **kwargs)
    left_out = 0 if keepdim else sum(1 for reduced in reduced_dims if reduced < value.split_dim)
    split_dim = value.split_dim - left_out
    return value.with_part(local, _with_length(local, split_dim, value), split_dim)


@rule_for("cat", "concat")
def cat(func: TorchFunction, tensors: Sequence[torch.Tensor], dim: int = 0) -> SplitTensor:
    """Tensors joined along a dimension that is whole."""
    # torch leaves out empty vectors, whatever the others' shapes are: caches of keys and values begin as such.
    tensors = [tensor for tensor in tensors if tuple(tensor.shape) != (0,)]
    leader = next((tensor for tensor in tensors if is_split(tensor)), None)
    if leader is None or _positive(leader, dim) == leader.split_dim:
        raise NoRule
    local = func([leader.matching_part(tensor, leader.split_dim) for tensor in tensors], dim)
    return leader.with_part(local, _with_length(local, leader.split_dim, leader))


@rule_for("stack")
def stack(func: TorchFunction, tensors: Sequence[torch.Tensor], dim: int = 0) -> SplitTensor:
    """Tensors joined along a new dimension."""
    leader = next(tensor for tensor in tensors if is_split(tensor))
    dim %= len(leader.shape) + 1
    local = func([leader.matching_part(tensor, leader.split_dim) for tensor in tensors], dim)
    shape = (*leader.shape[:dim], len(tensors), *leader.shape[dim:])
    return leader.with_part(local, shape, leader.split_dim + (dim <= leader.split_dim))


@rule_for("repeat_interleave")
def repeat_interleave(
    func: TorchFunction, value: SplitTensor, repeats: object, dim: int | None = None, **kwargs: object
) -> SplitTensor:
    """Elements repeated, along the split dimension too: an element and its copies stay together on one device."""
    if not isinstance(repeats, int) or dim is None:
        raise NoRule
    dim = _positive(value, dim)
    if dim == value.split_dim and (value.outer > 1 or not value.is_even):
        raise NoRule
    local = func(value.local, repeats, dim=dim)
    shape = [size * repeats if place == dim else size for place, size in enumerate(value.shape)]
    repeated = value.with_part(local, shape)
    repeated.unrepeated = value if dim != value.split_dim else None
    return repeated
