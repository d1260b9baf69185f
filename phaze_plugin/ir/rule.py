"""Factor rules: one description of an operator that cost, sharding, scheduling and backward all read.

A rule names *factors* (the loops of the operator) with their sizes, and says for every dimension of every operand and
result which factors it is made of, major to minor. It is written like an einsum:

    linear        b s i, o i -> b s o            i is contracted: it stands in the operands only
    view          b s (h d) -> b s h d           one dimension made of two factors
    bias          b s o, o -> b s o              b and s are broadcast over the second operand
    softmax       b h s t -> b h s t             t is *normalized*: each result needs the whole of it
    embedding     v i, b s -> b s i              v is *looked up*: an index picks one of it, no loop runs over it
    first half    s@2048 i -> s i                a dimension of 2048 of which the factor s covers only a part
    loss          b s v, b s -> .                a result of rank 0

After a bar stand the factors with their sizes and marks: `b=1* s=1024 v=50257? t=1024~ c=3!` - `*` grows with the
microbatch, `?` looked up, `~` normalized (splitting it costs a collective of statistics), `!` must stay whole.
`str(rule)` and `Rule.parse` are inverse to each other, and JSON stores exactly this text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from phaze.errors import GraphError

__all__ = ["Dim", "Dims", "Factor", "FactorKind", "Rule"]

LARGEST_FACTOR = 2**40
LARGEST_WORK = 2**62


class FactorKind(StrEnum):
    """What an operator does along a factor; the value is the mark in a rule's text."""

    FREE = ""
    LOOKUP = "?"
    NORMALIZED = "~"
    WHOLE = "!"


@dataclass(frozen=True, slots=True)
class Factor:
    """One loop of an operator."""

    name: str
    size: int
    kind: FactorKind = FactorKind.FREE
    is_batch: bool = False

    def __str__(self) -> str:
        return f"{self.name}={self.size}{self.kind}{'*' if self.is_batch else ''}"


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a tensor: its factors, major to minor; `size` only where it is not their product."""

    factors: tuple[str, ...] = ()
    size: int | None = None

    def __str__(self) -> str:
        text = " ".join(self.factors)
        if len(self.factors) != 1:
            text = f"({text})" if self.factors else "1"
        return text if self.size is None else f"{text}@{self.size}"


Dims = tuple[Dim, ...]

_DIM = re.compile(r"(?:\((?P<many>[^()]+)\)|(?P<one>[A-Za-z_]\w*)|1)(?:@(?P<size>\d{1,19}))?$")
_FACTOR = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<size>\d{1,19})(?P<kind>[?~!]?)(?P<batch>\*?)$")
_NAME = re.compile(r"[A-Za-z_]\w*$")


@dataclass(frozen=True, slots=True)
class Rule:
    """An operator's factors, and the factors of every dimension of its operands and results."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    factors: tuple[Factor, ...]
    _sizes: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sizes", {factor.name: factor.size for factor in self.factors})
        _check_factors(self)
        for dims in self.tensors():
            _check_dims(self, dims)

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read the text form; inverse of `str`."""
        body, _, tail = text.partition("|")
        left, arrow, right = body.partition("->")
        if not arrow:
            raise GraphError(f"rule {text!r} has no '->'; expected 'operands -> results | factor=size ...'.")
        factors = tuple(_parse_factor(word, text) for word in tail.split())
        return cls(_parse_side(left, text), _parse_side(right, text), factors)

    @classmethod
    def of(
        cls,
        text: str,
        sizes: Mapping[str, int],
        *,
        batch: str = "b",
        lookup: str = "",
        normalized: str = "",
        whole: str = "",
    ) -> Rule:
        """Build from the part before the bar, sizes by name, and space-separated names of marked factors."""
        left, _, right = text.partition("->")
        operands, results = _parse_side(left, text), _parse_side(right, text)
        kinds = dict.fromkeys(lookup.split(), FactorKind.LOOKUP)
        kinds |= dict.fromkeys(normalized.split(), FactorKind.NORMALIZED)
        kinds |= dict.fromkeys(whole.split(), FactorKind.WHOLE)
        batches = batch.split()
        names = dict.fromkeys(name for dims in (*operands, *results) for dim in dims for name in dim.factors)
        missing = [name for name in names if name not in sizes]
        if missing:
            raise GraphError(f"rule {text!r} names factors without a size: {', '.join(missing)}.")
        free = FactorKind.FREE
        factors = tuple(Factor(name, sizes[name], kinds.get(name, free), name in batches) for name in names)
        return cls(operands, results, factors)

    def __str__(self) -> str:
        sides = (", ".join(_format_dims(dims) for dims in side) for side in (self.operands, self.results))
        body = " -> ".join(sides)
        return f"{body} | {' '.join(str(factor) for factor in self.factors)}" if self.factors else body

    def tensors(self) -> Iterator[Dims]:
        """The dimensions of every operand, then of every result."""
        yield from self.operands
        yield from self.results

    def factor(self, name: str) -> Factor:
        """The factor of that name."""
        return next(factor for factor in self.factors if factor.name == name)

    def size(self, name: str) -> int:
        """The size of a factor."""
        return self._sizes[name]

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """The shape of a tensor with these dimensions."""
        return tuple(self.dim_size(dim) for dim in dims)

    def dim_size(self, dim: Dim) -> int:
        """The size of one dimension."""
        return dim.size if dim.size is not None else math.prod(self._sizes[name] for name in dim.factors)

    @property
    def operand_names(self) -> tuple[frozenset[str], ...]:
        """The factors of each operand."""
        return tuple(names_of(dims) for dims in self.operands)

    @property
    def result_names(self) -> tuple[frozenset[str], ...]:
        """The factors of each result."""
        return tuple(names_of(dims) for dims in self.results)

    @property
    def work(self) -> int:
        """How often the innermost statement runs: the product of all factors that are not looked up."""
        return math.prod(factor.size for factor in self.factors if factor.kind is not FactorKind.LOOKUP)

    def reduced_names(self, result: int = 0) -> frozenset[str]:
        """Factors that a result sums over: splitting one of them leaves that result a partial sum."""
        return frozenset(self._sizes) - names_of(self.results[result])

    def with_batch_scaled(self, old: int, new: int) -> Rule:
        """The same rule at another microbatch size."""
        return Rule(self.operands, self.results, tuple(_scaled(factor, old, new) for factor in self.factors))

    def local(self, ways: Mapping[str, int], shard: int | None = None) -> Rule:
        """The rule on one device when each named factor is split that many ways.

        A shard holds ceil(size / ways) or what is left of it; `shard=None` gives the largest, which sets time and
        memory. A dimension that a factor covers in part is split in the same proportion, rounded up.
        """
        sizes = {name: _shard_size(self._sizes[name], count, shard) for name, count in ways.items()}
        factors = tuple(
            Factor(factor.name, sizes.get(factor.name, factor.size), factor.kind, factor.is_batch)
            for factor in self.factors
        )
        operands = tuple(_local_dims(dims, ways) for dims in self.operands)
        results = tuple(_local_dims(dims, ways) for dims in self.results)
        return Rule(operands, results, factors)


def names_of(dims: Dims) -> frozenset[str]:
    """The factors that a tensor's dimensions are made of."""
    return frozenset(name for dim in dims for name in dim.factors)


