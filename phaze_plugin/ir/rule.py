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

After a bar stand the factors with their sizes and marks: `b=1* s=1024^ v=50257? t=1024~^ c=3!` - `*` grows with the
microbatch, `^` runs along the sequence, `?` looked up, `~` normalized (splitting it costs a collective of statistics),
`!` must stay whole, `&` the trips of a loop, of which one waits for the one before it.
`str(rule)` and `Rule.parse` are inverse to each other, and JSON stores exactly this text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from phaze.errors import GraphError, shown

__all__ = ["Dim", "Dims", "Factor", "FactorKind", "Rule", "factor_names", "names_of"]

LARGEST_FACTOR = 2**40
"""The largest size of a factor or dimension: far above any model's; what is larger is a broken capture."""

MOST_FACTORS = 64
"""The most factors of a rule: a rule with more is a broken capture, and texts of rules would grow without limit."""


class FactorKind(StrEnum):
    """What an operator does along a factor; the value is the mark in a rule's text."""

    FREE = ""
    LOOKUP = "?"
    NORMALIZED = "~"
    WHOLE = "!"
    SERIAL = "&"


@dataclass(frozen=True, slots=True)
class Factor:
    """One loop of an operator."""

    name: str
    size: int
    kind: FactorKind = FactorKind.FREE
    is_batch: bool = False
    is_sequence: bool = False

    def __str__(self) -> str:
        marks = f"{'*' if self.is_batch else ''}{'^' if self.is_sequence else ''}"
        return f"{self.name}={self.size}{self.kind}{marks}"


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

_DIM = re.compile(
    r"(?:\((?P<many>[A-Za-z_]\w*(?: +[A-Za-z_]\w*)*)\)|(?P<one>[A-Za-z_]\w*)|1)(?:@(?P<size>\d{1,19}))?(?: +|$)"
)
_FACTOR = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<size>\d{1,19})(?P<kind>[?~!&]?)(?P<batch>\*?)(?P<sequence>\^?)")
_NAME = re.compile(r"[A-Za-z_]\w*")


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
        left, right = _sides(body)
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
        """Build from the part before the bar, sizes by name, and space-separated names of marked factors.

        A factor named `b` is the batch unless `batch` says otherwise.
        """
        left, right = _sides(text)
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
        for factor in self.factors:
            if factor.name == name:
                return factor
        raise KeyError(name)

    def size(self, name: str) -> int:
        """The size of a factor."""
        return self._sizes[name]

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """The shape of a tensor with these dimensions."""
        sizes = self._sizes
        return tuple(
            [
                # Most dimensions are one factor, and shapes are asked for often.
                sizes[dim.factors[0]] if dim.size is None and len(dim.factors) == 1 else self.dim_size(dim)
                for dim in dims
            ]
        )

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

    def with_batch_scaled(self, old: int, new: int) -> Rule:
        """The same rule at another microbatch size."""
        batch = frozenset(factor.name for factor in self.factors if factor.is_batch)
        if not batch:
            return self
        factors = tuple(_scaled_factor(factor, old, new) if factor.is_batch else factor for factor in self.factors)

        def scaled(dims: Dims) -> Dims:
            return tuple(
                dim
                if dim.size is None or not batch.intersection(dim.factors)
                else Dim(dim.factors, _scaled(dim.size, old, new, f"dimension {dim}", 1))
                for dim in dims
            )

        if all(dim.size is None for dims in self.tensors() for dim in dims):
            if max(factor.size for factor in factors) > LARGEST_FACTOR:
                return Rule(self.operands, self.results, factors)  # says what is wrong
            return self._with_factors(factors)
        return Rule(
            tuple(scaled(dims) for dims in self.operands), tuple(scaled(dims) for dims in self.results), factors
        )

    def local(self, ways: Mapping[str, int], shards: Mapping[str, int] | None = None) -> Rule:
        """The rule on one device when each named factor is split that many ways.

        A device holds ceil(size / ways) of a factor, the last one what is left. `shards` says which part of each
        factor the device holds; without it the rule is that of the largest part, which sets time and memory.

        Raises GraphError for an unknown factor, one that must stay whole, one of a dimension covered in part (its
        parts would overlap), more ways than there are elements, or a part that is empty.
        """
        covered_in_part = frozenset(
            name for dims in self.tensors() for dim in dims if dim.size is not None for name in dim.factors
        )
        for name, count in ways.items():
            if name not in self._sizes:
                raise GraphError(f"rule '{self}' has no factor {name!r} to split.")
            if self.factor(name).kind in (FactorKind.WHOLE, FactorKind.SERIAL) or name in covered_in_part:
                raise GraphError(f"factor {name!r} of rule '{self}' must stay whole; it cannot be split.")
            if not 1 <= count <= self._sizes[name]:
                raise GraphError(f"factor {name}={self._sizes[name]} cannot be split {count} ways.")
        parts = shards or {}
        sizes = dict(self._sizes)
        for name, count in ways.items():
            sizes[name] = _part_size(self.factor(name), count, parts.get(name))
        factors = [
            Factor(f.name, sizes[f.name], f.kind, f.is_batch, f.is_sequence) if f.name in ways else f
            for f in self.factors
        ]
        return self._with_factors(tuple(factors))

    @property
    def trips(self) -> int:
        """How often a loop runs the op, one trip after the other."""
        return math.prod(factor.size for factor in self.factors if factor.kind is FactorKind.SERIAL)

    @property
    def of_one_trip(self) -> Rule:
        """The rule of one trip of the loops that the op is in."""
        if self.trips == 1:
            return self
        return self._with_factors(tuple(replace(f, size=1) if f.kind is FactorKind.SERIAL else f for f in self.factors))

    def _with_factors(self, factors: tuple[Factor, ...]) -> Rule:
        """The rule with other sizes of the same factors, all of them possible: names and dimensions were checked."""
        changed = object.__new__(Rule)
        object.__setattr__(changed, "operands", self.operands)
        object.__setattr__(changed, "results", self.results)
        object.__setattr__(changed, "factors", factors)
        object.__setattr__(changed, "_sizes", {factor.name: factor.size for factor in factors})
        return changed


