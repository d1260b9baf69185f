"""What an operator of torch makes of samples: the rules of `sample_walk`, which says what they are.

Rules stand in this order: what a shape shows, reshapes and joins, element by element, reductions, products, lookups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

__all__ = ["PLAIN", "MixedError", "OperatorWithSamples", "Samples", "Value", "in_shape"]


@dataclass(frozen=True, slots=True)
class Samples:
    """Where the samples of a tensor lie: a dimension of (blocks, samples, neighbours) elements."""

    dim: int
    blocks: int = 1
    neighbours: int = 1

    def moved(self, dim: int) -> Samples:
        """The same in another dimension."""
        return replace(self, dim=dim)


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of a tensor.

    `depends` says that it is made of samples, `counts` that it has, or is made of, their numbers: "own" for exactly the
    number of each sample, "other" for anything else. `is_weighed` says that a statistic that it is made of was divided
    by another one, such as a count of tokens. `problem` is the first mixing that it is made of.
    """

    samples: Samples | None = None
    depends: bool = False
    counts: str = ""
    is_weighed: bool = False
    problem: str = ""

    @property
    def is_statistic(self) -> bool:
        """Whether it is made of samples and has no dimension of them."""
        return self.depends and self.samples is None


class MixedError(Exception):
    """An operator mixes samples; its text says how."""


PLAIN = Value()
_LINEAR_REDUCTIONS = frozenset({"sum", "mean", "nansum", "any", "all", "count_nonzero"})
_REDUCTIONS = _LINEAR_REDUCTIONS | frozenset(
    [
        "amax",
        "amin",
        "max",
        "min",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "logsumexp",
        "prod",
        "norm",
        "linalg_vector_norm",
        "argmax",
        "argmin",
        "median",
    ]
)
_ALONG = frozenset(
    [
        "_softmax",
        "_log_softmax",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "logcumsumexp",
        "sort",
        "argsort",
        "topk",
        "kthvalue",
        "mode",
        "flip",
        "roll",
    ]
)
_NUMBERING = frozenset({"arange", "linspace", "logspace", "eye", "randperm", "tril_indices", "triu_indices"})
_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias"})
_KEEPING = frozenset({"clone", "detach", "alias", "_to_copy", "lift_fresh", "lift_fresh_copy", "contiguous", "copy"})
_NOT_LINEAR = frozenset(
    [
        "sqrt",
        "rsqrt",
        "exp",
        "expm1",
        "log",
        "log1p",
        "log2",
        "log10",
        "reciprocal",
        "pow",
        "relu",
        "sigmoid",
        "log_sigmoid_forward",
        "softplus",
        "tanh",
        "abs",
        "clamp",
        "clamp_min",
        "clamp_max",
        "maximum",
        "minimum",
        "square",
        "_softmax",
        "_log_softmax",
        "logsumexp",
        "amax",
    ]
)
_BY_ROW = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
_LOSSES = _BY_ROW | {"mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"}
_PAIRWISE = frozenset({"_cdist_forward", "_euclidean_dist", "_pdist_forward"})


