"""`Objective`: what a plan is to be best at, and what of a plan that makes it a number.

    throughput   seconds of a step on all devices of the cluster
    cost         money per million tokens: devices x hours x the price of a device-hour
    energy       joules per token, of the devices that are used
    devices      how many devices are used, of plans whose step takes no longer than `step_time_s`, or that fit at all

All are made small. Under the last three the devices of a cluster are as many as may be used: a plan takes as many of
them as serve it best, each stage the same number, and the others cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from phaze.errors import QuestionError, shown

__all__ = ["Objective", "ObjectiveKind", "ObjectiveValue", "settled_objective"]

_TOKENS = 1_000_000
"""The tokens that a cost is told for."""

_HOUR_S = 3600

_LARGEST = 1e12
"""No price of a device-hour and no step time is larger: their products with counts of devices stay exact enough."""


class ObjectiveKind(StrEnum):
    """What is made small."""

    THROUGHPUT = "throughput"
    COST = "cost"
    ENERGY = "energy"
    DEVICES = "devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a plan is to be best at.

    Attributes:
        kind: what is made small.
        price: money for a device-hour; None where none is known.
        step_time_s: the longest step that a plan may take, for `devices`; None where any will do.
    """

    kind: ObjectiveKind = ObjectiveKind.THROUGHPUT
    price: float | None = None
    step_time_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("price", "step_time_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= _LARGEST:
                raise ValueError(f"{name} is {value}; expected a number above 0.")
        if self.kind is ObjectiveKind.COST and self.price is None:
            raise ValueError("objective 'cost' has no price of a device-hour")
        if self.kind is not ObjectiveKind.DEVICES and self.step_time_s is not None:
            raise ValueError(f"objective {self.kind.value!r} has a step time, which only 'devices' is asked for")

    @property
    def chooses_devices(self) -> bool:
        """Whether a plan may take fewer devices than the cluster has."""
        return self.kind is not ObjectiveKind.THROUGHPUT

    def money(self, device_seconds: float, tokens: float) -> float | None:
        """Money per million tokens for a step that takes so many devices' seconds; None where no price is known."""
        return None if self.price is None else self.price * device_seconds / _HOUR_S / tokens * _TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveValue:
    """What the plan reaches of what was made small, and what no plan on any number of the devices falls below.

    Seconds of a step for throughput, money per million tokens, joules per token, or devices.
    """

    reached: float
    bound: float


def settled_objective(kind: object, price: object, step_time: object, cluster_price: float | None) -> Objective:
    """The objective that arguments mean; the price is the cluster's where none is given.

    Raises QuestionError naming the argument that is wrong or missing.
    """
    if kind not in list(ObjectiveKind):
        raise QuestionError(f"objective is {shown(kind)}; expected one of {', '.join(ObjectiveKind)}.")
    for name, value in (("price", price), ("step_time", step_time)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value <= _LARGEST):  # type: ignore[operator]
            unit = "money for one device-hour" if name == "price" else "seconds"
            raise QuestionError(f"{name} is {shown(value)}; expected {unit}, a number above 0.")
    settled = ObjectiveKind(str(kind))
    money = cluster_price if price is None else float(str(price))
    if settled is ObjectiveKind.COST and money is None:
        raise QuestionError(
            "objective is 'cost', but no price is known; pass price= (--price), the money for one device-hour, or a "
            "cluster file with price_per_device_hour."
        )
    if step_time is not None and settled is not ObjectiveKind.DEVICES:
        raise QuestionError(
            f"step_time is {step_time}, which objective 'devices' asks for; objective is {settled.value!r}. Leave one "
            "of them out."
        )
    return Objective(kind=settled, price=money, step_time_s=None if step_time is None else float(str(step_time)))
