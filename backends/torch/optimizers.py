"""The optimizer of an arranged model: made by the user's function, or the user's own with its parameters exchanged.

Arranging a model replaces its parameters. An optimizer that was made for the plain model, with parameter groups chosen
by name or by module, is kept as it is: each group gets the arranged parameters of the same names that this process
holds (`OptimizerParameters`). Learning-rate schedulers that hold such an optimizer go on working.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from phaze.errors import PlanError, shown

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["OptimizerParameters", "SeveralOptimizers", "make_optimizer"]

SGD_LEARNING_RATE = 1e-2
"""For the SGD of plans whose precision keeps no optimizer states, where no `optimizer=` is given. It is not tuned for
any model: a larger rate learns faster and diverges earlier."""


class SeveralOptimizers(torch.optim.Optimizer):
    """Optimizers of different parameters that step together; groups and states are those of all of them."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        super().__init__([{"params": []}], {})  # torch refuses groups with names beside groups without
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for optimizer in optimizers:
            optimizer.state = self.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update all parameters."""
        if closure is not None:
            raise PlanError("several optimizers step together without a closure; call each one's own step.")
        for optimizer in self.optimizers:
            optimizer.step()


@dataclass(frozen=True, slots=True)
class OptimizerParameters:
    """Optimizers that were made for the plain model, and the names of the parameters in each of their groups."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    names: tuple[tuple[tuple[str, ...], ...], ...]

    @classmethod
    def of(cls, given: object, model: torch.nn.Module) -> OptimizerParameters | None:
        """What is needed to exchange the parameters of given optimizers; None where a function, or nothing, is given.

        Raises PlanError for optimizers of other parameters, or that have made steps.
        """
        listed = list(given) if isinstance(given, list | tuple) else [given]
        optimizers = tuple(each for each in listed if isinstance(each, torch.optim.Optimizer))
        if not optimizers and not isinstance(given, list | tuple):
            return None
        if len(optimizers) != len(listed) or not listed:
            raise PlanError(f"optimizer is {shown(given)}; expected a function, an optimizer, or a list of optimizers.")
        known = {id(parameter): name for name, parameter in model.named_parameters()}
        seen: dict[str, int] = {}
        names = []
        for place, optimizer in enumerate(optimizers):
            if optimizer.state:
                raise PlanError(
                    "the optimizer has made steps already, and its states belong to the parameters of the plain model; "
                    "apply the plan first, and load a checkpoint with `run.load`."
                )
            groups = [[known.get(id(parameter), "") for parameter in group["params"]] for group in _groups(optimizer)]
            flat = [name for group in groups for name in group]
            if "" in flat or any(name in seen for name in flat):
                raise PlanError(
                    f"optimizer {place} has a parameter that "
                    + ("is none of the model's" if "" in flat else "another optimizer has, too")
                    + "; make optimizers of the parameters of the model that the plan is applied to, each once."
                )
            seen |= dict.fromkeys(flat, place)
            names.append(tuple(map(tuple, groups)))
        return cls(optimizers, tuple(names))

    def exchanged(self, arranged: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizers with the arranged parameters that this process holds, by the model's names."""
        for optimizer, groups in zip(self.optimizers, self.names, strict=True):
            for group, names in zip(_groups(optimizer), groups, strict=True):
                held = [name for name in names if name in arranged]
                group["params"] = [arranged[name] for name in held]
                if "param_names" in group:
                    group["param_names"] = held
        return self.optimizers[0] if len(self.optimizers) == 1 else SeveralOptimizers(self.optimizers)


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.param_groups
    return groups


def make_optimizer(
    plan: Plan,
    make: object,
    given: OptimizerParameters | None,
    arranged: Mapping[str, torch.nn.Parameter],
) -> torch.optim.Optimizer:
    """The optimizer of this process's parameters: the user's, or AdamW or SGD as the plan's precision says.

    `arranged` are the parameters of this process by the names under which the model lists them first: tied ones once.
    """
    if given is not None:
        return given.exchanged(arranged)
    trained = [parameter for parameter in arranged.values() if parameter.requires_grad]
    # torch refuses an empty list, and takes a group of none: a stage may have nothing but frozen parameters.
    parameters: list[Any] = trained or [{"params": []}]
    if make is None:
        if plan.question.precision.state_bytes > 0:
            return torch.optim.AdamW(parameters)
        return torch.optim.SGD(parameters, lr=SGD_LEARNING_RATE)
    if not callable(make):
        raise PlanError(
            f"optimizer is {shown(make)}; expected a function from parameters to a torch optimizer, or one or several "
            "optimizers of the plain model's parameters."
        )
    optimizer = make(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(f"optimizer made a {type(optimizer).__name__}; expected a torch.optim.Optimizer.")
    return optimizer
