"""Read JAX's name scopes and pytree paths: `jit(f)/jvp(layer_0)/attn/dot_general` is in the module `layer.0.attn`.

Transformations wrap a part of the path (`jvp(...)`, `transpose(jvp(...))`, `vmap(...)`); functions and control flow
(`jit(f)`, `while/body`, `checkpoint`) are no modules; the last word is the operation's own. A number at the end of a
word is a child's: `layer_0` is `layer.0`. A trip of a loop is written `trip[loop:trip]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["join_scopes", "path_keys", "scope_words", "split_number"]

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
_TRIP = re.compile(r"^trip\[(\d+):(\d+)\]$")


def join_scopes(outer: str, inner: str) -> str:
    """The scope of an operation inside a called function: the caller's without its own operation, then the inner one.

    A scope that starts at the root again (`jit(...)`) is whole by itself, but for the trips of loops that it is in.
    """
    base = outer.rpartition("/")[0]
    if not base:
        return inner
    if inner.startswith("jit("):
        trips = "/".join(word for word in base.split("/") if _TRIP.match(word))
        return f"{trips}/{inner}" if trips else inner
    return f"{base}/{inner}"


def scope_words(scope: str) -> Iterator[str | tuple[int, int]]:
    """The words of the module path that a scope tells, and (loop, trip) for trips; the operation's name is left out."""
    for part in _split(scope)[:-1]:
        trip = _TRIP.match(part)
        if trip:
            yield int(trip[1]), int(trip[2])
            continue
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
