"""The simulation, against textbook formulas and a plain simulator; bounds stay below it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from phaze.parallelism import PIPELINE_SCHEDULES, PipelineSchedule
from phaze.place.simulation.event_simulation import StageTimes, compile_order, simulate, simulated_s
from phaze.place.simulation.pass_orders import pipeline_order
from phaze.verify.plain_pipeline import PlainStage, plain_simulation

NAMES = ("forward_s", "backward_s", "weight_s", "exposed_s", "reduction_s", "tie_s", "finish_s")


def random_times(seed: int, candidates: int, devices: int, chunks: int, splits: bool) -> StageTimes:
    generator = np.random.default_rng(seed)
    values = {name: generator.uniform(0.1, 1, (candidates, devices, chunks)) for name in NAMES}
    if not splits:
        values["weight_s"][:] = 0
    values["exposed_s"] = np.minimum(values["exposed_s"], values["reduction_s"])
    values["tie_s"][generator.random((candidates, devices, chunks)) < 0.7] = 0
    return StageTimes(**values)


def plain_stages(schedule: PipelineSchedule, times: StageTimes, candidate: int) -> list[PlainStage]:
    _, devices, chunks = times.forward_s.shape
    places = [schedule.place_of(devices, stage) for stage in range(devices * chunks)]
    return [
        PlainStage(**{name: float(getattr(times, name)[candidate, device, chunk]) for name in NAMES})
        for device, chunk in places
    ]


shapes = st.tuples(
    st.sampled_from(list(PIPELINE_SCHEDULES)),
    st.integers(1, 5),
    st.integers(1, 10),
    st.integers(2, 3),
    st.integers(0, 999),
)


def shaped(shape: tuple[PipelineSchedule, int, int, int, int]) -> tuple[PipelineSchedule, int, int, int, int]:
    schedule, devices, batches, chunks, seed = shape
    interleaved = schedule is PipelineSchedule.INTERLEAVED
    batches = 2 * devices + batches if schedule is PipelineSchedule.DUAL_PIPE_V else batches
    chunks = schedule.chunk_counts((chunks,))[0]
    return schedule, devices, batches * devices if interleaved else batches, chunks, seed


@given(shapes)
def test_the_plain_simulator_agrees(shape: tuple[PipelineSchedule, int, int, int, int]) -> None:
    schedule, devices, batches, chunks, seed = shaped(shape)
    times = random_times(seed, 3, devices, chunks, schedule.splits_backward)
    program = compile_order(pipeline_order(schedule, devices, batches, chunks))
    result = simulate(program, times)
    assert simulated_s(program, times).tolist() == result.time_s.tolist()
    for candidate in range(3):
        plain = plain_simulation(schedule, devices, batches, plain_stages(schedule, times, candidate))
        assert result.time_s[candidate] == pytest.approx(plain, rel=1e-12)


@examples(50)
@given(shapes, st.sampled_from(NAMES))
def test_a_shorter_duration_never_makes_the_batch_longer(
    shape: tuple[PipelineSchedule, int, int, int, int], name: str
) -> None:
    schedule, devices, batches, chunks, seed = shaped(shape)
    times = random_times(seed, 1, devices, chunks, schedule.splits_backward)
    program = compile_order(pipeline_order(schedule, devices, batches, chunks))
    before = simulate(program, times).time_s
    getattr(times, name)[...] *= 0.7
    assert simulate(program, times).time_s <= before * (1 + 1e-12)


def equal_stages(devices: int, chunks: int, forward: float, backward: float, weight: float) -> StageTimes:
    zeros = np.zeros((1, devices, chunks))
    return StageTimes(
        forward_s=zeros + forward,
        backward_s=zeros + backward,
        weight_s=zeros + weight,
        exposed_s=zeros,
        reduction_s=zeros,
        tie_s=zeros,
        finish_s=zeros,
    )


@pytest.mark.parametrize("devices", [1, 2, 4, 7])
@pytest.mark.parametrize("batches", [1, 4, 8, 21])
def test_gpipe_and_1f1b_with_equal_stages_equal_their_textbook_formula(devices: int, batches: int) -> None:
    for schedule in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B):
        program = compile_order(pipeline_order(schedule, devices, batches))
        time_s = simulate(program, equal_stages(devices, 1, 1.0, 2.0, 0.0)).time_s[0]
        assert time_s == pytest.approx((batches + devices - 1) * 3.0)


@pytest.mark.parametrize(("devices", "groups", "chunks"), [(2, 1, 2), (4, 2, 2), (4, 5, 4), (3, 4, 3)])
def test_interleaving_divides_the_bubble_by_the_chunks(devices: int, groups: int, chunks: int) -> None:
    batches = devices * groups
    program = compile_order(pipeline_order(PipelineSchedule.INTERLEAVED, devices, batches, chunks))
    time_s = simulate(program, equal_stages(devices, chunks, 1 / chunks, 2 / chunks, 0.0)).time_s[0]
    assert time_s == pytest.approx(batches * 3 + (devices - 1) * 3 / chunks)


@pytest.mark.parametrize(("devices", "batches"), [(2, 4), (4, 8), (4, 16), (6, 12)])
def test_zero_bubble_leaves_a_third_of_the_bubble(devices: int, batches: int) -> None:
    program = compile_order(pipeline_order(PipelineSchedule.ZERO_BUBBLE, devices, batches))
    time_s = simulate(program, equal_stages(devices, 1, 1.0, 1.0, 1.0)).time_s[0]
    assert time_s == pytest.approx(batches * 3 + (devices - 1) * (1 + 1 - 1))


@pytest.mark.parametrize(("devices", "batches"), [(2, 4), (4, 8), (4, 16), (6, 12)])
def test_zb_v_with_equal_passes_waits_for_the_first_forwards_alone(devices: int, batches: int) -> None:
    program = compile_order(pipeline_order(PipelineSchedule.ZERO_BUBBLE_V, devices, batches, 2))
    time_s = simulate(program, equal_stages(devices, 2, 1.0, 1.0, 1.0)).time_s[0]
    assert time_s == pytest.approx(batches * 6 + devices - 1)


@examples(50)
@given(shapes)
def test_passes_of_a_device_do_not_overlap_and_follow_what_they_wait_for(
    shape: tuple[PipelineSchedule, int, int, int, int],
) -> None:
    schedule, devices, batches, chunks, seed = shaped(shape)
    times = random_times(seed, 1, devices, chunks, schedule.splits_backward)
    order = pipeline_order(schedule, devices, batches, chunks)
    ends = simulate(compile_order(order), times).pass_end_s[0]
    durations = np.stack([times.forward_s[0], times.backward_s[0], times.weight_s[0]])
    taken = durations[order.kind, np.arange(devices)[:, None], order.chunk]
    assert (np.diff(ends, axis=1) >= taken[:, 1:] - 1e-9).all()
    end = {}
    for device in range(devices):
        for step in range(ends.shape[1]):
            stage = order.stage[device, step]
            end[order.kind[device, step], stage, order.micro_batch[device, step]] = (
                ends[device, step],
                taken[device, step],
            )
    for (kind, stage, batch), (finished, duration) in end.items():
        awaited = (kind, stage - 1, batch) if kind == 0 else (kind, stage + 1, batch)
        if kind < 2 and awaited in end:  # a whole backward ends even later than its part for inputs
            assert finished - duration >= end[awaited][0] - 1e-9
