"""Optimizers of a training step, in the shape that optax has: `init(tree)`, `update(gradients, state, parameters)`.

They see whole arrays; what works element by element runs on the shards that each device holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

__all__ = ["Adam", "Optimizer", "Sgd"]


@runtime_checkable
class Optimizer(Protocol):
    """What a step needs of an optimizer; trees have the structure of the user's parameters."""

    def init(self, parameters: Any) -> Any:
        """The state before the first step: trees like that of the parameters, and scalars."""
        ...

    def update(self, gradients: Any, state: Any, parameters: Any) -> tuple[Any, Any]:
        """What to add to the parameters, and the next state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2)."""

    learning_rate: float = 1e-3
    first_decay: float = 0.9
    second_decay: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def init(self, parameters: Any) -> Mapping[str, Any]:
        """Two moments and a count of steps."""
        import jax
        import jax.numpy as jnp

        zeros = jax.tree.map(lambda one: jnp.zeros(one.shape, jnp.float32), parameters)
        return {"count": jnp.zeros((), jnp.int32), "first": zeros, "second": jax.tree.map(jnp.copy, zeros)}

    def update(self, gradients: Any, state: Any, parameters: Any) -> tuple[Any, Mapping[str, Any]]:
        """One step."""
        import jax
        import jax.numpy as jnp

        count = state["count"] + 1
        first = jax.tree.map(lambda m, g: self.first_decay * m + (1 - self.first_decay) * g, state["first"], gradients)
        second = jax.tree.map(
            lambda v, g: self.second_decay * v + (1 - self.second_decay) * g * g, state["second"], gradients
        )
        first_scale, second_scale = 1 - self.first_decay**count, 1 - self.second_decay**count

        def change(m: Any, v: Any, p: Any) -> Any:
            step = (m / first_scale) / (jnp.sqrt(v / second_scale) + self.epsilon)
            return -self.learning_rate * (step + self.weight_decay * p)

        return jax.tree.map(change, first, second, parameters), {"count": count, "first": first, "second": second}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """Plain gradient descent: no state."""

    learning_rate: float = 1e-2

    def init(self, parameters: Any) -> tuple[()]:
        """Nothing."""
        return ()

    def update(self, gradients: Any, state: Any, parameters: Any) -> tuple[Any, Any]:
        """One step."""
        import jax

        return jax.tree.map(lambda g: -self.learning_rate * g, gradients), state
