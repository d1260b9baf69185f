"""How functions of torch work on parts: elementwise ones, views, normalizations, and what joins or picks.

Every rule returns what the function would return on the whole tensors, cut or whole, or raises NoRule. Products,
lookups and losses stand in `split_products`.

This file needs torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from phaze.backends.torch.split_collectives import copied, summed
from phaze.backends.torch.split_tensor import NoRule, SplitTensor, is_split, rule_for

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
def elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Element by element, operands stretched to a common shape: the first cut that is met is the result's."""
    leaves, tree = tree_flatten((args, kwargs), is_leaf=is_split)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    shape = torch.broadcast_shapes(*(tuple(tensor.shape) for tensor in tensors))
    first = _leader(tensors, shape)
    local = _parts(first, leaves)
    local_args, local_kwargs = tree_unflatten(local, tree)
    made = func(*local_args, **local_kwargs)
    return first.like(made, shape, len(shape) - len(first.shape) + first.dim_)


def _parts(leader: SplitTensor, leaves: Sequence[Any]) -> list[Any]:
    """What belongs to the leader's part of every tensor among some operands, dimensions counted from the right."""
    at = leader.dim_ - len(leader.shape)
    return [
        leader.part(leaf, len(leaf.shape) + at if len(leaf.shape) >= -at else -1)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]


def _leader(tensors: Sequence[torch.Tensor], shape: Sequence[int]) -> SplitTensor:
    """The first split operand that is not stretched along its cut."""
    for tensor in tensors:
        if isinstance(tensor, SplitTensor) and shape[len(shape) - len(tensor.shape) + tensor.dim_] == tensor.length:
            return tensor
    raise NoRule


