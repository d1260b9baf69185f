"""The plain code agrees with the placement that the search made, on its own terms."""

import pytest

from phaze.verify.plain_pipeline import PlainStage, plain_in_flight, plain_order, plain_simulation


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 1), (2, 5), (4, 4), (4, 9)])
def test_gpipe_and_1f1b_of_equal_stages_take_the_textbook_s_time(pp: int, micro_batches: int) -> None:
    stages = [PlainStage(forward_s=1.0, backward_s=2.0) for _ in range(pp)]
    for schedule in ("gpipe", "1f1b"):
        assert plain_simulation(schedule, pp, micro_batches, stages) == 3.0 * (micro_batches + pp - 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "interleaved-1f1b"])
@pytest.mark.parametrize("device", range(3))
def test_every_pass_runs_once(schedule: str, device: int) -> None:
    chunks = 2 if schedule == "interleaved-1f1b" else 1
    passes = plain_order(schedule, 3, 6, chunks, device)
    kinds = "FBW" if schedule == "zero-bubble" else "FB"
    assert len(set(passes)) == len(passes) == len(kinds) * 6 * chunks


def test_1f1b_keeps_as_many_micromicro_batches_as_stages_are_left_and_gpipe_all() -> None:
    assert [plain_in_flight("1f1b", 4, 8, 1, device, 0) for device in range(4)] == [4, 3, 2, 1]
    assert [plain_in_flight("gpipe", 4, 8, 1, device, 0) for device in range(4)] == [8] * 4
