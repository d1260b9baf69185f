"""Train steps of nnx, which change their model and optimizer in place, as functions of a state that return it updated.

A step of nnx takes modules and an `nnx.Optimizer`, updates these objects and returns a loss or metrics. Here the arrays
in them become one tree, in which the first module is under "model": that of a whole training state. Planning and
`plan.apply` then see a step of (state, *batch); the frontend names its arrays alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phaze.backends.jax.loss_function import is_a, is_nnx_module

__all__ = ["InPlaceStep", "as_in_place_step"]

_OBJECT = "flax.nnx.pytreelib.Pytree"
"""The class of all objects of nnx that hold arrays: modules, optimizers, metrics, random numbers."""

_OPTIMIZER = "flax.nnx.training.optimizer.Optimizer"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InPlaceStep:
    """A step that changes some of its arguments.

    Attributes:
        function: as the user wrote it.
        names: what the arguments that are objects of nnx are called in the state, by their places.
        definition: nnx's description of these objects without their arrays.
    """

    function: Callable[..., Any]
    names: Mapping[int, str]
    definition: Any

    def run(self, state: Any, *others: Any) -> tuple[Any, Any]:
        """The state after the step, and what the step returns; `others` are the arguments that are no objects."""
        from flax import nnx  # here, because only a model of flax brings flax along

        objects, remaining = nnx.merge(self.definition, state), iter(others)
        count = len(self.names) + len(others)
        given = [objects[self.names[place]] if place in self.names else next(remaining) for place in range(count)]
        result = self.function(*given)
        return nnx.state(objects), result

    def arguments(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of `run`, of those that the user's function takes."""
        from flax import nnx  # here, because only a model of flax brings flax along

        others = [value for place, value in enumerate(given) if place not in self.names]
        return (nnx.state(self._objects(given)), *others)

    def update(self, given: tuple[Any, ...], state: Any) -> None:
        """Put the arrays of a state into the objects that the user's function was given."""
        from flax import nnx  # here, because only a model of flax brings flax along

        nnx.update(self._objects(given), state)

    def _objects(self, given: tuple[Any, ...]) -> dict[str, Any]:
        return {name: given[place] for place, name in self.names.items()}


def as_in_place_step(model: Any, inputs: object) -> InPlaceStep | None:
    """The step, where a function takes an optimizer of nnx among its arguments; None for anything else."""
    if not callable(model) or not isinstance(inputs, tuple | list):
        return None
    if not any(is_a(value, _OPTIMIZER) for value in inputs):
        return None
    from flax import nnx  # here, because only a model of flax brings flax along

    places = [place for place, value in enumerate(inputs) if is_a(value, _OBJECT)]
    first_module = next((place for place in places if is_nnx_module(inputs[place])), None)
    names = {place: "model" if place == first_module else f"object{place}" for place in places}
    definition, _ = nnx.split({name: inputs[place] for place, name in names.items()})
    return InPlaceStep(function=model, names=names, definition=definition)