def _shard_size(size: int, ways: int, shard: int | None) -> int:
    if ways < 1:
        raise ValueError(f"a factor can be split 1 or more ways, got {ways}")
    largest = -(-size // ways)
    if shard is None:
        return largest
    local = min(largest, size - shard * largest)
    if local < 1:
        raise GraphError(f"shard {shard} of {ways} of a factor of size {size} is empty; split it at most {size} ways.")
    return local


def _local_dims(dims: Dims, ways: Mapping[str, int]) -> Dims:
    return tuple(
        dim if dim.size is None else Dim(dim.factors, -(-dim.size // math.prod(ways.get(n, 1) for n in dim.factors)))
        for dim in dims
    )


def _scaled(factor: Factor, old: int, new: int) -> Factor:
    if not factor.is_batch:
        return factor
    if factor.size % old:
        raise GraphError(f"batch factor {factor} is not a multiple of the microbatch {old} it was built with.")
    return Factor(factor.name, factor.size // old * new, factor.kind, True)


def _check_factors(rule: Rule) -> None:
    if len(rule._sizes) != len(rule.factors):
        raise GraphError(f"rule '{rule}' declares a factor twice.")
    for factor in rule.factors:
        is_integer = isinstance(factor.size, int) and not isinstance(factor.size, bool)
        if not is_integer or not 1 <= factor.size <= LARGEST_FACTOR:
            raise GraphError(
                f"factor {factor.name!r} has size {factor.size!r}; expected an integer from 1 to {LARGEST_FACTOR}."
            )
        if not _NAME.match(factor.name):
            raise GraphError(f"factor name {factor.name!r} is not an identifier.")
    if rule.work > LARGEST_WORK:
        raise GraphError(f"rule '{rule}' runs {rule.work} times; the largest supported is {LARGEST_WORK}.")


def _check_dims(rule: Rule, dims: Dims) -> None:
    names = [name for dim in dims for name in dim.factors]
    for name in names:
        if name not in rule._sizes:
            raise GraphError(f"rule '{rule}' uses factor {name!r} without declaring its size.")
    if len(set(names)) != len(names):
        raise GraphError(f"rule '{rule}' uses one factor in two dimensions of a tensor; give each its own name.")
    for dim in dims:
        if dim.size is not None and not 1 <= dim.size <= LARGEST_FACTOR:
            raise GraphError(f"rule '{rule}' has a dimension of size {dim.size}; expected 1 to {LARGEST_FACTOR}.")


def _format_dims(dims: Dims) -> str:
    return " ".join(str(dim) for dim in dims) or "."


def _parse_side(text: str, rule: str) -> tuple[Dims, ...]:
    return tuple(_parse_dims(part.strip(), rule) for part in text.split(",")) if text.strip() else ()


def _parse_dims(text: str, rule: str) -> Dims:
    if text == ".":
        return ()
    words = re.findall(r"\([^()]*\)(?:@\d+)?|[^\s()]+", text)
    return tuple(_parse_dim(word, rule) for word in words)


def _parse_dim(word: str, rule: str) -> Dim:
    match = _DIM.match(word)
    if not match:
        raise GraphError(f"rule {rule!r} has an unreadable dimension {word!r}.")
    names = (match["many"] or match["one"] or "").split()
    return Dim(tuple(names), None if match["size"] is None else int(match["size"]))


def _parse_factor(word: str, rule: str) -> Factor:
    match = _FACTOR.match(word)
    if not match:
        raise GraphError(f"rule {rule!r} has an unreadable factor {word!r}; expected name=size with marks ? ~ ! *.")
    return Factor(match["name"], int(match["size"]), FactorKind(match["kind"]), bool(match["batch"]))
