"""What backward computes again, as the plan's recompute mode says.

none        everything that backward reads is kept; with ZeRO-3, gathered parameters (and whatever only moves data) are
            made again, so that a layer's parameters are gathered once in each pass
selective   products that read no parameter (attention scores and context) and what lies between them are made again;
            the context itself, which the next product reads, is kept
full        a layer keeps what enters it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phaze.backends.jax.traced import evaluate
from phaze.ir import RecomputeMode

__all__ = ["again_in_backward", "with_attention_again"]

_MOVES = frozenset(
    {
        *("all_gather", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice"),
        *("expand_dims", "pad", "reshape", "rev", "sharding_constraint", "shard_map", "slice", "squeeze", "transpose"),
    }
)


def again_in_backward(function: Callable[..., Any], mode: RecomputeMode, *, gathers: bool) -> Callable[..., Any]:
    """A function that keeps for its backward only what the mode allows."""
    import jax

    again: Callable[..., Any] = function
    if mode is RecomputeMode.FULL:
        again = jax.checkpoint(function, policy=jax.checkpoint_policies.nothing_saveable)
    elif gathers:
        again = jax.checkpoint(function, policy=_is_no_move)
    return again


def _is_no_move(primitive: Any, *_: Any, **__: Any) -> bool:
    return str(primitive) not in _MOVES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Group:
    """Equations that are run as one and are run again in backward."""

    equations: tuple[Any, ...]
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """What leaves the group."""
        import jax

        def inside(*values: Any) -> list[Any]:
            return evaluate(self.equations, self.outvars, dict(zip(self.invars, values, strict=True)), _unread)

        return list(jax.checkpoint(inside, policy=jax.checkpoint_policies.nothing_saveable)(*operands))


def _unread(variable: Any) -> Any:
    raise AssertionError(f"a group reads {variable}, which is none of its operands")


def with_attention_again(equations: Sequence[Any], parameters: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    """The equations with attention (see the module's words) in groups of its own."""
    from jax.extend import core

    members = _attention(equations, parameters)
    groups = _connected([equation for equation in equations if id(equation) in members])
    grouped = {id(equation) for group in groups for equation in group}
    rest = [equation for equation in equations if id(equation) not in grouped]
    read = {v for equation in rest for v in equation.invars if not isinstance(v, core.Literal)}
    read |= {v for v in wanted if not isinstance(v, core.Literal)}
    return [*rest, *(_group(group, read, groups) for group in groups)]


def _group(members: list[Any], read: set[Any], groups: list[list[Any]]) -> _Group:
    made = dict.fromkeys(v for equation in members for v in equation.outvars)
    others = {v for group in groups if group is not members for e in group for v in _variables(e)}
    taken = dict.fromkeys(v for equation in members for v in _variables(equation) if v not in made)
    leaves = tuple(v for v in made if v in read or v in others)
    return _Group(equations=tuple(members), invars=tuple(taken), outvars=leaves)


def _variables(equation: Any) -> list[Any]:
    from jax.extend import core

    return [v for v in equation.invars if not isinstance(v, core.Literal)]


def _attention(equations: Sequence[Any], parameters: Sequence[Any]) -> set[int]:
    """Products of two activations, and what lies on a way from one to another without a parameter's product."""
    weights = set(parameters)
    products: list[int] = []
    barred: set[int] = set()
    for equation in equations:
        inputs = _variables(equation)
        if inputs and all(v in weights for v in inputs):
            weights.update(equation.outvars)
        elif str(equation.primitive) == "dot_general":
            (barred.add if any(v in weights for v in inputs) else products.append)(id(equation))
    after: set[Any] = set()
    reached = set()
    for equation in equations:
        if id(equation) in products or (id(equation) not in barred and not after.isdisjoint(_variables(equation))):
            after.update(equation.outvars)
            reached.add(id(equation))
    before: set[Any] = set()
    leading = set()
    for equation in reversed(equations):
        if id(equation) in products or (id(equation) not in barred and not before.isdisjoint(equation.outvars)):
            before.update(_variables(equation))
            leading.add(id(equation))
    return reached & leading


def _connected(equations: Sequence[Any]) -> list[list[Any]]:
    """Equations in groups that hand values to each other."""
    groups: list[list[Any]] = []
    for equation in equations:
        own = set(_variables(equation))
        joined = [group for group in groups if any(not own.isdisjoint(member.outvars) for member in group)]
        merged = [member for group in joined for member in group]
        groups = [group for group in groups if all(group is not other for other in joined)]
        groups.append([*merged, equation])
    return groups