@rule_for(*_IN_PLACE.split())
def in_place(func: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """On the part itself, so that views of it see the change."""
    if not isinstance(target, SplitTensor):
        raise NotImplementedError(
            f"{func.__name__} puts a tensor that is split over devices into a whole one; write it out of place."
        )
    leaves, tree = tree_flatten((args, kwargs), is_leaf=is_split)
    local = _parts(target, leaves)
    local_args, local_kwargs = tree_unflatten(local, tree)
    func(target.local, *local_args, **local_kwargs)
    return target


@rule_for("to", "type_as")
def converted(func: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Another type; a tensor among the arguments is read for its type and device only."""

    def local(one: Any) -> Any:
        return one.local if isinstance(one, SplitTensor) else one

    made = func(local(value), *map(local, args), **{name: local(one) for name, one in kwargs.items()})
    return value.like(made) if isinstance(value, SplitTensor) else made


@rule_for("register_hook")
def register_hook(func: Any, value: Any, hook: Any) -> Any:
    """On the gradient of the part, which the hook sees split as the tensor is."""

    def shown(gradient: Any) -> Any:
        changed = hook(value.like(gradient))
        return changed if changed is None else value.part(changed, value.dim_)

    return value.local.register_hook(shown)


# ---------------------------------------------------------------------------------------------------------- views


def reshaped(value: SplitTensor, shape: Sequence[int]) -> Any:
    """The same elements in another shape, where the cut falls on chunks of one dimension of it."""
    if tuple(shape) == tuple(value.shape):
        return value
    before = math.prod(value.shape[: value.dim_]) * value.outer
    inner = value.length // value.outer * math.prod(value.shape[value.dim_ + 1 :])
    start, found = 1, None
    for dim, size in enumerate(shape):
        if before % start == 0 and size % (before // start) == 0:
            outer = before // start
            run = size // outer
            if run * math.prod(shape[dim + 1 :]) == inner and _stays_cut(value, run, inner):
                found = (dim, outer)
        start *= size
    if found is None:
        raise NoRule
    dim, outer = found
    local = list(shape)
    held = value.local.shape[value.dim_] // value.outer
    local[dim] = shape[dim] // value.axis.size if value.is_even else outer * held
    return value.like(value.local.reshape(local), shape, dim, outer)


def _stays_cut(value: SplitTensor, run: int, inner: int) -> bool:
    if value.is_even:
        return run % value.axis.size == 0
    return value.outer == 1 and run == value.length and inner == run * math.prod(value.shape[value.dim_ + 1 :])


def _sizes(value: torch.Tensor, sizes: Sequence[Any]) -> list[int]:
    flat = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple | torch.Size) else list(sizes)
    if any(not isinstance(size, int) for size in flat):
        raise NoRule
    if -1 in flat:
        known = math.prod(size for size in flat if size != -1)
        flat[flat.index(-1)] = value.numel() // known
    return flat


@rule_for("view", "reshape")
def view(func: Any, value: Any, *sizes: Any, **kwargs: Any) -> Any:
    """Another shape; `view(dtype)` is not known."""
    given = sizes or (kwargs.get("shape", kwargs.get("size")),)
    if not isinstance(value, SplitTensor) or given[0] is None:
        raise NoRule
    return reshaped(value, _sizes(value, given))


@rule_for("flatten")
def flatten(func: Any, value: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Dimensions joined."""
    rank = len(value.shape)
    first, last = start_dim % rank, end_dim % rank
    joined = math.prod(value.shape[first : last + 1])
    return reshaped(value, (*value.shape[:first], joined, *value.shape[last + 1 :]))


@rule_for("unflatten")
def unflatten(func: Any, value: Any, dim: int, sizes: Any) -> Any:
    """A dimension taken apart."""
    at = dim % len(value.shape)
    parts = list(sizes)
    if -1 in parts:
        parts[parts.index(-1)] = value.shape[at] // math.prod(size for size in parts if size != -1)
    return reshaped(value, (*value.shape[:at], *parts, *value.shape[at + 1 :]))


@rule_for("unsqueeze")
def unsqueeze(func: Any, value: Any, dim: int) -> Any:
    """A dimension of one."""
    at = dim % (len(value.shape) + 1)
    shape = (*value.shape[:at], 1, *value.shape[at:])
    return value.like(value.local.unsqueeze(at), shape, value.dim_ + (at <= value.dim_))


@rule_for("squeeze")
def squeeze(func: Any, value: Any, dim: Any = None) -> Any:
    """Without a dimension of one."""
    if not isinstance(dim, int):
        raise NoRule
    at = dim % len(value.shape)
    if value.shape[at] != 1:
        return value
    shape = (*value.shape[:at], *value.shape[at + 1 :])
    return value.like(value.local.squeeze(at), shape, value.dim_ - (at < value.dim_))


@rule_for("transpose", "swapaxes")
def transpose(func: Any, value: Any, dim0: int, dim1: int) -> Any:
    """Two dimensions exchanged."""
    order = list(range(len(value.shape)))
    first, second = dim0 % len(order), dim1 % len(order)
    order[first], order[second] = order[second], order[first]
    return _permuted(value, order)


@rule_for("permute")
def permute(func: Any, value: Any, *dims: Any, **kwargs: Any) -> Any:
    """Dimensions in another order."""
    given = dims or (kwargs["dims"],)
    flat = given[0] if len(given) == 1 and isinstance(given[0], list | tuple) else given
    return _permuted(value, [dim % len(value.shape) for dim in flat])


@rule_for("t")
def t(func: Any, value: Any) -> Any:
    """A matrix transposed."""
    return _permuted(value, [1, 0] if len(value.shape) == 2 else [0])


def _permuted(value: SplitTensor, order: Sequence[int]) -> Any:
    shape = tuple(value.shape[dim] for dim in order)
    return value.like(value.local.permute(*order), shape, list(order).index(value.dim_))


@rule_for("expand")
def expand(func: Any, value: Any, *sizes: Any) -> Any:
    """Dimensions of one stretched, new ones in front."""
    flat = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple | torch.Size) else list(sizes)
    new = len(flat) - len(value.shape)
    shape = [value.shape[i - new] if size == -1 else size for i, size in enumerate(flat)]
    at = value.dim_ + new
    if shape[at] != value.length:
        raise NoRule
    local = [value.local.shape[value.dim_] if i == at else size for i, size in enumerate(shape)]
    return value.like(value.local.expand(local), shape, at)


@rule_for("__getitem__")
def getitem(func: Any, value: Any, index: Any) -> Any:
    """Whole numbers, slices, None and the ellipsis, as long as the cut dimension is taken whole."""
    if not isinstance(value, SplitTensor):
        raise NoRule
    given = index if isinstance(index, tuple) else (index,)
    if any(
        isinstance(item, bool) or not (item is None or item is Ellipsis or isinstance(item, int | slice))
        for item in given
    ):
        raise NoRule
    taken = sum(1 for item in given if item is not None and item is not Ellipsis)
    rest = (slice(None),) * (len(value.shape) - taken)
    at = given.index(Ellipsis) if Ellipsis in given else len(given)
    full = (*given[:at], *rest, *given[at + 1 :])
    dim, result = 0, 0
    for item in full:
        if item is None:
            result += 1
            continue
        if dim == value.dim_:
            if not isinstance(item, slice) or item.indices(value.length) != (0, value.length, 1):
                raise NoRule
            found = result
        result += not isinstance(item, int)
        dim += 1
    made = value.local[tuple(slice(None) if d == value.dim_ else item for d, item in _numbered(full))]
    shape = list(made.shape)
    shape[found] = value.length
    return value.like(made, shape, found)


def _numbered(full: Sequence[Any]) -> list[tuple[int, Any]]:
    """Each item of an index with the dimension that it takes; -1 for a new one."""
    numbered, dim = [], 0
    for item in full:
        numbered.append((-1 if item is None else dim, item))
        dim += item is not None
    return numbered


@rule_for("split", "chunk", "unbind", "split_with_sizes", "tensor_split")
def split(func: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Parts along another dimension; along the cut one, the runs themselves."""
    name = func.__name__
    default = 0
    dim = kwargs.get("dim", args[-1] if name == "unbind" and args else args[1] if len(args) > 1 else default)
    at = dim % len(value.shape)
    if at != value.dim_:
        made = func(value.local, *args, **kwargs)
        gone = name == "unbind"
        shapes = [list(part.shape) for part in made]
        place = value.dim_ - (gone and at < value.dim_)
        for shape in shapes:
            shape[place] = value.length
        return tuple(value.like(part, shape, place) for part, shape in zip(made, shapes, strict=True))
    how = args[0] if args else kwargs.get("split_size", kwargs.get("split_size_or_sections", kwargs.get("chunks")))
    run = value.length // value.outer
    sizes = list(how) if isinstance(how, list | tuple) else None
    count = how if name == "chunk" else None
    is_runs = sizes == [run] * value.outer or count == value.outer or (name == "split" and how == run)
    if not is_runs or value.outer == 1 or not value.is_even:
        raise NoRule
    shape = [run if i == at else size for i, size in enumerate(value.shape)]
    return tuple(value.like(part, shape, at, 1) for part in value.local.chunk(value.outer, at))


# ------------------------------------------------------------------------------------- along dimensions that are whole


def _dim(value: torch.Tensor, dim: int) -> int:
    return dim % len(value.shape)


@rule_for("softmax", "log_softmax", "cumsum")
def along(func: Any, value: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Along a dimension that is not cut."""
    if not isinstance(dim, int) or _dim(value, dim) == value.dim_:
        raise NoRule
    return value.like(func(value.local, dim, *args, **kwargs))


@rule_for("layer_norm", "rms_norm")
def norm(func: Any, value: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Over the last dimensions, none of them cut; scale and shift are whole."""
    if not isinstance(value, SplitTensor) or value.dim_ >= len(value.shape) - len(normalized_shape):
        raise NoRule

    def whole(item: Any) -> Any:
        return copied(_plain(item), value.axis) if isinstance(item, torch.Tensor) else item

    local = [whole(item) for item in args], {name: whole(item) for name, item in kwargs.items()}
    return value.like(func(value.local, normalized_shape, *local[0], **local[1]))


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.whole() if isinstance(value, SplitTensor) else value


@rule_for("sum", "mean")
def reduce(func: Any, value: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """Over whole dimensions, or a sum over all of them."""
    dims = range(len(value.shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {_dim(value, one) for one in dims}
    if value.dim_ in gone:
        if not value.is_even:
            raise NoRule
        total = summed(
            func(value.local, **({} if dim is None else {"dim": dim, "keepdim": keepdim}), **kwargs), value.axis
        )
        return total / value.axis.size if func.__name__ == "mean" else total
    made = func(value.local, dim, keepdim, **kwargs)
    place = value.dim_ - (0 if keepdim else sum(1 for one in gone if one < value.dim_))
    shape = list(made.shape)
    shape[place] = value.length
    return value.like(made, shape, place)


@rule_for("cat", "concat")
def cat(func: Any, tensors: Any, dim: int = 0) -> Any:
    """Joined along a whole dimension."""
    first = next((one for one in tensors if isinstance(one, SplitTensor)), None)
    if first is None or _dim(first, dim) == first.dim_:
        raise NoRule
    made = func([first.part(one, first.dim_) for one in tensors], dim)
    shape = list(made.shape)
    shape[first.dim_] = first.length
    return first.like(made, shape)


@rule_for("stack")
def stack(func: Any, tensors: Any, dim: int = 0) -> Any:
    """Joined along a new dimension."""
    first = next(one for one in tensors if isinstance(one, SplitTensor))
    at = dim % (len(first.shape) + 1)
    made = func([first.part(one, first.dim_) for one in tensors], at)
    shape = (*first.shape[:at], len(tensors), *first.shape[at:])
    return first.like(made, shape, first.dim_ + (at <= first.dim_))


@rule_for("repeat_interleave")
def repeat_interleave(func: Any, value: Any, repeats: Any, dim: Any = None, **kwargs: Any) -> Any:
    """Elements repeated: along the cut dimension too, for what is repeated stays together."""
    if (
        not isinstance(repeats, int)
        or dim is None
        or (_dim(value, dim) == value.dim_ and (value.outer > 1 or not value.is_even))
    ):
        raise NoRule
    made = func(value.local, repeats, dim=dim)
    shape = [size * repeats if i == _dim(value, dim) else size for i, size in enumerate(value.shape)]
    return value.like(made, shape)
