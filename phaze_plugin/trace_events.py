"""Events of Chrome traces, with times that viewers read without losing one.

Viewers count in whole nanoseconds: Perfetto cuts off what lies beyond them, of start and length each for itself, and
drops an event that then ends after the next one of its thread has begun. Ends that meet here therefore meet there.
"""

import math
from collections.abc import Mapping

__all__ = ["complete_event"]


def complete_event(
    name: str,
    category: str,
    span_s: tuple[float, float],
    lane: tuple[int, int],
    arguments: Mapping[str, object],
) -> dict[str, object]:
    """An event from one second to another on a lane, which is a process and a thread."""
    start, end = (round(moment * 1e9) for moment in span_s)
    process, thread = lane
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": _microseconds(start),
        "dur": _microseconds(end - start),
        "pid": process,
        "tid": thread,
        "args": dict(arguments),
    }


def _microseconds(nanoseconds: int) -> float:
    """The least number of microseconds that is so many whole nanoseconds once its fraction is cut off."""
    value = nanoseconds / 1e3
    return value if int(value * 1e3) >= nanoseconds else math.nextafter(value, math.inf)
