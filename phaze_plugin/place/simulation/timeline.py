"""What every device of one pipeline does when, from the seconds of its stages: as values, text and a Chrome trace.

`StagePasses` are what a stage does with each microbatch and at the end of a batch, in seconds. They are all that a
timeline is made of, so that a saved plan is drawn again without its model (`simulate_stages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from phaze.parallelism import Parallelism
from phaze.place.simulation.event_simulation import FloatArray, Simulation, StageTimes, compile_order, simulate
from phaze.place.simulation.pass_orders import IntArray, Order, Pass, pipeline_order, stages_of_devices
from phaze.trace_events import complete_event

__all__ = ["KINDS", "Event", "EventKind", "EventTable", "StagePasses", "Timeline", "build_timeline", "simulate_stages"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePasses:
    """Seconds of one stage: of one microbatch, and of what follows the last one.

    Attributes:
        forward_s: one forward, receiving included.
        backward_s: one backward, receiving and recompute included, and the weights' part unless it is split off.
        weight_s: the weights' part of backward where it is a pass of its own, else 0.
        receive_s: receiving the activation, a part of forward.
        receive_gradient_s: receiving the gradient; the part of backward that recompute does not hide.
        recompute_s: running forward again, a part of backward.
        exposed_reduction_s: reducing gradients beyond the last pass, where the network is free.
        reduction_s: all of that reduction.
        shared_reduction_s: reducing what the stage shares with other stages.
        update_s: the optimizer, and gathering what it updated.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    receive_s: float
    receive_gradient_s: float
    recompute_s: float
    exposed_reduction_s: float
    reduction_s: float
    shared_reduction_s: float
    update_s: float


def simulate_stages(parallelism: Parallelism, micro_batches: int, stages: Sequence[StagePasses]) -> Timeline:
    """The timeline of a pipeline of these stages, in their order; a copy of it runs so many microbatches."""
    order = pipeline_order(parallelism.schedule, parallelism.pp, micro_batches, parallelism.chunks)
    columns = {
        "forward_s": "forward_s",
        "backward_s": "backward_s",
        "weight_s": "weight_s",
        "exposed_s": "exposed_reduction_s",
        "reduction_s": "reduction_s",
        "tie_s": "shared_reduction_s",
        "finish_s": "update_s",
    }
    by_device = stages_of_devices(parallelism.schedule, parallelism.pp, parallelism.chunks).T
    times = {
        name: np.array([getattr(stage, field) for stage in stages])[by_device][None] for name, field in columns.items()
    }
    return build_timeline(order, stages, simulate(compile_order(order), StageTimes(**times)))


def build_timeline(order: Order, stages: Sequence[StagePasses], simulation: Simulation) -> Timeline:
    """Every pass in its parts (receive, or recompute, which hides it; then the layers), and what follows the last."""

    def per_stage(*names: str) -> FloatArray:
        return np.array([[getattr(stage, name) if name else 0.0 for stage in stages] for name in names])

    ends = simulation.pass_end_s[0]
    device = np.broadcast_to(np.arange(order.pp)[:, None], ends.shape)
    stage = order.stage
    starts = ends - per_stage("forward_s", "backward_s", "weight_s")[order.kind, stage]
    again = starts + np.where(order.kind == Pass.BACKWARD, per_stage("recompute_s")[0][stage], 0.0)
    ready = np.maximum(again, starts + per_stage("receive_s", "receive_gradient_s", "")[order.kind, stage])
    runs = np.array([KINDS.index(kind) for kind in (EventKind.FORWARD, EventKind.BACKWARD, EventKind.WEIGHT)])
    computed, reduced, updated = (
        ends_s[0] for ends_s in (simulation.compute_end_s, simulation.reduced_s, simulation.device_end_s)
    )
    no_stage = np.full(order.pp, -1)

    def pass_events(kind: IntArray, start: FloatArray, end: FloatArray) -> EventTable:
        return EventTable(
            device=device, kind=kind, stage=stage, micro_batch=order.micro_batch, start_s=start, end_s=end
        )

    def device_events(kind: EventKind, start: FloatArray, end: FloatArray) -> EventTable:
        number = np.full(start.shape, KINDS.index(kind))
        return EventTable(
            device=device[:, 0], kind=number, stage=no_stage, micro_batch=no_stage, start_s=start, end_s=end
        )

    parts = (
        pass_events(np.full(ends.shape, KINDS.index(EventKind.RECOMPUTE)), starts, again),
        pass_events(np.full(ends.shape, KINDS.index(EventKind.RECEIVE)), again, ready),
        pass_events(runs[order.kind], ready, ends),
        device_events(EventKind.REDUCE, computed, reduced),
        device_events(EventKind.UPDATE, reduced, updated),
    )
    return Timeline(order.pp, float(simulation.time_s[0]), EventTable.joined(parts))
