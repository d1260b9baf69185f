"""What every device of one pipeline does when: as values, as text, and as a Chrome trace."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Event", "EventKind", "Timeline"]


class EventKind(StrEnum):
    """What a device is busy with."""

    RECEIVE = "receive"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    WEIGHT = "weight"
    REDUCE = "reduce"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Event:
    """One device, busy for a while; microbatch and stage are -1 after the last pass."""

    device: int
    kind: EventKind
    stage: int
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """All events of one pipeline, by device and time."""

    devices: int
    time_s: float
    events: tuple[Event, ...]

    def text(self, columns: int = 100) -> str:
        """A row per device: digits are forwards, letters backwards (of microbatches modulo 10), dots are bubbles."""
        step = self.time_s / columns
        rows = [["."] * columns for _ in range(self.devices)]
        for event in self.events:
            first, last = int(event.start_s / step + 0.5), int(event.end_s / step + 0.5)
            for column in range(first, min(last, columns)):
                rows[event.device][column] = _mark(event)
        legend = "0-9 forward, a-j backward, w weights, > receive, r recompute, = reduce, # update, . idle"
        lines = [f"device {device:>3} |{''.join(row)}|" for device, row in enumerate(rows)]
        return "\n".join([*lines, f"{'':11}0{'':{columns - 11}}{self.time_s:>10.4g} s", legend])

    def chrome_trace(self) -> dict[str, Any]:
        """The events as `chrome://tracing` and Perfetto read them: complete events in microseconds."""
        return {
            "displayTimeUnit": "ms",
            "traceEvents": [
                {
                    "name": f"{event.kind} {event.micro_batch}" if event.micro_batch >= 0 else str(event.kind),
                    "cat": str(event.kind),
                    "ph": "X",
                    "ts": event.start_s * 1e6,
                    "dur": (event.end_s - event.start_s) * 1e6,
                    "pid": 0,
                    "tid": event.device,
                    "args": {"stage": event.stage, "microbatch": event.micro_batch},
                }
                for event in self.events
            ],
        }


def _mark(event: Event) -> str:
    match event.kind:
        case EventKind.FORWARD:
            return str(event.micro_batch % 10)
        case EventKind.BACKWARD:
            return "abcdefghij"[event.micro_batch % 10]
        case EventKind.RECEIVE:
            return ">"
        case EventKind.RECOMPUTE:
            return "r"
        case EventKind.WEIGHT:
            return "w"
        case EventKind.REDUCE:
            return "="
        case EventKind.UPDATE:
            return "#"
