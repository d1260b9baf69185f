"""Capabilities are validated and say what may be combined."""

from typing import Any

import pytest

from phaze.parallelism import PIPELINE_SCHEDULES, ZERO_STAGES, Parallelism, PipelineSchedule
from phaze.plan.handover import axes_not_run
from phaze.targets import Capabilities


def test_the_modest_default_runs_no_pipeline() -> None:
    assert not any(Capabilities().supports(schedule, 0) for schedule in PIPELINE_SCHEDULES)


def test_everything_restricts_nothing_but_a_schedule_that_holds_more_for_nothing() -> None:
    everything = Capabilities.everything()
    schedules = {kind for kind in PIPELINE_SCHEDULES if all(everything.supports(kind, stage) for stage in ZERO_STAGES)}
    assert set(PIPELINE_SCHEDULES) - schedules == {PipelineSchedule.EAGER}


def test_an_excluded_pair_is_not_supported_but_its_halves_are() -> None:
    capabilities = Capabilities(
        schedules=frozenset({PipelineSchedule.ZERO_BUBBLE, PipelineSchedule.GPIPE}),
        zero_stages=frozenset({0, 3}),
        excluded_pairs=frozenset({(PipelineSchedule.ZERO_BUBBLE, 3)}),
    )
    assert not capabilities.supports(PipelineSchedule.ZERO_BUBBLE, 3)
    assert capabilities.supports(PipelineSchedule.ZERO_BUBBLE, 0)
    assert capabilities.supports(PipelineSchedule.GPIPE, 3)


def test_a_schedule_may_need_as_many_microbatches_as_stages() -> None:
    capabilities = Capabilities(needs_micro_batches_per_stage=frozenset({PipelineSchedule.ONE_F_ONE_B}))
    assert capabilities.fills_stages(PipelineSchedule.ONE_F_ONE_B, micro_batches=2, stages=2)
    assert not capabilities.fills_stages(PipelineSchedule.ONE_F_ONE_B, micro_batches=1, stages=2)
    assert capabilities.fills_stages(PipelineSchedule.GPIPE, micro_batches=1, stages=2)


def test_names_become_members_and_unknown_ones_are_refused() -> None:
    assert Capabilities(schedules={"1f1b"}).schedules == {PipelineSchedule.ONE_F_ONE_B}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'2f2b' is not a valid PipelineSchedule"):
        Capabilities(schedules={"2f2b"})  # type: ignore[arg-type]


@pytest.mark.parametrize("stages", [frozenset({4}), frozenset({0, -1})])
def test_a_zero_stage_that_does_not_exist_is_refused(stages: frozenset[int]) -> None:
    with pytest.raises(ValueError, match="expected some of"):
        Capabilities(zero_stages=stages)


def test_no_zero_stage_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Capabilities(zero_stages=frozenset())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"allows_uneven_stages": True}, "even stages of one tp"),
        ({"schedules": frozenset({PipelineSchedule.INTERLEAVED})}, "one on each device"),
        ({"zero_stages": frozenset({0, 2})}, "ZeRO-0 and 1"),
    ],
)
def test_a_target_spreads_ends_only_over_equal_stages_without_shards(choices: dict[str, Any], message: str) -> None:
    fixed = {"schedules": frozenset({PipelineSchedule.GPIPE}), "spreads_ends": True}
    Capabilities(**fixed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        Capabilities(**(fixed | choices))


def test_axes_that_a_target_does_not_have_are_named() -> None:
    strategy = Parallelism(dp=4, cp=2, ep=2, shard=4, zero=3)
    assert axes_not_run(strategy, Capabilities()) == [
        "context parallelism (cp 2)",
        "expert parallelism (ep 2)",
        "ZeRO over 4 of 8 devices",
    ]
    assert axes_not_run(strategy, Capabilities.everything()) == []
    assert axes_not_run(Parallelism(dp=4, shard=2), Capabilities()) == []
