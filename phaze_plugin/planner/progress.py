"""A long search while it runs: its progress, its end by a time limit, and a garbage collector that looks less often.

The search says where it stands with `Watch.report`, and the caller's listener is told. The deadline is checked in the
same place, so that work ends between two steps and never inside one. Meanwhile Python's cyclic garbage collector looks
less often at what is all still needed (`rare_collections`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from phaze.errors import PlanError

__all__ = ["Progress", "TimeLimitError", "Watch", "nothing_found", "rare_collections"]


class TimeLimitError(Exception):
    """The clock ended the work: not an error, the best so far is the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the work stands: steps done of those known, what comes next, the best step time so far, and its bound.

    `bound_s`: no plan takes less, as far as is known; None before anything is known.
    """

    done: int
    total: int
    doing: str
    best_step_time_s: float | None
    elapsed_s: float
    bound_s: float | None = None

    @property
    def gap(self) -> float | None:
        """How much faster than the best so far another plan could be, as a part of its time."""
        if self.best_step_time_s is None or self.bound_s is None:
            return None
        return max(0.0, 1 - self.bound_s / self.best_step_time_s)

    @property
    def remaining_s(self) -> float | None:
        """A guess from the steps done so far."""
        return self.elapsed_s / self.done * (self.total - self.done) if self.done else None


@dataclass(slots=True, kw_only=True)
class Watch:
    """Counts steps, tells the listener, and raises TimeLimitError after the deadline."""

    listener: Callable[[Progress], object] | None = None
    time_limit_s: float | None = None
    total: int = 0
    done: int = 0
    best_step_time_s: float | None = None
    bound_s: float | None = None
    started_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Since the watch was started."""
        return time.monotonic() - self.started_s

    @property
    def is_over(self) -> bool:
        """Whether the time limit has passed."""
        return self.time_limit_s is not None and self.elapsed_s > self.time_limit_s

    def expect(self, steps: int) -> None:
        """Announce more steps."""
        self.total += steps

    def report(self, doing: str) -> None:
        """Say what comes next; ends the work if its time is over."""
        if self.is_over:
            raise TimeLimitError
        if self.listener is not None:
            self.listener(
                Progress(
                    done=min(self.done, self.total),
                    total=self.total,
                    doing=doing,
                    best_step_time_s=self.best_step_time_s,
                    elapsed_s=self.elapsed_s,
                    bound_s=self.bound_s,
                )
            )

    def step(self) -> None:
        """One announced step is done."""
        self.done += 1


def nothing_found(watch: Watch, error: BaseException) -> BaseException:
    """What to raise where the time limit or the user ended a search that had found nothing yet."""
    if isinstance(error, KeyboardInterrupt):
        return error
    return PlanError(
        f"nothing was found within {watch.time_limit_s} s; allow more time, or offer fewer values of micro_batch_size "
        "and tp."
    )


_OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""So many new objects are waited for before the collector looks: some ten megabytes, and few enough looks that they
take a hundredth of a search. Python's own 700 make it look at all graphs and tables over and over, a tenth of a long
search on many layers."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the collector look less often; as often as before in the end. One that was told to look rarer stays so."""
    before = gc.get_threshold()
    if not 0 < before[0] < _OBJECTS_BETWEEN_COLLECTIONS:
        yield
        return
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
