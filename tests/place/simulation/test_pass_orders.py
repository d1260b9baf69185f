"""Orders of passes, against orders written down pass by pass."""

import itertools

import numpy as np
import pytest

from phaze.errors import PlacementError
from phaze.parallelism import PIPELINE_SCHEDULES, PipelineSchedule
from phaze.place.simulation.pass_orders import Order, in_flight, pipeline_order
from phaze.verify.plain_pipeline import plain_in_flight, plain_order

SHAPES = [
    (schedule, devices, batches, chunks)
    for schedule in PIPELINE_SCHEDULES
    for devices, batches, chunks in itertools.product(range(1, 6), range(1, 13), (1, 2, 3))
    if chunks in schedule.chunk_counts((2, 3))
    and not (schedule is PipelineSchedule.INTERLEAVED and batches % devices)
    and not (schedule is PipelineSchedule.DUAL_PIPE_V and batches < 2 * devices)
]


def passes_of(order: Order, device: int) -> list[tuple[str, int, int]]:
    """The passes of a device as the plain code writes them: X is a backward in one pass with its weights' part."""
    columns = (order.kind, order.chunk, order.micro_batch, order.is_whole)
    rows = list(zip(*(column[device].tolist() for column in columns), strict=True))
    passes = [("X" if is_whole else "FBW"[kind], chunk, batch) for kind, chunk, batch, is_whole in rows]
    whole = [(kind, chunk, batch) for kind, chunk, batch in passes if kind == "X"]
    weights = [passes[place + 1] for place, (kind, _, _) in enumerate(passes) if kind == "X"]
    assert weights == [("W", chunk, batch) for _, chunk, batch in whole]
    return [each for place, each in enumerate(passes) if not place or passes[place - 1][0] != "X"]


@pytest.mark.parametrize("schedule", list(PIPELINE_SCHEDULES))
def test_every_device_runs_its_passes_in_the_textbook_order(schedule: PipelineSchedule) -> None:
    for kind, devices, batches, chunks in SHAPES:
        if kind is schedule:
            order = pipeline_order(schedule, devices, batches, chunks)
            for device in range(devices):
                assert passes_of(order, device) == plain_order(schedule, devices, batches, chunks, device)


@pytest.mark.parametrize("schedule", list(PIPELINE_SCHEDULES))
def test_microbatches_in_flight_are_those_of_the_order(schedule: PipelineSchedule) -> None:
    for kind, devices, batches, chunks in SHAPES:
        if kind is schedule:
            expected = [
                [plain_in_flight(schedule, devices, batches, chunks, device, chunk) for chunk in range(chunks)]
                for device in range(devices)
            ]
            assert np.array_equal(in_flight(schedule, devices, batches, chunks), expected)


def test_zero_bubble_never_keeps_more_in_flight_than_1f1b_on_its_first_device() -> None:
    for devices, batches in itertools.product(range(1, 6), range(1, 10)):
        peak = in_flight(PipelineSchedule.ONE_F_ONE_B, devices, batches).max()
        assert in_flight(PipelineSchedule.ZERO_BUBBLE, devices, batches).max() == peak


def test_an_interleaved_schedule_needs_a_multiple_of_its_devices() -> None:
    with pytest.raises(PlacementError, match="needs a multiple of 4 microbatches per pipeline, not 6"):
        pipeline_order(PipelineSchedule.INTERLEAVED, 4, 6, 2)


def test_dualpipe_v_needs_two_microbatches_for_every_device() -> None:
    with pytest.raises(PlacementError, match="needs at least 8 microbatches per pipeline, not 7"):
        pipeline_order(PipelineSchedule.DUAL_PIPE_V, 4, 7, 2)


def test_v_shapes_keep_as_much_on_every_device() -> None:
    for schedule in (PipelineSchedule.ZERO_BUBBLE_V, PipelineSchedule.DUAL_PIPE_V):
        for devices in range(1, 6):
            assert set(in_flight(schedule, devices, 3 * devices, 2).sum(axis=1).tolist()) == {2 * devices + 1}


def test_only_interleaved_schedules_have_chunks() -> None:
    with pytest.raises(PlacementError, match="only interleaved schedules have several"):
        pipeline_order(PipelineSchedule.GPIPE, 4, 8, 2)
