"""What every device of one pipeline does when: as values, as text, and as a Chrome trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from phaze.trace_events import complete_event

__all__ = ["KINDS", "Event", "EventKind", "EventTable", "Timeline"]


class EventKind(StrEnum):
    """What a device is busy with."""

    RECEIVE = "receive"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    WEIGHT = "weight"
    REDUCE = "reduce"
    UPDATE = "update"


KINDS = tuple(EventKind)
"""What `EventTable.kind` indexes."""


@dataclass(frozen=True, slots=True)
class Event:
    """One device, busy for a while; microbatch and stage are -1 after the last pass."""

    device: int
    kind: EventKind
    stage: int
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EventTable:
    """Events as parallel arrays; `kind` indexes `KINDS`."""

    device: NDArray[np.int64]
    kind: NDArray[np.int64]
    stage: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    @classmethod
    def joined(cls, parts: Sequence[EventTable]) -> EventTable:
        """All events of some tables that take time, by device and start."""
        columns = {name: np.concatenate([getattr(part, name).ravel() for part in parts]) for name in cls.__slots__}
        order = np.lexsort((columns["start_s"], columns["device"]))
        order = order[(columns["end_s"] > columns["start_s"])[order]]
        return cls(**{name: column[order] for name, column in columns.items()})


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """All events of one pipeline, by device and time."""

    devices: int
    time_s: float
    table: EventTable

    @property
    def events(self) -> tuple[Event, ...]:
        """The events one by one; there may be very many."""
        columns = [getattr(self.table, name).tolist() for name in EventTable.__slots__]
        return tuple(
            Event(device, KINDS[kind], stage, batch, start, end)
            for device, kind, stage, batch, start, end in zip(*columns, strict=True)
        )

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

    def chrome_trace(self) -> dict[str, object]:
        """The events as `chrome://tracing` and Perfetto read them: complete events in microseconds.

        Every place of the pipeline is a process, its compute and its links are two threads. Perfetto takes process and
        thread 0 for an idle processor and a thread's number for one of the whole machine, so both count from 1 and no
        number of a thread is used twice.
        """
        names = [
            {"name": kind, "ph": "M", "pid": device + 1, "tid": _thread(device, is_link), "args": {"name": name}}
            for device in range(self.devices)
            for kind, is_link, name in (
                ("process_name", False, f"place {device}"),
                ("thread_name", False, "compute"),
                ("thread_name", True, "links"),
            )
        ]
        events = [
            complete_event(
                f"{event.kind} {event.micro_batch}" if event.micro_batch >= 0 else str(event.kind),
                str(event.kind),
                (event.start_s, event.end_s),
                (event.device + 1, _thread(event.device, event.kind in _ON_LINKS)),
                {"stage": event.stage, "microbatch": event.micro_batch},
            )
            for event in self.events
        ]
        return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}


_ON_LINKS = (EventKind.RECEIVE, EventKind.REDUCE)
"""What a device's links do; everything else is compute."""


def _mark(event: Event) -> str:
    """The character that `Timeline.text` draws for an event."""
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


def _thread(device: int, is_link: bool) -> int:
    """The number of a trace's thread: two for every device, the second for its links."""
    return 2 * device + int(is_link) + 1
