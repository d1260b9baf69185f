"""The verifier rejects each kind of broken schedule and accepts what keeps the rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from phaze.errors import ScheduleError
from phaze.schedule import (
    Job,
    Resource,
    Schedule,
    ScheduledJob,
    ScheduleStatus,
    SchedulingProblem,
    breaches,
    verify_schedule,
)

PROBLEM = SchedulingProblem(
    jobs=(
        Job("mm", Resource.TENSOR, 4.0, 2.0),
        Job("norm", Resource.VECTOR, 3.0, 2.0),
        Job("fused", Resource.BOTH, 5.0, 3.0),
        Job("view", Resource.NONE, 0.0),
        Job("reduce", Resource.LINK, 2.0),
        Job("gather", Resource.LINK, 1.0),
    ),
    edges=((0, 3), (3, 2)),
    tensor_cores=2,
    vector_cores=2,
)
GOOD = Schedule(
    problem=PROBLEM,
    jobs=(
        ScheduledJob(job=0, start_s=0.0, end_s=2.0, is_spread=True),
        ScheduledJob(job=1, start_s=2.0, end_s=5.0, vector_core=0),
        ScheduledJob(job=2, start_s=2.0, end_s=7.0, tensor_core=1, vector_core=1),
        ScheduledJob(job=3, start_s=2.0, end_s=2.0),
        ScheduledJob(job=4, start_s=0.0, end_s=2.0),
        ScheduledJob(job=5, start_s=2.0, end_s=3.0),
    ),
    makespan_s=7.0,
    bound_s=5.0,
    status=ScheduleStatus.LIMIT,
    method="by hand",
)


def with_job(number: int, **changes: object) -> Callable[[Schedule], Schedule]:
    def change(schedule: Schedule) -> Schedule:
        jobs = list(schedule.jobs)
        jobs[number] = replace(jobs[number], **changes)  # type: ignore[arg-type]
        return replace(schedule, jobs=tuple(jobs))

    return change


BROKEN: dict[str, tuple[Callable[[Schedule], Schedule], str]] = {
    "job missing": (lambda s: replace(s, jobs=s.jobs[:-1]), "not each of 0..5 once"),
    "job twice": (lambda s: replace(s, jobs=(*s.jobs[:-1], s.jobs[0])), "not each of 0..5 once"),
    "starts before zero": (with_job(4, start_s=-1.0, end_s=1.0), "'reduce' starts before 0"),
    "no number": (with_job(4, start_s=float("nan")), "'reduce' runs from nan"),
    "too short": (with_job(1, end_s=4.0), "'norm' takes 2.0 s, but 3.0 s on one core"),
    "spread too short": (with_job(0, end_s=1.0), "'mm' takes 1.0 s, but 2.0 s spread"),
    "link spread": (with_job(4, is_spread=True), "'reduce' is spread, which a link op cannot be"),
    "view spread": (with_job(3, is_spread=True), "'view' is spread, which a none op cannot be"),
    "precedence": (with_job(3, start_s=1.0, end_s=1.0), "'view' starts before its predecessor 'mm' ends"),
    "precedence through a view": (with_job(3, start_s=3.0, end_s=3.0), "'fused' starts before its predecessor 'view'"),
    "no core": (with_job(1, vector_core=None), "'norm' is on vector core None; there are 2"),
    "core that is not there": (with_job(1, vector_core=2), "'norm' is on vector core 2; there are 2"),
    "core of the wrong kind": (with_job(1, tensor_core=0), "'norm' names tensor core 0"),
    "spread job with a core": (with_job(0, tensor_core=0), "'mm' names tensor core 0"),
    "unmatched pair": (with_job(2, tensor_core=0), "'fused' is on tensor core 0 and vector core 1, not a pair"),
    "two jobs on one core": (with_job(1, vector_core=1), "'norm' and 'fused' overlap by 3.0 s"),
    "spread job not alone": (with_job(1, start_s=1.0, end_s=4.0), "'mm' and 'norm' overlap by 1.0 s"),
    "two links at once": (with_job(5, start_s=1.5, end_s=2.5), "'reduce' and 'gather' overlap by 0.5 s"),
    "makespan claimed too short": (lambda s: replace(s, makespan_s=6.0), "the makespan is claimed as 6.0"),
    "bound above the makespan": (lambda s: replace(s, bound_s=8.0), "the bound 8.0 exceeds the makespan 7.0"),
    "infeasible with jobs": (
        lambda s: replace(s, status=ScheduleStatus.INFEASIBLE),
        "an infeasible answer carries ops",
    ),
}


def test_valid_schedule_passes() -> None:
    assert verify_schedule(GOOD) is GOOD


@pytest.mark.parametrize("name", BROKEN)
def test_broken_schedule_is_rejected(name: str) -> None:
    change, message = BROKEN[name]
    texts = list(breaches(change(GOOD)))
    assert any(message in text for text in texts), texts
    with pytest.raises(ScheduleError, match="the by hand schedule breaks its problem"):
        verify_schedule(change(GOOD))


def test_without_exclusivity_only_ops_of_the_same_kind_are_excluded() -> None:
    shared = replace(PROBLEM, intra_op_exclusive=False)
    early = with_job(1, start_s=0.0, end_s=3.0)(replace(GOOD, problem=shared))
    assert list(breaches(early)) == []
    spread_norm = with_job(1, is_spread=True, start_s=2.0, end_s=4.0, vector_core=None)(replace(GOOD, problem=shared))
    assert any("'norm' and 'fused' overlap" in text for text in breaches(spread_norm))