def in_shape(shape: Sequence[int], size: int) -> Samples | None:
    """The first dimension that a number of samples divides."""
    dim = next((dim for dim, length in enumerate(shape) if length and length % size == 0), None)
    return None if dim is None else Samples(dim, 1, shape[dim] // size)


@dataclass(frozen=True, slots=True)
class OperatorWithSamples:
    """One call of an operator, and what is known of its tensors; `value` says what its result is."""

    func: torch._ops.OpOverload
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    operands: tuple[torch.Tensor, ...]
    values: tuple[Value, ...]
    size: int

    @property
    def name(self) -> str:
        """`add` of aten.add_.Tensor."""
        name = str(self.func._schema.name).rpartition("::")[2]
        return name if name.startswith("_") else name.rstrip("_")

    def argument(self, name: str) -> object:
        """An argument by its name in the operator's schema."""
        for place, declared in enumerate(self.func._schema.arguments):
            if declared.name == name:
                return self.args[place] if place < len(self.args) else self.kwargs.get(name, declared.default_value)
        raise KeyError(name)

    def dim(self, name: str = "dim") -> int:
        """A dimension of the first operand, counted from the left."""
        value = self.argument(name)
        return int(value) % self.operands[0].dim()  # type: ignore[call-overload, no-any-return]

    @property
    def depends(self) -> bool:
        """Whether any operand is made of samples."""
        return any(value.depends for value in self.values)

    @property
    def weighs(self) -> bool:
        """Whether a statistic with a gradient meets another one, or any operand is made of such."""
        is_product = self.name in ("mul", "div") and len(self.values) > 1
        meets = is_product and all(value.is_statistic for value in self.values)
        return meets or any(value.is_weighed for value in self.values)

    def guess(self, result: torch.Tensor) -> Value:
        """What the shape shows: samples lie in a dimension of a size that an operand has them in."""
        found = in_shape(result.shape, self.size)
        for operand, value in zip(self.operands, self.values, strict=True):
            known = value.samples
            if found is not None and known is not None:
                length = operand.shape[known.dim]
                places = [dim for dim, size in enumerate(result.shape) if size == length]
                if places:
                    found = known.moved(known.dim if known.dim in places else places[0])
                    break
        counts = "other" if any(value.counts for value in self.values) and not self.depends else ""
        return Value(found if self.depends or counts else None, self.depends, counts)

    def value(self, result: torch.Tensor) -> Value:
        """What the result is; raises MixedError where samples are mixed."""
        if not self.values:
            return self._new(result)
        if not self.depends and not any(value.counts for value in self.values):
            return PLAIN
        rule = self._rule()
        if rule is not None:
            return rule(result)
        if torch.Tag.pointwise in self.func.tags or self.name in _LOSSES:
            return self._element_by_element(result)
        return self.guess(result)

    def _rule(self) -> Callable[[torch.Tensor], Value] | None:
        if self.name in _PAIRWISE:
            raise MixedError("compares samples with each other")
        named: dict[str, Callable[[torch.Tensor], Value]] = {
            **dict.fromkeys(_RESHAPES, self._reshaped),
            **dict.fromkeys(_KEEPING, lambda _: self.values[0]),
            **dict.fromkeys(_REDUCTIONS, self._reduced),
            **dict.fromkeys(_ALONG, self._along),
            **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "dot", "mv"), self._product),
            **dict.fromkeys(("transpose", "t", "permute"), self._permuted),
            **dict.fromkeys(("unsqueeze", "squeeze", "expand"), self._aligned),
            **dict.fromkeys(("cat", "stack"), self._joined),
            **dict.fromkeys(("index", "index_select", "gather", "take_along_dim"), self._looked_up),
            **dict.fromkeys(("split", "split_with_sizes", "unbind"), self._divided),
            "slice": self._sliced,
            "select": self._selected,
        }
        return named.get(self.name)

    def _new(self, result: torch.Tensor) -> Value:
        """A tensor that is made of numbers alone."""
        samples = in_shape(result.shape, self.size)
        if self.name not in _NUMBERING or samples is None:
            return PLAIN
        given = [argument for argument in self.args if isinstance(argument, int)]
        is_own = self.name == "arange" and (given[:1] == [len(result)] or given[:2] == [0, len(result)])
        return Value(samples, counts="own" if is_own else "other")

    # -------------------------------------------------------------------------------------------------- shapes

    def _with(self, samples: Samples | None) -> Value:
        return replace(self.values[0], samples=samples)

    def _reshaped(self, result: torch.Tensor) -> Value:
        known, shape = self.values[0].samples, self.operands[0].shape
        if known is None:
            return self.values[0]
        inner = known.neighbours * prod(shape[known.dim + 1 :])  # elements of a sample that lie side by side
        for dim, length in enumerate(result.shape):
            behind = prod(result.shape[dim + 1 :])
            neighbours = inner // behind if behind and inner % behind == 0 else 0
            if neighbours and length % (self.size * neighbours) == 0:
                blocks = length // (self.size * neighbours)
                before = known.blocks * prod(shape[: known.dim])
                if before == blocks * prod(result.shape[:dim]):
                    return self._with(Samples(dim, blocks, neighbours))
        raise MixedError("puts neighbouring samples into one")

    def _permuted(self, result: torch.Tensor) -> Value:
        known, rank = self.values[0].samples, self.operands[0].dim()
        if known is None:
            return self.values[0]
        order = list(range(rank))
        if self.name == "permute":
            order = [int(dim) % rank for dim in self.argument("dims")]  # type: ignore[attr-defined]
        else:
            first, second = (0, rank - 1) if self.name == "t" else (self.dim("dim0"), self.dim("dim1"))
            order[first], order[second] = order[second], order[first]
        return self._with(known.moved(order.index(known.dim)))

    def _aligned(self, result: torch.Tensor) -> Value:
        known, rank = self.values[0].samples, self.operands[0].dim()
        if known is None:
            return self.values[0]
        if self.name == "expand":
            return self._with(known.moved(known.dim + result.dim() - rank))
        if self.name == "unsqueeze":
            dim = int(self.argument("dim")) % (rank + 1)  # type: ignore[call-overload]
            return self._with(known.moved(known.dim + (dim <= known.dim)))
        gone = [dim for dim in range(known.dim) if self.operands[0].shape[dim] == 1]
        return self._with(known.moved(known.dim - len(gone) if rank != result.dim() else known.dim))

    def _sliced(self, result: torch.Tensor) -> Value:
        known = self.values[0].samples
        if known is None or self.dim() != known.dim or result.shape == self.operands[0].shape:
            return self.values[0]
        start, step = self.argument("start") or 0, self.argument("step") or 1
        assert isinstance(start, int)
        assert isinstance(step, int)
        block, length = self.size * known.neighbours, result.shape[known.dim]
        if step == 1 and start % block == 0 and length % block == 0:
            return self._with(replace(known, blocks=length // block))
        if known.neighbours % step == 0 and 0 <= start < step and length * step == self.operands[0].shape[known.dim]:
            return self._with(replace(known, neighbours=known.neighbours // step))
        raise MixedError("takes some of the samples")

    def _selected(self, result: torch.Tensor) -> Value:
        known = self.values[0].samples
        if known is None:
            return self.values[0]
        if self.dim() == known.dim:
            raise MixedError("takes one of the samples")
        return self._with(known.moved(known.dim - (self.dim() < known.dim)))

    def _divided(self, result: torch.Tensor) -> Value:
        known = self.values[0].samples
        if known is None or self.name == "unbind":
            return self.guess(result)
        block = self.size * known.neighbours
        if self.dim() != known.dim or result.shape[known.dim] == self.operands[0].shape[known.dim]:
            return self.values[0]
        if result.shape[known.dim] % block:
            raise MixedError("takes some of the samples")
        return self._with(replace(known, blocks=result.shape[known.dim] // block))

    def _joined(self, result: torch.Tensor) -> Value:
        dim = int(self.argument("dim")) % result.dim()  # type: ignore[call-overload]
        placed = [value.samples for value in self.values if value.samples is not None]
        if not placed:
            return self.guess(result)
        first = placed[0]
        if self.name == "stack":
            return Value(first.moved(first.dim + (dim <= first.dim)), self.depends)
        if first.dim != dim:
            return Value(first, self.depends)
        if len(placed) < len(self.values) or any(other.neighbours != first.neighbours for other in placed):
            return self.guess(result)
        return Value(replace(first, blocks=sum(other.blocks for other in placed)), self.depends)

    # ------------------------------------------------------------------------------------------------- values

    def _element_by_element(self, result: torch.Tensor) -> Value:
        by_row = self.name in _BY_ROW  # dimensions stand as they are: targets have no classes
        rank = max(operand.dim() for operand in self.operands)
        placed = {
            value.samples.moved(value.samples.dim + (0 if by_row else rank - operand.dim()))
            for operand, value in zip(self.operands, self.values, strict=True)
            if value.samples is not None
        }
        if self.depends:
            self._check_operands(placed)
        counts = "" if self.depends else "other"
        if not self.depends and len(self.operands) == 1:
            counts = self.values[0].counts if self.name in _KEEPING else "other"
        if not placed or (self.name in _LOSSES and result.dim() == 0):
            return Value(None, self.depends, counts)
        return Value(next(iter(placed)), self.depends, counts)

    def _check_operands(self, placed: set[Samples]) -> None:
        """Raise MixedError for operands that bring several samples together."""
        if len(placed) > 1:
            raise MixedError("compares samples with each other")
        if any(value.counts and not value.depends for value in self.values):
            raise MixedError("reads the numbers of samples in the batch")
        statistics = [value for value in self.values if value.is_statistic]
        if statistics and any(value.depends and value.samples is not None for value in self.values):
            raise MixedError("brings a statistic of all samples together with each of them")
        with_gradient = [
            operand.requires_grad
            for operand, value in zip(self.operands, self.values, strict=True)
            if value.is_statistic
        ]
        is_product = self.name in ("mul", "div") and sum(with_gradient) > 1
        divides_by_one = self.name == "div" and len(self.operands) > 1 and self._is_learned_statistic(1)
        if any(with_gradient) and (self.name in _NOT_LINEAR or is_product or divides_by_one):
            raise MixedError("is no linear function of a mean over samples")

    def _is_learned_statistic(self, place: int) -> bool:
        return self.values[place].is_statistic and self.operands[place].requires_grad

    def _reduced(self, result: torch.Tensor) -> Value:
        known, rank = self.values[0].samples, self.operands[0].dim()
        if len(self.operands) > 1:
            return self._element_by_element(result)  # max and min of two tensors
        if known is None:
            if self.name not in _LINEAR_REDUCTIONS and self._is_learned_statistic(0):
                raise MixedError("is no linear function of a mean over samples")
            return self.values[0]
        given = None
        with contextlib.suppress(KeyError):
            given = self.argument("dim")
        dims = range(rank) if given is None or given == [] else [given] if isinstance(given, int) else given
        gone = {int(dim) % rank for dim in dims}  # type: ignore[attr-defined]
        if known.dim not in gone:
            keeps = result.dim() == rank
            return self._with(known if keeps else known.moved(known.dim - sum(dim < known.dim for dim in gone)))
        if self.values[0].counts and not self.depends:
            return PLAIN
        if self.name not in _LINEAR_REDUCTIONS and self.operands[0].requires_grad:
            raise MixedError("over samples is no mean over them")
        return Value(None, self.depends)

    def _along(self, result: torch.Tensor) -> Value:
        known, rank = self.values[0].samples, self.operands[0].dim()
        if known is None:
            return self._reduced(result)
        given = self.argument("dims" if self.name in ("flip", "roll") else "dim")
        dims = [given] if isinstance(given, int) else list(given) or range(rank)  # type: ignore[call-overload]
        if known.dim in {dim % rank for dim in dims}:
            raise MixedError("runs along samples")
        return self._with(known)

    def _product(self, result: torch.Tensor) -> Value:
        left, right = (0, 1) if self.name in ("mm", "bmm", "dot", "mv") else (1, 2)
        one, other = self.values[left].samples, self.values[right].samples
        rank = self.operands[left].dim()
        contracted = (rank - 1, max(0, self.operands[right].dim() - 2))
        statistics = [value.is_statistic for value in (self.values[left], self.values[right])]
        if any(statistics) and (one is not None or other is not None):
            raise MixedError("brings a statistic of all samples together with each of them")
        is_summed = (one is not None and one.dim == contracted[0], other is not None and other.dim == contracted[1])
        if all(is_summed) or (any(is_summed) and (one is None or other is None)):
            return Value(None, self.depends)
        if any(is_summed):
            raise MixedError("adds samples up, weighed by others")
        placed = {known for known in (one, other) if known is not None}
        if len(placed) > 1 or (rank == 2 and one is not None and other is not None):
            raise MixedError("compares samples with each other")
        return Value(next(iter(placed), None), self.depends)

    def _looked_up(self, result: torch.Tensor) -> Value:
        known = self.values[0].samples
        if known is None or not self.values[0].depends:
            return self.guess(result)
        if self.name == "index":
            indices = self.argument("indices")
            assert isinstance(indices, list | tuple)
            index = indices[known.dim] if known.dim < len(indices) else None
        else:
            index = self.operands[1] if self.dim() == known.dim else None
        if index is None:
            return self.guess(result)
        place = next(place for place, operand in enumerate(self.operands) if operand is index)
        number = self.values[place]
        if number.counts != "own" or number.depends or number.samples is None:
            raise MixedError("looks up other samples")
        return self.guess(result)
