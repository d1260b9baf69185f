"""Read JAX's name scopes and pytree paths: `jit(f)/jvp(layer_0)/attn/dot_general` is in the module `layer.0.attn`.

Transformations wrap a part of the path (`jvp(...)`, `transpose(jvp(...))`, `vmap(...)`); functions and control flow
(`jit(f)`, `while/body`, `checkpoint`) are no modules; the last word is the operation's own. A number at the end of a
word is a child's: `layer_0` is `layer.0`. Where a loop is run trip by trip, a `Scope` has its trips between the words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Scope", "Trip", "path_keys", "scope_words", "split_number"]

_WRAPPED = re.compile(r"^(\w+)\((.*)\)$")
"""A part of a scope inside a transformation, such as `jvp(layer_0)`."""

_TRANSFORMS = frozenset({"jvp", "transpose", "vmap", "pmap", "remat", "checkpoint", "custom_vjp", "custom_jvp"})
_CONTROL_FLOW = frozenset(
    {
        *("while", "body", "cond", "scan", "body_jaxpr", "cond_jaxpr", "branch_0_fun", "branch_1_fun"),
        *("closed_call", "core_call", "named_call", "xla_call", "jit", "pjit", "shard_map", "pure_callback"),
        *("checkpoint", "remat", "remat2", "rematted_computation"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"),
    }
)
_MODULE = re.compile(r"^[A-Za-z_]\w*$")
_NUMBERED = re.compile(r"^(.*[A-Za-z])_(\d+)$")


@dataclass(frozen=True, slots=True)
class Trip:
    """One trip of a loop that the interpreter ran, by the number of the loop and that of the trip."""

    loop: int
    number: int


@dataclass(frozen=True, slots=True)
class Scope:
    """Where an operation stands.

    `location` is the name that JAX gave its location; `outer` has the locations of the calls that it is inside of,
    each without its own operation, with the trips of loops between them.
    """

    outer: tuple[str | Trip, ...] = ()
    location: str = ""

    def inside(self, location: str) -> Scope:
        """The scope of an operation inside of what this operation calls.

        A location that starts at the root again (`jit(...)`) is whole by itself, but for the trips that it is in.
        """
        outer = self._enclosing
        if location.startswith("jit("):
            outer = tuple(part for part in outer if isinstance(part, Trip))
        return Scope(outer, location)

    def at_trip(self, trip: Trip) -> Scope:
        """The scope of the body of this operation, a loop, at one trip."""
        return Scope((*self._enclosing, trip))

    @property
    def _enclosing(self) -> tuple[str | Trip, ...]:
        """All that an operation is inside of: everything but its own name."""
        parent = self.location.rpartition("/")[0]
        return (*self.outer, parent) if parent else self.outer


def scope_words(scope: Scope) -> Iterator[str | Trip]:
    """The words of the module path that a scope tells, and the trips; the operation's own name is left out."""
    for outer in scope.outer:
        if isinstance(outer, Trip):
            yield outer
        else:
            for part in _split(outer):
                yield from _words(part)
    for part in _split(scope.location)[:-1]:
        yield from _words(part)


def _words(part: str) -> Iterator[str]:
    """The words of one part of a scope, without transformations, functions and control flow."""
    match = _WRAPPED.match(part)
    if match:
        if match[1] in _TRANSFORMS:
            for inner in _split(match[2]):
                yield from _words(inner)
        return
    name = part.partition(".")[0]
    if _MODULE.match(name) and name not in _CONTROL_FLOW:
        yield from split_number(name)


def _split(scope: str) -> list[str]:
    """The parts of a scope, cut at the slashes that stand outside of parentheses."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(scope):
        if letter in "([":
            depth += 1
        elif letter in ")]":
            depth = max(0, depth - 1)
        elif letter == "/" and depth == 0:
            parts.append(scope[start:index])
            start = index + 1
    return [*parts, scope[start:]]


def split_number(word: str) -> tuple[str, ...]:
    """A word with a number at its end in two, `layer_0` as `layer` and `0`; any other word alone."""
    match = _NUMBERED.match(word)
    return (match[1], match[2]) if match else (word,)


def path_keys(path: str) -> tuple[str, ...]:
    """The keys of a pytree path as JAX writes it: `params['h'][0].w`, or mangled by HLO: `params__h___0___w__.1`."""
    if re.fullmatch(r"[\w.-]+", path) and "__" in path:
        path = re.sub(r"\.\d+$", "", path)
        return tuple(word for word in re.split(r"_{2,}|\.", path) if word)
    return tuple(re.findall(r"[A-Za-z0-9_]+", path))
