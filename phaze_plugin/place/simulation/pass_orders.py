"""Pipeline schedules: the order in which each device runs its passes, and how many microbatches are in flight.

A pipeline has S = pp devices, m microbatches and v chunks (stages) per device; the stage of chunk c on device r is
c*S + r. A pass is a forward (F), a backward (B) or, where backward is split, the part for weights (W). Orders
(`pipeline_order`) are fixed before anything is timed:

    gpipe             F of all microbatches, then B of all
    1f1b              S-1-r forwards, then F and B in turn (Narayanan et al., PipeDream-flush)
    eager-1f1b        as 1f1b behind 2(S-1-r) forwards (Zhuang et al., arXiv:2211.05322)
    interleaved-1f1b  as 1f1b over v chunks, microbatches in groups of S; needs S to divide m
                      (Narayanan et al., SC'21: 2(S-1-r) + (v-1)S forwards first)
    zero-bubble       as 1f1b with W split off and put off by r microbatches, so that every device has at most S
                      microbatches in flight (Qi et al., ICLR 2024, ZB-H1)
    zb-v, dualpipe-v  two chunks whose stages go down the devices and come back: chunk 1 of device r is stage 2S-1-r,
                      in the shape of a V (`v_shaped_passes`)

In the shape of a V device r runs the stages r (chunk 0) and 2S-1-r (chunk 1). F0 is a forward of chunk 0, B the
backward for inputs, W the one for weights; microbatches follow each other in each kind of pass of a chunk.

ZB-V (`_zero_bubble_v_steps`; Qi et al., ICLR 2024, section 6). With n the larger of m and 2S-1, device r runs

    F0 2(S-r)-1 times; F1 F0 r times; F1 B1 W1 S-r times; F0 B0 W0 F1 B1 W1 n-2S+1+r times; B0 W0 F1 B1 W1 S-1-r times;
    B0 B1 r times; B0 W0 S-r times; what is left of W1, and of W0

without the microbatches beyond m. It leaves no bubble but the first forwards where F, B and W take equally long.

DualPipeV (`_dual_pipe_v_steps`; DeepSeek-AI, arXiv:2412.19437, halved to one copy). X is a B with its W right behind,
one backward whose gradient is sent when both are over, and w the oldest W that is left. It needs m >= 2S:

    F0 2(S-1-r) times; F0 F1 r+1 times; B1 w F1 S-1-r times; F0 X1 F1 X0 m-2S+1+r times; X1 F1 X0 S-1-r times;
    X1 X0 r+1 times, of which the second half is B; w B0 S-1-r times; w r+1 times

Forwards and backwards that stand side by side there are run one after the other here, as torch runs them: what hiding
an exchange of experts behind them would save is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from phaze.errors import PlacementError
from phaze.parallelism import PipelineSchedule

__all__ = ["Order", "Pass", "VPass", "in_flight", "pipeline_order", "stages_of_devices", "v_shaped_passes"]

VPass = tuple[str, int, int, bool]
"""Kind (F, B or W), chunk, microbatch, and whether a B is one pass with the W behind it."""


def v_shaped_passes(schedule: PipelineSchedule, pp: int, micro_batches: int, device: int) -> list[VPass]:
    """The passes of one device."""
    if schedule is PipelineSchedule.DUAL_PIPE_V:
        return list(_numbered(_dual_pipe_v_steps(pp, micro_batches, device)))
    numbered = _numbered(_zero_bubble_v_steps(pp, max(micro_batches, 2 * pp - 1), device))
    return [each for each in numbered if each[2] < micro_batches]


def _zero_bubble_v_steps(pp: int, micro_batches: int, device: int) -> Iterator[str]:
    """The kinds and chunks of the passes of ZB-V, where microbatches fill the pipeline."""
    ahead = pp - device
    rounds = micro_batches - 2 * pp + 1 + device
    yield from ["F0"] * (2 * ahead - 1)
    yield from ["F1", "F0"] * device
    yield from ["F1", "B1", "W1"] * ahead
    yield from ["F0", "B0", "W0", "F1", "B1", "W1"] * rounds
    yield from ["B0", "W0", "F1", "B1", "W1"] * (ahead - 1)
    yield from ["B0", "B1"] * device
    yield from ["B0", "W0"] * ahead
    yield from ["W1"] * device + ["W0"] * device


def _dual_pipe_v_steps(pp: int, micro_batches: int, device: int) -> Iterator[str]:
    """The kinds and chunks of the passes of DualPipeV; w stands for the oldest W that is left."""
    behind = pp - 1 - device
    yield from ["F0"] * (2 * behind)
    yield from ["F0", "F1"] * (device + 1)
    yield from ["B1", "w", "F1"] * behind
    yield from ["F0", "X1", "F1", "X0"] * (micro_batches - 2 * pp + 1 + device)
    yield from ["X1", "F1", "X0"] * behind
    last = [f"{chunk}" for _ in range(device + 1) for chunk in (1, 0)]
    yield from [("X" if place <= device else "B") + chunk for place, chunk in enumerate(last)]
    yield from ["w", "B0"] * behind
    yield from ["w"] * (device + 1)


def _numbered(steps: Iterable[str]) -> Iterator[VPass]:
    """The passes of some steps, with their microbatches."""
    counts: dict[str, int] = {}
    left: list[tuple[int, int]] = []

    def numbered(kind: str, chunk: int, is_whole: bool = False) -> VPass:
        micro_batch = counts.get(f"{kind}{chunk}", 0)
        counts[f"{kind}{chunk}"] = micro_batch + 1
        return kind, chunk, micro_batch, is_whole

    for step in steps:
        if step == "w":
            chunk, micro_batch = left.pop(0)
            counts[f"W{chunk}"] = counts.get(f"W{chunk}", 0) + 1
            yield "W", chunk, micro_batch, False
            continue
        kind, chunk = step[0], int(step[1])
        if kind == "X":
            yield numbered("B", chunk, is_whole=True)
            yield numbered("W", chunk)
            continue
        each = numbered(kind, chunk)
        if kind == "B":
            left.append((chunk, each[2]))
        yield each


IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_KEPT_COUNTS = 4_096
"""So many answers of `in_flight` are kept for pipelines of the same depth, microbatches and chunks: a search asks for
some hundred, each many times."""


class Pass(IntEnum):
    """What a device does with one microbatch of one stage."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """All passes per (device, step): their kind, chunk and microbatch.

    ``is_whole`` says of a backward for inputs that its gradient is sent only after the weights' part, which follows.
    """

    schedule: PipelineSchedule
    pp: int
    micro_batches: int
    chunks: int
    kind: IntArray
    chunk: IntArray
    micro_batch: IntArray
    is_whole: BoolArray

    @property
    def stage(self) -> IntArray:
        """The stage of each pass, per (device, step)."""
        return np.asarray(
            stages_of_devices(self.schedule, self.pp, self.chunks)[self.chunk, np.arange(self.pp)[:, None]]
        )


def stages_of_devices(schedule: PipelineSchedule, pp: int, chunks: int) -> IntArray:
    """Which stage of the pipeline each chunk of each device is, per (chunk, device)."""
    return np.array([[schedule.stage_at(pp, device, chunk) for device in range(pp)] for chunk in range(chunks)])


def pipeline_order(schedule: PipelineSchedule, pp: int, micro_batches: int, chunks: int = 1) -> Order:
    """The passes of every device of a pipeline.

    Raises:
        PlacementError: the schedule cannot run so many chunks or microbatches.
    """
    if (chunks > 1) != schedule.has_chunks:
        raise PlacementError(f"{schedule} with {chunks} chunks per device; only interleaved schedules have several.")
    if schedule.is_v_shaped and chunks != 2:
        raise PlacementError(f"{schedule} with {chunks} chunks per device; pipelines in the shape of a V have 2.")
    if schedule is PipelineSchedule.DUAL_PIPE_V and micro_batches < 2 * pp:
        raise PlacementError(
            f"dualpipe-v on {pp} devices needs at least {2 * pp} microbatches per pipeline, not {micro_batches}."
        )
    if schedule is PipelineSchedule.INTERLEAVED and micro_batches % pp:
        raise PlacementError(
            f"an interleaved schedule of {pp} devices needs a multiple of {pp} microbatches per pipeline, "
            f"not {micro_batches}."
        )
    rows = [_device_order(schedule, pp, micro_batches, chunks, device) for device in range(pp)]
    kind, chunk, micro_batch, is_whole = np.moveaxis(np.array(rows), 2, 0)
    return Order(
        schedule=schedule,
        pp=pp,
        micro_batches=micro_batches,
        chunks=chunks,
        kind=kind,
        chunk=chunk,
        micro_batch=micro_batch,
        is_whole=is_whole.astype(bool),
    )


def _device_order(schedule: PipelineSchedule, pp: int, micro_batches: int, chunks: int, device: int) -> IntArray:
    """Rows (kind, chunk, microbatch, whether a backward is whole) of one device."""
    if schedule.is_v_shaped:
        passes = v_shaped_passes(schedule, pp, micro_batches, device)
        return np.array([("FBW".index(kind), chunk, batch, whole) for kind, chunk, batch, whole in passes])
    total = micro_batches * chunks
    index = np.arange(total)
    group, inside = index // (pp * chunks), index % (pp * chunks)
    batch = group * pp + inside % pp if chunks > 1 else index
    chunk = inside // pp if chunks > 1 else np.zeros_like(index)
    forward = np.stack([np.full(total, Pass.FORWARD), chunk, batch], axis=1)
    backward = np.stack([np.full(total, Pass.BACKWARD), chunks - 1 - chunk, batch], axis=1)
    stages_behind = pp - 1 - device
    match schedule:
        case PipelineSchedule.GPIPE:
            first = total
        case PipelineSchedule.INTERLEAVED | PipelineSchedule.EAGER:
            first = min(2 * stages_behind + (chunks - 1) * pp, total)
        case _:
            first = min(stages_behind, total)
    in_turn = total - first
    turns = np.stack([forward[first:], backward[:in_turn]], axis=1).reshape(-1, 3)
    order = np.concatenate([forward[:first], turns, backward[in_turn:]])
    order = _with_weights(order, device) if schedule is PipelineSchedule.ZERO_BUBBLE else order
    return np.concatenate([order, np.zeros((len(order), 1), dtype=np.int64)], axis=1)


def _with_weights(order: IntArray, delay: int) -> IntArray:
    """After the backward of microbatch i the weights of microbatch i - delay, and the rest at the end."""
    after = np.flatnonzero(order[:, 0] == Pass.BACKWARD)[delay:]
    total = len(order) // 2
    places = np.concatenate([2 * after + 1, np.full(total - len(after), 2 * len(order))])
    batch = np.arange(total)
    weights = np.stack([np.full(total, Pass.WEIGHT), np.zeros_like(batch), batch], axis=1)
    by_place = np.argsort(np.concatenate([2 * np.arange(len(order)), places]), kind="stable")
    return np.concatenate([order, weights])[by_place]


def in_flight(schedule: PipelineSchedule, pp: int, micro_batches: int, chunks: int = 1) -> IntArray:
    """Per (device, chunk): the most microbatches whose forward has run and whose last backward pass has not.

    The most is reached right after a forward. Interleaved orders repeat themselves once every device has begun
    backward, which it has after two groups of microbatches: a third shows all that follows.
    """
    device = np.arange(pp)[:, None]
    match schedule:
        case PipelineSchedule.GPIPE:
            return np.full((pp, 1), micro_batches)
        case PipelineSchedule.NONE | PipelineSchedule.ONE_F_ONE_B:  # a single stage alternates like 1F1B
            return np.minimum(pp - device, micro_batches)
        case PipelineSchedule.EAGER:
            return np.minimum(2 * (pp - device) - 1, micro_batches)
        case PipelineSchedule.ZERO_BUBBLE:
            return np.full((pp, 1), min(pp, micro_batches))
        case PipelineSchedule.ZERO_BUBBLE_V | PipelineSchedule.DUAL_PIPE_V:
            return np.asarray(np.minimum(np.concatenate([2 * pp - device, device + 1], axis=1), micro_batches))
        case PipelineSchedule.INTERLEAVED:
            return _in_flight_interleaved(pp, min(micro_batches, 3 * pp), chunks)


@lru_cache(maxsize=_KEPT_COUNTS)
def _in_flight_interleaved(pp: int, micro_batches: int, chunks: int) -> IntArray:
    """`in_flight` of an interleaved pipeline, as an array that nobody may write to."""
    total = micro_batches * chunks
    first = np.minimum(2 * (pp - 1 - np.arange(pp)[:, None]) + (chunks - 1) * pp, total)
    backwards = np.arange(total + 1)
    forwards = np.minimum(first + backwards + (first < total), total)
    begun, ended = (
        np.stack([_of_chunk(counts, pp, chunks, place) for place in places], axis=1)
        for counts, places in ((forwards, range(chunks)), (backwards[None], range(chunks - 1, -1, -1)))
    )
    most = np.asarray((begun - ended).max(axis=2))
    most.flags.writeable = False
    return most


def _of_chunk(passes: IntArray, pp: int, chunks: int, place: int) -> IntArray:
    """How many of the first so many passes of a device belong to the chunk that is in this place of every round."""
    rounds, rest = np.divmod(passes, pp * chunks)
    return np.asarray(rounds * pp + np.clip(rest - place * pp, 0, pp))