def names_of(dims: Dims) -> frozenset[str]:
    """The factors that a tensor's dimensions are made of."""
    return frozenset([name for dim in dims for name in dim.factors])


def factor_names(dims: Dims) -> list[str]:
    """The factors of a tensor's dimensions, in order."""
    return [name for dim in dims for name in dim.factors]


def _part_size(factor: Factor, ways: int, shard: int | None) -> int:
    largest = -(-factor.size // ways)
    if shard is None:
        return largest
    size = min(largest, factor.size - shard * largest)
    if not 0 <= shard < ways or size < 1:
        raise GraphError(
            f"factor {factor.name}={factor.size} split {ways} ways in parts of {largest} has no part {shard}."
        )
    return size


def _scaled_factor(factor: Factor, old: int, new: int) -> Factor:
    if factor.size % old:
        _scaled(factor.size, old, new, f"factor {factor}", old)  # says what is wrong
    return Factor(factor.name, factor.size * new // old, factor.kind, factor.is_batch, factor.is_sequence)


def _scaled(size: int, old: int, new: int, what: str, unit: int) -> int:
    """A size that grows with the microbatch; a factor is a multiple of it, a part of a dimension may be less."""
    if size % unit or size * new % old:
        raise GraphError(f"batch {what} is not a multiple of the microbatch {old} that it was built with.")
    return size * new // old


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_FACTOR


def _check_factors(rule: Rule) -> None:
    if len(rule.factors) > MOST_FACTORS:
        raise GraphError(f"a rule has {len(rule.factors)} factors; at most {MOST_FACTORS} are supported.")
    for factor in rule.factors:
        if not _is_size(factor.size):
            raise GraphError(
                f"factor {factor.name!r} has size {shown(factor.size)}; expected an integer from 1 to {LARGEST_FACTOR}."
            )
        if not _NAME.fullmatch(factor.name):
            raise GraphError(f"factor name {factor.name!r} is not an identifier.")
    if len(rule._sizes) != len(rule.factors):
        raise GraphError(f"rule '{rule}' declares a factor twice.")


def _check_dims(rule: Rule, dims: Dims) -> None:
    names = factor_names(dims)
    for name in names:
        if name not in rule._sizes:
            raise GraphError(f"rule '{rule}' uses factor {name!r} without declaring its size.")
    if len(set(names)) != len(names):
        raise GraphError(f"rule '{rule}' uses one factor in two dimensions of a tensor; give each its own name.")
    for dim in dims:
        if dim.size is not None and not _is_size(dim.size):
            raise GraphError(
                f"rule '{rule}' has a dimension of size {shown(dim.size)}; expected 1 to {LARGEST_FACTOR}."
            )


def _format_dims(dims: Dims) -> str:
    return " ".join(str(dim) for dim in dims) or "."


def _sides(text: str) -> tuple[str, str]:
    left, arrow, right = text.partition("->")
    if not arrow:
        raise GraphError(f"rule {shown(text)} has no '->'; expected 'operands -> results | factor=size ...'.")
    return left, right


def _parse_side(text: str, rule: str) -> tuple[Dims, ...]:
    return tuple(_parse_dims(part.strip(), rule) for part in text.split(",")) if text.strip() else ()


def _parse_dims(text: str, rule: str) -> Dims:
    if text == ".":
        return ()
    dims, end = [], 0
    for match in _DIM.finditer(text):
        if match.start() != end:
            break
        names = (match["many"] or match["one"] or "").split()
        dims.append(Dim(tuple(names), None if match["size"] is None else int(match["size"])))
        end = match.end()
    if end != len(text) or not dims:
        raise GraphError(f"rule {shown(rule)} has an unreadable dimension at {text[end:][:20]!r} of {shown(text)}.")
    return tuple(dims)


def _parse_factor(word: str, rule: str) -> Factor:
    match = _FACTOR.fullmatch(word)
    if not match:
        raise GraphError(
            f"rule {shown(rule)} has an unreadable factor {shown(word)}; expected name=size with marks ? ~ ! * ^."
        )
    marks = bool(match["batch"]), bool(match["sequence"])
    return Factor(match["name"], int(match["size"]), FactorKind(match["kind"]), *marks)
