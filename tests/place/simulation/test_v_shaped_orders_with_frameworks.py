"""Pipelines in the shape of a V, against torch's own tables of their schedules."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from phaze.parallelism import PipelineSchedule
from phaze.place.simulation.pass_orders import VPass, v_shaped_passes

TABLES: dict[PipelineSchedule, Any] = {
    PipelineSchedule.ZERO_BUBBLE_V: torch_schedules.ScheduleZBVZeroBubble,
    PipelineSchedule.DUAL_PIPE_V: torch_schedules.ScheduleDualPipeV,
}
KINDS = {"F": ("F",), "I": ("B",), "W": ("W",), "B": ("B", "W")}


def torch_passes(schedule: PipelineSchedule, devices: int, batches: int, device: int) -> list[VPass]:
    """A device's row of torch's table, a full backward as its two parts."""
    state = SimpleNamespace(pp_group_size=devices, num_stages=2 * devices, _n_microbatches=batches)
    passes = []
    for action in TABLES[schedule]._calculate_single_rank_operations(state, device):
        for part in () if action is None else action.sub_actions or (action,):
            kinds = KINDS[part.computation_type.value]
            assert schedule.place_of(devices, part.stage_index)[0] == device
            chunk = schedule.place_of(devices, part.stage_index)[1]
            is_whole = len(kinds) > 1
            passes += [(kind, chunk, part.microbatch_index, is_whole and kind == "B") for kind in kinds]
    return passes


@pytest.mark.parametrize("schedule", list(TABLES))
def test_passes_are_those_of_torch_s_tables(schedule: PipelineSchedule) -> None:
    for devices in range(1, 6):
        least = 2 * devices if schedule is PipelineSchedule.DUAL_PIPE_V else 1
        for batches in range(least, 3 * devices + 3):
            for device in range(devices):
                passes = v_shaped_passes(schedule, devices, batches, device)
                assert passes == torch_passes(schedule, devices, batches, device)
