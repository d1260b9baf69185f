"""How far a real chip stays behind the ideal one.

    time = max(tensor time / matrix, vector time / vector, memory time / memory) + overhead per op
    collective time = link time / link

Until a preset is fitted to measurements its efficiencies are all 1.0, and results say "ideal".
"""

from __future__ import annotations

from dataclasses import dataclass

from phaze.hardware import Accelerator
from phaze.hardware.validate import fraction, non_negative

__all__ = ["IDEAL", "Calibration", "calibration_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Efficiencies in (0, 1] and a fixed cost per op.

    The name is "ideal", or says what it was fitted on. Efficiencies are the reached shares of the tensor cores' and the
    vector cores' rates and of HBM and link bandwidth; the overhead is launch and synchronisation of each op.
    """

    name: str = "ideal"
    matrix: float = 1.0
    vector: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        """Check ranges."""
        owner = f"calibration {self.name}"
        for field in ("matrix", "vector", "memory", "link"):
            fraction(owner, field, getattr(self, field))
        non_negative(owner, "overhead_s", self.overhead_s)

    @property
    def is_ideal(self) -> bool:
        """Whether nothing was fitted."""
        return self == IDEAL


IDEAL = Calibration()


def calibration_of(accelerator: Accelerator) -> Calibration:
    """The calibration that belongs to ``accelerator``; no preset has been fitted yet.

    It takes the whole accelerator, because another chip under a preset's name has nothing of its calibration.
    """
    del accelerator
    return IDEAL
