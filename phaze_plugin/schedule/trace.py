"""A schedule as a Chrome trace, which chrome://tracing and Perfetto show.

The document follows the Trace Event Format: complete events ("ph": "X") with times in microseconds, one thread per
core, one for ops that are spread over all cores of a kind, one for the link.
"""

from __future__ import annotations

from typing import Any

from phaze.schedule.gantt import lanes_of
from phaze.schedule.result import Schedule

__all__ = ["chrome_trace"]

_MICROSECONDS = 1e6


def chrome_trace(schedule: Schedule) -> dict[str, Any]:
    """The document, ready for `json.dump`; empty of events if there is no schedule."""
    lanes: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for entry in schedule.ops:
        op = schedule.problem.ops[entry.op]
        for lane in lanes_of(schedule, entry):
            thread = lanes.setdefault(lane, len(lanes) + 1)
            events.append(
                {
                    "name": op.name,
                    "cat": schedule.problem.kinds[entry.op].value,
                    "ph": "X",
                    "ts": entry.start_s * _MICROSECONDS,
                    "dur": (entry.end_s - entry.start_s) * _MICROSECONDS,
                    "pid": 1,
                    "tid": thread,
                    "args": {"is_spread": entry.is_spread, "latency_s": op.latency_s, "energy_j": op.energy_j},
                }
            )
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": lane}}
        for lane, thread in lanes.items()
    ]
    about = {
        "layer": schedule.problem.name,
        "makespan_s": schedule.makespan_s if schedule.is_feasible else None,
        "bound_s": schedule.bound_s if schedule.is_feasible else None,
        "status": schedule.status.value,
        "method": schedule.method,
    }
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ns", "otherData": about}
