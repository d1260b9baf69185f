"""Lowering by JAX: a loss with its gradients, a step as it is; and the shapes of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from phaze.errors import ImportModelError
from phaze.frontends.jax.sources import Leaf, Source, explained

__all__ = ["Shapes", "lower_loss", "lower_step", "traced_shapes"]

Shapes = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
"""Every primitive of a trace, and the shapes that it makes."""


def lower_loss(source: Source, leaves: Sequence[Leaf], parameters: Sequence[int]) -> Any:
    """`value_and_grad` lowered: parameters come first among the arguments, and their gradients behind the loss."""
    import jax

    others = [index for index in range(len(leaves)) if index not in set(parameters)]

    def objective(learned: list[Any], rest: list[Any]) -> Any:
        values = dict(zip(parameters, learned, strict=True)) | dict(zip(others, rest, strict=True))
        return _scalar(source, source.call([values[index] for index in range(len(leaves))]))

    return jax.jit(jax.value_and_grad(objective), keep_unused=True).lower(
        [leaves[index].spec for index in parameters], [leaves[index].spec for index in others]
    )


def _scalar(source: Source, output: Any) -> Any:
    first = output[0] if isinstance(output, tuple | list) else output
    if getattr(first, "shape", None) != ():
        raise ImportModelError(f"{source.name} returned no scalar loss.")
    return first


def lower_step(source: Source, leaves: Sequence[Leaf]) -> Any:
    """A function lowered as it is, its arguments flat."""
    import jax

    def step(values: list[Any]) -> Any:
        return source.call(values)

    return jax.jit(step, keep_unused=True).lower([leaf.spec for leaf in leaves])


def traced_shapes(source: Source, leaves: Sequence[Leaf]) -> Shapes:
    """What a trace of the forward makes at these shapes."""
    import jax

    with explained(source.name):
        closed = jax.make_jaxpr(source.call)([leaf.spec for leaf in leaves])
    return tuple(_shapes(closed.jaxpr))


def _shapes(jaxpr: Any) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    for equation in jaxpr.eqns:
        made = tuple(tuple(getattr(out.aval, "shape", ())) for out in equation.outvars)
        yield str(equation.primitive), made
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inside = getattr(inner, "jaxpr", inner)
                if hasattr(inside, "eqns"):
                    yield from _shapes(inside)
